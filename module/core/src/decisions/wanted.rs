//! WANTED: tells a session that its hold keeps another owner out, so that a long task can give the
//! lock back at a good moment.
//!
//! A session is told once, and must ask again to be told again. A hold begins to keep an owner out
//! at four moments: a waiter joins the queue, a caller that does not wait is refused, a hold asks
//! while others wait, or the first waiter in the queue is looked at and cannot be granted. After a
//! turn that put no work off, no hold is left that asks and keeps out a waiter in the queue.

use crate::decisions::decision::Decision;
use crate::decisions::several::LockSet;
use crate::interface::effect::Effect;
use crate::interface::event::EventKind;
use crate::interface::stored::{Hash, Stored};
use crate::memory::hold::SessionHold;
use crate::memory::state::Locks;
use crate::memory::table::LockTable;
use crate::values::ids::{RecordId, WaiterId};
use crate::values::lock_key::LockRef;
use crate::values::mode::Mode;
use std::rc::Rc;

impl SessionHold {
    /// Whether this hold keeps the owner out. A reader lets others read. An owner that waits for
    /// several locks does not wait for one that it holds.
    fn keeps_out(&self, owner: &[u8], mode: Mode) -> bool {
        *self.owner != *owner && !(self.mode == Mode::Read && mode == Mode::Read)
    }
}

impl Decision<'_> {
    /// Notes that the hold's session wants to be told when the lock is wanted, and tells it at once
    /// if the lock is wanted now.
    pub(crate) fn ask_if_wanted(&mut self, owner: &[u8], mode: Mode) {
        let hold = self.session_hold(owner, mode);
        let record = hold.and_then(|id| self.locks.holds.ask_if_wanted(id));
        let Some(record) = record.filter(|record| self.locks.table.length(*record) > 0) else {
            return;
        };
        match mode {
            Mode::Plain | Mode::Write => self.locks.tell_wanted_by_queue(record, self.effects),
            // The waiters may be granted beside this hold. That is decided later in this turn.
            Mode::Read | Mode::Permits => self.reconcile_now(),
        }
    }

    /// Notes that the session wants to be told when one of these locks is wanted.
    pub(crate) fn ask_if_several_wanted(&mut self, several: &LockSet<'_>, owner: &[u8]) {
        for (place, lock, _) in several.each() {
            self.part(place, lock).ask_if_wanted(owner, Mode::Plain);
        }
    }

    /// A MACQUIRE that does not wait is refused: it wants those of its locks that others hold.
    pub(crate) fn tell_several_wanted(&mut self, several: &LockSet<'_>, owner: &[u8]) {
        for (_, lock, stored) in several.each() {
            if let Stored::Plain(Hash { own: None, .. }) = stored {
                self.locks
                    .tell_wanted_by(lock, owner, Mode::Plain, self.effects);
            }
        }
    }
}

impl Locks {
    /// A wait has begun: tells the holds that keep its waiters out.
    pub(crate) fn tell_wanted_by_newcomer(&mut self, wait: WaiterId, effects: &mut Vec<Effect>) {
        for id in self.members(&wait).to_vec() {
            if let (Some(lock), Some(waiter)) = (self.lock_of(id), self.table.get(id)) {
                let (owner, mode) = (Rc::clone(&waiter.owner), waiter.mode);
                self.tell_wanted_by(lock.as_ref(), &owner, mode, effects);
            }
        }
    }

    /// The owner wants this lock, as a waiter or as a caller that does not wait: tells the holds
    /// that keep it out.
    pub(crate) fn tell_wanted_by(
        &mut self,
        lock: LockRef<'_>,
        owner: &[u8],
        mode: Mode,
        effects: &mut Vec<Effect>,
    ) {
        let Some(record) = self.table.find(lock) else {
            return;
        };
        let keeps_out = |_: &LockTable, hold: &SessionHold| hold.keeps_out(owner, mode);
        self.tell_holds(record, keeps_out, effects);
    }

    /// The first waiter in a queue cannot be granted: tells the holds that keep the queue out.
    pub(crate) fn tell_wanted_by_queue(&mut self, queue: RecordId, effects: &mut Vec<Effect>) {
        let keeps_out = |table: &LockTable, hold: &SessionHold| {
            table.is_anybody_kept_out(queue, &hold.owner, hold.mode)
        };
        self.tell_holds(queue, keeps_out, effects);
    }

    /// Tells the holds of a lock that asked and that keep somebody out.
    fn tell_holds(
        &mut self,
        record: RecordId,
        keeps_out: impl Fn(&LockTable, &SessionHold) -> bool,
        effects: &mut Vec<Effect>,
    ) {
        let waiters = self.table.length(record);
        let asking = self.holds.asking(record);
        let told = asking.filter(|(_, hold)| keeps_out(&self.table, hold));
        let told: Vec<_> = told.map(|(id, hold)| (id, hold.clone())).collect();
        for (id, hold) in told {
            self.holds.ask_no_more(id);
            self.tell_of(hold, EventKind::Wanted { waiters }, effects);
        }
    }
}
