//! What the simulation must do itself.

#![allow(clippy::expect_used, reason = "a test fails so")]
#![allow(
    clippy::arithmetic_side_effects,
    reason = "it counts what it has done itself"
)]

use std::fs;
use std::path::Path;

use rlock_simulation::judge::Report;
use rlock_simulation::run::run;
use rlock_simulation::schedule::Schedule;

// Without it tokio leaves some things to chance.
#[cfg(tokio_unstable)]
#[test]
fn the_same_seed_has_the_same_trace() {
    for seed in 0..100 {
        let schedule = Schedule::of(seed);
        let (one, other) = (run(&schedule, true), run(&schedule, true));
        for (one, other) in one.trace.iter().zip(&other.trace) {
            assert_eq!(one, other, "seed {seed}");
        }
        assert_eq!(one.trace.len(), other.trace.len(), "seed {seed}");
    }
}

#[test]
fn schedules_that_once_failed_do_so_no_more() {
    for (path, report) in all_in("failed") {
        let trace = report.trace.join("\n");
        assert!(report.violations.is_empty(), "{path}:\n{trace}");
    }
}

/// Carries out all schedules that are kept there.
fn all_in(folder: &str) -> Vec<(String, Report)> {
    let kept = Path::new(env!("CARGO_MANIFEST_DIR")).join(folder);
    let files = fs::read_dir(kept).expect("it is there");
    let paths = files.map(|file| file.expect("it can be listed").path());
    paths
        .filter(|path| path.extension().is_some_and(|of| of == "json"))
        .map(|path| {
            let text = fs::read_to_string(&path).expect("it can be read");
            let schedule: Schedule = serde_json::from_str(&text).expect("a schedule");
            (path.display().to_string(), run(&schedule, true))
        })
        .collect()
}
