//! Slots of a cluster that move key by key, while their locks are held, waited for and renewed.

use std::time::Duration;

use serde::{Deserialize, Serialize};

use crate::judge::TAGGED;
use crate::schedule::{Fault, FaultKind, Schedule, Step};

/// How a slot moves key by key.
#[derive(Clone, Copy, Debug, Serialize, Deserialize)]
pub struct ByKeys {
    /// The time before the first key and after the last.
    pub stays: Duration,
    /// The time between two keys.
    pub every: Duration,
    /// Which of the keys that are left goes next.
    pub order: usize,
    /// The time between word to one node that the slot has moved, and to the next.
    pub apart: Duration,
    /// Whether the node that the slot leaves hears of that before the one that gets it.
    pub source_first: bool,
}

/// Has slots move key by key in some of the schedules that follow from seeds; a quarter of those
/// with a cluster are about little else. The others stay as they are.
pub(crate) fn add(schedule: &mut Schedule, seed: u64) {
    let mut draw = Draw(fastrand::Rng::with_seed(seed.wrapping_add(0x510e)));
    let Some(clustered) = schedule.clustered else {
        return;
    };
    for fault in &mut schedule.faults {
        if let FaultKind::MoveSlot { by_keys, .. } = &mut fault.kind
            && draw.one_in(2)
        {
            *by_keys = Some(draw.by_keys());
        }
    }
    if !draw.one_in(4) {
        return;
    }
    let nodes = clustered.nodes.max(2);
    schedule.clustered = Some(crate::nodes::Clustered { nodes, ..clustered });
    let is_move = |fault: &Fault| matches!(fault.kind, FaultKind::MoveSlot { .. });
    let is_alone = draw.one_in(2);
    schedule.faults.retain(|of| !is_alone && !is_move(of));
    for _ in 0..draw.0.usize(3..9) {
        let fault = draw.one_move(schedule, nodes);
        schedule.faults.push(fault);
    }
    for task in &mut schedule.tasks {
        task.at = task.at.min(EARLY);
        for step in &mut task.steps {
            if draw.one_in(2) {
                step.hold = Duration::from_millis(draw.0.u64(1_000..9_000));
            }
        }
    }
    if draw.one_in(2) {
        put_in_one_slot(schedule);
    }
    schedule.faults.sort_by_key(|fault| fault.at);
}

/// All locks in one slot: several can be asked for in one command, and be apart.
pub(crate) fn put_in_one_slot(schedule: &mut Schedule) {
    for task in &mut schedule.tasks {
        tag(&mut task.steps);
    }
    for set in &mut schedule.limits {
        tag_one(&mut set.lock);
    }
    for fault in &mut schedule.faults {
        if let FaultKind::MoveSlot { lock, .. } = &mut fault.kind {
            tag_one(lock);
        }
    }
}

fn tag(steps: &mut [Step]) {
    for step in steps {
        for lock in &mut step.locks {
            tag_one(lock);
        }
        tag(&mut step.inside);
    }
}

fn tag_one(lock: &mut u8) {
    if *lock < TAGGED {
        *lock += TAGGED;
    }
}

/// Tasks that shall meet a move of a slot begin no later.
const EARLY: Duration = Duration::from_secs(5);

struct Draw(fastrand::Rng);

impl Draw {
    fn one_in(&mut self, of: u32) -> bool {
        self.0.u32(0..of) == 0
    }

    /// Up to this, most often far less.
    fn time(&mut self, longest_ms: u64) -> Duration {
        let longest = match self.0.u8(0..3) {
            0 => longest_ms,
            1 => longest_ms / 10,
            _ => longest_ms / 100,
        };
        Duration::from_millis(self.0.u64(0..=longest))
    }

    /// Of a lock that somebody may hold then.
    fn one_move(&mut self, schedule: &Schedule, nodes: usize) -> Fault {
        let steps = schedule.tasks.iter().flat_map(|task| &task.steps);
        let locks: Vec<u8> = steps.flat_map(|step| step.locks.clone()).collect();
        let kind = FaultKind::MoveSlot {
            lock: self.0.choice(locks).unwrap_or_default(),
            to: self.0.usize(0..nodes),
            by_keys: Some(self.by_keys()),
        };
        let at = Duration::from_millis(self.0.u64(0..15_000));
        let server = 0;
        Fault {
            at,
            kind,
            server,
            step: None,
        }
    }

    fn by_keys(&mut self) -> ByKeys {
        ByKeys {
            stays: self.time(8_000),
            every: self.time(4_000),
            order: self.0.usize(0..12),
            apart: self.time(2_000),
            source_first: self.one_in(4),
        }
    }
}
