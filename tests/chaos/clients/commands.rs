//! The commands of clients without the crate, and their replies.

use std::io;
use std::time::Duration;

use rlock_tests::{Conn, Reply};

use super::Life;
use crate::history::LIMIT;
use crate::random::Random;

/// Plain locks, read-write locks, locks that are taken several at once, and semaphores.
pub(crate) type Locks = &'static [&'static str];

pub(crate) const LOCKS: Locks = &[
    "p0", "p1", "p2", "rw0", "rw1", "s0", "s1", "s2", "sem0", "sem1",
];

/// All in one slot of a cluster.
pub(crate) const LOCKS_OF_A_SLOT: Locks = &[
    "{c}p0", "{c}p1", "{c}p2", "{c}rw0", "{c}rw1", "{c}s0", "{c}s1", "{c}s2", "{c}sem0", "{c}sem1",
];

const LEASES_MS: [u64; 3] = [300, 1000, 2500];

/// No lease is longer, of the crate's guards neither.
pub(crate) const LONGEST_LEASE: Duration = Duration::from_millis(2500);

/// Longer than any round: such a hold ends with its session, or not at all.
const LEASE_OF_A_SESSION_MS: u64 = 60_000;

/// How long a client waits for a reply, besides the wait that it asked for.
const REPLY_WITHIN: Duration = Duration::from_millis(1500);

/// One owner's use of one lock, or of several at once.
#[derive(Debug, Clone)]
pub(super) struct Use {
    pub(super) owner: String,
    pub(super) locks: Vec<&'static str>,
    /// `READ`, `WRITE`, `PERMITS` or nothing.
    mode: &'static str,
    permits: u32,
    tie: &'static str,
    lease: u64,
    /// The token that `RLOCK.RELEASE` compares.
    pub(super) token: Option<u64>,
}

impl Use {
    pub(super) fn new(life: &Life, random: &mut Random, tie: &'static str) -> Self {
        let permits = permits(random);
        let (locks, mode) = match random.within(0, 100) {
            0..45 => (vec![*random.pick(&life.locks[..3])], ""),
            45..60 => (vec![*random.pick(&life.locks[3..5])], "READ"),
            60..70 => (vec![*random.pick(&life.locks[3..5])], "WRITE"),
            70..85 => (vec![*random.pick(&life.locks[8..])], "PERMITS"),
            _ => {
                let mut several = life.locks[5..8].to_vec();
                for _ in 0..random.within(0, 3) {
                    let left = random.within(0, several.len() as u64);
                    several.remove(usize::try_from(left).expect("an index"));
                }
                (several, "")
            }
        };
        Self {
            owner: life.owner(),
            locks,
            mode,
            permits,
            tie,
            lease: *random.pick(&LEASES_MS),
            token: None,
        }
    }

    /// A use by a session, until it gives the lock back or ends.
    pub(super) fn of(owner: String, locks: &[&'static str], mode: &'static str) -> Self {
        Self {
            owner,
            locks: locks.to_vec(),
            mode,
            permits: 0,
            tie: "session",
            lease: LEASE_OF_A_SESSION_MS,
            token: None,
        }
    }

    pub(super) fn for_ms(self, lease: u64) -> Self {
        Self { lease, ..self }
    }

    /// A writer's own reading.
    pub(super) fn reading(&self) -> Option<Self> {
        let reading = Self {
            mode: "READ",
            token: None,
            ..self.clone()
        };
        (self.mode == "WRITE").then_some(reading)
    }

    pub(super) fn is_of_permits(&self) -> bool {
        self.mode == "PERMITS"
    }

    /// The count of an owner that has it for the first time.
    pub(super) fn count(&self) -> u32 {
        if self.is_of_permits() {
            self.permits
        } else {
            1
        }
    }

    /// The mode as ACQUIRE is told.
    fn asked(&self) -> String {
        let (mode, permits) = (self.mode, self.permits);
        if self.is_of_permits() {
            format!("{mode} {permits} OF {LIMIT}")
        } else {
            mode.to_owned()
        }
    }

    pub(super) fn is_of_one(&self) -> bool {
        self.locks.len() == 1
    }

    /// Whether a token can be named with a release: a writer's is known to one server only.
    pub(super) fn has_a_token(&self) -> bool {
        self.is_of_one() && self.mode != "WRITE"
    }

    pub(super) fn lease(&self) -> Duration {
        Duration::from_millis(self.lease)
    }

    /// How a line of a history begins that speaks of this.
    fn line(&self) -> String {
        let mode = match self.mode {
            "" => "plain".to_owned(),
            "PERMITS" => format!("permits:{}", self.permits),
            mode => mode.to_lowercase(),
        };
        format!(
            "{} {} {mode} {}",
            self.owner,
            self.locks.join(","),
            self.tie
        )
    }

    pub(super) fn acquire(&self, wait: &str, rest: &str) -> Asked {
        let Self { owner, lease, .. } = self;
        let command = if self.is_of_one() {
            format!(
                "RLOCK.ACQUIRE {} {owner} {lease} {} {rest}",
                self.locks[0],
                self.asked()
            )
        } else {
            let locks = self.locks.join(" ");
            format!(
                "RLOCK.MACQUIRE {owner} {lease} {} {locks} {rest}",
                self.locks.len()
            )
        };
        Asked::new(&command, format!("{} acquire {lease} {wait}", self.line()))
    }

    pub(super) fn renew(&self) -> Asked {
        let Self { owner, lease, .. } = self;
        let command = if self.is_of_one() {
            format!(
                "RLOCK.RENEW {} {owner} {lease} {}",
                self.locks[0], self.mode
            )
        } else {
            format!(
                "RLOCK.MRENEW {owner} {lease} {} {}",
                self.locks.len(),
                self.locks.join(" ")
            )
        };
        Asked::new(&command, format!("{} renew {lease}", self.line()))
    }

    pub(super) fn release(&self) -> Asked {
        let owner = &self.owner;
        let command = if self.is_of_one() {
            let permits = self.is_of_permits().then(|| self.permits.to_string());
            let permits = permits.unwrap_or_default();
            let token = self
                .token
                .map(|token| format!("TOKEN {token}"))
                .unwrap_or_default();
            format!(
                "RLOCK.RELEASE {} {owner} {} {permits} {token}",
                self.locks[0], self.mode
            )
        } else {
            format!(
                "RLOCK.MRELEASE {owner} {} {}",
                self.locks.len(),
                self.locks.join(" ")
            )
        };
        Asked::new(&command, format!("{} release", self.line()))
    }

    /// A grant, as a history says it; `None`: it is something else.
    pub(super) fn held(reply: &Reply) -> Option<(i64, i64)> {
        let Reply::Array(items) = reply else {
            return None;
        };
        match items[..] {
            [Reply::Int(count), Reply::Int(token)] if count > 0 => Some((count, token)),
            _ => None,
        }
    }

    /// The meaning of the answer to an acquisition that no longer waits. Of several locks the count
    /// is the highest, and the owner may have held some.
    pub(super) fn acquired(&self, reply: &Reply) -> String {
        match Self::held(reply) {
            Some((count, token)) if self.is_of_one() => format!("held {count} {token}"),
            Some((_, token)) => format!("entered {token}"),
            None => refusal(reply).unwrap_or_else(|| "refused".to_owned()),
        }
    }

    /// The meaning of such an event.
    pub(super) fn granted(&self, token: i64) -> String {
        if self.is_of_one() {
            format!("held {} {token}", self.count())
        } else {
            format!("entered {token}")
        }
    }

    /// The meaning of the answer to a release. Of several locks some may have been lost, and which
    /// is not said.
    pub(super) fn released(&self, reply: &Reply) -> Option<String> {
        let count = i64::try_from(self.locks.len()).expect("three at most");
        match reply {
            Reply::Int(left) if self.is_of_one() => Some(format!("left {left}")),
            Reply::Null | Reply::Int(0) => Some("lost".to_owned()),
            Reply::Int(released) if *released == count => Some("left 0".to_owned()),
            other => refusal(other),
        }
    }
}

/// How many permits one asks for: all of them now and then.
pub(super) fn permits(random: &mut Random) -> u32 {
    *random.pick(&[1, 1, 1, 2, 2, LIMIT])
}

/// A command, and the line that says so.
#[derive(Debug)]
pub(super) struct Asked {
    command: String,
    line: String,
}

impl Asked {
    fn new(command: &str, line: String) -> Self {
        let words: Vec<_> = command.split_ascii_whitespace().collect();
        let command = words.join(" ");
        Self { command, line }
    }

    /// Writes down that it is asked, to be sent with others; the number by which to tell the
    /// answer, and the command.
    pub(super) fn begin(self, life: &Life) -> (String, String) {
        (life.ask(&self.line), self.command)
    }

    /// Sends it and waits for the reply; with the number by which to tell what that means.
    pub(super) fn send(
        &self,
        life: &Life,
        conn: &mut Conn,
        wait: Duration,
    ) -> io::Result<(String, Reply)> {
        let id = life.ask(&self.line);
        conn.try_send(&self.command)?;
        Ok((id, conn.try_read(wait + REPLY_WITHIN)?))
    }
}

/// An error reply, as a history says it.
pub(super) fn refusal(reply: &Reply) -> Option<String> {
    let Reply::Error(text) = reply else {
        return None;
    };
    let text = String::from_utf8_lossy(text);
    let code = text.split(' ').next().unwrap_or("ERR");
    Some(format!("error {code}"))
}
