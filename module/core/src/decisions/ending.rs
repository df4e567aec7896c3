//! Holds that end outside of a command, and holds that are lost.

use crate::decisions::decision::Decision;
use crate::interface::effect::Write;
use crate::interface::request::Release;
use crate::interface::stored::Stored;
use crate::memory::log::metrics::count;
use crate::memory::pending::PendingRelease;
use crate::values::ids::HoldId;
use crate::values::mode::Mode;
use crate::values::must_exist::MustExist;
use crate::values::token::Token;

impl Decision<'_> {
    /// Ends a hold, if the key still has that very hold. `outlived`: the releases before this one
    /// left the key's TTL as it was, for the last one to set.
    pub(crate) fn end_pending(
        &mut self,
        release: &PendingRelease,
        stored: &Stored,
        outlived: bool,
    ) {
        if !is_hold(stored, release.mode, release.token) {
            // Marks the queue only, not the sessions' holds: thousands of holds may end here, and
            // each would mark all the others.
            if let Some(queue) = self.queue() {
                self.locks.mark_queue(queue);
            }
            match stored {
                Stored::ReadWrite(hash) if outlived => self.end_key_with_readers(hash),
                Stored::Permits(hash) if outlived => self.end_key_with_permits(hash),
                // Nobody holds permits any more, so the key goes.
                Stored::NoHolder if outlived && release.mode == Mode::Permits => {
                    self.write(Write::Delete);
                }
                _ => {}
            }
            return;
        }
        if !release.whole {
            return self.end_entry(release, stored);
        }
        let (then, _) = self.end_hold(stored, &release.owner, release.mode);
        self.follow(then);
        count(&mut self.locks.counters.session_releases);
    }

    fn end_entry(&mut self, release: &PendingRelease, stored: &Stored) {
        let name = self.at.name;
        let request = Release {
            key: name,
            owner: &release.owner,
            mode: release.mode,
            permits: None,
            token: release
                .token
                .filter(|_| !self.is_held_by_its_session(release)),
            lease: None,
            by: None,
        };
        if let Ok(Some((_, then))) = self.release_own(stored, &request) {
            self.follow(then);
            count(&mut self.locks.counters.grants_taken_back);
        }
    }

    /// Whether a session's read hold with the grant's token is still on record. Then it is the hold
    /// of this grant, even if the token is gone because another client has written to the timeout
    /// keys: a later hold of the same owner has another token, or belongs to no session. Without
    /// this check a grant that is over (BREAK, RELEASE, DEL) would end the owner's newer hold.
    fn is_held_by_its_session(&self, release: &PendingRelease) -> bool {
        let id = self.session_hold(&release.owner, release.mode);
        let hold = id.and_then(|id| self.locks.holds.get(id));
        release.mode == Mode::Read && hold.is_some_and(|hold| hold.token == release.token)
    }

    /// Tells a session if its hold is lost.
    pub(crate) fn check_hold(&mut self, id: HoldId, stored: &Stored) {
        let Some(hold) = self.locks.holds.get(id).must_exist() else {
            return;
        };
        let mode = hold.mode;
        if is_hold(stored, mode, hold.token) {
            self.locks.holds.check_after(id, stored.own_end(mode));
        } else {
            self.lose(id, None);
        }
    }
}

/// Whether the key still has the owner's hold with this token, which a script's hold does not have.
/// For a reader that has only a script's timeout keys left, nobody can tell, and the answer is yes.
fn is_hold(stored: &Stored, mode: Mode, token: Option<Token>) -> bool {
    stored
        .own(mode)
        .is_some_and(|(_, stored_token)| match mode {
            Mode::Read => stored_token.is_none() || stored_token == token,
            // A script's plain hold has none, but its key may have that of another owner.
            Mode::Plain | Mode::Write | Mode::Permits => token.is_none() || stored_token == token,
        })
}
