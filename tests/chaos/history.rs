//! Requests, answers and their times: one text line each, so that a killed process leaves its lines
//! behind, and people can read a history.
//!
//! ```text
//! ask     ID TIME OWNER LOCK,… MODE TIE acquire LEASE-MS none|block|queue|guard
//! ask     ID TIME OWNER LOCK,… MODE TIE renew LEASE-MS
//! ask     ID TIME OWNER LOCK,… MODE TIE release
//! queued  ID TIME                              in the queue, and told so
//! told    ID TIME held COUNT TOKEN [OWNER]     nothing told: nobody knows
//! told    ID TIME entered TOKEN                several locks: those that the owner held are
//!                                              entered again and keep their tokens, the
//!                                              others get this one
//! told    ID TIME refused | left N | renewed N | lost | error CODE
//! told    ID TIME gave N                       several locks: one hold of each of so many
//! sure    TIME LOCK OWNER TOKEN                a guard says that it holds
//! wanted  TIME LOCK OWNER                      an event says that somebody wants what it holds
//! closed  TIME PROCESS                         it closes the connection its sessions live by
//! died    TIME PROCESS
//! fault   BEGIN END KIND [LOCK or PROCESS]
//! breaks  ID TIME LOCK                         a client asks to end whatever holds there are
//! broke   ID TIME
//! info    ASKED TOLD LOCK HOLDER,… WAITER,…    as OWNER/MODE/TOKEN and OWNER/MODE; none: -
//! ```
//!
//! IDs are `PROCESS.NUMBER`, or `PROCESS_SESSION.NUMBER` where a process has sessions that end
//! before it does: `closed` then names the session, and what befalls the process befalls each. MODE
//! is `plain`, `read`, `write`, or `permits:N` for N of [`LIMIT`] permits, and COUNT is N then; TIE
//! is `free`, or `session` for a hold that ends with a connection. Times are microseconds of the
//! clock that all processes share.

use std::collections::HashMap;
use std::time::Duration;

use rustix::time::{ClockId, clock_gettime};

/// Microseconds on a monotonic clock.
pub(crate) type Time = u64;

pub(crate) const MS: Time = 1000;

pub(crate) fn now() -> Time {
    let now = clock_gettime(ClockId::Monotonic);
    let now = Duration::try_from(now).expect("a clock that counts up");
    u64::try_from(now.as_micros()).expect("the clock's range")
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub(crate) enum Mode {
    Plain,
    Read,
    Write,
    /// So many, of [`LIMIT`] at most.
    Permits(u32),
}

/// So many permits may be out of each semaphore of the storm.
pub(crate) const LIMIT: u32 = 3;

impl Mode {
    /// The count of an owner that has it for the first time.
    pub(crate) fn first_count(self) -> u32 {
        match self {
            Self::Permits(permits) => permits,
            Self::Plain | Self::Read | Self::Write => 1,
        }
    }

    /// The count of an owner that had this count and is granted the lock again.
    pub(crate) fn next_count(self, count: u32) -> u32 {
        match self {
            // With `ONCE`: the lease starts anew.
            Self::Permits(_) => count,
            Self::Plain | Self::Read | Self::Write => count + 1,
        }
    }

    /// Permits go back together.
    pub(crate) fn given_back(self) -> u32 {
        self.first_count()
    }

    pub(crate) fn is_permits(self) -> bool {
        matches!(self, Self::Permits(_))
    }
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Ask {
    Acquire { lease: Time, wait: Wait },
    Renew { lease: Time },
    Release,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Wait {
    None,
    Block,
    Queue,
    /// However the client crate waits: it may have to queue again.
    Guard,
}

#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) enum Told {
    Held {
        count: u32,
        token: u64,
    },
    Refused,
    /// Of several locks: those held before are entered again, the others have this token.
    Entered {
        token: u64,
    },
    Left(u32),
    /// One hold of each of several locks; the answer does not say how many are left.
    Gave(u32),
    Renewed(u32),
    Lost,
    /// Refused in words: nothing was done.
    Error,
}

/// One command, or one call of the client crate.
#[derive(Debug, Clone)]
pub(crate) struct Operation {
    pub(crate) process: String,
    pub(crate) owner: String,
    pub(crate) locks: Vec<String>,
    pub(crate) mode: Mode,
    pub(crate) of_session: bool,
    pub(crate) ask: Ask,
    pub(crate) asked: Time,
    /// When it was told that it is in the queue.
    pub(crate) queued: Option<Time>,
    /// `None`: it may or may not have been done.
    pub(crate) told: Option<(Time, Told)>,
}

/// A guard that says "held".
#[derive(Debug, Clone)]
pub(crate) struct Belief {
    pub(crate) at: Time,
    pub(crate) lock: String,
    pub(crate) owner: String,
    /// That of its hold: an owner can have a lock several times, one hold after the other.
    pub(crate) token: u64,
}

/// A session was told that what this owner holds is wanted.
#[derive(Debug, Clone)]
pub(crate) struct Wanted {
    pub(crate) at: Time,
    pub(crate) lock: String,
    pub(crate) owner: String,
}

/// An answer of `RLOCK.INFO`.
#[derive(Debug, Clone)]
pub(crate) struct Sample {
    pub(crate) asked: Time,
    pub(crate) told: Time,
    pub(crate) lock: String,
    pub(crate) holders: Vec<Holder>,
    /// Owner and mode of each waiter.
    pub(crate) queue: Vec<(String, Mode)>,
}

#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Holder {
    pub(crate) owner: String,
    pub(crate) mode: Mode,
    pub(crate) token: Option<u64>,
}

/// Something that was done to the servers, the network or a process, from `begin` until it was
/// healed.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Fault {
    pub(crate) begin: Time,
    pub(crate) end: Time,
    pub(crate) kind: String,
    /// The lock or the process it was done to; none: all.
    pub(crate) to: Option<String>,
}

#[derive(Debug, Default)]
pub(crate) struct History {
    pub(crate) operations: Vec<Operation>,
    pub(crate) beliefs: Vec<Belief>,
    pub(crate) wanted: Vec<Wanted>,
    pub(crate) samples: Vec<Sample>,
    pub(crate) faults: Vec<Fault>,
    /// When a process closed the connection of its sessions, or of the one named.
    pub(crate) closed: HashMap<String, Vec<Time>>,
    pub(crate) died: Vec<(Time, String)>,
}

/// A break that was never answered was done by then, or never.
const UNANSWERED: Time = 3_000 * MS;

/// Whether what befalls `whole` befalls `process`, which may be a session of it.
pub(crate) fn is_part_of(process: &str, whole: &str) -> bool {
    process
        .strip_prefix(whole)
        .is_some_and(|rest| rest.is_empty() || rest.starts_with('_'))
}

/// Whether it is a session, which begins once and ends once, and not a whole process.
pub(crate) fn is_one_session(process: &str) -> bool {
    process.contains('_')
}

impl History {
    /// Reads the lines, in whatever order processes wrote them, as long as each one's own is kept.
    pub(crate) fn parse(text: &str) -> Self {
        let mut history = Self::default();
        let mut open = HashMap::new();
        for line in text.lines().map(str::trim).filter(|line| !line.is_empty()) {
            let understood = history.line(line, &mut open);
            assert!(understood.is_some(), "no line of a history: {line:?}");
        }
        history
    }

    fn line(&mut self, line: &str, open: &mut HashMap<String, usize>) -> Option<()> {
        let (kind, rest) = line.split_once(' ')?;
        let mut words = rest.split(' ');
        match kind {
            "ask" => {
                let id = words.next()?;
                open.insert(id.to_owned(), self.operations.len());
                let process = id.split_once('.')?.0;
                self.operations.push(operation(process, &mut words)?);
            }
            "queued" => {
                let index = *open.get(words.next()?)?;
                self.operations[index].queued = Some(words.next()?.parse().ok()?);
            }
            "told" => {
                let index = *open.get(words.next()?)?;
                let at = words.next()?.parse().ok()?;
                let operation = &mut self.operations[index];
                operation.told = Some((at, told(&mut words)?));
                // Only the answer says which owner the client chose.
                if let Some(owner) = words.next().filter(|_| operation.owner == "?") {
                    owner.clone_into(&mut operation.owner);
                }
            }
            "sure" => self.beliefs.push(Belief {
                at: words.next()?.parse().ok()?,
                lock: words.next()?.to_owned(),
                owner: words.next()?.to_owned(),
                token: words.next()?.parse().ok()?,
            }),
            "wanted" => self.wanted.push(Wanted {
                at: words.next()?.parse().ok()?,
                lock: words.next()?.to_owned(),
                owner: words.next()?.to_owned(),
            }),
            "died" => {
                let at = words.next()?.parse().ok()?;
                self.died.push((at, words.next()?.to_owned()));
            }
            "closed" => {
                let at = words.next()?.parse().ok()?;
                let process = words.next()?.to_owned();
                self.closed.entry(process).or_default().push(at);
            }
            "breaks" => {
                open.insert(words.next()?.to_owned(), self.faults.len());
                let begin = words.next()?.parse().ok()?;
                self.faults.push(Fault {
                    begin,
                    end: begin + UNANSWERED,
                    kind: "break".to_owned(),
                    to: Some(words.next()?.to_owned()),
                });
            }
            "broke" => {
                let index = *open.get(words.next()?)?;
                self.faults[index].end = words.next()?.parse().ok()?;
            }
            "fault" => self.faults.push(Fault {
                begin: words.next()?.parse().ok()?,
                end: words.next()?.parse().ok()?,
                kind: words.next()?.to_owned(),
                to: words.next().map(str::to_owned),
            }),
            "info" => self.samples.push(sample(&mut words)?),
            _ => return None,
        }
        Some(())
    }
}

type Words<'a, 'b> = &'a mut std::str::Split<'b, char>;

fn operation(process: &str, words: Words<'_, '_>) -> Option<Operation> {
    let asked = words.next()?.parse().ok()?;
    let owner = words.next()?.to_owned();
    let locks = words.next()?.split(',').map(str::to_owned).collect();
    let mode = mode(words.next()?)?;
    let of_session = words.next()? == "session";
    let ask = match words.next()? {
        "acquire" => Ask::Acquire {
            lease: words.next()?.parse::<Time>().ok()? * MS,
            wait: match words.next()? {
                "none" => Wait::None,
                "block" => Wait::Block,
                "queue" => Wait::Queue,
                "guard" => Wait::Guard,
                _ => return None,
            },
        },
        "renew" => Ask::Renew {
            lease: words.next()?.parse::<Time>().ok()? * MS,
        },
        "release" => Ask::Release,
        _ => return None,
    };
    Some(Operation {
        process: process.to_owned(),
        owner,
        locks,
        mode,
        of_session,
        ask,
        asked,
        queued: None,
        told: None,
    })
}

fn sample(words: Words<'_, '_>) -> Option<Sample> {
    Some(Sample {
        asked: words.next()?.parse().ok()?,
        told: words.next()?.parse().ok()?,
        lock: words.next()?.to_owned(),
        holders: list(words.next()?).map(holder).collect::<Option<_>>()?,
        queue: list(words.next()?)
            .map(|waiter| {
                let (owner, mode) = waiter.split_once('/')?;
                Some((owner.to_owned(), self::mode(mode)?))
            })
            .collect::<Option<_>>()?,
    })
}

fn told(words: Words<'_, '_>) -> Option<Told> {
    Some(match words.next()? {
        "held" => Told::Held {
            count: words.next()?.parse().ok()?,
            token: words.next()?.parse().ok()?,
        },
        "entered" => Told::Entered {
            token: words.next()?.parse().ok()?,
        },
        "gave" => Told::Gave(words.next()?.parse().ok()?),
        "refused" => Told::Refused,
        "left" => Told::Left(words.next()?.parse().ok()?),
        "renewed" => Told::Renewed(words.next()?.parse().ok()?),
        "lost" => Told::Lost,
        "error" => Told::Error,
        _ => return None,
    })
}

fn mode(word: &str) -> Option<Mode> {
    Some(match word {
        "plain" => Mode::Plain,
        "read" => Mode::Read,
        "write" => Mode::Write,
        _ => Mode::Permits(word.strip_prefix("permits:")?.parse().ok()?),
    })
}

fn holder(text: &str) -> Option<Holder> {
    let mut parts = text.split('/');
    Some(Holder {
        owner: parts.next()?.to_owned(),
        mode: mode(parts.next()?)?,
        token: parts.next()?.parse().ok(),
    })
}

fn list(text: &str) -> impl Iterator<Item = &str> {
    text.split(',').filter(|item| *item != "-")
}

#[test]
fn what_was_asked_finds_what_was_told() {
    let history = History::parse(
        "ask 1.1 100 a p0 plain free acquire 1000 block
         ask 1.2 150 ? p0 plain session acquire 1000 guard
         told 1.1 200 held 1 7
         queued 1.2 210
         told 1.2 900 held 1 8 uuid:1
         info 300 310 p0 a/plain/7 b/plain,c/plain
         info 300 310 p1 - -
         fault 400 500 break p0",
    );
    let [first, second] = &history.operations[..] else {
        panic!("{:?}", history.operations)
    };
    assert_eq!(first.told, Some((200, Told::Held { count: 1, token: 7 })));
    assert_eq!(
        (second.owner.as_str(), second.queued),
        ("uuid:1", Some(210))
    );
    assert_eq!(history.samples[0].queue.len(), 2);
    assert_eq!(history.samples[0].holders[0].token, Some(7));
    assert!(history.samples[1].holders.is_empty() && history.samples[1].queue.is_empty());
    assert_eq!(history.faults[0].to.as_deref(), Some("p0"));
}

#[test]
fn a_break_lasts_until_its_answer_or_for_a_while() {
    let history = History::parse(
        "breaks 1.1 100 t0
         breaks 1.2 200 t1
         broke 1.1 150",
    );
    let spans = history
        .faults
        .iter()
        .map(|fault| (fault.begin, fault.end, fault.to.as_deref()));
    let spans: Vec<_> = spans.collect();
    assert_eq!(
        spans,
        [(100, 150, Some("t0")), (200, 200 + UNANSWERED, Some("t1"))]
    );
}

#[test]
fn a_fault_of_a_process_concerns_its_sessions_only() {
    assert!(is_part_of("9", "9") && is_part_of("9_1", "9") && is_part_of("9_1", "9_1"));
    assert!(!is_part_of("9", "9_1") && !is_part_of("91", "9") && !is_part_of("9_12", "9_1"));
}
