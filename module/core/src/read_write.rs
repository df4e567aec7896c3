//! The read-write lock: readers together, writers alone.
//!
//! A reader's lease is its own, in timeout keys beside the hash, one an entry; a writer's is the
//! key's. Those who are kept waiting stand in one line, so that neither readers nor writers starve:
//! a reader that comes after a waiting writer stands behind it, and readers that are first in line
//! come in together. One waiter is granted at a time, and who may follow it is decided in the same
//! step, when the key has been read for that one.

use crate::line::{LockRef, QueueId, WaiterId};
use crate::lock::{Acquired, Locks};
use crate::metrics::count;
use crate::request::{Acquire, Release, Renew, WaitMode};
use crate::session::SessionId;
use crate::stored::{Count, ReadHold, ReadWrite, ttl_ms};
use crate::{CommandError, Effect, Grant, Holder, Lease, Mode, NEVER, Now, Token};
use std::rc::Rc;

/// An entry that is to be made.
struct Entry<'a> {
    owner: &'a [u8],
    holder: Holder,
    lease: Lease,
    mode: Mode,
    session: Option<SessionId>,
    once: bool,
}

/// Of a reader that entered more often than this, which only somebody else's script can have done
/// at a reasonable cost, the older timeout keys are left alone.
const TIMEOUTS_MAX: i64 = 10_000;

/// Readers that never release leave their fields behind for as long as others read. Of those who
/// begin to read, one in so many clears them away, whom its token picks: so the hash does not grow
/// without bound, and what that costs is shared.
const SWEEP_EVERY: i64 = 1024;

impl Locks {
    // --- Commands --------------------------------------------------------------------------------

    #[allow(
        clippy::too_many_arguments,
        reason = "the parts of one decision, all of them needed"
    )]
    pub(crate) fn acquire_read_write(
        &mut self,
        lock: LockRef<'_>,
        hash: &ReadWrite,
        request: &Acquire<'_>,
        session: Option<SessionId>,
        waiters_max: u32,
        now: Now,
        effects: &mut Vec<Effect>,
    ) -> Result<Acquired, CommandError> {
        let line = self.lines.find(lock);
        let holds = match request.mode {
            Mode::Write => hash.own_write.is_some(),
            // A writer may read, past any line. Nobody else may begin to while others wait.
            Mode::Read | Mode::Plain => {
                hash.own_read.is_some()
                    || hash.own_write.is_some()
                    || (hash.lets_read() && line.is_none())
            }
        };
        if holds {
            let entry = Entry::of(request, session);
            let (count, token) = self.enter(lock, hash, &entry, now, effects)?;
            if request.once {
                self.sessions.confirm(lock, request.owner, request.mode);
            }
            return Ok(Acquired::Held { count, token });
        }
        let ttl_ms = ttl_ms(hash.ends_at, now);
        if request.wait_mode != WaitMode::None {
            self.refuse_upgrade(line, hash, request)?;
        }
        let ends_at = crate::Stored::ReadWrite(*hash).ends_for(request.mode);
        self.check_after(line, ends_at, now);
        self.wait_for(line, ends_at, ttl_ms, request, waiters_max)
    }

    /// A reader that would wait for WRITE waits for itself, and so does one that waits for READ in
    /// the same line.
    fn refuse_upgrade(
        &mut self,
        line: Option<QueueId>,
        hash: &ReadWrite,
        request: &Acquire<'_>,
    ) -> Result<(), CommandError> {
        if request.mode != Mode::Write {
            return Ok(());
        }
        let has_place = line.is_some_and(|line| self.own_place(line, request).is_some());
        let waits_to_read = |line| {
            let mut own = self.lines.all_of(line, request.owner);
            own.any(|(_, waiter)| waiter.mode == Mode::Read)
        };
        let reads = hash.own_read.is_some() || (!has_place && line.is_some_and(waits_to_read));
        if !reads {
            return Ok(());
        }
        count(&mut self.counters.deadlocks_refused);
        Err(CommandError::Deadlock(crate::deadlock::upgrade_in_words(
            request.owner,
            request.key,
        )))
    }

    pub(crate) fn take_read_write(
        &mut self,
        lock: LockRef<'_>,
        request: &Acquire<'_>,
        session: Option<SessionId>,
        now: Now,
        effects: &mut Vec<Effect>,
    ) -> Acquired {
        let entry = Entry::of(request, session);
        let (count, token) = self.begin(lock, &entry, now, effects);
        Acquired::Held { count, token }
    }

    pub(crate) fn renew_read_write(
        &mut self,
        lock: LockRef<'_>,
        hash: &ReadWrite,
        request: &Renew<'_>,
        session: Option<SessionId>,
        now: Now,
        effects: &mut Vec<Effect>,
    ) {
        let wanted = request.lease.end(now);
        let (token, own_end, key_end) = match hash.own_read {
            Some(own) if request.mode == Mode::Read => {
                own.write_all(&Holder::Caller, own.token, wanted, effects);
                let key_end = hash.key_end(Some(wanted));
                // A hold without timeout keys, whose count is none, lasts as long as the key.
                let own_end = own
                    .numbers()
                    .map_or(key_end.or(hash.ends_at), |_| Some(wanted));
                (own.token, own_end, key_end)
            }
            _ => {
                let token = self.writers.of(lock, request.owner);
                // Written also if it stays: WAIT counts what its own connection has written, and
                // whoever waits for the replicas renews the hold before.
                let key_end = hash.write_end(wanted).or(hash.ends_at);
                (token, key_end, key_end)
            }
        };
        self.expire(lock, hash, key_end, now, effects);
        if let (Mode::Write, Some(token)) = (request.mode, token) {
            self.keep_writer(lock, request.owner, token, own_end);
        }
        self.bind(lock, request.owner, request.mode, session, token, own_end);
    }

    /// Gives one hold back. Those that are left.
    pub(crate) fn leave_read_write(
        &mut self,
        lock: LockRef<'_>,
        hash: &ReadWrite,
        held: i64,
        request: &Release<'_>,
        now: Now,
        effects: &mut Vec<Effect>,
    ) -> i64 {
        match hash.own_read {
            Some(own) if request.mode == Mode::Read => {
                self.leave_read(lock, hash, &own, held, request, now, effects)
            }
            _ => self.leave_write(lock, hash, held, request, now, effects),
        }
    }

    #[allow(
        clippy::too_many_arguments,
        reason = "the parts of one decision, all of them needed"
    )]
    fn leave_read(
        &mut self,
        lock: LockRef<'_>,
        hash: &ReadWrite,
        own: &ReadHold,
        held: i64,
        request: &Release<'_>,
        now: Now,
        effects: &mut Vec<Effect>,
    ) -> i64 {
        let left = held.saturating_sub(1);
        let lease_end = request.lease.map(|lease| lease.end(now));
        let rest_end = lease_end.or(own.rest_ends_at).filter(|_| left > 0);
        effects.push(Effect::DeleteTimeouts {
            holder: Holder::Caller,
            numbers: (held, held),
        });
        // What is left of the hold ends with its own timeout keys, and may have ended.
        let Some(end) = rest_end else {
            self.end_read(lock, hash, own, request.owner, now, effects);
            return 0;
        };
        effects.push(Effect::WriteCount {
            holder: Holder::Caller,
            mode: Mode::Read,
            count: Some(left),
        });
        let mut token = own.rest_token;
        if lease_end.is_some() {
            let rest = ReadHold {
                count: Count::Valid(left),
                ..*own
            };
            rest.write_all(&Holder::Caller, own.token, end, effects);
            token = own.token;
        }
        let key_end = hash.key_end(Some(end));
        self.expire(lock, hash, key_end, now, effects);
        let (owner, mode) = (request.owner, Mode::Read);
        let end = hash.end_with_key(Some(end), key_end);
        self.bind(lock, owner, mode, None, token, end);
        left
    }

    fn leave_write(
        &mut self,
        lock: LockRef<'_>,
        hash: &ReadWrite,
        held: i64,
        request: &Release<'_>,
        now: Now,
        effects: &mut Vec<Effect>,
    ) -> i64 {
        let left = held.saturating_sub(1);
        if left == 0 {
            self.end_write(lock, hash, request.owner, now, effects);
            return 0;
        }
        effects.push(Effect::WriteCount {
            holder: Holder::Caller,
            mode: Mode::Write,
            count: Some(left),
        });
        let key_end = request
            .lease
            .and_then(|lease| hash.write_end(lease.end(now)));
        self.expire(lock, hash, key_end, now, effects);
        let (owner, end) = (request.owner, key_end.or(hash.ends_at));
        let token = self.writers.of(lock, owner);
        if let Some(token) = token {
            self.keep_writer(lock, owner, token, end);
        }
        self.bind(lock, owner, Mode::Write, None, token, end);
        left
    }

    // --- The end of a hold -----------------------------------------------------------------------

    /// The owner's hold in this mode is over, whatever its count.
    pub(crate) fn end_read_write(
        &mut self,
        lock: LockRef<'_>,
        hash: &ReadWrite,
        owner: &[u8],
        mode: Mode,
        now: Now,
        effects: &mut Vec<Effect>,
    ) {
        match hash.own_read {
            Some(own) if mode == Mode::Read => {
                if let Some(numbers) = own.numbers() {
                    effects.push(Effect::DeleteTimeouts {
                        holder: Holder::Caller,
                        numbers,
                    });
                }
                self.end_read(lock, hash, &own, owner, now, effects);
            }
            _ => self.end_write(lock, hash, owner, now, effects),
        }
    }

    fn end_read(
        &mut self,
        lock: LockRef<'_>,
        hash: &ReadWrite,
        own: &ReadHold,
        owner: &[u8],
        now: Now,
        effects: &mut Vec<Effect>,
    ) {
        self.record_hold(own.token, now);
        self.unbind(lock, owner, Mode::Read);
        if hash.mode() == Mode::Read && hash.others_read.is_none() {
            return self.free(self.lines.find(lock), Mode::Read, now, effects);
        }
        if hash.own_write.is_none()
            && hash.others_read.is_none()
            && let Some(line) = self.lines.find(lock)
        {
            // Somebody else's `mode` says that it is written. If nobody is there, it is free.
            self.lines.settle_now(line);
        }
        effects.push(Effect::WriteCount {
            holder: Holder::Caller,
            mode: Mode::Read,
            count: None,
        });
        self.expire(lock, hash, hash.key_end(None), now, effects);
    }

    fn end_write(
        &mut self,
        lock: LockRef<'_>,
        hash: &ReadWrite,
        owner: &[u8],
        now: Now,
        effects: &mut Vec<Effect>,
    ) {
        self.record_hold(self.writers.of(lock, owner), now);
        self.unbind(lock, owner, Mode::Write);
        self.writers.forget_of(lock, owner);
        let line = self.lines.find(lock);
        if hash.own_read.is_none() && hash.others_read.is_none() && !hash.others_write {
            return self.free(line, Mode::Write, now, effects);
        }
        effects.push(Effect::WriteCount {
            holder: Holder::Caller,
            mode: Mode::Write,
            count: None,
        });
        if hash.others_write {
            return;
        }
        // The writer becomes a reader, and whoever was kept from reading may read with it.
        effects.push(Effect::WriteMode(Mode::Read));
        let without_writer = ReadWrite {
            own_write: None,
            ..*hash
        };
        let own_end = hash.own_read.map(|own| own.ends_at);
        let key_end = without_writer.key_end(own_end);
        self.expire(lock, hash, key_end, now, effects);
        effects.push(Effect::Publish(Mode::Write));
        if let Some(line) = line {
            self.lines.settle_now(line);
        }
    }

    /// The key is to expire then, if that changes; and the line hears of it.
    fn expire(
        &mut self,
        lock: LockRef<'_>,
        hash: &ReadWrite,
        key_end: Option<i64>,
        now: Now,
        effects: &mut Vec<Effect>,
    ) {
        effects.extend(key_end.map(Effect::Expire));
        let ends_at = key_end.or(hash.ends_at);
        // Also where it is a reader that prolongs it, whom somebody else wrote beside the writer.
        if hash.mode() == Mode::Write {
            self.writers.lasts_until(lock, ends_at.unwrap_or(NEVER));
        }
        self.check_after(self.lines.find(lock), ends_at, now);
    }

    // --- Entering --------------------------------------------------------------------------------

    /// Grants a waiter that is first in line, on top of what is stored or of a free lock.
    pub(crate) fn hand_over_read_write(
        &mut self,
        id: WaiterId,
        line: QueueId,
        present: Option<&ReadWrite>,
        message: Option<Mode>,
        now: Now,
        effects: &mut Vec<Effect>,
    ) {
        let Some(key) = self.lines.lock_of(line).cloned() else {
            return;
        };
        let Some(waiter) = self.leave(id) else { return };
        let (owner, mode, lock) = (Rc::clone(&waiter.owner), waiter.mode, key.as_ref());
        let entry = Entry {
            owner: &owner,
            holder: Holder::Waiter(Rc::clone(&owner)),
            lease: waiter.lease,
            mode,
            session: waiter.session,
            once: false,
        };
        let entered = match present {
            None => Ok(self.begin(lock, &entry, now, effects)),
            Some(hash) => self.enter(lock, hash, &entry, now, effects),
        };
        // Whoever calls has seen that it can enter.
        let Ok((count, token)) = entered else { return };
        effects.extend(message.map(Effect::Publish));
        self.count_waited(now.mono_ms.saturating_sub(waiter.since));
        let grant = Grant {
            token,
            mode,
            several: None,
        };
        self.tell_granted(&key, waiter.seat, Rc::clone(&owner), count, grant, effects);
        if let Some((_, next)) = self.lines.first(line)
            && next.joint.is_none()
            && match mode {
                // A reader comes in with it, and a writer is to know when the last reader's lease
                // ends.
                Mode::Read => true,
                Mode::Write | Mode::Plain => next.owner == owner,
            }
        {
            self.lines.settle_now(line);
        }
    }

    /// Takes a free lock.
    fn begin(
        &mut self,
        lock: LockRef<'_>,
        entry: &Entry<'_>,
        now: Now,
        effects: &mut Vec<Effect>,
    ) -> (i64, Token) {
        let (token, end) = (self.tokens.mint(now.wall_us), entry.lease.end(now));
        count(&mut self.counters.grants);
        self.writers.forget(lock);
        effects.push(Effect::WriteMode(entry.mode));
        effects.push(entry.count(1));
        match entry.mode {
            Mode::Read | Mode::Plain => effects.push(Effect::WriteTimeouts {
                holder: entry.holder.clone(),
                numbers: (1, 1),
                token: Some(token),
                ends_at: end,
            }),
            Mode::Write => {
                self.writers.forget_overdue(now);
                self.writers.keep(lock, entry.owner, token, end);
            }
        }
        effects.push(Effect::Expire(end));
        self.check_after(self.lines.find(lock), Some(end), now);
        let (owner, session) = (entry.owner, entry.session);
        self.bind(lock, owner, entry.mode, session, Some(token), Some(end));
        (1, token)
    }

    /// Enters a lock that lets the owner in.
    fn enter(
        &mut self,
        lock: LockRef<'_>,
        hash: &ReadWrite,
        entry: &Entry<'_>,
        now: Now,
        effects: &mut Vec<Effect>,
    ) -> Result<(i64, Token), CommandError> {
        let (own, token) = match entry.mode {
            Mode::Read | Mode::Plain => (
                hash.own_read.map(|own| own.count),
                hash.own_read.and_then(|own| own.token),
            ),
            Mode::Write => (hash.own_write, self.writers.of(lock, entry.owner)),
        };
        let held = match own {
            None => 0,
            Some(Count::Valid(held)) => held,
            Some(Count::Malformed) => return Err(CommandError::HoldCountMalformed),
        };
        let entered = if entry.once && held > 0 {
            Some(held)
        } else {
            Count::next(held)
        };
        let entered = entered.ok_or(CommandError::HoldCountOverflow)?;
        if held == 0 {
            // Others read on, so the hash is still there when the owner's own lease is over. What
            // is on record of it, if nobody has looked yet, is not this hold.
            self.lose_hold(lock, entry.owner, entry.mode, now, effects);
        }
        let token = token.unwrap_or_else(|| self.tokens.mint(now.wall_us));
        count(if held == 0 {
            &mut self.counters.grants
        } else {
            &mut self.counters.reentries
        });
        if entered != held {
            effects.push(entry.count(entered));
        }
        let lease_end = entry.lease.end(now);
        let (own_end, key_end) = match (entry.mode, hash.own_read) {
            (Mode::Write, _) => {
                let key_end = hash.write_end(lease_end);
                let end = key_end.or(hash.ends_at);
                self.keep_writer(lock, entry.owner, token, end);
                (end, key_end)
            }
            (_, Some(own)) if entry.once => {
                own.write_all(&entry.holder, Some(token), lease_end, effects);
                (Some(lease_end), hash.key_end(Some(lease_end)))
            }
            (_, own) => {
                effects.push(Effect::WriteTimeouts {
                    holder: entry.holder.clone(),
                    numbers: (entered, entered),
                    token: Some(token),
                    ends_at: lease_end,
                });
                let end = own.map_or(lease_end, |own| own.ends_at.max(lease_end));
                (Some(end), hash.key_end_prolonged(lease_end))
            }
        };
        self.expire(lock, hash, key_end, now, effects);
        if entry.mode == Mode::Read && hash.mode() == Mode::Read {
            // With readers alone the lock is free when the last of them is gone.
            let readers_end = own_end.max(hash.others_read).filter(|end| *end != NEVER);
            self.check_after(self.lines.find(lock), readers_end, now);
        }
        if entry.mode == Mode::Read && held == 0 && token.get() % SWEEP_EVERY == 0 {
            effects.push(Effect::SweepReaders);
        }
        let (owner, session) = (entry.owner, entry.session);
        let own_end = hash.end_with_key(own_end, key_end);
        self.bind(lock, owner, entry.mode, session, Some(token), own_end);
        Ok((entered, token))
    }

    fn keep_writer(&mut self, lock: LockRef<'_>, owner: &[u8], token: Token, end: Option<i64>) {
        self.writers.keep(lock, owner, token, end.unwrap_or(NEVER));
    }
}

impl<'a> Entry<'a> {
    fn of(request: &Acquire<'a>, session: Option<SessionId>) -> Self {
        Self {
            owner: request.owner,
            holder: Holder::Caller,
            lease: request.lease,
            mode: request.mode,
            session,
            once: request.once,
        }
    }

    fn count(&self, count: i64) -> Effect {
        Effect::WriteCount {
            holder: self.holder.clone(),
            mode: self.mode,
            count: Some(count),
        }
    }
}

impl ReadHold {
    /// The numbers of its timeout keys, first and last.
    fn numbers(&self) -> Option<(i64, i64)> {
        match self.count {
            Count::Valid(last) => Some((last.saturating_sub(TIMEOUTS_MAX - 1).max(1), last)),
            Count::Malformed => None,
        }
    }

    /// Writes all its timeout keys.
    fn write_all(
        &self,
        holder: &Holder,
        token: Option<Token>,
        ends_at: i64,
        effects: &mut Vec<Effect>,
    ) {
        effects.extend(self.numbers().map(|numbers| Effect::WriteTimeouts {
            holder: holder.clone(),
            numbers,
            token,
            ends_at,
        }));
    }
}
