//! How a wait begins: a caller that cannot have its locks joins their queues, unless it would wait
//! for ever.

use crate::decisions::deadlock::DeadlockSearch;
use crate::decisions::pending_wait::PendingWait;
use crate::interface::effect::{Effect, WaitOutcome};
use crate::interface::error::CommandError;
use crate::interface::event::Moment;
use crate::interface::outcome::Outcome;
use crate::interface::request::{Acquire, WaitMode};
use crate::interface::task::{Command, Read};
use crate::memory::log::metrics::count;
use crate::memory::state::Locks;
use crate::memory::table::{Newcomer, ReplyTarget};
use crate::turn::turn::{Phase, Turn};
use crate::values::ids::WaiterId;
use crate::values::lock_key::{LockKey, LockRef};
use crate::values::mode::Mode;
use crate::values::must_exist::MustExist;
use crate::values::time::Now;

/// A client that the driver has blocked.
#[derive(Clone, Copy, Debug)]
pub struct BlockedClient {
    /// The driver's own handle; the core only hands it back.
    pub handle: usize,
    /// The server's number of the client, shown by INFO.
    pub client_id: u64,
}

/// A waiter that has joined a queue.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Joined {
    /// Its id.
    pub waiter: WaiterId,
    /// Its place in the queue, 1 is next; for several locks the largest. 0 for a blocked client,
    /// which is not told.
    pub position: i64,
    /// The present moment of its session: a later event tells how the wait ended. None for a
    /// blocked client.
    pub moment: Option<Moment>,
}

impl Locks {
    /// The caller must wait, unless its wait could never end. No search is needed for permits: any
    /// of their holders may give some back, so no wait is for a certain holder. Nor if the owner
    /// only takes over its own place, which begins no new wait; nor if no owner waits for another
    /// lock: then the holders wait for nothing, since an owner never waits for a lock that it
    /// holds.
    pub(crate) fn begin_wait(
        &mut self,
        turn: &mut Turn<'_>,
        pending_wait: PendingWait,
        now: Now,
    ) -> Result<Option<Outcome>, CommandError> {
        turn.pending_wait = Some(pending_wait);
        let only = turn.lock(0).filter(|_| turn.lock(1).is_none());
        let queue = only.and_then(|only| self.table.queue(only));
        let is_for_permits = turn.mode() == Mode::Permits;
        if is_for_permits || !self.table.any_other_queue(queue) || self.own_wait(turn).is_some() {
            return self.go_on_searching(turn, Ok(None), now);
        }
        let owner = turn.command.map_or(&[][..], |command| command.owner());
        let locks = turn.locks().into_iter().map(LockKey::from).collect();
        let mut search = DeadlockSearch::new(&self.table, owner, locks);
        let asks = search.go_on(&self.table);
        turn.search = Some(Box::new(search));
        self.go_on_searching(turn, asks, now)
    }

    /// The search asks for the holders of a lock, is done, or refuses the wait.
    fn go_on_searching(
        &mut self,
        turn: &mut Turn<'_>,
        asks: Result<Option<LockKey>, CommandError>,
        now: Now,
    ) -> Result<Option<Outcome>, CommandError> {
        let asks = asks.inspect_err(|error| {
            if *error != CommandError::Unsettled {
                count(&mut self.counters.deadlocks_refused);
                self.log_refused(turn, error, now);
            }
        });
        if let Some(lock) = asks? {
            turn.phase = Phase::Search(lock);
            return Ok(None);
        }
        let pending_wait = turn.pending_wait.as_ref();
        let ttl_ms = pending_wait.map_or(0, |pending_wait| pending_wait.ttl_ms);
        Ok(Some(Outcome::MustWait { ttl_ms }))
    }

    /// Logs that the deadlock search refused a wait.
    fn log_refused(&mut self, turn: &Turn<'_>, error: &CommandError, now: Now) {
        let command = turn.command.filter(|_| self.log.is_on());
        let (Some(command), Some(lock)) = (command, turn.lock(0)) else {
            return;
        };
        let owner = command.owner();
        match error {
            CommandError::Deadlock(circle) => self.log.add_circle(lock, owner, circle, now),
            _ => self.log.add_full(lock, owner, || error.to_string(), now),
        }
    }

    pub(crate) fn decide_search(&mut self, turn: &mut Turn<'_>, read: &Read<'_>, now: Now) {
        let Some(mut search) = turn.search.take().must_exist() else {
            return turn.finish(Err(CommandError::Unsettled));
        };
        let asks = match read {
            Read::Owners(holders) => search.holders(&self.table, holders),
            _ => Err(CommandError::ChainTooLong),
        };
        turn.search = Some(search);
        let outcome = self.go_on_searching(turn, asks, now);
        turn.finish(outcome);
    }

    /// Puts the caller of a command that [must wait](Outcome::MustWait) into the queue of each of
    /// its locks, on its blocked client or for its session.
    ///
    /// With ONCE an owner that waits already keeps its place. If its reply target was another one,
    /// that is told so. Returns none if there is no room for another waiter at all.
    pub fn enqueue(
        &mut self,
        turn: &mut Turn<'_>,
        client: Option<BlockedClient>,
        now: Now,
        effects: &mut Vec<Effect>,
    ) -> Option<Joined> {
        let pending_wait = turn.pending_wait.take()?;
        let newcomer = self.newcomer(turn, client)?;
        self.invalidate();
        let own = self.own_wait(turn);
        let first = match (own, turn.command?) {
            (Some(own), _) => own,
            (None, Command::MultiAcquire(_)) => {
                self.join_all(&turn.locks(), newcomer, &pending_wait, now)?
            }
            (None, _) => self.join(turn.lock(0)?, 0, &newcomer, &pending_wait, now)?,
        };
        if own.is_some() {
            let ttl_ms = self.ttl_or_delay_ms(pending_wait.ttl_when_taken_over(now), now);
            self.take_over(first, &newcomer, ttl_ms, now, effects)?;
        }
        if let Some(session) = newcomer.session {
            self.sessions.add_waiter(session, first);
        }
        if own.is_none() && self.holds.any_asks() && pending_wait.is_kept_out() {
            self.tell_wanted_by_newcomer(first, effects);
        }
        let peak = &mut self.counters.waiters_peak;
        *peak = (*peak).max(self.table.waiters().try_into().unwrap_or(u64::MAX));
        let (position, moment) = match newcomer.reply_to {
            ReplyTarget::Client { .. } => (0, None),
            ReplyTarget::Session(session) => (
                self.position(first, own.is_none()),
                self.sessions.moment(session),
            ),
        };
        Some(Joined {
            waiter: first,
            position,
            moment,
        })
    }

    /// The waiter that a command's caller becomes: on its blocked client, or for its session.
    fn newcomer<'a>(&self, turn: &Turn<'a>, client: Option<BlockedClient>) -> Option<Newcomer<'a>> {
        let command = turn.command?;
        let (asked, lease, wait_mode, session) = match command {
            Command::Acquire(of) => (of.asked, of.lease, of.wait_mode, of.session),
            Command::MultiAcquire(of) => (None, of.lease, of.wait_mode, of.session),
            _ => return None,
        };
        let (wanted, once) = match command {
            Command::Acquire(of) => (of.wanted, of.once),
            Command::MultiAcquire(of) => (of.wanted, of.once),
            _ => return None,
        };
        let session = self.listened(session).ok()?;
        let (wait, reply_to) = match (wait_mode, client) {
            (WaitMode::Block(wait), Some(BlockedClient { handle, client_id })) => {
                (wait, ReplyTarget::Client { handle, client_id })
            }
            (WaitMode::Queue(wait), _) => (wait, ReplyTarget::Session(session?)),
            _ => return None,
        };
        Some(Newcomer {
            owner: command.owner(),
            mode: turn.mode(),
            asked,
            lease,
            wait,
            reply_to,
            session,
            wanted,
            once,
            multi: None,
        })
    }

    /// The caller of a command that [must wait](Outcome::MustWait) cannot be blocked after all: it
    /// is refused, and the holds that keep it out are told that the lock is wanted.
    pub fn turn_away(&mut self, turn: &mut Turn<'_>, effects: &mut Vec<Effect>) {
        let pending_wait = turn.pending_wait.take();
        let owner = turn.command.map_or(&[][..], |command| command.owner());
        if pending_wait.is_some_and(|pending_wait| pending_wait.is_kept_out()) {
            for lock in turn.locks() {
                self.tell_wanted_by(lock, owner, turn.mode(), effects);
            }
        }
    }

    /// The owner's wait that the command takes over (ONCE): its first waiter.
    fn own_wait(&self, turn: &Turn<'_>) -> Option<WaiterId> {
        match turn.command? {
            Command::Acquire(request) => self.own_place(turn.lock(0)?, request),
            Command::MultiAcquire(request) => self.own_multi(&turn.locks(), request),
            _ => None,
        }
    }

    /// The owner's place in the queue, if the request takes it over (ONCE).
    pub(crate) fn own_place(&self, lock: LockRef<'_>, request: &Acquire<'_>) -> Option<WaiterId> {
        if !request.once {
            return None;
        }
        let (id, waiter) = self.table.waiter_at(lock, request.owner)?;
        let is_same = waiter.mode == request.mode && waiter.asked == request.asked;
        (waiter.multi.is_none() && is_same).then_some(id)
    }

    fn mark_queues_of(&mut self, wait: WaiterId) {
        for waiter in self.members(&wait).to_vec() {
            if let Some(queue) = self.table.record_of(waiter) {
                self.mark_queue(queue);
            }
        }
    }

    fn join(
        &mut self,
        lock: LockRef<'_>,
        place: usize,
        newcomer: &Newcomer<'_>,
        pending_wait: &PendingWait,
        now: Now,
    ) -> Option<WaiterId> {
        let (waiter, queue) = self.table.join(lock, newcomer, now)?;
        if let Some(of) = self.table.patterns.of(lock.name) {
            count(&mut of.waits);
        }
        // If this wait knows of no end, an end that the queue was told before stays.
        if let Some(end) = pending_wait.lease_end(place) {
            self.table.check_after(queue, Some(end));
        }
        Some(waiter)
    }

    fn join_all(
        &mut self,
        locks: &[LockRef<'_>],
        newcomer: Newcomer<'_>,
        pending_wait: &PendingWait,
        now: Now,
    ) -> Option<WaiterId> {
        let keys = locks.iter().map(|lock| {
            let record = self.table.find(*lock);
            let known = record.and_then(|record| self.table.lock_of(record).cloned());
            known.unwrap_or_else(|| LockKey::from(*lock))
        });
        let keys = keys.collect();
        let multi = self.multis.add(newcomer.owner, keys)?;
        let newcomer = Newcomer {
            multi: Some(multi),
            ..newcomer
        };
        for (place, lock) in locks.iter().enumerate() {
            let Some(waiter) = self.join(*lock, place, &newcomer, pending_wait, now) else {
                // No room: the waiters that have joined leave again.
                for waiter in self.multis.remove(multi) {
                    self.table.leave(waiter);
                }
                return None;
            };
            if let Some(multi) = self.multis.get_mut(multi).must_exist() {
                multi.waiters.push(waiter);
            }
        }
        self.multis.waiters(multi).first().copied()
    }

    /// The owner's wait goes on for another connection or session, with new terms. If its reply
    /// target was another one, that is told so.
    fn take_over(
        &mut self,
        first: WaiterId,
        newcomer: &Newcomer<'_>,
        ttl_ms: i64,
        now: Now,
        effects: &mut Vec<Effect>,
    ) -> Option<()> {
        let of = self.wait_of(first).must_exist()?;
        let waiter = self.table.get(first)?;
        let (reply_to, session) = (waiter.reply_to, waiter.session);
        let (multi, is_as_before) = (waiter.multi, waiter.once == newcomer.once);
        for waiter in self.members(&first).to_vec() {
            self.table.take_over(waiter, newcomer, now);
        }
        if !is_as_before {
            // With ONCE it may be let in where its hold has the largest count.
            if let Some(multi) = multi.and_then(|multi| self.multis.get_mut(multi)) {
                multi.blocked_in = None;
            }
            self.mark_queues_of(first);
        }
        if let Some(session) = session {
            self.sessions.remove_waiter(session, first);
        }
        count(&mut self.counters.cancels);
        if reply_to != newcomer.reply_to {
            self.tell_left(of, WaitOutcome::NotAcquired { ttl_ms }, effects);
        }
        Some(())
    }

    /// The place in the queue; for several locks the largest. A new waiter is the last.
    fn position(&mut self, first: WaiterId, is_new: bool) -> i64 {
        let waiters = self.members(&first).to_vec();
        let positions = waiters.into_iter().map(|waiter| {
            if !is_new {
                return self.table.position(waiter);
            }
            let queue = self.table.record_of(waiter);
            queue.map_or(0, |queue| self.table.length(queue).into())
        });
        positions.max().unwrap_or(0)
    }
}
