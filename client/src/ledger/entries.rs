//! What is known of each owner at each lock.

use std::collections::HashMap;
use std::sync::{Arc, Mutex, Weak};

use slab::Slab;
use tokio::time::Instant;

use crate::ledger::events::EventQueue;
use crate::ledger::hold::Hold;
use crate::ledger::owner::Owner;
use crate::ledger::usage::{HoldOptions, Permit};
use crate::locked;
use crate::lost_reason::LostReason;
use crate::time::Lease;
use crate::wire::request::Mode;

/// What the owners of one client have, at whatever node: a lock may move from one to another.
#[derive(Default)]
pub(crate) struct Ledger(Mutex<State>);

/// All of it.
#[derive(Default)]
pub(super) struct State {
    ids: HashMap<EntryKey, EntryId>,
    entries: Slab<Entry>,
    /// So many things have been numbered.
    numbers: u64,
}

/// An owner at a lock, as events name it.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub(super) struct EntryKey {
    pub(super) name: Arc<[u8]>,
    pub(super) owner: Arc<[u8]>,
}

/// Names an entry as long as some target has it.
pub(super) type EntryId = usize;

/// One owner at one lock.
pub(super) struct Entry {
    key: EntryKey,
    targets: usize,
    /// An owner stands in a lock's queue once at a time, in whatever mode. CANCEL and events name
    /// the owner, not the wait: with two waits in the queue, undoing one would take out the other.
    pub(super) permit: Permit,
    /// The wait that is to hear of what the server tells.
    pub(super) wait: Option<EventQueue>,
    /// There may be several: as a reader and as a writer, or with other locks.
    pub(super) holds: Vec<Weak<Hold>>,
    /// The last loss that was told, and its number.
    pub(super) lost: Option<(u64, LostReason)>,
    plain: Side,
    read: Side,
    write: Side,
}

/// What an owner has at a lock in one mode. It may read and write at once. Several locks at once
/// are plain ones, each of them held as if it had been taken alone.
#[derive(Default)]
pub(super) struct Side {
    pub(super) usages: usize,
    /// As many of them are guards'; the others are those of commands under way.
    pub(super) guards: usize,
    /// As many are guards', or were and are being given back. They have settled the options.
    pub(super) settled: usize,
    pub(super) options: Option<HoldOptions>,
    /// Until when somebody was promised the lock.
    promised: Option<Instant>,
    reservations: Reservations,
    /// As many RELEASE commands that name no token are under way.
    unnamed_releases: usize,
    /// The number of the last of them that has ended.
    unnamed_release_ended: u64,
    /// The hold that its guards share.
    pub(super) hold: Weak<Hold>,
}

impl Ledger {
    /// Does something with all of it. No hold may be dropped inside: that takes the lock again.
    pub(super) fn with<T>(&self, work: impl FnOnce(&mut State) -> T) -> T {
        work(&mut locked(&self.0))
    }

    /// All holds that have guards.
    pub(crate) fn holds(&self) -> Vec<Arc<Hold>> {
        let mut all = self.with(|state| {
            let held = state.entries.iter().flat_map(|(_, entry)| &entry.holds);
            held.filter_map(Weak::upgrade).collect::<Vec<_>>()
        });
        // Of several locks at once it is the same one at each.
        all.sort_unstable_by_key(Arc::as_ptr);
        all.dedup_by(|one, other| Arc::ptr_eq(one, other));
        all
    }

    /// Whether there are no holds at all.
    pub(crate) fn is_idle(&self) -> bool {
        self.with(|state| {
            let mut entries = state.entries.iter();
            entries.all(|(_, entry)| entry.holds.is_empty())
        })
    }

    /// Whether nobody has anything anywhere.
    #[cfg(test)]
    pub(super) fn is_empty(&self) -> bool {
        self.with(|state| state.ids.is_empty() && state.entries.is_empty())
    }
}

impl State {
    /// The next number: larger than any before.
    pub(super) fn number(&mut self) -> u64 {
        self.numbers = self.numbers.saturating_add(1);
        self.numbers
    }

    /// Another target has this owner at this lock.
    pub(super) fn enter(&mut self, owner: &Owner, name: &Arc<[u8]>) -> EntryId {
        let key = EntryKey {
            name: Arc::clone(name),
            owner: owner.to_bytes(),
        };
        let entries = &mut self.entries;
        let id = *self
            .ids
            .entry(key)
            .or_insert_with_key(|key| entries.insert(Entry::new(key.clone())));
        if let Some(entry) = self.entries.get_mut(id) {
            entry.targets = entry.targets.saturating_add(1);
        }
        id
    }

    /// A target has gone.
    pub(super) fn leave(&mut self, ids: &[EntryId]) {
        for id in ids {
            let Some(entry) = self.entries.get_mut(*id) else {
                continue;
            };
            entry.targets = entry.targets.saturating_sub(1);
            if entry.targets == 0 {
                let entry = self.entries.remove(*id);
                self.ids.remove(&entry.key);
            }
        }
    }

    pub(super) fn find(&mut self, key: &EntryKey) -> Option<&mut Entry> {
        let id = self.ids.get(key)?;
        self.entries.get_mut(*id)
    }

    pub(super) fn get(&self, id: EntryId) -> Option<&Entry> {
        self.entries.get(id)
    }

    pub(super) fn entries<'a>(&'a self, ids: &'a [EntryId]) -> impl Iterator<Item = &'a Entry> {
        ids.iter().filter_map(|id| self.entries.get(*id))
    }

    pub(super) fn sides<'a>(
        &'a self,
        ids: &'a [EntryId],
        mode: Mode,
    ) -> impl Iterator<Item = &'a Side> {
        self.entries(ids).map(move |entry| entry.side(mode))
    }

    pub(super) fn each_entry(&mut self, ids: &[EntryId], mut work: impl FnMut(&mut Entry)) {
        for id in ids {
            self.entries.get_mut(*id).map(&mut work);
        }
    }

    pub(super) fn each_side(
        &mut self,
        ids: &[EntryId],
        mode: Mode,
        mut work: impl FnMut(&mut Side),
    ) {
        self.each_entry(ids, |entry| work(entry.side_mut(mode)));
    }
}

impl Entry {
    fn new(key: EntryKey) -> Self {
        Self {
            key,
            targets: 0,
            permit: Permit::default(),
            wait: None,
            holds: Vec::new(),
            lost: None,
            plain: Side::default(),
            read: Side::default(),
            write: Side::default(),
        }
    }

    pub(super) fn side(&self, mode: Mode) -> &Side {
        match mode {
            Mode::Plain | Mode::Several => &self.plain,
            Mode::Read => &self.read,
            Mode::Write => &self.write,
        }
    }

    pub(super) fn side_mut(&mut self, mode: Mode) -> &mut Side {
        match mode {
            Mode::Plain | Mode::Several => &mut self.plain,
            Mode::Read => &mut self.read,
            Mode::Write => &mut self.write,
        }
    }

    /// What is held there.
    pub(super) fn held(&self) -> impl Iterator<Item = Arc<Hold>> {
        self.holds.iter().filter_map(Weak::upgrade)
    }
}

impl Side {
    /// No lease that is asked for now may end before this.
    pub(super) fn promised(&self) -> Option<Instant> {
        self.promised.max(self.reservations.latest())
    }

    /// The server has said yes to this lease, and somebody is going to count on it.
    pub(super) fn promise(&mut self, lease: Lease) {
        // Once all has been given back nobody does.
        if self.usages > 0 {
            self.promised = self.promised.max(Some(lease.ends()));
        }
    }

    pub(super) fn reserve(&mut self, number: u64, until: Instant) {
        self.reservations.add(number, until);
    }

    pub(super) fn unreserve(&mut self, number: u64) {
        self.reservations.remove(number);
    }

    pub(super) fn unnamed_release_begins(&mut self) {
        self.unnamed_releases = self.unnamed_releases.saturating_add(1);
    }

    pub(super) fn unnamed_release_ends(&mut self, number: u64) {
        self.unnamed_releases = self.unnamed_releases.saturating_sub(1);
        self.unnamed_release_ended = number;
    }

    /// Whether a RELEASE that names no token was under way at any time since this number.
    pub(super) fn may_have_been_released(&self, since: u64) -> bool {
        self.unnamed_releases > 0 || self.unnamed_release_ended > since
    }

    /// The last usage has gone.
    pub(super) fn forget(&mut self) {
        self.promised = None;
        self.reservations = Reservations::default();
    }
}

/// The ends of the leases that commands under way ask for, by the commands' numbers. Nearly always
/// there is one, for which nothing is allocated.
#[derive(Default)]
struct Reservations {
    one: Option<(u64, Instant)>,
    others: Vec<(u64, Instant)>,
}

impl Reservations {
    fn add(&mut self, number: u64, until: Instant) {
        if self.one.is_none() {
            self.one = Some((number, until));
        } else {
            self.others.push((number, until));
        }
    }

    fn remove(&mut self, number: u64) {
        self.one.take_if(|(one, _)| *one == number);
        self.others.retain(|(one, _)| *one != number);
    }

    fn latest(&self) -> Option<Instant> {
        let all = self.one.iter().chain(&self.others);
        all.map(|(_, until)| *until).max()
    }
}
