//! What is decided with each reading: the second half of the loop.

use crate::decisions::decision::{Acquired, Decision};
use crate::decisions::several::{LockSet, ttl_of_others_ms};
use crate::interface::depth::ReadDepth;
use crate::interface::effect::{Effect, WaitOutcome, Write};
use crate::interface::error::CommandError;
use crate::interface::event::EventKind;
use crate::interface::outcome::Outcome;
use crate::interface::request::{MultiRenew, Renew};
use crate::interface::stored::Stored;
use crate::interface::task::{Command, Purpose, Read, Reading, Subject, Task};
use crate::memory::log::metrics::count;
use crate::memory::state::Locks;
use crate::turn::turn::Turn;
use crate::values::ids::MultiId;
use crate::values::lock_key::LockKey;
use crate::values::mode::{Kind, Mode};
use crate::values::must_exist::MustExist;
use crate::values::time::Now;

impl Locks {
    /// Decides a task with its reading. Returns false if the reading is out of date: nothing was
    /// decided, and the task comes again.
    pub fn decide(
        &mut self,
        turn: &mut Turn<'_>,
        reading: Reading<'_>,
        now: Now,
        effects: &mut Vec<Effect>,
    ) -> bool {
        let Reading { task, read } = reading;
        // A long wait was noted when its task was handed out, and nothing is written for it.
        let is_valid = task.epoch == self.epoch || task.purpose == Purpose::LongWait;
        let Some(at) = turn.lock_of(&task.subject).filter(|_| is_valid) else {
            turn.begin_anew();
            return false;
        };
        self.invalidate();
        let waiters = self.table.waiters();
        if let Read::One(Stored::ReadWrite(hash)) = &read
            && hash.is_partial
        {
            // There are more readers than one look may check. So the timer goes through them part
            // by part and removes those whose leases are over.
            self.agenda.add_sweep(at);
        }
        let decision = Decision {
            locks: self,
            at,
            place: 0,
            now,
            effects,
        };
        decision.of_task(turn, task, &read);
        if !matches!(task.purpose, Purpose::Command | Purpose::Holders) {
            // One decision can take several waiters out.
            let left = waiters.saturating_sub(self.table.waiters());
            turn.budget.spend(left.max(1), now);
        }
        true
    }
}

impl Decision<'_> {
    #[inline]
    fn of_task(mut self, turn: &mut Turn<'_>, task: &Task, read: &Read<'_>) {
        match (task.purpose, &task.subject) {
            (Purpose::Command, _) => {
                let outcome = self.decide_command(turn, read);
                turn.finish(outcome);
            }
            (Purpose::Holders, _) => self.locks.decide_search(turn, read, self.now),
            (Purpose::TimeOut, _) => self.decide_timeout(read),
            (Purpose::LongWait, Subject::One(_, owner)) => {
                if let Some((id, _)) = self.locks.table.waiter_at(self.at, owner) {
                    self.log_long_wait(id, read);
                }
            }
            (Purpose::Release(_), _) => {
                self.decide_release(turn, task.depth == ReadDepth::Brief, read);
            }
            (Purpose::Reconcile(_), _) => self.decide_reconcile(turn.budget.decisions, read),
            (Purpose::GrantSeveral(multi), Subject::Several(locks, _)) => {
                self.decide_several(multi, locks, read);
            }
            (Purpose::CheckHold(_), _) => self.decide_hold(read),
            (Purpose::Sweep, _) => self.decide_sweep(read),
            _ => debug_assert!(false, "no decision is made so: {task:?}"),
        }
    }

    /// Returns none if more must be read before the command can be decided.
    fn decide_command(
        &mut self,
        turn: &mut Turn<'_>,
        read: &Read<'_>,
    ) -> Result<Option<Outcome>, CommandError> {
        let (reconciled, waiters_max) = (turn.is_reconciled, turn.waiters_max);
        let Some(command) = turn.command.must_exist() else {
            return Err(CommandError::Unsettled);
        };
        Ok(Some(match (command, read) {
            // CANCEL needs the reading only to tell the waiter how much of the lease is left, so it
            // works without.
            (Command::Cancel(request), Read::Unknown) => {
                Outcome::Number(self.cancel(&Stored::NoHolder, request))
            }
            (Command::Cancel(request), Read::One(stored)) => {
                Outcome::Number(self.cancel(stored, request))
            }
            (_, Read::Unknown) => return Err(CommandError::SlotOnItsWay),
            (Command::Acquire(request), Read::One(stored)) => {
                let acquired = self.acquire(stored, request, reconciled, waiters_max)?;
                return self.after_acquire(turn, acquired);
            }
            (Command::Release(request), Read::One(stored)) => {
                Outcome::Left(self.release(stored, request)?)
            }
            (Command::Renew(request), Read::One(stored)) => {
                Outcome::Number(self.renew(stored, request)?.into())
            }
            (Command::Guard(request), Read::One(stored)) => {
                self.guard(stored, request)?;
                Outcome::Guards
            }
            (Command::Limit(request), Read::One(stored)) => {
                Outcome::Number(self.set_limit(stored, request.limit)?)
            }
            // A pending release of this turn has ended the hold that BREAK meant. A waiter that was
            // granted the lock since keeps it.
            (Command::Break(_), Read::Holds(..)) if turn.freed => Outcome::Number(1),
            (Command::Break(_), Read::Holds(stored, holders, first)) => {
                let broken = self.break_hold(stored, holders, first.as_ref())?;
                Outcome::Number(broken.into())
            }
            (_, Read::Several(stored)) => {
                let locks = turn.locks();
                return self.decide_about_several(turn, command, &LockSet { locks, stored });
            }
            _ => return Err(CommandError::Unsettled),
        }))
    }

    fn decide_about_several(
        &mut self,
        turn: &mut Turn<'_>,
        command: Command<'_>,
        several: &LockSet<'_>,
    ) -> Result<Option<Outcome>, CommandError> {
        let (reconciled, waiters_max) = (turn.is_reconciled, turn.waiters_max);
        let number = match command {
            Command::MultiAcquire(request) => {
                let acquired = self.acquire_several(several, request, reconciled, waiters_max)?;
                return self.after_acquire(turn, acquired);
            }
            Command::MultiRelease(request) => self.release_several(several, request)?,
            Command::MultiRenew(request) => self.renew_several(several, request)?,
            _ => return Err(CommandError::Unsettled),
        };
        Ok(Some(Outcome::Number(number)))
    }

    #[inline]
    fn after_acquire(
        &mut self,
        turn: &mut Turn<'_>,
        acquired: Acquired,
    ) -> Result<Option<Outcome>, CommandError> {
        match acquired {
            Acquired::Decided(outcome) => Ok(Some(outcome)),
            Acquired::MustWait(wait) => self.locks.begin_wait(turn, wait, self.now),
            Acquired::ReconcileFirst => {
                turn.is_reconciled = true;
                Ok(None)
            }
        }
    }

    fn renew_several(
        &mut self,
        several: &LockSet<'_>,
        request: &MultiRenew<'_>,
    ) -> Result<i64, CommandError> {
        for (place, lock, stored) in several.each() {
            self.part(place, lock).check_kind(stored, Kind::Plain)?;
        }
        self.locks.listened(request.session)?;
        let mut renewed: i64 = 0;
        for (place, lock, stored) in several.each() {
            let request = Renew {
                key: lock.name,
                owner: request.owner,
                lease: request.lease,
                mode: Mode::Plain,
                token: None,
                session: request.session,
                wanted: false,
            };
            let one = self.part(place, lock).renew(stored, &request)?;
            renewed = renewed.saturating_add(one.into());
        }
        Ok(renewed)
    }

    fn decide_release(&mut self, turn: &mut Turn<'_>, others_are_brief: bool, read: &Read<'_>) {
        let table = &mut self.locks.table;
        let Some(record) = table.find(self.at).must_exist() else {
            return;
        };
        // Not all keys of this lock can be read here now. The timer tries again.
        if let Read::Unknown = read {
            table.retry(record, self.now);
            return turn.unreadable.push(record);
        }
        let may_outlive = table.set_outlived(record, others_are_brief);
        let Some(release) = table.take_pending(record).must_exist() else {
            return;
        };
        let Read::One(stored) = read else {
            // Another node serves the key: there the lease ends the hold, and the waiters must go
            // there.
            return self.locks.mark_queue(record);
        };
        let written = self.effects.len();
        self.end_pending(&release, stored, may_outlive && !others_are_brief);
        // Only a deletion at the command's own lock counts. A release at another lock must not make
        // BREAK leave a hold in place.
        let delete = Effect::Write {
            lock: 0,
            write: Write::Delete,
        };
        let mut written = self.effects.iter().skip(written);
        turn.freed |= turn.lock(0) == Some(self.at) && written.any(|effect| *effect == delete);
    }

    fn decide_reconcile(&mut self, most: usize, read: &Read<'_>) {
        let Some(queue) = self.locks.table.find(self.at).must_exist() else {
            return;
        };
        self.locks.table.take_dirty(queue);
        match read {
            Read::One(stored) => self.reconcile(queue, stored, None, most),
            Read::Permits(hash, others) => {
                self.reconcile(queue, &Stored::Permits(**hash), Some(others), most);
            }
            Read::Elsewhere(error) => {
                self.locks.refuse_some(queue, error, self.effects);
            }
            // It is not known which node serves the key. Here it looks free, so a grant could be
            // the second one.
            _ => self.locks.table.retry(queue, self.now),
        }
    }

    fn decide_several(&mut self, multi: MultiId, locks: &[LockKey], read: &Read<'_>) {
        if let Some(multi) = self.locks.multis.get_mut(multi).must_exist() {
            multi.marked = false;
        }
        self.locks.agenda.pop_now();
        match read {
            Read::Several(stored) => {
                let locks = locks.iter().map(LockKey::as_ref).collect();
                self.grant_several(multi, &LockSet { locks, stored });
            }
            // The next look at its queue tells the waiters which node to go to.
            Read::NotHere(place) => {
                if let Some(lock) = locks.get(*place) {
                    self.locks.mark_dirty(lock.as_ref());
                }
            }
            _ => {}
        }
    }

    fn decide_hold(&mut self, read: &Read<'_>) {
        let Some(id) = self.locks.holds.first_dirty().must_exist() else {
            return;
        };
        self.locks.pop_dirty_hold();
        match read {
            Read::One(stored) => self.check_hold(id, stored),
            // Another node serves the key now: the hold is not lost, but this node no longer
            // watches it. The session hears of the other node.
            Read::Elsewhere(moved) => {
                if let Some(hold) = self.locks.forget_hold(id) {
                    let kind = EventKind::Error(moved.clone());
                    self.locks.tell_of(hold, kind, self.effects);
                }
            }
            _ => self.locks.holds.check_again(id, self.now),
        }
    }

    fn decide_timeout(&mut self, read: &Read<'_>) {
        let Some(id) = self.locks.table.overdue(self.now).must_exist() else {
            return;
        };
        let ttl_ms = match read {
            Read::One(stored) => stored.ttl_ms(self.now),
            Read::Several([stored]) => stored.ttl_ms(self.now),
            Read::Several(stored) => ttl_of_others_ms(stored, self.now),
            _ => 0,
        };
        let ttl_ms = self.locks.ttl_or_delay_ms(ttl_ms, self.now);
        // It may have become long just now, and no look has come since.
        let main = self.locks.main_waiter(id);
        if let Some(main) = main.filter(|main| self.locks.table.is_long(*main, self.now)) {
            self.log_long_wait(main, &Read::Unknown);
        }
        let why = WaitOutcome::NotAcquired { ttl_ms };
        if self.locks.leave(id, why, self.effects).is_some() {
            count(&mut self.locks.counters.timeouts);
        }
    }

    fn decide_sweep(&mut self, read: &Read<'_>) {
        let (gone, more) = match read {
            Read::Gone { readers, more } => (*readers, *more),
            _ => (&[][..], false),
        };
        self.sweep(gone);
        if self.locks.agenda.swept(!gone.is_empty(), more, self.now)
            && let Some(queue) = self.queue()
        {
            self.locks.mark_queue(queue);
        }
    }
}
