//! A call's request for locks.

use std::sync::Arc;

use smallvec::SmallVec;

use crate::locks::{HoldOptions, KeptKey, Owner, Target};
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
}
