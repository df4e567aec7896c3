//! The cost of handing a lock from one waiter to the next: Redisson's two ways, and ours.

use std::thread;
use std::time::{Duration, Instant};

use rlock_tests::Server;

use crate::java::Redisson;

/// Each in a process of its own, or what the server takes for one.
const WAITERS: usize = 8;

/// A held lock is waited for by all, is released, and goes through the hands of all.
struct Cost {
    what: &'static str,
    /// From the release to the last one's return.
    took: Duration,
    /// The clients' requests to take and to release: scripts, or our commands.
    sent: u64,
    /// All commands, those that scripts ran as well.
    run: u64,
}

#[test]
fn a_queue_of_ours_costs_two_commands_a_waiter() {
    let costs = [
        redisson("lock", "Redisson's RLock"),
        redisson("fair", "Redisson's fair lock"),
        ours(),
    ];
    for Cost {
        what,
        took,
        sent,
        run,
    } in &costs
    {
        println!(
            "{WAITERS} waiters, {what}: {:.1} ms, {sent} sent, {run} commands run",
            took.as_secs_f64() * 1e3,
        );
    }
    let [plain, fair, ours] = costs;
    // Each takes and releases, and so does the holder, who took it before the count began.
    let least = 2 * WAITERS as u64 + 1;
    assert_eq!((ours.sent, ours.run), (least, least));
    assert!(plain.sent > least && fair.sent > least);
}

#[track_caller]
fn redisson(kind: &str, what: &'static str) -> Cost {
    let server = Server::start();
    let clients: Vec<_> = (0..=WAITERS).map(|_| Redisson::of(&server)).collect();
    let owners: Vec<_> = clients.iter().map(Redisson::owner).collect();
    let (holder, waiters) = owners.split_first().expect("a holder");
    for owner in &owners {
        owner.does(&format!("{kind} warm pass")); // the server knows the scripts now
    }
    holder.does(&format!("{kind} k lock"));
    server.run("CONFIG RESETSTAT");
    for waiter in waiters {
        waiter.waits(&format!("{kind} k pass"));
    }
    let began = Instant::now();
    holder.does(&format!("{kind} k unlock"));
    let ends = waiters.iter().map(|waiter| {
        let answer = waiter.answer();
        assert_eq!(answer.text, "ok");
        answer.ended
    });
    let took = ends.max().expect("waiters") - began;
    let (sent, run) = commands(&server, "evalsha:");
    Cost {
        what,
        took,
        sent,
        run,
    }
}

#[track_caller]
fn ours() -> Cost {
    let server = Server::start();
    let mut holder = server.connect();
    holder.take("k", "holder");
    server.run("CONFIG RESETSTAT");
    let waiters: Vec<_> = (0..WAITERS)
        .map(|number| {
            (
                format!("w{number}"),
                server.wait_in_queue("k", &format!("w{number}")),
            )
        })
        .collect();
    let began = Instant::now();
    assert_eq!(holder.let_go("k", "holder"), 0);
    thread::scope(|scope| {
        for (owner, mut conn) in waiters {
            scope.spawn(move || {
                conn.read().held();
                assert_eq!(conn.let_go("k", &owner), 0);
            });
        }
    });
    let took = began.elapsed();
    let (sent, run) = commands(&server, "rlock.");
    Cost {
        what: "this module",
        took,
        sent,
        run,
    }
}

/// How many commands have run whose names begin so, and how many in all, without the looks of the
/// harness.
pub(crate) fn commands(server: &Server, prefix: &str) -> (u64, u64) {
    let stats = server.run("INFO commandstats").text().to_lowercase();
    let (mut such, mut all) = (0, 0);
    for line in stats
        .lines()
        .filter_map(|line| line.strip_prefix("cmdstat_"))
    {
        let calls = line.split("calls=").nth(1).expect("a count");
        let calls: u64 = calls
            .split(',')
            .next()
            .expect("a count")
            .parse()
            .expect("a number");
        let of_the_harness = ["client|", "config|", "info:"];
        if !of_the_harness.iter().any(|name| line.starts_with(name)) {
            all += calls;
        }
        if line.starts_with(prefix) {
            such += calls;
        }
    }
    (such, all)
}
