//! Whether other owners wait for a held lock, and whether the server will tell.

use std::sync::Mutex;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};

use crate::error::Error;
use crate::locked;

/// Whether the server was asked to tell when a lock is wanted, and how often it has told.
#[derive(Default)]
pub(crate) struct Wanted {
    pub(super) told: AtomicU64,
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
    /// The renewals ask, until one is answered.
    Due,
    /// The server has agreed, which tells once; and it was told so often by then.
    Until { told: u64 },
    /// The server has refused.
    Refused(Error),
}

impl Wanted {
    /// The state of a new hold, which may have asked with its ACQUIRE.
    pub(super) fn new(is_asked: bool) -> Self {
        let asked = is_asked.then_some(Asked::Until { told: 0 });
        Self {
            asked: Mutex::new(asked.unwrap_or_default()),
            ..Self::default()
        }
    }

    fn told(&self) -> u64 {
        self.told.load(Ordering::Acquire)
    }

    /// How often its present guards may have heard.
    pub(super) fn heard(&self) -> u64 {
        self.told()
            .saturating_add(self.told_here.load(Ordering::Acquire))
    }

    /// It is handed to the next guard, which has yet to hear of anybody.
    pub(super) fn begins_anew(&self) {
        self.told_here.store(0, Ordering::Release);
    }

    /// The lock must not be kept here.
    pub(super) fn must_go_back(&self) {
        self.goes_back.store(true, Ordering::Release);
    }

    /// Whether the lock may be kept here, because no other client wants it.
    pub(super) fn may_be_kept(&self) -> bool {
        self.told() == 0 && !self.goes_back.load(Ordering::Acquire)
    }

    /// Whether a renewal is to ask, and how often it was told before. Each asks once more: the
    /// server's word may be lost with a connection, and a node forgets that it was asked when the
    /// slot goes to another, also if it comes back before anybody here has noticed.
    pub(super) fn asks(&self) -> Option<u64> {
        let now = self.told();
        let asks = match &*locked(&self.asked) {
            Asked::Due => true,
            Asked::Until { told } => *told == now,
            Asked::Not | Asked::Refused(_) => false,
        };
        asks.then_some(now)
    }

    /// The renewals ask from now on.
    pub(super) fn must_be_asked(&self) {
        *locked(&self.asked) = Asked::Due;
    }

    /// The renewal that asked was answered. It had been told so often before.
    pub(super) fn answered(&self, before: u64, error: Option<&Error>) {
        let mut asked = locked(&self.asked);
        match error {
            None => *asked = Asked::Until { told: before },
            Some(error) if error.is_unanswered() => {}
            Some(error) => *asked = Asked::Refused(error.clone()),
        }
    }

    /// A refusal is told to one who listens; the next asks the server again.
    pub(super) fn refusal(&self) -> Option<Error> {
        let mut asked = locked(&self.asked);
        let Asked::Refused(error) = &*asked else {
            return None;
        };
        let error = error.clone();
        *asked = Asked::Not;
        Some(error)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn renewals_ask_until_one_is_answered_and_again_until_it_is_told() {
        let wanted = Wanted::default();
        assert_eq!(wanted.asks(), None);
        wanted.must_be_asked();
        assert_eq!(wanted.asks(), Some(0));
        wanted.answered(0, Some(&Error::not_attached()));
        assert_eq!(wanted.asks(), Some(0), "it was not answered");
        wanted.answered(0, None);
        assert_eq!(wanted.asks(), Some(0), "word may be lost");
        wanted.told.fetch_add(1, Ordering::Release);
        assert_eq!(wanted.asks(), None);
        // Told before the answer to the asking came.
        wanted.answered(0, None);
        assert_eq!(wanted.asks(), None);
        wanted.answered(1, None);
        assert_eq!(wanted.asks(), Some(1));
        wanted.answered(1, Some(&Error::refused("no")));
        assert_eq!(wanted.asks(), None);
        assert!(wanted.refusal().is_some() && wanted.refusal().is_none());
        assert_eq!(Wanted::new(true).asks(), Some(0));
    }
}
