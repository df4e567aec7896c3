//! Carrying decisions out: the one place that acts on the server.

use crate::config::{REPLICATE, ReplicateMode};
use crate::ffi::{self, Ctx, EventClass, Key, KeyType, OwnedStr, Str};
use crate::memory::state::{self, Blocked, Finally, Granted};
use crate::reading::open_lock::OpenLock;
use crate::reading::read_write::timeout_key;
use crate::writing::fields::{self, Pair, Word};
use crate::writing::new_hash::NewHash;
use crate::writing::publish;
use rlock_core::{Effect, Text, Write, names};
use std::ffi::CStr;
use std::rc::Rc;

/// Carries out effects that write nothing.
pub(crate) fn tell_all(ctx: Ctx<'_>, effects: Vec<Effect>) {
    for effect in &effects {
        tell(ctx, effect);
    }
    keep_list(effects);
}

/// Carries the effects out. First everything is written, in the keyspace and to replicas; then
/// events are emitted and clients are told. A module that listens to our events may do anything to
/// the keys, so it must find the whole change made and no handle of ours open.
///
/// Timeout keys and limits are written last, with the locks' own keys closed. Such a key may exist
/// and have expired, and listeners hear of that at once: anything they do to the lock then comes
/// after our writes to it.
pub(crate) fn carry_out(
    ctx: Ctx<'_>,
    locks: &mut [OpenLock<'_>],
    caller: Str<'_>,
    effects: Vec<Effect>,
) {
    if effects.is_empty() {
        return;
    }
    let has_side_keys = write_own_keys(locks, caller, &effects);
    for lock in locks.iter() {
        lock.key.set_aside();
    }
    let mut side_keys = SideKeys::default();
    if has_side_keys {
        write_side_keys(locks, caller, &effects, &mut side_keys);
    }
    for lock in locks.iter().filter(|lock| lock.is_written) {
        ctx.signal_modified(lock.name);
    }
    for (key, events) in side_keys.iter() {
        ctx.signal_modified(key.as_str());
        for (class, event) in *events {
            notify(ctx, *class, event, key.as_str());
        }
    }
    for effect in &effects {
        match effect {
            Effect::Write { lock, write } => {
                if let Some(lock) = locks.get_mut(*lock) {
                    tell_written(ctx, lock, write);
                }
            }
            Effect::Publish { lock, held_as } => {
                if let Some(lock) = locks.get(*lock) {
                    let name = lock.name.bytes();
                    publish::unlocked(ctx, name, *held_as, lock.is_deleted, &lock.words);
                }
            }
            _ => tell(ctx, effect),
        }
    }
    keep_list(effects);
}

/// An emptied list is used for the next decision, unless it never grew, or grew beyond this.
const SPARE_EFFECTS_MAX: usize = 64;

fn keep_list(mut effects: Vec<Effect>) {
    effects.clear();
    if (1..=SPARE_EFFECTS_MAX).contains(&effects.capacity()) {
        state::with(|state| state.spare_effects = effects);
    }
}

/// Emits the event of a write to the lock's own key.
fn tell_written(ctx: Ctx<'_>, lock: &mut OpenLock<'_>, write: &Write) {
    let (class, event) = match write {
        Write::Set(..) | Write::SetPermits(..) | Write::SetWriter(..) => {
            lock.is_deleted = false;
            (EventClass::Hash, c"hset")
        }
        Write::Remove(_) => (EventClass::Hash, c"hdel"),
        Write::ExpireAt(_) => (EventClass::Generic, c"expire"),
        Write::Delete => {
            lock.is_deleted = true;
            (EventClass::Generic, c"del")
        }
        _ => return,
    };
    notify(ctx, class, event, lock.name);
}

/// Emits an event of a key that we have written. We know the change already, so the event must not
/// come back to us as another client's change. This holds for this one event only: another module
/// that hears it may change the key in turn.
fn notify(ctx: Ctx<'_>, class: EventClass, event: &CStr, key: Str<'_>) {
    // We do not listen to events of the other classes.
    let may_hear = class == EventClass::Generic && state::with(|state| state.begin_own_event(key));
    ctx.notify(class, event, key);
    if may_hear {
        state::with(|state| state.own_event = None);
    }
}

/// Writes a line into the server's log, or unblocks the client of an effect. The client gets its
/// reply at the end of this turn of the event loop.
///
/// A module that listens to our key events may have killed or unblocked the client since the
/// decision was made. It is not unblocked a second time: the server would free its record twice. A
/// grant whose waiter has gone is given back.
fn tell(ctx: Ctx<'_>, effect: &Effect) {
    if let Effect::Log(line) = effect {
        return ctx.log_notice(line);
    }
    let unblocked = state::with(|state| match effect {
        Effect::Grant {
            client,
            lock,
            owner,
            count,
            grant,
        } => {
            let Some(waiting) = state.waiting(*client) else {
                state.locks.end_grant_later(lock, owner, grant);
                return None;
            };
            *waiting = Blocked::Granted(Granted {
                lock: lock.clone(),
                owner: Rc::clone(owner),
                count: *count,
                grant: grant.clone(),
                confirmed: false,
            });
            state.undelivered.add(*client);
            Some(*client)
        }
        Effect::Leave { client, why } => {
            *state.waiting(*client)? = Blocked::Left(why.clone());
            Some(*client)
        }
        Effect::Wake(client) => {
            let (blocked, listening) = state.listening(*client)?;
            *blocked = Blocked::Woken(listening);
            Some(*client)
        }
        Effect::TakenOver { listener, by } => {
            let (blocked, _) = state.listening(*listener)?;
            *blocked = Blocked::TakenOver(*by);
            Some(*listener)
        }
        Effect::Write { .. } | Effect::Publish { .. } | Effect::Log(_) => None,
    });
    if let Some(client) = unblocked {
        ffi::unblock(client);
    }
}

// --- Writes --------------------------------------------------------------------------------------

/// A side key that was written (a timeout key or a limit), with the events to emit.
type SideKey = (OwnedStr, &'static [(EventClass, &'static CStr)]);

/// All side keys of a decision. Usually there are fewer than two, and then no list is allocated.
#[derive(Default)]
struct SideKeys {
    first: Option<SideKey>,
    others: Vec<SideKey>,
}

impl SideKeys {
    fn push(&mut self, key: SideKey) {
        if self.first.is_none() {
            self.first = Some(key);
        } else {
            self.others.push(key);
        }
    }

    fn iter(&self) -> impl Iterator<Item = &SideKey> {
        self.first.iter().chain(&self.others)
    }
}

const EVENTS_OF_SET: &[(EventClass, &CStr)] = &[
    (EventClass::String, c"set"),
    (EventClass::Generic, c"expire"),
];
const EVENTS_OF_LIMIT: &[(EventClass, &CStr)] = &[(EventClass::String, c"set")];
const EVENTS_OF_DEL: &[(EventClass, &CStr)] = &[(EventClass::Generic, c"del")];

/// Writes into the locks' own keys and to replicas. True if there are other writes, to side keys.
fn write_own_keys(locks: &mut [OpenLock<'_>], caller: Str<'_>, effects: &[Effect]) -> bool {
    let restores = REPLICATE.with(|mode| *mode == ReplicateMode::restore);
    let all = effects.iter().filter_map(|effect| match effect {
        Effect::Write { lock, write } => Some((*lock, write)),
        _ => None,
    });
    let mut own = all.clone().filter(|(_, write)| !is_for_side_key(write));
    while let Some((place, write)) = own.next() {
        let Some(lock) = locks.get_mut(place) else {
            continue;
        };
        lock.is_written = true;
        let new = restores.then(|| NewHash::begun_by(place, write, &mut own, lock));
        match new.flatten() {
            Some(hash) => hash.write(lock, caller),
            None => write_own_key(lock, caller, write),
        }
    }
    all.clone().any(|(_, write)| is_for_side_key(write))
}

/// Whether a write is for a timeout key or a limit.
fn is_for_side_key(write: &Write) -> bool {
    matches!(
        write,
        Write::SetTimeout(..) | Write::DeleteTimeout(_) | Write::SetLimit(_) | Write::DeleteLimit
    )
}

/// Writes into the lock's own key and to replicas.
fn write_own_key(lock: &mut OpenLock<'_>, caller: Str<'_>, write: &Write) {
    let (ctx, name) = (lock.ctx, lock.name);
    match write {
        Write::Remove(field) => {
            let field = Word::of_field(field, caller, &lock.words);
            lock.key.hash_delete(field.as_str());
            ctx.replicate_hdel(name, field.as_str());
        }
        Write::ExpireAt(at) => {
            lock.key.set_expires_at(*at);
            ctx.replicate_pexpireat(name, Text::number(*at).bytes());
        }
        Write::Delete => {
            lock.key.delete();
            ctx.replicate_del(name);
        }
        _ => {
            if let Some(fields) = fields::of_write(write, caller, &lock.words) {
                set(ctx, name, &mut lock.key, &fields);
            }
        }
    }
}

/// Writes the timeout keys and the limits among the effects.
fn write_side_keys(
    locks: &[OpenLock<'_>],
    caller: Str<'_>,
    effects: &[Effect],
    side_keys: &mut SideKeys,
) {
    // Now readers have fields whose timeout keys are not written yet: they would be taken for
    // readers whose leases are over. So a command that another module sends in between is not
    // decided.
    state::with(|state| state.is_unfinished = true);
    let _finished = Finally(|state| state.is_unfinished = false);
    for effect in effects {
        if let Effect::Write { lock, write } = effect
            && let Some(lock) = locks.get(*lock)
            && let Some(key) = side_key(lock, write, caller)
            && let Some(events) = write_side_key(lock, key.as_str(), write)
        {
            side_keys.push((key, events));
        }
    }
}

/// Writes a side key, and returns the events to emit; none if nothing was written.
fn write_side_key(
    lock: &OpenLock<'_>,
    key: Str<'_>,
    write: &Write,
) -> Option<&'static [(EventClass, &'static CStr)]> {
    let ctx = lock.ctx;
    let mut open = Key::open_to_write(ctx, key);
    match write {
        Write::SetTimeout(_, value, at) => {
            let value = value.text();
            open.set_string(value.bytes());
            open.set_expires_at(*at);
            ctx.replicate_set(key, value.bytes(), Some(Text::number(*at).bytes()));
            Some(EVENTS_OF_SET)
        }
        Write::SetLimit(value) => {
            let value = value.text();
            open.set_string(value.bytes());
            ctx.replicate_set(key, value.bytes(), None);
            Some(EVENTS_OF_LIMIT)
        }
        _ if open.key_type() != KeyType::Missing => {
            open.delete();
            ctx.replicate_del(key);
            Some(EVENTS_OF_DEL)
        }
        _ => None,
    }
}

/// The side key of a write, if it is for one.
fn side_key(lock: &OpenLock<'_>, write: &Write, caller: Str<'_>) -> Option<OwnedStr> {
    let name = lock.name.bytes();
    match write {
        Write::SetTimeout(key, ..) | Write::DeleteTimeout(key) => {
            let reader = key.reader.name(caller.bytes());
            Some(timeout_key(name, reader, key.number))
        }
        Write::SetLimit(_) | Write::DeleteLimit => Some(OwnedStr::new(&names::limit_key(name))),
        _ => None,
    }
}

/// Sets one or two fields of the lock's hash.
fn set(
    ctx: Ctx<'_>,
    name: Str<'_>,
    key: &mut Key<'_>,
    (first, second): &(Pair<'_>, Option<Pair<'_>>),
) {
    // If replicas did not hear that the former hash has expired, they still have it, and its
    // fields would become part of the new one.
    if ffi::deletions_are_lost() && key.key_type() == KeyType::Missing {
        ctx.replicate_del(name);
    }
    let (first, second) = (first.as_field(), second.as_ref().map(Pair::as_field));
    key.hash_set(first, second);
    ctx.replicate_hset(name, first, second);
}
