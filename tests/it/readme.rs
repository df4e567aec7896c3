//! README.md, as its first reader will try it: its program in Rust, its versions, its figures and
//! the commands that it tells to type. And the transcripts of `redis-cli` in docs/commands.md and
//! docs/operations.md, played back.
//!
//! How to write a transcript:
//!
//! - Blocks fenced as `console` are played. A line that begins with the prompt `127.0.0.1:6379> `
//!   is a command, and the lines below it are the output of `redis-cli`. Blocks whose first line
//!   begins with `$` are for the shell and are not played.
//! - A command with nothing below it waits. From then on, other blocks are other windows; a block
//!   that begins without a prompt is what a waiting window prints at last. A window that has
//!   subscribed goes on waiting for messages.
//! - A number of 16 digits in the document matches any number of 16 digits (tokens); one of 4 to 15
//!   digits matches any number (milliseconds that pass); so does what stands under `client-id`
//!   and `id`.
//!   All else must match to the letter.
//! - redis-cli's own remarks (`Reading messages…`, `(1.23s)`) may stand there and are passed over.

use rlock_client::{Client, Error};
use rlock_tests::{Conn, Server, eventually};

use super::client::url;
use super::tidy::read;

const PROMPT: &str = "127.0.0.1:6379> ";

#[test]
fn the_transcript_is_what_happens() {
    for document in ["docs/commands.md", "docs/operations.md"] {
        let blocks = blocks_of(&read(document));
        let commands = blocks
            .concat()
            .iter()
            .filter(|line| line.starts_with(PROMPT))
            .count();
        assert!(
            commands >= 5,
            "a transcript of {commands} commands shows little"
        );
        play(&blocks).unwrap_or_else(|wrong| panic!("{document}: {wrong}"));
    }
}

#[test]
fn a_transcript_with_a_mistake_is_noticed() {
    let right = "\
        ```console\n127.0.0.1:6379> SET greeting \"good day\"\nOK\n\
        127.0.0.1:6379> BLPOP list 0\n```\n\
        In another window\n\
        ```console\n127.0.0.1:6379> RPUSH list 1795000000000000\n(integer) 1\n```\n\
        ```console\n1) \"list\"\n2) \"1796111111111111\"\n```\n\
        ```console\n127.0.0.1:6379> GET greeting\n\"good day\"\n```\n";
    play(&blocks_of(right)).unwrap();
    for (from, to) in [
        ("(integer) 1\n", "(integer) 2\n"),
        ("1796111111111111", "179611111111111"),
        ("\"good day\"\n```", "\"bad day\"\n```"),
        ("\nOK\n", "\n(nil)\n"),
        ("2) \"17", "3) \"17"),
    ] {
        // A number with a digit too few matches anything; so give it a letter.
        let wrong = right
            .replace(from, to)
            .replace("\"179611111111111\"", "\"t179611111111111\"");
        assert_ne!(wrong, right);
        assert!(
            play(&blocks_of(&wrong)).is_err(),
            "{from:?} for {to:?} goes unnoticed"
        );
    }
}

/// README.md has these lines as they stand here, with an address in place of `&url`.
async fn program_of_the_readme(url: String) -> Result<(), Error> {
    let client = Client::connect(&url).await?;
    let guard = client.lock("stock:42").lock().await?; // waits its turn; renews the lease
    guard.unlock().await?;
    Ok(())
}

#[tokio::test]
async fn the_program_is_compiled_and_runs_as_it_is_shown() {
    let readme = read("README.md").replace("\"redis://127.0.0.1:6379\"", "&url");
    let shown = fenced(&readme, "rust").concat();
    assert!(shown.len() > 2, "nothing found is nothing looked at");
    let own = include_str!("readme.rs");
    for line in shown {
        assert!(own.contains(&format!("\n    {line}\n")), "{line}");
    }
    let server = Server::start();
    program_of_the_readme(url(&server)).await.unwrap();
}

#[test]
fn the_crates_versions_and_the_servers_are_those_that_are_tested() {
    let (readme, cargo) = (read("README.md"), read("Cargo.toml"));
    let setting = |name: &str| {
        let line = cargo.lines().find(|line| line.starts_with(name)).unwrap();
        line.split('"').nth(1).unwrap().to_owned()
    };
    let (version, rust) = (setting("version"), setting("rust-version"));
    let minor = version.rsplit_once('.').unwrap().0;
    let crate_of_ours = format!("{{ version = \"{minor}\", path = \"../rlock/client\" }}");
    let line = format!("rlock-client = {crate_of_ours} # Rust {rust} or newer");
    assert!(fenced(&readme, "toml")[0].contains(&line), "no line {line}");
    assert!(readme.contains(&format!("version {version}, tested")));
    assert!(readme.contains(&format!("with Rust {rust} or newer")));
    // The names of servers in scripts/servers end with versions; what moves has an x.
    let tested = readme.split("The tests run on").nth(1).unwrap();
    let tested = tested.split("\n\n").next().unwrap();
    let servers = read("scripts/servers");
    let names = servers.split("matrix='").nth(1).unwrap();
    let names = names.split('\'').next().unwrap();
    let names = names.lines().filter_map(|line| line.split(' ').next());
    let versions = names.filter_map(|name| name.split_once('-'));
    let versions = versions.filter(|(_, version)| version.parse::<f64>().is_ok());
    let versions: Vec<_> = versions.collect();
    assert!(versions.len() > 2, "{versions:?}");
    for (server, version) in versions {
        assert!(tested.contains(version), "{server} {version}: {tested}");
    }
}

/// A table has each command for a shell, with the script that runs it or the reason why none does.
#[test]
fn every_command_for_a_shell_is_run_by_what_the_table_says() {
    let typed = |document: &str| {
        let blocks = fenced(&read(document), "console").concat();
        let lines = blocks.iter().filter_map(|line| line.strip_prefix("$ "));
        let lines = lines.map(|line| line.split(" # ").next().unwrap().trim_end().to_owned());
        lines.collect::<Vec<_>>()
    };
    let mut typed = [typed("README.md"), typed("docs/install.md")].concat();
    assert!(typed.len() > 20, "nothing found is nothing looked at");
    typed.sort();
    typed.dedup();
    let page = read("docs/testing.md");
    let table = page.split("\n## What the documents tell to type\n").nth(1);
    let table = table.unwrap().split("\n## ").next().unwrap();
    let rows = table.lines().filter(|line| line.starts_with("| `"));
    let mut listed: Vec<_> = rows
        .flat_map(|row| {
            let cell = row.split(" | ").next().unwrap();
            let commands = cell.split('`').skip(1).step_by(2);
            commands.map(|command| command.replace("\\|", "|"))
        })
        .collect();
    listed.sort();
    assert_eq!(typed, listed);
}

#[test]
fn every_figure_of_the_readme_is_in_the_tables_of_the_benchmark() {
    let figures = |text: &str| -> Vec<String> {
        let is_part = |c: char| c.is_ascii_digit() || c == '.' || c == ',';
        let words = text.split(|c| !is_part(c));
        let words = words.map(|word| word.trim_matches(['.', ',']));
        let figures = words.filter(|word| !word.is_empty());
        figures.map(str::to_owned).collect()
    };
    let readme = read("README.md");
    let section = readme.split("\n## How fast\n").nth(1).unwrap();
    let section = section.split("\n## ").next().unwrap();
    // The words around the figures are compared in tidy.rs.
    let measured = figures(&read("docs/bench/tables.md"));
    let said = figures(section);
    assert!(said.len() > 10, "nothing found is nothing looked at");
    for figure in said {
        assert!(measured.contains(&figure), "{figure} was not measured");
    }
}

/// The lines of each block that is fenced so.
fn fenced(text: &str, mark: &str) -> Vec<Vec<String>> {
    let mut blocks = Vec::new();
    let mut lines = text.lines();
    while let Some(line) = lines.next() {
        if line.strip_prefix("```") == Some(mark) {
            let block = lines.by_ref().take_while(|line| !line.starts_with("```"));
            blocks.push(block.map(str::to_owned).collect());
        } else if line.starts_with("```") {
            lines.by_ref().find(|line| line.starts_with("```"));
        }
    }
    blocks
}

/// The lines of each block to be played.
fn blocks_of(text: &str) -> Vec<Vec<String>> {
    let mut blocks = fenced(text, "console");
    blocks.retain(|block| block.first().is_some_and(|first| !first.starts_with('$')));
    blocks
}

/// Plays all blocks on a fresh server; `Err` says what differs.
fn play(blocks: &[Vec<String>]) -> Result<(), String> {
    let server = Server::start();
    let mut waiting = Vec::new();
    for block in blocks {
        let mut window = server.connect();
        let first = block
            .iter()
            .position(|line| line.starts_with(PROMPT))
            .unwrap_or(block.len());
        let (unasked, asked) = block.split_at(first);
        if !unasked.is_empty() {
            one_of_them_prints(&mut waiting, unasked)?;
        }
        for step in asked.chunk_by(|_, next| !next.starts_with(PROMPT)) {
            let command = &step[0][PROMPT.len()..];
            window.send_cmd(&words(command));
            let has_output = step.len() > 1;
            if has_output {
                compare(command, &step[1..], &window.read().as_cli())?;
            }
            let subscribes = command.to_uppercase().contains("SUBSCRIBE");
            if subscribes || !has_output {
                window.expect_nothing_yet();
                waiting.push(std::mem::replace(&mut window, server.connect()));
            }
        }
    }
    Ok(())
}

/// Waits until one of the waiting windows prints, and compares its reply with these lines. The
/// window that has waited longest is looked at first.
fn one_of_them_prints(waiting: &mut [Conn], expected: &[String]) -> Result<(), String> {
    let told = eventually("a window that waits prints something", || {
        waiting.iter_mut().find_map(Conn::read_now)
    });
    compare("a window that waited", expected, &told.as_cli())
}

fn is_remark(line: &str) -> bool {
    line.starts_with("Reading messages") || (line.starts_with('(') && line.ends_with("s)"))
}

/// Splits as `redis-cli` does: at blanks, but not within double quotes.
fn words(command: &str) -> Vec<String> {
    let mut words = Vec::new();
    for (index, part) in command.split('"').enumerate() {
        if index % 2 == 1 {
            words.push(part.to_owned());
        } else {
            words.extend(part.split_ascii_whitespace().map(str::to_owned));
        }
    }
    words
}

fn compare(command: &str, expected: &[String], printed: &str) -> Result<(), String> {
    let printed: Vec<_> = printed.lines().collect();
    let expected: Vec<_> = expected.iter().filter(|line| !is_remark(line)).collect();
    let mut any_number = false;
    let mut same = expected.len() == printed.len();
    for (&expected, printed) in expected.iter().zip(&printed) {
        same &= line_matches(expected, printed, any_number);
        any_number = expected.ends_with("id\"");
    }
    if same {
        Ok(())
    } else {
        Err(format!("{command}: {expected:#?} is really {printed:#?}"))
    }
}

fn line_matches(expected: &str, printed: &str, any_number: bool) -> bool {
    let (mut expected, mut printed) = (expected.trim_end(), printed.trim_end());
    loop {
        let (expected_text, expected_number);
        let (printed_text, printed_number);
        (expected_text, expected_number, expected) = up_to_number(expected);
        (printed_text, printed_number, printed) = up_to_number(printed);
        let same_number = match expected_number.len() {
            16 => printed_number.len() == 16,
            4.. => !printed_number.is_empty(),
            _ => expected_number == printed_number || (any_number && !printed_number.is_empty()),
        };
        if expected_text != printed_text || !same_number {
            return false;
        }
        if expected.is_empty() || printed.is_empty() {
            return expected.is_empty() && printed.is_empty();
        }
    }
}

/// The text before the first number, the number, and the rest.
fn up_to_number(line: &str) -> (&str, &str, &str) {
    let start = line
        .find(|c: char| c.is_ascii_digit())
        .unwrap_or(line.len());
    let (text, rest) = line.split_at(start);
    let end = rest
        .find(|c: char| !c.is_ascii_digit())
        .unwrap_or(rest.len());
    let (number, rest) = rest.split_at(end);
    (text, number, rest)
}
