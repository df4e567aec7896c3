//! Completions and man pages.

use std::fs;
use std::path::Path;
use std::process::Command;

use crate::program::PROGRAM;

const COMMANDS: [&str; 10] = [
    "run", "ls", "info", "why", "log", "sessions", "break", "cancel", "limit", "doctor",
];

#[track_caller]
fn completions(shell: &str) -> String {
    let output = Command::new(PROGRAM)
        .args(["completions", shell])
        .output()
        .unwrap();
    assert!(output.status.success());
    String::from_utf8(output.stdout).unwrap()
}

#[test]
fn bash_completes_commands_and_options() {
    let script = completions("bash");
    for (words, expected) in [
        ("'' ", "doctor"),
        ("run --on-l", "--on-lost"),
        ("run --per", "--permits"),
        ("wh", "why"),
    ] {
        let words: Vec<&str> = words.split(' ').filter(|word| !word.is_empty()).collect();
        let last = words.len();
        let ask = format!(
            "{script}\nCOMP_WORDS=(rlock {}) COMP_CWORD={last}\n_rlock rlock {} x\n\
             printf '%s\\n' \"${{COMPREPLY[@]}}\"",
            words.join(" "),
            words[last - 1]
        );
        let bash = Command::new("bash")
            .args(["--norc", "-c", &ask])
            .output()
            .unwrap();
        let told = String::from_utf8(bash.stdout).unwrap();
        assert!(
            told.lines().any(|line| line == expected),
            "{words:?}: {told}"
        );
    }
}

/// The output of a script in this shell; None where the shell is not installed.
fn asked(shell: &str, words: &[&str], script: &str) -> Option<String> {
    let directory = Path::new(PROGRAM).parent().unwrap();
    let path = format!("{}:{}", directory.display(), std::env::var("PATH").unwrap());
    let mut command = Command::new("timeout");
    command
        .args(["30", shell])
        .args(words)
        .arg("-c")
        .arg(script);
    let output = command.env("PATH", path).output().unwrap();
    if output.status.code() == Some(127) {
        eprintln!("skipped: no {shell} here");
        return None;
    }
    let (told, wrong) = (output.stdout, output.stderr);
    assert!(
        output.status.success(),
        "{shell}: {}",
        String::from_utf8_lossy(&wrong)
    );
    Some(String::from_utf8(told).unwrap())
}

/// As docs/cli.md has it.
#[test]
fn fish_completes_commands_options_and_values() {
    let load = "rlock completions fish | source";
    for (typed, expected) in [
        ("rlock ", &COMMANDS[..]),
        ("rlock wh", &["why"]),
        ("rlock run --on-l", &["--on-lost"]),
        ("rlock run --on-lost ", &["term", "kill", "ignore"]),
    ] {
        let script = format!("{load}; complete -C '{typed}'");
        let Some(told) = asked("fish", &["--no-config"], &script) else {
            return;
        };
        let words: Vec<_> = told
            .lines()
            .filter_map(|line| line.split('\t').next())
            .collect();
        for expected in expected {
            assert!(words.contains(expected), "{typed}: {told}");
        }
    }
}

/// As docs/cli.md has it, in a terminal of zsh's own.
#[test]
fn zsh_completes_commands_options_and_values() {
    for (typed, expected) in [
        ("rlock wh", "rlock why"),
        ("rlock run --on-l", "rlock run --on-lost"),
        ("rlock run --on-lost k", "rlock run --on-lost kill"),
    ] {
        // The quotes within `ready` keep the typed line from looking like its output.
        let script = format!(
            "zmodload zsh/zpty; zpty shell zsh -f -i
             zpty -w shell 'PS1=; autoload -Uz compinit; compinit -D'
             zpty -w shell 'source <(rlock completions zsh)'
             zpty -w shell 'print rea\"\"dy'; zpty -r -m shell seen $'*ready\r\n*'
             zpty -w -n shell $'{typed}\\t'; zpty -r -m shell seen '*{expected}*'
             print completed"
        );
        match asked("zsh", &["-f"], &script) {
            Some(told) => assert_eq!(told, "completed\n", "{typed}"),
            None => return,
        }
    }
}

#[test]
fn a_reader_that_has_gone_is_no_panic() {
    let script = format!("{PROGRAM} completions bash | :; echo ${{PIPESTATUS[0]}}");
    let bash = Command::new("bash").args(["-c", &script]).output().unwrap();
    assert_eq!(String::from_utf8_lossy(&bash.stderr), "");
    let status = String::from_utf8_lossy(&bash.stdout);
    assert!(["141\n", "0\n"].contains(&&*status), "{status}");
}

#[test]
fn each_command_has_a_man_page_and_help() {
    let directory = tempfile::tempdir().unwrap();
    let written = Command::new(PROGRAM)
        .arg("man")
        .arg(directory.path())
        .status()
        .unwrap();
    assert!(written.success());
    for command in COMMANDS {
        let page = directory.path().join(format!("rlock-{command}.1"));
        let page = fs::read_to_string(&page).unwrap_or_else(|error| panic!("{command}: {error}"));
        assert!(page.contains(".SH NAME"), "{command}");
        let help = Command::new(PROGRAM)
            .args(["help", command])
            .output()
            .unwrap();
        assert!(help.status.success() && !help.stdout.is_empty());
    }
    let run = fs::read_to_string(directory.path().join("rlock-run.1")).unwrap();
    assert!(run.contains("Exit status") && run.contains("kill\\-after"));
    assert!(
        run.contains("\\fB\\-\\-permits\\fR \\fI<N[/LIMIT]>"),
        "{run}"
    );
}
