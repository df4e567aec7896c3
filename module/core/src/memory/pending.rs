//! Pending releases: holds that must end although no command gives them back.

use crate::values::mode::Mode;
use crate::values::token::Token;
use std::rc::Rc;

/// A hold that must end because its session ended or its grant could not be delivered. Until it has
/// ended, its owner is granted nothing at the lock, and no command of the owner is decided there.
///
/// Otherwise the owner could enter the hold again first, by a command, as a waiter, or in a
/// multi-wait, and the new entry would end as soon as the owner was told of it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct PendingRelease {
    /// The holder.
    pub(crate) owner: Rc<[u8]>,
    /// The mode in which it is held.
    pub(crate) mode: Mode,
    /// Identifies the hold: a later hold of the same owner stays. None if a script took it.
    pub(crate) token: Option<Token>,
    /// True: the whole hold ends, with its session. False: only the part that one grant added to
    /// it.
    pub(crate) whole: bool,
}
