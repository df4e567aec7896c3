//! What is decided with each reading: the second half of the loop.

use crate::decisions::decision::Acquired;
use crate::decisions::several::{LockSet, ttl_of_others_ms};
use crate::interface::depth::ReadDepth;
use crate::interface::effect::{Effect, WaitOutcome};
use crate::interface::error::CommandError;
use crate::interface::event::EventKind;
use crate::interface::request::{MultiRenew, Renew};
use crate::interface::stored::Stored;
use crate::interface::task::{Command, Keys, Purpose, Read, Reading, Subject};
use crate::memory::log::metrics::count;
use crate::memory::state::Locks;
use crate::turn::turn::{Outcome, Turn};
use crate::values::ids::MultiId;
use crate::values::lock_key::{LockKey, LockRef};
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
        if task.epoch != self.epoch && task.purpose != Purpose::LongWait {
            turn.begin_anew();
            return false;
        }
        self.invalidate();
        let waiters = self.table.waiters();
        if let Read::One(Stored::ReadWrite(hash)) = &read
            && hash.is_partial
        {
            self.sweep_later(turn, &task.subject);
        }
        match (task.purpose, &task.subject) {
            (Purpose::Command, _) => self.decide_command(turn, &read, now, effects),
            (Purpose::Holders, _) => self.decide_search(turn, &read, now),
            (Purpose::TimeOut, _) => self.decide_timeout(&read, now, effects),
            (Purpose::LongWait, Subject::One(lock, owner)) => {
                let queue = self.table.queue(lock.as_ref());
                if let Some((at, _)) = queue.and_then(|id| self.table.waiter_of(id, owner)) {
                    self.log_long_wait(at, &read, now, effects);
                }
            }
            (Purpose::Release(_), Subject::One(lock, _)) => {
                let others_are_brief = task.depth == ReadDepth::Brief;
                self.decide_release(turn, lock, others_are_brief, &read, now, effects);
            }
            (Purpose::Reconcile(_), Subject::One(lock, _)) => {
                self.decide_reconcile(turn, lock, read, now, effects);
            }
            (Purpose::GrantSeveral(multi), Subject::Several(locks, _)) => {
                self.decide_several(multi, locks, &read, now, effects);
            }
            (Purpose::CheckHold(_), Subject::One(lock, _)) => {
                self.decide_hold(lock, &read, now, effects);
            }
            (Purpose::Sweep, Subject::One(lock, _)) => {
                self.decide_sweep(lock, &read, now, effects);
            }
            _ => debug_assert!(false, "no decision is made so: {task:?}"),
        }
        if !matches!(task.purpose, Purpose::Command | Purpose::Holders) {
            // One decision can take several waiters out.
            let left = waiters.saturating_sub(self.table.waiters());
            turn.budget.spend(left.max(1), now);
        }
        true
    }

    fn decide_command(
        &mut self,
        turn: &mut Turn<'_>,
        read: &Read<'_>,
        now: Now,
        effects: &mut Vec<Effect>,
    ) {
        let Some(command) = turn.command.must_exist() else {
            return;
        };
        let outcome = match (command.keys(), read) {
            // CANCEL needs the reading only to tell the waiter how much of the lease is left, so it
            // works without.
            (Keys::One(name), Read::Unknown) if matches!(command, Command::Cancel(_)) => {
                let at = LockRef { db: turn.db, name };
                self.decide_about_one(turn, command, at, &Stored::NoHolder, now, effects)
            }
            (_, Read::Unknown) => Err(CommandError::SlotOnItsWay),
            (Keys::One(name), Read::One(stored)) => {
                let at = LockRef { db: turn.db, name };
                self.decide_about_one(turn, command, at, stored, now, effects)
            }
            (Keys::One(name), Read::Holds(stored, holders, first)) => {
                // A pending release of this turn has ended the hold that BREAK meant. A waiter that
                // was granted the lock since keeps it.
                if turn.freed {
                    return turn.finish(Ok(Outcome::Number(1)));
                }
                let at = LockRef { db: turn.db, name };
                let mut decision = self.decision(at, 0, now, effects);
                let broken = decision.break_hold(stored, holders, first.as_ref());
                broken.map(|broken| Some(Outcome::Number(broken.into())))
            }
            (Keys::Several(keys), Read::Several(stored)) => {
                let db = turn.db;
                let at = keys.iter().map(|key| LockRef { db, name: key.name });
                let locks: Vec<LockRef<'_>> = at.collect();
                let several = LockSet {
                    locks: &locks,
                    stored,
                };
                self.decide_about_several(turn, command, &several, now, effects)
            }
            _ => Err(CommandError::Unsettled),
        };
        match outcome {
            Ok(None) => {}
            Ok(Some(outcome)) => turn.finish(Ok(outcome)),
            Err(error) => turn.finish(Err(error)),
        }
    }

    /// Returns none if more must be read before the command can be decided.
    fn decide_about_one(
        &mut self,
        turn: &mut Turn<'_>,
        command: Command<'_>,
        at: LockRef<'_>,
        stored: &Stored,
        now: Now,
        effects: &mut Vec<Effect>,
    ) -> Result<Option<Outcome>, CommandError> {
        let (reconciled, waiters_max) = (turn.is_reconciled, turn.waiters_max);
        let mut decision = self.decision(at, 0, now, effects);
        Ok(Some(match command {
            Command::Acquire(request) => {
                match decision.acquire(stored, request, reconciled, waiters_max)? {
                    Acquired::ReconcileFirst => {
                        turn.is_reconciled = true;
                        decision.reconcile_now();
                        return Ok(None);
                    }
                    Acquired::MustWait(pending_wait) => {
                        return self.begin_wait(turn, pending_wait, now);
                    }
                    acquired => {
                        if request.wanted && matches!(acquired, Acquired::Held { .. }) {
                            decision.ask_if_wanted(request.owner, request.mode);
                        }
                        acquired.into()
                    }
                }
            }
            Command::Release(request) => Outcome::Left(decision.release(stored, request)?),
            Command::Renew(request) => Outcome::Number(decision.renew(stored, request)?.into()),
            Command::Guard(request) => {
                decision.guard(stored, request)?;
                Outcome::Guards
            }
            Command::Cancel(request) => Outcome::Number(decision.cancel(stored, request)),
            Command::Limit(request) => Outcome::Number(decision.set_limit(stored, request.limit)?),
            _ => return Err(CommandError::Unsettled),
        }))
    }

    fn decide_about_several(
        &mut self,
        turn: &mut Turn<'_>,
        command: Command<'_>,
        several: &LockSet<'_>,
        now: Now,
        effects: &mut Vec<Effect>,
    ) -> Result<Option<Outcome>, CommandError> {
        let (reconciled, waiters_max) = (turn.is_reconciled, turn.waiters_max);
        Ok(Some(match command {
            Command::MultiAcquire(request) => {
                let acquired =
                    self.acquire_several(several, request, reconciled, waiters_max, now, effects);
                match acquired? {
                    Acquired::ReconcileFirst => {
                        turn.is_reconciled = true;
                        for (place, lock, stored) in several.each() {
                            if stored.is_free() {
                                self.decision(lock, place, now, effects).reconcile_now();
                            }
                        }
                        return Ok(None);
                    }
                    Acquired::MustWait(pending_wait) => {
                        return self.begin_wait(turn, pending_wait, now);
                    }
                    acquired => acquired.into(),
                }
            }
            Command::MultiRelease(request) => {
                Outcome::Number(self.release_several(several, request, now, effects)?)
            }
            Command::MultiRenew(request) => {
                Outcome::Number(self.renew_several(several, request, now, effects)?)
            }
            _ => return Err(CommandError::Unsettled),
        }))
    }

    fn renew_several(
        &mut self,
        several: &LockSet<'_>,
        request: &MultiRenew<'_>,
        now: Now,
        effects: &mut Vec<Effect>,
    ) -> Result<i64, CommandError> {
        for (place, lock, stored) in several.each() {
            let mut decision = self.decision(lock, place, now, effects);
            decision.check_kind(stored, Kind::Plain)?;
        }
        self.listened(request.session)?;
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
            let one = self
                .decision(lock, place, now, effects)
                .renew(stored, &request)?;
            renewed = renewed.saturating_add(one.into());
        }
        Ok(renewed)
    }

    fn decide_release(
        &mut self,
        turn: &mut Turn<'_>,
        lock: &LockKey,
        others_are_brief: bool,
        read: &Read<'_>,
        now: Now,
        effects: &mut Vec<Effect>,
    ) {
        let Some(record) = self.table.find(lock.as_ref()).must_exist() else {
            return;
        };
        // Not all keys of this lock can be read here now. The timer tries again.
        if let Read::Unknown = read {
            self.table.retry(record, now);
            return turn.unreadable.push(record);
        }
        let may_outlive = self.table.set_outlived(record, others_are_brief);
        let outlived = may_outlive && !others_are_brief;
        let Some(release) = self.table.take_pending(record).must_exist() else {
            return;
        };
        let Read::One(stored) = read else {
            // Another node serves the key: there the lease ends the hold, and the waiters must go
            // there.
            return self.mark_queue(record);
        };
        let written = effects.len();
        if let Some(pending_wait) = &mut turn.pending_wait {
            pending_wait.is_out_of_date = true;
        }
        self.decision(lock.as_ref(), 0, now, effects)
            .end_pending(&release, stored, outlived);
        // Only a deletion at the command's own lock counts. A release at another lock must not make
        // BREAK leave a hold in place.
        turn.freed |=
            turn.is_about(lock.as_ref()) && effects.iter().skip(written).any(Effect::is_deletion);
    }

    fn decide_reconcile(
        &mut self,
        turn: &Turn<'_>,
        lock: &LockKey,
        read: Read<'_>,
        now: Now,
        effects: &mut Vec<Effect>,
    ) {
        let Some(queue) = self.table.find(lock.as_ref()).must_exist() else {
            return;
        };
        self.table.take_dirty(queue);
        let most = turn.budget.decisions;
        match read {
            Read::One(stored) => {
                self.decision(lock.as_ref(), 0, now, effects)
                    .reconcile(queue, stored, None, most);
            }
            Read::Permits(hash, others) => {
                let stored = Stored::Permits(*hash);
                self.decision(lock.as_ref(), 0, now, effects).reconcile(
                    queue,
                    &stored,
                    Some(others),
                    most,
                );
            }
            Read::Elsewhere(error) => {
                self.refuse_some(queue, &error, effects);
            }
            // It is not known which node serves the key. Here it looks free, so a grant could be
            // the second one.
            _ => self.table.retry(queue, now),
        }
    }

    fn decide_several(
        &mut self,
        multi: MultiId,
        locks: &[LockKey],
        read: &Read<'_>,
        now: Now,
        effects: &mut Vec<Effect>,
    ) {
        self.multis.unmark(multi);
        self.agenda.pop_now();
        match read {
            Read::Several(stored) => {
                let locks: Vec<LockRef<'_>> = locks.iter().map(LockKey::as_ref).collect();
                let several = LockSet {
                    locks: &locks,
                    stored,
                };
                self.grant_several(multi, &several, now, effects);
            }
            // The next look at its queue tells the waiters which node to go to.
            Read::NotHere(place) => {
                if let Some(lock) = locks.get(*place) {
                    self.mark_dirty(lock.as_ref());
                }
            }
            _ => {}
        }
    }

    fn decide_hold(
        &mut self,
        lock: &LockKey,
        read: &Read<'_>,
        now: Now,
        effects: &mut Vec<Effect>,
    ) {
        let Some(id) = self.holds.first_dirty().must_exist() else {
            return;
        };
        self.holds.pop_dirty();
        match read {
            Read::One(stored) => self
                .decision(lock.as_ref(), 0, now, effects)
                .check_hold(id, stored),
            // Another node serves the key now: the hold is not lost, but this node no longer
            // watches it. The session hears of the other node.
            Read::Elsewhere(moved) => {
                if let Some(hold) = self.forget_hold(id) {
                    self.tell_of(hold, EventKind::Error(moved.clone()), effects);
                }
            }
            _ => self.holds.check_again(id, now),
        }
    }

    fn decide_timeout(&mut self, read: &Read<'_>, now: Now, effects: &mut Vec<Effect>) {
        let Some(id) = self.table.overdue(now).must_exist() else {
            return;
        };
        let ttl_ms = match read {
            Read::One(stored) => stored.ttl_ms(now),
            Read::Several([stored]) => stored.ttl_ms(now),
            Read::Several(stored) => ttl_of_others_ms(stored, now),
            _ => 0,
        };
        let ttl_ms = self.ttl_or_delay_ms(ttl_ms, now);
        let why = WaitOutcome::NotAcquired { ttl_ms };
        // It may have become long just now, and no look has come since.
        let main = self.main_waiter(id);
        if let Some(main) = main.filter(|main| self.table.is_long(*main, now)) {
            self.log_long_wait(main, &Read::Unknown, now, effects);
        }
        if self.leave(id, why, effects).is_some() {
            count(&mut self.counters.timeouts);
        }
    }

    /// There are more readers than one look may check. So the timer goes through them part by part
    /// and removes those whose leases are over.
    fn sweep_later(&mut self, turn: &Turn<'_>, subject: &Subject) {
        let lock = match (subject, turn.command.map(|command| command.keys())) {
            (Subject::One(lock, _), _) => lock.as_ref(),
            (Subject::Command, Some(Keys::One(name))) => LockRef { db: turn.db, name },
            _ => return,
        };
        self.agenda.add_sweep(lock);
    }

    fn decide_sweep(
        &mut self,
        lock: &LockKey,
        read: &Read<'_>,
        now: Now,
        effects: &mut Vec<Effect>,
    ) {
        let (gone, more) = match read {
            Read::Gone { readers, more } => (*readers, *more),
            _ => (&[][..], false),
        };
        self.decision(lock.as_ref(), 0, now, effects).sweep(gone);
        if self.agenda.swept(!gone.is_empty(), more, now)
            && let Some(queue) = self.table.queue(lock.as_ref())
        {
            self.mark_queue(queue);
        }
    }
}
