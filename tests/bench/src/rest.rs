//! Part 11: the CPU time of a server at rest, while many locks have waiters and nothing happens.

use std::thread::sleep;

use crate::load::all_of;
use crate::numbers::{Spread, count};
use crate::report::Report;
use crate::results::{Results, at};
use crate::rounds::Run;
use crate::uncontended::hold;
use crate::waiters::{queue, session_connection};
use crate::wire::Step;

pub(crate) const PART: &str = "rest";

const WAITED_FOR: &str = "locks with one waiter each";
const AT_REST: &str = "a server at rest";
const CPU: &str = "cpu_percent";
const SESSION: &str = "rest";

pub(crate) fn measure(run: &Run) -> Results {
    let mut results = Results::new(PART, &[CPU]);
    let mut host = run.host();
    let _session_connection = session_connection(&host.server, SESSION);
    let mut waited_for = 0;
    for locks in run.up_to(1000, &[0, 1000, 10_000, 100_000, 300_000]) {
        all_of(&host.server, (waited_for..locks).map(held_and_waited_for));
        waited_for = locks;
        let length = run.length(2000);
        // The first round is left out: the queues are looked at for the first time.
        sleep(length);
        for round in 0..run.rounds(5) {
            let before = host.cpu_us();
            sleep(length);
            let used = (host.cpu_us() - before) / length.as_secs_f64() / 1e4;
            results.add(&at(WAITED_FOR, locks), AT_REST, round, &[used]);
        }
    }
    results
}

fn held_and_waited_for(number: u64) -> Step {
    Step::joined([
        hold(number),
        queue(&format!("held:{number}"), "waiter", SESSION),
    ])
}

pub(crate) fn report(results: &Results) -> Report {
    let mut report = Report::titled("11. At rest");
    report.says(
        "Locks that are held and waited for while nothing happens to them. The server's CPU time, \
         in percent of a core.",
    );
    let rows: Vec<_> = results
        .sizes(WAITED_FOR)
        .into_iter()
        .map(|locks| {
            let used = results.values(&at(WAITED_FOR, locks), AT_REST, CPU);
            vec![count(locks), Spread::of(&used).to_string()]
        })
        .collect();
    report.table(&[WAITED_FOR, "% of a core"], &rows);
    report
}
