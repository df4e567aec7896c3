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
                // An image is not read.
                let text = fs::read(entry.path()).unwrap();
                let text = String::from_utf8_lossy(&text).into_owned();
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

/// The folders of the client crate, from what is public down to the socket. Beneath all of them are
/// the files beside them.
const LAYERS: &[&str] = &[
    "blocking", "quorum", "api", "flows", "ledger", "topology", "wire",
];

/// The layer of a module of the client crate; none is beneath all.
fn layer(module: &str) -> usize {
    let layer = LAYERS.iter().position(|layer| *layer == module);
    layer.unwrap_or(LAYERS.len())
}

#[test]
fn the_layers_of_the_client_import_only_from_those_below() {
    let sources = format!("client{0}src{0}", std::path::MAIN_SEPARATOR);
    let mut upward = Vec::new();
    let mut imports = 0;
    for (path, text) in ours(&[".rs"]) {
        let Some((_, file)) = path.split_once(&sources) else {
            continue;
        };
        let module = file.trim_end_matches(".rs");
        let module = module.split(std::path::MAIN_SEPARATOR).next().unwrap();
        // What is public is put together there, and tests may use what they like.
        let code = text.split("#[cfg(test)]").next().unwrap();
        if module == "lib" {
            continue;
        }
        let code = code
            .lines()
            .filter(|line| !line.trim_start().starts_with("//"));
        for line in code {
            for import in line.split("crate::").skip(1) {
                let end = import.find(|c: char| c != '_' && !c.is_alphanumeric());
                let imported = &import[..end.unwrap_or(import.len())];
                imports += 1;
                if imported != module
                    && layer(imported) <= layer(module)
                    && layer(imported) < LAYERS.len()
                {
                    upward.push(format!("{file}: {}", line.trim()));
                }
            }
        }
    }
    assert!(imports > 100, "nothing found is nothing looked at");
    assert!(upward.is_empty(), "{upward:#?}");
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
fn tests_that_the_documents_name_exist() {
    let code: String = ours(&[".rs"]).into_iter().map(|(_, text)| text).collect();
    for (path, at_least) in [("docs/redisson.md", 20), ("docs/guarantees.md", 50)] {
        let page = read(path);
        let is_name = |word: &&str| {
            let of_a_name = |char: char| char.is_ascii_lowercase() || "_0123456789".contains(char);
            word.matches('_').count() > 2 && word.chars().all(of_a_name)
        };
        // Not the names of metrics.
        let names = page.split('`').skip(1).step_by(2).filter(is_name);
        let names: Vec<_> = names.filter(|name| !name.starts_with("rlock_")).collect();
        assert!(names.len() > at_least, "{path}: {names:?}");
        for name in names {
            assert!(
                code.contains(&format!("fn {name}()")),
                "{path}: no test {name}"
            );
        }
    }
}

#[test]
fn files_and_targets_that_the_documents_name_exist() {
    let files: Vec<_> = ours(&[""]).into_iter().map(|(path, _)| path).collect();
    let makefile = read("Makefile");
    let mut missing = Vec::new();
    for (path, page) in ours(&[".md"]) {
        for code in page.split('`').skip(1).step_by(2) {
            let word = code.split_ascii_whitespace().next().unwrap_or_default();
            let is_file = [".rs", ".md", ".toml"]
                .iter()
                .any(|ending| word.ends_with(ending));
            let is_plain = word
                .chars()
                .all(|char| char.is_ascii_alphanumeric() || "/_-.".contains(char));
            let in_a_folder = ["scripts/", "tests/", "docs/", "module/", "client/"];
            let in_a_folder = in_a_folder.iter().any(|folder| word.starts_with(folder));
            if is_plain && in_a_folder && !top().join(word).exists()
                || is_plain && is_file && !files.iter().any(|file| file.ends_with(word))
            {
                missing.push(format!("{path}: {code}"));
            }
            if let Some(target) = code.strip_prefix("make ") {
                let target = target.split(' ').next().unwrap_or_default();
                if !makefile.contains(&format!("\n{target}:")) {
                    missing.push(format!("{path}: {code}"));
                }
            }
        }
    }
    assert!(missing.is_empty(), "{missing:#?}");
}

#[test]
fn links_of_the_documents_lead_somewhere() {
    let mut dead = Vec::new();
    let mut followed = 0;
    for (path, page) in ours(&[".md"]) {
        let links = page
            .split("](")
            .skip(1)
            .filter_map(|rest| rest.split(')').next());
        for link in links {
            // Elsewhere; or names of the crate in its README, which rustdoc sees to.
            let is_name = |link: &str| !link.contains(['.', '/']) && !link.starts_with('#');
            if link.starts_with("http") || is_name(link.split('#').next().unwrap_or_default()) {
                continue;
            }
            followed += 1;
            let (file, anchor) = link.split_once('#').unwrap_or((link, ""));
            let target = if file.is_empty() {
                PathBuf::from(&path)
            } else {
                Path::new(&path).parent().unwrap().join(file)
            };
            let text = fs::read_to_string(&target).unwrap_or_default();
            if !target.exists()
                || !anchor.is_empty() && !anchors(&text).contains(&anchor.to_owned())
            {
                dead.push(format!("{path}: {link}"));
            }
        }
    }
    assert!(followed > 40, "{followed} links");
    assert!(dead.is_empty(), "{dead:#?}");
}

/// What a link says that leads to a heading: its letters, digits and hyphens, with one for a blank.
fn anchors(text: &str) -> Vec<String> {
    let headings = text.lines().filter(|line| line.starts_with('#'));
    headings
        .map(|line| {
            line.trim_start_matches('#')
                .trim()
                .to_lowercase()
                .replace(' ', "-")
        })
        .map(|heading| {
            let kept = heading
                .chars()
                .filter(|char| char.is_alphanumeric() || "-_".contains(*char));
            kept.collect()
        })
        .collect()
}

#[test]
fn figures_in_the_documents_are_those_that_were_measured() {
    let unfolded = |path: &str| -> String {
        let text = read(path).replace('`', "");
        text.split_whitespace().collect::<Vec<_>>().join(" ")
    };
    let readme = unfolded("README.md");
    let tables = read("docs/bench/tables.md");
    let summary: Vec<_> = tables
        .lines()
        .filter(|line| line.starts_with("- "))
        .collect();
    // Also those that are to our disadvantage.
    assert!(summary.len() > 3, "{summary:#?}");
    for line in summary {
        let line = line.replace('`', "");
        assert!(readme.contains(&line), "README.md does not say: {line}");
    }
    let page = read("docs/performance.md");
    let rows: Vec<_> = page.lines().map(|line| line.replace(',', "")).collect();
    let figures = read("tests/instructions/figures.txt");
    for line in figures.lines().skip(1) {
        let (figure, what) = line.trim().split_once("  ").expect("a figure, and of what");
        let row = format!("| {what} | {figure} |").replace(',', "");
        assert!(
            rows.iter().any(|line| line.starts_with(&row)),
            "docs/performance.md does not say: {row}"
        );
    }
}

/// Where the crate is published its README stands alone: its links lead to docs.rs, and nothing of
/// its examples is hidden. What they lead to is looked for in the sources.
#[test]
fn the_crates_readme_links_to_what_there_is_and_hides_nothing() {
    let readme = read("client/README.md");
    let page = "https://docs.rs/rlock-client/latest/rlock_client/";
    let links: Vec<_> = readme
        .lines()
        .filter_map(|line| line.split_once(page))
        .collect();
    assert!(links.len() > 20);
    let of_client = |(path, _): &(String, String)| path.contains("/client/src/");
    let sources = ours(&[".rs"]).into_iter().filter(of_client);
    let sources: String = sources.map(|(_, text)| text).collect();
    for (name, link) in links {
        let (item, anchor) = link.split_once(".html").expect("a page");
        let item = item.replace('.', " ");
        assert!(
            sources.contains(&format!("pub {item}")),
            "{name} is no {item}"
        );
        if let Some(method) = anchor.strip_prefix("#method.") {
            let is_there = [
                format!("fn {method}("),
                format!("fn {method}<"),
                format!(" {method};"),
                format!(" {method}:"),
            ];
            assert!(is_there.iter().any(|of| sources.contains(of)), "{name}");
        }
    }
    let mut in_rust = false;
    for line in readme.lines() {
        in_rust = if line.starts_with("```") {
            line.starts_with("```rust")
        } else {
            in_rust
        };
        assert!(!(in_rust && line.starts_with("# ")), "hidden: {line}");
    }
    for link in readme.split("](").skip(1) {
        let to = link.split(')').next().unwrap_or_default();
        assert!(
            to.starts_with('#') || to.starts_with("https://"),
            "leads nowhere there: {to}"
        );
    }
}
