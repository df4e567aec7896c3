//! Changes as replicas and the append-only file get them: one list of writes, in two encodings
//! (`rlock.replicate`).
//!
//! - `plain`: each write is a command of the server, replicated as soon as it is made
//! - `compact`: the writes to the keys of locks are one `RLOCK.APPLY`, with the unlock message in
//!   it, and the writes to side keys are another. A new one also begins where a key is made. At
//!   these points other modules may hear of a key that expires or is new. Their writes must come
//!   after our earlier ones, on every replica as here.
//!
//! A change that is one `DEL` stays that command. It is as short, and does no harm at a server that
//! could not understand the changes before. (A lone `HSET` would: it would leave a lock without an
//! end. So would a `PEXPIREAT`: it would prolong the hold of an earlier owner.)

use crate::config::REPLICATE;
use crate::ffi::{self, Ctx, Field, OwnedStr, Str};
use crate::memory::state;
use crate::reading::open_lock::OpenLock;
use crate::writing::publish;
use rlock_core::change::ChangeWriter;
use rlock_core::{Effect, Text, Write};

/// The way of one decision's writes to replicas and the append-only file.
pub(crate) struct Stream<'a> {
    ctx: Ctx<'a>,
    compact: Option<Compact<'a>>,
}

/// Writes that are not replicated yet.
struct Compact<'a> {
    /// The owner that the writes call the caller.
    caller: &'a [u8],
    /// The lock of the last write.
    lock: Option<Str<'a>>,
    writer: ChangeWriter,
    /// The earlier writes to other locks, as arguments of the command.
    before: Vec<(Str<'a>, OwnedStr)>,
}

/// A write as the server takes it: the parts of the plain commands.
pub(crate) enum Made<'m> {
    Set(Field<'m>, Option<Field<'m>>),
    Remove(Str<'m>),
    ExpireAt(i64),
    Delete,
    /// A string at another key, and when it expires.
    SetSide(Str<'m>, Str<'m>, Option<i64>),
    DeleteSide(Str<'m>),
}

impl<'a> Stream<'a> {
    pub(crate) fn begin(ctx: Ctx<'a>, caller: Str<'a>, effects: &[Effect]) -> Self {
        let is_compact = REPLICATE.is_compact() && is_worth_it(ctx, effects);
        Self {
            ctx,
            compact: is_compact.then(|| Compact::begin(caller)),
        }
    }

    pub(crate) fn is_compact(&self) -> bool {
        self.compact.is_some()
    }

    /// Replicates a write that has been made: at once, or with the next `RLOCK.APPLY`.
    #[inline]
    pub(crate) fn write(&mut self, lock: Str<'a>, write: &Write, made: &Made<'_>) {
        match &mut self.compact {
            None => tell_plainly(self.ctx, lock, made),
            Some(compact) => compact.write(lock, write),
        }
    }

    /// A key is about to be made. Other modules hear of that at once, by the event `new`, and their
    /// writes are replicated at once. These must come after our earlier writes.
    #[inline]
    pub(crate) fn makes(&mut self, is_new: impl FnOnce() -> bool) {
        if let Some(compact) = &mut self.compact
            && compact.lock.is_some()
            && is_new()
        {
            compact.flush(self.ctx);
        }
    }

    /// The same for a lock's hash. If replicas did not hear that the former hash has expired, they
    /// still have it: so they are told to delete it first.
    #[inline]
    pub(crate) fn makes_hash(&mut self, lock: Str<'a>, is_new: impl Fn() -> bool) {
        self.makes(&is_new);
        if ffi::deletions_are_lost() && is_new() {
            self.flush();
            self.ctx.replicate_del(lock);
        }
    }

    /// Replicates all writes that are left, and the unlock messages. In the plain encoding the
    /// messages are replicated when they are published.
    #[inline]
    pub(crate) fn finish(&mut self, locks: &[OpenLock<'a>], effects: &[Effect]) {
        if let Some(compact) = &mut self.compact {
            compact.finish(self.ctx, locks, effects);
        }
    }

    /// Replicates the writes that are left.
    pub(crate) fn flush(&mut self) {
        if let Some(compact) = &mut self.compact {
            compact.flush(self.ctx);
        }
    }
}

/// Memory that is used again, unless it grew beyond this.
const SPARE_CHANGE_MAX: usize = 4096;

impl<'a> Compact<'a> {
    #[inline(never)]
    fn begin(caller: Str<'a>) -> Self {
        let memory = state::with(|state| std::mem::take(&mut state.spare_change));
        Self {
            caller: caller.bytes(),
            lock: None,
            writer: ChangeWriter::with(memory),
            before: Vec::new(),
        }
    }

    #[inline(never)]
    fn write(&mut self, lock: Str<'a>, write: &Write) {
        let caller = self.caller;
        self.of(lock).add(write, caller);
    }

    /// The change of this lock.
    fn of(&mut self, lock: Str<'a>) -> &mut ChangeWriter {
        match self.lock {
            Some(before) if before.is_same(lock) => {}
            Some(before) => {
                self.end(before);
                self.lock = Some(lock);
            }
            None => self.lock = Some(lock),
        }
        &mut self.writer
    }

    fn end(&mut self, lock: Str<'a>) {
        self.before.push((lock, OwnedStr::new(self.writer.bytes())));
        self.writer.clear();
    }

    #[inline(never)]
    fn finish(&mut self, ctx: Ctx<'a>, locks: &[OpenLock<'a>], effects: &[Effect]) {
        for effect in effects {
            if let Effect::Publish { lock, held_as } = effect
                && let Some(lock) = locks.get(*lock)
                && let Some(message) = publish::to_replicas(ctx, *held_as)
            {
                self.of(lock.name).publish(message);
            }
        }
        self.flush(ctx);
        let memory = std::mem::take(&mut self.writer).into_memory();
        if memory.capacity() <= SPARE_CHANGE_MAX {
            state::with(|state| state.spare_change = memory);
        }
    }

    fn flush(&mut self, ctx: Ctx<'_>) {
        let Some(lock) = self.lock.take() else {
            return;
        };
        if self.before.is_empty() {
            ctx.replicate_apply(lock, self.writer.bytes());
            return self.writer.clear();
        }
        self.end(lock);
        let mut words = Vec::with_capacity(self.before.len().saturating_mul(2));
        for (lock, change) in &self.before {
            words.extend([*lock, change.as_str()]);
        }
        ctx.replicate_apply_of_several(&words);
        self.before.clear();
    }
}

/// Whether a change is more than one `DEL`.
fn is_worth_it(ctx: Ctx<'_>, effects: &[Effect]) -> bool {
    let is_told = |effect: &&Effect| match effect {
        Effect::Write { .. } => true,
        Effect::Publish { held_as, .. } => publish::to_replicas(ctx, *held_as).is_some(),
        _ => false,
    };
    let mut told = effects.iter().filter(is_told);
    let Some(Effect::Write { write, .. }) = told.next() else {
        return false;
    };
    !matches!(write, Write::Delete) || told.next().is_some()
}

#[inline]
fn tell_plainly(ctx: Ctx<'_>, lock: Str<'_>, made: &Made<'_>) {
    match made {
        Made::Set(field, None) => ctx.replicate_hset(lock, *field),
        Made::Set(first, Some(second)) => ctx.replicate_hset_both(lock, *first, *second),
        Made::Remove(field) => ctx.replicate_hdel(lock, *field),
        Made::ExpireAt(at) => ctx.replicate_pexpireat(lock, Text::number(*at).bytes()),
        Made::Delete => ctx.replicate_del(lock),
        Made::SetSide(key, value, Some(at)) => {
            ctx.replicate_set(*key, *value, Text::number(*at).bytes());
        }
        Made::SetSide(key, value, None) => ctx.replicate_set_forever(*key, *value),
        Made::DeleteSide(key) => ctx.replicate_del(*key),
    }
}
