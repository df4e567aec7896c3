//! Who is to hear of what the servers tell: the waits and the holds of a client, by name and owner.

use std::slice;
use std::sync::{Arc, Weak};
use std::time::Duration;

use tokio::sync::mpsc;
use tokio::time::Instant;

use crate::ledger::entries::{Entry, EntryKey, Ledger};
use crate::ledger::hold::Hold;
use crate::ledger::usage::{HoldOptions, Target, Usage};
use crate::lost_reason::LostReason;
use crate::topology::NodeNumber;
use crate::wire::reply::{Event, EventKind, Released};
use crate::wire::request::{self, Command, Mode, Subject};

/// Where the news of a wait is put.
pub(crate) type EventQueue = mpsc::UnboundedSender<Notification>;

/// News for a wait.
pub(crate) struct Notification {
    pub(crate) kind: EventKind,
    /// It has not happened before this.
    pub(crate) since: Instant,
    /// Who told it.
    pub(crate) by: NodeNumber,
}

/// What is left to do about an event that was delivered.
pub(crate) enum Delivered {
    /// Whom it concerned has it.
    Done,
    /// A loss, with the holds that it may be about: the event does not say which of them it is, nor
    /// whether it is an earlier one of the owner.
    Lost(Vec<Arc<Hold>>, LostReason),
    /// A grant that nobody waits for, and the command that gives it back.
    Orphan(OrphanGrant),
}

/// How to give back what was granted to nobody.
pub(crate) struct OrphanGrant {
    pub(crate) name: Arc<[u8]>,
    pub(crate) release: Command<Released>,
    /// Whether it names the token, so that it takes nothing else however often it is sent.
    pub(crate) by_token: bool,
    /// What to send instead if the lock is of the other kind, the last first, and whether that
    /// names the token.
    pub(crate) otherwise: Vec<(Command<Released>, bool)>,
    /// What to send instead if it may have to be sent again: several locks one by one.
    pub(crate) each: Vec<Self>,
}

impl OrphanGrant {
    /// What was granted for this, with this token; a lease starts anew for what is left of a
    /// reader's hold.
    fn of(subject: Subject<'_>, token: u64, lease: Option<Duration>) -> Option<Self> {
        Some(Self {
            name: Arc::clone(subject.names.first()?),
            release: request::release(subject, Some(token), lease),
            by_token: subject.mode.has_token(),
            otherwise: Vec::new(),
            each: match subject.mode {
                Mode::Several => Self::each(subject, token).collect(),
                Mode::Plain | Mode::Read | Mode::Write => Vec::new(),
            },
        })
    }

    /// Those of several locks that are still held by the grant with this token.
    pub(crate) fn each(subject: Subject<'_>, token: u64) -> impl Iterator<Item = Self> {
        subject.names.iter().map(move |name| Self {
            name: Arc::clone(name),
            release: Self::release(name, subject.owner, Mode::Plain, token),
            by_token: true,
            otherwise: Vec::new(),
            each: Vec::new(),
        })
    }

    fn release(name: &Arc<[u8]>, owner: &[u8], mode: Mode, token: u64) -> Command<Released> {
        let names = slice::from_ref(name);
        request::release(Subject { mode, names, owner }, Some(token), None)
    }
}

impl Ledger {
    /// Brings an event to whom it concerns.
    pub(crate) fn deliver(
        &self,
        event: Event,
        since: Instant,
        by: NodeNumber,
        now: Instant,
    ) -> Delivered {
        let Event { name, owner, kind } = event;
        let key = EntryKey {
            name: name.into(),
            owner: owner.into(),
        };
        let (holds, kind) = self.with(|state| {
            let number = state.number();
            let Some(entry) = state.find(&key) else {
                return (Vec::new(), Some(kind));
            };
            let held: Vec<_> = entry.held().collect();
            if let EventKind::Lost(reason) = kind {
                // Also for what is granted already, and not heard of yet.
                entry.lost = Some((number, reason));
                return (held, Some(kind));
            }
            // Under the lock: a mailbox that goes away now finds it when it looks through what was
            // not read.
            let unread = match &entry.wait {
                Some(wait) => wait.send(Notification { kind, since, by }).err(),
                None => return (held, Some(kind)),
            };
            (held, unread.map(|unread| unread.0.kind))
        });
        match kind {
            None => Delivered::Done,
            Some(EventKind::Lost(reason)) => {
                let held = holds.into_iter().filter(|hold| hold.lost(now).is_none());
                let held: Vec<_> = held.collect();
                if held.is_empty() {
                    Delivered::Done
                } else {
                    Delivered::Lost(held, reason)
                }
            }
            Some(kind) => unheard(&key, &holds, &kind),
        }
    }
}

/// News for which nobody listens. A wait is heard to its end, so it is not one of ours: what it was
/// for is not known, and a lock of another kind says so.
fn unheard(key: &EntryKey, holds: &[Arc<Hold>], kind: &EventKind) -> Delivered {
    let Some(token) = undeliverable(holds, kind) else {
        return Delivered::Done;
    };
    let release = |mode| OrphanGrant::release(&key.name, &key.owner, mode, token);
    Delivered::Orphan(OrphanGrant {
        name: Arc::clone(&key.name),
        release: release(Mode::Plain),
        by_token: true,
        otherwise: [Mode::Write, Mode::Read]
            .map(|mode| (release(mode), mode.has_token()))
            .into(),
        each: Vec::new(),
    })
}

/// The token of a grant that nobody waits for, and which is to be given back; unless a reply has
/// brought the same grant before: then it is one of the holds that are there. All else is of no use
/// to anybody.
fn undeliverable(holds: &[Arc<Hold>], kind: &EventKind) -> Option<u64> {
    let EventKind::Granted { token } = *kind else {
        return None;
    };
    let known = holds.iter().any(|hold| hold.token() == token);
    (!known).then_some(token)
}

/// Gives back what was granted to nobody.
pub(crate) trait GiveBack: Send + Sync {
    fn give_back(self: Arc<Self>, orphan: OrphanGrant);
}

/// What a wait hears. What it has not read when it goes is given back.
pub(crate) struct Mailbox {
    /// Not kept alive: a wait that is withdrawn goes on until its client has gone.
    orphans: Weak<dyn GiveBack>,
    target: Arc<Target>,
    options: HoldOptions,
    unread: mpsc::UnboundedReceiver<Notification>,
}

impl Mailbox {
    /// Listens for news of a wait, from now on. There is one wait of an owner at a lock at a time.
    pub(crate) fn new(orphans: Weak<dyn GiveBack>, usage: &Usage) -> Self {
        let (queue, unread) = mpsc::unbounded_channel();
        let target = Arc::clone(usage.target());
        target.ledger().with(|state| {
            state.each_entry(target.entries(), |entry| entry.wait = Some(queue.clone()));
        });
        Self {
            orphans,
            target,
            options: usage.options(),
            unread,
        }
    }

    /// Waits for news.
    pub(crate) async fn next(&mut self) -> Notification {
        match self.unread.recv().await {
            Some(notification) => notification,
            // Another wait of the owner has taken the place of this one, which cannot be.
            None => std::future::pending().await,
        }
    }

    /// News that is here already.
    pub(crate) fn here(&mut self) -> Option<Notification> {
        self.unread.try_recv().ok()
    }
}

impl Drop for Mailbox {
    fn drop(&mut self) {
        let target = Arc::clone(&self.target);
        target.ledger().with(|state| {
            state.each_entry(target.entries(), |entry| entry.wait = None);
        });
        if self.unread.is_empty() {
            return;
        }
        // Grants of several locks are told under the first.
        let holds: Vec<_> = target.ledger().with(|state| {
            let first = target.first_entry().and_then(|first| state.get(first));
            first.into_iter().flat_map(Entry::held).collect()
        });
        while let Some(told) = self.here() {
            // Were the lease of a reader not to start anew, the entry that goes could be that of
            // another guard, and the others end earlier.
            let token = undeliverable(&holds, &told.kind);
            let lease = Some(self.options.lease);
            let orphan = token.and_then(|token| OrphanGrant::of(target.subject(), token, lease));
            if let (Some(orphan), Some(orphans)) = (orphan, self.orphans.upgrade()) {
                orphans.give_back(orphan);
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::ledger::hold::Grant;
    use crate::ledger::owner::Owner;
    use crate::wire::session::Attachment;
    use std::sync::Mutex;

    const OPTIONS: HoldOptions = HoldOptions {
        lease: Duration::from_secs(30),
        renewed: true,
        max_hold: None,
    };

    /// Notes the names of what is given back.
    #[derive(Default)]
    struct Orphans(Mutex<Vec<Arc<[u8]>>>);

    impl GiveBack for Orphans {
        fn give_back(self: Arc<Self>, orphan: OrphanGrant) {
            crate::locked(&self.0).push(orphan.name);
        }
    }

    fn target(ledger: &Arc<Ledger>, names: &[&str]) -> Arc<Target> {
        let names: Vec<_> = names.iter().map(|n| Arc::from(n.as_bytes())).collect();
        let mode = if names.len() > 1 {
            Mode::Several
        } else {
            Mode::Plain
        };
        Owner::new("client", 1).target(ledger, mode, &names)
    }

    fn deliver(ledger: &Ledger, name: &str, kind: EventKind) -> Delivered {
        let event = Event {
            name: name.into(),
            owner: b"client:1".to_vec(),
            kind,
        };
        let now = Instant::now();
        ledger.deliver(event, now, NodeNumber::next(), now)
    }

    fn held(target: &Arc<Target>, token: u64) -> (Arc<Hold>, Usage) {
        let mut usage = target.claim(OPTIONS);
        let now = Instant::now();
        let grant = Grant {
            token,
            lease: usage.lease(now).keep(),
            attachment: Attachment::new(now, Duration::ZERO),
            fresh: true,
        };
        (Hold::enter(&mut usage, grant, true, now).0, usage)
    }

    #[test]
    fn a_loss_is_told_to_all_holds_that_it_may_be_about() {
        let ledger = Arc::<Ledger>::default();
        let broken = || EventKind::Lost(LostReason::Broken);
        let concerned = |name| match deliver(&ledger, name, broken()) {
            Delivered::Lost(holds, LostReason::Broken) => holds.len(),
            _ => 0,
        };
        assert_eq!(concerned("c"), 0);
        let (both, _usage) = held(&target(&ledger, &["b", "c"]), 7);
        let one = held(&target(&ledger, &["c"]), 7);
        assert_eq!(concerned("c"), 2, "which of them it was is to be asked");
        drop(one);
        assert_eq!(concerned("c"), 1);
        both.lose(LostReason::Broken);
        assert_eq!(concerned("b"), 0);
    }

    #[test]
    fn a_grant_goes_to_the_wait_and_without_one_is_given_back() {
        let ledger = Arc::<Ledger>::default();
        let orphans = Arc::new(Orphans::default());
        let granted = || EventKind::Granted { token: 7 };
        let unheard = |told| matches!(told, Delivered::Orphan(_));
        assert!(unheard(deliver(&ledger, "a", granted())));
        let both = target(&ledger, &["b", "a"]);
        let usage = both.claim(OPTIONS);
        let mut mailbox = Mailbox::new(Arc::<Orphans>::downgrade(&orphans), &usage);
        assert!(!unheard(deliver(&ledger, "b", granted())));
        let told = mailbox.here().expect("it was told");
        assert!(matches!(told.kind, EventKind::Granted { token: 7 }));
        assert!(mailbox.here().is_none());
        assert!(!unheard(deliver(&ledger, "b", granted())));
        drop(mailbox);
        assert_eq!(*crate::locked(&orphans.0), [Arc::from(*b"b")], "unread");
        assert!(unheard(deliver(&ledger, "b", granted())));
        // One that a reply has brought before.
        let _held = held(&both, 7);
        assert!(!unheard(deliver(&ledger, "b", granted())));
    }
}
