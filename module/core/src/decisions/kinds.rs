//! What each kind of lock does with an entry, a release and a renewal.

use crate::decisions::decision::{Decision, Entry, Then};
use crate::interface::effect::Write;
use crate::interface::error::CommandError;
use crate::interface::event::{EventKind, LostReason};
use crate::interface::request::{Release, Renew};
use crate::interface::stored::Stored;
use crate::memory::hold::SessionHold;
use crate::values::ids::SessionId;
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
        if stored.own(entry.mode).is_none() {
            // A session may still have a former hold of this owner on record, which others ended,
            // or whose lease is over. It is not the new hold, so it counts as lost.
            self.lose_hold(entry.owner, entry.mode);
        }
        if stored.leaves_hash() {
            self.write(Write::Delete);
        }
        Ok(match (entry.mode, stored) {
            (Mode::Plain, Stored::Plain(hash)) => self.reenter_plain(hash, entry)?,
            (Mode::Plain, _) => self.begin_plain(entry),
            (Mode::Permits, _) => self.enter_permits(&stored.permits(), entry)?,
            (Mode::Read | Mode::Write, Stored::ReadWrite(hash)) => {
                self.enter_read_write(hash, entry)?
            }
            (Mode::Read | Mode::Write, _) => self.begin_read_write(entry),
        })
    }

    /// Gives one of the owner's `held` holds back, or permits. Returns what the owner has left.
    pub(crate) fn release_one(
        &mut self,
        stored: &Stored,
        held: i64,
        request: &Release<'_>,
    ) -> Result<(i64, Then), CommandError> {
        let left = held.saturating_sub(1);
        match stored {
            Stored::Permits(hash) => return self.release_permits(hash, request),
            _ if left == 0 => return Ok((0, self.give_back(stored, request))),
            Stored::Plain(hash) => self.count_down_plain(hash, left, request),
            Stored::ReadWrite(hash) => self.count_down_read_write(hash, left, request),
            Stored::Free | Stored::NoHolder | Stored::OtherType | Stored::Data => {}
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

    /// Ends the owner's hold in this mode, whatever its count. Returns also the hold's record, if it
    /// belonged to a session.
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
        match stored {
            Stored::Plain(hash) => self.renew_plain(hash, request, session),
            Stored::ReadWrite(hash) => self.renew_read_write(hash, request, session),
            Stored::Permits(hash) => self.renew_permits(hash, request, session),
            Stored::Free | Stored::NoHolder | Stored::OtherType | Stored::Data => {}
        }
    }
}
