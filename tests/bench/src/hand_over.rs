//! Part 2: how long it takes from the release until the next holder knows.
//!
//! Each contender is a circle: one holds, the others wait, and after a release the releaser waits
//! again, last in the queue. So as many wait each time. One thread drives them all, so nobody has
//! to be woken.

use std::collections::VecDeque;
use std::time::Instant;

use crate::host::Host;
use crate::load::all_of;
use crate::numbers::{figure, quantile};
use crate::plot::Lines;
use crate::report::Report;
use crate::results::{Results, at};
use crate::rounds::{Run, alternate};
use crate::waiters::{queue, session_connection};
use crate::wire::{MESSAGE, Step, Wire, request};
use rlock_tests::scripts;

pub(crate) const PART: &str = "hand_over";

const PING: &str = "PING round trip";
const BLOCKED: &str = "RLOCK blocked";
const QUEUED: &str = "RLOCK queued for a session";
const LIST: &str = "BLPOP + LPUSH";
const SCRIPTS: &str = "publish and retry";
const ALL: [&str; 5] = [PING, BLOCKED, QUEUED, LIST, SCRIPTS];

/// The waiters of one lock, and its holder.
pub(crate) trait Circle {
    /// One hand-over: the microseconds from the release to the next holder's knowledge.
    fn hand_over(&mut self) -> f64;
}

pub(crate) fn measure(run: &Run) -> Results {
    let mut results = Results::new(PART, &["p50_us", "p99_us"]);
    let host = run.host();
    for waiters in run.up_to(16, &[1, 16, 256, 4096]) {
        let mut circles: [Box<dyn Circle>; 5] = [
            Box::new(Ping(Wire::open(&host.server))),
            Box::new(Blocked::new(&host, waiters)),
            Box::new(Queued::new(&host, waiters)),
            Box::new(List::new(&host, waiters)),
            Box::new(Scripts::new(&host, waiters)),
        ];
        alternate(ALL.len(), run.rounds(9), |index, round| {
            let mut taken = Vec::new();
            let begun = Instant::now();
            while begun.elapsed() < run.length(250) || taken.len() < 3 {
                taken.push(circles[index].hand_over());
            }
            let values = [quantile(&taken, 0.5), quantile(&taken, 0.99)];
            results.add(&at("waiters", waiters), ALL[index], round, &values);
        });
    }
    results
}

fn us(begun: Instant) -> f64 {
    begun.elapsed().as_secs_f64() * 1e6
}

/// Nobody waits in two circles: the server would see them wait for each other.
fn owner(lock: &str, number: u64) -> String {
    format!("client of {lock}:{number}")
}

struct Ping(Wire);

impl Circle for Ping {
    fn hand_over(&mut self) -> f64 {
        let command = Step::of(&["PING"], &["+PONG"]);
        let begun = Instant::now();
        self.0.carry_out(&command);
        us(begun)
    }
}

/// A client that holds or waits, and its requests.
struct Member {
    wire: Wire,
    wait: Vec<u8>,
    release: Vec<u8>,
}

struct Blocked(VecDeque<Member>);

impl Blocked {
    fn new(host: &Host, waiters: u64) -> Self {
        let lock = format!("blocked:{waiters}");
        let mut members: VecDeque<_> = (0..=waiters)
            .map(|number| {
                let owner = owner(&lock, number);
                Member {
                    wire: Wire::open(&host.server),
                    wait: request(&["RLOCK.ACQUIRE", &lock, &owner, "3600000", "BLOCK", "0"]),
                    release: request(&["RLOCK.RELEASE", &lock, &owner]),
                }
            })
            .collect();
        for member in &mut members {
            member.wire.send(&member.wait);
        }
        let mut circle = Self(members);
        circle.0[0].wire.expect(&["*2", ":1", ":"]);
        circle.0[0].wire.settle();
        circle
    }
}

impl Circle for Blocked {
    fn hand_over(&mut self) -> f64 {
        let mut holder = self.0.pop_front().unwrap();
        let begun = Instant::now();
        holder.wire.send(&holder.release);
        let next = &mut self.0[0].wire;
        next.expect(&["*2", ":1", ":"]);
        let taken = us(begun);
        holder.wire.expect(&[":0"]);
        holder.wire.send(&holder.wait);
        next.settle();
        self.0.push_back(holder);
        taken
    }
}

/// All of them belong to one process: a connection for commands, and one for its events.
pub(crate) struct Queued {
    commands: Wire,
    events: Wire,
    next_events: Vec<u8>,
    /// The holder and the waiters in order: what each says to wait, and to release.
    line: VecDeque<(Step, Vec<u8>)>,
}

impl Queued {
    pub(crate) fn new(host: &Host, waiters: u64) -> Self {
        let lock = format!("queued:{waiters}");
        let session = format!("circle:{waiters}");
        let events = session_connection(&host.server, &session);
        let mut commands = Wire::open(&host.server);
        // Otherwise the session would be told of each release.
        let bind = ["RLOCK.BIND", &session, "EPOCH", "1"];
        commands.ask(&bind, &["*2", ":", "$40"]);
        commands.skip(1); // the server's run id
        let first = [
            "RLOCK.ACQUIRE",
            &lock,
            &owner(&lock, 0),
            "3600000",
            "SESSION",
            &session,
        ];
        commands.ask(&first, &["*2", ":1", ":"]);
        let line: VecDeque<_> = (0..=waiters)
            .map(|number| {
                let owner = owner(&lock, number);
                let release = request(&["RLOCK.RELEASE", &lock, &owner]);
                (queue(&lock, &owner, &session), release)
            })
            .collect();
        all_of(
            &host.server,
            line.iter().skip(1).map(|(wait, _)| wait.clone()),
        );
        Self {
            commands,
            events,
            next_events: request(&["RLOCK.EVENTS", &session, "BLOCK", "0"]),
            line,
        }
    }
}

impl Circle for Queued {
    fn hand_over(&mut self) -> f64 {
        self.events.send(&self.next_events);
        self.commands.settle();
        let holder = self.line.pop_front().unwrap();
        let begun = Instant::now();
        self.commands.send(&holder.1);
        self.events
            .expect(&["*2", ":", "*1", "*8", ":", "$7", "granted"]);
        self.events.skip(4); // the names of the lock and its owner, with their lengths
        self.events.expect(&[":", ":", "$5", "plain", ":0"]);
        let taken = us(begun);
        self.commands.expect(&[":0"]);
        self.commands.carry_out(&holder.0);
        self.line.push_back(holder);
        taken
    }
}

struct List {
    members: VecDeque<Wire>,
    wait: Vec<u8>,
    push: Vec<u8>,
}

impl List {
    fn new(host: &Host, waiters: u64) -> Self {
        let list = format!("list:{waiters}");
        let wait = request(&["BLPOP", &list, "0"]);
        let push = request(&["LPUSH", &list, "x"]);
        let mut members: VecDeque<_> = (0..=waiters).map(|_| Wire::open(&host.server)).collect();
        for wire in members.iter_mut().skip(1) {
            wire.send(&wait);
        }
        members[0].settle();
        Self {
            members,
            wait,
            push,
        }
    }
}

impl Circle for List {
    fn hand_over(&mut self) -> f64 {
        let mut holder = self.members.pop_front().unwrap();
        let begun = Instant::now();
        holder.send(&self.push);
        self.members[0].skip(5);
        let taken = us(begun);
        holder.expect(&[":1"]);
        holder.send(&self.wait);
        self.members[0].settle();
        self.members.push_back(holder);
        taken
    }
}

/// All have tried, and sleep until a message. The first to get it tries at once and wins,
/// before anybody else has tried: the kindest case. The others try too and are refused, and that is
/// not in the time.
struct Scripts {
    sleepers: Vec<Wire>,
    commands: Wire,
    attempts: [Vec<u8>; 2],
    releases: [Vec<u8>; 2],
    delete_latch: Step,
    /// Which of the two owners holds it.
    holder: usize,
}

impl Scripts {
    fn new(host: &Host, waiters: u64) -> Self {
        let mut commands = Wire::open(&host.server);
        let acquire = commands.load(scripts::ACQUIRE);
        let release = commands.load(scripts::RELEASE);
        let (lock, channel) = (format!("scripted:{waiters}"), format!("freed:{waiters}"));
        let latch = format!("latch:{waiters}");
        let owners = ["even", "odd"];
        let attempts =
            owners.map(|owner| request(&["EVALSHA", &acquire, "1", &lock, "3600000", owner]));
        let releases = owners.map(|owner| {
            request(&[
                "EVALSHA", &release, "3", &lock, &channel, &latch, owner, "30000", "16000",
            ])
        });
        commands.send(&attempts[0]);
        commands.expect(&["$-1"]);
        let sleepers = (0..waiters).map(|_| {
            let mut wire = Wire::open(&host.server);
            wire.subscribe(&channel);
            wire
        });
        Self {
            sleepers: sleepers.collect(),
            commands,
            attempts,
            releases,
            delete_latch: Step::of(&["DEL", &latch], &[":1"]),
            holder: 0,
        }
    }
}

impl Circle for Scripts {
    fn hand_over(&mut self) -> f64 {
        let next = 1 - self.holder;
        let (first, others) = self.sleepers.split_first_mut().unwrap();
        let begun = Instant::now();
        self.commands.send(&self.releases[self.holder]);
        first.skip(MESSAGE);
        self.commands.send(&self.attempts[next]);
        self.commands.expect(&[":1", "$-1"]);
        let taken = us(begun);
        for sleeper in others.iter_mut() {
            sleeper.skip(MESSAGE);
            self.commands.send(&self.attempts[self.holder]);
        }
        for _ in others {
            self.commands.expect(&[":"]);
        }
        self.commands.carry_out(&self.delete_latch);
        self.holder = next;
        taken
    }
}

pub(crate) fn report(results: &Results) -> Report {
    let mut report = Report::titled("2. Hand-over");
    report.says(
        "From the moment at which the release is sent until the next holder knows, by the number \
         of waiters. Microseconds, and the median against the round trip of a PING beside it.",
    );
    for waiters in results.sizes("waiters") {
        let at = at("waiters", waiters);
        let row = |name: &str| {
            vec![
                name.to_owned(),
                figure(results.median(&at, name, "p50_us")),
                figure(results.median(&at, name, "p99_us")),
                results.ratio(&at, "p50_us", name, PING).to_string(),
                results.ratio(&at, "p50_us", BLOCKED, name).to_string(),
            ]
        };
        let head = format!("{waiters} waiting");
        let head = [
            &head,
            "p50 µs",
            "p99 µs",
            "p50 against PING",
            "RLOCK's against it",
        ];
        report.table(&head, &ALL.map(row));
    }
    let against_ping =
        |waiters: u64, name| results.ratio(&at("waiters", waiters), "p50_us", name, PING);
    report.at_most(
        "hand-over against PING, 1 waiter",
        1.10,
        against_ping(1, BLOCKED),
    );
    report.at_most("… queued", 1.10, against_ping(1, QUEUED));
    report.at_most(
        "hand-over against PING, 4,096 waiters",
        1.25,
        against_ping(4096, BLOCKED),
    );
    report.at_most("… queued", 1.25, against_ping(4096, QUEUED));
    report
}

pub(crate) fn plots(results: &Results) -> Vec<(&'static str, String)> {
    let sizes = results.sizes("waiters");
    let line = |name: &str| {
        let points = sizes.iter().map(|waiters| {
            let at = at("waiters", *waiters);
            (*waiters, results.median(&at, name, "p50_us"))
        });
        (name.to_owned(), points.collect())
    };
    let plot = Lines {
        title: "Hand-over: release sent until the next holder knows (median)",
        over: "waiters",
        unit: "µs",
        curves: ALL.map(line).to_vec(),
    };
    vec![("hand-over", plot.draw())]
}
