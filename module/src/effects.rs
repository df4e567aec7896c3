//! Carrying decisions out: the one place that acts on the server.

use crate::ffi::{self, EventClass, OwnedStr, Str};
use crate::keys::OpenLock;
use crate::state::{self, Blocked, Grant};
use crate::{clock, publish, pump};
use rlock_core::{Dismissal, Effect, Holder, LockKey, LockRef, Locks, Now, Seat, Token};
use std::io::Write as _;
use std::rc::Rc;

/// Takes a decision about a lock and carries it out. `caller` is the owner that the command named.
///
/// The state is lent for the decision only: what follows calls the server, which may call us.
pub(crate) fn step<R>(
    lock: OpenLock<'_>,
    caller: Option<Str<'_>>,
    decide: impl FnOnce(&mut Locks, LockRef<'_>, Now, &mut Vec<Effect>) -> R,
) -> R {
    let (ctx, now) = (lock.ctx, clock::now());
    let (decision, mut effects) = state::with(|state| {
        let mut effects = std::mem::take(&mut state.spare_effects);
        (
            decide(&mut state.locks, lock.at(), now, &mut effects),
            effects,
        )
    });
    if !effects.is_empty() {
        carry_out(lock, caller, &effects);
    }
    pump::arm(ctx, now);
    effects.clear();
    if effects.capacity() <= SPARE_EFFECTS_MAX {
        state::with(|state| state.spare_effects = effects);
    }
    decision
}

/// A list that grew beyond this is not kept.
const SPARE_EFFECTS_MAX: usize = 64;

/// Walks the effects. First everything is written, in the keyspace and to replicas; then the key is
/// closed; then the world hears of it. A module that listens to our events may do anything to the
/// key, and must find the whole change made and no handle of ours open.
fn carry_out(mut lock: OpenLock<'_>, caller: Option<Str<'_>>, effects: &[Effect]) {
    state::with(|state| state.acting = state.acting.saturating_add(1));
    let mut written = false;
    for effect in effects {
        written |= write(&mut lock, caller, effect);
    }
    let OpenLock {
        ctx,
        name,
        key,
        words,
        ..
    } = lock;
    drop(key);
    if written {
        ctx.signal_modified(name);
    }
    for effect in effects {
        match effect {
            Effect::Write {
                count,
                token,
                ends_at,
                ..
            } => {
                if count.is_some() || token.is_some() {
                    ctx.notify(EventClass::Hash, c"hset", name);
                }
                if ends_at.is_some() {
                    ctx.notify(EventClass::Generic, c"expire", name);
                }
            }
            Effect::Leave => ctx.notify(EventClass::Hash, c"hdel", name),
            Effect::Free => ctx.notify(EventClass::Generic, c"del", name),
            Effect::Publish => publish::unlocked(ctx, name, &words),
            Effect::Grant {
                seat,
                owner,
                count,
                token,
            } => {
                grant(name.bytes(), ctx.db(), *seat, owner, *count, *token);
            }
            Effect::Dismiss { seat, why } => dismiss(*seat, why.clone()),
        }
    }
    state::with(|state| state.acting = state.acting.saturating_sub(1));
}

/// Writes one effect into the keyspace and to replicas. Whether it had anything to write.
fn write(lock: &mut OpenLock<'_>, caller: Option<Str<'_>>, effect: &Effect) -> bool {
    match effect {
        Effect::Write {
            holder,
            count,
            token,
            ends_at,
        } => {
            let granted = match holder {
                Holder::Caller => None,
                Holder::Waiter(owner) => Some(OwnedStr::new(owner)),
            };
            if let Some(owner) = granted.as_ref().map(OwnedStr::as_str).or(caller) {
                write_hold(lock, owner, *count, *token);
            }
            if let Some(ends_at) = *ends_at {
                lock.key.set_expires_at(ends_at);
                lock.ctx
                    .replicate_pexpireat(lock.name, Decimal::new(ends_at).digits());
            }
        }
        Effect::Leave => {
            if let Some(owner) = caller {
                lock.key.hash_delete(owner);
                lock.ctx.replicate_hdel(lock.name, &[owner]);
            }
        }
        Effect::Free => {
            lock.key.delete();
            lock.ctx.replicate_del(lock.name);
        }
        Effect::Publish | Effect::Grant { .. } | Effect::Dismiss { .. } => return false,
    }
    true
}

fn write_hold(lock: &mut OpenLock<'_>, owner: Str<'_>, count: Option<i64>, token: Option<Token>) {
    let words = Rc::clone(&lock.words);
    let many = count.filter(|count| *count != 1);
    let many = many.map(|count| OwnedStr::new(Decimal::new(count).digits()));
    let count = count.map(|_| many.as_ref().unwrap_or(&words.one).as_str());
    let token = token.map(|token| OwnedStr::new(Decimal::token(token).digits()));
    let fence = token.as_ref().map(OwnedStr::as_str);

    if let Some(count) = count {
        lock.key.hash_set(owner, count);
    }
    if let Some(fence) = fence {
        lock.key.hash_set(words.fence.as_str(), fence);
    }
    match (count, fence) {
        (Some(count), Some(fence)) => {
            let fields = [owner, count, words.fence.as_str(), fence];
            lock.ctx.replicate_hset(lock.name, &fields);
        }
        (Some(count), None) => lock.ctx.replicate_hset(lock.name, &[owner, count]),
        (None, Some(fence)) => {
            lock.ctx
                .replicate_hset(lock.name, &[words.fence.as_str(), fence]);
        }
        (None, None) => {}
    }
}

fn grant(name: &[u8], db: i32, seat: Seat, owner: &Rc<[u8]>, count: i64, token: Token) {
    let lock = LockKey {
        db,
        name: Rc::from(name),
    };
    let grant = Grant {
        lock,
        owner: Rc::clone(owner),
        count,
        token,
        confirmed: false,
    };
    state::with(|state| {
        state.blocked.insert(seat.handle, Blocked::Granted(grant));
        state.undelivered.add(seat.handle);
    });
    ffi::unblock(seat.handle);
}

/// Unblocks a waiter that left the line with nothing.
pub(crate) fn dismiss(seat: Seat, why: Dismissal) {
    state::with(|state| state.blocked.insert(seat.handle, Blocked::Dismissed(why)));
    ffi::unblock(seat.handle);
}

/// A number as text, on the stack.
struct Decimal {
    buffer: [u8; 24],
    len: usize,
}

impl Decimal {
    fn new(number: i64) -> Self {
        Self::format(format_args!("{number}"))
    }

    /// The value of the `fence` field.
    fn token(token: Token) -> Self {
        Self::format(format_args!("t{}", token.get()))
    }

    fn format(text: std::fmt::Arguments<'_>) -> Self {
        let mut buffer = [0; 24];
        let mut rest: &mut [u8] = &mut buffer;
        let fits = rest.write_fmt(text).is_ok();
        debug_assert!(fits, "20 characters at most");
        let left = rest.len();
        Self {
            buffer,
            len: buffer.len().saturating_sub(left),
        }
    }

    fn digits(&self) -> &[u8] {
        self.buffer.get(..self.len).unwrap_or_default()
    }
}
