//! A storm over real servers, and checkers of what clients were told in it.
//!
//! `make chaos` runs [`storm`]: rounds of clients that lock while processes are killed and stopped,
//! networks cut, clocks set and servers killed and replaced; then every checker over everything
//! that was asked and told. `CHAOS_SECONDS` says for how long, `CHAOS_SEED` repeats the faults and
//! the clients' choices of an earlier run as far as real servers and networks allow, `CHAOS_ROUND`
//! one round of it; with `CHAOS_MENU` there are only rounds whose name contains one of its words,
//! which commas divide. The checkers themselves are tested with `make test`.

#![allow(
    clippy::unwrap_used,
    clippy::expect_used,
    clippy::panic,
    clippy::indexing_slicing,
    clippy::arithmetic_side_effects,
    clippy::as_conversions,
    clippy::print_stdout,
    reason = "a test that meets the unexpected should fail, and what it counts is small"
)]

mod history; // what was asked, what was told, and when
mod random; // numbers that a seed repeats

mod clients; // processes that lock

mod faults; // what is done to them, to the network and to the servers
mod watch; // what the server says meanwhile
mod world; // all of them together

mod checkers; // what must be true of every history

mod honesty; // what a lock alone cannot do
mod report; // figures

use std::time::{Duration, SystemTime, UNIX_EPOCH};

use faults::Menu;
use history::{History, now};
use random::Random;
use report::{Report, Round};
use world::World;

#[test]
#[ignore = "runs for as long as it is told to: make chaos"]
fn storm() {
    let seconds = number("CHAOS_SECONDS").unwrap_or(25);
    let seed = number("CHAOS_SEED").unwrap_or_else(|| {
        let since = SystemTime::now().duration_since(UNIX_EPOCH).unwrap();
        since.as_secs()
    });
    let only = number("CHAOS_ROUND");
    let menus = menus();
    println!("CHAOS_SEED={seed} CHAOS_SECONDS={seconds}");
    let over = now() + seconds * 1_000_000;
    // A round is long enough for most of its menu, and short enough to be read.
    let length = Duration::from_secs((seconds / 6).clamp(4, 30));
    let mut report = Report::default();
    let mut seeds = Random::new(seed);
    for (number, menu) in (0..).zip(menus.iter().cycle()) {
        let random = seeds.split();
        // All menus are served, however short the time is.
        if number >= menus.len() as u64 && now() >= over {
            break;
        }
        if only.is_none_or(|only| only == number) {
            report.add(round(number, *menu, random, length.min(menu.longest())));
        }
        if only.is_some_and(|only| only <= number) {
            break;
        }
    }
    if only.is_none() {
        report.honesty = Some(honesty::experiment(seconds));
    }
    println!("{report}");
    let verdict = report.verdict();
    let shown = &verdict[..verdict.len().min(20)];
    assert!(
        verdict.is_empty(),
        "seed {seed}: {} violations\n{}",
        verdict.len(),
        shown.join("\n")
    );
}

#[test]
#[ignore = "has the checkers look at the history in the file that CHAOS_HISTORY names"]
fn again() {
    let path = std::env::var("CHAOS_HISTORY").expect("CHAOS_HISTORY");
    let history = History::parse(&std::fs::read_to_string(path).unwrap());
    let found = checkers::ALL.iter().flat_map(|(name, checker)| {
        checker(&history)
            .into_iter()
            .map(move |found| format!("{name}: {}", found.what))
    });
    let found: Vec<_> = found.collect();
    assert!(found.is_empty(), "{}", found.join("\n"));
}

fn round(number: u64, menu: Menu, mut random: Random, length: Duration) -> Round {
    println!("round {number}: {}", menu.name());
    let mut world = World::start(menu, &mut random);
    let mut round = Round::new(number, menu);
    let over = now() + u64::try_from(length.as_micros()).unwrap();
    for kind in menu.schedule(&mut random) {
        if now() >= over {
            break;
        }
        // However many numbers a fault takes, the next one's are the same.
        kind.strike(&mut world, &mut random.split());
        world.follow_sentinels();
        *round.faults.entry(kind).or_default() += 1;
        // Calm, so that the effects of one fault are told from those of the next.
        std::thread::sleep(Duration::from_millis(random.within(50, 700)));
    }
    let (lines, left) = world.end();
    let history = History::parse(&lines.join("\n"));
    round.check(&history, &lines, left);
    round
}

/// All, or those that are asked for.
fn menus() -> Vec<Menu> {
    let asked = std::env::var("CHAOS_MENU").unwrap_or_default();
    let is_asked_for = |menu: &Menu| {
        asked
            .split(',')
            .any(|word| menu.name().contains(word.trim()))
    };
    let menus: Vec<_> = Menu::ALL.into_iter().filter(is_asked_for).collect();
    assert!(!menus.is_empty(), "no round has a name with {asked:?}");
    menus
}

fn number(variable: &str) -> Option<u64> {
    let value = std::env::var(variable)
        .ok()
        .filter(|value| !value.is_empty())?;
    Some(
        value
            .parse()
            .unwrap_or_else(|_| panic!("{variable} must be a number")),
    )
}
