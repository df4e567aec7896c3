//! docs/commands.md against what the server is told (`COMMAND DOCS`).
//!
//! Each command has a section `## RLOCK.X`. The first line of its first fenced block is the
//! syntax, and the section repeats the summary.

use std::collections::{BTreeMap, BTreeSet};

use rlock_tests::{Conn, Reply, Server};

#[test]
fn every_command_has_its_section_and_every_section_its_command() {
    let server = Server::start();
    let documented: BTreeSet<_> = sections().into_keys().collect();
    assert_eq!(documented, commands(&mut server.connect()));
}

#[test]
fn the_syntax_is_the_one_declared() {
    let server = Server::start();
    let mut conn = server.connect();
    for (name, section) in sections() {
        let docs = docs_of(&mut conn, &name);
        let arguments = docs.keys().contains(&"arguments".to_owned());
        let arguments = if arguments {
            docs.get("arguments").array()
        } else {
            &[]
        };
        let declared = [vec![name.clone()], arguments.iter().map(syntax).collect()].concat();
        let mut lines = section
            .lines()
            .skip_while(|line| !line.starts_with("```"))
            .skip(1);
        assert_eq!(
            lines.next().unwrap_or(""),
            declared.join(" "),
            "in the section {name}"
        );
    }
}

#[test]
fn the_summary_is_the_one_declared() {
    let server = Server::start();
    let mut conn = server.connect();
    for (name, section) in sections() {
        let summary = docs_of(&mut conn, &name).get("summary").text();
        let summary = summary.trim_end_matches('.').to_lowercase();
        let section = section
            .split_whitespace()
            .collect::<Vec<_>>()
            .join(" ")
            .to_lowercase();
        assert!(
            section.contains(&summary),
            "the section {name} does not say: {summary}"
        );
    }
}

/// The sections of docs/commands.md that are about a command, by its name.
fn sections() -> BTreeMap<String, String> {
    let document = super::tidy::read("docs/commands.md");
    let parts = document.split("\n## ").skip(1);
    let titled = parts.filter_map(|part| part.split_once('\n'));
    let about_commands = titled.filter(|(title, _)| title.trim_matches('`').starts_with("RLOCK."));
    about_commands
        .map(|(title, text)| (title.trim_matches('`').trim().to_owned(), text.to_owned()))
        .collect()
}

/// The names of the module's commands, in capitals.
pub(super) fn commands(conn: &mut Conn) -> BTreeSet<String> {
    let names = conn.run("COMMAND LIST FILTERBY PATTERN rlock.*").texts();
    names.iter().map(|name| name.to_uppercase()).collect()
}

fn docs_of(conn: &mut Conn, name: &str) -> Reply {
    let name = name.to_lowercase();
    conn.run(format!("COMMAND DOCS {name}")).get(&name).clone()
}

/// One argument as it stands in a line of syntax.
fn syntax(argument: &Reply) -> String {
    let keys = argument.keys();
    let has = |key: &str| keys.iter().any(|found| found == key);
    let below = |joint: &str| {
        let parts = argument.get("arguments").array().iter().map(syntax);
        parts.collect::<Vec<_>>().join(joint)
    };
    let kind = argument.get("type").text();
    let value = match kind.as_str() {
        "pure-token" => String::new(),
        "block" => below(" "),
        "oneof" => below(" | "),
        _ => argument.get("name").text(),
    };
    let token = if has("token") {
        argument.get("token").text()
    } else {
        String::new()
    };
    let both = format!("{token} {value}").trim().to_owned();
    let flags = if has("flags") {
        argument.get("flags").texts()
    } else {
        Vec::new()
    };
    if flags.iter().any(|flag| flag == "optional") {
        format!("[{both}]")
    } else if flags.iter().any(|flag| flag == "multiple") {
        format!("{both} [{both} ...]")
    } else {
        both
    }
}
