//! A call that is dropped in its midst, and a process that stands still or dies there.

use std::future::poll_fn;
use std::pin::pin;
use std::task::Poll;
use std::time::Duration;

use serde::{Deserialize, Serialize};

use crate::schedule::{Client, Fault, FaultKind, Schedule, Step};

/// A fault in the midst of a call.
#[derive(Clone, Copy, Debug, Serialize, Deserialize)]
pub struct Stop {
    /// In which call.
    pub of: Calling,
    /// In place of this poll of it, from 0 on.
    pub poll: u8,
    /// The fault.
    pub kind: StopKind,
}

/// The calls of a step.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum Calling {
    /// For the lock, by any verb.
    Taking,
    /// `renew()`.
    Renewing,
    /// `downgrade()`.
    Downgrading,
    /// `unlock()`.
    Unlocking,
    /// `wanted()`.
    Listening,
}

/// The kind of fault.
#[derive(Clone, Copy, Debug, Serialize, Deserialize)]
pub enum StopKind {
    /// The call is dropped.
    Drop,
    /// The process stands still for this time.
    StandStill(Duration),
    /// The process stands still for this time, and dies then.
    Die(Duration),
}

impl Stop {
    /// Polls a call up to there. None if it was dropped; `done` does the rest of the stop.
    pub(crate) async fn within<T>(
        stop: Option<Self>,
        call: impl Future<Output = T>,
        done: impl Fn(StopKind),
    ) -> Option<T> {
        let mut call = pin!(call);
        let mut left = stop.map(|stop| (stop.poll, stop.kind));
        poll_fn(|cx| {
            match left {
                Some((0, kind)) => {
                    left = None;
                    done(kind);
                    if matches!(kind, StopKind::Drop) {
                        return Poll::Ready(None);
                    }
                    // It is polled again when the process goes on.
                    cx.waker().wake_by_ref();
                    return Poll::Pending;
                }
                Some((polls, kind)) => left = Some((polls.saturating_sub(1), kind)),
                None => {}
            }
            call.as_mut().poll(cx).map(Some)
        })
        .await
    }
}

/// Whether a process stands still or dies in the midst of a call.
pub(crate) fn are_in(schedule: &Schedule) -> bool {
    let mut stops = steps(schedule).into_iter().filter_map(|step| step.stop);
    stops.any(|stop| !matches!(stop.kind, StopKind::Drop))
}

/// All steps, those inside others too.
pub(crate) fn steps(schedule: &Schedule) -> Vec<&Step> {
    fn with_inner(step: &Step) -> Vec<&Step> {
        let inner = step.inside.iter().flat_map(with_inner);
        std::iter::once(step).chain(inner).collect()
    }
    let tasks = schedule.tasks.iter();
    tasks
        .flat_map(|task| &task.steps)
        .flat_map(with_inner)
        .collect()
}

/// Has calls dropped and processes stand still in some of the schedules that follow from seeds. The
/// others stay as they are.
pub(crate) fn add(schedule: &mut Schedule, seed: u64) {
    let mut draw = Draw(fastrand::Rng::with_seed(seed.wrapping_add(0x5707)));
    if !draw.one_in(3) {
        return;
    }
    let clients = schedule.clients.clone();
    let is_gentle = draw.one_in(3);
    for task in &mut schedule.tasks {
        if let Some(client) = clients.get(task.client) {
            draw.stops(&mut task.steps, client, is_gentle);
        }
    }
    for _ in 0..draw.0.u8(0..3) {
        let client = draw.0.usize(0..clients.len());
        let Some(setup) = clients.get(client) else {
            continue;
        };
        let lasts = draw.lasts(setup, is_gentle);
        schedule.faults.push(Fault {
            at: Duration::from_millis(draw.0.u64(0..20_000)),
            kind: FaultKind::StandStill { client, lasts },
            server: 0,
            step: None,
        });
    }
    schedule.faults.sort_by_key(|fault| fault.at);
}

struct Draw(fastrand::Rng);

impl Draw {
    fn one_in(&mut self, of: u32) -> bool {
        self.0.u32(0..of) == 0
    }

    fn stops(&mut self, steps: &mut [Step], client: &Client, is_gentle: bool) {
        for step in steps {
            if self.one_in(4) {
                step.stop = Some(self.stop(client, is_gentle));
            }
            self.stops(&mut step.inside, client, is_gentle);
        }
    }

    fn stop(&mut self, client: &Client, is_gentle: bool) -> Stop {
        let of = match self.0.u8(0..6) {
            0..3 => Calling::Taking,
            3 => Calling::Renewing,
            4 => Calling::Downgrading,
            _ => Calling::Unlocking,
        };
        let kind = match self.0.u8(0..8) {
            0..4 => StopKind::Drop,
            _ if is_gentle => StopKind::Drop,
            7 => StopKind::Die(self.lasts(client, false)),
            _ => StopKind::StandStill(self.lasts(client, false)),
        };
        let poll = self.0.u8(0..4);
        Stop { of, poll, kind }
    }

    /// About as long as the grace, lease or timeout that may end meanwhile, or less than any of
    /// them.
    fn lasts(&mut self, client: &Client, is_gentle: bool) -> Duration {
        let shortest = if client.grace.is_zero() {
            client.lease
        } else {
            client.grace.min(client.lease)
        };
        let parts = shortest / 8;
        if is_gentle {
            return parts.mul_f64(self.0.f64());
        }
        let longest = match self.0.u8(0..4) {
            0 => parts,
            1 => client.grace * 2,
            2 => client.response_timeout * 3,
            _ => client.lease * 2,
        };
        longest.min(LONGEST).mul_f64(self.0.f64())
    }
}

/// No process stands still for longer.
const LONGEST: Duration = Duration::from_secs(40);
