//! Redisson itself, in a Java process that fights when it is told to. `redisson/Rounds.java`
//! documents its commands.

use std::env;
use std::io::{BufRead as _, BufReader, Write as _};
use std::process::{Child, ChildStdin, ChildStdout, Command, Stdio};

use rlock_tests::Server;

use crate::crates::{Fight, Outcome};

/// The process ends with its input, so with us.
pub(crate) struct Redisson {
    input: ChildStdin,
    output: BufReader<ChildStdout>,
    _child: Child,
}

impl Redisson {
    /// None where `scripts/bench` found no Java or no Maven.
    pub(crate) fn start(server: &Server) -> Option<Self> {
        let class_path = env::var("RLOCK_CLASS_PATH").ok()?;
        let mut child = Command::new("java")
            .args([
                "-Xmx512m",
                "-XX:+UseSerialGC",
                "-Dslf4j.internal.verbosity=ERROR",
            ])
            .args(["-XX:+DisplayVMOutputToStderr", "-cp", &class_path])
            .arg(concat!(env!("CARGO_MANIFEST_DIR"), "/redisson/Rounds.java"))
            .arg(server.address().to_string())
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .spawn()
            .unwrap();
        Some(Self {
            input: child.stdin.take().unwrap(),
            output: BufReader::new(child.stdout.take().unwrap()),
            _child: child,
        })
    }

    pub(crate) fn fight(&mut self, fight: Fight) -> Outcome {
        let kind = if fight.shared { "shared" } else { "own" };
        let (threads, ms) = (fight.tasks, fight.length.as_millis());
        writeln!(self.input, "{threads} {kind} {ms}").unwrap();
        let mut line = String::new();
        self.output.read_line(&mut line).unwrap();
        let numbers: Vec<f64> = line
            .split(' ')
            .flat_map(|word| word.trim().parse())
            .collect();
        let [locks, p50, p99, most, least_wins, most_wins] = numbers[..] else {
            panic!("java says {line:?}");
        };
        Outcome {
            locks_per_second: locks / fight.length.as_secs_f64(),
            p50,
            p99,
            most,
            wins: [least_wins, most_wins],
            allocations: f64::NAN,
        }
    }
}
