//! The transcripts in docs/cli.md, played back with the real program.
//!
//! The test plays the blocks fenced as `console`: a line that begins with `$ ` is typed, the lines
//! below it are its output. The locks are those of the story in docs/operations.md, which the
//! server is told first. A number, with or without a unit of time, stands for any; so does an
//! address, and a run of blanks for any longer or shorter. All else must match to the letter.

use std::fs;
use std::os::unix::fs::PermissionsExt as _;
use std::path::{Path, PathBuf};
use std::process::Command;

use rlock_tests::{Conn, Server};

use crate::program::{PROGRAM, url};

const TYPED: &str = "$ ";
const PROMPT: &str = "127.0.0.1:6379> ";

#[test]
fn the_transcripts_of_the_program_are_what_happens() {
    let page = read("docs/cli.md");
    let steps = steps(&page);
    assert!(steps.len() >= 5, "{} commands show little", steps.len());
    // Tokens that do not run ahead of the clock tell since when a lock is held.
    let server = Server::builder().config("rlock.fence-guard-ms 0").start();
    let _windows = tell_the_story(&server);
    let directory = directory();
    for (typed, expected) in &steps {
        let printed = printed(&server, directory.path(), typed);
        assert_eq!(alike(&printed), alike(expected), "{typed}: {printed}");
    }
}

#[test]
fn a_transcript_with_a_mistake_is_noticed() {
    let right = "a is held by bob for 1.7s, lease left 1m02s, client 5\n  bob waits for no lock\n";
    assert_eq!(
        alike(right),
        alike(&right.replace("1.7s", "312ms").replace('5', "77"))
    );
    for (from, to) in [
        ("bob for", "bib for"),
        ("\n  bob", "\nbob"),
        ("1.7s", "soon"),
        ("lock\n", ""),
    ] {
        assert_ne!(
            alike(right),
            alike(&right.replace(from, to)),
            "{from} for {to}"
        );
    }
}

#[test]
fn systemd_finds_nothing_wrong_with_the_unit() {
    let page = read("docs/cli.md");
    let unit = page.split("```ini\n").nth(1).expect("a unit");
    let unit = unit.split("```").next().unwrap();
    // The paths on this machine.
    let unit = unit.replace("/usr/local/bin/rlock", PROGRAM);
    let unit = unit.replace("/usr/local/bin/report.sh", "/bin/true");
    assert!(unit.contains(PROGRAM), "{unit}");
    let directory = directory();
    let file = directory.path().join("report.service");
    fs::write(&file, unit).unwrap();
    let verify = Command::new("systemd-analyze")
        .arg("verify")
        .arg(file)
        .output();
    let Ok(output) = verify else {
        eprintln!("skipped: no systemd-analyze here");
        return;
    };
    let said = String::from_utf8_lossy(&output.stderr);
    assert!(
        output.status.success() && !said.contains("report.service:"),
        "{said}"
    );
}

fn read(page: &str) -> String {
    let root = Path::new(env!("CARGO_MANIFEST_DIR")).join("../..");
    fs::read_to_string(root.join(page)).expect("a page")
}

/// The lines of each block to be played.
fn blocks(page: &str) -> Vec<Vec<&str>> {
    let parts = page.split("```console\n").skip(1);
    let blocks = parts.map(|part| part.split("\n```").next().unwrap_or_default());
    blocks.map(|block| block.lines().collect()).collect()
}

/// Each typed command, with its expected output.
fn steps(page: &str) -> Vec<(String, String)> {
    let blocks = blocks(page).into_iter();
    let steps = blocks.flat_map(|block| {
        let steps = block.chunk_by(|_, next| !next.starts_with(TYPED));
        let steps = steps.map(|step| {
            let typed = step[0]
                .strip_prefix(TYPED)
                .expect("a block begins with a command");
            let printed = step[1..].join("\n");
            (typed.to_owned(), printed)
        });
        steps.collect::<Vec<_>>()
    });
    steps.collect()
}

/// Each window of the story. A window that ends with a command waits there. They stay open.
fn tell_the_story(server: &Server) -> Vec<Conn> {
    let page = read("docs/operations.md");
    let (story, _) = page.split_once("\n## ").expect("a heading");
    let mut windows = Vec::new();
    for block in blocks(story) {
        let mut window = server.connect();
        for (at, line) in block.iter().enumerate() {
            let Some(command) = line.strip_prefix(PROMPT) else {
                continue;
            };
            window.send(command);
            if at + 1 < block.len() {
                window.read();
            }
        }
        window.expect_nothing_yet();
        windows.push(window);
    }
    assert!(windows.len() >= 3, "too short a story");
    windows
}

/// Where the commands are typed, with the script of the first of them.
fn directory() -> tempfile::TempDir {
    let directory = tempfile::tempdir().unwrap();
    let script: PathBuf = directory.path().join("report.sh");
    fs::write(
        &script,
        "#!/bin/sh\ntest \"$*\" = --all && test \"$RLOCK_NAME\"\n",
    )
    .unwrap();
    fs::set_permissions(script, fs::Permissions::from_mode(0o755)).unwrap();
    directory
}

/// Everything that it prints, on both streams.
fn printed(server: &Server, directory: &Path, typed: &str) -> String {
    let words: Vec<_> = typed
        .split(' ')
        .map(|word| word.trim_matches('\''))
        .collect();
    assert_eq!(words[0], "rlock", "{typed}");
    let mut command = Command::new(PROGRAM);
    command.args(&words[1..]).current_dir(directory);
    // A command that is run may be the program again.
    let own = Path::new(PROGRAM).parent().unwrap();
    let path = format!("{}:{}", own.display(), std::env::var("PATH").unwrap());
    let output = command.env("PATH", path).env("RLOCK_URL", url(server));
    let output = output.output().unwrap();
    let text = String::from_utf8([output.stdout, output.stderr].concat()).expect("text");
    text.replace("Valkey ", "Redis ") // whichever is tested
}

/// The text with a stand-in for each part that may differ.
fn alike(text: &str) -> String {
    let lines = text.lines().map(|line| {
        let blanks = line.len() - line.trim_start().len();
        let words: Vec<_> = line.split_whitespace().map(word_alike).collect();
        format!("{}{}", " ".repeat(blanks), words.join(" "))
    });
    lines.collect::<Vec<_>>().join("\n")
}

/// A word that is a time, a date, an address or a number, and what stands around it.
fn word_alike(word: &str) -> String {
    let (bare, end) = match word.char_indices().next_back() {
        Some((at, ',' | ';')) => word.split_at(at),
        _ => (word, ""),
    };
    let is_told = |char: char| char.is_ascii_digit() || ".-:".contains(char);
    let (number, unit) = bare.split_at(bare.find(|char| !is_told(char)).unwrap_or(bare.len()));
    let is_time = ["", "s", "ms"].contains(&unit) || unit.ends_with('s') && unit.contains('m');
    if number.contains(|char: char| char.is_ascii_digit()) && is_time {
        return format!("N{end}");
    }
    word.to_owned()
}
