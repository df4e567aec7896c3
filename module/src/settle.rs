//! Lines brought in agreement with their keys, and waits for several locks with all of theirs.
//!
//! A step can allow more than it does itself: after one reader the next, after one of several locks
//! all of them. Each of these needs another key, or the same one as another owner sees it, so it is
//! a step of its own; but all are made before the command is over, and nobody comes between.

use crate::ffi::{Ctx, OwnedStr, Presence, Str};
use crate::keys::OpenLock;
use crate::read_write::slot_is_settled;
use crate::{cluster, effects, state};
use rlock_core::{Due, LockKey, LockRef, Mode, MultiId, PendingRelease, ReadDepth, Stored};
use std::rc::Rc;

/// Does what the step just made has left to do.
pub(crate) fn go_on(ctx: Ctx<'_>) {
    if state::with(|state| state.going_on || !state.locks.is_anything_due()) {
        return;
    }
    // What is done here is made of steps, too: they leave what follows from them to this loop.
    together(ctx, || {});
}

/// Makes several steps, and only then does what they have left to do.
pub(crate) fn together<R>(ctx: Ctx<'_>, steps: impl FnOnce() -> R) -> R {
    let Some(_going_on) = GoingOn::begin() else {
        return steps();
    };
    let result = steps();
    let in_cluster = ctx.in_cluster();
    while let Some(due) = state::with(|state| state.locks.next_due()) {
        match due {
            Due::Line(lock) => line(ctx, &lock, in_cluster),
            Due::MultiWait(id, locks, owner) => joint(ctx, id, &locks, &owner, in_cluster),
        }
    }
    result
}

/// While it lives, steps leave what follows from them to the one loop. It ends with the work,
/// however that ends.
struct GoingOn;

impl GoingOn {
    /// None if the loop is under way.
    fn begin() -> Option<Self> {
        let under_way = state::with(|state| std::mem::replace(&mut state.going_on, true));
        (!under_way).then_some(Self)
    }
}

impl Drop for GoingOn {
    fn drop(&mut self) {
        state::with(|state| state.going_on = false);
    }
}

/// Ends what must end at a lock before anything else is done there. An owner whose hold is about to
/// end with its session would enter it again, and have nothing a moment later. Whether the lock
/// became free by it: who has it now was granted it here.
pub(crate) fn endings(ctx: Ctx<'_>, name: Str<'_>) -> bool {
    let mut was_freed = false;
    if !state::with(|state| state.locks.is_anything_ending()) {
        return was_freed;
    }
    let lock = LockRef {
        db: ctx.db(),
        name: name.bytes(),
    };
    while let Some(next) = state::with(|state| state.locks.next_ending_of(lock)) {
        was_freed |= ending(ctx, &next, ctx.in_cluster());
    }
    was_freed
}

/// Ends a hold that nobody is left to know of. Whether the lock became free by it.
pub(crate) fn ending(ctx: Ctx<'_>, ending: &PendingRelease, in_cluster: bool) -> bool {
    if ending.mode != Mode::Plain && in_cluster && !slot_is_settled(ctx, &ending.lock.name) {
        // Its lease ends it, at the node where it is by then.
        return false;
    }
    ctx.select_db(ending.lock.db);
    let (name, owner) = (
        OwnedStr::new(&ending.lock.name),
        OwnedStr::new(&ending.owner),
    );
    let open = OpenLock::to_write_as_it_is(ctx, name.as_str());
    let stored = open.load(owner.as_str(), ReadDepth::Whole);
    effects::step(open, Some(owner.as_str()), |locks, _, now, effects| {
        locks.end(ending, stored, now, effects)
    })
}

/// Settles the line of a lock that was found free, for a newcomer that must not overtake it.
pub(crate) fn first(ctx: Ctx<'_>, name: Str<'_>) {
    let lock = LockKey {
        db: ctx.db(),
        name: Rc::from(name.bytes()),
    };
    line(ctx, &lock, ctx.in_cluster());
}

/// Settles a line, as the first in it sees the key.
///
/// What must end at the lock ends before anybody asks who is first. Were it to end after that, it
/// could grant the first; the key, read for that one, would look open to it, and the next in line
/// would be granted beside it.
pub(crate) fn line(ctx: Ctx<'_>, lock: &LockKey, in_cluster: bool) {
    let name = OwnedStr::new(&lock.name);
    ctx.select_db(lock.db);
    endings(ctx, name.as_str());
    let Some(first) = state::with(|state| state.locks.first_owner(lock.as_ref())) else {
        return;
    };
    let presence = presence(ctx, name.as_str(), in_cluster);
    let moved = match presence {
        Presence::Elsewhere => cluster::redirection(ctx, &lock.name),
        Presence::Here | Presence::Unknown => None,
    };
    let first = OwnedStr::new(&first);
    let open = OpenLock::to_write_as_it_is(ctx, name.as_str());
    let stored = open.load(first.as_str(), depth(lock));
    let is_whole = is_whole(&open, &stored, in_cluster);
    effects::step(open, None, |locks, at, now, effects| {
        match (presence, &moved) {
            (Presence::Here, _) if is_whole => locks.settle(at, stored, now, effects),
            (Presence::Elsewhere, Some(refusal)) => locks.dismiss_all(at, refusal, effects),
            // Nobody knows who serves the key. Here it looks free: a grant could be the second.
            _ => locks.look_again(at, now),
        }
    });
}

/// How much must be read for the first in line. Many readers can come in together, one a step:
/// were each to read what those before it have, the time would grow with the square of their
/// number.
fn depth(lock: &LockKey) -> ReadDepth {
    match state::with(|state| state.locks.first_mode(lock.as_ref())) {
        Some(Mode::Read) => ReadDepth::Brief,
        // Who waits to write is to know when the last reader's lease ends.
        Some(Mode::Write | Mode::Plain) | None => ReadDepth::Whole,
    }
}

/// Whether what is stored of a lock is all there is of it. A read-write lock is in several keys,
/// and while its slot moves some of them may be elsewhere.
fn is_whole(lock: &OpenLock<'_>, stored: &Stored, in_cluster: bool) -> bool {
    let of_several_keys = || {
        let waited_for = state::with(|state| state.locks.first_mode(lock.at()));
        *stored == Stored::NoHolder
            || matches!(stored, Stored::ReadWrite(_))
            || waited_for.is_some_and(|mode| mode != Mode::Plain)
    };
    !in_cluster || !of_several_keys() || slot_is_settled(lock.ctx, lock.name.bytes())
}

/// Grants a wait for several locks if it can have all.
fn joint(ctx: Ctx<'_>, id: MultiId, locks: &[LockKey], owner: &Rc<[u8]>, in_cluster: bool) {
    let keys: Vec<OwnedStr> = locks.iter().map(|lock| OwnedStr::new(&lock.name)).collect();
    if let Some(lock) = locks.first() {
        ctx.select_db(lock.db);
    }
    for (lock, key) in locks.iter().zip(&keys) {
        if presence(ctx, key.as_str(), in_cluster) != Presence::Here {
            // Its line is looked at in a moment, which tells those in it where to go.
            state::with(|state| state.locks.touched(lock.as_ref()));
            return;
        }
    }
    // Before any of them is read: what ends at a later one may let somebody in at an earlier one.
    for key in &keys {
        endings(ctx, key.as_str());
    }
    let owner = OwnedStr::new(owner);
    let load = |key: &OwnedStr| {
        OpenLock::to_write_as_it_is(ctx, key.as_str()).load(owner.as_str(), ReadDepth::Brief)
    };
    let stored: Vec<Stored> = keys.iter().map(load).collect();
    let granted = effects::step_without_key(ctx, |locks, now, effects| {
        locks.settle_joint(id, &stored, now, effects)
    });
    let Some(mut granted) = granted else { return };
    for (key, stored) in keys.iter().zip(stored) {
        let open = OpenLock::to_write_as_it_is(ctx, key.as_str());
        effects::step(open, Some(owner.as_str()), |locks, at, now, effects| {
            locks.enter_granted(at, stored, &mut granted, now, effects);
        });
    }
    effects::step_without_key(ctx, |locks, now, effects| {
        locks.tell_joint_granted(granted, now, effects);
    });
}

/// Whether this node serves the key.
pub(crate) fn presence(ctx: Ctx<'_>, name: Str<'_>, in_cluster: bool) -> Presence {
    if in_cluster {
        ctx.presence(name)
    } else {
        Presence::Here
    }
}
