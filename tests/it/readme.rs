//! The transcripts in README.md and docs/operations.md, played back.
//!
//! How to write it:
//!
//! - Played is what stands in blocks fenced as `console`. A line that begins with the prompt
//!   `127.0.0.1:6379> ` is a command, the lines below it are what `redis-cli` prints. Blocks whose
//!   first line begins with `$` are for the shell and are not played.
//! - A command with nothing below it waits. From then on, other blocks are other windows; a block
//!   that begins without a prompt is what a waiting window prints at last. A window that has
//!   subscribed goes on waiting for messages.
//! - A number of 16 digits in the document matches any number of 16 digits (tokens); one of 4 to 15
//!   digits matches any number (milliseconds that pass); so does what stands under `client-id`
//!   and `id`.
//!   All else must match to the letter.
//! - redis-cli's own remarks (`Reading messages…`, `(1.23s)`) may stand there and are passed over.

use rlock_tests::{Conn, Server, eventually};

const PROMPT: &str = "127.0.0.1:6379> ";

#[test]
fn the_transcript_is_what_happens() {
    for document in ["README.md", "docs/operations.md"] {
        let blocks = blocks_of(&super::tidy::read(document));
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

/// The lines of each block to be played.
fn blocks_of(text: &str) -> Vec<Vec<String>> {
    let mut blocks = Vec::new();
    let mut lines = text.lines();
    while let Some(line) = lines.next() {
        if line.starts_with("```console") {
            let block = lines.by_ref().take_while(|line| !line.starts_with("```"));
            blocks.push(block.map(str::to_owned).collect::<Vec<_>>());
        } else if line.starts_with("```") {
            lines.by_ref().find(|line| line.starts_with("```"));
        }
    }
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

/// By and by, the windows that wait print these lines: each what it was told, the longest waiting
/// first.
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
