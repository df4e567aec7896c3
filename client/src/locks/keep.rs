//! Locks that are kept for their next use: a hold that its guard has given back stays here for a
//! while, until somebody else wants it.
//!
//! A kept lock has one slot for all callers of the process. A guard has the turn there for as long
//! as it has the lock, so the callers exclude each other without the server, and one of them at a
//! time asks it, as an owner of its own.

use std::hash::{Hash, Hasher};
use std::sync::atomic::Ordering;
use std::sync::{Arc, Weak};
use std::time::Duration;

use tokio::time::Instant;

use crate::locks::table::Turn;
use crate::locks::{Context, Held, Hold, HoldOptions, SlotId, State};
use crate::task;

/// Calls that ask for other terms are strangers to each other: one would have what the other asked
/// for.
#[derive(Clone, PartialEq, Eq)]
pub(crate) struct KeptKey {
    pub(crate) name: Arc<[u8]>,
    pub(crate) options: HoldOptions,
    pub(crate) idle: Duration,
}

impl Hash for KeptKey {
    /// The name alone: few locks are kept on several terms.
    fn hash<H: Hasher>(&self, state: &mut H) {
        self.name.hash(state);
    }
}

/// Since when a lock is idle, and a number.
pub(super) type Place = (Instant, u64);

/// Whether the next caller may have a kept lock: it is still held, no other client wants it, and it
/// needs half of its lease and of its longest hold. The session must be connected, or a loss would
/// be heard too late.
pub(super) fn is_fit(hold: &Hold, now: Instant) -> bool {
    hold.is_watched() && may_be_kept(hold, now) && hold.leaves_half(now)
}

/// Whether the lock may be kept: it is still held, and no other client wants it.
fn may_be_kept(hold: &Hold, now: Instant) -> bool {
    hold.lost(now).is_none() && hold.wanted.may_be_kept()
}

impl Held {
    /// It is the next use of a kept lock, which has the turn.
    pub(super) fn is_next_use(&mut self, state: &mut State) {
        self.stays = true;
        self.hold.wanted.begins_anew();
        state.take_turn(self.slot, Turn::Used);
    }
}

impl State {
    /// Whether more locks are idle than may be kept.
    pub(super) fn are_many_idle(&self) -> bool {
        self.idle.len() > self.kept_max
    }

    /// Keeps no lock from now on. Those that nobody uses are taken out for their release, though
    /// callers may stand in line.
    #[must_use = "they are to be released"]
    pub(super) fn keep_none(&mut self) -> Vec<(Arc<Hold>, SlotId)> {
        self.keeps_none = true;
        let kept: Vec<SlotId> = self.kept.values().copied().collect();
        let ends = |id| {
            self.at(id).filter(|slot| slot.turn.is_none())?;
            Some((self.ends_idle(id)?, id))
        };
        kept.into_iter().filter_map(ends).collect()
    }

    /// Takes a kept lock out for its release, which nobody uses or which is lost.
    fn ends_idle(&mut self, id: SlotId) -> Option<Arc<Hold>> {
        let hold = self.release_first(id);
        hold.or_else(|| self.pass_turn(id))
    }
}

impl Context {
    /// The lock that is kept on these terms, if it is idle. No I/O, and nothing to wait for.
    pub(crate) fn take_idle(self: &Arc<Self>, key: &KeptKey) -> Option<Held> {
        self.table.with(|state| {
            let keeps_none = state.keeps_none;
            let id = *state.kept.get(key)?;
            let slot = state.at(id)?;
            let is_idle = slot.turn.is_none() && !slot.has_line() && !keeps_none;
            let hold = slot.hold.as_ref();
            let hold = hold.filter(|hold| is_idle && is_fit(hold, Instant::now()));
            let hold = Arc::clone(hold?);
            hold.gains_guard();
            let mut part = Held::new(self, hold, id);
            part.is_next_use(state);
            Some(part)
        })
    }

    /// Gives back the locks that have been idle longest, until there are no more than may be kept.
    pub(super) fn make_room(self: &Arc<Self>) {
        let next = |state: &mut State| {
            let oldest = state.idle.first_key_value().map(|(_, slot)| *slot);
            let slot = oldest.filter(|_| state.are_many_idle())?;
            Some((state.ends_idle(slot), slot))
        };
        while let Some((hold, slot)) = self.table.with(next) {
            if let Some(hold) = hold {
                self.send_release(&hold, slot, None);
            }
        }
    }

    /// Gives back all locks that nobody uses, and keeps none from now on.
    pub(crate) fn keep_none(self: &Arc<Self>) {
        let kept = self.table.with(State::keep_none);
        self.release_all(kept);
    }

    /// When to look again at a kept hold; never, if it is kept no more. It goes back, if another
    /// process wants it or it was idle for long enough, and its turn is passed if it is lost.
    fn look(self: &Arc<Self>, slot: SlotId, hold: &Arc<Hold>, idle: Duration) -> Option<Instant> {
        if hold.wanted.may_be_kept() && hold.listen(self).is_err() {
            // The server cannot tell: it goes back, as if it had.
            hold.wanted.goes_back.store(true, Ordering::Release);
        }
        let (now, mut next) = (Instant::now(), None);
        self.release_after(slot, |state| {
            let place = state.at(slot).filter(|place| place.has(hold))?;
            // One that is used now is idle at the earliest from now on.
            let since = place.place.map_or(now, |(since, _)| since);
            let until = since.checked_add(idle);
            let is_lost = hold.lost(now).is_some();
            let ends = match place.turn {
                Some(Turn::Used) => is_lost,
                None => until.is_none_or(|until| until <= now) || !may_be_kept(hold, now),
                // A call has the turn, and its grant gets a watch of its own.
                Some(_) => false,
            };
            if ends {
                return state.ends_idle(slot);
            }
            next = until.map(|until| until.min(hold.end()));
            next.take_if(|_| is_lost);
            None
        });
        next
    }
}

/// Watches a kept lock for as long as it is kept. It keeps no handle alive meanwhile.
pub(super) fn watch(context: &Arc<Context>, slot: SlotId, hold: &Arc<Hold>, idle: Duration) {
    let (this, hold) = (Arc::downgrade(context), Arc::clone(hold));
    let watching = async move {
        let look = || {
            let next = Weak::upgrade(&this);
            let next = next.and_then(|context| context.look(slot, &hold, idle));
            next.map_or(Ok(()), Err)
        };
        hold.until(look).await;
    };
    context.background.runtime.spawn(task(watching));
}
