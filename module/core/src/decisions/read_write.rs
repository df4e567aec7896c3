//! The read-write lock: readers together, writers alone.
//!
//! A reader has a lease of its own: the TTL of one timeout key beside the hash, that of its latest
//! entry. A writer's lease is the TTL of the lock's key.
//!
//! Readers and writers wait in one queue, so that neither side starves: a reader that comes after a
//! waiting writer stands behind it, and readers at the head of the queue are granted together. One
//! decision grants one waiter. Whether the next one can be granted too is decided in the same turn,
//! when the key has been read for its owner.

use crate::decisions::decision::{Decision, Entered, Entry, Then, TokenAndEnd};
use crate::interface::effect::{Field, Holder, TimeoutKey, Value, Write};
use crate::interface::error::CommandError;
use crate::interface::stored::{Count, ReadHold, ReadWrite};
use crate::memory::log::metrics::count;
use crate::values::limits::INTEGER_MAX;
use crate::values::mode::Mode;
use crate::values::time::NEVER;
use crate::values::token::Token;
use std::rc::Rc;

/// Readers that never release leave their fields in the hash for as long as others read. One in
/// this many new readers, picked by its token, has the timer remove these fields. So the hash does
/// not grow without bound.
const SWEEP_EVERY: i64 = 64;

impl Decision<'_> {
    // --- Commands --------------------------------------------------------------------------------

    pub(crate) fn renew_read_write(
        &mut self,
        hash: &ReadWrite,
        mode: Mode,
        wanted: i64,
    ) -> TokenAndEnd {
        let (token, own_end, key_end) = match hash.own_read {
            Some(own) if mode == Mode::Read => {
                let key_end = hash.key_end(Some(wanted));
                match own.count {
                    Count::Valid(held) => {
                        let token = self.token_of_reader(&own);
                        self.set_timeout(&Holder::Caller, held, token, wanted);
                        (Some(token), Some(wanted), key_end)
                    }
                    // A malformed count does not tell which timeout key is the reader's. The hold
                    // lasts as long as the lock's key.
                    Count::Malformed => (own.token, key_end.or(hash.ends_at()), key_end),
                }
            }
            _ => {
                // Written even if it stays the same: WAIT counts only writes of its own connection,
                // so a client that waits for replicas renews the hold first.
                let key_end = hash.write_end(wanted).or(hash.ends_at());
                (hash.own_write.and_then(|own| own.token), key_end, key_end)
            }
        };
        self.expire(hash, key_end);
        (token, own_end)
    }

    /// The owner has given one hold back, and has `left`.
    pub(crate) fn count_down_read_write(
        &mut self,
        hash: &ReadWrite,
        left: i64,
        mode: Mode,
        lease_end: Option<i64>,
    ) -> TokenAndEnd {
        let (token, own_end, key_end) = match hash.own_read {
            Some(own) if mode == Mode::Read => {
                let token = self.token_of_reader(&own);
                let end = lease_end.unwrap_or_else(|| self.lease_of(hash, &own));
                self.set(Field::Owner(Holder::Caller), Value::Number(left));
                self.set_timeout(&Holder::Caller, left, token, end);
                self.delete_timeout(Holder::Caller, left.saturating_add(1));
                (Some(token), Some(end), hash.key_end(Some(end)))
            }
            _ => {
                let token = hash.own_write.and_then(|own| own.token);
                match token {
                    Some(token) => self.write(Write::SetWriter(Holder::Caller, left, token, false)),
                    None => self.set(Field::Writer(Holder::Caller), Value::Number(left)),
                }
                let key_end = lease_end.and_then(|wanted| hash.write_end(wanted));
                (token, key_end.or(hash.ends_at()), key_end)
            }
        };
        self.expire(hash, key_end);
        (token, own_end)
    }

    // --- The end of a hold -----------------------------------------------------------------------

    /// Ends the owner's hold in this mode.
    pub(crate) fn end_read_write(&mut self, hash: &ReadWrite, mode: Mode) -> Then {
        match hash.own_read {
            Some(own) if mode == Mode::Read => self.end_read(hash, &own),
            _ => self.end_write(hash),
        }
    }

    fn end_read(&mut self, hash: &ReadWrite, own: &ReadHold) -> Then {
        if let Count::Valid(held) = own.count {
            self.delete_timeout(Holder::Caller, held);
        }
        if hash.mode() == Mode::Read && hash.others_read.is_none() {
            return Then::Freed(Mode::Read);
        }
        self.write(Write::Remove(Field::Owner(Holder::Caller)));
        self.expire(hash, hash.key_end(None));
        if hash.own_write.is_none() && hash.others_read.is_none() {
            // The `mode` that another program wrote does not say `read`, but perhaps there is no
            // writer. Then the lock is free.
            return Then::MayLetIn;
        }
        Then::Nothing
    }

    fn end_write(&mut self, hash: &ReadWrite) -> Then {
        if hash.own_read.is_none() && hash.others_read.is_none() && !hash.others_write {
            return Then::Freed(Mode::Write);
        }
        self.write(Write::Remove(Field::Writer(Holder::Caller)));
        if hash.others_write {
            return Then::Nothing;
        }
        // The writer becomes a reader, and waiting readers may now read with it.
        self.set(Field::Mode, Value::Mode(Mode::Read));
        let without_writer = ReadWrite {
            own_write: None,
            ..*hash
        };
        let own_end = hash.own_read.map(|own| own.ends_at());
        self.expire(hash, without_writer.key_end(own_end));
        self.publish(Mode::Write);
        Then::MayLetIn
    }

    /// Sets the key's end to the end of its last reader's lease.
    pub(crate) fn end_key_with_readers(&mut self, hash: &ReadWrite) {
        let own_end = hash.own_read.map(|own| own.ends_at());
        self.expire(hash, hash.key_end(own_end));
    }

    /// Sets the key's expiry if it changes, and tells the queue when the lease ends.
    fn expire(&mut self, hash: &ReadWrite, key_end: Option<i64>) {
        if let Some(end) = key_end {
            self.write(Write::ExpireAt(end));
        }
        self.check_after(key_end.or(hash.ends_at()));
    }

    // --- Entering --------------------------------------------------------------------------------

    /// Enters a lock beside its present holders. Returns its own hold then.
    pub(crate) fn enter_read_write(
        &mut self,
        hash: &ReadWrite,
        entry: &Entry<'_>,
    ) -> Result<Entered, CommandError> {
        let own = hash.own(entry.mode);
        let (held, entered) = entry.counted(own.map(|(count, _)| count))?;
        let stored_token = own.and_then(|(_, token)| token);
        // A hold that a script took has no token yet.
        let token = stored_token.unwrap_or_else(|| self.mint());
        if held == 0 {
            self.count_grant();
        } else {
            count(&mut self.locks.counters.reentries);
        }
        let holder = || entry.holder.clone();
        if entry.mode != Mode::Write {
            if entered != held {
                self.set(Field::Owner(holder()), Value::Number(entered));
            }
        } else if entered != held || stored_token.is_none() {
            self.write(Write::SetWriter(holder(), entered, token, false));
        }
        let own_end = self.start_own_lease(hash, entry, entered, token);
        if entry.mode == Mode::Read && hash.mode() == Mode::Read {
            // Without a writer the lock is free when the last reader's lease is over.
            let readers_end = own_end.max(hash.others_read).filter(|end| *end != NEVER);
            self.check_after(readers_end);
        }
        if entry.mode == Mode::Read && held == 0 && token.get() % SWEEP_EVERY == 0 {
            self.locks.agenda.add_sweep(self.at);
        }
        Ok((entered, token, own_end))
    }

    /// Starts the lease of an entry by a reader or the writer. Returns when the owner's own hold
    /// ends.
    fn start_own_lease(
        &mut self,
        hash: &ReadWrite,
        entry: &Entry<'_>,
        entered: i64,
        token: Token,
    ) -> Option<i64> {
        let lease_end = entry.lease.end(self.now);
        let (own_end, key_end) = match (entry.mode, hash.own_read) {
            (Mode::Write, _) => {
                let keeps = entry.keeps(hash.ends_at, lease_end);
                let key_end = hash.write_end(lease_end).filter(|_| !keeps);
                (key_end.or(hash.ends_at()), key_end)
            }
            (_, Some(_)) if entry.once && !entry.waited => {
                self.set_timeout(&entry.holder, entered, token, lease_end);
                (Some(lease_end), hash.key_end(Some(lease_end)))
            }
            (_, own) => {
                let present = own.map(|own| self.lease_of(hash, &own));
                let end = lease_end.max(present.unwrap_or(lease_end));
                self.set_timeout(&entry.holder, entered, token, end);
                if own.is_some() && !entry.once {
                    self.delete_timeout(entry.holder.clone(), entered.saturating_sub(1));
                }
                (Some(end), hash.key_end_prolonged(end))
            }
        };
        self.expire(hash, key_end);
        own_end
    }

    // --- Timeout keys ----------------------------------------------------------------------------

    /// Each timeout key that we write has a token and the reader's longest lease, so that a look
    /// need not go on to the keys of its earlier entries.
    pub(crate) fn set_timeout(&mut self, reader: &Holder, number: i64, token: Token, end: i64) {
        let key = TimeoutKey {
            reader: reader.clone(),
            number,
        };
        self.write(Write::SetTimeout(key, Value::Number(token.get()), end));
    }

    fn delete_timeout(&mut self, reader: Holder, number: i64) {
        self.write(Write::DeleteTimeout(TimeoutKey { reader, number }));
    }

    /// The token of a reader's hold. A hold that Redisson's script began has none, and gets one
    /// with the first timeout key that we write for it.
    fn token_of_reader(&mut self, own: &ReadHold) -> Token {
        own.token.unwrap_or_else(|| self.mint())
    }

    /// When a reader's lease ends, as the end of a timeout key. If another program has removed the
    /// end of its timeout key, the lease ends with the lock's key; if that has none either, in a
    /// distant future.
    fn lease_of(&self, hash: &ReadWrite, own: &ReadHold) -> i64 {
        let distant = || self.now.wall_ms().saturating_add(INTEGER_MAX);
        match own.ends_at() {
            NEVER => hash.ends_at().unwrap_or_else(distant),
            end => end,
        }
    }

    /// Removes the fields of these readers, whose leases are over, from the hash.
    pub(crate) fn sweep(&mut self, gone: &[Box<[u8]>]) {
        for field in gone {
            self.write(Write::Remove(Field::Named(Rc::from(&**field))));
        }
    }
}
