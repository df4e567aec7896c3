//! Primaries with a second replica, which lags otherwise than the first.

use std::time::Duration;

use crate::schedule::{Fault, FaultKind, Schedule};

/// Adds one in some of the schedules that follow from seeds. The others stay as they are.
pub(crate) fn add(schedule: &mut Schedule, seed: u64) {
    let mut draw = fastrand::Rng::with_seed(seed.wrapping_add(0x2ec0));
    if draw.u8(0..2) == 0 {
        return;
    }
    let lag = draw.choice([0, 1, 10, 100, 500]).unwrap_or_default();
    let second = Some(Duration::from_millis(lag));
    let place = match (&mut schedule.watched, &mut schedule.clustered) {
        (Some(watched), _) => {
            watched.second = second;
            2
        }
        (None, Some(clustered)) => {
            clustered.second = second;
            let node = draw.usize(0..clustered.nodes);
            clustered.nodes.saturating_mul(2).saturating_add(node)
        }
        (None, None) => return,
    };
    for client in &mut schedule.clients {
        client.copies = draw.u32(1..=2);
    }
    for fault in &mut schedule.faults {
        if let FaultKind::Failover(failover) | FaultKind::Replace(failover) = &mut fault.kind {
            failover.to = draw.usize(0..2);
        }
    }
    if draw.u8(0..3) == 0 {
        let lasts = Duration::from_millis(draw.u64(0..10_000));
        let crash = FaultKind::Crash {
            lasts,
            loses_keys: false,
        };
        let kinds = [FaultKind::Pause(lasts), crash];
        let kind = draw.choice(kinds).unwrap_or(crash);
        let at = Duration::from_millis(draw.u64(0..20_000));
        let server = place;
        schedule.faults.push(Fault {
            at,
            kind,
            server,
            step: None,
        });
        schedule.faults.sort_by_key(|fault| fault.at);
    }
}
