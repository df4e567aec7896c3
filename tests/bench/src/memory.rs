//! Part 6: what one more of everything costs.

use std::thread;
use std::time::{Duration, Instant};

use crate::host::Host;
use crate::load::all_of;
use crate::numbers::{Spread, figure};
use crate::report::Report;
use crate::results::{At, Results, at};
use crate::rounds::Run;
use crate::uncontended::{OWNER, hold};
use crate::waiters::{queue, session_connection};
use crate::wire::{Step, Wire, request};

pub(crate) const PART: &str = "memory";

const LOCK: &str = "a held lock";
const HASH: &str = "its bare hash";
const QUEUED: &str = "a queued waiter of one lock";
const QUEUED_ALONE: &str = "a queued waiter alone in its queue";
const BLOCKED: &str = "a blocked waiter";
const LIST: &str = "a client in BLPOP";
const SESSION: &str = "a session";

pub(crate) fn measure(run: &Run) -> Results {
    let mut results = Results::new(PART, &["bytes"]);
    let locks = run.at_most(100_000, 5000);
    let waiters = run.at_most(10_000, 1000);
    let clients = run.at_most(4000, 200);
    for round in 0..run.rounds(3) {
        let mut add = |name, size, bytes| results.add(&everything(size), name, round, &[bytes]);
        add(LOCK, locks, of_keys(run, locks, hold));
        add(HASH, locks, of_keys(run, locks, bare_hash));
        add(
            QUEUED,
            waiters,
            of_waiters(run, waiters, |_| "contended".to_owned()),
        );
        add(
            QUEUED_ALONE,
            waiters,
            of_waiters(run, waiters, |number| format!("held:{number}")),
        );
    }
    // Buffers of clients come and go, so the rest takes a while to show: one round.
    let wait = |number: u64| {
        let owner = format!("client:{number}");
        request(&["RLOCK.ACQUIRE", "held:0", &owner, "3600000", "BLOCK", "0"])
    };
    let list = |_| request(&["BLPOP", "list", "0"]);
    let listen = |number: u64| request(&["RLOCK.EVENTS", &format!("session:{number}")]);
    let mut add = |name, bytes| results.add(&everything(clients), name, 0, &[bytes]);
    add(BLOCKED, of_clients(run, clients, &wait));
    add(LIST, of_clients(run, clients, &list));
    add(SESSION, of_clients(run, clients, &listen));
    results
}

fn everything(size: u64) -> At {
    at("bytes for one of so many", size)
}

fn of_keys(run: &Run, keys: u64, key: impl Fn(u64) -> Step) -> f64 {
    let mut host = run.host();
    // The first command of all makes what the server needs once.
    all_of(&host.server, [key(keys)].into_iter());
    let before = host.memory();
    all_of(&host.server, (0..keys).map(key));
    (host.memory() - before) / keys as f64
}

/// As long as the lock that [`hold`] leaves, and with the same TTL.
pub(crate) fn bare_hash(number: u64) -> Step {
    let name = format!("held:{number}");
    let token = format!("t{}", 1_795_207_698_527_503 + number);
    Step::joined([
        Step::of(&["HSET", &name, OWNER, "1", "fence", &token], &[":2"]),
        Step::of(&["PEXPIRE", &name, "3600000"], &[":1"]),
    ])
}

fn of_waiters(run: &Run, waiters: u64, lock_of: impl Fn(u64) -> String) -> f64 {
    let mut host = run.host();
    let held = |name: &str| {
        Step::of(
            &["RLOCK.ACQUIRE", name, OWNER, "3600000"],
            &["*2", ":1", ":"],
        )
    };
    all_of(
        &host.server,
        (0..waiters).map(hold).chain([held("contended")]),
    );
    let _session_connection = session_connection(&host.server, "many");
    let wait = |number| queue(&lock_of(number), &format!("waiter:{number}"), "many");
    let before = host.memory();
    all_of(&host.server, (0..waiters).map(wait));
    (host.memory() - before) / waiters as f64
}

/// The memory that this command costs, beyond that of an idle connection.
fn of_clients(run: &Run, clients: u64, say: &dyn Fn(u64) -> Vec<u8>) -> f64 {
    let mut host = run.host();
    all_of(&host.server, [hold(0)].into_iter());
    let mut wires: Vec<Wire> = (0..clients).map(|_| Wire::open(&host.server)).collect();
    for wire in &mut wires {
        wire.settle();
    }
    let before = memory_at_rest(&mut host);
    for (number, wire) in (0..).zip(&mut wires) {
        wire.send(&say(number));
    }
    (memory_at_rest(&mut host) - before) / clients as f64
}

/// The server's memory once it has taken back the buffers of clients that say nothing, which it
/// does some two seconds after their last word.
fn memory_at_rest(host: &mut Host) -> f64 {
    let begun = Instant::now();
    let mut last = host.memory();
    loop {
        // Not a wait for something to be true: the interval of the comparison.
        thread::sleep(Duration::from_millis(1100));
        let now = host.memory();
        let at_rest = (now - last).abs() < 20_000.0;
        if at_rest && begun.elapsed() > Duration::from_secs(4) {
            return now;
        }
        assert!(
            begun.elapsed() < Duration::from_secs(60),
            "the memory does not come to rest"
        );
        last = now;
    }
}

pub(crate) fn report(results: &Results) -> Report {
    let mut report = Report::titled("6. Memory");
    report.says(
        "Bytes that the server allocates for one more. A waiter that is blocked, a client in BLPOP \
         and a session come on top of what an idle connection costs.",
    );
    let case = "bytes for one of so many";
    let mut rows = Vec::new();
    let mut of_lock = Vec::new();
    let mut of_hash = Vec::new();
    let mut of_queued = Spread::of(&[]);
    for size in results.sizes(case) {
        let at = at(case, size);
        for name in results.contenders(&at) {
            let values = results.values(&at, &name, "bytes");
            match name.as_str() {
                LOCK => of_lock.clone_from(&values),
                HASH => of_hash.clone_from(&values),
                QUEUED_ALONE => of_queued = Spread::of(&values),
                _ => {}
            }
            rows.push(vec![name, figure(Spread::of(&values).median)]);
        }
    }
    report.table(&["", "bytes"], &rows);
    report.at_most("bytes of a queued waiter", 1024.0, of_queued);
    report.at_most(
        "a held lock against its bare hash",
        1.005,
        Spread::of_ratios(&of_lock, &of_hash),
    );
    report
}
