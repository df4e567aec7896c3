//! Reads a lock's key as plain values, by the kind of lock that it has.

use crate::ffi::{KeyType, OwnedStr, Str};
use crate::reading::open_lock::{OpenLock, count_true, go_on_if};
use crate::reading::read_write::{ReadWriteHash, is_readers};
use rlock_core::{
    Count, FENCE_FIELD, Hash, HeldBy, Known, MODE_FIELD, Mode, NEVER, Now, PermitsHold,
    PermitsHolders, PermitsRequest, ReadDepth, Stored, Task, Token, is_permits_mode,
    is_value_of_lock,
};
use std::ops::ControlFlow;
use std::rc::Rc;

/// The holders of a lock, each with its count.
type Holders = Vec<(Box<[u8]>, Count)>;

impl OpenLock<'_> {
    /// The stored state, as this owner sees it.
    pub(crate) fn load(&self, owner: Str<'_>, task: &Task, now: Now) -> Stored {
        let stored = match self.key.key_type() {
            KeyType::Missing => Stored::Free,
            KeyType::Hash => self.load_hash(owner, task.depth, Some(task), now),
            _ => Stored::OtherType,
        };
        if task.may_take() && stored.may_be_without_end() && self.is_data() {
            return Stored::Data;
        }
        match stored {
            // A task about permits needs the limit also if nobody holds permits.
            Stored::Free | Stored::NoHolder if task.is_about_permits() => {
                self.load_no_permits(task.asked, now)
            }
            _ => stored,
        }
    }

    /// Whether it is a hash that can be no lock: it has no TTL, and a field with a value that no
    /// lock has.
    fn is_data(&self) -> bool {
        if self.key.key_type() != KeyType::Hash || self.key.expires_at().is_some() {
            return false;
        }
        let (mut looked_at, mut is_data) = (0_usize, false);
        self.key.each_field(|field, value| {
            looked_at = looked_at.saturating_add(1);
            is_data = field != FENCE_FIELD && field != MODE_FIELD && !is_value_of_lock(value);
            go_on_if(!is_data && looked_at < HOLDERS_MAX)
        });
        is_data
    }

    /// Without a task, all of it is read.
    fn load_hash(&self, owner: Str<'_>, look: ReadDepth, task: Option<&Task>, now: Now) -> Stored {
        let [own, fence] = self.own_and_fence(owner, task);
        let known = count_true(&[own.is_some(), fence.is_some()]);
        let others = self.key.len() > known;
        // A plain lock that only this owner holds has no other fields, and no `mode`.
        if others && let Some(mode) = self.mode() {
            if is_permits_mode(mode.as_str().bytes()) {
                let asked = task.and_then(|task| task.asked);
                let is_asked = task.is_some_and(Task::is_about_permits);
                return self.load_permits(owner, own.as_ref(), look, asked, is_asked, now);
            }
            let count = own.map(|count| Count::from_field(count.as_str().bytes()));
            let known = known.saturating_add(1);
            let hash = ReadWriteHash::new(self, &mode);
            return hash.load(owner.bytes(), count, known, look, task);
        }
        // Where fields can have a TTL of their own, expired fields are counted until the server
        // removes them. So their number does not prove that another field is alive.
        let own_fields = [FENCE_FIELD, MODE_FIELD];
        let is_one_alive =
            || !self.key.fields_may_expire() || self.key.has_field_beside(own_fields);
        if own.is_none() && !(others && is_one_alive()) {
            return Stored::NoHolder;
        }
        let own = own.map(|count| Count::from_field(count.as_str().bytes()));
        let needs_end = task.is_none_or(|task| task.needs_end(own, others));
        let needs_token = task.is_none_or(|task| task.needs_token(own));
        Stored::Plain(Hash {
            own,
            token: Known::read_if(needs_token, || {
                fence.and_then(|fence| Token::from_field(fence.as_str().bytes()))
            }),
            others,
            ends_at: Known::read_if(needs_end, || self.key.expires_at()),
        })
    }

    /// The owner's field, and the field of the token where it counts: not for a newcomer without a
    /// field of its own, unless the token may be the hash's only field.
    fn own_and_fence(&self, owner: Str<'_>, task: Option<&Task>) -> [Option<OwnedStr>; 2] {
        let fence = self.words.fence.as_str();
        if !task.is_some_and(Task::is_newcomers) {
            return self.key.hash_get(owner, Some(fence));
        }
        let own = self.key.hash_get_one(owner);
        let counts = own.is_some() || self.key.len() == 1;
        [own, counts.then(|| self.key.hash_get_one(fence)).flatten()]
    }

    /// The stored state for a queue whose first waiter waits for permits, and the other holders.
    pub(crate) fn load_for_queue(
        &self,
        owner: Str<'_>,
        task: &Task,
        now: Now,
    ) -> (Stored, PermitsHolders) {
        if !self.is_of_permits() {
            return (self.load(owner, task, now), PermitsHolders::default());
        }
        self.load_permits_for_queue(owner, task, now)
    }

    /// The stored state, for any holder: a plain lock as its holder sees it, with the holder's
    /// name; a read-write lock, or permits, as an owner without a hold sees them.
    pub(crate) fn load_for_holder(&self, now: Now) -> (Stored, Option<Box<[u8]>>) {
        let holder = match self.key.key_type() {
            KeyType::Missing => return (Stored::Free, None),
            KeyType::Hash => self.holder(),
            _ => return (Stored::OtherType, None),
        };
        let Some(holder) = holder else {
            return (Stored::NoHolder, None);
        };
        if let Some(mode) = self.mode() {
            let depth = if is_permits_mode(mode.as_str().bytes()) {
                ReadDepth::Whole
            } else {
                ReadDepth::Brief
            };
            // No owner has the name of the lock's own field.
            let stranger = Rc::clone(&self.words);
            return (
                self.load_hash(stranger.fence.as_str(), depth, None, now),
                None,
            );
        }
        let owner = OwnedStr::new(&holder);
        let stored = self.load_hash(owner.as_str(), ReadDepth::Brief, None, now);
        (stored, Some(holder))
    }

    /// The stored state, and its holders: the owner of a plain lock, the fields of a read-write
    /// lock's readers, or the holders of permits.
    pub(crate) fn load_with_holders(&self, now: Now) -> (Stored, Holders) {
        let (stored, owner) = self.load_for_holder(now);
        if stored.may_be_without_end() && self.is_data() {
            return (Stored::Data, Vec::new());
        }
        let holders = match stored {
            Stored::Plain(hash) => owner.zip(hash.own).into_iter().collect(),
            Stored::ReadWrite(_) => self.reader_fields(),
            Stored::Permits(_) => self.permits_holders(now),
            _ => Vec::new(),
        };
        (stored, holders)
    }

    /// The holders of permits, with the number that each has.
    fn permits_holders(&self, now: Now) -> Holders {
        let fields = self.permits_fields(now).into_iter();
        let count = |hold: PermitsHold| Count::Valid(hold.permits.get());
        let holders = fields.filter_map(|(owner, hold)| Some((owner, count(hold?))));
        holders.collect()
    }

    /// One holder of the lock, a writer before readers.
    pub(crate) fn first_holder(&self, now: Now) -> Option<HeldBy> {
        match self.load_for_holder(now) {
            (Stored::Plain(hash), owner) => Some(HeldBy {
                owner: owner?,
                mode: Mode::Plain,
                token: hash.token(),
                ends_at: hash.ends_at().unwrap_or(NEVER),
            }),
            (Stored::ReadWrite(_), _) => {
                let hold = ReadWriteHash::new(self, &self.mode()?).first_hold()?;
                Some(hold.held_by)
            }
            (Stored::Permits(_), _) => self.first_permits_holder(now),
            _ => None,
        }
    }

    /// The state of permits for this request, by an owner that holds none.
    fn load_asked(&self, asked: PermitsRequest, now: Now) -> Stored {
        let loaded = if self.is_of_permits() {
            let nobody = self.words.mode.as_str();
            self.load_permits(nobody, None, ReadDepth::Whole, Some(asked), true, now)
        } else {
            self.load_for_holder(now).0
        };
        if loaded.is_free() {
            return self.load_no_permits(Some(asked), now);
        }
        loaded
    }

    /// The rest of the present lease, as in [`Stored::ttl_ms`]; for permits, the time until the
    /// requested ones can be granted.
    pub(crate) fn ttl_ms(&self, asked: Option<PermitsRequest>, now: Now) -> i64 {
        self.read(|lock| match asked {
            Some(asked) => lock.load_asked(asked, now).ttl_ms(now),
            None => lock.load_for_holder(now).0.ttl_ms(now),
        })
    }

    /// The first live owner's field in a hash.
    fn holder(&self) -> Option<Box<[u8]>> {
        self.owners(1).pop()
    }

    /// The live owners of the lock. A plain lock has one, unless another program wrote more into
    /// its hash.
    pub(crate) fn holders(&self) -> Vec<Box<[u8]>> {
        if self.key.key_type() != KeyType::Hash {
            return Vec::new();
        }
        match self.mode() {
            None => self.owners(HOLDERS_MAX),
            // No holder in particular must give permits back, so a deadlock search can follow none.
            Some(mode) if is_permits_mode(mode.as_str().bytes()) => Vec::new(),
            Some(mode) => {
                let holds = ReadWriteHash::new(self, &mode).holds(false);
                holds.into_iter().map(|hold| hold.held_by.owner).collect()
            }
        }
    }

    /// The fields of a read-write lock's readers, with their counts.
    pub(crate) fn reader_fields(&self) -> Holders {
        let mut readers = Vec::new();
        self.key.each_field(|field, value| {
            if is_readers(field) {
                readers.push((field.into(), Count::from_field(value)));
            }
            ControlFlow::Continue(())
        });
        readers
    }

    fn owners(&self, max: usize) -> Vec<Box<[u8]>> {
        let mut owners = Vec::new();
        self.key.each_field(|field, _| {
            if field != FENCE_FIELD && field != MODE_FIELD {
                owners.push(field.into());
            }
            go_on_if(owners.len() < max)
        });
        owners
    }
}

/// In a hash with more owners than this, which we never write, the others are not looked at.
const HOLDERS_MAX: usize = 1000;
