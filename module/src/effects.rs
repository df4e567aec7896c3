//! Carrying decisions out: the one place that acts on the server.

use crate::ffi::{self, Ctx, EventClass, OwnedStr, Str};
use crate::keys::OpenLock;
use crate::state::{self, Blocked, Grant};
use crate::{clock, publish, pump};
use rlock_core::{Effect, Holder, LockKey, LockRef, Locks, Now, Token};
use std::io::Write as _;
use std::rc::Rc;

/// Takes a decision about a lock and carries it out. `caller` is the owner that the command named.
pub(crate) fn step<R>(
    lock: OpenLock<'_>,
    caller: Option<Str<'_>>,
    decide: impl FnOnce(&mut Locks, LockRef<'_>, Now, &mut Vec<Effect>) -> R,
) -> R {
    let (ctx, at) = (lock.ctx, lock.at());
    let act = |effects: &[Effect]| carry_out(lock, caller, effects);
    decide_and_act(
        ctx,
        |locks, now, effects| decide(locks, at, now, effects),
        act,
    )
}

/// Takes a decision that writes nothing and carries it out.
pub(crate) fn step_without_key<R>(
    ctx: Ctx<'_>,
    decide: impl FnOnce(&mut Locks, Now, &mut Vec<Effect>) -> R,
) -> R {
    decide_and_act(ctx, decide, |effects| {
        for effect in effects {
            tell(effect, None);
        }
    })
}

/// The state is lent for the decision only: what follows calls the server, which may call us.
fn decide_and_act<R>(
    ctx: Ctx<'_>,
    decide: impl FnOnce(&mut Locks, Now, &mut Vec<Effect>) -> R,
    act: impl FnOnce(&[Effect]),
) -> R {
    let now = clock::now();
    let (decision, mut effects) = state::with(|state| {
        let mut effects = std::mem::take(&mut state.spare_effects);
        (decide(&mut state.locks, now, &mut effects), effects)
    });
    if !effects.is_empty() {
        act(&effects);
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
    let at = lock.at();
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
            Effect::Grant { .. }
            | Effect::Dismiss { .. }
            | Effect::Wake(_)
            | Effect::TakenOver(_) => tell(effect, Some(at)),
        }
    }
    state::with(|state| state.acting = state.acting.saturating_sub(1));
}

/// Unblocks the client that an effect is about. It is replied to at the end of this turn of the
/// event loop.
fn tell(effect: &Effect, at: Option<LockRef<'_>>) {
    let client = match effect {
        Effect::Grant { client, .. }
        | Effect::Dismiss { client, .. }
        | Effect::Wake(client)
        | Effect::TakenOver(client) => *client,
        Effect::Write { .. } | Effect::Leave | Effect::Free | Effect::Publish => return,
    };
    state::with(|state| {
        let told = match (effect, at) {
            (
                Effect::Grant {
                    owner,
                    count,
                    token,
                    ..
                },
                Some(at),
            ) => {
                state.undelivered.add(client);
                let lock = LockKey {
                    db: at.db,
                    name: Rc::from(at.name),
                };
                let (owner, count, token) = (Rc::clone(owner), *count, *token);
                Blocked::Granted(Grant {
                    lock,
                    owner,
                    count,
                    token,
                    confirmed: false,
                })
            }
            (Effect::Dismiss { why, .. }, _) => Blocked::Dismissed(why.clone()),
            (Effect::Wake(_), _) => match state.blocked.get(&client) {
                Some(Blocked::Listening(listening)) => Blocked::Woken(*listening),
                _ => return,
            },
            _ => Blocked::TakenOver,
        };
        state.blocked.insert(client, told);
    });
    ffi::unblock(client);
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
        Effect::Publish
        | Effect::Grant { .. }
        | Effect::Dismiss { .. }
        | Effect::Wake(_)
        | Effect::TakenOver(_) => return false,
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
