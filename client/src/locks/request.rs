//! A call's request for locks.

use std::sync::Arc;

use smallvec::SmallVec;

use crate::locks::{Held, Helds, HoldOptions, KeptKey, Owner, Target};
use crate::trace;
use crate::wire::{Mode, WaitMode};

/// The arguments of a call.
#[derive(Clone)]
pub(crate) struct Request {
    pub(crate) owner: Owner,
    /// One, but of plain locks there may be several, in a cluster of one slot.
    pub(crate) names: SmallVec<[Arc<[u8]>; 1]>,
    pub(crate) mode: Mode,
    pub(crate) options: HoldOptions,
    pub(crate) wait_mode: WaitMode,
    /// If the lock is kept for its next use: on which terms.
    pub(crate) kept: Option<Arc<KeptKey>>,
}

impl Request {
    pub(super) fn target(&self, name: &Arc<[u8]>) -> Target {
        Target {
            name: Arc::clone(name),
            owner: self.owner.clone(),
            mode: self.mode,
        }
    }

    pub(super) fn span(&self) -> trace::Span {
        let first = self.names.first().map_or(&[][..], |name| name);
        trace::wait(String::from_utf8_lossy(first), &self.owner, self.mode)
    }

    /// The parts in the order of the names.
    pub(super) fn in_order(&self, mut held: Helds) -> Helds {
        let place = |held: &Held| {
            let mut names = self.names.iter();
            names.position(|name| *name == held.hold.target.name)
        };
        if held.len() > 1 {
            held.sort_by_key(place);
        }
        held
    }
}
