//! Part 3: many clients that fight for one lock. Take, give back, and again.
//!
//! All clients are driven by one thread, which acts when something arrives for one of them: a
//! thread each would measure the system's scheduler.

use std::os::fd::AsFd as _;
use std::time::Instant;

use rlock_tests::Server;
use rustix::buffer::spare_capacity;
use rustix::event::epoll;
use rustix::fd::OwnedFd;

use crate::host::Host;
use crate::numbers::{figure, quantile_of_sorted};
use crate::plot::Lines;
use crate::report::Report;
use crate::results::{Results, at};
use crate::rounds::{Run, alternate};
use crate::wire::{MESSAGE, Wire, request};
use rlock_tests::scripts;

pub(crate) const PART: &str = "contended";

const RLOCK: &str = "RLOCK blocked";
const SCRIPTS: &str = "publish and retry";
const BOTH: [&str; 2] = [RLOCK, SCRIPTS];
const MEASURES: [&str; 8] = [
    "grants_per_second",
    "attempts_per_grant",
    "cpu_us_per_grant",
    "least_wins_percent",
    "most_wins_percent",
    "wait_p50_us",
    "wait_p99_us",
    "wait_p999_us",
];

pub(crate) fn measure(run: &Run) -> Results {
    let mut results = Results::new(PART, &MEASURES);
    let mut host = run.host();
    let mut fights = 0;
    for clients in run.up_to(50, &[2, 10, 50, 500]) {
        alternate(BOTH.len(), run.rounds(5), |index, round| {
            // The last fight's leftovers are not in the way of the next.
            fights += 1;
            let lock = format!("fought:{fights}");
            let values = if index == 0 {
                let blocked = |number| Blocked::new(&host.server, &lock, number);
                let clients = (0..clients).map(blocked).collect();
                fight(run, &mut host, clients)
            } else {
                let retrying = |number| Retrying::new(&host.server, &lock, number);
                let clients = (0..clients).map(retrying).collect();
                fight(run, &mut host, clients)
            };
            results.add(&at("clients", clients), BOTH[index], round, &values);
        });
    }
    results
}

/// A client, which acts when something has arrived for it.
trait Client {
    fn sockets(&self) -> Vec<&Wire>;
    fn begin(&mut self);
    /// Something has arrived on that one of its sockets.
    fn act(&mut self, socket: usize);
    fn tally(&mut self) -> &mut Tally;
}

/// A client's results.
#[derive(Debug, Default)]
struct Tally {
    attempts: u64,
    wins: u64,
    waiting_since: Option<Instant>,
    waits_us: Vec<f64>,
}

impl Tally {
    fn won(&mut self) {
        self.wins += 1;
        let since = self.waiting_since.take().unwrap();
        self.waits_us.push(since.elapsed().as_secs_f64() * 1e6);
    }
}

/// The results of a fight of that length, in the order of the measures.
fn fight(run: &Run, host: &mut Host, mut clients: Vec<impl Client>) -> [f64; 8] {
    let poll = watch(&clients);
    let mut events = Vec::with_capacity(1024);
    let length = run.length(1500);
    let cpu_before = host.cpu_us();
    let begun = Instant::now();
    for client in &mut clients {
        client.begin();
    }
    while begun.elapsed() < length {
        epoll::wait(&poll, spare_capacity(&mut events), None).unwrap();
        for event in events.drain(..) {
            let data = usize::try_from(event.data.u64()).unwrap();
            clients[data / 2].act(data % 2);
        }
    }
    let seconds = begun.elapsed().as_secs_f64();
    let cpu = host.cpu_us() - cpu_before;
    let tallies: Vec<_> = clients.iter_mut().map(Client::tally).collect();
    summary(&tallies, seconds, cpu)
}

/// Each socket is known by the number of its client, and which of its two it is.
fn watch(clients: &[impl Client]) -> OwnedFd {
    let poll = epoll::create(epoll::CreateFlags::CLOEXEC).unwrap();
    for (number, client) in clients.iter().enumerate() {
        for (socket, wire) in client.sockets().into_iter().enumerate() {
            let data = epoll::EventData::new_u64((number * 2 + socket) as u64);
            epoll::add(&poll, wire.as_fd(), data, epoll::EventFlags::IN).unwrap();
        }
    }
    poll
}

fn summary(tallies: &[&mut Tally], seconds: f64, cpu: f64) -> [f64; 8] {
    let grants: u64 = tallies.iter().map(|tally| tally.wins).sum();
    let attempts: u64 = tallies.iter().map(|tally| tally.attempts).sum();
    // The last attempt of clients that still wait belongs to a grant that is not counted.
    let waiting = tallies.iter().filter(|tally| tally.waiting_since.is_some());
    let attempts = attempts - waiting.count() as u64;
    let grants = grants as f64;
    let mean = grants / tallies.len() as f64;
    let wins = || tallies.iter().map(|tally| tally.wins as f64 * 100.0 / mean);
    let mut waits: Vec<f64> = Vec::new();
    for tally in tallies {
        waits.extend(&tally.waits_us);
    }
    waits.sort_by(f64::total_cmp);
    [
        grants / seconds,
        attempts as f64 / grants,
        cpu / grants,
        wins().fold(f64::MAX, f64::min),
        wins().fold(0.0, f64::max),
        quantile_of_sorted(&waits, 0.5),
        quantile_of_sorted(&waits, 0.99),
        quantile_of_sorted(&waits, 0.999),
    ]
}

/// Waits in the server.
struct Blocked {
    wire: Wire,
    acquire: Vec<u8>,
    release: Vec<u8>,
    holds: bool,
    tally: Tally,
}

impl Blocked {
    fn new(server: &Server, lock: &str, number: u64) -> Self {
        let owner = format!("client:{number}");
        Self {
            wire: Wire::open(server),
            acquire: request(&["RLOCK.ACQUIRE", lock, &owner, "30000", "BLOCK", "0"]),
            release: request(&["RLOCK.RELEASE", lock, &owner]),
            holds: false,
            tally: Tally::default(),
        }
    }
}

impl Client for Blocked {
    fn sockets(&self) -> Vec<&Wire> {
        vec![&self.wire]
    }

    fn begin(&mut self) {
        self.tally.attempts += 1;
        self.tally.waiting_since = Some(Instant::now());
        self.wire.send(&self.acquire);
    }

    fn act(&mut self, _: usize) {
        self.wire.receive();
        if self.holds {
            self.wire.expect(&[":0"]);
            self.holds = false;
            self.begin();
        } else {
            self.wire.expect(&["*2", ":1", ":"]);
            self.holds = true;
            self.tally.won();
            self.wire.send(&self.release);
        }
    }

    fn tally(&mut self) -> &mut Tally {
        &mut self.tally
    }
}

/// As the usual client does it: tries, and after each message tries again. Messages that have piled
/// up by then count as one. The latch's DEL is waited for, but after the release, so nobody else
/// waits for it.
struct Retrying {
    wire: Wire,
    messages: Wire,
    acquire: Vec<u8>,
    release: Vec<u8>,
    delete_latch: Vec<u8>,
    state: State,
    /// A message has come since the last attempt was sent.
    news: bool,
    tally: Tally,
}

/// The state of a client that retries: it waits for a reply or, asleep, for a message.
enum State {
    Trying,
    Asleep,
    Releasing,
    DeletingLatch,
}

impl Retrying {
    fn new(server: &Server, lock: &str, number: u64) -> Self {
        let (mut wire, mut messages) = (Wire::open(server), Wire::open(server));
        let acquire = wire.load(scripts::ACQUIRE);
        let release = wire.load(scripts::RELEASE);
        let channel = format!("freed:{lock}");
        messages.subscribe(&channel);
        let (owner, latch) = (format!("client:{number}"), format!("latch:{lock}:{number}"));
        Self {
            wire,
            messages,
            acquire: request(&["EVALSHA", &acquire, "1", lock, "30000", &owner]),
            release: request(&[
                "EVALSHA", &release, "3", lock, &channel, &latch, &owner, "30000", "16000",
            ]),
            delete_latch: request(&["DEL", &latch]),
            state: State::Trying,
            news: false,
            tally: Tally::default(),
        }
    }

    fn attempt(&mut self) {
        self.tally.attempts += 1;
        self.state = State::Trying;
        self.news = false;
        self.wire.send(&self.acquire);
    }

    fn hear(&mut self) {
        self.messages.receive();
        while self.messages.has_lines(MESSAGE) {
            self.messages.skip(MESSAGE);
            self.news = true;
        }
    }

    fn go_on(&mut self) {
        self.wire.receive();
        match self.state {
            State::Trying if self.wire.line()[0] == b':' => self.state = State::Asleep,
            State::Trying => {
                self.tally.won();
                self.state = State::Releasing;
                self.wire.send(&self.release);
            }
            State::Releasing => {
                self.wire.expect(&[":1"]);
                self.state = State::DeletingLatch;
                self.wire.send(&self.delete_latch);
            }
            State::DeletingLatch => {
                self.wire.expect(&[":1"]);
                self.begin();
            }
            State::Asleep => unreachable!("nothing was asked"),
        }
    }
}

impl Client for Retrying {
    fn sockets(&self) -> Vec<&Wire> {
        vec![&self.wire, &self.messages]
    }

    fn begin(&mut self) {
        self.tally.waiting_since = Some(Instant::now());
        self.attempt();
    }

    fn act(&mut self, socket: usize) {
        if socket == 0 {
            self.go_on();
        } else {
            self.hear();
        }
        // A message that came while the refusal was on its way counts as well.
        if self.news && matches!(self.state, State::Asleep) {
            self.attempt();
        }
    }

    fn tally(&mut self) -> &mut Tally {
        &mut self.tally
    }
}

pub(crate) fn report(results: &Results) -> Report {
    let mut report = Report::titled("3. Contended");
    report.says(
        "Clients that fight for one lock, with nothing to do while they hold it. The wait is from \
         the first attempt to the grant; wins are those of the client with the fewest and of the \
         one with the most, in percent of the mean.",
    );
    let head = [
        "grants/s",
        "attempts a grant",
        "CPU µs a grant",
        "wins %",
        "wait p50 µs",
        "p99",
        "p99.9",
    ];
    for clients in results.sizes("clients") {
        let at = at("clients", clients);
        let row = |name: &str| {
            let of = |measure| figure(results.median(&at, name, measure));
            let wins = format!(
                "{} to {}",
                of("least_wins_percent"),
                of("most_wins_percent")
            );
            vec![
                name.to_owned(),
                of("grants_per_second"),
                of("attempts_per_grant"),
                of("cpu_us_per_grant"),
                wins,
                of("wait_p50_us"),
                of("wait_p99_us"),
                of("wait_p999_us"),
            ]
        };
        let clients = format!("{clients} clients");
        report.table(&[&[clients.as_str()][..], &head].concat(), &BOTH.map(row));
        let against = |measure| results.ratio(&at, measure, RLOCK, SCRIPTS);
        report.says(&format!(
            "RLOCK against it: {} of the grants, {} of the CPU a grant.",
            against("grants_per_second"),
            against("cpu_us_per_grant")
        ));
    }
    targets(results, &mut report);
    report
}

fn targets(results: &Results, report: &mut Report) {
    let fifty = at("clients", 50_u64);
    let against = |measure| results.ratio(&fifty, measure, RLOCK, SCRIPTS);
    report.at_least(
        "grants/s against scripts, 50 clients",
        4.0,
        against("grants_per_second"),
    );
    report.at_most("CPU a grant against them", 0.1, against("cpu_us_per_grant"));
    let own = |measure| results.spread(&fifty, RLOCK, measure);
    report.at_most("attempts a grant", 1.0, own("attempts_per_grant"));
    report.at_least(
        "wins of the client with the fewest, % of the mean",
        95.0,
        own("least_wins_percent"),
    );
    report.at_most(
        "wins of the client with the most, % of the mean",
        105.0,
        own("most_wins_percent"),
    );
    report.gain = Some(format!(
        "- 50 clients that compete for one lock get it {} times as often as by publish and retry, \
         for {} of the server's CPU time per grant.",
        against("grants_per_second"),
        against("cpu_us_per_grant"),
    ));
}

pub(crate) fn plots(results: &Results) -> Vec<(&'static str, String)> {
    let sizes = results.sizes("clients");
    let line = |name: &str, words: &str, measure: &str| {
        let points = sizes.iter().map(|clients| {
            let at = at("clients", *clients);
            (*clients, results.median(&at, name, measure))
        });
        (format!("{name}{words}"), points.collect())
    };
    let plot = |title, unit, curves| Lines {
        title,
        over: "clients",
        unit,
        curves,
    };
    let speed = BOTH
        .map(|name| line(name, "", "grants_per_second"))
        .to_vec();
    let waits = BOTH.map(|name| {
        [
            line(name, ", median", "wait_p50_us"),
            line(name, ", p99.9", "wait_p999_us"),
        ]
    });
    vec![
        (
            "contended-grants",
            plot(
                "Clients that compete for one lock",
                "grants per second",
                speed,
            )
            .draw(),
        ),
        (
            "contended-waits",
            plot(
                "Clients that compete for one lock: time of a wait",
                "µs",
                waits.concat(),
            )
            .draw(),
        ),
    ]
}
