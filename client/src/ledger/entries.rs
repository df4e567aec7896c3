//! Who is to hear of what the servers tell: the waits and the holds of a client, by name and owner.

use std::collections::hash_map::Entry as Slot;
use std::collections::{HashMap, VecDeque};
use std::slice;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, Weak};
use std::time::Duration;

use tokio::sync::Notify;
use tokio::time::Instant;

use crate::ledger::hold::Hold;
use crate::ledger::owner::Owner;
use crate::ledger::usage::{Entry, HoldOptions, Target, Usage};
use crate::locked;
use crate::lost_reason::LostReason;
use crate::topology::Node;
use crate::wire::reply::{Event, EventKind, Released};
use crate::wire::request::{self, Command, Mode, Subject};

/// Where the owners of one client have something, at whatever node: a lock may move from one to
/// another.
#[derive(Default)]
pub(crate) struct Entries {
    known: Mutex<HashMap<EntryKey, Weak<Entry>>>,
    numbers: AtomicU64,
}

/// An owner at a lock, as events name it.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub(crate) struct EntryKey {
    pub(crate) name: Arc<[u8]>,
    pub(crate) owner: Arc<[u8]>,
}

/// The wait and the holds at one entry.
#[derive(Default)]
pub(crate) struct Listeners {
    wait: Mutex<Option<Arc<EventQueue>>>,
    /// There may be several: as a reader and as a writer, or with other locks.
    holds: Mutex<Vec<Weak<Hold>>>,
}

impl Listeners {
    fn holds(&self) -> Vec<Arc<Hold>> {
        let holds = locked(&self.holds);
        holds.iter().filter_map(Weak::upgrade).collect()
    }
}

/// What has been told to a wait and not been read.
#[derive(Default)]
struct EventQueue {
    unread: Mutex<VecDeque<Notification>>,
    arrived: Notify,
}

/// News for a wait.
pub(crate) struct Notification {
    pub(crate) kind: EventKind,
    /// It has not happened before this.
    pub(crate) since: Instant,
    /// Who told it.
    pub(crate) by: Arc<Node>,
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

/// Listens for kind of a wait, from now on. There is one wait of an owner at a lock at a time.
pub(crate) fn listen(orphans: Arc<dyn GiveBack>, usage: &Usage) -> Mailbox {
    let queue = Arc::default();
    for entry in usage.target().entries() {
        *locked(&entry.listeners.wait) = Some(Arc::clone(&queue));
    }
    Mailbox {
        orphans,
        target: Arc::clone(usage.target()),
        options: usage.options(),
        queue,
    }
}

/// Counts this hold among those of the client.
pub(crate) fn keep(hold: &Arc<Hold>) {
    for entry in hold.target().entries() {
        locked(&entry.listeners.holds).push(Arc::downgrade(hold));
    }
}

/// A hold of this has gone.
pub(crate) fn forget(target: &Target) {
    for entry in target.entries() {
        locked(&entry.listeners.holds).retain(|hold| hold.strong_count() > 0);
    }
}

/// The owner has been granted this with a new token, and had nothing of it before: what it was
/// granted earlier is over, but for a writer who now reads too. Of holds that the server tells
/// apart by their tokens it says so itself.
pub(crate) fn supersede(target: &Target, token: u64) {
    for hold in target
        .entries()
        .iter()
        .flat_map(|entry| entry.listeners.holds())
    {
        let mode = hold.target().mode();
        let beside = (mode, target.mode()) == (Mode::Write, Mode::Read);
        if !beside && !mode.has_token() && hold.token() != token {
            hold.lose(LostReason::NotHeld);
        }
    }
}

/// Whether it can only be this hold of which the server says that its owner holds it: nothing else
/// of the owner is there that is not lost, and no command is under way that may become it. A reader
/// and a writer are told apart in any case.
pub(crate) fn is_the_only_one(hold: &Arc<Hold>) -> bool {
    let (target, mode) = (hold.target(), hold.target().mode());
    let others = target
        .entries()
        .iter()
        .flat_map(|entry| entry.listeners.holds());
    let mut others = others.filter(|other| !Arc::ptr_eq(other, hold));
    target.is_at_rest()
        && others.all(|other| {
            let beside = other.target().mode() == Mode::Read && mode == Mode::Write;
            beside || other.lost().is_some()
        })
}

impl Entries {
    /// Another number each time.
    pub(crate) fn next_number(&self) -> u64 {
        self.numbers.fetch_add(1, Ordering::Relaxed)
    }

    /// What this owner has at one lock.
    pub(crate) fn entry(self: &Arc<Self>, owner: &Owner, name: &Arc<[u8]>) -> Arc<Entry> {
        let key = EntryKey {
            name: Arc::clone(name),
            owner: owner.to_bytes(),
        };
        let mut entries = locked(&self.known);
        let known = entries.entry(key);
        if let Slot::Occupied(known) = &known
            && let Some(entry) = known.get().upgrade()
        {
            return entry;
        }
        let entry = Arc::new(Entry::new(Arc::clone(self), known.key().clone()));
        known.insert_entry(Arc::downgrade(&entry));
        entry
    }

    /// The last handle of an entry has gone.
    pub(crate) fn left(&self, key: &EntryKey) {
        let mut entries = locked(&self.known);
        // Another may have taken the key since.
        if let Slot::Occupied(here) = entries.entry(key.clone())
            && here.get().strong_count() == 0
        {
            here.remove();
        }
    }

    fn at(&self, key: &EntryKey) -> Option<Arc<Entry>> {
        locked(&self.known).get(key).and_then(Weak::upgrade)
    }

    /// All that are known. They are dropped only after the lock has been: it may be for good, and
    /// that takes the lock again.
    fn entries(&self) -> Vec<Arc<Entry>> {
        let entries = locked(&self.known);
        entries.values().filter_map(Weak::upgrade).collect()
    }

    /// All holds that have guards.
    pub(crate) fn holds(&self) -> Vec<Arc<Hold>> {
        let entries = self.entries();
        let all = entries.iter().flat_map(|entry| entry.listeners.holds());
        let mut all: Vec<_> = all.collect();
        // Of several locks at once it is the same one at each.
        all.sort_unstable_by_key(Arc::as_ptr);
        all.dedup_by(|one, other| Arc::ptr_eq(one, other));
        all
    }

    /// Whether there are no holds at all.
    pub(crate) fn is_idle(&self) -> bool {
        let entries = self.entries();
        entries
            .iter()
            .all(|entry| locked(&entry.listeners.holds).is_empty())
    }

    #[cfg(test)]
    pub(crate) fn is_empty(&self) -> bool {
        locked(&self.known).is_empty()
    }

    /// Brings an event to whom it concerns.
    pub(crate) fn deliver(&self, event: Event, since: Instant, by: &Arc<Node>) -> Delivered {
        let Event { name, owner, kind } = event;
        let key = EntryKey {
            name: name.into(),
            owner: owner.into(),
        };
        let Some(entry) = self.at(&key) else {
            return orphan(&key, &[], &kind);
        };
        if let EventKind::Lost(reason) = kind {
            let mut holds = entry.listeners.holds();
            holds.retain(|hold| hold.lost().is_none());
            if !holds.is_empty() {
                return Delivered::Lost(holds, reason);
            }
        }
        let wait = locked(&entry.listeners.wait);
        let Some(queue) = &*wait else {
            drop(wait);
            return orphan(&key, &entry.listeners.holds(), &kind);
        };
        // Under the lock: a mailbox that goes away now finds the letter when it looks through
        // what was not read.
        let by = Arc::clone(by);
        locked(&queue.unread).push_back(Notification { kind, since, by });
        queue.arrived.notify_one();
        Delivered::Done
    }
}

/// News for which nobody listens. A wait is heard to its end, so it is not one of ours: what it
/// was for is not known, and a lock of another kind says so.
fn orphan(key: &EntryKey, holds: &[Arc<Hold>], kind: &EventKind) -> Delivered {
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
    orphans: Arc<dyn GiveBack>,
    target: Arc<Target>,
    options: HoldOptions,
    queue: Arc<EventQueue>,
}

impl Mailbox {
    /// Waits for kind.
    pub(crate) async fn next(&mut self) -> Notification {
        loop {
            // A letter that arrives after the look leaves a word that ends the wait at once.
            match self.here() {
                Some(told) => return told,
                None => self.queue.arrived.notified().await,
            }
        }
    }

    /// News that is here already.
    pub(crate) fn here(&mut self) -> Option<Notification> {
        locked(&self.queue.unread).pop_front()
    }
}

impl Drop for Mailbox {
    fn drop(&mut self) {
        for entry in self.target.entries() {
            *locked(&entry.listeners.wait) = None;
        }
        // Grants of several locks are told under the first.
        let target = Arc::clone(&self.target);
        let Some(entry) = target.first_entry() else {
            return;
        };
        while let Some(told) = self.here() {
            // Were the lease of a reader not to start anew, the entry that goes could be that of
            // another guard, and the others end earlier.
            let (holds, lease) = (entry.listeners.holds(), Some(self.options.lease));
            if let Some(token) = undeliverable(&holds, &told.kind)
                && let Some(orphan) = OrphanGrant::of(target.subject(), token, lease)
            {
                Arc::clone(&self.orphans).give_back(orphan);
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::flows::Context;
    use crate::ledger::hold::Grant;
    use crate::topology::Identity;
    use crate::wire::connection::Connector;
    use crate::wire::endpoint::{Certificates, Endpoint};
    use crate::wire::session::Attachment;
    use tokio::runtime::Handle;

    /// A node where nobody is.
    fn nobody() -> Arc<Node> {
        let second = Duration::from_secs(1);
        let entry = Endpoint::new("redis+unix:///nowhere", &[], &Certificates::default());
        let connector = Connector::new(entry.expect("a URL"), second);
        let identity = Identity {
            session: "client".into(),
            grace: second,
            durability: None,
        };
        Node::start(
            &Handle::current(),
            connector,
            identity,
            Weak::<Context>::new(),
            None,
        )
    }

    /// A hold of this client, with its usage.
    fn hold(
        registry: &Arc<Entries>,
        owner: &Owner,
        mode: Mode,
        names: &[&str],
    ) -> (Arc<Hold>, Usage) {
        let names: Vec<_> = names.iter().map(|n| Arc::from(n.as_bytes())).collect();
        let usage = owner.target(registry, mode, &names).usage(HoldOptions {
            lease: Duration::from_secs(30),
            renewed: true,
            max_hold: None,
        });
        let since = Instant::now();
        let grant = Grant {
            token: 7,
            lease: usage.lease().keep(),
            attachment: Attachment::new(since, Duration::ZERO),
            fresh: true,
        };
        let hold = Hold::new(&usage, grant);
        keep(&hold);
        (hold, usage)
    }

    #[tokio::test]
    async fn a_fresh_grant_says_that_earlier_ones_without_a_token_are_lost() {
        let registry = Arc::new(Entries::default());
        let (owner, other) = (Owner::new("client", 1), Owner::new("client", 2));
        let hold = |owner, mode, names: &[&str]| hold(&registry, owner, mode, names);
        let is_lost = |(hold, _): &(Arc<Hold>, Usage)| hold.lost().is_some();

        let writer = hold(&owner, Mode::Write, &["a"]);
        let reader = hold(&owner, Mode::Read, &["a"]);
        supersede(reader.1.target(), 8);
        assert!(!is_lost(&writer), "a writer may read");
        supersede(writer.1.target(), 7);
        assert!(!is_lost(&writer), "the same grant, told twice");
        supersede(writer.1.target(), 8);
        assert!(is_lost(&writer));
        assert!(!is_lost(&reader), "the server will say so");

        let both = hold(&owner, Mode::Several, &["b", "c"]);
        let next = hold(&owner, Mode::Several, &["d"]);
        let others = hold(&other, Mode::Several, &["c", "b"]);
        let one = hold(&owner, Mode::Plain, &["c"]);
        supersede(one.1.target(), 8);
        assert!(is_lost(&both) && !is_lost(&next) && !is_lost(&others));
    }

    #[tokio::test]
    async fn holds_are_counted_once_each_and_forgotten_when_they_go() {
        let registry = Arc::new(Entries::default());
        let owner = Owner::new("client", 1);
        let both = hold(&registry, &owner, Mode::Several, &["b", "c"]);
        let one = hold(&registry, &owner, Mode::Plain, &["c"]);
        assert_eq!(registry.holds().len(), 2);
        let node = nobody();
        let concerned = |name: &str| {
            let event = Event {
                name: name.into(),
                owner: owner.as_bytes().to_vec(),
                kind: EventKind::Lost(LostReason::Broken),
            };
            match registry.deliver(event, Instant::now(), &node) {
                Delivered::Lost(holds, LostReason::Broken) => holds.len(),
                _ => 0,
            }
        };
        assert_eq!(concerned("c"), 2, "which of them it was is to be asked");
        drop(one);
        assert_eq!(concerned("c"), 1);
        both.0.lose(LostReason::Broken);
        assert_eq!(concerned("b"), 0);
        drop(both);
        assert!(registry.is_idle());
    }
}
