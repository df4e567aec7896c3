//! Who is to hear of what the servers tell: the waits and the holds of a client, by name and owner.

use std::collections::VecDeque;
use std::mem;
use std::sync::{Arc, Mutex};

use smallvec::SmallVec;
use tokio::sync::Notify;
use tokio::time::Instant;

use crate::error::LostReason;
use crate::ledger::{Entry, EntryKey, Hold, Ledger, Owner, Target};
use crate::locked;
use crate::wire::{Event, EventKind, Session, SessionNumber};

/// The wait that is to hear of what the server tells.
#[derive(Default)]
pub(super) enum Wait {
    #[default]
    None,
    /// It has heard nothing. So most of them end, since their lock is free.
    Unheard,
    Heard(Arc<EventQueue>),
}

impl Wait {
    pub(super) fn is_some(&self) -> bool {
        !matches!(self, Self::None)
    }

    /// Where its news is put, if there is one.
    fn queue(&mut self) -> Option<&Arc<EventQueue>> {
        if let Self::Unheard = self {
            *self = Self::Heard(Arc::default());
        }
        match self {
            Self::Heard(queue) => Some(queue),
            Self::None | Self::Unheard => None,
        }
    }
}

/// Where the news of a wait is put. A channel would make room for many words first.
#[derive(Default)]
pub(super) struct EventQueue {
    unread: Mutex<VecDeque<Notification>>,
    told: Notify,
}

impl EventQueue {
    fn tell(&self, notification: Notification) {
        locked(&self.unread).push_back(notification);
        // The one who reads it may have looked already and be about to wait: then it looks again.
        self.told.notify_one();
    }

    fn next(&self) -> Option<Notification> {
        locked(&self.unread).pop_front()
    }
}

/// News for a wait.
pub(crate) struct Notification {
    pub(crate) kind: EventKind,
    /// When it was delivered, among all that the ledger was told.
    pub(crate) number: u64,
    /// It has not happened before this.
    pub(crate) since: Instant,
    /// Who told it.
    pub(crate) by: SessionNumber,
}

/// What is left to do about an event that was delivered.
pub(crate) enum Delivered {
    /// Whom it concerned has it.
    Done,
    /// A loss, with the holds that it may be about: the event does not say which of them it is, nor
    /// whether it is an earlier one of the owner.
    Lost(Vec<Arc<Hold>>, LostReason),
    /// A grant that nobody waits for, and which is to be given back.
    Orphan {
        owner: Owner,
        name: Arc<[u8]>,
        token: u64,
    },
}

impl Ledger {
    /// Brings an event to whom it concerns.
    pub(crate) fn deliver(
        &self,
        event: Event,
        since: Instant,
        by: SessionNumber,
        now: Instant,
    ) -> Delivered {
        let kind = event.kind;
        let key = EntryKey::new(event.name.into(), event.owner.into());
        let (mut holds, unread) = self.with(|state| {
            let number = state.number();
            let Some(entry) = state.find(&key) else {
                return (Vec::new(), Some(kind));
            };
            let held: Vec<_> = entry.held().collect();
            match (&kind, entry.wait.queue()) {
                // Also for what is granted already, and not heard of yet.
                (EventKind::Lost(reason), _) => entry.lost = Some((number, *reason)),
                (EventKind::Wanted, _) if held.is_empty() => {
                    entry.wanted = entry.wanted.saturating_add(1);
                }
                (EventKind::Wanted, _) | (_, None) => {}
                // Under the lock: a mailbox that goes away now finds it when it looks through what
                // was not read.
                (_, Some(wait)) => {
                    let notification = Notification {
                        kind,
                        number,
                        since,
                        by,
                    };
                    wait.tell(notification);
                    return (held, None);
                }
            }
            (held, Some(kind))
        });
        match unread {
            Some(EventKind::Lost(reason)) => {
                holds.retain(|hold| hold.lost(now).is_none());
                Delivered::Lost(holds, reason)
            }
            Some(EventKind::Granted { token }) if is_unknown(&holds, token) => Delivered::Orphan {
                owner: Owner::named(&key.owner),
                name: key.name,
                token,
            },
            Some(EventKind::Wanted) => {
                // All guards of the owner hear it, for the event names the owner alone.
                for hold in holds {
                    hold.is_wanted();
                }
                Delivered::Done
            }
            _ => Delivered::Done,
        }
    }
}

/// Whether a grant that nobody waits for is to be given back; unless a reply has brought the same
/// one before: then it is one of the holds that are there.
fn is_unknown(holds: &[Arc<Hold>], token: u64) -> bool {
    holds.iter().all(|hold| hold.token != token)
}

/// What a wait hears.
pub(crate) struct Mailbox {
    pub(crate) target: Arc<Target>,
    /// Grants that are no news, and by whom they may be told.
    ///
    /// An event may come late, by the connection after the one that broke. Meanwhile an earlier
    /// wait of the owner may have learnt of its grant from an answer, and have given it back; taken
    /// for this wait's, its guard would hold nothing. What other calls of the owner are told is of
    /// no use here: they may have entered what this wait was granted.
    old_news: Vec<(SessionNumber, u64)>,
    /// The number of the first ACQUIRE. What was delivered before that cannot be about it.
    asked: Option<u64>,
}

impl Mailbox {
    /// Listens for news of a wait, from now on. There is one wait of an owner at a lock at a time.
    pub(crate) fn new(target: &Arc<Target>) -> Self {
        // What is told of any of several locks is put into the same queue.
        let shared = (target.entries.len() > 1).then(Arc::<EventQueue>::default);
        let listen = |entry: &mut Entry| {
            entry.wait = shared.clone().map_or(Wait::Unheard, Wait::Heard);
        };
        let ledger = &target.ledger;
        ledger.with(|state| state.each_entry(&target.entries, listen));
        Self {
            target: Arc::clone(target),
            old_news: Vec::new(),
            asked: None,
        }
    }

    /// An ACQUIRE of this number is about to be handed over to this server.
    pub(crate) fn asks(&mut self, session: &Session, number: u64) {
        for token in session.untold() {
            self.knows(session.number, token);
        }
        self.asked.get_or_insert(number);
    }

    /// An answer of this server has told it of a grant.
    pub(crate) fn learnt(&mut self, session: &Session, token: u64) {
        session.learnt(token);
        self.knows(session.number, token);
    }

    fn knows(&mut self, by: SessionNumber, token: u64) {
        if !self.old_news.contains(&(by, token)) {
            self.old_news.push((by, token));
        }
    }

    /// The next news; waits for it.
    pub(crate) async fn next(&self) -> Notification {
        let queue = self.queue();
        loop {
            if let Some(told) = self.next_of(&queue) {
                return told;
            }
            queue.told.notified().await;
        }
    }

    /// The same if it has come already.
    pub(crate) fn next_unread(&self) -> Option<Notification> {
        self.next_of(&self.queue())
    }

    fn queue(&self) -> Arc<EventQueue> {
        let target = &self.target;
        let mut found = None;
        target.ledger.with(|state| {
            state.each_entry(&target.entries, |entry| found = entry.wait.queue().cloned());
        });
        // There is one until it is closed.
        found.unwrap_or_default()
    }

    fn next_of(&self, queue: &EventQueue) -> Option<Notification> {
        std::iter::from_fn(|| queue.next()).find(|told| !self.is_old(told))
    }

    fn is_old(&self, told: &Notification) -> bool {
        let is_known = |token| self.old_news.contains(&(told.by, token));
        self.asked.is_some_and(|asked| told.number < asked)
            || matches!(told.kind, EventKind::Granted { token } if is_known(token))
    }

    /// Listens no more. The tokens of grants that were not read, and which are to be given back;
    /// and before which time they were not granted.
    pub(crate) fn close(&mut self) -> Vec<(u64, Instant)> {
        let target = &self.target;
        let mut wait = Wait::None;
        // Grants of several locks are told under the first.
        let holds: SmallVec<[_; 1]> = target.ledger.with(|state| {
            state.each_entry(&target.entries, |entry| wait = mem::take(&mut entry.wait));
            let heard = matches!(wait, Wait::Heard(_));
            let first = state.entries(&target.entries).take(usize::from(heard));
            first.flat_map(Entry::held).collect()
        });
        let Wait::Heard(queue) = wait else {
            return Vec::new();
        };
        let unread = std::iter::from_fn(|| self.next_of(&queue));
        let granted = unread.filter_map(|told| match told.kind {
            EventKind::Granted { token } if is_unknown(&holds, token) => Some((token, told.since)),
            _ => None,
        });
        granted.collect()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::ledger::{Grant, HoldOptions, State, Usage};
    use crate::wire::{Attachment, Mode};
    use std::time::Duration;

    const OPTIONS: HoldOptions = HoldOptions {
        lease: Duration::from_secs(30),
        renewed: true,
        max_hold: None,
    };

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
        ledger.deliver(event, now, SessionNumber::new_v4(), now)
    }

    fn held(target: &Arc<Target>, token: u64) -> (Arc<Hold>, Usage) {
        let mut usage = target.claim(OPTIONS);
        let now = Instant::now();
        let grant = Grant {
            token,
            lease: usage.lease(now).keep(),
            attachment: Attachment::new(None, now, Duration::ZERO),
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
    fn what_was_granted_before_a_wait_began_is_no_news_for_it() {
        let ledger = Arc::<Ledger>::default();
        let one = target(&ledger, &["a"]);
        let session = Session::new("client".into(), Duration::ZERO);
        let told = |token| {
            let event = Event {
                name: (*b"a").into(),
                owner: b"client:1".to_vec(),
                kind: EventKind::Granted { token },
            };
            let now = Instant::now();
            ledger.deliver(event, now, session.number, now);
        };
        let next = |mailbox: &mut Mailbox| match mailbox.next_unread()?.kind {
            EventKind::Granted { token } => Some(token),
            _ => None,
        };
        let asks = |mailbox: &mut Mailbox| mailbox.asks(&session, ledger.with(State::number));
        let mut first = Mailbox::new(&one);
        asks(&mut first);
        told(7);
        assert_eq!(next(&mut first), Some(7));
        first.learnt(&session, 8);
        asks(&mut first);
        told(8);
        assert_eq!(next(&mut first), None, "it has heard of it");
        first.close();

        let mut second = Mailbox::new(&one);
        told(5);
        asks(&mut second);
        told(8);
        // The clock of another node is ahead, and a lock that has moved has a token of its.
        told(6);
        assert_eq!(next(&mut second), Some(6));
        session.told.send_replace(Instant::now());
        assert_eq!(session.untold().count(), 0, "all has been told");
        told(8);
        assert_eq!(next(&mut second), None, "though it was not read before");
    }

    #[test]
    fn a_grant_goes_to_the_wait_and_without_one_is_given_back() {
        let ledger = Arc::<Ledger>::default();
        let granted = || EventKind::Granted { token: 7 };
        let unheard = |told| matches!(told, Delivered::Orphan { .. });
        assert!(unheard(deliver(&ledger, "a", granted())));
        let both = target(&ledger, &["b", "a"]);
        let mut mailbox = Mailbox::new(&both);
        assert!(!unheard(deliver(&ledger, "b", granted())));
        let told = mailbox.next_unread().expect("it was told");
        assert!(matches!(told.kind, EventKind::Granted { token: 7 }));
        assert!(mailbox.next_unread().is_none());
        assert!(!unheard(deliver(&ledger, "b", granted())));
        let tokens: Vec<_> = mailbox.close().iter().map(|of| of.0).collect();
        assert_eq!(tokens, [7], "unread");
        assert!(unheard(deliver(&ledger, "b", granted())));
        // One that a reply has brought before.
        let _held = held(&both, 7);
        assert!(!unheard(deliver(&ledger, "b", granted())));
    }

    /// A kept lock asks with its ACQUIRE, whose answer may be heard after the event. Nobody would
    /// tell of that waiter again.
    #[test]
    fn what_is_wanted_before_its_grant_was_heard_of_is_not_kept() {
        let ledger = Arc::<Ledger>::default();
        let names = [Arc::from(*b"a")];
        let target = |owner: Owner| owner.target(&ledger, Mode::Plain, &names);
        let is_wanted = |target: Arc<Target>| {
            deliver(&ledger, "a", EventKind::Wanted);
            let (hold, _usage) = held(&target, 7);
            hold.wanted.told() > 0
        };
        assert!(is_wanted(target(Owner::new("client", 1).of_kept())));
        // It may be about a hold that has gone: who asks behind the grant is told at once.
        assert!(!is_wanted(target(Owner::new("client", 1))));
    }
}
