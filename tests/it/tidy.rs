//! Reads our own tree.

use std::fs;
use std::path::{Path, PathBuf};

use rlock_tests::Server;

const COLUMNS: usize = 100;
const CODE: &[&str] = &[".rs", ".c", ".java", ".py", ".mjs", ".go"];
const SETTINGS: &[&str] = &[".toml", ".sh", ".conf", "Makefile"];

/// The top of the tree.
fn top() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("..")
}

/// A file of the tree, by its path from the top.
#[track_caller]
pub(super) fn read(path: &str) -> String {
    fs::read_to_string(top().join(path)).unwrap_or_else(|error| panic!("{path}: {error}"))
}

/// All files of ours whose names end like one of `endings`, with their text.
fn ours(endings: &[&str]) -> Vec<(String, String)> {
    let mut files = Vec::new();
    let mut folders = vec![top()];
    while let Some(folder) = folders.pop() {
        for entry in fs::read_dir(&folder).unwrap().map(Result::unwrap) {
            let name = entry.file_name().into_string().unwrap();
            if entry.file_type().unwrap().is_dir() {
                let foreign = ["target", ".git"].contains(&name.as_str());
                folders.extend((!foreign).then(|| entry.path()));
            } else if endings.iter().any(|ending| name.ends_with(ending)) {
                let text = fs::read_to_string(entry.path()).unwrap();
                files.push((entry.path().display().to_string(), text));
            }
        }
    }
    assert!(!files.is_empty(), "nothing found is nothing looked at");
    files
}

/// Every line that `is_bad`, with its place.
fn lines(files: &[(String, String)], is_bad: impl Fn(&str) -> bool) -> Vec<String> {
    let numbered = files.iter().flat_map(|(path, text)| {
        text.lines()
            .enumerate()
            .map(move |(index, line)| (path, index + 1, line))
    });
    let bad = numbered.filter(|(_, _, line)| is_bad(line));
    bad.map(|(path, number, line)| format!("{path}:{number}: {line}"))
        .collect()
}

#[test]
fn code_fits_a_hundred_columns() {
    let long = lines(&ours(CODE), |line| line.chars().count() > COLUMNS);
    assert!(long.is_empty(), "{long:#?}");
}

#[test]
fn no_line_ends_in_blanks() {
    let files = ours(&[CODE, SETTINGS].concat());
    let blank = lines(&files, |line| line.ends_with([' ', '\t', '\r']));
    assert!(blank.is_empty(), "{blank:#?}");
}

#[test]
fn nothing_was_left_for_later() {
    // Put together here, so that this file does not name what it forbids.
    let words = [
        ["TO", "DO"],
        ["FIX", "ME"],
        ["XX", "X"],
        ["HA", "CK"],
        ["dbg", "!("],
    ];
    let words = words.map(|halves| halves.concat());
    let left = lines(&ours(&[CODE, SETTINGS, &[".md"]].concat()), |line| {
        words.iter().any(|word| line.contains(word))
    });
    assert!(left.is_empty(), "{left:#?}");
}

#[test]
fn no_path_of_somebodys_machine_is_written_down() {
    let homes = [["/ho", "me/"], ["/ro", "ot/"]].map(|halves| halves.concat());
    let found = lines(&ours(&[CODE, SETTINGS, &[".md"]].concat()), |line| {
        homes.iter().any(|home| line.contains(home))
    });
    assert!(found.is_empty(), "{found:#?}");
}

#[test]
fn every_command_has_a_test_of_its_replies_and_is_in_the_readme() {
    let server = Server::start();
    let tests = read("tests/it/commands.rs");
    let readme = read("README.md");
    for command in super::commands_doc::commands(&mut server.connect()) {
        assert!(
            tests.contains(&command),
            "{command} has no test in commands.rs"
        );
        assert!(
            readme.contains(&command),
            "README.md does not name {command}"
        );
    }
}

#[test]
fn tests_that_the_page_on_redisson_names_exist() {
    let tests = ours(&[".rs"]).into_iter();
    let tests: String = tests
        .filter(|(path, _)| path.contains("/interop/"))
        .map(|(_, text)| text)
        .collect();
    let page = read("docs/redisson.md");
    let is_name = |word: &&str| {
        let of_a_name = |char: char| char.is_ascii_lowercase() || char == '_';
        word.matches('_').count() > 3 && word.chars().all(of_a_name)
    };
    let names: Vec<_> = page.split('`').filter(is_name).collect();
    assert!(names.len() > 20, "{names:?}");
    for name in names {
        assert!(tests.contains(&format!("fn {name}()")), "no test {name}");
    }
}
