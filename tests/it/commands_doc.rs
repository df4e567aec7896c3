//! docs/commands.md against what the server is told (`COMMAND DOCS`).
//!
//! Each command has a section `## RLOCK.X`. The first line of its first fenced block is the
//! syntax, and the section repeats the summary.

use std::collections::{BTreeMap, BTreeSet};

use rlock_tests::{Conn, Reply, Server, until};

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
        let declared = declared_syntax(&mut conn, &name);
        let mut lines = section
            .lines()
            .skip_while(|line| !line.starts_with("```"))
            .skip(1);
        assert_eq!(
            lines.next().unwrap_or(""),
            declared,
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
        let section = unfolded(&section).to_lowercase();
        assert!(
            section.contains(&summary),
            "the section {name} does not say: {summary}"
        );
    }
}

#[test]
fn the_complexity_is_the_one_declared() {
    let server = Server::start();
    let mut conn = server.connect();
    for (name, section) in sections() {
        let declared = docs_of(&mut conn, &name).get("complexity").text();
        let section = unfolded(&section);
        assert!(
            section.contains(&format!("{declared}.")),
            "the section {name} does not say: {declared}."
        );
    }
}

#[test]
fn the_table_of_all_commands_has_the_syntax_that_is_declared() {
    let server = Server::start();
    let mut conn = server.connect();
    let table = tables("docs/commands.md", "## All commands").remove(0);
    let shown: BTreeSet<_> = table.iter().map(|row| row[0].replace('`', "")).collect();
    let declared: BTreeSet<_> = commands(&mut conn)
        .iter()
        .map(|name| declared_syntax(&mut conn, name))
        .collect();
    assert_eq!(shown, declared);
}

/// The parser takes exactly the declared options.
#[test]
fn each_command_takes_the_options_that_it_declares_and_no_other() {
    let server = Server::start();
    let mut conn = server.connect();
    let names = commands(&mut conn);
    let declared: BTreeMap<_, BTreeSet<_>> = names
        .iter()
        .map(|name| (name.clone(), options_of(&declared_syntax(&mut conn, name))))
        .collect();
    // Those that the parser knows as well, so that an undeclared one is found too.
    let options = super::tidy::read("module/core/src/interface/options.rs");
    let (_, listed) = options.split_once("\nnames! {").expect("the list of names");
    let (listed, _) = listed.split_once('}').expect("its end");
    let parser = super::tidy::read("module/core/src/interface/request.rs");
    let quoted = parser.split('"').skip(1).step_by(2);
    let known: BTreeSet<_> = listed.split_whitespace().chain(quoted).collect();
    let words: BTreeSet<_> = declared.values().flatten().map(String::as_str).collect();
    assert_eq!(known, words, "what the parser knows, and what is declared");
    for (name, options) in &declared {
        for word in &words {
            let arguments = match name.as_str() {
                "RLOCK.CANCEL" | "RLOCK.RELEASE" | "RLOCK.GUARD" => "free owner",
                "RLOCK.BREAK" | "RLOCK.INFO" => "free",
                "RLOCK.EVENTS" | "RLOCK.BIND" => "session",
                "RLOCK.LIST" | "RLOCK.LOG" | "RLOCK.SESSIONS" => "",
                "RLOCK.MRELEASE" => "owner 1 free",
                "RLOCK.MACQUIRE" | "RLOCK.MRENEW" => "owner 1000 1 free",
                _ => "free owner 1000",
            };
            let value = if ["READ", "WRITE", "ONCE", "RESET"].contains(word) {
                ""
            } else if *word == "AFTER" {
                "1 1"
            } else {
                "1"
            };
            let rest = match name.as_str() {
                "RLOCK.GUARD" => "CALL PING",
                _ => "",
            };
            let command = format!("{name} {arguments} {word} {value} {rest}");
            let reply = conn.run(command.trim());
            let not_understood = reply.is_error() && {
                let error = reply.error();
                error == format!("ERR unknown option '{word}'")
                    || error.starts_with("ERR wrong number of arguments")
            };
            assert_eq!(
                !not_understood,
                options.contains(*word),
                "{command}: {reply:?}"
            );
            conn.run("FLUSHALL");
        }
    }
}

#[test]
fn the_options_of_the_module_have_their_documented_defaults_bounds_and_units() {
    let server = Server::start();
    let mut conn = server.connect();
    let table = tables("docs/commands.md", "# Options").remove(0);
    let documented: BTreeSet<_> = table.iter().map(|row| row[0].replace('`', "")).collect();
    let told = conn.run("CONFIG GET rlock.*").texts();
    let told: BTreeMap<_, _> = told.chunks(2).map(|pair| (&*pair[0], &*pair[1])).collect();
    let names: BTreeSet<_> = told.keys().map(|&name| name.to_owned()).collect();
    assert_eq!(documented, names);
    let file = super::tidy::read("redis.conf");
    for row in &table {
        let (name, default) = (row[0].replace('`', ""), row[1].replace('`', ""));
        assert_eq!(told[&*name], default.trim_matches('"'), "{name}");
        let (before, _) = file
            .split_once(&format!("# {name} {default}\n"))
            .unwrap_or_else(|| panic!("redis.conf does not have {name} {default}"));
        let said = before
            .rsplit("\n\n")
            .nth(1)
            .expect("what is said of it")
            .replace("\n# ", " ");
        if row[2].contains("patterns") {
            assert!(said.contains("up to 16 "), "redis.conf: {said}");
            continue;
        }
        let mut set = |value: &str| conn.cmd(&["CONFIG", "SET", &name, value]);
        if let Some((least, most)) = row[2].split_once(" to ") {
            let [least, most] = [least, most].map(|bound| bound.parse::<i64>().expect("a number"));
            for (value, is_right) in [
                (least - 1, false),
                (least, true),
                (most, true),
                (most + 1, false),
            ] {
                assert_eq!(set(&value.to_string()) == "OK", is_right, "{name} {value}");
            }
            assert!(
                said.contains(&format!("{least} to {most}")),
                "redis.conf: {said}"
            );
            assert!(
                said.contains(&format!("in {}", row[3])),
                "redis.conf: {said}"
            );
        } else {
            for word in row[2]
                .split('`')
                .filter(|word| word.chars().all(char::is_alphabetic))
            {
                assert!(word.is_empty() || set(word) == "OK", "{name} {word}");
                assert!(
                    said.contains(word),
                    "redis.conf does not say {word}: {said}"
                );
            }
            assert!(set("other").is_error());
        }
    }
}

#[test]
fn every_metric_is_documented_and_every_documented_one_is_there() {
    let server = Server::start();
    let text = server.run("INFO rlock").text();
    let fields = text.lines().filter_map(|line| line.split_once(':'));
    let (mut told, mut histograms) = (BTreeSet::new(), 0);
    for (name, value) in fields {
        told.insert(name.to_owned());
        if value.contains('=') {
            histograms += 1;
            let parts: Vec<_> = value
                .split(',')
                .filter_map(|part| part.split_once('='))
                .collect();
            for (part, _) in &parts {
                let bound = part.strip_prefix("le_").map(str::parse::<u64>);
                assert!(
                    bound.is_some_and(|bound| bound.is_ok()) || ["count", "sum"].contains(part),
                    "{name}: {part}"
                );
            }
            assert_eq!(
                parts
                    .iter()
                    .rev()
                    .map(|(part, _)| *part)
                    .take(2)
                    .collect::<Vec<_>>(),
                ["sum", "count"]
            );
        }
    }
    assert_eq!(histograms, 2);
    let [table, by_pattern]: [_; 2] = tables("docs/commands.md", "# Metrics")
        .try_into()
        .expect("two");
    let names = |table: &[Vec<String>]| -> BTreeSet<String> {
        table.iter().flat_map(|row| quoted(&row[0])).collect()
    };
    assert_eq!(names(&table), told);
    assert_eq!(
        server.run("CONFIG SET rlock.metrics-patterns orders:*"),
        "OK"
    );
    let text = server.run("INFO rlock").text();
    let fields = text.lines().filter_map(|line| line.split_once(':'));
    let all: BTreeSet<_> = fields.map(|(name, _)| name.to_owned()).collect();
    let numbered = names(&by_pattern).into_iter();
    let numbered: BTreeSet<_> = numbered.map(|name| name.replace('N', "1")).collect();
    assert_eq!(&all - &told, numbered);
}

#[test]
fn info_tells_the_fields_that_are_documented() {
    let server = Server::start();
    let mut conn = server.connect();
    conn.take("plain", "alice");
    conn.run("RLOCK.ACQUIRE readers alice 30000 READ").held();
    conn.run("RLOCK.ACQUIRE permits alice 30000 PERMITS 2 OF 2")
        .held();
    let _waiters = [
        server.wait_in_queue("plain", "bob"),
        server.blocked_in("RLOCK.ACQUIRE readers bob 30000 WRITE BLOCK 0"),
        server.blocked_in("RLOCK.ACQUIRE permits bob 30000 PERMITS 1 OF 2 BLOCK 0"),
    ];
    let [plain, more, of_permits]: [_; 3] = tables("docs/commands.md", "## RLOCK.INFO")
        .try_into()
        .expect("three");
    let names = |table: &[Vec<String>]| -> BTreeSet<String> {
        table.iter().flat_map(|row| quoted(&row[0])).collect()
    };
    // The maps within name their fields in the second cell.
    let within = |field: &str| -> BTreeSet<String> {
        let row = plain
            .iter()
            .chain(&more)
            .find(|row| row[0] == format!("`{field}`"));
        let names = quoted(&row.expect("a row")[1]).into_iter();
        names.collect()
    };
    let told = conn.run("RLOCK.INFO plain");
    assert_eq!(names(&plain), told.keys().into_iter().collect());
    let waiter = told.get("queue").array()[0].keys();
    assert_eq!(within("queue"), waiter.into_iter().collect());

    let told = conn.run("RLOCK.INFO readers");
    let both = &names(&plain) | &names(&more);
    assert_eq!(both, told.keys().into_iter().collect());
    let holder = told.get("holders").array()[0].keys();
    assert_eq!(within("holders"), holder.into_iter().collect());
    let waiter: BTreeSet<_> = told.get("queue").array()[0].keys().into_iter().collect();
    assert_eq!(
        &within("queue") | &BTreeSet::from(["mode".to_owned()]),
        waiter
    );
    assert_eq!(
        within("mode"),
        BTreeSet::from(["read".to_owned(), "write".to_owned()])
    );

    let told = conn.run("RLOCK.INFO permits");
    let both = &names(&plain) | &names(&of_permits);
    assert_eq!(both, told.keys().into_iter().collect());
    let holders = of_permits.iter().find(|row| row[0] == "`holders`");
    let documented = quoted(&holders.expect("a row")[1]);
    let holder = told.get("holders").array()[0].keys();
    let sorted = |names: Vec<String>| names.into_iter().collect::<BTreeSet<_>>();
    assert_eq!(sorted(documented), sorted(holder));
    let waiter: BTreeSet<_> = told.get("queue").array()[0].keys().into_iter().collect();
    assert_eq!(
        &within("queue") | &BTreeSet::from(["permits".to_owned()]),
        waiter
    );
}

#[test]
fn events_are_of_the_kinds_that_are_documented() {
    let server = Server::start();
    let (mut life, mut conn) = (server.session_connection("s"), server.connect());
    for (name, owner) in [("expired", "a"), ("broken", "a"), ("deleted", "a")] {
        conn.take_for(name, owner, "s");
    }
    conn.take_for("released", "a", "s");
    conn.take_for("taken", "a", "s");
    let _other = server.session_connection("t");
    for name in ["granted", "timeout", "error", "left"] {
        conn.take(name, "bob");
        conn.queue(name, "a", "s");
    }
    conn.run("RLOCK.ACQUIRE wanted a 30000 SESSION s WANTED")
        .held();
    conn.run("RLOCK.ACQUIRE wanted b 30000").refused();
    conn.run("RLOCK.RENEW expired a 1 SESSION s");
    conn.run("RLOCK.BREAK broken");
    conn.run("DEL deleted");
    conn.let_go("granted", "bob");
    conn.let_go("released", "a");
    conn.run("RLOCK.RENEW taken a 30000 SESSION t");
    conn.run("RLOCK.CANCEL timeout a");
    conn.run("SET error text");
    let mut seen = BTreeMap::<String, BTreeSet<String>>::new();
    until("all events have come", || {
        for event in life.run("RLOCK.EVENTS s GRACE 60000").told().1 {
            let kind = event.what.split(' ').next().expect("a kind").to_owned();
            let values = seen.entry(kind.clone()).or_default();
            if kind == "lost" {
                values.insert(event.value.text());
            }
        }
        let is_all_but_left = seen.len() == 5 && !seen.contains_key("left");
        if is_all_but_left && seen.get("lost").is_some_and(|reasons| reasons.len() == 5) {
            std::mem::replace(&mut life, server.connect()).close();
        }
        seen.len() == 6
    });
    let table = tables("docs/commands.md", "## RLOCK.EVENTS").remove(0);
    let kinds: BTreeSet<_> = table.iter().map(|row| row[0].replace('`', "")).collect();
    assert_eq!(kinds, seen.keys().cloned().collect());
    let lost = table.iter().find(|row| row[0] == "`lost`").expect("a row");
    assert_eq!(
        quoted(&lost[1]).into_iter().collect::<BTreeSet<_>>(),
        seen["lost"]
    );
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

/// The command as `COMMAND DOCS` has it, in a line of syntax.
fn declared_syntax(conn: &mut Conn, name: &str) -> String {
    let docs = docs_of(conn, name);
    let has_arguments = docs.keys().contains(&"arguments".to_owned());
    let arguments = if has_arguments {
        docs.get("arguments").array()
    } else {
        &[]
    };
    let arguments = arguments.iter().map(syntax);
    [vec![name.to_owned()], arguments.collect()]
        .concat()
        .join(" ")
}

/// The text in one line, without the marks of code.
fn unfolded(text: &str) -> String {
    let words: Vec<_> = text.split_whitespace().collect();
    words.join(" ").replace('`', "")
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
    let has_flag = |name: &str| flags.iter().any(|flag| flag == name);
    if has_flag("optional") && has_flag("multiple") {
        format!("[{both} ...]")
    } else if has_flag("optional") {
        format!("[{both}]")
    } else if has_flag("multiple") {
        format!("{both} [{both} ...]")
    } else {
        both
    }
}

/// The tables under a heading, up to the next one of its level or above: the cells of each row,
/// without the head.
#[track_caller]
pub(super) fn tables(path: &str, heading: &str) -> Vec<Vec<Vec<String>>> {
    let level = heading.split(' ').next().expect("a level").len();
    let document = super::tidy::read(path);
    let below = document.lines().skip_while(|line| *line != heading).skip(1);
    let ends = |line: &str| {
        let marks = line.chars().take_while(|&char| char == '#').count();
        (1..=level).contains(&marks) && line[marks..].starts_with(' ')
    };
    let lines: Vec<_> = below.take_while(|line| !ends(line)).collect();
    let tables = lines.split(|line| !line.starts_with('|'));
    let tables: Vec<Vec<Vec<String>>> = tables
        .filter(|rows| rows.len() > 2)
        .map(|rows| rows[2..].iter().map(|row| cells(row)).collect())
        .collect();
    assert!(!tables.is_empty(), "{path} has no table under {heading}");
    tables
}

fn cells(row: &str) -> Vec<String> {
    let row = row.replace("\\|", "\0");
    let cells = row.trim_matches('|').split('|');
    cells.map(|cell| cell.trim().replace('\0', "|")).collect()
}

/// The words between backticks.
fn quoted(text: &str) -> Vec<String> {
    text.split('`')
        .skip(1)
        .step_by(2)
        .map(str::to_owned)
        .collect()
}

/// The words in capitals of a line of syntax, after the command's name.
fn options_of(syntax: &str) -> BTreeSet<String> {
    let words = syntax
        .split(|char: char| !char.is_ascii_alphabetic() && char != '.')
        .skip(1);
    let options =
        words.filter(|word| !word.is_empty() && word.chars().all(|char| char.is_ascii_uppercase()));
    options.map(str::to_owned).collect()
}
