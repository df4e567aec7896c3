//! Many clients that fight for one lock: take, give back, and again.

use std::sync::Barrier;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::Duration;

use rlock_tests::Server;

use crate::numbers::{median, ratio};
use crate::scripts;
use crate::uncontended::cpu_us;
use crate::wire::{Wire, load};

const CLIENTS: usize = 50;

/// What a round gave.
struct Fight {
    grants_per_second: f64,
    attempts_per_grant: f64,
    cpu_us_per_grant: f64,
    /// The least and the largest number of wins of a client.
    wins: (u64, u64),
}

pub(crate) fn measure(server: &Server, quick: bool) {
    println!("{CLIENTS} clients fight for one lock\n");
    let (rounds, length) = if quick { (1, 1) } else { (5, 3) };
    let length = Duration::from_secs(length);
    let mut fights = [Vec::new(), Vec::new()];
    for _ in 0..rounds {
        fights[0].push(fight(server, length, &rlock));
        fights[1].push(fight(server, length, &scripts_with_messages));
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
        let last = fights.last().unwrap();
        println!(
            "  {name:<41} {:>8.0} {:>16.2} {:>14.1}   {} to {}",
            of(|fight| fight.grants_per_second),
            of(|fight| fight.attempts_per_grant),
            of(|fight| fight.cpu_us_per_grant),
            last.wins.0,
            last.wins.1,
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
    Fight {
        grants_per_second: grants / length.as_secs_f64(),
        attempts_per_grant: ring.attempts.load(Ordering::Relaxed) as f64 / grants,
        cpu_us_per_grant: cpu / grants,
        wins: (*wins.iter().min().unwrap(), *wins.iter().max().unwrap()),
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
    let mut wins = 0;
    ring.start.wait();
    while !ring.over.load(Ordering::Relaxed) {
        ring.attempt();
        wire.ask(
            &["RLOCK.ACQUIRE", "fought", &owner, "30000", "BLOCK", "0"],
            3,
        );
        wins += 1;
        wire.ask(&["RLOCK.RELEASE", "fought", &owner], 1);
    }
    wins
}

/// As the usual client does it: try, and after each message try again.
fn scripts_with_messages(server: &Server, number: usize, ring: &Ring) -> u64 {
    let (mut wire, mut messages) = (Wire::open(server), Wire::open(server));
    let acquire = load(&mut wire, scripts::ACQUIRE);
    let release = load(&mut wire, scripts::RELEASE);
    messages.ask(&["SUBSCRIBE", "over"], 6);
    let (owner, latch) = (format!("client:{number}"), format!("latch:{number}"));
    let mut wins = 0;
    ring.start.wait();
    while !ring.over.load(Ordering::Relaxed) {
        ring.attempt();
        let reply = wire.ask(&["EVALSHA", &acquire, "1", "scripted", "30000", &owner], 1);
        if reply[0] == b':' {
            messages.lines(7);
            continue;
        }
        wins += 1;
        let words = [
            "EVALSHA", &release, "3", "scripted", "over", &latch, &owner, "30000", "16000",
        ];
        wire.ask(&words, 1);
        wire.ask(&["DEL", &latch], 1);
    }
    // Those who still sleep are to see that it is over.
    wire.ask(&["PUBLISH", "over", "0"], 1);
    wins
}
