//! Carrying decisions out: the one place that acts on the server.

use crate::ffi::{self, Ctx, EventClass, Field, Key, KeyType, OwnedStr, Str};
use crate::keys::OpenLock;
use crate::read_write::{ReadWriteHash, writer_field};
use crate::state::{self, Blocked, Granted};
use crate::{clock, publish, pump, settle};
use rlock_core::{Effect, Holder, LockRef, Locks, MODE_FIELD, Mode, Now, Token, names};
use std::ffi::CStr;
use std::rc::Rc;

/// Takes a decision about a lock and carries it out, and what follows from it at once. `caller` is
/// the owner that the command named.
pub(crate) fn step<R>(
    lock: OpenLock<'_>,
    caller: Option<Str<'_>>,
    decide: impl FnOnce(&mut Locks, LockRef<'_>, Now, &mut Vec<Effect>) -> R,
) -> R {
    let (ctx, at) = (lock.ctx, lock.at());
    let act = |effects: &[Effect]| carry_out(lock, caller, effects);
    let decision = decide_and_act(
        ctx,
        |locks, now, effects| decide(locks, at, now, effects),
        act,
    );
    settle::go_on(ctx);
    decision
}

/// Takes a decision that writes nothing and carries it out.
pub(crate) fn step_without_key<R>(
    ctx: Ctx<'_>,
    decide: impl FnOnce(&mut Locks, Now, &mut Vec<Effect>) -> R,
) -> R {
    decide_and_act(ctx, decide, |effects| {
        for effect in effects {
            tell(effect);
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
    let mut beside = Vec::new();
    for effect in effects {
        written |= write(&mut lock, caller, effect, &mut beside);
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
    for (key, events) in &beside {
        ctx.signal_modified(key.as_str());
        for (class, event) in *events {
            ctx.notify(*class, event, key.as_str());
        }
    }
    let mut is_free = false;
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
                is_free = false;
            }
            Effect::WriteMode(_) => {
                ctx.notify(EventClass::Hash, c"hset", name);
                is_free = false;
            }
            Effect::WriteCount { count: Some(_), .. } => {
                ctx.notify(EventClass::Hash, c"hset", name);
            }
            Effect::Leave | Effect::WriteCount { count: None, .. } => {
                ctx.notify(EventClass::Hash, c"hdel", name);
            }
            Effect::Expire(_) => ctx.notify(EventClass::Generic, c"expire", name),
            Effect::Free => {
                ctx.notify(EventClass::Generic, c"del", name);
                is_free = true;
            }
            Effect::Publish(held_as) => publish::unlocked(ctx, at.name, *held_as, is_free, &words),
            Effect::WriteTimeouts { .. }
            | Effect::DeleteTimeouts { .. }
            | Effect::DeleteAllTimeouts
            | Effect::SweepReaders => {}
            Effect::Grant { .. }
            | Effect::Dismiss { .. }
            | Effect::Wake(_)
            | Effect::TakenOver(_) => tell(effect),
        }
    }
    state::with(|state| state.acting = state.acting.saturating_sub(1));
}

/// Unblocks the client that an effect is about. It is replied to at the end of this turn of the
/// event loop.
fn tell(effect: &Effect) {
    let (Effect::Grant { client, .. }
    | Effect::Dismiss { client, .. }
    | Effect::Wake(client)
    | Effect::TakenOver(client)) = effect
    else {
        return;
    };
    let client = *client;
    state::with(|state| {
        let told = match effect {
            Effect::Grant {
                lock,
                owner,
                count,
                grant,
                ..
            } => {
                state.undelivered.add(client);
                Blocked::Granted(Granted {
                    lock: lock.clone(),
                    owner: Rc::clone(owner),
                    count: *count,
                    grant: grant.clone(),
                    confirmed: false,
                })
            }
            Effect::Dismiss { why, .. } => Blocked::Dismissed(why.clone()),
            Effect::Wake(_) => match state.blocked.get(&client) {
                Some(Blocked::Listening(listening)) => Blocked::Woken(*listening),
                _ => return,
            },
            _ => Blocked::TakenOver,
        };
        state.blocked.insert(client, told);
    });
    ffi::unblock(client);
}

/// Keys that were written beside what the effect itself tells of, with the events to be told.
type Beside = Vec<(OwnedStr, &'static [(EventClass, &'static CStr)])>;

/// Writes one effect into the keyspace and to replicas. Whether the lock's key changed.
fn write(
    lock: &mut OpenLock<'_>,
    caller: Option<Str<'_>>,
    effect: &Effect,
    beside: &mut Beside,
) -> bool {
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
                expire(lock, ends_at);
            }
        }
        Effect::Leave => {
            if let Some(owner) = caller {
                write_field(lock, owner.bytes(), None);
            }
        }
        Effect::WriteMode(mode) => {
            let value: &[u8] = match mode {
                Mode::Write => b"write",
                Mode::Read | Mode::Plain => b"read",
            };
            write_field(lock, MODE_FIELD, Some(value));
        }
        Effect::WriteCount {
            holder,
            mode,
            count,
        } => {
            let owner = bytes_of(holder, caller);
            let count = count.map(Decimal::new);
            let count = count.as_ref().map(Decimal::digits);
            match mode {
                Mode::Write => write_field(lock, &writer_field(owner), count),
                Mode::Read | Mode::Plain => write_field(lock, owner, count),
            }
        }
        Effect::SweepReaders => return sweep_readers(lock, beside),
        Effect::Expire(ends_at) => expire(lock, *ends_at),
        Effect::Free => {
            lock.key.delete();
            lock.ctx.replicate_del(lock.name);
        }
        Effect::WriteTimeouts { .. }
        | Effect::DeleteTimeouts { .. }
        | Effect::DeleteAllTimeouts => {
            write_beside(lock, caller, effect, beside);
            return false;
        }
        Effect::Publish(_)
        | Effect::Grant { .. }
        | Effect::Dismiss { .. }
        | Effect::Wake(_)
        | Effect::TakenOver(_) => return false,
    }
    true
}

/// Takes the fields of readers out whose leases are over. Whether there were any.
fn sweep_readers(lock: &mut OpenLock<'_>, beside: &mut Beside) -> bool {
    let hash = lock.mode().map(|mode| ReadWriteHash::new(lock, &mode));
    let over = hash.map_or_else(Vec::new, |hash| hash.readers_gone());
    for field in &over {
        write_field(lock, field, None);
    }
    if over.is_empty() {
        return false;
    }
    beside.push((OwnedStr::new(lock.name.bytes()), EVENTS_OF_HDEL));
    true
}

/// Writes timeout keys of readers.
fn write_beside(
    lock: &OpenLock<'_>,
    caller: Option<Str<'_>>,
    effect: &Effect,
    beside: &mut Beside,
) {
    let name = lock.name.bytes();
    let key = |holder, number| names::timeout_key(name, bytes_of(holder, caller), number);
    match effect {
        Effect::WriteTimeouts {
            holder,
            numbers: (first, last),
            token,
            ends_at,
        } => {
            let value = Decimal::new(token.map_or(1, Token::get));
            let value = OwnedStr::new(value.digits());
            for number in *first..=*last {
                let name = OwnedStr::new(&key(holder, number));
                let mut open = Key::open_to_write(lock.ctx, name.as_str());
                open.set_string(value.as_str());
                open.set_expires_at(*ends_at);
                let at = Decimal::new(*ends_at);
                lock.ctx
                    .replicate_set(name.as_str(), value.as_str(), at.digits());
                drop(open);
                beside.push((name, EVENTS_OF_SET));
            }
        }
        Effect::DeleteTimeouts {
            holder,
            numbers: (first, last),
        } => {
            for number in *first..=*last {
                delete_beside(lock.ctx, &key(holder, number), beside);
            }
        }
        _ => {
            let hash = lock.mode().map(|mode| ReadWriteHash::new(lock, &mode));
            for name in hash.iter().flat_map(ReadWriteHash::timeout_keys) {
                delete_beside(lock.ctx, &name, beside);
            }
        }
    }
}

const EVENTS_OF_SET: &[(EventClass, &CStr)] = &[
    (EventClass::String, c"set"),
    (EventClass::Generic, c"expire"),
];
const EVENTS_OF_HDEL: &[(EventClass, &CStr)] = &[(EventClass::Hash, c"hdel")];
const EVENTS_OF_DEL: &[(EventClass, &CStr)] = &[(EventClass::Generic, c"del")];

fn delete_beside(ctx: Ctx<'_>, name: &[u8], beside: &mut Beside) {
    let name = OwnedStr::new(name);
    let mut open = Key::open_to_write(ctx, name.as_str());
    if open.key_type() != KeyType::Missing {
        open.delete();
        ctx.replicate_del(name.as_str());
        drop(open);
        beside.push((name, EVENTS_OF_DEL));
    }
}

fn bytes_of<'a>(holder: &'a Holder, caller: Option<Str<'a>>) -> &'a [u8] {
    match holder {
        Holder::Caller => caller.map_or(&[], Str::bytes),
        Holder::Waiter(owner) => owner,
    }
}

/// Writes one field, or takes it out.
fn write_field(lock: &mut OpenLock<'_>, field: &[u8], value: Option<&[u8]>) {
    let field = OwnedStr::new(field);
    if let Some(value) = value.map(OwnedStr::new) {
        set(lock, (field.as_str(), value.as_str()));
    } else {
        lock.key.hash_delete(field.as_str());
        lock.ctx.replicate_hdel(lock.name, field.as_str());
    }
}

fn set(lock: &mut OpenLock<'_>, field: Field<'_>) {
    lock.key.hash_set(field);
    lock.ctx.replicate_hset(lock.name, field);
}

fn expire(lock: &mut OpenLock<'_>, ends_at: i64) {
    lock.key.set_expires_at(ends_at);
    let at = Decimal::new(ends_at);
    lock.ctx.replicate_pexpireat(lock.name, at.digits());
}

fn write_hold(lock: &mut OpenLock<'_>, owner: Str<'_>, count: Option<i64>, token: Option<Token>) {
    let words = Rc::clone(&lock.words);
    let many = count.filter(|count| *count != 1);
    let many = many.map(|count| OwnedStr::new(Decimal::new(count).digits()));
    let count = count.map(|_| (owner, many.as_ref().unwrap_or(&words.one).as_str()));
    let token = token.map(|token| OwnedStr::new(Decimal::token(token).digits()));
    let fence = token
        .as_ref()
        .map(|token| (words.fence.as_str(), token.as_str()));

    match (count, fence) {
        (Some(count), Some(fence)) => {
            lock.key.hash_set_both(count, fence);
            lock.ctx.replicate_hset_both(lock.name, count, fence);
        }
        (Some(field), None) | (None, Some(field)) => set(lock, field),
        (None, None) => {}
    }
}

/// A number as text, on the stack. The library's formatting takes half as long again.
struct Decimal {
    buffer: [u8; 24],
    start: usize,
}

impl Decimal {
    fn new(number: i64) -> Self {
        let (mut buffer, mut start) = ([0; 24], 0);
        let mut rest = number.unsigned_abs();
        // From the last digit on. There are 19 at most, so there is room before them.
        for (at, place) in buffer.iter_mut().enumerate().rev() {
            let [digit, ..] = (rest % 10).to_le_bytes();
            *place = b'0' | digit;
            rest /= 10;
            if rest == 0 {
                start = at;
                break;
            }
        }
        let text = Self { buffer, start };
        if number < 0 { text.after(b'-') } else { text }
    }

    /// The value of the `fence` field.
    fn token(token: Token) -> Self {
        Self::new(token.get()).after(b't')
    }

    fn after(mut self, char: u8) -> Self {
        self.start = self.start.saturating_sub(1);
        if let Some(place) = self.buffer.get_mut(self.start) {
            *place = char;
        }
        self
    }

    fn digits(&self) -> &[u8] {
        self.buffer.get(self.start..).unwrap_or_default()
    }
}
