//! Reads our own tree.

use std::collections::{BTreeMap, BTreeSet};
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
    // Put together here, so that this file does not contain the forbidden words.
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

/// A crate of ours, whose folders are floors.
struct Crate {
    sources: &'static str,
    /// Its folders and files, from the top down. Those that are not named are beneath all.
    floors: &'static [&'static str],
    /// Whether no file imports from the root of the crate, and `lib.rs` only lists.
    has_no_root: bool,
}

const CRATES: [Crate; 3] = [
    Crate {
        sources: "module/core/src",
        floors: &["turn", "decisions", "memory", "interface", "values"],
        has_no_root: true,
    },
    Crate {
        sources: "module/src",
        floors: &[
            "module", "info", "commands", "driving", "writing", "reading", "memory", "config",
            "clock", "ffi",
        ],
        has_no_root: true,
    },
    Crate {
        sources: "client/src",
        floors: &["blocking", "quorum", "api", "locks", "topology", "wire"],
        has_no_root: false,
    },
];

impl Crate {
    /// Its files but `lib.rs`: the names of the modules down to each, and its code without tests.
    /// Tests may import anything.
    fn files(&self) -> Vec<(Vec<String>, String)> {
        let sources = self.sources.replace('/', std::path::MAIN_SEPARATOR_STR);
        let sources = format!("{sources}{}", std::path::MAIN_SEPARATOR);
        let mut files = Vec::new();
        for (path, text) in ours(&[".rs"]) {
            let relative = path.strip_prefix(&top().display().to_string());
            let relative = relative
                .unwrap()
                .trim_start_matches(std::path::MAIN_SEPARATOR);
            let Some(file) = relative.strip_prefix(&sources) else {
                continue;
            };
            let names = file.trim_end_matches(".rs");
            let names = names.split(std::path::MAIN_SEPARATOR).map(str::to_owned);
            let mut names: Vec<_> = names.collect();
            names.pop_if(|name| name == "mod");
            if names != ["lib"] {
                files.push((names, code_of(&text)));
            }
        }
        files
    }

    /// The floor of one of its modules, by number from the top.
    fn floor(&self, module: &str) -> usize {
        let floor = self.floors.iter().position(|floor| *floor == module);
        floor.unwrap_or(self.floors.len())
    }
}

/// A text of Rust without comments, and without the tests at its end.
fn code_of(text: &str) -> String {
    let mut tests = ["mod tests {", "pub(crate) mod tests {"].into_iter();
    let code = tests.find_map(|tests| Some(text.split_once(&format!("#[cfg(test)]\n{tests}"))?.0));
    let code = code.unwrap_or(text);
    let lines = code.split_inclusive('\n');
    lines
        .filter(|line| !line.trim_start().starts_with("//"))
        .collect()
}

/// The paths from the root of the crate in a module's code: of all that the code names by `crate::`
/// or `super::`.
fn imports<'a>(names: &'a [String], code: &'a str) -> Vec<Vec<&'a str>> {
    let mut found = Vec::new();
    for word in ["crate::", "super::"] {
        for (at, _) in code.match_indices(word) {
            let before = code[..at].chars().next_back();
            if before.is_some_and(|c| "_$:".contains(c) || c.is_alphanumeric()) {
                continue;
            }
            let mut path = &code[at..];
            let mut above = names;
            while let (Some(rest), [upper @ .., _]) = (path.strip_prefix("super::"), above) {
                (path, above) = (rest, upper);
            }
            if let Some(rest) = path.strip_prefix("crate::") {
                (path, above) = (rest, &[]);
            }
            let from_root =
                |path: Vec<&'a str>| above.iter().map(|name| &**name).chain(path).collect();
            found.extend(paths(path).into_iter().map(from_root));
        }
    }
    found
}

/// `[a, b]` of `a::b`; `[a, b]`, `[a, d]` and `[c]` of `{a::{b, d}, c}`.
fn paths(path: &str) -> Vec<Vec<&str>> {
    if let Some(group) = path.strip_prefix('{') {
        return elements(group).into_iter().flat_map(paths).collect();
    }
    let name = first_name(path);
    match path[name.len()..].strip_prefix("::").map(paths) {
        Some(rest) => {
            let whole = |rest: Vec<_>| [name].into_iter().chain(rest).collect();
            rest.into_iter().map(whole).collect()
        }
        None => vec![vec![name]],
    }
}

/// `a::{b, d}` and `c` of `a::{b, d}, c}`: the elements of a group, up to its end.
fn elements(group: &str) -> Vec<&str> {
    let (mut elements, mut depth, mut start) = (Vec::new(), 0, 0);
    for (at, char) in group.char_indices() {
        match char {
            '{' => depth += 1,
            '}' if depth > 0 => depth -= 1,
            ',' | '}' if depth == 0 => {
                elements.push(group[start..at].trim());
                start = at + 1;
                if char == '}' {
                    break;
                }
            }
            _ => {}
        }
    }
    elements.retain(|element| !element.is_empty());
    elements
}

fn first_name(path: &str) -> &str {
    let end = path.find(|c: char| c != '_' && !c.is_alphanumeric());
    &path[..end.unwrap_or(path.len())]
}

#[test]
fn paths_of_imports_are_read_as_the_compiler_reads_them() {
    let code = "use crate::a::{b, c};\nuse crate::{\n    d::{e, f},\n    g,\n};\nh(crate::i());\n\
                use super::super::j;\nuse super::k;\n$crate::l!();";
    let names = ["m", "n"].map(str::to_owned);
    let found = imports(&names, code);
    let found: Vec<_> = found.iter().map(|path| path.join(" ")).collect();
    assert_eq!(found, ["a b", "a c", "d e", "d f", "g", "i", "j", "m k"]);
}

#[test]
fn imports_between_floors_point_downward() {
    for of in &CRATES {
        let (mut upward, mut seen) = (Vec::new(), 0);
        for (names, code) in of.files() {
            let module = &names[0];
            for path in imports(&names, &code) {
                seen += 1;
                let imported = path[0];
                let (from, to) = (of.floor(module), of.floor(imported));
                if imported != module && to <= from && to < of.floors.len() {
                    upward.push(format!("{} imports {imported}", names.join("/")));
                }
            }
        }
        assert!(seen > 100, "nothing found is nothing looked at");
        assert!(upward.is_empty(), "{}: {upward:#?}", of.sources);
    }
}

/// The file behind each name that a folder's own file passes on, as `use table::{Call, State};`.
fn passed_on(files: &[(Vec<String>, String)]) -> BTreeMap<String, String> {
    let mut passed_on = BTreeMap::new();
    for (folder, code) in files {
        let folder = folder.join("/");
        for statement in code.split(';') {
            let Some((_, import)) = statement.split_once("use ") else {
                continue;
            };
            let Some((file, names)) = import.split_once("::") else {
                continue;
            };
            let names = names.trim_matches(['{', '}', ' ', '\n']).split(',');
            let file = format!("{folder}/{file}");
            if files.iter().any(|(names, _)| names.join("/") == file) {
                passed_on
                    .extend(names.map(|name| (format!("{folder}/{}", name.trim()), file.clone())));
            }
        }
    }
    passed_on
}

/// The imports between files that import each other in a circle.
fn circles(files: &[(Vec<String>, String)]) -> BTreeSet<(String, String)> {
    let known: BTreeSet<String> = files.iter().map(|(names, _)| names.join("/")).collect();
    let passed_on = passed_on(files);
    let file = |path: Vec<&str>| {
        let lengths = (1..=path.len()).rev();
        let mut names = lengths.map(|len| path[..len].join("/"));
        names.find_map(|name| {
            let itself = known.get(&name);
            passed_on.get(&name).or(itself).cloned()
        })
    };
    let mut left = BTreeSet::new();
    for (names, code) in files {
        let from = names.join("/");
        let imported = imports(names, code).into_iter().filter_map(file);
        left.extend(
            imported
                .filter(|to| *to != from)
                .map(|to| (from.clone(), to)),
        );
    }
    // Takes away the imports of files that no file left imports, and of those that import none.
    loop {
        let is_imported = |name: &String| left.iter().any(|(_, to)| to == name);
        let imports_any = |name: &String| left.iter().any(|(from, _)| from == name);
        let is_inside =
            |import: &&(String, String)| is_imported(&import.0) && imports_any(&import.1);
        let inside: BTreeSet<_> = left.iter().filter(is_inside).cloned().collect();
        if inside.len() == left.len() {
            return left;
        }
        left = inside;
    }
}

#[test]
fn files_that_import_each_other_are_found() {
    let file = |name: &str, code: &str| {
        let names = name.split('/').map(str::to_owned).collect();
        (names, code.to_owned())
    };
    let files = [
        file("a/top", "use crate::a::b::C;"),
        file("a/b", "use crate::{a::{c::D, below}, e};"),
        file("a/c", "use super::b;"),
        file("a/below", ""),
        file("e", "use std::fs;"),
        file("f", "mod g; pub(crate) use g::{G, H}; mod i; use i::I;"),
        file("f/g", "use crate::f::I;"),
        file("f/i", "use crate::f::{H};"),
    ];
    let found = circles(&files);
    let found: Vec<_> = found
        .iter()
        .map(|(from, to)| format!("{from} {to}"))
        .collect();
    assert_eq!(found, ["a/b a/c", "a/c a/b", "f/g f/i", "f/i f/g"]);
}

/// The only files that name each other. A client has pending calls, a call has guards, and a guard
/// has its client.
const IN_CIRCLES: [&str; 3] = ["locks/table", "locks/held", "locks/context"];

#[test]
fn no_files_import_each_other_in_a_circle() {
    for of in CRATES {
        let mut files = of.files();
        files.retain(|(names, _)| !IN_CIRCLES.contains(&&*names.join("/")));
        let circles = circles(&files);
        assert!(circles.is_empty(), "{}: {circles:#?}", of.sources);
    }
}

#[test]
fn no_file_imports_from_the_root_of_its_crate() {
    for of in CRATES.iter().filter(|of| of.has_no_root) {
        let files = of.files();
        let is_module = |name: &str| files.iter().any(|(names, _)| names[0] == name);
        let mut from_root = Vec::new();
        for (names, code) in &files {
            let imports = imports(names, code);
            let foreign = imports.iter().filter(|path| !is_module(path[0]));
            from_root.extend(foreign.map(|path| format!("{}: {}", names.join("/"), path[0])));
        }
        assert!(from_root.is_empty(), "{}: {from_root:#?}", of.sources);
    }
}

#[test]
fn lib_files_only_list() {
    for of in CRATES.iter().filter(|of| of.has_no_root) {
        let mut code = code_of(&read(&format!("{}/lib.rs", of.sources)));
        // Attributes: none of ours has a bracket in it.
        while let Some(start) = code.find("#[").or_else(|| code.find("#![")) {
            let end = code[start..].find(']').expect("an end of the attribute");
            code.replace_range(start..=start + end, "");
        }
        let statements = code
            .trim_end()
            .trim_end_matches(';')
            .split(';')
            .map(str::trim);
        let lists = ["mod ", "pub mod ", "pub use "];
        let is_list = |line: &&str| lists.iter().any(|word| line.starts_with(word));
        let others: Vec<_> = statements.filter(|line| !is_list(line)).collect();
        assert!(others.is_empty(), "{}: {others:#?}", of.sources);
    }
}

#[test]
fn every_command_has_a_test_of_its_replies() {
    let server = Server::start();
    let tests = read("tests/it/commands.rs");
    for command in super::commands_doc::commands(&mut server.connect()) {
        assert!(
            tests.contains(&command),
            "{command} has no test in commands.rs"
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

/// The anchors of headings: their letters, digits and hyphens, with a hyphen for a blank.
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
    // The first of the gains and the first of the costs.
    let (gains, costs) = tables.split_once("\nThe costs:\n").unwrap();
    for list in [gains, costs] {
        let first = list.lines().find(|line| line.starts_with("- ")).unwrap();
        let first = first.replace('`', "");
        assert!(readme.contains(&first), "README.md does not say: {first}");
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
/// its examples is hidden. Their targets are looked for in the sources.
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
