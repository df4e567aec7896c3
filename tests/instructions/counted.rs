//! A server whose instructions are counted: it runs under callgrind, and tells the count whenever
//! it is sent a PING.

use std::fs;
use std::path::{Path, PathBuf};

use rlock_tests::{Conn, Server, compile};

use crate::operations::Step;

pub(crate) struct Counted {
    pub(crate) server: Server,
    conn: Conn,
    /// Where the counts are written.
    folder: PathBuf,
    /// The number of the last one.
    last: u32,
}

impl Counted {
    /// `folder` is made anew.
    pub(crate) fn start(folder: &Path) -> Self {
        Self::with(folder, &[])
    }

    /// The same with these lines in the server's configuration.
    pub(crate) fn with(folder: &Path, lines: &[&str]) -> Self {
        // It is not there before the first time.
        let _ = fs::remove_dir_all(folder);
        fs::create_dir_all(folder).unwrap();
        let preload = format!("LD_PRELOAD={}", compile("seed", folder));
        let out = format!("--callgrind-out-file={}", folder.join("count").display());
        let callgrind = [
            "env",
            &preload,
            // The allocator gives memory back by the clock, unless told not to.
            "MALLOC_CONF=dirty_decay_ms:-1,muzzy_decay_ms:-1",
            "valgrind",
            "-q",
            "--tool=callgrind",
            // A server may be a script that runs the program.
            "--trace-children=yes",
            "--dump-before=pingCommand",
            "--compress-strings=no",
            &out,
        ];
        // The server's periodic work should be rare.
        let server = Server::builder().under(&callgrind);
        let server = ["hz 1", "dynamic-hz no", "jemalloc-bg-thread no"]
            .iter()
            .chain(lines)
            .fold(server, |server, line| server.config(line))
            .start();
        let conn = server.connect();
        let mut counted = Self {
            server,
            conn,
            folder: folder.to_owned(),
            last: 0,
        };
        counted.count();
        counted
    }

    pub(crate) fn conn(&mut self) -> &mut Conn {
        &mut self.conn
    }

    /// Sends all steps in one write, and sees that each has its reply.
    pub(crate) fn run(&mut self, steps: &[Step]) {
        let commands: Vec<&str> = steps.iter().map(|step| step.command.as_str()).collect();
        let replies = self.conn.pipeline(&commands);
        for (step, reply) in steps.iter().zip(replies) {
            expect(step, &format!("{reply:?}"));
        }
    }

    /// The instructions since this was called before.
    pub(crate) fn count(&mut self) -> u64 {
        self.conn.run("PING");
        while self.profile(self.last + 1).exists() {
            // There is none before the first.
            let _ = fs::remove_file(self.profile(self.last));
            self.last += 1;
        }
        let profile = fs::read_to_string(self.profile(self.last)).unwrap();
        let totals = profile
            .lines()
            .find_map(|line| line.strip_prefix("totals: "));
        totals.expect("a profile of callgrind").parse().unwrap()
    }

    /// Keeps the profile of the last count under this name.
    pub(crate) fn keep_profile(&self, name: &str) {
        let of_letters = |char: char| if char.is_alphanumeric() { char } else { '-' };
        let name: String = name.to_lowercase().chars().map(of_letters).collect();
        fs::copy(self.profile(self.last), self.folder.join(name)).unwrap();
    }

    fn profile(&self, number: u32) -> PathBuf {
        self.folder.join(format!("count.{number}"))
    }
}

/// Stops the program if a reply is another one: something else than meant would be counted.
pub(crate) fn expect(step: &Step, said: &str) {
    let mut rest = said;
    let fits = step.reply.split('_').enumerate().all(|(index, part)| {
        if index > 0 {
            rest = rest.trim_start_matches(|char| !",]".contains(char));
        }
        let found = rest.strip_prefix(part);
        rest = found.unwrap_or_default();
        found.is_some()
    });
    assert!(fits && rest.is_empty(), "{}: {said}", step.command);
}
