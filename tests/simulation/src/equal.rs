//! `EXHAUST=equal`: whether the faults that are left out, since they would find everything as at an
//! earlier step, are indeed as that one.

use std::collections::BTreeMap;
use std::hash::Hasher;
use std::process::ExitCode;
use std::sync::Mutex;
use std::sync::atomic::{AtomicU64, Ordering};

use rlock_simulation::every;
use rlock_simulation::run::{digested, with_steps};
use rlock_simulation::schedule::Schedule;

use crate::exhaust::{Program, Unit, by_all_processors, mixed, units, with_fault};
use crate::locked;

/// Compares the whole run with each fault that is left out with that of the one in whose place it
/// stands: of all singles, and of the pairs that begin with one in `every` singles, if it is not 1.
pub(crate) fn compare(programs: &[Program], every: usize) -> ExitCode {
    let units = mixed(&units(programs));
    let sample = units.iter().step_by(every).filter(|_| every > 1);
    let pairs = sample.map(|unit| (unit.program, Some(*unit)));
    let singles = (0..programs.len()).map(|program| (program, None));
    let all: Vec<_> = singles.chain(pairs).collect();
    let (compared, differ) = (AtomicU64::new(0), Mutex::new(BTreeMap::new()));
    by_all_processors(&all, |_, (program, first)| {
        let program = &programs[*program];
        let schedule = schedule(program, *first);
        let report = with_steps(&schedule);
        let after = first.map(|unit| (unit.step, unit.fault));
        for coming in every::coming(&program.faults, &report.steps, after) {
            let Some(before) = coming.is_as_at else {
                continue;
            };
            let fault = program.faults[coming.fault].fault;
            let digest = |step| {
                let schedule = with_fault(&schedule, &report, step, fault);
                digested(&schedule).digest.finish()
            };
            compared.fetch_add(1, Ordering::Relaxed);
            if digest(before) != digest(coming.step) {
                let kind = format!("{:?}", fault.kind);
                let kind = kind.split([' ', '(']).next().unwrap_or_default();
                *locked(&differ).entry(kind.to_owned()).or_insert(0_u32) += 1;
            }
        }
    });
    let (compared, differ) = (compared.into_inner(), locked(&differ));
    println!("{compared} faults that are left out were compared; those that differ: {differ:?}");
    ExitCode::from(u8::from(programs.is_empty() || !differ.is_empty()))
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
