//! Long waits: each is logged once, when it has lasted for `rlock.log-waits-ms`.

use crate::decisions::decision::Decision;
use crate::interface::depth::ReadDepth;
use crate::interface::effect::Effect;
use crate::interface::stored::HeldBy;
use crate::interface::task::{Purpose, Read, Subject, Task};
use crate::memory::log::event_log::LogEvent;
use crate::memory::state::Locks;
use crate::turn::turn::Turn;
use crate::values::ids::WaiterId;
use crate::values::lock_key::LockRef;
use crate::values::must_exist::MustExist;
use crate::values::time::{NEVER, Now, ttl_ms};
use crate::values::word::Word;
use std::fmt::Write as _;
use std::rc::Rc;

/// A turn notes long waits for no longer than this, since each reads the holders of its lock: the
/// waiters whose wait is over must be told in time.
const NOTING_MAX_MS: i64 = 5;

impl Locks {
    /// Makes the looks that are due, until one finds a long wait. Its task reads the lock, so
    /// that the logs can name the holder.
    pub(crate) fn next_long_wait(&mut self, turn: &mut Turn<'_>, now: Now) -> Option<Task> {
        while !turn.budget.has_taken(NOTING_MAX_MS, now)
            && let Some((queue, is_of_key, long)) = self.table.take_look(turn.looks, now)
        {
            turn.looks = turn.looks.saturating_add(1);
            if is_of_key {
                self.mark_queue(queue);
            }
            // A wait for several locks is logged once, for its first waiter.
            let main = long.filter(|id| self.main_waiter(*id) == Some(*id));
            let lock = main.and_then(|id| self.lock_of(self.held_up_at(id)));
            let waiter = main.and_then(|id| self.table.get(id));
            if let (Some(lock), Some(waiter)) = (lock, waiter) {
                let subject = Subject::One(lock, Rc::clone(&waiter.owner));
                return Some(self.task(subject, ReadDepth::Brief, Purpose::LongWait));
            }
        }
        None
    }

    /// For a wait for several locks, its waiter at a lock that is held, as far as is known; else
    /// the waiter itself.
    fn held_up_at(&self, id: WaiterId) -> WaiterId {
        let mut waiters = self.members(&id).iter();
        let is_held = |waiter: &&WaiterId| self.table.is_leased(**waiter);
        waiters.find(is_held).copied().unwrap_or(id)
    }

    /// Says how many lines were left out of the server's log, when there is room for it.
    pub(crate) fn say_left_out(&mut self, now: Now, effects: &mut Vec<Effect>) {
        if let Some(left_out) = self.log_lines.take_left_out(now) {
            effects.push(Effect::Log(format!(
                "{left_out} more long waits were left out of this log"
            )));
        }
    }

    fn describe_holder(&self, text: &mut String, lock: LockRef<'_>, held_by: &HeldBy, now: Now) {
        let HeldBy { owner, mode, .. } = held_by;
        let token = held_by.token;
        let view = self.hold_view(lock, owner, *mode, token, now);
        let _ = write!(text, "held by '{}'", Word::new(owner));
        if let Some(held_ms) = view.held_ms {
            let _ = write!(text, " for {held_ms} ms");
        }
        if let Some(token) = token {
            let _ = write!(text, ", token {}", token.get());
        }
        if let Some(session) = &view.session {
            let _ = write!(text, ", session '{}'", Word::new(session));
        }
        let ends_at = Some(held_by.ends_at).filter(|end| *end != NEVER);
        let _ = match ttl_ms(ends_at, now) {
            -1 => write!(text, ", its lease has no end"),
            left_ms => write!(text, ", {left_ms} ms of its lease are left"),
        };
    }
}

impl Decision<'_> {
    /// Logs a long wait: in the core's log, and in the server's log while there is room.
    pub(crate) fn log_long_wait(&mut self, at: WaiterId, read: &Read<'_>) {
        let (locks, now) = (&mut *self.locks, self.now);
        let Some(lock) = locks.lock_of(at).must_exist() else {
            return;
        };
        let position = locks.table.position(at);
        let Some(waiter) = locks.table.get(at).must_exist() else {
            return;
        };
        let owner = Rc::clone(&waiter.owner);
        let waited_ms = now.mono_ms.saturating_sub(waiter.since);
        let several = match waiter.multi {
            Some(_) => " for this lock and others",
            None => "",
        };
        let mut text =
            format!("has waited{several} for {waited_ms} ms, number {position} in the queue; ");
        match read {
            Read::Holder(Some(held_by)) => {
                locks.describe_holder(&mut text, lock.as_ref(), held_by, now);
            }
            Read::Holder(None) => text.push_str("nobody holds it now"),
            _ => text.push_str("who holds it cannot be told now"),
        }
        locks.say_left_out(now, self.effects);
        if locks.log_lines.take(now) {
            let (name, db, owner) = (Word::new(&lock.name), lock.db, Word::new(&owner));
            self.effects.push(Effect::Log(format!(
                "long wait for the lock '{name}' of database {db}: '{owner}' {text}"
            )));
        }
        let lock = lock.as_ref();
        let log = &mut locks.log;
        log.add(LogEvent::LongWait, lock, Some(&owner), None, text, now);
    }
}
