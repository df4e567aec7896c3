//! Reports that other owners wait for a held lock.

use std::pin::pin;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Mutex, Weak};

use futures_util::stream::{FuturesUnordered, StreamExt};
use tokio::time::{Instant, sleep, sleep_until};

use crate::error::Error;
use crate::locks::{Aim, Context, Hold, renew};
use crate::{Backoff, locked, task};

/// Whether the server was asked to tell when a lock is wanted, and how often it has told.
#[derive(Default)]
pub(crate) struct Wanted {
    told: AtomicU64,
    /// How often callers of this process wanted it since it was last handed to one of them, which
    /// the server does not know.
    told_here: AtomicU64,
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
enum Next {
    /// The word will come.
    Wait,
    /// Ask the server. The request counts as in flight from now on.
    Ask,
    /// There will be none.
    Fail(Error),
}

impl Wanted {
    /// Of a hold that may have asked with its ACQUIRE.
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

    /// The server has told so often that somebody waits.
    pub(crate) fn tell(&self, times: u64) {
        self.told.fetch_add(times, Ordering::Release);
    }

    /// It must not be kept here: it is lost, or nobody would hear that it is wanted.
    pub(crate) fn must_go_back(&self) {
        self.goes_back.store(true, Ordering::Release);
    }

    /// Whether it may be kept here, as far as others are concerned.
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
    fn next(&self) -> Next {
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

    /// The server does not tell: why, unless nobody wants to know any more.
    pub(crate) fn failed(&self, error: Option<Error>) {
        *locked(&self.asked) = error.map_or(Asked::Not, Asked::Refused);
    }
}

impl Hold {
    /// The server tells that it is wanted: all guards hear it.
    pub(crate) fn is_wanted(&self) {
        self.wanted.tell(1);
        self.changed.notify_waiters();
    }

    /// The same for a waiting or refused caller of this process.
    pub(crate) fn is_wanted_here(&self) {
        self.wanted.told_here.fetch_add(1, Ordering::Release);
        self.changed.notify_waiters();
    }
}

/// Ends when one of these is wanted that were not `heard` of yet, or is lost.
pub(crate) async fn wanted<'a>(
    context: &Arc<Context>,
    holds: impl Iterator<Item = &'a Arc<Hold>> + Clone,
    heard: &AtomicU64,
) -> Result<(), Error> {
    let lost = holds.clone().find_map(|hold| hold.lost(Instant::now()));
    if let Some(reason) = lost {
        return Err(Error::lost(reason));
    }
    let told = || -> u64 { holds.clone().map(|hold| hold.wanted.heard()).sum() };
    // Reads each counter once: a report by another thread after this look ends the wait.
    let mut known: u64 = 0;
    let mut waiting = FuturesUnordered::new();
    for hold in holds.clone() {
        hold.wanted.forgets_refusal();
        let told = hold.wanted.heard();
        known = known.saturating_add(told);
        waiting.push(until_wanted(context, hold, told));
    }
    // Told while nobody waited for it, or to another guard.
    if heard.swap(known, Ordering::Relaxed) < known {
        return Ok(());
    }
    let word = waiting.next().await;
    heard.store(told(), Ordering::Relaxed);
    // A guard has something.
    word.unwrap_or(Ok(()))
}

/// Ends when it was told more often than is known.
async fn until_wanted(context: &Arc<Context>, hold: &Arc<Hold>, known: u64) -> Result<(), Error> {
    loop {
        // Listens before it looks: what changes in between is heard.
        let mut changed = pin!(hold.changed.notified());
        changed.as_mut().enable();
        let end = hold.end();
        if let Some(reason) = hold.lost(Instant::now()) {
            return Err(Error::lost(reason));
        }
        if hold.wanted.heard() > known {
            return Ok(());
        }
        listen(context, hold)?;
        tokio::select! {
            () = sleep_until(end) => {}
            () = changed => {}
        }
    }
}

/// Sees to it that the server tells when it is wanted: a renewal asks it to, once.
pub(super) fn listen(context: &Arc<Context>, hold: &Arc<Hold>) -> Result<(), Error> {
    match hold.wanted.next() {
        Next::Wait => Ok(()),
        // In a task of its own: whoever looks again and again, and never waits for long, would
        // otherwise ask again and again.
        Next::Ask => {
            let asking = ask_until_answered(Arc::downgrade(context), Arc::downgrade(hold));
            context.background.runtime.spawn(task(asking));
            Ok(())
        }
        Next::Fail(error) => Err(error),
    }
}

/// Asks until the server answers or the guards are gone. Each renewal asks too, while a task
/// listens.
async fn ask_until_answered(context: Weak<Context>, hold: Weak<Hold>) {
    let mut backoff = Backoff::new();
    // In the pauses nothing is kept: the client may end with its last guard.
    while let (Some(context), Some(hold)) = (context.upgrade(), hold.upgrade()) {
        let is_over = !hold.has_guards() || hold.lost(Instant::now()).is_some();
        let told = hold.wanted.told();
        let outcome = if is_over {
            Some(None)
        } else {
            let asking = renew::ask(&context, &hold, Aim::Hold);
            drop(context);
            match asking.await {
                Ok(()) => {
                    hold.wanted.agreed(told);
                    hold.changed.notify_waiters();
                    return;
                }
                Err(error) if error.is_unanswered() => None,
                Err(error) => Some(Some(error)),
            }
        };
        if let Some(error) = outcome {
            hold.wanted.failed(error);
            hold.changed.notify_waiters();
            return;
        }
        drop(hold);
        sleep(backoff.next()).await;
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
