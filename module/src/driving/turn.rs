//! Driving the core's loop: read what it asks for, let it decide, carry out what it says.
//!
//! Who starts a turn is a command, or the timer in `pump`. What comes next, and in which order, the
//! core says.

use crate::clock;
use crate::driving::pump;
use crate::ffi::{self, Ctx, OwnedStr, Presence, Scan, Str};
use crate::memory::state;
use crate::reading::cluster;
use crate::reading::keys::{Access, OpenLock, READ_ANEW_MAX};
use crate::reading::read_write::{begin_looks, has_looks, slot_is_settled};
use crate::writing::effects;
use rlock_core::{
    CommandError, Effect, LockKey, Mode, Now, Outcome, Purpose, Read, Stored, Subject, Task, Turn,
};

/// What a command names: its locks and its owner, as the server's own strings.
#[derive(Clone, Copy)]
pub(crate) enum Named<'a> {
    /// Nothing: it is the timer's turn.
    Nothing,
    One(Str<'a>, Str<'a>),
    /// BREAK, which names a lock alone.
    Whoever(Str<'a>),
    Several(&'a [Str<'a>], Str<'a>),
}

/// Does what there is to do in a turn: nothing while another turn's decision is being written.
/// Returns the moment of the last decision, if both clocks were read for it.
///
/// The timer is armed with that, unless the caller is to wait: then it is when the caller has
/// joined a queue, or was turned away.
pub(crate) fn run(ctx: Ctx<'_>, turn: &mut Turn<'_>, given: Named<'_>) -> Option<Now> {
    run_then(ctx, turn, given, |_| ())
}

/// The same. As soon as the command is decided, and before anything else is, `then` does something
/// with its outcome, in the database of the command.
pub(crate) fn run_then(
    ctx: Ctx<'_>,
    turn: &mut Turn<'_>,
    given: Named<'_>,
    then: impl FnOnce(&Result<Outcome, CommandError>),
) -> Option<Now> {
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
        // Others' locks may be in other databases.
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
    // Before a caller has joined, the timer would be armed without the end of its wait.
    if !matches!(turn.decided(), Some(Ok(Outcome::MustWait { .. }))) {
        pump::arm_at(ctx, now, is_full);
    }
    // What it has brought about may have been in another database.
    if roams {
        ctx.select_db(db);
    }
    is_full.then_some(now)
}

/// One task, from reading to carrying out.
struct Step<'s, 'c, 't> {
    ctx: Ctx<'c>,
    turn: &'s mut Turn<'t>,
    now: Now,
}

impl Step<'_, '_, '_> {
    fn take(self, task: &Task, given: Named<'_>) {
        // A search asks for the holders of one lock after the other: all of it is one decision.
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
        let lock = OpenLock::open(ctx, name, access(purpose));
        match purpose {
            Purpose::Holders => {
                let holders = lock.read(OpenLock::holders);
                drop(lock);
                let read = if has_looks() {
                    Read::Owners(&holders)
                } else {
                    Read::Unknown
                };
                self.decide_and_tell(task, read);
            }
            Purpose::LongWait => {
                let holder = lock.read(|lock| lock.first_holder(self.now));
                drop(lock);
                self.decide_and_tell(task, Read::Holder(holder));
            }
            Purpose::Sweep => {
                let (readers, more) = some_gone(&lock, task, self.now);
                let readers = &readers;
                let effects = self.decide(task, Read::Gone { readers, more });
                effects::carry_out(ctx, &mut [lock], owner, effects);
            }
            _ if task.is_about_queue_for_permits() => {
                let (stored, others, is_whole) = lock.read(|lock| {
                    let (stored, others) = lock.load_for_queue(owner, task, self.now);
                    (stored, others, is_whole(lock, purpose, &stored))
                });
                let read = match &stored {
                    _ if !is_whole => Read::Unknown,
                    Stored::Permits(hash) => Read::Permits(hash, &others),
                    stored => Read::One(stored),
                };
                let effects = self.decide(task, read);
                effects::carry_out(ctx, &mut [lock], owner, effects);
            }
            _ => {
                let (stored, is_whole) = lock.read(|lock| {
                    let stored = lock.load(owner, task, self.now);
                    (stored, is_whole(lock, purpose, &stored))
                });
                let read = if is_whole {
                    Read::One(&stored)
                } else {
                    Read::Unknown
                };
                let effects = self.decide(task, read);
                effects::carry_out(ctx, &mut [lock], owner, effects);
            }
        }
    }

    /// A lock whoever holds it.
    fn whoever(mut self, task: &Task, name: Str<'_>) {
        let lock = OpenLock::open(self.ctx, name, Access::Write);
        let now = self.now;
        let (stored, holders) = lock.read(|lock| lock.load_with_holders(now));
        let effects = self.decide(task, Read::Holds(stored, &holders));
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
            // One key at a time is open while they are read. A key that has expired is deleted when
            // it is opened or looked at, and whoever listens to that may do anything to the others.
            let load =
                |name| OpenLock::open(ctx, name, access).read(|lock| lock.load(owner, task, now));
            let stored: Vec<Stored> = names.iter().copied().map(load).collect();
            let open = |name| OpenLock::open(ctx, name, access);
            let locks: Vec<OpenLock<'_>> = names.iter().copied().map(open).collect();
            (stored, locks)
        };
        let (mut before, mut found) = (ffi::keys_expired(), read());
        for _ in 0..READ_ANEW_MAX {
            let after = ffi::keys_expired();
            if after == before {
                break;
            }
            before = after;
            found.1.clear();
            found = read();
        }
        let (stored, mut locks) = found;
        if let Some(place) = first_torn(&locks, task.purpose, &stored) {
            drop(locks);
            let read = match task.purpose {
                Purpose::GrantSeveral(_) => Read::NotHere(place),
                _ => Read::Unknown,
            };
            return self.decide_and_tell(task, read);
        }
        let effects = self.decide(task, Read::Several(&stored));
        effects::carry_out(ctx, &mut locks, owner, effects);
    }

    /// The state is lent for the decision only: what follows calls the server, which may call us.
    fn decide(&mut self, task: &Task, read: Read<'_>) -> Vec<Effect> {
        let (turn, now) = (&mut *self.turn, self.now);
        state::with(|state| {
            let mut effects = std::mem::take(&mut state.spare_effects);
            let reading = task.found(read);
            state.locks.decide(turn, reading, now, &mut effects);
            effects
        })
    }

    /// Of a decision that can write nothing.
    fn decide_and_tell(&mut self, task: &Task, read: Read<'_>) {
        let effects = self.decide(task, read);
        effects::tell_all(self.ctx, effects);
    }
}

/// The first of several locks of which not all is here.
fn first_torn(locks: &[OpenLock<'_>], purpose: Purpose, stored: &[Stored]) -> Option<usize> {
    let mut each = locks.iter().zip(stored);
    each.position(|(lock, stored)| !is_whole(lock, purpose, stored))
}

/// Some of the readers that are gone, going on where the last sweep of this lock has stopped.
/// Whether there are more to be looked at.
fn some_gone(lock: &OpenLock<'_>, task: &Task, now: Now) -> (Vec<Box<[u8]>>, bool) {
    let Subject::One(key, _) = &task.subject else {
        return (Vec::new(), false);
    };
    let scan = state::with(|state| state.sweeps.remove(key));
    let scan = scan.unwrap_or_else(Scan::begin);
    let mut gone = Vec::new();
    let more = lock.readers_gone(&scan, now, &mut gone);
    if more {
        state::with(|state| state.keep_sweep(key.clone(), scan));
    }
    if !lock.is_up_to_date() {
        // A walk cannot be gone twice, so those that it found are looked at once more.
        gone = lock.read(|lock| lock.still_gone(&gone, now));
    }
    (gone, more)
}

fn access(purpose: Purpose) -> Access {
    match purpose {
        Purpose::TimeOut | Purpose::LongWait | Purpose::Holders | Purpose::CheckWriter => {
            Access::Read
        }
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

/// What is found of a lock that this node may not write, or of which it has not all keys. For a
/// command's own locks the server has seen to that.
///
/// The core may decide to write wherever it reads for one of these purposes. A node whose cluster
/// is down, and whose replica may have been promoted by then, must not: the hold lives on at the
/// other.
fn not_here(ctx: Ctx<'_>, purpose: Purpose, name: Str<'_>) -> Option<Read<'static>> {
    if !ctx.in_cluster() {
        return None;
    }
    let (may_write, of_several_keys) = match purpose {
        Purpose::Reconcile(_) => (true, false),
        Purpose::CheckHold(mode) | Purpose::Release(mode) => (true, is_of_several_keys(mode)),
        Purpose::CheckWriter | Purpose::Sweep => (true, true),
        // Of a long wait nothing is said of who holds a lock that is another node's, or on its way.
        Purpose::LongWait => (false, true),
        Purpose::Command | Purpose::TimeOut | Purpose::Holders | Purpose::GrantSeveral(_) => {
            (false, false)
        }
    };
    if may_write {
        match presence(ctx, name) {
            Presence::Here => {}
            Presence::Unknown => return Some(Read::Unknown),
            // It is not held here any more, so there is nothing to release.
            Presence::Elsewhere if matches!(purpose, Purpose::Release(_)) => {
                return Some(Read::NotHere(0));
            }
            Presence::Elsewhere => {
                let moved = cluster::redirection(ctx, name.bytes());
                return Some(moved.map_or(Read::Unknown, Read::Elsewhere));
            }
        }
    }
    let is_torn = of_several_keys && !slot_is_settled(ctx, name.bytes());
    is_torn.then_some(Read::Unknown)
}

/// Whether a hold in this mode is in several keys.
fn is_of_several_keys(mode: Mode) -> bool {
    matches!(mode, Mode::Read | Mode::Write)
}

/// Whether what is stored of a lock is all there is of it. A read-write lock is in several keys,
/// and while its slot moves some of them may be elsewhere: it must not look free, to a plain lock's
/// owner either. Nor must a limit be missing by which waiters for permits are measured.
fn is_whole(lock: &OpenLock<'_>, purpose: Purpose, stored: &Stored) -> bool {
    let mode = match purpose {
        Purpose::Reconcile(mode) => mode,
        Purpose::Command | Purpose::GrantSeveral(_) => Mode::Plain,
        _ => return true,
    };
    let of_several_keys =
        mode != Mode::Plain || matches!(stored, Stored::NoHolder | Stored::ReadWrite(_));
    if !lock.ctx.in_cluster() || !of_several_keys {
        return true;
    }
    // The server is asked about other keys, which somebody may have written, with an end.
    lock.key.set_aside();
    slot_is_settled(lock.ctx, lock.name.bytes())
}
