//! `make simulate`: runs schedules that follow from seeds, for a number of seconds (`SECONDS=`),
//! from one seed on (`FROM=`), all or those with a `cluster` or `sentinels` (`ONLY=`); or one of
//! them with all that happens, from its seed (`SEED=`) or from the file in which it was kept
//! (`FILE=`).

#![allow(clippy::print_stdout, reason = "it is what the program is for")]
#![allow(
    clippy::arithmetic_side_effects,
    clippy::indexing_slicing,
    reason = "it counts what it has done itself"
)]

mod equal;
mod exhaust;

use std::collections::BTreeMap;
use std::process::ExitCode;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};
use std::{env, fs, io, thread};

use rlock_simulation::judge::Report;
use rlock_simulation::run::run;
use rlock_simulation::schedule::Schedule;
use rlock_simulation::shrink::shrink;

fn main() -> ExitCode {
    let number = |name| {
        env::var(name)
            .ok()
            .and_then(|text| text.parse::<u64>().ok())
    };
    // tokio leaves some of its choices to chance then, so a schedule that failed may be right.
    if !cfg!(tokio_unstable) {
        println!(
            "built without --cfg tokio_unstable: a seed or file does not repeat a run exactly"
        );
    }
    if let Some(what) = text("EXHAUST") {
        return exhaust::exhaust(&what);
    }
    if let Some(seed) = number("SIMULATE_SEED") {
        return one(seed);
    }
    if let Some(path) = text("SIMULATE_FILE") {
        return of_file(&path);
    }
    let first = number("SIMULATE_FROM").unwrap_or_else(|| fastrand::u64(..1 << 48));
    many(
        first,
        Duration::from_secs(number("SIMULATE_SECONDS").unwrap_or(10)),
    )
}

/// A setting, if it is given.
fn text(name: &str) -> Option<String> {
    env::var(name).ok().filter(|text| !text.is_empty())
}

/// One seed, with all that happens.
fn one(seed: u64) -> ExitCode {
    let schedule = Schedule::of(seed);
    if is_right(&schedule) {
        return ExitCode::SUCCESS;
    }
    println!("seed {seed} fails");
    ExitCode::FAILURE
}

/// A schedule that was kept.
fn of_file(path: &str) -> ExitCode {
    let schedule = fs::read_to_string(path).and_then(|text| Ok(serde_json::from_str(&text)?));
    match schedule {
        Ok(schedule) if is_right(&schedule) => ExitCode::SUCCESS,
        Ok(_) => ExitCode::FAILURE,
        Err(error) => {
            println!("{path}: {error}");
            ExitCode::FAILURE
        }
    }
}

/// Shows all that happens.
fn is_right(schedule: &Schedule) -> bool {
    let report = run(schedule, true);
    println!("{schedule}");
    for line in &report.trace {
        println!("{line}");
    }
    report.violations.is_empty()
}

/// The results of all runs together.
#[derive(Default)]
struct Totals {
    runs: u32,
    lasted: Duration,
    seen: BTreeMap<&'static str, u64>,
    /// The first seed that fails.
    failed: Option<u64>,
}

fn many(first: u64, time: Duration) -> ExitCode {
    let started = Instant::now();
    let (totals, next) = (Mutex::new(Totals::default()), AtomicU64::new(first));
    let threads = thread::available_parallelism().map_or(1, usize::from);
    thread::scope(|scope| {
        for _ in 0..threads {
            scope.spawn(|| {
                while started.elapsed() < time && locked(&totals).failed.is_none() {
                    try_seed(next.fetch_add(1, Ordering::Relaxed), &totals);
                }
            });
        }
    });
    let totals = totals.into_inner().unwrap_or_else(PoisonError::into_inner);
    if let Some(seed) = totals.failed {
        let schedule = Schedule::of(seed);
        return fail(seed, &schedule, &run(&schedule, false));
    }
    let took = started.elapsed();
    let (runs, minutes) = (totals.runs, totals.lasted.as_secs_f64() / 60.0);
    println!("{runs} schedules from seed {first} on, in {took:.1?}: nothing is wrong");
    println!(
        "{:.0} schedules and {:.0} virtual minutes a second",
        f64::from(runs) / took.as_secs_f64(),
        minutes / took.as_secs_f64()
    );
    for (what, count) in totals.seen {
        println!("{count:>9} {what}");
    }
    ExitCode::SUCCESS
}

fn try_seed(seed: u64, totals: &Mutex<Totals>) {
    let schedule = Schedule::of(seed);
    let is_meant = match text("SIMULATE_ONLY").as_deref() {
        Some("cluster") => schedule.clustered.is_some(),
        Some("sentinels") => schedule.watched.is_some(),
        _ => true,
    };
    if !is_meant {
        return;
    }
    let report = run(&schedule, false);
    let mut totals = locked(totals);
    totals.runs += 1;
    totals.lasted += report.lasted;
    for (what, count) in report.seen {
        *totals.seen.entry(what).or_default() += count;
    }
    if !report.violations.is_empty() {
        totals.failed = Some(totals.failed.map_or(seed, |before| before.min(seed)));
    }
}

fn locked<T>(of: &Mutex<T>) -> MutexGuard<'_, T> {
    of.lock().unwrap_or_else(PoisonError::into_inner)
}

/// Keeps a schedule that fails, to be put among those that every run tries.
fn write_schedule(name: &str, schedule: &Schedule) {
    let path = env::temp_dir().join(format!("rlock-simulation-{name}.json"));
    let written = serde_json::to_string_pretty(schedule)
        .map_err(io::Error::from)
        .and_then(|text| fs::write(&path, text));
    match written {
        Ok(()) => println!(
            "make simulate FILE={} repeats this, the shortest",
            path.display()
        ),
        Err(error) => println!("it could not be written to {}: {error}", path.display()),
    }
}

/// Shows the shortest schedule that fails as this one does.
fn fail(seed: u64, schedule: &Schedule, report: &Report) -> ExitCode {
    for violation in &report.violations {
        println!("seed {seed}: {violation}");
    }
    if text("SIMULATE_BRIEF").is_some() {
        return ExitCode::FAILURE;
    }
    let shortest = shrink(schedule, |shorter| {
        !run(shorter, false).violations.is_empty()
    });
    let report = run(&shortest, true);
    println!("\n{shortest}");
    for line in &report.trace {
        println!("{line}");
    }
    println!("make simulate SEED={seed} repeats it");
    write_schedule(&seed.to_string(), &shortest);
    ExitCode::FAILURE
}
