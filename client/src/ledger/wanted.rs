//! What a hold knows of those who wait for its lock.

use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Mutex};

use crate::error::Error;
use crate::ledger::Hold;
use crate::locked;
use crate::wire::Attachment;

/// Whether the server was asked to tell when a lock is wanted, and how often it has told.
#[derive(Default)]
pub(crate) struct Wanted {
    told: AtomicU64,
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
    /// The server has agreed, which tells once. It was told so often by then, and the hold counted
    /// on this attachment: with a later one its word may have been lost on the way.
    Until { told: u64, by: Arc<Attachment> },
    /// The server has refused.
    Refused(Error),
}

/// What is to be done by who waits for word.
pub(crate) enum Next {
    /// The word will come.
    Wait,
    /// The server is to be asked, and this counts as being under way.
    Ask,
    /// There will be none.
    Fail(Error),
}

impl Wanted {
    /// How often it was told.
    pub(crate) fn told(&self) -> u64 {
        self.told.load(Ordering::Acquire)
    }

    /// The server has told that somebody waits.
    fn tell(&self) {
        self.told.fetch_add(1, Ordering::Release);
    }

    /// It must not be kept here: it is lost, or nobody would hear that it is wanted.
    pub(crate) fn must_go_back(&self) {
        self.goes_back.store(true, Ordering::Release);
    }

    /// Whether it may be kept here, as far as others are concerned.
    pub(crate) fn may_be_kept(&self) -> bool {
        self.told() == 0 && !self.goes_back.load(Ordering::Acquire)
    }

    /// What to do in order to be told, for a hold that counts on this attachment.
    pub(crate) fn next(&self, present: &Arc<Attachment>) -> Next {
        let mut asked = locked(&self.asked);
        match &*asked {
            Asked::UnderWay => return Next::Wait,
            Asked::Until { told, by } if *told == self.told() && Arc::ptr_eq(by, present) => {
                return Next::Wait;
            }
            Asked::Not | Asked::Until { .. } | Asked::Refused(_) => {}
        }
        match std::mem::replace(&mut *asked, Asked::UnderWay) {
            Asked::Refused(error) => {
                // Whoever asks after this one asks the server again.
                *asked = Asked::Not;
                Next::Fail(error)
            }
            _ => Next::Ask,
        }
    }

    /// The server tells once from now on. It had told so often, and the hold counted on this
    /// attachment, before it was asked.
    pub(crate) fn agreed(&self, told: u64, by: Arc<Attachment>) {
        *locked(&self.asked) = Asked::Until { told, by };
    }

    /// The server does not tell: why, unless nobody wants to know any more.
    pub(crate) fn failed(&self, error: Option<Error>) {
        *locked(&self.asked) = error.map_or(Asked::Not, Asked::Refused);
    }
}

impl Hold {
    /// The server tells that it is wanted: all guards hear it.
    pub(super) fn is_wanted(&self) {
        self.wanted.tell();
        self.changed.notify_waiters();
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::time::Duration;
    use tokio::time::Instant;

    fn is_asked(wanted: &Wanted, by: &Arc<Attachment>) -> bool {
        !matches!(wanted.next(by), Next::Ask)
    }

    #[test]
    fn the_server_is_asked_once_and_again_when_it_has_told_or_its_word_may_be_lost() {
        let attachment = || Attachment::new(None, Instant::now(), Duration::ZERO);
        let (first, second) = (attachment(), attachment());
        let wanted = Wanted::default();
        assert!(!is_asked(&wanted, &first));
        assert!(is_asked(&wanted, &first), "it is under way");
        wanted.agreed(0, Arc::clone(&first));
        assert!(is_asked(&wanted, &first));
        assert!(!is_asked(&wanted, &second), "attached anew");
        // Told before the answer to the asking came.
        wanted.told.fetch_add(1, Ordering::Relaxed);
        wanted.agreed(0, Arc::clone(&second));
        assert!(!is_asked(&wanted, &second));
        wanted.agreed(1, Arc::clone(&second));
        assert!(is_asked(&wanted, &second));
        wanted.failed(None);
        assert!(!is_asked(&wanted, &second));
        wanted.failed(Some(Error::refused("no")));
        assert!(matches!(wanted.next(&second), Next::Fail(_)));
        assert!(!is_asked(&wanted, &second), "asked anew");
    }
}
