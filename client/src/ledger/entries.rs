//! What is known of each owner at each lock.

use std::collections::HashMap;
use std::hash::{BuildHasher, BuildHasherDefault, Hash, Hasher, RandomState};
use std::sync::{Arc, LazyLock, Mutex, Weak};

use slab::Slab;
use smallvec::SmallVec;
use tokio::time::Instant;

use crate::ledger::{Hold, HoldOptions, Owner, Permit, Wait};
use crate::wire::Mode;
use crate::{Lease, LostReason, locked};

/// What the owners of one client have, at whatever node: a lock may move from one to another.
#[derive(Default)]
pub(crate) struct Ledger {
    state: Mutex<State>,
    /// See [`Target::turn`](crate::ledger::Target::turn).
    pub(super) turn: Mutex<()>,
}

/// All of it.
#[derive(Default)]
pub(super) struct State {
    ids: HashMap<EntryKey, EntryId, BuildHasherDefault<Hashed>>,
    entries: Slab<Entry>,
    /// So many things have been numbered.
    numbers: u64,
}

/// An owner at a lock, as events name it. Hashed once: most come, are found once more, and go.
#[derive(Clone, Default, PartialEq, Eq)]
pub(super) struct EntryKey {
    hash: u64,
    pub(super) name: Arc<[u8]>,
    pub(super) owner: Arc<[u8]>,
}

impl EntryKey {
    pub(super) fn new(name: Arc<[u8]>, owner: Arc<[u8]>) -> Self {
        static STATE: LazyLock<RandomState> = LazyLock::new(RandomState::new);
        let mut hasher = STATE.build_hasher();
        // Both in as few pieces as can be: each costs more than its bytes.
        hasher.write(&name);
        hasher.write(&owner);
        hasher.write_usize(name.len());
        let hash = hasher.finish();
        Self { hash, name, owner }
    }
}

impl Hash for EntryKey {
    fn hash<H: Hasher>(&self, hasher: &mut H) {
        hasher.write_u64(self.hash);
    }
}

/// What an [`EntryKey`] was hashed to when it was made.
#[derive(Default)]
struct Hashed(u64);

impl Hasher for Hashed {
    fn write_u64(&mut self, hash: u64) {
        self.0 = hash;
    }

    fn write(&mut self, _: &[u8]) {}

    fn finish(&self) -> u64 {
        self.0
    }
}

/// Names an entry as long as some target has it.
pub(super) type EntryId = usize;

/// One owner at one lock.
#[derive(Default)]
pub(super) struct Entry {
    key: EntryKey,
    targets: usize,
    /// An owner stands in a lock's queue once at a time, in whatever mode. CANCEL and events name
    /// the owner, not the wait: with two waits in the queue, undoing one would take out the other.
    /// Most owners take one lock once, and none of them needs it.
    pub(super) permit: Option<Permit>,
    /// The wait that is to hear of what the server tells.
    pub(super) wait: Wait,
    /// There may be several: as a reader and as a writer, or with other locks. Those that have gone
    /// stay until another comes.
    holds: SmallVec<[Weak<Hold>; 1]>,
    /// The last loss that was told, and its number.
    pub(super) lost: Option<(u64, LostReason)>,
    /// How often it was told that the lock is wanted, and no hold was there.
    pub(super) wanted: u64,
    plain: Side,
    /// In a box, for most have none of it and are made and gone with each lock.
    others: Option<Box<Others>>,
}

/// What an owner has at a lock in other modes than as a plain one.
#[derive(Default)]
struct Others {
    read: Side,
    write: Side,
    permits: Side,
}

/// What an owner has at a lock in one mode. It may read and write at once. Several locks at once
/// are plain ones, each of them held as if it had been taken alone.
#[derive(Default)]
pub(super) struct Side {
    pub(super) usages: usize,
    /// As many of them are guards'; the others are those of commands under way.
    pub(super) guards: usize,
    /// As many of these may share a hold: those of several locks do not.
    pub(super) sharing: usize,
    /// Those of all that share it, as the first of them has settled them.
    pub(super) options: Option<HoldOptions>,
    /// Until when somebody was promised the lock.
    pub(super) promised: Option<Instant>,
    /// The number of the last command that asked for a lease.
    pub(super) asked: u64,
    /// The ends of the leases that commands under way ask for, by the commands' numbers.
    pub(super) reserved: SmallVec<[(u64, Instant); 1]>,
    /// How often the server has a writer's, by its last word; and whether that was ever another
    /// number than it should be, as when some have been lost.
    pub(super) count: u64,
    pub(super) is_miscounted: bool,
    /// The token of the grant to a writer that was heard of last, which may be yet to be entered.
    pub(super) last_token: u64,
    /// That of a grant which was counted ahead of the event that is to tell of it.
    pub(super) counted_ahead: u64,
    /// Whether the server may have more there than there are usages, until there are none.
    pub(super) has_more: bool,
    /// Until when the server may have what nobody here has any more.
    pub(super) left_until: Option<Instant>,
    /// As many RELEASE commands that name no token may be carried out at any time.
    pub(super) unnamed_releases: usize,
    /// The number of the last that no longer may: it took nothing that was asked for after it.
    pub(super) unnamed_release: u64,
}

impl Ledger {
    /// Does something with all of it. No hold may be dropped inside: that takes the lock again.
    pub(super) fn with<T>(&self, work: impl FnOnce(&mut State) -> T) -> T {
        work(&mut locked(&self.state))
    }

    /// All holds that have guards, a few at a time: to look at a hundred thousand takes long, and
    /// in between the ledger's lock is free, and other tasks may run.
    pub(crate) fn holds(&self) -> impl Iterator<Item = Vec<Arc<Hold>>> {
        (0..).step_by(HOLDS_AT_ONCE).map_while(|from: EntryId| {
            let ids = from..from.saturating_add(HOLDS_AT_ONCE);
            let held: Vec<_> = self.with(|state| {
                let entries = ids.filter_map(|id| state.entries.get(id).zip(Some(id)));
                let held = entries.flat_map(|(entry, id)| entry.held().map(move |hold| (id, hold)));
                (from < state.entries.capacity()).then(|| held.collect())
            })?;
            // Of several locks at once it is the same one at each.
            let is_first =
                |(id, hold): &(EntryId, Arc<Hold>)| hold.target.entries.first() == Some(id);
            Some(
                held.into_iter()
                    .filter(is_first)
                    .map(|(_, hold)| hold)
                    .collect(),
            )
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
        let key = EntryKey::new(Arc::clone(name), Arc::clone(&owner.name).into());
        let entries = &mut self.entries;
        let id = *self.ids.entry(key).or_insert_with_key(|key| {
            let key = key.clone();
            entries.insert(Entry {
                key,
                ..Entry::default()
            })
        });
        let enter = |entry: &mut Entry| entry.targets = entry.targets.saturating_add(1);
        self.each_entry(&[id], enter);
        id
    }

    /// A target has gone.
    pub(super) fn leave(&mut self, ids: &[EntryId]) {
        self.each_entry(ids, |entry| entry.targets = entry.targets.saturating_sub(1));
        for id in ids {
            if self
                .entries
                .get(*id)
                .is_some_and(|entry| entry.targets == 0)
            {
                let entry = self.entries.remove(*id);
                self.ids.remove(&entry.key);
            }
        }
    }

    pub(super) fn find(&mut self, key: &EntryKey) -> Option<&mut Entry> {
        let id = self.ids.get(key)?;
        self.entries.get_mut(*id)
    }

    pub(super) fn entries<'a>(&'a self, ids: &'a [EntryId]) -> impl Iterator<Item = &'a Entry> {
        ids.iter().filter_map(|id| self.entries.get(*id))
    }

    pub(super) fn each_entry(&mut self, ids: &[EntryId], mut work: impl FnMut(&mut Entry)) {
        for id in ids {
            self.entries.get_mut(*id).map(&mut work);
        }
    }
}

impl Entry {
    pub(super) fn side(&self, mode: Mode) -> &Side {
        static NONE: LazyLock<Others> = LazyLock::new(Others::default);
        let others = || self.others.as_deref().unwrap_or(&NONE);
        match mode {
            Mode::Plain | Mode::Several => &self.plain,
            Mode::Read => &others().read,
            Mode::Write => &others().write,
            Mode::Permits { .. } => &others().permits,
        }
    }

    pub(super) fn side_mut(&mut self, mode: Mode) -> &mut Side {
        match mode {
            Mode::Plain | Mode::Several => &mut self.plain,
            Mode::Read => &mut self.others.get_or_insert_default().read,
            Mode::Write => &mut self.others.get_or_insert_default().write,
            Mode::Permits { .. } => &mut self.others.get_or_insert_default().permits,
        }
    }

    /// One more is held there.
    pub(super) fn add(&mut self, hold: &Arc<Hold>) {
        self.holds.retain(|hold| hold.strong_count() > 0);
        self.holds.push(Arc::downgrade(hold));
    }

    /// What is held there.
    pub(super) fn held(&self) -> impl Iterator<Item = Arc<Hold>> {
        self.holds.iter().filter_map(Weak::upgrade)
    }
}

impl Side {
    /// The server has said yes to this lease, and somebody is going to count on it.
    pub(super) fn promise(&mut self, lease: Lease) {
        // Once all has been given back nobody does.
        if self.usages > 0 {
            self.promised = self.promised.max(Some(lease.ends()));
        }
    }

    /// See [`Target::counted`](crate::ledger::Target::counted).
    pub(super) fn counted(&mut self, count: u64, token: u64, is_waiting: bool) -> bool {
        if count == 1 && token == self.counted_ahead {
            return false;
        }
        let mut entries = self.count.saturating_add(1);
        if is_waiting && self.count == 0 && count == 2 {
            (entries, self.counted_ahead) = (2, token);
        }
        let is_first = self.count == 0;
        self.is_miscounted |= entries != count;
        self.count = count;
        // The event of an earlier grant may come late.
        self.last_token = self.last_token.max(token);
        !is_first && !self.is_miscounted
    }

    /// A guard gives back what it has. Whoever asks from now on does so behind that, and for a
    /// lease of its own once no other guard is left with which it could share a hold.
    pub(super) fn lose_guard(&mut self, mode: Mode) {
        self.guards = self.guards.saturating_sub(1);
        if mode != Mode::Several {
            self.sharing = self.sharing.saturating_sub(1);
        }
        if self.sharing == 0 {
            self.options = None;
        }
    }
}

/// So many entries are looked at in one step.
pub(super) const HOLDS_AT_ONCE: usize = 512;
