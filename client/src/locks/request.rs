//! A call's request for locks.

use std::sync::Arc;

use smallvec::SmallVec;

use crate::locks::{HoldOptions, Owner, Target};
use crate::wire::{Mode, WaitMode};

/// The arguments of a call.
pub(crate) struct Request {
    pub(crate) owner: Owner,
    /// One, but of plain locks there may be several, in a cluster of one slot.
    pub(crate) names: SmallVec<[Arc<[u8]>; 1]>,
    pub(crate) mode: Mode,
    pub(crate) options: HoldOptions,
    pub(crate) wait_mode: WaitMode,
    /// Whether the call has waited in this process already: then an outage does not end it.
    pub(crate) was_held_up: bool,
}

impl Request {
    pub(super) fn target(&self, name: &Arc<[u8]>) -> Target {
        Target {
            name: Arc::clone(name),
            owner: self.owner.clone(),
            mode: self.mode,
        }
    }
}
