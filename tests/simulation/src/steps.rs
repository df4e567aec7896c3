//! The steps of a run, and faults that come at a step in place of a time.
//!
//! A step is a moment in the course of a message, or a poll of a call. A run is deterministic, so
//! until its fault comes it is the run without a fault: a step has the same number and time in
//! both. Steps are counted from the moment at which all processes have connected.

use std::pin::Pin;
use std::task::{Context, Waker};
use std::time::Duration;

use rlock_test::Moment;
use tokio::task::spawn_local;

use crate::judge::Report;
use crate::run::run;
use crate::schedule::{FaultKind, Schedule};

/// A step.
#[derive(Clone, Copy, Debug)]
pub struct Step {
    /// When it happens.
    pub at: Duration,
    /// The step.
    pub place: Place,
}

/// A step.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Place {
    /// A moment of a message.
    Message(Moment),
    /// A call is about to be polled.
    Poll,
}

impl Place {
    /// Whether this may go wrong there: a call is dropped at a poll, and nothing else is.
    pub fn suits(self, kind: &FaultKind) -> bool {
        (self == Self::Poll) == matches!(kind, FaultKind::DropCall)
    }
}

/// Begins a fault at once, before anything else is done; its later part is a task.
pub(crate) fn begin(fault: impl Future<Output = ()> + 'static) {
    let mut fault: Pin<Box<dyn Future<Output = ()>>> = Box::pin(fault);
    let mut nobody = Context::from_waker(Waker::noop());
    if fault.as_mut().poll(&mut nobody).is_pending() {
        spawn_local(fault);
    }
}

/// Carries a schedule out whose faults may come at steps, and gives each of them the time at which
/// its step happens: judges go by it. None if a step does not happen, or does not suit its fault.
pub fn settle(schedule: &Schedule) -> Option<(Schedule, Report)> {
    let mut schedule = schedule.clone();
    for _ in 0..=schedule.faults.len() {
        let report = run(&schedule, false);
        let mut is_settled = true;
        for fault in &mut schedule.faults {
            let Some(number) = fault.step else { continue };
            let step = report.steps.get(number)?;
            if !step.place.suits(&fault.kind) {
                return None;
            }
            is_settled &= step.at == fault.at;
            fault.at = step.at;
        }
        if is_settled {
            return Some((schedule, report));
        }
    }
    None
}
