//! A lock's keys: opening them, and reading what is stored there as plain values.

use crate::ffi::{Ctx, Key, KeyType, OwnedStr, Str};
use crate::state::{self, Words};
use rlock_core::{
    Count, FENCE_FIELD, Hash, LockRef, Look, MODE_FIELD, Mode, NEVER, Now, ReadHold, ReadWrite,
    Stored, Token, WRITER_SUFFIX, names,
};
use std::cell::Cell;
use std::ops::ControlFlow;
use std::rc::Rc;

/// A lock whose key is open.
pub(crate) struct OpenLock<'a> {
    pub(crate) ctx: Ctx<'a>,
    pub(crate) name: Str<'a>,
    pub(crate) key: Key<'a>,
    pub(crate) words: Rc<Words>,
    db: i32,
    /// How many timeout keys may be looked at yet.
    looks_left: Cell<u32>,
}

impl<'a> OpenLock<'a> {
    /// Opens the key to change it.
    pub(crate) fn to_write(ctx: Ctx<'a>, name: Str<'a>) -> Self {
        Self::new(ctx, name, Key::open_to_write(ctx, name))
    }

    /// Opens the key to look at it.
    pub(crate) fn to_read(ctx: Ctx<'a>, name: Str<'a>) -> Self {
        Self::new(ctx, name, Key::open_to_read(ctx, name))
    }

    fn new(ctx: Ctx<'a>, name: Str<'a>, key: Key<'a>) -> Self {
        let words = state::with(|state| Rc::clone(&state.words));
        Self {
            ctx,
            name,
            key,
            words,
            db: ctx.db(),
            looks_left: Cell::new(TIMEOUTS_LOOKED_AT_MAX),
        }
    }

    pub(crate) fn at(&self) -> LockRef<'a> {
        LockRef {
            db: self.db,
            name: self.name.bytes(),
        }
    }

    /// What is stored, as this owner sees it.
    pub(crate) fn load(&self, owner: Str<'_>, look: Look) -> Stored {
        match self.key.key_type() {
            KeyType::Missing => Stored::Free,
            KeyType::Hash => self.load_hash(owner, look),
            _ => Stored::OtherType,
        }
    }

    fn load_hash(&self, owner: Str<'_>, look: Look) -> Stored {
        let fields = [owner, self.words.fence.as_str(), self.words.mode.as_str()];
        let [own, fence, mode] = self.key.hash_get(fields);
        if let Some(mode) = mode {
            let known = [own.is_some(), fence.is_some(), true];
            return self.load_read_write(owner, own, &mode, count_true(&known), look);
        }
        let others = self.key.len() > count_true(&[own.is_some(), fence.is_some()]);
        // Fields can have a TTL of their own on newer servers, and are counted after it until the
        // server removes them: that there are others is no proof that one of them is alive.
        if own.is_none() && !(others && self.holder().is_some()) {
            return Stored::Abandoned;
        }
        Stored::Plain(Hash {
            own: own.map(|count| Count::from_field(count.as_str().bytes())),
            token: fence.and_then(|fence| Token::from_field(fence.as_str().bytes())),
            others,
            ends_at: self.key.expires_at(),
        })
    }

    /// What is stored, whoever has it: a plain lock as its holder sees it, with who that is; a
    /// read-write lock as somebody sees it who has no part in it.
    pub(crate) fn load_for_holder(&self) -> (Stored, Option<Box<[u8]>>) {
        let holder = match self.key.key_type() {
            KeyType::Missing => return (Stored::Free, None),
            KeyType::Hash => self.holder(),
            _ => return (Stored::OtherType, None),
        };
        let Some(holder) = holder else {
            return (Stored::Abandoned, None);
        };
        if self.is_read_write() {
            // No owner is called like the lock's own field.
            let stranger = Rc::clone(&self.words);
            return (self.load_hash(stranger.fence.as_str(), Look::Brief), None);
        }
        let stored = self.load_hash(OwnedStr::new(&holder).as_str(), Look::Brief);
        (stored, Some(holder))
    }

    /// What is left of the present lease, as in [`Stored::ttl_ms`].
    pub(crate) fn ttl_ms(&self, now: Now) -> i64 {
        self.load_for_holder().0.ttl_ms(now)
    }

    fn is_read_write(&self) -> bool {
        self.key.hash_get_one(self.words.mode.as_str()).is_some()
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
        if !self.is_read_write() {
            return self.owners(HOLDERS_MAX);
        }
        let holds = self.read_write_holds();
        holds.into_iter().map(|hold| hold.owner).collect()
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

    // --- The read-write lock ---------------------------------------------------------------------

    fn load_read_write(
        &self,
        owner: Str<'_>,
        own: Option<OwnedStr>,
        mode: &OwnedStr,
        known: usize,
        look: Look,
    ) -> Stored {
        let own_field = writer_field(owner.bytes());
        let own_write = self.key.hash_get_one(OwnedStr::new(&own_field).as_str());
        let known = known.saturating_add(count_true(&[own_write.is_some()]));
        let ends_at = self.key.expires_at();
        // A writer's lease is never shorter than all of its own as a reader.
        let look_at_own = if own_write.is_some() {
            Look::Whole
        } else {
            look
        };
        let own_read = own.and_then(|count| {
            let count = Count::from_field(count.as_str().bytes());
            self.read_hold(owner.bytes(), count, ends_at, look_at_own)
        });
        let is_read = mode.as_str().bytes() == b"read";
        let others = if self.key.len() > known {
            // Where the key outlives the owner's own reading, somebody else is why.
            let outlived =
                own_read.is_some_and(|own| is_read && own.ends_at < ends_at.unwrap_or(NEVER));
            if outlived {
                OtherHolders {
                    write: false,
                    read: Some(ends_at.unwrap_or(NEVER)),
                }
            } else {
                self.others(owner.bytes(), &own_field, ends_at, look)
            }
        } else {
            OtherHolders::default()
        };
        if own_read.is_none() && own_write.is_none() && !others.write && others.read.is_none() {
            return Stored::Abandoned;
        }
        Stored::ReadWrite(ReadWrite {
            others_write: others.write || !(is_read || own_write.is_some()),
            own_write: own_write.map(|count| Count::from_field(count.as_str().bytes())),
            own_read,
            others_read: others.read,
            ends_at,
        })
    }

    fn others(
        &self,
        owner: &[u8],
        own_writer: &[u8],
        ends_at: Option<i64>,
        look: Look,
    ) -> OtherHolders {
        let mut others = OtherHolders::default();
        let is_known = |field: &[u8]| {
            field == owner || field == own_writer || field == FENCE_FIELD || field == MODE_FIELD
        };
        self.key.each_field(|field, value| {
            if is_known(field) {
                return ControlFlow::Continue(());
            }
            if field.ends_with(WRITER_SUFFIX) {
                others.write = true;
            } else if let Some(read) =
                self.read_hold(field, Count::from_field(value), ends_at, look)
            {
                let end = match look {
                    Look::Brief => ends_at.unwrap_or(NEVER),
                    Look::Whole => read.ends_at,
                };
                others.read = others.read.max(Some(end));
            }
            go_on_if(look == Look::Whole || others.read.is_none())
        });
        others
    }

    /// A reader's hold, if one of its timeout keys is there. For a brief look the one with the
    /// highest number is enough.
    fn read_hold(
        &self,
        owner: &[u8],
        count: Count,
        ends_at: Option<i64>,
        look: Look,
    ) -> Option<ReadHold> {
        let key_end = ends_at.unwrap_or(NEVER);
        let untold = ReadHold {
            count,
            token: None,
            ends_at: key_end,
            rest_ends_at: None,
        };
        let Count::Valid(last) = count else {
            // Somebody else wrote it. Where it cannot be told how long it lasts, it lasts.
            return Some(untold);
        };
        let mut hold: Option<ReadHold> = None;
        for number in (1..=last).rev() {
            let Some(looks_left) = self.looks_left.get().checked_sub(1) else {
                return hold.or(Some(untold));
            };
            self.looks_left.set(looks_left);
            let Some(timeout) = self.timeout(owner, number, hold.is_none()) else {
                continue;
            };
            let hold = hold.get_or_insert(ReadHold {
                count,
                token: timeout.token,
                ends_at: timeout.ends_at,
                rest_ends_at: None,
            });
            hold.ends_at = hold.ends_at.max(timeout.ends_at);
            if number < last {
                hold.rest_ends_at = hold.rest_ends_at.max(Some(timeout.ends_at));
            }
            if look == Look::Brief {
                break;
            }
        }
        hold
    }

    fn timeout(&self, owner: &[u8], number: i64, with_token: bool) -> Option<Timeout> {
        let name = OwnedStr::new(&names::timeout_key(self.name.bytes(), owner, number));
        let key = Key::open_to_peek(self.ctx, name.as_str());
        let token = match key.key_type() {
            KeyType::Missing => return None,
            KeyType::String if with_token => Token::from_timeout(&key.string()),
            _ => None,
        };
        let ends_at = key.expires_at().unwrap_or(NEVER);
        Some(Timeout { token, ends_at })
    }

    /// Who has a read-write lock, and how.
    pub(crate) fn read_write_holds(&self) -> Vec<ReadWriteHold> {
        let ends_at = self.key.expires_at();
        let mut holds = Vec::new();
        self.key.each_field(|field, value| {
            let count = Count::from_field(value);
            if let Some(owner) = field.strip_suffix(WRITER_SUFFIX) {
                holds.push(ReadWriteHold {
                    owner: owner.into(),
                    mode: Mode::Write,
                    count,
                    token: None,
                    ends_at: ends_at.unwrap_or(NEVER),
                });
            } else if field != FENCE_FIELD
                && field != MODE_FIELD
                && let Some(read) = self.read_hold(field, count, ends_at, Look::Whole)
            {
                holds.push(ReadWriteHold {
                    owner: field.into(),
                    mode: Mode::Read,
                    count,
                    token: read.token,
                    ends_at: read.ends_at,
                });
            }
            ControlFlow::Continue(())
        });
        holds
    }

    /// The timeout keys that the readers in the hash may have.
    pub(crate) fn timeout_keys(&self) -> Vec<Vec<u8>> {
        let mut keys = Vec::new();
        let most = usize::try_from(TIMEOUTS_LOOKED_AT_MAX).unwrap_or(usize::MAX);
        self.key.each_field(|field, value| {
            if let Count::Valid(last) = Count::from_field(value)
                && !field.ends_with(WRITER_SUFFIX)
            {
                let name = self.name.bytes();
                let left = most.saturating_sub(keys.len());
                let numbers = (1..=last).rev().take(left);
                keys.extend(numbers.map(|at| names::timeout_key(name, field, at)));
            }
            go_on_if(keys.len() < most)
        });
        keys
    }
}

/// Who has a read-write lock, and how: for INFO and the deadlock check.
pub(crate) struct ReadWriteHold {
    pub(crate) owner: Box<[u8]>,
    pub(crate) mode: Mode,
    pub(crate) count: Count,
    /// A reader's; a writer's is not stored.
    pub(crate) token: Option<Token>,
    pub(crate) ends_at: i64,
}

#[derive(Default)]
struct OtherHolders {
    write: bool,
    /// When the last of them ends that read.
    read: Option<i64>,
}

/// A timeout key of a reader.
struct Timeout {
    token: Option<Token>,
    ends_at: i64,
}

/// Whether a lock of this kind can be told to be whole here: not while its slot of a cluster is on
/// its way to another node, when the hash may be here and timeout keys there.
pub(crate) fn slot_is_settled(ctx: Ctx<'_>, name: &[u8]) -> bool {
    if !names::timeouts_share_slot(name) {
        return true;
    }
    // A key of the slot that is never there: the server answers for it only while all of the slot
    // is served here.
    let never = OwnedStr::new(&names::timeout_key(name, &[], 0));
    ctx.presence(never.as_str()) == crate::ffi::Presence::Here
}

/// The field of an owner as the writer.
pub(crate) fn writer_field(owner: &[u8]) -> Vec<u8> {
    [owner, WRITER_SUFFIX].concat()
}

/// Of a hash with more owners than this, which we never write, the rest is not looked at.
const HOLDERS_MAX: usize = 1000;

/// In one look at a lock no more timeout keys are looked at than this, the latest of each reader
/// first; readers beyond are taken to read for as long as the key lives. Fields that somebody else
/// wrote can claim any number, and must not keep the server busy.
const TIMEOUTS_LOOKED_AT_MAX: u32 = 200_000;

fn count_true(of: &[bool]) -> usize {
    of.iter().filter(|is| **is).count()
}

fn go_on_if(more: bool) -> ControlFlow<()> {
    if more {
        ControlFlow::Continue(())
    } else {
        ControlFlow::Break(())
    }
}
