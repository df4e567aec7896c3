//! Drives the core's loop: reads the keys of a task, lets the core decide, carries out the effects.
//!
//! A command starts a turn, or the timer in `pump`. The core chooses the tasks and their order.

use crate::clock;
use crate::ffi::{Ctx, Key, KeyType, OwnedStr, Presence, Str};
use crate::memory::state;
use crate::reading::open_lock::{Access, OpenLock, read_anew};
use crate::reading::read_write::{begin_looks, has_looks, slot_is_settled};
use crate::reading::{cluster, sweep};
use crate::writing::effects;
use rlock_core::{
    CommandError, Effect, LockKey, Mode, Now, Outcome, Purpose, Read, Stored, Subject, Task, Turn,
};
use std::slice;

/// The locks and the owner of a command, as the server's own strings.
#[derive(Clone, Copy)]
pub(crate) enum Named<'a> {
    /// Nothing: it is the timer's turn.
    Nothing,
    One(Str<'a>, Str<'a>),
    /// The lock of BREAK, which names no owner.
    Whoever(Str<'a>),
    Several(&'a [Str<'a>], Str<'a>),
}

/// Runs a turn to its end. Does nothing while another turn's decision is being written.
///
/// Calls `then` with the outcome as soon as the command is decided: before the next task, and in
/// the database of the command.
///
/// Returns the moment of the last decision, and whether both clocks were read for it. The caller
/// arms the timer.
pub(crate) fn run(
    ctx: Ctx<'_>,
    turn: &mut Turn<'_>,
    given: Named<'_>,
    then: impl FnOnce(&Result<Outcome, CommandError>),
) -> (Now, bool) {
    let mut then = Some(then);
    let mut is_full = state::with(|state| state.locks.is_timed());
    let mut now = if is_full {
        clock::now()
    } else {
        clock::wall_now()
    };
    let (mut is_first, mut roams) = (true, false);
    let db = ctx.db();
    while let Some(task) = state::with(|state| state.next_task(turn, now)) {
        if !std::mem::take(&mut is_first) {
            (now, is_full) = (clock::now(), true);
        }
        // Other tasks may be about locks in other databases.
        if task.subject != Subject::Command {
            roams = true;
        } else if roams {
            ctx.select_db(db);
        }
        Step { ctx, turn, now }.take(&task, given);
        if let Some(outcome) = turn.decided()
            && let Some(then) = then.take()
        {
            then(outcome);
        }
    }
    // The last task may have selected another database.
    if roams {
        ctx.select_db(db);
    }
    (now, is_full)
}

/// One task: the reading, the decision and its effects.
struct Step<'s, 'c, 't> {
    ctx: Ctx<'c>,
    turn: &'s mut Turn<'t>,
    now: Now,
}

impl Step<'_, '_, '_> {
    fn take(self, task: &Task, given: Named<'_>) {
        // A deadlock search reads the holders of one lock after the other: all its readings
        // together may take as many looks as one decision.
        if task.purpose != Purpose::Holders {
            begin_looks();
        }
        match (&task.subject, given) {
            (Subject::Command, Named::One(name, owner)) => self.one(task, name, owner),
            (Subject::Command, Named::Whoever(name)) => self.whoever(task, name),
            (Subject::Command, Named::Several(names, owner)) => self.several(task, names, owner),
            (Subject::Command, Named::Nothing) => {}
            (Subject::One(lock, owner), _) => {
                self.ctx.select_db(lock.db);
                let (name, owner) = (OwnedStr::new(&lock.name), OwnedStr::new(owner));
                self.one(task, name.as_str(), owner.as_str());
            }
            (Subject::Several(locks, owner), _) => {
                if let Some(lock) = locks.first() {
                    self.ctx.select_db(lock.db);
                }
                let name = |lock: &LockKey| OwnedStr::new(&lock.name);
                let names: Vec<OwnedStr> = locks.iter().map(name).collect();
                let names: Vec<Str<'_>> = names.iter().map(OwnedStr::as_str).collect();
                self.several(task, &names, OwnedStr::new(owner).as_str());
            }
        }
    }

    fn one(mut self, task: &Task, name: Str<'_>, owner: Str<'_>) {
        let (ctx, purpose) = (self.ctx, task.purpose);
        if let Some(not_here) = not_here(ctx, purpose, name) {
            return self.decide_and_tell(task, not_here);
        }
        let (mut lock, now) = (OpenLock::open(ctx, name, access(purpose)), self.now);
        let effects = match purpose {
            Purpose::Holders => {
                let holders = lock.read(OpenLock::holders);
                let read = if has_looks() {
                    Read::Owners(&holders)
                } else {
                    Read::Unknown
                };
                self.decide(task, read)
            }
            Purpose::LongWait => {
                let holder = lock.read(|lock| lock.first_holder(now));
                self.decide(task, Read::Holder(holder))
            }
            Purpose::Sweep => {
                let (readers, more) = sweep::next_part(&lock, now);
                let readers = &readers;
                self.decide(task, Read::Gone { readers, more })
            }
            _ if task.is_about_queue_for_permits() => {
                let (stored, others, is_whole) = lock.read(|lock| {
                    let (stored, others) = lock.load_for_queue(owner, task, now);
                    (stored, others, is_whole(lock, purpose, &stored))
                });
                let read = match &stored {
                    _ if !is_whole => Read::Unknown,
                    Stored::Permits(hash) => Read::Permits(hash, &others),
                    stored => Read::One(stored),
                };
                self.decide(task, read)
            }
            _ => {
                let (stored, is_whole) = lock.read(|lock| {
                    let stored = lock.load(owner, task, now);
                    (stored, is_whole(lock, purpose, &stored))
                });
                let read = if is_whole {
                    Read::One(&stored)
                } else {
                    Read::Unknown
                };
                self.decide(task, read)
            }
        };
        effects::carry_out(ctx, slice::from_mut(&mut lock), owner, effects);
    }

    /// Breaks a lock: reads it with all its holders.
    fn whoever(mut self, task: &Task, name: Str<'_>) {
        let lock = OpenLock::open(self.ctx, name, Access::Write);
        let now = self.now;
        let (stored, holders, first) = lock.read(|lock| {
            let (stored, holders) = lock.load_with_holders(now);
            (stored, holders, lock.first_holder(now))
        });
        let effects = self.decide(task, Read::Holds(stored, &holders, first));
        effects::carry_out(self.ctx, &mut [lock], name, effects);
    }

    fn several(mut self, task: &Task, names: &[Str<'_>], owner: Str<'_>) {
        let (ctx, now, access) = (self.ctx, self.now, access(task.purpose));
        if let Purpose::GrantSeveral(_) = task.purpose {
            let mut presence = names.iter().map(|name| presence(ctx, *name));
            if let Some(place) = presence.position(|presence| presence != Presence::Here) {
                return self.decide_and_tell(task, Read::NotHere(place));
            }
        }
        let read = || {
            let (read, _) = read_anew(|| {
                // Only one key at a time is open while they are read. An expired key is deleted
                // when it is opened or looked at, and a module that listens to that may do anything
                // to the other keys.
                let load = |name| {
                    OpenLock::open(ctx, name, access).read(|lock| lock.load(owner, task, now))
                };
                let stored: Vec<Stored> = names.iter().copied().map(load).collect();
                let open = |name| OpenLock::open(ctx, name, access);
                let locks: Vec<OpenLock<'_>> = names.iter().copied().map(open).collect();
                (stored, locks)
            });
            read
        };
        let (mut stored, mut locks) = read();
        let needs_all = |of: &Stored| ctx.in_cluster() && needs_all_keys(task.purpose, of);
        if stored.iter().any(needs_all) {
            // As in `is_whole`.
            drop(locks);
            let mut each = names.iter().zip(&stored);
            let torn =
                each.position(|(name, of)| needs_all(of) && !slot_is_settled(ctx, name.bytes()));
            if let Some(place) = torn {
                let read = match task.purpose {
                    Purpose::GrantSeveral(_) => Read::NotHere(place),
                    _ => Read::Unknown,
                };
                return self.decide_and_tell(task, read);
            }
            begin_looks();
            (stored, locks) = read();
        }
        let effects = self.decide(task, Read::Several(&stored));
        effects::carry_out(ctx, &mut locks, owner, effects);
    }

    /// Lends the state for the decision only: the effects call the server, which may call us back.
    fn decide(&mut self, task: &Task, read: Read<'_>) -> Vec<Effect> {
        let (turn, now) = (&mut *self.turn, self.now);
        state::with(|state| {
            let mut effects = std::mem::take(&mut state.spare_effects);
            let reading = task.found(read);
            state.locks.decide(turn, reading, now, &mut effects);
            if effects.is_empty() {
                // The list is kept for the next decision.
                std::mem::swap(&mut state.spare_effects, &mut effects);
            }
            effects
        })
    }

    /// Decides a task whose decision can write nothing, and carries out its effects.
    fn decide_and_tell(&mut self, task: &Task, read: Read<'_>) {
        let effects = self.decide(task, read);
        effects::tell_all(self.ctx, effects);
    }
}

fn access(purpose: Purpose) -> Access {
    match purpose {
        Purpose::TimeOut | Purpose::LongWait | Purpose::Holders => Access::Read,
        _ => Access::Write,
    }
}

/// Whether this node serves the key, and may write it.
fn presence(ctx: Ctx<'_>, name: Str<'_>) -> Presence {
    if ctx.in_cluster() {
        ctx.presence(name)
    } else {
        Presence::Here
    }
}

/// The reading of a lock that this node may not write, or whose keys are not all here. None if the
/// lock can be read. For a command's own locks the server has checked that.
///
/// Where `may_write` is true, the core may decide to write. A node whose cluster is down must not:
/// its replica may have been promoted, and the hold lives on there.
fn not_here(ctx: Ctx<'_>, purpose: Purpose, name: Str<'_>) -> Option<Read<'static>> {
    if !ctx.in_cluster() {
        return None;
    }
    let (may_write, of_several_keys) = match purpose {
        Purpose::Reconcile(_) => (true, false),
        Purpose::CheckHold(mode) | Purpose::Release(mode) => (true, is_of_several_keys(mode)),
        Purpose::Sweep => (true, true),
        // While the lock's slot is on its way, the log entry of a long wait names no holder.
        Purpose::LongWait => (false, true),
        Purpose::Command | Purpose::TimeOut | Purpose::Holders | Purpose::GrantSeveral(_) => {
            (false, false)
        }
    };
    let is_release = matches!(purpose, Purpose::Release(_));
    if may_write {
        match presence(ctx, name) {
            Presence::Here => {}
            Presence::Unknown => return Some(Read::Unknown),
            // The slot has no owner, or this node is about to get it and serves it only to clients
            // that send ASKING: the hold must end here, but later.
            Presence::Elsewhere if is_release && is_there(ctx, name) => return Some(Read::Unknown),
            // The hold is not at this node any more, so nothing is left to release.
            Presence::Elsewhere if is_release => return Some(Read::NotHere(0)),
            Presence::Elsewhere => {
                let moved = cluster::redirection(ctx, name.bytes());
                return Some(moved.map_or(Read::Unknown, Read::Elsewhere));
            }
        }
    }
    let is_torn = of_several_keys && !slot_is_settled(ctx, name.bytes());
    is_torn.then_some(Read::Unknown)
}

/// Whether the key is at this node, whoever serves it.
fn is_there(ctx: Ctx<'_>, name: Str<'_>) -> bool {
    Key::open_to_peek(ctx, name).key_type() != KeyType::Missing
}

/// Whether a hold in this mode is stored in several keys.
fn is_of_several_keys(mode: Mode) -> bool {
    matches!(mode, Mode::Read | Mode::Write)
}

/// Whether a decision about this lock must know that all of its keys are at this node.
fn needs_all_keys(purpose: Purpose, stored: &Stored) -> bool {
    let mode = match purpose {
        Purpose::Reconcile(mode) => mode,
        Purpose::Command | Purpose::GrantSeveral(_) => Mode::Plain,
        _ => return false,
    };
    mode != Mode::Plain || matches!(stored, Stored::NoHolder | Stored::ReadWrite(_))
}

/// Whether the reading of a lock is complete. A read-write lock is stored in several keys, and
/// while its slot moves some of them may be at another node: it must not look free, not even to the
/// owner of a plain lock. Nor may the limit be missing by which waiters for permits are granted.
fn is_whole(lock: &OpenLock<'_>, purpose: Purpose, stored: &Stored) -> bool {
    if !lock.ctx.in_cluster() || !needs_all_keys(purpose, stored) {
        return true;
    }
    // Closed first: the server looks up two other keys. If another client wrote them and they have
    // expired, listeners may change this key.
    lock.key.set_aside();
    slot_is_settled(lock.ctx, lock.name.bytes())
}
