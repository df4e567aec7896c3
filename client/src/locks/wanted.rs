//! Whether other owners wait for a held lock, and whether the server will tell.

use std::sync::Mutex;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};

use crate::error::Error;
use crate::locked;

/// Whether the server was asked to tell when a lock is wanted, and how often it has told.
#[derive(Default)]
pub(crate) struct Wanted {
    told: AtomicU64,
    /// How often callers of this process wanted it since it was last handed to one of them, which
    /// the server does not know.
    pub(super) told_here: AtomicU64,
    goes_back: AtomicBool,
    asked: Mutex<Asked>,
}

/// How the asking stands.
#[derive(Default)]
enum Asked {
    #[default]
    Not,
    /// A task is about it.
    UnderWay,
    /// The server has agreed, which tells once; and it was told so often by then.
    Until { told: u64 },
    /// The server has refused.
    Refused(Error),
}

/// The next step of a task that listens.
pub(super) enum Next {
    /// The word will come.
    Wait,
    /// Ask the server. The request counts as in flight from now on.
    Ask,
    /// There will be none.
    Fail(Error),
}

impl Wanted {
    /// The state of a new hold, which may have asked with its ACQUIRE.
    pub(crate) fn new(is_asked: bool) -> Self {
        let asked = is_asked.then_some(Asked::Until { told: 0 });
        Self {
            asked: Mutex::new(asked.unwrap_or_default()),
            ..Self::default()
        }
    }

    /// How often it was told.
    pub(crate) fn told(&self) -> u64 {
        self.told.load(Ordering::Acquire)
    }

    /// How often its present guards may have heard.
    pub(crate) fn heard(&self) -> u64 {
        self.told()
            .saturating_add(self.told_here.load(Ordering::Acquire))
    }

    /// It is handed to the next guard, which has yet to hear of anybody.
    pub(crate) fn begins_anew(&self) {
        self.told_here.store(0, Ordering::Release);
    }

    /// Adds the number of the server's reports that a caller waits.
    pub(crate) fn tell(&self, times: u64) {
        self.told.fetch_add(times, Ordering::Release);
    }

    /// The lock must not be kept here: it is lost, or the server cannot report that it is wanted.
    pub(crate) fn must_go_back(&self) {
        self.goes_back.store(true, Ordering::Release);
    }

    /// Whether the lock may be kept here, because no other client wants it.
    pub(crate) fn may_be_kept(&self) -> bool {
        self.told() == 0 && !self.goes_back.load(Ordering::Acquire)
    }

    /// Whether each renewal is to ask once more: the server's word may be lost with a connection,
    /// and a node forgets that it was asked when the slot goes to another, also if it comes back
    /// before anybody here has noticed.
    pub(crate) fn is_asked(&self) -> bool {
        match &*locked(&self.asked) {
            Asked::UnderWay => true,
            Asked::Until { told } => *told == self.told(),
            Asked::Not | Asked::Refused(_) => false,
        }
    }

    /// Somebody wants to hear from now on: a refusal is an earlier one's, and perhaps that of
    /// another server.
    pub(crate) fn forgets_refusal(&self) {
        let mut asked = locked(&self.asked);
        if let Asked::Refused(_) = &*asked {
            *asked = Asked::Not;
        }
    }

    /// Decides whether the server must be asked to report waiters.
    pub(super) fn next(&self) -> Next {
        let mut asked = locked(&self.asked);
        match &*asked {
            Asked::UnderWay => return Next::Wait,
            Asked::Until { told } if *told == self.told() => return Next::Wait,
            Asked::Not | Asked::Until { .. } | Asked::Refused(_) => {}
        }
        match std::mem::replace(&mut *asked, Asked::UnderWay) {
            Asked::Refused(error) => {
                // The next listener asks the server again.
                *asked = Asked::Not;
                Next::Fail(error)
            }
            _ => Next::Ask,
        }
    }

    /// The server tells once from now on, unless it has refused meanwhile. It had told so often
    /// before it was asked.
    pub(crate) fn agreed(&self, told: u64) {
        let mut asked = locked(&self.asked);
        if let Asked::UnderWay = &*asked {
            *asked = Asked::Until { told };
        }
    }

    /// The server does not report waiters. `error` says why, if a listener still wants to know.
    pub(crate) fn failed(&self, error: Option<Error>) {
        *locked(&self.asked) = error.map_or(Asked::Not, Asked::Refused);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn is_asked(wanted: &Wanted) -> bool {
        !matches!(wanted.next(), Next::Ask)
    }

    #[test]
    fn the_server_is_asked_once_and_again_when_it_has_told() {
        let wanted = Wanted::default();
        assert!(!wanted.is_asked());
        assert!(!is_asked(&wanted));
        assert!(is_asked(&wanted), "it is under way");
        wanted.agreed(0);
        assert!(is_asked(&wanted) && wanted.is_asked());
        // Told before the answer to the asking came.
        wanted.tell(1);
        wanted.agreed(0);
        assert!(!wanted.is_asked() && !is_asked(&wanted));
        wanted.agreed(1);
        assert!(is_asked(&wanted));
        wanted.failed(None);
        assert!(!is_asked(&wanted));
        wanted.failed(Some(Error::refused("no")));
        assert!(matches!(wanted.next(), Next::Fail(_)));
        assert!(!is_asked(&wanted), "asked anew");
        assert!(Wanted::new(true).is_asked());
    }
}
