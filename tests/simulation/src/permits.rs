//! Permits in schedules: how many each call asks for, and limits that are set while others hold and
//! wait.

use std::time::Duration;

use serde::{Deserialize, Serialize};

use crate::judge::TAGGED;
use crate::moves;
use crate::schedule::{
    Draw, End, FaultKind, Mode, Owning, Schedule, Step, Task, Verb, avoid_circles,
};
use crate::stops;

/// A request for permits of a semaphore.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Asked {
    /// The number of permits.
    pub permits: u32,
    /// The most permits that may be out; none for the limit that is set for all.
    pub limit: Option<u32>,
}

/// A limit that somebody sets for all.
#[derive(Clone, Copy, Debug, Serialize, Deserialize)]
pub struct SetLimit {
    /// When.
    pub at: Duration,
    /// Which client.
    pub client: usize,
    /// Of which semaphore.
    pub lock: u8,
    /// None takes it away: then each caller's own counts.
    pub limit: Option<u32>,
}

/// The numbers of semaphores are those from this one on.
pub(crate) const SEMAPHORES: u8 = 6;

/// How many there are.
const COUNT: u8 = 2;

/// All that are in a schedule.
pub(crate) fn semaphores() -> impl Iterator<Item = u8> {
    let plain = SEMAPHORES..SEMAPHORES + COUNT;
    plain.clone().chain(plain.map(|lock| lock + TAGGED))
}

/// Has tasks ask for permits in some of the schedules that follow from seeds; a tenth of all are
/// about nothing else. The others stay as they are.
pub(crate) fn add(schedule: &mut Schedule, seed: u64) {
    let mut draw = Draw(fastrand::Rng::with_seed(seed.wrapping_add(0x9e12)));
    if schedule.servers > 1 {
        return;
    }
    match draw.0.u8(0..10) {
        0 => {
            draw.make_semaphores(schedule);
            stops::add(schedule, seed);
        }
        1 => draw.mix_in(schedule),
        _ => {}
    }
}

/// The draws that all calls of a run share.
struct Plan {
    /// The limit that most name.
    limit: u32,
    limits: Vec<SetLimit>,
}

impl Plan {
    /// The permits of this semaphore that can always be had, whatever limit is set.
    fn least(&self, lock: u8) -> u32 {
        let set = self.limits.iter().filter(|set| set.lock == lock);
        let least = set.filter_map(|set| set.limit).min();
        least.map_or(self.limit, |least| least.min(self.limit))
    }
}

impl Draw {
    /// Tasks take permits of one semaphore or two, mostly for moments, and limits go up and down.
    fn make_semaphores(&mut self, schedule: &mut Schedule) {
        let latency = u64::try_from(schedule.latency.as_millis()).unwrap_or_default();
        let span = 20 * latency + 1_000;
        let plan = self.plan(schedule, span);
        let is_sound = self.one_in(2);
        if is_sound {
            schedule.faults.clear();
        }
        let (leases, ahead) = (self.one_in(3), self.one_in(4));
        schedule.tasks = (0..self.up_to(2, 8))
            .map(|_| {
                let steps = (0..self.up_to(1, 6))
                    .map(|_| self.moment_with(&plan, latency, leases))
                    .collect();
                let mut task = Task {
                    client: self.0.usize(0..schedule.clients.len()),
                    at: Duration::from_millis(self.0.u64(0..=4 * latency + 100)),
                    owner: Owning::Call,
                    steps,
                };
                if ahead {
                    self.go_ahead(&mut task);
                }
                task
            })
            .collect();
        // Else they would come when all is over.
        for fault in &mut schedule.faults {
            fault.at = Duration::from_millis(self.0.u64(0..=2 * span));
        }
        self.aim(schedule, 1);
        schedule.limits = plan.limits;
        schedule.faults.sort_by_key(|fault| fault.at);
        if schedule.clustered.is_some() && self.one_in(2) {
            moves::put_in_one_slot(schedule);
        }
    }

    /// Half of the steps of a run with a bit of everything take permits in the place of locks.
    fn mix_in(&mut self, schedule: &mut Schedule) {
        let plan = self.plan(schedule, 20_000);
        let locks = |task: &Task| task.steps.iter().flat_map(|step| step.locks.clone()).min();
        let first = schedule.tasks.iter().filter_map(locks).min();
        for task in &mut schedule.tasks {
            self.mix_into(&mut task.steps, &plan);
            // Waits for permits are not part of the search for circles.
            avoid_circles(&mut task.steps);
        }
        self.aim(schedule, 2);
        schedule.limits = plan.limits;
        if first.is_some_and(|first| first >= TAGGED) {
            moves::put_in_one_slot(schedule);
        }
    }

    fn mix_into(&mut self, steps: &mut [Step], plan: &Plan) {
        for step in steps {
            self.mix_into(&mut step.inside, plan);
            if self.one_in(2) {
                step.mode = Mode::Permits;
                step.downgrades = false;
                self.ask(step, plan);
            }
        }
    }

    /// Some of the faults that are about a lock are about a semaphore.
    fn aim(&mut self, schedule: &mut Schedule, one_in: u32) {
        for fault in &mut schedule.faults {
            if let FaultKind::Delete(lock) | FaultKind::MoveSlot { lock, .. } = &mut fault.kind
                && self.one_in(one_in)
            {
                *lock = self.semaphore();
            }
        }
    }

    fn semaphore(&mut self) -> u8 {
        SEMAPHORES + u8::from(self.one_in(4))
    }

    fn plan(&mut self, schedule: &Schedule, span: u64) -> Plan {
        let limit = self.pick(&[1, 2, 3, 3, 5, 8]).unwrap_or(3);
        let count = if self.one_in(2) { self.up_to(1, 6) } else { 0 };
        let limits = (0..count).map(|_| SetLimit {
            at: Duration::from_millis(self.0.u64(0..=span)),
            client: self.0.usize(0..schedule.clients.len()),
            lock: self.semaphore(),
            limit: (!self.one_in(4)).then(|| self.0.u32(1..=limit + 2)),
        });
        let limits = limits.collect();
        Plan { limit, limits }
    }

    /// Which permits a step takes.
    fn ask(&mut self, step: &mut Step, plan: &Plan) {
        let lock = self.semaphore();
        // Others name another, or none.
        let limit = match self.0.u8(0..8) {
            0 => Some(self.0.u32(1..=plan.limit + 2)),
            1 if !plan.limits.is_empty() => None,
            _ => Some(plan.limit),
        };
        let most = match step.verb {
            // It must come to an end, however the limit is set.
            Verb::Lock => limit.unwrap_or(plan.limit).min(plan.least(lock)),
            Verb::Try | Verb::Within(_) => limit.unwrap_or(plan.limit),
        };
        let permits = if self.one_in(2) {
            1
        } else {
            self.0.u32(1..=most)
        };
        step.locks = vec![lock];
        step.asked = Some(Asked { permits, limit });
    }

    fn moment_with(&mut self, plan: &Plan, latency: u64, leases: bool) -> Step {
        let verb = match self.0.u8(0..6) {
            0 => Verb::Try,
            1 => Verb::Within(Duration::from_millis(self.0.u64(0..=2_000))),
            _ => Verb::Lock,
        };
        let longest = self.pick(&[0, 2 * latency, 4 * latency, 100, 1_000]);
        let mut step = Step {
            locks: Vec::new(),
            mode: Mode::Permits,
            asked: None,
            verb,
            lease: (leases && self.one_in(2)).then(|| self.ms(&[200, 500, 1_000])),
            drop_after: self.one_in(8).then(|| self.ms(&[0, 1, 10, 100])),
            drop_when_woken: self.one_in(8).then(|| self.up_to(1, 2)),
            stop: None,
            ahead: None,
            kept: None,
            hold: Duration::from_millis(self.0.u64(0..=longest.unwrap_or_default())),
            inside: Vec::new(),
            renews: self.one_in(8),
            downgrades: false,
            calls: 0,
            listens: None,
            end: self
                .pick(&[End::Unlock, End::UnlockUnheard, End::Drop])
                .unwrap_or(End::Drop),
        };
        self.ask(&mut step, plan);
        step
    }
}
