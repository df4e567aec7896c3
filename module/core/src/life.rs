//! Sessions as the locks see them: what begins with a life-line and ends with it.

use crate::ending::PendingRelease;
use crate::hold::HoldId;
use crate::line::{LockKey, LockRef, ReplyTarget, Waiter, WaiterId};
use crate::lock::Locks;
use crate::metrics::count;
use crate::request::{Events, Release, SessionRef};
use crate::session::{Event, EventKind, Listener, LostReason, SessionId, SessionLimits};
use crate::stored::{NEVER, Stored};
use crate::{
    CommandError, Effect, Gauges, Grant, Mode, Now, QueueView, Token, Wait, WaitOutcome, WaiterView,
};
use std::collections::BTreeSet;
use std::rc::Rc;

impl Locks {
    // --- The life-line ---------------------------------------------------------------------------

    /// RLOCK.EVENTS: this client's connection is the session's life-line from now on. A client that
    /// waited there before is told that it no longer is.
    ///
    /// # Errors
    /// Another user's session; a session that would begin where there is no room for it.
    pub fn attach(
        &mut self,
        request: &Events<'_>,
        client_id: u64,
        limits: SessionLimits,
        effects: &mut Vec<Effect>,
    ) -> Result<SessionId, CommandError> {
        let Events {
            session, grace_ms, ..
        } = *request;
        let (session, former) = self.sessions.attach(session, client_id, grace_ms, limits)?;
        effects.extend(former.map(Effect::TakenOver));
        Ok(session)
    }

    /// Whether the session lives by this client's connection.
    pub fn lives_by(&self, session: SessionId, client_id: u64) -> bool {
        self.sessions.client_of(session) == Some(client_id)
    }

    /// What has happened to the session since the last time, oldest first.
    pub fn fetch(&mut self, session: SessionId) -> Vec<Event> {
        self.sessions.fetch(session)
    }

    /// The session's client waits for the next event.
    pub fn listen(&mut self, session: SessionId, listener: Listener, wait: Wait, now: Now) {
        self.sessions.listen(session, listener, wait, now);
    }

    /// The client that waited for events does so no more, though its connection may live on.
    pub fn listen_no_more(&mut self, session: SessionId, listener: Listener) {
        self.sessions.stop_listening_as(session, listener);
    }

    /// A connection is gone, and with it the sessions that lived by it. Whether there was one.
    pub fn client_gone(&mut self, client_id: u64, now: Now, effects: &mut Vec<Effect>) -> bool {
        let mut any = false;
        while let Some(session) = self.sessions.of_client(client_id) {
            any = true;
            self.detach(session, now, effects);
        }
        any
    }

    /// The connection by which a session lived is gone, or counts as gone.
    fn detach(&mut self, session: SessionId, now: Now, effects: &mut Vec<Effect>) {
        let belongings = self.sessions.detach(session, now);
        for id in belongings.waiters {
            let waiter = self.withdraw(id);
            count(&mut self.counters.departures);
            // A queued one has nobody left to be told; one that is blocked on a connection of its
            // own has.
            if let Some(ReplyTarget::Client { handle, .. }) = waiter.map(|waiter| waiter.seat) {
                let why = WaitOutcome::Refused(CommandError::NoSession);
                effects.push(Effect::Dismiss {
                    client: handle,
                    why,
                });
            }
        }
        let (reads, others) = self.reads_first(belongings.holds);
        self.end_later(reads);
        for event in belongings.unfetched {
            if let EventKind::Granted(grant) = event.kind {
                self.give_back_later(event.lock, &event.owner, grant);
            }
        }
        self.end_later(others);
    }

    /// A grant could not be delivered: it is given back as soon as a write is allowed.
    pub fn give_back_later(&mut self, lock: LockKey, owner: &Rc<[u8]>, grant: Grant) {
        let ending = |lock, token| PendingRelease {
            lock,
            owner: Rc::clone(owner),
            mode: grant.mode,
            token: Some(token),
            whole: false,
        };
        match grant.several {
            None => self.endings.add(ending(lock, grant.token)),
            Some(several) => {
                for (lock, token) in several.iter().cloned() {
                    self.endings.add(ending(lock, token));
                }
            }
        }
    }

    /// A writer's reading goes before its writing: were the writer to become a reader in between, a
    /// wait of the same owner would enter what it reads, and lose that at once.
    fn reads_first(&self, holds: BTreeSet<HoldId>) -> (Vec<HoldId>, Vec<HoldId>) {
        let reads = |id: &HoldId| {
            self.holds
                .get(*id)
                .is_some_and(|hold| hold.mode == Mode::Read)
        };
        holds.into_iter().partition(reads)
    }

    fn end_later(&mut self, holds: Vec<HoldId>) {
        for id in holds {
            if let Some(hold) = self.holds.remove(id) {
                self.endings.add(PendingRelease {
                    lock: hold.lock,
                    owner: hold.owner,
                    mode: hold.mode,
                    token: hold.token,
                    whole: true,
                });
            }
        }
    }

    /// On a replica nothing is to be done: what was granted here is the primary's to end.
    pub fn forget_what_is_due(&mut self) {
        self.endings.clear();
        while self.lines.next_touched().is_some() {}
        while self.holds.next_touched().is_some() {}
    }

    /// The server became a replica: nobody waits there, and what sessions hold is the new primary's
    /// to end.
    pub fn demoted(&mut self, effects: &mut Vec<Effect>) {
        for id in self.holds.all() {
            self.forget(id);
        }
        self.writers.forget_all();
        for lock in self.lines.locks() {
            self.dismiss_all(lock.as_ref(), &CommandError::Unblocked, effects);
        }
        self.forget_what_is_due();
    }

    // --- What time brings ------------------------------------------------------------------------

    /// Milliseconds until something is due; none if nothing ever is.
    pub fn next_deadline(&self, now: Now) -> Option<i64> {
        let is_marked = self.lines.any_touched() || self.holds.any_touched();
        if is_marked || !self.endings.is_empty() || self.sessions.any_overflowing() {
            return Some(0);
        }
        let check = self
            .holds
            .next_check()
            .map(|at| at.saturating_sub(now.wall_ms()));
        let session = self
            .sessions
            .next_deadline()
            .map(|at| at.saturating_sub(now.mono_ms));
        let others = check.into_iter().chain(session).map(|left| left.max(0));
        others.chain(self.lines.next_deadline(now)).min()
    }

    /// Time has passed: marks what is to be looked at, and ends what is over.
    pub fn passed(&mut self, now: Now, effects: &mut Vec<Effect>) {
        self.lines.touch_due(now);
        self.holds.touch_due(now);
        while let Some(session) = self.sessions.listened_enough(now) {
            effects.extend(self.sessions.stop_listening(session).map(Effect::Wake));
        }
        while let Some(session) = self.sessions.next_overflowing() {
            count(&mut self.counters.sessions_overflowed);
            self.detach(session, now, effects);
        }
        while let Some(session) = self.sessions.grace_over(now) {
            let holds = self.sessions.end(session);
            let (reads, others) = self.reads_first(holds);
            self.end_later(reads);
            self.end_later(others);
        }
    }

    /// Whether any hold must end. Asked before each change of a key: mostly there is none.
    pub fn is_anything_ending(&self) -> bool {
        !self.endings.is_empty()
    }

    /// The next hold that must end. The driver reads its key for its owner and calls
    /// [`end`](Self::end).
    pub fn next_ending(&mut self) -> Option<PendingRelease> {
        self.endings.take_first()
    }

    /// The same, of one lock: before anything else is decided there that may be written. Were the
    /// hold entered again instead, by a command, by a waiter of its owner or as a part of several,
    /// the new entry would be gone as soon as it was told.
    pub fn next_ending_of(&mut self, lock: LockRef<'_>) -> Option<PendingRelease> {
        self.endings.take_first_of(lock)
    }

    /// Ends a hold, if it is still the one that was meant. Whether the lock became free by it: who
    /// has it now was granted it in this step.
    pub fn end(
        &mut self,
        ending: &PendingRelease,
        stored: Stored,
        now: Now,
        effects: &mut Vec<Effect>,
    ) -> bool {
        let (lock, before) = (ending.lock.as_ref(), effects.len());
        if !self.is_hold(lock, &stored, &ending.owner, ending.mode, ending.token) {
            self.touched(lock);
            return false;
        }
        if ending.whole {
            self.end_whole(ending, stored, now, effects);
        } else {
            self.take_back(ending, stored, now, effects);
        }
        effects.iter().skip(before).any(|of| *of == Effect::Free)
    }

    fn end_whole(
        &mut self,
        ending: &PendingRelease,
        stored: Stored,
        now: Now,
        effects: &mut Vec<Effect>,
    ) {
        let lock = ending.lock.as_ref();
        match stored {
            Stored::Plain(hash) => self.end_plain(lock, &hash, &ending.owner, now, effects),
            Stored::ReadWrite(hash) => {
                self.end_read_write(lock, &hash, &ending.owner, ending.mode, now, effects);
            }
            Stored::Free | Stored::NoHolder | Stored::OtherType => {}
        }
        count(&mut self.counters.session_releases);
    }

    fn take_back(
        &mut self,
        ending: &PendingRelease,
        stored: Stored,
        now: Now,
        effects: &mut Vec<Effect>,
    ) {
        let request = Release {
            key: &ending.lock.name,
            owner: &ending.owner,
            mode: ending.mode,
            token: ending.token,
            lease: None,
        };
        if let Ok(Some(_)) = self.give_back(ending.lock.as_ref(), stored, &request, now, effects) {
            count(&mut self.counters.grants_taken_back);
        }
    }

    /// Whether what is stored has the owner's hold in this mode, begun with this token. A writer
    /// whose token is not known cannot be told from a later one; nor can a reader of whom only the
    /// timeout keys of a script are left.
    fn is_hold(
        &self,
        lock: LockRef<'_>,
        stored: &Stored,
        owner: &[u8],
        mode: Mode,
        token: Option<Token>,
    ) -> bool {
        let own = stored.own(mode);
        own.is_some_and(|(_, stored_token)| match mode {
            Mode::Write => {
                let known = self.writers.of(lock, owner);
                known.is_none() || known == token
            }
            Mode::Read => stored_token.is_none() || stored_token == token,
            // A script's hold has none, and the key has one if somebody else in it was given it.
            Mode::Plain => token.is_none() || stored_token == token,
        })
    }

    /// The next hold of a session whose key may have changed: its lock, and its owner, for whom the
    /// driver is to read the key.
    pub fn next_hold_to_check(&mut self) -> Option<(LockKey, Rc<[u8]>, Mode)> {
        let id = self.holds.next_touched()?;
        let hold = self.holds.get(id)?;
        Some((hold.lock.clone(), Rc::clone(&hold.owner), hold.mode))
    }

    /// Tells a session if its hold is lost.
    pub fn check_hold(
        &mut self,
        lock: LockRef<'_>,
        owner: &[u8],
        mode: Mode,
        stored: Stored,
        now: Now,
        effects: &mut Vec<Effect>,
    ) {
        let Some(id) = self.holds.find(lock, owner, mode) else {
            return;
        };
        let token = self.holds.get(id).and_then(|hold| hold.token);
        if self.is_hold(lock, &stored, owner, mode, token) {
            self.holds.check_after(id, stored.own_end(mode));
        } else {
            self.lose(id, None, now, effects);
        }
    }

    /// The key of a session's hold is served by another node now: the hold is not lost, but no
    /// longer ours to watch.
    pub fn hold_moved(&mut self, lock: LockRef<'_>, owner: &[u8], mode: Mode) {
        if let Some(id) = self.holds.find(lock, owner, mode) {
            self.forget(id);
        }
    }

    /// Instead of checking a hold whose key cannot be looked at now.
    pub fn check_hold_again(&mut self, lock: LockRef<'_>, owner: &[u8], mode: Mode, now: Now) {
        if let Some(id) = self.holds.find(lock, owner, mode) {
            self.holds
                .check_after(id, Some(now.wall_ms().saturating_add(1000)));
        }
    }

    // --- Holds of sessions -----------------------------------------------------------------------

    pub(crate) fn listened(
        &self,
        session: Option<SessionRef<'_>>,
    ) -> Result<Option<SessionId>, CommandError> {
        session
            .map(|session| self.sessions.listened(session))
            .transpose()
    }

    /// The owner holds the lock, with this token and until then. It belongs to the session, if one
    /// is named; if none is, it stays with the one it has.
    pub(crate) fn bind(
        &mut self,
        lock: LockRef<'_>,
        owner: &[u8],
        mode: Mode,
        session: Option<SessionId>,
        token: Option<Token>,
        ends_at: Option<i64>,
    ) {
        let known = self.holds.find(lock, owner, mode);
        let id = match (known, session) {
            (Some(id), None) => {
                // A hold that a script took gets its token when it is entered again.
                self.holds.note_token(id, token);
                id
            }
            (Some(id), Some(session)) => {
                if let Some(former) = self.holds.rebind(id, session, token) {
                    self.sessions.remove_hold(former, id);
                }
                self.sessions.add_hold(session, id);
                id
            }
            (None, Some(session)) => {
                let (lock, owner) = (LockKey::from(lock), Rc::from(owner));
                let Some(id) = self.holds.add(lock, owner, mode, session, token) else {
                    return;
                };
                self.sessions.add_hold(session, id);
                id
            }
            (None, None) => return,
        };
        self.holds
            .check_after(id, ends_at.filter(|end| *end != NEVER));
    }

    /// The owner has given the lock back.
    pub(crate) fn unbind(&mut self, lock: LockRef<'_>, owner: &[u8], mode: Mode) {
        if let Some(id) = self.holds.find(lock, owner, mode) {
            self.forget(id);
        }
    }

    /// If a session has this hold, it is lost.
    pub(crate) fn lose_hold(
        &mut self,
        lock: LockRef<'_>,
        owner: &[u8],
        mode: Mode,
        now: Now,
        effects: &mut Vec<Effect>,
    ) {
        if let Some(id) = self.holds.find(lock, owner, mode) {
            self.lose(id, None, now, effects);
        }
    }

    /// All that sessions have of a lock is lost.
    pub(crate) fn lose_holds(
        &mut self,
        lock: LockRef<'_>,
        reason: Option<LostReason>,
        now: Now,
        effects: &mut Vec<Effect>,
    ) {
        for id in self.holds.of(lock) {
            self.lose(id, reason, now, effects);
        }
    }

    fn lose(
        &mut self,
        id: HoldId,
        reason: Option<LostReason>,
        now: Now,
        effects: &mut Vec<Effect>,
    ) {
        let Some(hold) = self.holds.remove(id) else {
            return;
        };
        let by_time = if hold.lease_over(now) {
            LostReason::Expired
        } else {
            LostReason::Deleted
        };
        let kind = EventKind::Lost(reason.unwrap_or(by_time));
        self.sessions.remove_hold(hold.session, id);
        count(&mut self.counters.holds_lost);
        self.tell(
            hold.session,
            Event {
                kind,
                lock: hold.lock,
                owner: hold.owner,
            },
            effects,
        );
    }

    fn forget(&mut self, id: HoldId) {
        if let Some(hold) = self.holds.remove(id) {
            self.sessions.remove_hold(hold.session, id);
        }
    }

    // --- Word to those who wait ------------------------------------------------------------------

    pub(crate) fn tell(&mut self, session: SessionId, event: Event, effects: &mut Vec<Effect>) {
        effects.extend(self.sessions.tell(session, event).map(Effect::Wake));
    }

    /// A waiter leaves the line with nothing, and is told why.
    pub(crate) fn dismiss(
        &mut self,
        id: WaiterId,
        why: WaitOutcome,
        effects: &mut Vec<Effect>,
    ) -> Option<()> {
        // One that waits for several locks is told once, under the first.
        let id = self.main_waiter(id)?;
        let lock = self.lock_of(id)?;
        let waiter = self.withdraw(id)?;
        self.tell_dismissed(&lock, waiter.seat, waiter.owner, why, effects);
        Some(())
    }

    pub(crate) fn tell_dismissed(
        &mut self,
        lock: &LockKey,
        seat: ReplyTarget,
        owner: Rc<[u8]>,
        why: WaitOutcome,
        effects: &mut Vec<Effect>,
    ) {
        match seat {
            ReplyTarget::Client { handle, .. } => effects.push(Effect::Dismiss {
                client: handle,
                why,
            }),
            ReplyTarget::Session(session) => {
                let kind = match why {
                    WaitOutcome::NotAcquired { ttl_ms } => EventKind::Timeout { ttl_ms },
                    WaitOutcome::Refused(refusal) => EventKind::Error(refusal),
                };
                self.tell(
                    session,
                    Event {
                        kind,
                        lock: lock.clone(),
                        owner,
                    },
                    effects,
                );
            }
        }
    }

    /// Takes a waiter out that gets nothing. Who is first now may be one whose owner holds the
    /// lock, and what one holds is re-entered, never waited for: the line is to be looked at.
    pub(crate) fn withdraw(&mut self, id: WaiterId) -> Option<Waiter> {
        let joint = self.lines.get(id)?.joint;
        let of_joint = joint.map_or(&[][..], |joint| self.joints.waiters(joint));
        for member in of_joint.iter().chain(joint.is_none().then_some(&id)) {
            if self.lines.is_first(*member)
                && let Some(line) = self.lines.line_of(*member)
            {
                self.lines.touch(line);
            }
        }
        self.leave(id)
    }

    /// Takes a waiter out of its line and of its session; one that waits for several locks, out of
    /// the lines of all.
    pub(crate) fn leave(&mut self, id: WaiterId) -> Option<Waiter> {
        let id = self.main_waiter(id)?;
        let joint = self.lines.get(id)?.joint;
        let waiter = self.lines.leave(id)?;
        if let Some(session) = waiter.session {
            self.sessions.remove_waiter(session, id);
        }
        for member in joint.map_or_else(Vec::new, |joint| self.joints.remove(joint)) {
            self.lines.leave(member);
        }
        Some(waiter)
    }

    /// Of a waiter that is part of a wait for several locks, the one in the line of the first.
    fn main_waiter(&self, id: WaiterId) -> Option<WaiterId> {
        match self.lines.get(id)?.joint {
            None => Some(id),
            Some(joint) => self.joints.waiters(joint).first().copied(),
        }
    }

    pub(crate) fn lock_of(&self, id: WaiterId) -> Option<LockKey> {
        self.lines
            .line_of(id)
            .and_then(|line| self.lines.lock_of(line))
            .cloned()
    }

    // --- To look at ------------------------------------------------------------------------------

    /// How many there are of everything.
    pub fn gauges(&self) -> Gauges {
        Gauges {
            sessions: self.sessions.len(),
            unfetched_events: self.sessions.unfetched(),
            session_holds: self.holds.len(),
            ..self.lines.gauges()
        }
    }

    /// The lines of a database, in no particular order.
    pub fn views(&self, db: i32, now: Now) -> impl Iterator<Item = QueueView> + '_ {
        self.lines.views(db, now)
    }

    /// The token of the writer of a read-write lock, where this server granted it.
    pub fn writer_token(&self, lock: LockRef<'_>, owner: &[u8]) -> Option<Token> {
        self.writers.of(lock, owner)
    }

    /// Those who wait for a lock, in order. A queued waiter's client is its session's.
    pub fn queue(&self, lock: LockRef<'_>, now: Now) -> Vec<WaiterView> {
        let view = |waiter: &Waiter| WaiterView {
            owner: Rc::clone(&waiter.owner),
            mode: waiter.mode,
            client_id: match waiter.seat {
                ReplyTarget::Client { client_id, .. } => client_id,
                ReplyTarget::Session(session) => self.sessions.client_of(session).unwrap_or(0),
            },
            waited_ms: now.mono_ms.saturating_sub(waiter.since),
            left_ms: waiter
                .wait_end
                .map_or(-1, |end| end.saturating_sub(now.mono_ms).max(0)),
        };
        self.lines.waiters_of(lock).map(view).collect()
    }
}
