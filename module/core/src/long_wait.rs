//! Waits that last for long: each is noticed once, when it has lasted for `rlock.log-waits-ms`.

use crate::error::Word;
use crate::event_log::LogEvent;
use crate::lock::Locks;
use crate::stored::{HeldBy, ttl_ms};
use crate::table::{LockKey, LockRef, Waiter, WaiterId};
use crate::task::{Purpose, Read, Subject, Task};
use crate::time::earlier;
use crate::{Effect, NEVER, Now, ReadDepth};
use std::collections::VecDeque;
use std::fmt::Write as _;
use std::rc::Rc;

/// The waiters that were not noticed yet, in the order in which they began: that of their moments
/// too, since all are noticed after the same time.
#[derive(Debug, Default)]
pub(crate) struct Unnoticed {
    /// With the moment at which each began, monotonic, in milliseconds.
    waiters: VecDeque<(i64, WaiterId)>,
}

/// Those who have left are forgotten when they are first, or more than so many and half of all.
pub(crate) const LEFT_MAX: usize = 64;

impl Unnoticed {
    pub(crate) fn joined(&mut self, id: WaiterId, now: Now) {
        self.waiters.push_back((now.mono_ms, id));
    }

    /// A waiter has left, and so many are there. The first is always one of them.
    pub(crate) fn left(
        &mut self,
        id: WaiterId,
        is_there: impl Fn(WaiterId) -> bool,
        waiters: usize,
    ) {
        if self.waiters.front().is_some_and(|(_, first)| *first == id) {
            self.pop(is_there);
        } else if self.waiters.len() > waiters.saturating_mul(2).saturating_add(LEFT_MAX) {
            self.waiters.retain(|(_, id)| is_there(*id));
            self.waiters.shrink_to(waiters.saturating_mul(2));
        }
    }

    /// Since when the first of them has waited.
    pub(crate) fn first(&self) -> Option<(i64, WaiterId)> {
        self.waiters.front().copied()
    }

    /// The first was noticed.
    pub(crate) fn pop(&mut self, is_there: impl Fn(WaiterId) -> bool) {
        self.waiters.pop_front();
        while let Some((_, first)) = self.waiters.front()
            && !is_there(*first)
        {
            self.waiters.pop_front();
        }
    }

    #[cfg(test)]
    pub(crate) fn len(&self) -> usize {
        self.waiters.len()
    }
}

impl Locks {
    /// When there is something to be logged next, monotonic, in milliseconds.
    #[inline]
    pub(crate) fn next_log_at(&self) -> Option<i64> {
        // The common case: nobody waits, and no line was left out.
        if self.table.first_unnoticed().is_none() && self.log_lines.are_whole() {
            return None;
        }
        earlier(self.log_lines.deadline(), self.next_long_wait_at())
    }

    /// When the next wait is long, monotonic, in milliseconds.
    fn next_long_wait_at(&self) -> Option<i64> {
        let (since, _) = self.table.first_unnoticed()?;
        let after_ms = self.log.options.waits_ms;
        (after_ms > 0).then(|| since.saturating_add(after_ms))
    }

    /// The next wait that is long by now: the lock is read to say who keeps it waiting.
    pub(crate) fn next_long_wait(&mut self, now: Now) -> Option<Task> {
        while self.next_long_wait_at().is_some_and(|at| at <= now.mono_ms) {
            let (_, id) = self.table.first_unnoticed()?;
            // A wait for several locks is one wait.
            let main = self.main_waiter(id).filter(|main| *main == id);
            if let Some(lock) = main.and_then(|id| self.lock_of(self.held_up_at(id))) {
                let subject = Subject::One(lock, Rc::from([]));
                return Some(self.task(subject, ReadDepth::Brief, Purpose::LongWait));
            }
            self.table.pop_unnoticed();
        }
        None
    }

    /// Of a wait for several locks, its waiter at one that is held, as far as is known.
    fn held_up_at(&self, id: WaiterId) -> WaiterId {
        let multi = self.table.get(id).and_then(|waiter| waiter.multi);
        let waiters = multi.map_or(&[][..], |multi| self.multis.waiters(multi));
        let is_held = |waiter: &&WaiterId| self.table.is_leased(**waiter);
        waiters.iter().find(is_held).copied().unwrap_or(id)
    }

    /// Says once that a wait is long, in both logs.
    pub(crate) fn decide_long_wait(
        &mut self,
        lock: &LockKey,
        read: &Read<'_>,
        now: Now,
        effects: &mut Vec<Effect>,
    ) {
        let Some((_, id)) = self.table.first_unnoticed() else {
            return;
        };
        self.table.pop_unnoticed();
        let at = self.held_up_at(id);
        let position = self.table.position(at);
        let Some(waiter) = self.table.get(at) else {
            return;
        };
        let owner = Rc::clone(&waiter.owner);
        let mut text = described(waiter, position, now);
        match read {
            Read::Holder(Some(held_by)) => {
                self.describe_holder(&mut text, lock.as_ref(), held_by, now);
            }
            Read::Holder(None) => text.push_str("nobody holds it now"),
            _ => text.push_str("who holds it cannot be told now"),
        }
        self.say_left_out(now, effects);
        if self.log_lines.take(now) {
            let (name, db, owner) = (Word::new(&lock.name), lock.db, Word::new(&owner));
            effects.push(Effect::Log(format!(
                "long wait for the lock '{name}' of database {db}: '{owner}' {text}"
            )));
        }
        let lock = lock.as_ref();
        self.log
            .add(LogEvent::LongWait, lock, Some(&owner), None, text, now);
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
        let token = held_by
            .token
            .or_else(|| self.writer_token(lock, owner, held_by.key_end()));
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
        let _ = match ttl_ms(held_by.key_end(), now) {
            -1 => write!(text, ", its lease has no end"),
            left_ms => write!(text, ", {left_ms} ms of its lease are left"),
        };
    }
}

impl HeldBy {
    fn key_end(&self) -> Option<i64> {
        Some(self.ends_at).filter(|end| *end != NEVER)
    }
}

fn described(waiter: &Waiter, position: i64, now: Now) -> String {
    let waited_ms = now.mono_ms.saturating_sub(waiter.since);
    let several = if waiter.multi.is_some() {
        " for this lock and others"
    } else {
        ""
    };
    format!("has waited{several} for {waited_ms} ms, number {position} in the queue; ")
}
