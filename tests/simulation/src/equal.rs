//! `EXHAUST=equal`: whether the faults that are left out, since they would find everything as at an
//! earlier step, are indeed as that one.

use std::collections::BTreeMap;
use std::hash::Hasher;
use std::process::ExitCode;
use std::sync::Mutex;
use std::sync::atomic::{AtomicU64, Ordering};

use rlock_simulation::every::{self, Coming};
use rlock_simulation::judge::Report;
use rlock_simulation::run::{digested, with_steps};
use rlock_simulation::schedule::{Fault, Schedule};

use crate::exhaust::{Program, Unit, by_all_processors, mixed, units, with_fault};
use crate::locked;

/// Compares the whole run with each fault that is left out with that of the one in whose place it
/// stands: of all singles, and if `every` is not 1, of one in `every` second faults after each
/// single, and of one pair that begins with each single that is left out.
pub(crate) fn compare(programs: &[Program], every: usize) -> ExitCode {
    let units = mixed(&units(programs));
    let sample = units.iter().filter(|_| every > 1);
    let pairs = sample.map(|unit| (unit.program, Some(*unit)));
    let singles = (0..programs.len()).map(|program| (program, None));
    let all: Vec<_> = singles.chain(pairs).collect();
    let (compared, differ) = (AtomicU64::new(0), Mutex::new(BTreeMap::new()));
    by_all_processors(&all, |place, (program, first)| {
        let program = &programs[*program];
        let schedule = schedule(program, *first);
        let report = with_steps(&schedule);
        let after = first.map(|unit| (unit.step, unit.fault));
        let sampled = every > 1 && first.is_none();
        let coming = every::coming(&program.faults, &report.steps, after).into_iter();
        let left_out = coming.filter_map(|coming| Some((coming.is_as_at?, coming)));
        // Each unit has others in the sample.
        let (from, one_in) = first.map_or((0, 1), |_| (place % every, every));
        for (before, coming) in left_out.skip(from).step_by(one_in) {
            let fault = program.faults[coming.fault].fault;
            let [earlier, left_out] =
                [before, coming.step].map(|step| with_fault(&schedule, &report, step, fault));
            let mut all = vec![[&earlier, &left_out].map(digest)];
            if let Some((step, fault, report)) =
                sampled.then(|| second(program, &earlier, coming)).flatten()
            {
                // A pair that begins with one that is left out.
                let [earlier, left_out] =
                    [earlier, left_out].map(|schedule| with_fault(&schedule, &report, step, fault));
                all.push([&earlier, &left_out].map(digest));
            }
            for [earlier, left_out] in all {
                compared.fetch_add(1, Ordering::Relaxed);
                if earlier != left_out {
                    let kind = format!("{:?}", fault.kind);
                    let kind = kind.split([' ', '(']).next().unwrap_or_default();
                    *locked(&differ).entry(kind.to_owned()).or_insert(0_u32) += 1;
                }
            }
        }
    });
    let (compared, differ) = (compared.into_inner(), locked(&differ));
    println!("{compared} faults that are left out were compared; those that differ: {differ:?}");
    ExitCode::from(u8::from(compared == 0 || !differ.is_empty()))
}

fn digest(schedule: &Schedule) -> u64 {
    digested(schedule).digest.finish()
}

/// One of the faults that may come after one that is left out, with the run that it comes in.
fn second(
    program: &Program,
    earlier: &Schedule,
    left_out: Coming,
) -> Option<(usize, Fault, Report)> {
    let Coming { step, fault, .. } = left_out;
    let report = with_steps(earlier);
    let coming = every::coming(&program.faults, &report.steps, Some((step, fault)));
    let next = coming.get((step * 31 + fault) % coming.len().max(1))?;
    Some((next.step, program.faults[next.fault].fault, report))
}

/// The program, with this fault.
fn schedule(program: &Program, first: Option<Unit>) -> Schedule {
    let schedule = &program.scenario.schedule;
    match first {
        Some(Unit { step, fault, .. }) => {
            let fault = program.faults[fault].fault;
            with_fault(schedule, &program.report, step, fault)
        }
        None => schedule.clone(),
    }
}
