//! Many clients that fight for one lock: take, give back, and again.

use std::sync::Barrier;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::Duration;

use rlock_tests::Server;

use crate::numbers::{median, order, ratio};
use crate::scripts;
use crate::uncontended::cpu_us;
use crate::wire::{Wire, load, request};

const CLIENTS: usize = 50;

/// What a round gave.
struct Fight {
    grants_per_second: f64,
    attempts_per_grant: f64,
    cpu_us_per_grant: f64,
    /// The wins of the client with the fewest and of that with the most, in percent of the mean.
    least_wins: f64,
    most_wins: f64,
}

pub(crate) fn measure(server: &Server, quick: bool) {
    println!("{CLIENTS} clients fight for one lock\n");
    let (rounds, length) = if quick { (1, 1) } else { (5, 3) };
    let length = Duration::from_secs(length);
    let mut fights = [Vec::new(), Vec::new()];
    let clients: [&Client; 2] = [&rlock, &scripts_with_messages];
    for round in 0..rounds {
        for index in order(clients.len(), round) {
            fights[index].push(fight(server, length, clients[index]));
        }
    }
    println!(
        "  {:<41} grants/s   attempts/grant   CPU us/grant   wins of a client",
        ""
    );
    for (name, fights) in ["RLOCK, waiting in the server", "scripts with a message"]
        .iter()
        .zip(&fights)
    {
        let of = |value: fn(&Fight) -> f64| median(&fights.iter().map(value).collect::<Vec<_>>());
        println!(
            "  {name:<41} {:>8.0} {:>16.2} {:>14.1}   {:.1} to {:.1} % of the mean",
            of(|fight| fight.grants_per_second),
            of(|fight| fight.attempts_per_grant),
            of(|fight| fight.cpu_us_per_grant),
            of(|fight| fight.least_wins),
            of(|fight| fight.most_wins),
        );
    }
    let all = |index: usize, value: fn(&Fight) -> f64| -> Vec<f64> {
        fights[index].iter().map(value).collect()
    };
    let grants = |fight: &Fight| fight.grants_per_second;
    let cpu = |fight: &Fight| fight.cpu_us_per_grant;
    println!(
        "\n  RLOCK's grants/s against scripts:  {}",
        ratio(&all(0, grants), &all(1, grants))
    );
    println!(
        "  RLOCK's CPU a grant against them:  {}\n",
        ratio(&all(0, cpu), &all(1, cpu))
    );
}

/// A client: fights until told to stop, and returns how often it won.
type Client = dyn Fn(&Server, usize, &Ring) -> u64 + Sync;

/// What the clients of a fight share.
struct Ring {
    over: AtomicBool,
    attempts: AtomicU64,
    start: Barrier,
}

fn fight(server: &Server, length: Duration, client: &Client) -> Fight {
    let ring = Ring {
        over: AtomicBool::new(false),
        attempts: AtomicU64::new(0),
        start: Barrier::new(CLIENTS + 1),
    };
    let (wins, cpu) = std::thread::scope(|scope| {
        let ring = &ring;
        let clients: Vec<_> = (0..CLIENTS)
            .map(|number| scope.spawn(move || client(server, number, ring)))
            .collect();
        ring.start.wait();
        let before = cpu_us(server);
        // Not a wait for something to be true: the length of the measurement.
        std::thread::sleep(length);
        ring.over.store(true, Ordering::Relaxed);
        let wins: Vec<u64> = clients
            .into_iter()
            .map(|client| client.join().unwrap())
            .collect();
        (wins, cpu_us(server) - before)
    });
    let grants = wins.iter().sum::<u64>() as f64;
    let percent = |wins: Option<&u64>| *wins.unwrap() as f64 * 100.0 * CLIENTS as f64 / grants;
    Fight {
        grants_per_second: grants / length.as_secs_f64(),
        attempts_per_grant: ring.attempts.load(Ordering::Relaxed) as f64 / grants,
        cpu_us_per_grant: cpu / grants,
        least_wins: percent(wins.iter().min()),
        most_wins: percent(wins.iter().max()),
    }
}

impl Ring {
    fn attempt(&self) {
        self.attempts.fetch_add(1, Ordering::Relaxed);
    }
}

fn rlock(server: &Server, number: usize, ring: &Ring) -> u64 {
    let mut wire = Wire::open(server);
    let owner = format!("client:{number}");
    let acquire = request(&["RLOCK.ACQUIRE", "fought", &owner, "30000", "BLOCK", "0"]);
    let release = request(&["RLOCK.RELEASE", "fought", &owner]);
    let mut wins = 0;
    ring.start.wait();
    while !ring.over.load(Ordering::Relaxed) {
        ring.attempt();
        wire.send(&acquire);
        wire.expect(["*2", ":1", ":"].into_iter());
        wins += 1;
        wire.send(&release);
        wire.expect([":0"].into_iter());
    }
    wins
}

/// As the usual client does it: try, and after each message try again. Messages that have piled up
/// by then count as one.
fn scripts_with_messages(server: &Server, number: usize, ring: &Ring) -> u64 {
    let (mut wire, mut messages) = (Wire::open(server), Wire::open(server));
    let acquire = load(&mut wire, scripts::ACQUIRE);
    let release = load(&mut wire, scripts::RELEASE);
    messages.ask(&["SUBSCRIBE", "over"], 6);
    let (owner, latch) = (format!("client:{number}"), format!("latch:{number}"));
    let acquire = request(&["EVALSHA", &acquire, "1", "scripted", "30000", &owner]);
    let release = request(&[
        "EVALSHA", &release, "3", "scripted", "over", &latch, &owner, "30000", "16000",
    ]);
    let delete_latch = request(&["DEL", &latch]);
    let mut wins = 0;
    ring.start.wait();
    while !ring.over.load(Ordering::Relaxed) {
        ring.attempt();
        wire.send(&acquire);
        if wire.lines(1)[0] == b':' {
            messages.lines(7);
            continue;
        }
        wins += 1;
        wire.send(&release);
        wire.expect([":1"].into_iter());
        wire.send(&delete_latch);
        wire.expect([":1"].into_iter());
    }
    // Those who still sleep are to see that it is over.
    wire.ask(&["PUBLISH", "over", "0"], 1);
    wins
}
