//! Reading a read-write lock: its hash, and the timeout keys of its readers.
//!
//! Other programs can write anything into fields and keys. If these do not tell when a reader's
//! lease ends, it lasts as long as the key.

use crate::ffi::{Ctx, Key, KeyType, OwnedStr};
use crate::reading::open_lock::{OpenLock, count_true, go_on_if};
use rlock_core::{
    Count, FENCE_FIELD, HeldBy, Known, MODE_FIELD, Mode, NEVER, ReadDepth, ReadHold, ReadWrite,
    Stored, Task, Text, Token, WRITER_SUFFIX, WriteHold, names,
};
use std::cell::{Cell, OnceCell};
use std::ops::ControlFlow;
use std::sync::atomic::{AtomicUsize, Ordering};

/// The hash of a read-write lock.
pub(crate) struct ReadWriteHash<'l, 'a> {
    lock: &'l OpenLock<'a>,
    mode: ModeField,
    /// When the key expires, once that was looked up.
    ends_at: OnceCell<Option<i64>>,
    /// Whether the ends of the readers' leases are wanted.
    wants_ends: bool,
    /// Whether looking at a timeout key may delete it, and make other modules write this hash.
    peek_may_expire: bool,
    /// Whether a reader was not looked at, because no looks were left.
    is_partial: Cell<bool>,
}

/// How many more timeout keys may be looked at, in all the locks that are read for one decision: a
/// command can name a thousand locks, and a field can claim any number of timeout keys.
static LOOKS_LEFT: AtomicUsize = AtomicUsize::new(0);

/// Allows as many looks at timeout keys as one decision may take.
pub(crate) fn begin_looks() {
    LOOKS_LEFT.store(ReadWrite::TIMEOUTS_MAX, Ordering::Relaxed);
}

/// Whether looks are left for another reading.
pub(crate) fn has_looks() -> bool {
    LOOKS_LEFT.load(Ordering::Relaxed) > 0
}

/// Takes one look. The longer the lock's name, the more it costs. False if none was left.
fn take_look(name_len: usize) -> bool {
    let cost = name_len.div_euclid(NAME_AS_LOOK).saturating_add(1);
    let left = LOOKS_LEFT.load(Ordering::Relaxed);
    LOOKS_LEFT.store(left.saturating_sub(cost), Ordering::Relaxed);
    left > 0
}

/// Making and hashing this many bytes of a timeout key's name takes about as long as a look at it.
const NAME_AS_LOOK: usize = 512;

/// The value of the `mode` field.
#[derive(Clone, Copy, PartialEq, Eq)]
enum ModeField {
    Read,
    Write,
    /// A value that neither we nor Redisson write.
    Odd,
}

impl<'l, 'a> ReadWriteHash<'l, 'a> {
    pub(crate) fn new(lock: &'l OpenLock<'a>, mode: &OwnedStr) -> Self {
        let mode = match mode.as_str().bytes() {
            b"read" => ModeField::Read,
            b"write" => ModeField::Write,
            _ => ModeField::Odd,
        };
        Self {
            lock,
            mode,
            ends_at: OnceCell::new(),
            wants_ends: true,
            peek_may_expire: Key::peek_may_expire(),
            is_partial: Cell::new(false),
        }
    }

    fn ends_at(&self) -> Option<i64> {
        let ask = || self.wants_ends.then(|| self.lock.key.expires_at());
        *self.ends_at.get_or_init(|| ask().flatten())
    }

    /// The stored state, as this owner sees it. `count` is the value of its field, `known` the
    /// number of fields that were looked up. Without a task, all of it is read.
    pub(crate) fn load(
        mut self,
        owner: &[u8],
        count: Option<Count>,
        known: usize,
        look: ReadDepth,
        task: Option<&Task>,
    ) -> Stored {
        let key = &self.lock.key;
        // If all fields are known, none of them is a writer's.
        let own_field = (key.len() > known).then(|| writer_field(owner));
        let own_write = own_field
            .as_ref()
            .and_then(|field| key.hash_get_one(field.as_str()))
            .map(|value| WriteHold::from_field(value.as_str().bytes()));
        let known = known.saturating_add(count_true(&[own_write.is_some()]));
        // The key's expiry and the ends of leases are look-ups of their own in the server.
        let only_hold = match (self.mode, count, own_write) {
            (ModeField::Read, own, None) => own,
            (ModeField::Write, None, own) => own.map(|own| own.count),
            _ => None,
        };
        self.wants_ends =
            task.is_none_or(|task| task.needs_readers_ends(only_hold, key.len() > known));
        // Only a caller that may write needs the token of its hold.
        let token = self.lock.key.is_writable();
        let own_read =
            count.and_then(|count| self.read_hold(owner, count, true, usize::MAX, token));
        let others = if look == ReadDepth::Own || key.len() == known {
            OtherHolders::default()
        } else {
            let has_own = own_read.is_some() || own_write.is_some();
            let is_brief = look.others_are_brief(has_own, self.outlives(own_read));
            let own_field = own_field.as_ref().map(|field| field.as_str().bytes());
            let others = |most| self.others(owner, own_field, is_brief, most);
            // A brief look needs one reader only, and as a rule the latest timeout key of one
            // exists. So only the latest key of each reader is tried first: one field that claims
            // any number of keys must not make each of many steps long.
            let latest = is_brief.then(|| others(1));
            latest
                .filter(|others| others.read.is_some())
                .unwrap_or_else(|| others(usize::MAX))
        };
        if own_read.is_none() && own_write.is_none() && !others.write && others.read.is_none() {
            return Stored::NoHolder;
        }
        let says_read = self.mode == ModeField::Read;
        Stored::ReadWrite(ReadWrite {
            others_write: others.write || !(says_read || own_write.is_some()),
            others_token: others.token,
            own_write,
            own_read,
            others_read: others.read,
            ends_at: Known::read_if(self.wants_ends, || self.ends_at()),
            is_partial: self.is_partial.get(),
        })
    }

    fn end(&self) -> i64 {
        self.ends_at().unwrap_or(NEVER)
    }

    /// Whether the key outlives the owner's own reading: then the key's expiry is the lease of
    /// another reader, which may have given the lock back.
    fn outlives(&self, own_read: Option<ReadHold>) -> bool {
        own_read.is_some_and(|own| self.mode == ModeField::Read && own.ends_at() < self.end())
    }

    fn others(
        &self,
        owner: &[u8],
        own_writer: Option<&[u8]>,
        is_brief: bool,
        timeouts_max: usize,
    ) -> OtherHolders {
        let (mut others, mut looked_at) = (OtherHolders::default(), 0_usize);
        let is_known = |field: &[u8]| {
            let is_own = field == owner || Some(field) == own_writer;
            is_own || field == FENCE_FIELD || field == MODE_FIELD
        };
        self.lock.key.each_field(|field, value| {
            if is_known(field) {
                return ControlFlow::Continue(());
            }
            looked_at = looked_at.saturating_add(1);
            if field.ends_with(WRITER_SUFFIX) {
                others.write = true;
                others.token = others.token.or(WriteHold::from_field(value).token);
            } else if let Some(read) = self.read_hold(
                field,
                Count::from_field(value),
                !is_brief,
                timeouts_max,
                false,
            ) {
                let end = if is_brief { self.end() } else { read.ends_at() };
                others.read = others.read.max(Some(end));
            }
            // One reader whose lease lasts as long as the key is enough, unless a writer's field is
            // still to come. Only other programs write readers beside another owner's writer; after
            // a bounded number of fields one of them is enough.
            let is_read = others.read == Some(self.end());
            let is_bounded = looked_at >= BESIDE_A_WRITER;
            let is_enough = is_read && self.mode == ModeField::Read
                || is_read && is_brief && (others.write || is_bounded)
                || others.write && is_bounded;
            go_on_if(!is_enough)
        });
        others
    }

    /// A reader's hold, if one of its timeout keys exists. We write only one, for the latest entry;
    /// Redisson's scripts write one for each entry, and the longest lease counts. So the keys are
    /// looked at from the highest number down to ours, which has the longest lease of the entries
    /// before it. A look that is not whole stops at the first key. At most `timeouts_max` keys are
    /// looked at.
    fn read_hold(
        &self,
        owner: &[u8],
        count: Count,
        is_whole: bool,
        timeouts_max: usize,
        token: bool,
    ) -> Option<ReadHold> {
        let untold = || ReadHold {
            count,
            token: None,
            ends_at: Known::read_if(self.wants_ends, || self.end()),
        };
        let last = match count {
            Count::Valid(last) if self.mode != ModeField::Odd => last,
            _ => return Some(untold()),
        };
        let (mut hold, mut longest) = (None, i64::MIN);
        for number in (1..=last).rev().take(timeouts_max) {
            if !take_look(self.lock.name.bytes().len()) {
                self.is_partial.set(true);
                return hold.or_else(|| Some(untold()));
            }
            let with_token = token || is_whole && number > 1;
            let Some(timeout) = self.timeout(owner, number, with_token) else {
                continue;
            };
            longest = longest.max(timeout.ends_at);
            hold = Some(ReadHold {
                count,
                token: timeout.token,
                ends_at: Known::read_if(self.wants_ends, || longest),
            });
            if !is_whole || timeout.token.is_some() {
                break;
            }
        }
        hold
    }

    fn timeout(&self, owner: &[u8], number: i64, with_token: bool) -> Option<Timeout> {
        let name = timeout_key(self.lock.name.bytes(), owner, number);
        if self.peek_may_expire {
            self.lock.key.set_aside();
        }
        let key = Key::open_to_peek(self.lock.ctx, name.as_str());
        let key_type = key.key_type();
        if key_type == KeyType::Missing {
            return None;
        }
        let ends_at = self.wants_ends.then(|| key.expires_at());
        let ends_at = ends_at.flatten().unwrap_or(NEVER);
        let token = match key_type {
            KeyType::String if with_token && self.lock.key.is_writable() => {
                key.string(Token::from_timeout)
            }
            KeyType::String if with_token => {
                // Both keys are closed first. GET deletes a key that has expired by now, and
                // another module that hears of it may change this lock.
                drop(key);
                self.lock.key.set_aside();
                let value = self.lock.ctx.get(name.as_str())?;
                Token::from_timeout(&value)
            }
            _ => None,
        };
        Some(Timeout { token, ends_at })
    }

    /// All holds of the lock; with `is_whole` also the tokens and leases of its readers.
    pub(crate) fn holds(&self, is_whole: bool) -> Vec<ReadWriteHold> {
        let mut holds = Vec::new();
        self.lock.key.each_field(|field, value| {
            holds.extend(self.hold(field, value, usize::MAX, is_whole));
            ControlFlow::Continue(())
        });
        holds
    }

    /// One hold of the lock: the writer's, if it has a writer. Of each reader only the latest
    /// timeout keys are looked at.
    pub(crate) fn first_hold(&self) -> Option<ReadWriteHold> {
        let (mut first, mut looked_at) = (None, 0_usize);
        self.lock.key.each_field(|field, value| {
            looked_at = looked_at.saturating_add(1);
            let is_writers = field.ends_with(WRITER_SUFFIX);
            if first.is_none() || is_writers {
                first = self.hold(field, value, LATEST, true).or(first.take());
            }
            let is_found = first.is_some() && (is_writers || self.mode == ModeField::Read);
            go_on_if(!is_found && looked_at < FIELDS_FOR_ONE)
        });
        first
    }

    /// The hold that a field of the hash describes, if it describes one.
    fn hold(
        &self,
        field: &[u8],
        value: &[u8],
        timeouts_max: usize,
        is_whole: bool,
    ) -> Option<ReadWriteHold> {
        let hold = |owner: &[u8], mode, count, token, ends_at| ReadWriteHold {
            held_by: HeldBy {
                owner: owner.into(),
                mode,
                token,
                ends_at,
            },
            count,
        };
        if let Some(owner) = field.strip_suffix(WRITER_SUFFIX) {
            let WriteHold { count, token } = WriteHold::from_field(value);
            return Some(hold(owner, Mode::Write, count, token, self.end()));
        }
        if field == FENCE_FIELD || field == MODE_FIELD {
            return None;
        }
        let count = Count::from_field(value);
        let read = self.read_hold(field, count, is_whole, timeouts_max, is_whole)?;
        Some(hold(field, Mode::Read, count, read.token, read.ends_at()))
    }

    /// Whether this is the field of a reader whose lease is over.
    pub(crate) fn is_reader_over(&self, field: &[u8], value: &[u8]) -> bool {
        let hold = || {
            let count = Count::from_field(value);
            self.read_hold(field, count, false, usize::MAX, false)
        };
        is_readers(field) && hold().is_none()
    }
}

/// How many timeout keys of a reader are looked at for the log, which need not know all.
const LATEST: usize = 16;

/// How many fields are looked at if one of them is another writer's, whose lease is the key's.
const BESIDE_A_WRITER: usize = 1000;

/// How many fields are looked at to find one hold.
const FIELDS_FOR_ONE: usize = 1000;

/// A hold of a read-write lock, for INFO, the log and the deadlock search.
pub(crate) struct ReadWriteHold {
    pub(crate) held_by: HeldBy,
    pub(crate) count: Count,
}

#[derive(Default)]
struct OtherHolders {
    write: bool,
    /// A writer's token.
    token: Option<Token>,
    /// The latest end of another reader's lease.
    read: Option<i64>,
}

/// A timeout key of a reader.
struct Timeout {
    token: Option<Token>,
    ends_at: i64,
}

/// Whether a field of the hash is a reader's.
pub(crate) fn is_readers(field: &[u8]) -> bool {
    field != FENCE_FIELD && field != MODE_FIELD && !field.ends_with(WRITER_SUFFIX)
}

/// The field of an owner as the writer.
pub(crate) fn writer_field(owner: &[u8]) -> OwnedStr {
    OwnedStr::concat(&[owner, WRITER_SUFFIX])
}

/// The name of a reader's timeout key.
pub(crate) fn timeout_key(name: &[u8], reader: &[u8], number: i64) -> OwnedStr {
    let number = Text::number(number);
    OwnedStr::concat(&names::timeout_key_parts(name, reader, &number))
}

/// Whether this node has all keys of a read-write lock. While the slot is on its way to another
/// node, the hash may be here and timeout keys there.
pub(crate) fn slot_is_settled(ctx: Ctx<'_>, name: &[u8]) -> bool {
    if !names::side_keys_share_slot(name) {
        return true;
    }
    // Two keys of the slot that never exist. While the slot is on its way, neither node answers for
    // several keys that it does not have. For one key the receiving node would answer, if the
    // client has just sent `ASKING`.
    let never = [0, -1].map(|number| timeout_key(name, &[], number));
    let [one, other] = never.each_ref().map(OwnedStr::as_str);
    ctx.presence_of_both(one, other)
}
