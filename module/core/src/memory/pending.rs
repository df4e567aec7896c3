//! Pending releases: holds that must end although no command gives them back.

use crate::memory::hold::HoldMark;
use crate::values::mode::Mode;
use std::rc::Rc;

/// A hold that must end because its session ended or its grant could not be delivered. Its owner
/// is granted nothing at the lock, and no command of the owner is decided there, before it ends.
///
/// If it were entered again first, by a command, by a waiter of its owner or as one of several
/// locks, the new entry would end as soon as it was told.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct PendingRelease {
    /// The holder.
    pub(crate) owner: Rc<[u8]>,
    /// How it is held.
    pub(crate) mode: Mode,
    /// By what the hold is known: a later one of the same owner stays.
    pub(crate) mark: HoldMark,
    /// Whether all of the hold ends, with its session, or only what one grant added to it.
    pub(crate) whole: bool,
}
