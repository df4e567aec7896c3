//! All state about locks that is not in the keyspace, and the changes to it from outside of a turn.
//!
//! Decisions about locks are in [`crate::decisions`]; their order is in [`crate::turn`].

use crate::interface::effect::{Effect, Grant};
use crate::interface::error::CommandError;
use crate::interface::stored_permits::PermitsRequest;
use crate::memory::agenda::Agenda;
use crate::memory::bindings::Bindings;
use crate::memory::grant_delay::GrantDelay;
use crate::memory::hold::{HoldIndex, SessionHold, SessionHolds};
use crate::memory::log::event_log::{EventLog, LogEntry, LogLines, LogOptions};
use crate::memory::log::metrics::{Counters, count};
use crate::memory::log::pattern::PatternCounters;
use crate::memory::multi_waits::MultiWaits;
use crate::memory::pending::PendingRelease;
use crate::memory::session::{SessionView, Sessions};
use crate::memory::table::{
    Gauges, LockTable, Longest, QueueView, ReplyTarget, Waiter, WaiterView,
};
use crate::values::ids::{HoldId, RecordId, SessionId, WaiterId};
use crate::values::lock_key::{LockKey, LockRef};
use crate::values::mode::Mode;
use crate::values::time::{Now, held_ms};
use crate::values::token::{Token, TokenMint};
use std::rc::Rc;

/// Details of a hold that are not in its key.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct HoldView {
    /// How long the owner has had it, in milliseconds; none if not known.
    pub held_ms: Option<i64>,
    /// The session that it belongs to.
    pub session: Option<Rc<[u8]>>,
    /// The client id of that session's connection.
    pub client_id: Option<u64>,
}

/// All state about locks that is not in the keyspace.
#[derive(Debug, Default)]
pub struct Locks {
    pub(crate) table: LockTable,
    pub(crate) sessions: Sessions,
    pub(crate) bindings: Bindings,
    pub(crate) holds: SessionHolds,
    pub(crate) multis: MultiWaits,
    pub(crate) agenda: Agenda,
    pub(crate) tokens: TokenMint,
    pub(crate) grant_delay: GrantDelay,
    pub(crate) counters: Counters,
    pub(crate) log: EventLog,
    pub(crate) log_lines: LogLines,
    /// Grows with each decision: a reading from before the last decision is out of date.
    pub(crate) epoch: u64,
}

impl Locks {
    // --- Changes by other clients ----------------------------------------------------------------

    /// Another client deleted, overwrote or renamed the key, or changed it in another way. Whether
    /// the lock has waiters, pending releases or holds of sessions, so that its key must be read
    /// again.
    pub fn changed(&mut self, lock: LockRef<'_>) -> bool {
        self.mark_dirty(lock)
    }

    /// Other clients may have changed all keys of a database, or of all databases. Or the wall
    /// clock was set, and every lease ends at another moment than expected.
    pub fn all_changed(&mut self, db: Option<i32>) {
        for id in self.table.in_database(db) {
            self.mark_record(id);
        }
    }

    /// Marks a lock dirty: its key must be read again, for its waiters, its pending releases and
    /// the sessions that hold it. Whether it has any of these.
    pub(crate) fn mark_dirty(&mut self, lock: LockRef<'_>) -> bool {
        let id = self.table.find(lock);
        id.is_some_and(|id| self.mark_record(id))
    }

    fn mark_record(&mut self, id: RecordId) -> bool {
        // Many commands behind one another may find the same key gone: only the first walks.
        if !self.table.set_holds_dirty(id, true) {
            let holds = self.table.holds(id).map_or_else(Vec::new, HoldIndex::all);
            for hold in holds {
                self.holds.mark_dirty(hold);
            }
        }
        let waited_for = self.table.length(id) > 0 || self.table.first_pending(id).is_some();
        if waited_for {
            self.mark_queue(id);
        }
        let holds = self.table.holds(id);
        waited_for || holds.is_some_and(|holds| !holds.is_empty())
    }

    /// The first dirty hold is not dirty any more.
    pub(crate) fn pop_dirty_hold(&mut self) {
        if let Some(record) = self.holds.pop_dirty() {
            self.table.set_holds_dirty(record, false);
        }
    }

    /// Marks a queue dirty: its lock's key must be read again, outside of any command.
    pub(crate) fn mark_queue(&mut self, id: RecordId) {
        if self.table.mark_dirty(id) {
            self.agenda.add_later(id);
        }
    }

    /// A waiter's client disconnected or was unblocked: the waiter leaves the queue. Returns the
    /// lock that it waited for; none if it was in no queue.
    pub fn waiter_gone(&mut self, id: WaiterId) -> Option<LockKey> {
        self.invalidate();
        let lock = self.lock_of(id)?;
        self.leave_untold(id)?;
        count(&mut self.counters.departures);
        Some(lock)
    }

    /// The permits that a waiter asks for; none if it waits for another kind of lock.
    pub fn asked_by(&self, id: WaiterId) -> Option<PermitsRequest> {
        self.table.get(id)?.asked
    }

    /// Whether the first waiter in a lock's queue waits for permits.
    pub fn queue_is_for_permits(&self, lock: LockRef<'_>) -> bool {
        let first = self.table.waiters_of(lock).next();
        first.is_some_and(|first| first.mode == Mode::Permits)
    }

    /// A grant could not be delivered: it is given back as soon as a write is allowed.
    pub fn end_grant_later(&mut self, lock: &LockKey, owner: &Rc<[u8]>, grant: &Grant) {
        let one = [(lock.clone(), grant.token)];
        for (lock, token) in grant.taken.as_deref().unwrap_or(&one) {
            let release = PendingRelease {
                owner: Rc::clone(owner),
                mode: grant.mode,
                token: Some(*token),
                whole: false,
            };
            self.end_later(lock.as_ref(), release);
        }
    }

    /// Makes all readings so far out of date.
    pub(crate) fn invalidate(&mut self) {
        self.epoch = self.epoch.wrapping_add(1);
    }

    pub(crate) fn end_later(&mut self, lock: LockRef<'_>, release: PendingRelease) {
        self.invalidate();
        if let Some(id) = self.table.add_pending(lock, release) {
            self.agenda.add_later(id);
        }
    }

    /// Forgets all jobs. A replica has none: the primary ends the holds that were granted here.
    pub fn forget_what_is_due(&mut self) {
        for id in self.table.in_database(None) {
            while self.table.take_pending(id).is_some() {}
            self.table.take_dirty(id);
        }
        for multi in self.agenda.clear() {
            if let Some(multi) = self.multis.get_mut(multi) {
                multi.marked = false;
            }
        }
        while self.holds.any_dirty() {
            self.pop_dirty_hold();
        }
    }

    /// The server became a replica. Its waiters leave, and the new primary ends the holds
    /// of sessions. A session that has a hold begins another life, so that its client confirms its
    /// holds at the new primary: here it would not be told that one is lost.
    pub fn demoted(&mut self, effects: &mut Vec<Effect>) {
        self.invalidate();
        for id in self.holds.all() {
            if let Some(hold) = self.forget_hold(id) {
                let listener = self.sessions.end_life(hold.session);
                effects.extend(listener.map(Effect::Wake));
            }
        }
        for id in self.table.in_database(None) {
            while self.refuse_some(id, &CommandError::Unblocked, effects) {}
        }
        self.forget_what_is_due();
    }

    /// Raises the last token to this far ahead of the clock: at the start, after loading, at a
    /// promotion.
    pub fn start_tokens(&mut self, now: Now, guard_ms: i64) {
        self.tokens.start(now.wall_us, guard_ms);
        self.sessions.lives.start(now.wall_us, guard_ms);
    }

    // --- The delay after a start -----------------------------------------------------------------

    /// The server starts: for `delay_ms` no new grant is made. Holds that were loaded can be
    /// re-entered, renewed and released.
    pub fn start_grant_delay(&mut self, now: Now, delay_ms: i64) {
        self.grant_delay.start(now, delay_ms);
    }

    /// Sets the length of the delay, counted from the start. With 0 it is over.
    pub fn set_grant_delay(&mut self, delay_ms: i64) {
        self.grant_delay.set(delay_ms);
    }

    /// How long the delay still lasts, in milliseconds; 0 if it is over.
    pub fn grant_delay_left_ms(&self, now: Now) -> i64 {
        self.grant_delay.left_ms(now)
    }

    /// The TTL in the reply to a caller that does not get a lock: the rest of the present lease (-1
    /// without an end), or of the delay if that is longer.
    pub fn ttl_or_delay_ms(&self, ttl_ms: i64, now: Now) -> i64 {
        match ttl_ms {
            -1 => -1,
            _ => ttl_ms.max(self.grant_delay.left_ms(now)),
        }
    }

    /// Marks all queues dirty when the delay has ended. Otherwise the waiters that it kept back
    /// would wait for the next look at their keys, up to a second later.
    pub(crate) fn end_grant_delay(&mut self, now: Now) {
        if !self.grant_delay.take_end(now) {
            return;
        }
        for id in self.table.in_database(None) {
            if self.table.length(id) > 0 {
                self.mark_queue(id);
            }
        }
    }

    // --- Waiters that leave ----------------------------------------------------------------------

    /// Removes a waiter that does not get the lock. The owner of the next waiter may hold the lock
    /// and would be granted a re-entry, so the queue is marked dirty.
    pub(crate) fn leave_untold(&mut self, id: WaiterId) -> Option<Waiter> {
        let first = self.members(&id).iter();
        let first = first.filter(|waiter| self.table.is_first(**waiter));
        let queues = first.filter_map(|waiter| self.table.record_of(*waiter));
        let queues: Vec<RecordId> = queues.collect();
        let waiter = self.leave_queues(id);
        for queue in queues {
            self.mark_queue(queue);
        }
        waiter
    }

    /// Removes a waiter from its queue and from its session. A multi-wait is removed from all its
    /// queues.
    pub(crate) fn leave_queues(&mut self, id: WaiterId) -> Option<Waiter> {
        let id = self.main_waiter(id)?;
        let multi = self.table.get(id)?.multi;
        let waiter = self.table.leave(id)?;
        if let Some(session) = waiter.session {
            self.sessions.remove_waiter(session, id);
        }
        for member in multi.map_or_else(Vec::new, |multi| self.multis.remove(multi)) {
            self.table.leave(member);
        }
        Some(waiter)
    }

    /// All waiters of the wait that a waiter is part of, in the order of its locks.
    pub(crate) fn members<'s>(&'s self, id: &'s WaiterId) -> &'s [WaiterId] {
        match self.table.get(*id).and_then(|waiter| waiter.multi) {
            None => std::slice::from_ref(id),
            Some(multi) => self.multis.waiters(multi),
        }
    }

    /// The first waiter of the wait that a waiter is part of: its id stands for the whole wait.
    pub(crate) fn main_waiter(&self, id: WaiterId) -> Option<WaiterId> {
        self.members(&id).first().copied()
    }

    pub(crate) fn lock_of(&self, id: WaiterId) -> Option<LockKey> {
        let record = self.table.record_of(id)?;
        self.table.lock_of(record).cloned()
    }

    /// Drops the record of a session's hold, and tells nobody.
    pub(crate) fn forget_hold(&mut self, id: HoldId) -> Option<SessionHold> {
        let record = self.holds.get(id)?.record;
        let hold = self.holds.remove(self.table.holds_mut(record), id)?;
        self.table.note_hold(record, hold.since_us, None);
        self.table.close_if_idle(record);
        self.sessions.remove_hold(hold.session, id);
        Some(hold)
    }

    // --- Views -----------------------------------------------------------------------------------

    /// Whether any session has a hold.
    pub fn any_hold_of_session(&self) -> bool {
        self.holds.len() > 0
    }

    /// The counters.
    pub fn counters(&self) -> &Counters {
        &self.counters
    }

    /// The counters by patterns of lock names.
    pub fn pattern_counters(&self) -> &[PatternCounters] {
        self.table.patterns.counters()
    }

    /// Counts by these patterns, separated by spaces, from now on.
    pub fn set_metrics_patterns(&mut self, patterns: &[u8]) {
        self.table.set_patterns(patterns, &self.holds);
    }

    /// The longest present wait and hold of the locks that count for the pattern with this number,
    /// from 1, or of all.
    pub fn longest(&self, pattern: Option<usize>, now: Now) -> Longest {
        self.table.longest(pattern, now)
    }

    /// The number of waiters, sessions, holds and so on.
    pub fn gauges(&self) -> Gauges {
        Gauges {
            waiters: self.table.waiters(),
            locks: self.table.queues,
            pending_releases: self.table.pending,
            sessions: self.sessions.len(),
            unacknowledged_events: self.sessions.unacknowledged,
            session_holds: self.holds.len(),
        }
    }

    /// The queues of a database, in no particular order.
    pub fn views(&self, db: i32, now: Now) -> impl Iterator<Item = QueueView> + '_ {
        self.table.views(db, now)
    }

    /// The entries of the log, the newest first.
    pub fn log_entries(&self) -> impl Iterator<Item = &Rc<LogEntry>> {
        self.log.entries()
    }

    /// Forgets the entries of the log.
    pub fn reset_log(&mut self) {
        self.log.reset();
    }

    /// Sets which events are logged from now on, and how many entries are kept.
    pub fn set_log_options(&mut self, options: LogOptions) {
        self.table.long_after_ms = options.waits_ms;
        self.log.set_options(options);
    }

    /// All sessions, in no particular order.
    pub fn session_views(&self, now: Now) -> impl Iterator<Item = SessionView> + '_ {
        self.sessions.views(now)
    }

    /// Details of the hold with this token that are not in its key.
    pub fn hold_view(
        &self,
        lock: LockRef<'_>,
        owner: &[u8],
        mode: Mode,
        token: Option<Token>,
        now: Now,
    ) -> HoldView {
        let index = self.table.find(lock).and_then(|id| self.table.holds(id));
        let hold = index.and_then(|index| index.find(owner, mode));
        let hold = hold.and_then(|id| self.holds.get(id));
        let is_same = |hold: &&SessionHold| token.is_none() || hold.token == token;
        let noted = hold.filter(is_same).and_then(|hold| hold.since_us);
        let since_us = noted.or_else(|| self.tokens.granted_at(token?));
        HoldView {
            held_ms: since_us.map(|since_us| held_ms(since_us, now)),
            session: self.session_name(hold.map(|hold| hold.session)),
            client_id: hold.and_then(|hold| self.sessions.client_of(hold.session)),
        }
    }

    fn session_name(&self, session: Option<SessionId>) -> Option<Rc<[u8]>> {
        session.and_then(|session| self.sessions.name_of(session).cloned())
    }

    /// The waiters for a lock, in order. The client of a queued waiter is that of its session.
    pub fn queue(&self, lock: LockRef<'_>, now: Now) -> Vec<WaiterView> {
        let view = |waiter: &Waiter| WaiterView {
            owner: Rc::clone(&waiter.owner),
            mode: waiter.mode,
            permits: waiter.asked.map(|asked| asked.permits.get()),
            session: self.session_name(waiter.session),
            client_id: match waiter.reply_to {
                ReplyTarget::Client { client_id, .. } => client_id,
                ReplyTarget::Session(session) => self.sessions.client_of(session).unwrap_or(0),
            },
            waited_ms: now.mono_ms.saturating_sub(waiter.since),
            left_ms: waiter
                .wait_end
                .map_or(-1, |end| end.saturating_sub(now.mono_ms).max(0)),
        };
        self.table.waiters_of(lock).map(view).collect()
    }
}
