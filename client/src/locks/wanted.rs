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
    /// It is not kept here, because the server refuses to tell.
    pub(super) goes_back: AtomicBool,
    /// The renewals ask as long as the server has told this often, if they ask; or the server's
    /// refusal to tell.
    asked: Mutex<Option<Result<u64, Error>>>,
}

impl Wanted {
    /// The state of a new hold, which may have asked with its ACQUIRE.
    pub(super) fn new(is_asked: bool) -> Self {
        Self {
            asked: Mutex::new(is_asked.then_some(Ok(0))),
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

    /// Whether the lock may be kept here, because no other client wants it.
    pub(super) fn may_be_kept(&self) -> bool {
        self.told() == 0 && !self.goes_back.load(Ordering::Acquire)
    }

    /// Whether a renewal is to ask, and how often it was told before. Each asks once more: the
    /// server's word may be lost with a connection, and a node forgets that it was asked when the
    /// slot goes to another, also if it comes back before anybody here has noticed.
    pub(super) fn asks(&self) -> Option<u64> {
        let now = self.told();
        matches!(&*locked(&self.asked), Some(Ok(told)) if *told == now).then_some(now)
    }

    /// The renewals ask from now on.
    pub(super) fn must_be_asked(&self) {
        *locked(&self.asked) = Some(Ok(self.told()));
    }

    /// The renewal that asked was answered with this error.
    pub(super) fn failed(&self, error: &Error) {
        // Where the lock is by now the next renewal asks.
        if !error.is_unanswered() && error.redirect().is_none() {
            *locked(&self.asked) = Some(Err(error.clone()));
        }
    }

    /// A refusal is told to one who listens; the next asks the server again.
    pub(super) fn refusal(&self) -> Option<Error> {
        locked(&self.asked).take_if(|asked| asked.is_err())?.err()
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
        for error in ["UNBLOCKED", "MOVED 1 a:1", "ASK 1 a:1"] {
            wanted.failed(&Error::from_text(error));
            assert_eq!(wanted.asks(), Some(0), "{error}: word may be lost");
        }
        wanted.told.fetch_add(1, Ordering::Release);
        assert_eq!(wanted.asks(), None);
        wanted.must_be_asked();
        assert_eq!(wanted.asks(), Some(1));
        wanted.failed(&Error::refused("no"));
        assert_eq!(wanted.asks(), None);
        assert!(wanted.refusal().is_some() && wanted.refusal().is_none());
        assert_eq!(Wanted::new(true).asks(), Some(0));
    }
}
