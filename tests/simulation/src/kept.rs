//! Locks that are kept for their next use, in schedules.

use std::time::Duration;

use crate::schedule::{Draw, End, FaultKind, LOCKS, Mode, Owning, Schedule, Step, Task, Verb};
use crate::stops;

/// Has tasks keep locks in some of the schedules that follow from seeds; a twentieth of all are
/// about little else. The others stay as they are.
pub(crate) fn add(schedule: &mut Schedule, seed: u64) {
    let mut draw = Draw(fastrand::Rng::with_seed(seed.wrapping_add(0x4ee9)));
    if schedule.servers > 1 {
        return;
    }
    match draw.0.u8(0..20) {
        0 => {
            draw.keep_all_day(schedule);
            stops::add(schedule, seed);
        }
        1 | 2 => draw.keep_some(schedule),
        _ => {}
    }
}

impl Draw {
    /// The idle time of kept locks: most calls of a run say the same.
    fn idle(&mut self) -> Duration {
        self.ms(&[1, 50, 300, 1_000, 5_000, 60_000])
    }

    /// Tasks use one lock or two again and again, for moments, with or without pauses.
    fn keep_all_day(&mut self, schedule: &mut Schedule) {
        let latency = u64::try_from(schedule.latency.as_millis()).unwrap_or_default();
        let span = 20 * latency + 1_000;
        if self.one_in(2) {
            schedule.faults.clear();
        }
        let idle = self.idle();
        let lease = self.one_in(4).then(|| self.ms(&[500, 1_000, 3_000]));
        // Nobody keeps a lock from others who never keep it.
        let strangers = self.one_in(2);
        let locks = self.up_to(1, 2).min(LOCKS);
        schedule.tasks = (0..self.up_to(2, 8))
            .map(|_| {
                let keeps = !strangers || self.one_in(2);
                let steps = (0..self.up_to(2, 10))
                    .map(|_| {
                        let mut step = self.moment_of(latency, locks);
                        step.lease = lease;
                        step.kept = keeps.then_some(idle);
                        if self.one_in(16) {
                            step.kept = Some(self.idle());
                        }
                        step
                    })
                    .collect();
                Task {
                    client: self.0.usize(0..schedule.clients.len()),
                    at: Duration::from_millis(self.0.u64(0..=4 * latency + 100)),
                    owner: Owning::Call,
                    steps,
                }
            })
            .collect();
        // Else they would come when all is over.
        for fault in &mut schedule.faults {
            fault.at = Duration::from_millis(self.0.u64(0..=2 * span));
            if let FaultKind::Delete(lock) = &mut fault.kind {
                *lock = 0;
            }
        }
        schedule.faults.sort_by_key(|fault| fault.at);
    }

    /// Half of the steps of a run with a bit of everything keep their lock, if it is one plain
    /// lock.
    fn keep_some(&mut self, schedule: &mut Schedule) {
        let idle = self.idle();
        // A kept step has an owner of its own: inside a hold of its task's owner it would wait for
        // that hold.
        let tasks = schedule.tasks.iter_mut();
        for task in tasks.filter(|task| task.owner == Owning::Call) {
            self.keep_of(&mut task.steps, idle);
        }
    }

    fn keep_of(&mut self, steps: &mut [Step], idle: Duration) {
        for step in steps {
            self.keep_of(&mut step.inside, idle);
            let is_one = step.mode == Mode::Plain && step.locks.len() == 1;
            // How it listens is judged as if a grant had one guard.
            if is_one && step.listens.is_none() && step.calls == 0 && self.one_in(2) {
                step.kept = Some(idle);
            }
        }
    }

    fn moment_of(&mut self, latency: u64, locks: u8) -> Step {
        let verb = match self.0.u8(0..6) {
            0 => Verb::Try,
            1 => Verb::Within(Duration::from_millis(self.0.u64(0..=2_000))),
            _ => Verb::Lock,
        };
        let longest = self.pick(&[0, 0, 2 * latency, 4 * latency, 100, 1_000]);
        Step {
            locks: vec![self.0.u8(0..locks)],
            mode: Mode::Plain,
            asked: None,
            kept: None,
            verb,
            lease: None,
            drop_after: self.one_in(8).then(|| self.ms(&[0, 1, 10, 100])),
            drop_when_woken: self.one_in(8).then(|| self.up_to(1, 2)),
            stop: None,
            ahead: None,
            hold: Duration::from_millis(self.0.u64(0..=longest.unwrap_or_default())),
            inside: Vec::new(),
            listens: None,
            calls: 0,
            renews: self.one_in(16),
            downgrades: false,
            end: self
                .pick(&[End::Unlock, End::UnlockUnheard, End::Drop])
                .unwrap_or(End::Drop),
        }
    }
}
