//! What each kind of lock does with an entry, a release and a renewal.

use crate::decisions::decision::{Decision, Entered, Entry, Then};
use crate::interface::effect::{Field, Value, Write};
use crate::interface::error::CommandError;
use crate::interface::event::{EventKind, LostReason};
use crate::interface::request::{Release, Renew};
use crate::interface::stored::Stored;
use crate::interface::stored_permits::PermitsHash;
use crate::memory::hold::SessionHold;
use crate::values::ids::SessionId;
use crate::values::limits::HOLD_COUNT_MAX;
use crate::values::mode::Mode;
use crate::values::token::Token;

impl Decision<'_> {
    /// Enters a lock that the owner may enter: takes it if it is free, or enters beside its present
    /// holders. Returns the hold count (or the number of permits) and the token.
    ///
    /// # Errors
    /// The owner's own hold cannot be entered once more. Then nothing is written.
    pub(crate) fn enter(
        &mut self,
        stored: &Stored,
        entry: &Entry<'_>,
    ) -> Result<(i64, Token), CommandError> {
        // A session may still have a former hold of this owner on record, which others ended, or
        // whose lease is over. It is not the new hold, so it counts as lost.
        if stored.own(entry.mode).is_none()
            && let Some(id) = self.session_hold(entry.owner, entry.mode)
        {
            self.lose(id, None);
        }
        if stored.leaves_hash() {
            self.write(Write::Delete);
        }
        let (count, token, ends_at) = match (entry.mode, stored) {
            (Mode::Permits, _) => self.enter_permits(&stored.permits(), entry)?,
            (Mode::Plain, Stored::Plain(hash)) => self.reenter_plain(hash, entry)?,
            (Mode::Read | Mode::Write, Stored::ReadWrite(hash)) => {
                self.enter_read_write(hash, entry)?
            }
            _ => self.begin(entry),
        };
        self.bind(entry.owner, entry.mode, entry.session, Some(token), ends_at);
        Ok((count, token))
    }

    /// Takes a free lock with one holder, or as the first reader or the writer.
    fn begin(&mut self, entry: &Entry<'_>) -> Entered {
        let token = entry.token.unwrap_or_else(|| self.mint());
        let end = entry.lease.end(self.now);
        self.count_grant();
        let holder = entry.holder.clone();
        match entry.mode {
            Mode::Write => self.write(Write::SetWriter(holder, 1, token, true)),
            Mode::Read => {
                let mode = (Field::Mode, Value::Mode(Mode::Read));
                let own = (Field::Owner(holder), Value::Number(1));
                self.write(Write::Set(mode, Some(own)));
                self.set_timeout(&entry.holder, 1, token, end);
            }
            Mode::Plain | Mode::Permits => {
                let own = (Field::Owner(holder), Value::Number(1));
                let fence = (Field::Fence, Value::Fence(token));
                self.write(Write::Set(own, Some(fence)));
            }
        }
        self.write(Write::ExpireAt(end));
        self.check_after(Some(end));
        (1, token, Some(end))
    }

    /// Gives one of the owner's `held` holds back, or permits. Returns what the owner has left.
    pub(crate) fn release_one(
        &mut self,
        stored: &Stored,
        held: i64,
        request: &Release<'_>,
    ) -> Result<(i64, Then), CommandError> {
        let (left, mode) = (held.saturating_sub(1), request.mode);
        let lease_end = request.lease.map(|lease| lease.end(self.now));
        let (token, ends_at) = match stored {
            Stored::Permits(hash) => return self.release_permits(hash, request),
            _ if left == 0 => return Ok((0, self.give_back(stored, request))),
            Stored::Plain(hash) => self.count_down_plain(hash, left, lease_end),
            Stored::ReadWrite(hash) => self.count_down_read_write(hash, left, mode, lease_end),
            _ => return Ok((left, Then::Nothing)),
        };
        self.bind(request.owner, mode, None, token, ends_at);
        if held == HOLD_COUNT_MAX {
            // It could not be entered once more.
            self.holder_may_have_all(request.owner);
        }
        Ok((left, Then::Nothing))
    }

    /// The owner gives its hold back. The session that has it is told, unless it was its own
    /// connection that gave it back.
    pub(crate) fn give_back(&mut self, stored: &Stored, request: &Release<'_>) -> Then {
        let (then, hold) = self.end_hold(stored, request.owner, request.mode);
        if let Some((hold, by)) = hold.zip(request.by)
            && !self.locks.sessions.is_bound(hold.session, by)
        {
            let released = EventKind::Lost(LostReason::Released);
            self.locks.tell_of(hold, released, self.effects);
        }
        then
    }

    /// Ends the owner's hold in this mode, whatever its count. Returns also the hold's record, if
    /// it belonged to a session.
    pub(crate) fn end_hold(
        &mut self,
        stored: &Stored,
        owner: &[u8],
        mode: Mode,
    ) -> (Then, Option<SessionHold>) {
        let token = stored.own(mode).and_then(|(_, token)| token);
        self.record_hold(owner, mode, token);
        let hold = self.forget_hold(owner, mode);
        let then = match stored {
            Stored::Plain(hash) => self.end_plain(hash),
            Stored::ReadWrite(hash) => self.end_read_write(hash, mode),
            Stored::Permits(hash) => self.end_permits(hash),
            Stored::Free | Stored::NoHolder | Stored::OtherType | Stored::Data => Then::Nothing,
        };
        (then, hold)
    }

    /// Starts the lease of the owner's hold anew.
    pub(crate) fn renew_hold(
        &mut self,
        stored: &Stored,
        request: &Renew<'_>,
        session: Option<SessionId>,
    ) {
        let wanted = request.lease.end(self.now);
        let (token, ends_at) = match stored {
            Stored::Plain(hash) => (hash.token(), self.start_lease(hash, wanted)),
            Stored::ReadWrite(hash) => self.renew_read_write(hash, request.mode, wanted),
            Stored::Permits(PermitsHash { own: Some(own), .. }) => {
                self.set_own_permits(&stored.permits(), own.ending(wanted))
            }
            _ => return,
        };
        self.bind(request.owner, request.mode, session, token, ends_at);
    }
}
