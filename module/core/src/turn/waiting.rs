//! How a wait begins: a caller that cannot have its locks joins their queues, unless it would wait
//! for ever.

use crate::decisions::deadlock::{DeadlockSearch, Found};
use crate::decisions::pending_wait::PendingWait;
use crate::interface::effect::{Effect, WaitOutcome};
use crate::interface::error::CommandError;
use crate::interface::event::Moment;
use crate::interface::request::{Acquire, WaitMode};
use crate::interface::task::{Command, Keys, Read};
use crate::memory::log::metrics::count;
use crate::memory::state::Locks;
use crate::memory::table::{Newcomer, ReplyTarget};
use crate::turn::turn::{Outcome, Phase, Turn};
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
    /// The caller must wait, unless its wait could never end. No search is needed if the owner only
    /// takes over its own place, which begins no new wait; or if no owner waits for another lock:
    /// then the holders wait for nothing, since an owner never waits for a lock that it holds.
    pub(crate) fn begin_wait(
        &mut self,
        turn: &mut Turn<'_>,
        pending_wait: PendingWait,
        now: Now,
    ) -> Result<Option<Outcome>, CommandError> {
        let ttl_ms = pending_wait.ttl_ms;
        turn.pending_wait = Some(pending_wait);
        let locks = match turn.command {
            // No search for permits: any of their holders may give some back, so no wait is for a
            // certain holder.
            Some(Command::Acquire(request)) if request.mode == Mode::Permits => {
                return Ok(Some(Outcome::MustWait { ttl_ms }));
            }
            Some(Command::Acquire(request)) => {
                let lock = LockRef {
                    db: turn.db,
                    name: request.key,
                };
                let queue = self.table.queue(lock);
                if self.own_place(lock, request).is_some() || !self.table.any_other_queue(queue) {
                    return Ok(Some(Outcome::MustWait { ttl_ms }));
                }
                vec![LockKey::from(lock)]
            }
            Some(Command::MultiAcquire(request)) => {
                let locks = request.locks(turn.db);
                if self.own_multi(&locks, request).is_some() || !self.table.any_other_queue(None) {
                    return Ok(Some(Outcome::MustWait { ttl_ms }));
                }
                locks.into_iter().map(LockKey::from).collect()
            }
            _ => return Err(CommandError::Unsettled),
        };
        let owner = turn.command.map_or(&[][..], |command| command.owner());
        let mut search = DeadlockSearch::new(&self.table, owner, locks);
        let found = search.go_on(&self.table);
        turn.search = Some(Box::new(search));
        self.go_on_searching(turn, found, now)
    }

    fn go_on_searching(
        &mut self,
        turn: &mut Turn<'_>,
        found: Found,
        now: Now,
    ) -> Result<Option<Outcome>, CommandError> {
        match found {
            Found::Ask(lock) => {
                turn.phase = Phase::Search(lock);
                Ok(None)
            }
            Found::Refuse(error) => {
                count(&mut self.counters.deadlocks_refused);
                self.log_refused(turn, &error, now);
                Err(error)
            }
            Found::Nothing => {
                let ttl_ms = turn
                    .pending_wait
                    .as_ref()
                    .map_or(0, |pending_wait| pending_wait.ttl_ms);
                Ok(Some(Outcome::MustWait { ttl_ms }))
            }
        }
    }

    /// Logs that the deadlock search refused a wait.
    fn log_refused(&mut self, turn: &Turn<'_>, error: &CommandError, now: Now) {
        let Some(command) = turn.command.filter(|_| self.log.is_on()) else {
            return;
        };
        let name = match command.keys() {
            Keys::One(name) => Some(name),
            Keys::Several(keys) => keys.first().map(|key| key.name),
        };
        let Some(name) = name else { return };
        let (lock, owner) = (LockRef { db: turn.db, name }, command.owner());
        match error {
            CommandError::Deadlock(circle) => self.log.add_circle(lock, owner, circle, now),
            _ => self.log.add_full(lock, owner, || error.to_string(), now),
        }
    }

    pub(crate) fn decide_search(&mut self, turn: &mut Turn<'_>, read: &Read<'_>, now: Now) {
        let Some(mut search) = turn.search.take().must_exist() else {
            return turn.finish(Err(CommandError::Unsettled));
        };
        let found = match read {
            Read::Owners(holders) => search.holders(&self.table, holders),
            _ => Found::Refuse(CommandError::ChainTooLong),
        };
        turn.search = Some(search);
        match self.go_on_searching(turn, found, now) {
            Ok(None) => {}
            Ok(Some(outcome)) => turn.finish(Ok(outcome)),
            Err(error) => turn.finish(Err(error)),
        }
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
        let newcomer = self.newcomer(turn.command?, client)?;
        let (session, reply_to) = (newcomer.session, newcomer.reply_to);
        self.invalidate();
        // For one waiter no list is allocated.
        let (of_one, of_several);
        let (waiters, is_new): (&[WaiterId], bool) = match turn.command? {
            Command::Acquire(request) => {
                let lock = LockRef {
                    db: turn.db,
                    name: request.key,
                };
                let own_place = self.own_place(lock, request);
                of_one = match own_place {
                    Some(waiter) => [waiter],
                    None => [self.join(lock, 0, &newcomer, &pending_wait, now)?],
                };
                (&of_one, own_place.is_none())
            }
            Command::MultiAcquire(request) => {
                let locks = request.locks(turn.db);
                let own_multi = self.own_multi(&locks, request);
                of_several = match own_multi {
                    Some(multi) => self.multis.waiters(multi).to_vec(),
                    None => self.join_all(&locks, newcomer, &pending_wait, now)?,
                };
                (&of_several, own_multi.is_none())
            }
            _ => return None,
        };
        let first = *waiters.first()?;
        if pending_wait.is_out_of_date {
            // The lock may be free by now, or have another holder: the timer looks at once.
            self.mark_queues_of(waiters);
        }
        if !is_new {
            let ttl_ms = self.ttl_or_delay_ms(pending_wait.ttl_when_taken_over(now), now);
            self.take_over(waiters, &newcomer, ttl_ms, now, effects)?;
        }
        if let Some(session) = session {
            self.sessions.add_waiter(session, first);
        }
        if is_new && self.holds.any_asks() && pending_wait.is_kept_out() {
            self.tell_wanted_by_newcomer(waiters, effects);
        }
        self.note_peak();
        Some(self.joined(first, waiters, is_new, reply_to))
    }

    /// The waiter that a command's caller becomes: on its blocked client, or for its session.
    fn newcomer<'a>(
        &self,
        command: Command<'a>,
        client: Option<BlockedClient>,
    ) -> Option<Newcomer<'a>> {
        let (mode, asked, lease, wait_mode, session, wanted) = match command {
            Command::Acquire(of) => {
                let (mode, asked) = (of.mode, of.asked);
                (mode, asked, of.lease, of.wait_mode, of.session, of.wanted)
            }
            Command::MultiAcquire(of) => {
                let (mode, asked) = (Mode::Plain, None);
                (mode, asked, of.lease, of.wait_mode, of.session, of.wanted)
            }
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
            mode,
            asked,
            lease,
            wait,
            reply_to,
            session,
            wanted,
            multi: None,
        })
    }

    /// The answer to the driver. For a blocked client it has neither place nor moment.
    fn joined(
        &mut self,
        waiter: WaiterId,
        waiters: &[WaiterId],
        is_new: bool,
        reply_to: ReplyTarget,
    ) -> Joined {
        let (position, moment) = match reply_to {
            ReplyTarget::Client { .. } => (0, None),
            ReplyTarget::Session(session) => (
                self.position(waiters, is_new),
                self.sessions.moment(session),
            ),
        };
        Joined {
            waiter,
            position,
            moment,
        }
    }

    /// The caller of a command that [must wait](Outcome::MustWait) cannot be blocked after all: it
    /// is refused, and the holds that keep it out are told that the lock is wanted.
    pub fn turn_away(&mut self, turn: &mut Turn<'_>, effects: &mut Vec<Effect>) {
        let (db, pending_wait) = (turn.db, turn.pending_wait.take());
        let command = turn
            .command
            .filter(|_| pending_wait.is_some_and(|pending_wait| pending_wait.is_kept_out()));
        match command {
            Some(Command::Acquire(request)) => {
                let name = request.key;
                self.tell_wanted_by(LockRef { db, name }, request.owner, request.mode, effects);
            }
            Some(Command::MultiAcquire(request)) => {
                for lock in request.locks(db) {
                    self.tell_wanted_by(lock, request.owner, Mode::Plain, effects);
                }
            }
            _ => {}
        }
    }

    /// The owner's place in the queue, if the request takes it over (ONCE).
    pub(crate) fn own_place(&self, lock: LockRef<'_>, request: &Acquire<'_>) -> Option<WaiterId> {
        if !request.once {
            return None;
        }
        let queue = self.table.queue(lock)?;
        let (id, waiter) = self.table.waiter_of(queue, request.owner)?;
        let is_same = waiter.mode == request.mode && waiter.asked == request.asked;
        (waiter.multi.is_none() && is_same).then_some(id)
    }

    fn mark_queues_of(&mut self, waiters: &[WaiterId]) {
        for waiter in waiters {
            if let Some(queue) = self.table.record_of(*waiter) {
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
    ) -> Option<Vec<WaiterId>> {
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
            self.multis.add_waiter(multi, waiter);
        }
        Some(self.multis.waiters(multi).to_vec())
    }

    /// The owner's wait goes on for another connection or session, with new terms. If its reply
    /// target was another one, that is told so.
    fn take_over(
        &mut self,
        waiters: &[WaiterId],
        newcomer: &Newcomer<'_>,
        ttl_ms: i64,
        now: Now,
        effects: &mut Vec<Effect>,
    ) -> Option<()> {
        let (first, others) = waiters.split_first()?;
        let of = self.wait_of(*first).must_exist()?;
        let (reply_to, session) = self.table.take_over(*first, newcomer, now)?;
        for waiter in others {
            self.table.take_over(*waiter, newcomer, now)?;
        }
        if let Some(session) = session {
            self.sessions.remove_waiter(session, *first);
        }
        count(&mut self.counters.cancels);
        if reply_to != newcomer.reply_to {
            self.tell_left(of, WaitOutcome::NotAcquired { ttl_ms }, effects);
        }
        Some(())
    }

    /// The place in the queue; for several locks the largest. A new waiter is the last.
    fn position(&mut self, waiters: &[WaiterId], is_new: bool) -> i64 {
        let mut largest = 0;
        for waiter in waiters {
            let position = if is_new {
                let queue = self.table.record_of(*waiter);
                queue.map_or(0, |queue| self.table.length(queue).into())
            } else {
                self.table.position(*waiter)
            };
            largest = largest.max(position);
        }
        largest
    }
}
