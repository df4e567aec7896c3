//! A lock's key: opening it, and reading what is stored there as plain values.

use crate::ffi::{self, Ctx, Key, KeyType, OwnedStr, Scan, Str};
use crate::memory::state::{self, Words};
use crate::reading::permits::Question;
use crate::reading::read_write::ReadWriteHash;
use rlock_core::{
    Count, FENCE_FIELD, Hash, HeldBy, MODE_FIELD, Mode, NEVER, Now, PermitsHold, PermitsRequest,
    ReadDepth, Stored, Task, Token, WRITER_SUFFIX, is_permits_mode,
};
use std::cell::Cell;
use std::ops::ControlFlow;
use std::rc::Rc;

/// A lock whose key is open.
pub(crate) struct OpenLock<'a> {
    pub(crate) ctx: Ctx<'a>,
    pub(crate) name: Str<'a>,
    pub(crate) key: Key<'a>,
    /// How many keys had expired when it was opened.
    expired: Cell<u64>,
    pub(crate) words: Rc<Words>,
    /// Whether the key was written since it was opened.
    pub(crate) is_written: bool,
    /// Whether the last event told of the key is that it is gone.
    pub(crate) is_deleted: bool,
}

/// Who holds a lock, with the count of each.
type Holders = Vec<(Box<[u8]>, Count)>;

/// What a key is opened for.
#[derive(Clone, Copy)]
pub(crate) enum Access {
    Read,
    Write,
}

impl<'a> OpenLock<'a> {
    pub(crate) fn open(ctx: Ctx<'a>, name: Str<'a>, access: Access) -> Self {
        let (key, expired) = open_as_it_is(ctx, name, access);
        Self {
            ctx,
            name,
            key,
            expired: Cell::new(expired),
            words: state::with(|state| Rc::clone(&state.words)),
            is_written: false,
            is_deleted: false,
        }
    }

    /// Reads it. To look at a timeout key may delete it because it has expired, and whoever has
    /// heard of that may have written this key: then what was read is out of date, and it is read
    /// again.
    pub(crate) fn read<R>(&self, read: impl Fn(&Self) -> R) -> R {
        let mut found = read(self);
        for _ in 0..READ_ANEW_MAX {
            if self.is_up_to_date() {
                break;
            }
            self.expired.set(ffi::keys_expired());
            self.key.set_aside();
            found = read(self);
        }
        found
    }

    /// Whether no key has expired since it was opened. Then it is open.
    pub(crate) fn is_up_to_date(&self) -> bool {
        // It may expire by being opened again, too.
        self.key.take_up();
        self.expired.get() == ffi::keys_expired()
    }

    /// What is stored, as this owner sees it.
    pub(crate) fn load(&self, owner: Str<'_>, task: &Task, now: Now) -> Stored {
        if task.is_about_permits() {
            return self.load_if_none(owner, task, now);
        }
        match self.key.key_type() {
            KeyType::Missing => Stored::Free,
            KeyType::Hash => self.load_hash(owner, task.depth, Some(task), now),
            _ => Stored::OtherType,
        }
    }

    /// The same, for who asks for permits: also where there are none out.
    fn load_if_none(&self, owner: Str<'_>, task: &Task, now: Now) -> Stored {
        let stored = match self.key.key_type() {
            KeyType::Missing => Stored::Free,
            KeyType::Hash => self.load_hash(owner, task.depth, Some(task), now),
            _ => Stored::OtherType,
        };
        match stored {
            Stored::Free | Stored::NoHolder => self.load_no_permits(task.into(), now),
            _ => stored,
        }
    }

    /// Without a task, all of it.
    fn load_hash(&self, owner: Str<'_>, look: ReadDepth, task: Option<&Task>, now: Now) -> Stored {
        let [own, fence] = self.own_and_fence(owner, task);
        let known = count_true(&[own.is_some(), fence.is_some()]);
        let others = self.key.len() > known;
        // Of a plain lock that is held by this owner, that is all there is.
        if others && let Some(mode) = self.mode() {
            if is_permits_mode(mode.as_str().bytes()) {
                let question = task.map_or_else(Question::default, Question::from);
                return self.load_permits(owner, own.as_ref(), look, question, now);
            }
            let count = own.map(|count| Count::from_field(count.as_str().bytes()));
            let known = known.saturating_add(1);
            let hash = ReadWriteHash::new(self, &mode);
            let others = self.key.len() > known;
            let hash = match task {
                Some(task) if !task.needs_readers_ends(count, others) => hash.without_ends(),
                _ => hash,
            };
            return hash.load(owner.bytes(), count, known, look);
        }
        // Where fields can have a TTL of their own, they are counted after it until the server
        // removes them: that there are others is no proof that one of them is alive.
        let is_one_alive = || !Key::fields_may_expire() || self.holder().is_some();
        if own.is_none() && !(others && is_one_alive()) {
            return Stored::NoHolder;
        }
        let own = own.map(|count| Count::from_field(count.as_str().bytes()));
        let needs_end = task.is_none_or(|task| task.needs_end(own, others));
        let needs_token = task.is_none_or(|task| task.needs_token(own));
        Stored::Plain(Hash {
            own,
            token: fence
                .filter(|_| needs_token)
                .and_then(|fence| Token::from_field(fence.as_str().bytes())),
            others,
            ends_at: needs_end.then(|| self.key.expires_at()).flatten(),
        })
    }

    /// The owner's field, and that of the token where it counts: not for somebody who has no part
    /// in the lock, unless it may be the hash's only field.
    fn own_and_fence(&self, owner: Str<'_>, task: Option<&Task>) -> [Option<OwnedStr>; 2] {
        let fence = self.words.fence.as_str();
        if !task.is_some_and(Task::is_newcomers) {
            return self.key.hash_get([owner, fence]);
        }
        let own = self.key.hash_get_one(owner);
        let counts = own.is_some() || self.key.len() == 1;
        [own, counts.then(|| self.key.hash_get_one(fence)).flatten()]
    }

    /// What is stored, whoever has it: a plain lock as its holder sees it, with who that is; a
    /// read-write lock, or permits, as somebody sees it who has no part in it.
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
            // No owner is called like the lock's own field.
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

    /// What is stored, and who has it: the owner of a plain lock, the fields of a read-write lock's
    /// readers, or those who hold permits. If there is one of them, what is stored is read for it,
    /// with its token.
    pub(crate) fn load_with_holders(&self, now: Now) -> (Stored, Holders) {
        let (stored, owner) = self.load_for_holder(now);
        let (holders, depth) = match stored {
            Stored::Plain(hash) => return (stored, owner.zip(hash.own).into_iter().collect()),
            Stored::ReadWrite(_) => (self.reader_fields(), ReadDepth::Brief),
            Stored::Permits(_) => (self.permits_holders(now), ReadDepth::Whole),
            _ => return (stored, Vec::new()),
        };
        let [(sole, _)] = &holders[..] else {
            return (stored, holders);
        };
        let sole = OwnedStr::new(sole);
        (self.load_hash(sole.as_str(), depth, None, now), holders)
    }

    /// Who holds permits, and how many each.
    fn permits_holders(&self, now: Now) -> Holders {
        let fields = self.permits_fields(now).into_iter();
        let count = |hold: PermitsHold| Count::Valid(hold.permits.get());
        let holders = fields.filter_map(|(owner, hold)| Some((owner, count(hold?))));
        holders.collect()
    }

    /// Who has it; of several one, a writer before readers.
    pub(crate) fn first_holder(&self, now: Now) -> Option<HeldBy> {
        match self.load_for_holder(now) {
            (Stored::Plain(hash), owner) => Some(HeldBy {
                owner: owner?,
                mode: Mode::Plain,
                token: hash.token,
                ends_at: hash.ends_at.unwrap_or(NEVER),
            }),
            (Stored::ReadWrite(_), _) => {
                let hold = ReadWriteHash::new(self, &self.mode()?).first_hold()?;
                Some(HeldBy {
                    owner: hold.owner,
                    mode: hold.mode,
                    token: hold.token,
                    ends_at: hold.ends_at,
                })
            }
            (Stored::Permits(_), _) => self.first_permits_holder(now),
            _ => None,
        }
    }

    /// What is left of the present lease, as in [`Stored::ttl_ms`]; of permits, until those can be
    /// had that are asked for.
    pub(crate) fn ttl_ms(&self, asked: Option<PermitsRequest>, now: Now) -> i64 {
        self.read(|lock| match asked {
            Some(asked) => lock.load_asked(asked, now).ttl_ms(now),
            None => lock.load_for_holder(now).0.ttl_ms(now),
        })
    }

    /// The `mode` field, which a read-write lock has, and permits.
    pub(crate) fn mode(&self) -> Option<OwnedStr> {
        self.key.hash_get_one(self.words.mode.as_str())
    }

    /// The first live owner's field in a hash.
    fn holder(&self) -> Option<Box<[u8]>> {
        self.owners(1).pop()
    }

    /// The live owners of the lock. Of a plain one there is one, unless somebody else wrote more
    /// into its hash.
    pub(crate) fn holders(&self) -> Vec<Box<[u8]>> {
        if self.key.key_type() != KeyType::Hash {
            return Vec::new();
        }
        match self.mode() {
            None => self.owners(HOLDERS_MAX),
            // Who of them must give permits back, nobody can say.
            Some(mode) if is_permits_mode(mode.as_str().bytes()) => Vec::new(),
            Some(mode) => {
                let holds = ReadWriteHash::new(self, &mode).holds(false);
                holds.into_iter().map(|hold| hold.owner).collect()
            }
        }
    }

    /// Of a read-write lock, the fields of some of its readers whose leases are over, and of
    /// permits those of some holders, from where an earlier walk has stopped. Whether there are
    /// more fields.
    pub(crate) fn readers_gone(&self, scan: &Scan, now: Now, gone: &mut Vec<Box<[u8]>>) -> bool {
        if self.is_of_permits() {
            return self.holders_over(scan, now, gone);
        }
        let mode = self.mode();
        mode.is_some_and(|mode| ReadWriteHash::new(self, &mode).readers_gone(scan, gone))
    }

    /// Of these fields of readers or holders, those that are there and whose leases are over.
    pub(crate) fn still_gone(&self, fields: &[Box<[u8]>], now: Now) -> Vec<Box<[u8]>> {
        if self.is_of_permits() {
            let over = fields.iter();
            let over = over.filter(|field| self.is_holder_over(field, now));
            return over.cloned().collect();
        }
        let Some(mode) = self.mode() else {
            return Vec::new();
        };
        let hash = ReadWriteHash::new(self, &mode);
        let gone = fields.iter().filter(|field| {
            let value = self.key.hash_get_one(OwnedStr::new(field).as_str());
            value.is_some_and(|value| hash.is_gone(field, value.as_str().bytes()))
        });
        gone.cloned().collect()
    }

    /// Of a read-write lock, the fields of its readers with their counts.
    pub(crate) fn reader_fields(&self) -> Holders {
        let mut readers = Vec::new();
        self.key.each_field(|field, value| {
            let is_reader =
                field != FENCE_FIELD && field != MODE_FIELD && !field.ends_with(WRITER_SUFFIX);
            if is_reader {
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
        owners.truncate(max);
        owners
    }
}

/// Opens a key. If one has expired with that, whoever has heard of it may have written the key, and
/// the handle does not know: it is opened once more.
fn open_as_it_is<'a>(ctx: Ctx<'a>, name: Str<'a>, access: Access) -> (Key<'a>, u64) {
    let open = || match access {
        Access::Read => Key::open_to_read(ctx, name),
        Access::Write => Key::open_to_write(ctx, name),
    };
    let (mut before, mut key) = (ffi::keys_expired(), open());
    for _ in 0..READ_ANEW_MAX {
        let after = ffi::keys_expired();
        if after == before {
            break;
        }
        before = after;
        drop(key);
        key = open();
    }
    (key, before)
}

/// So often a key is opened and read that another module writes, with a lease that is over,
/// whenever one expires.
pub(crate) const READ_ANEW_MAX: usize = 1000;

/// Of a hash with more owners than this, which we never write, the rest is not looked at.
const HOLDERS_MAX: usize = 1000;

pub(crate) fn count_true(of: &[bool]) -> usize {
    of.iter().filter(|is| **is).count()
}

/// For [`Key::each_field`].
pub(crate) fn go_on_if(more: bool) -> ControlFlow<()> {
    if more {
        ControlFlow::Continue(())
    } else {
        ControlFlow::Break(())
    }
}
