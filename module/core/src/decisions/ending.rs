//! Holds that end outside of a command, and holds that are lost.

use crate::decisions::decision::Decision;
use crate::interface::effect::Write;
use crate::interface::request::Release;
use crate::interface::stored::Stored;
use crate::memory::hold::HoldMark;
use crate::memory::log::metrics::count;
use crate::memory::pending::PendingRelease;
use crate::values::ids::HoldId;
use crate::values::mode::Mode;
use std::rc::Rc;

impl Decision<'_> {
    /// Ends a hold, if the key still has that very hold. `outlived`: the releases before this one
    /// left the key's TTL as it was, for the last one to set.
    pub(crate) fn end_pending(
        &mut self,
        release: &PendingRelease,
        stored: &Stored,
        outlived: bool,
    ) {
        if !self.is_hold(stored, &release.owner, release.mode, release.mark) {
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
        let then = self.end(stored, &release.owner, release.mode);
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
                .mark
                .token
                .filter(|_| !self.is_held_by_its_session(release)),
            lease: None,
        };
        if let Ok(Some((_, then))) = self.release_own(stored, &request) {
            self.follow(then);
            count(&mut self.locks.counters.grants_taken_back);
        }
    }

    /// Whether a session's hold with the grant's token is still on record. Then it is the hold of
    /// this grant, even if the token is forgotten because other programs have written to the keys:
    /// a later hold of the same owner has another token, or belongs to no session. Without this
    /// check a grant that is over (BREAK, RELEASE, DEL) would take the owner's newer hold away.
    fn is_held_by_its_session(&self, release: &PendingRelease) -> bool {
        if !matches!(release.mode, Mode::Read | Mode::Write) {
            return false;
        }
        let id = self.session_hold(&release.owner, release.mode);
        let hold = id.and_then(|id| self.locks.holds.get(id));
        hold.is_some_and(|hold| hold.token == release.mark.token)
    }

    /// Whether the key still has the owner's hold with this mark. Where that cannot be told, the
    /// answer is yes: for a writer whose token is not known, and for a reader that has only a
    /// script's timeout keys left. But if the writer's key was replaced, the lease must end at the
    /// same moment.
    fn is_hold(&self, stored: &Stored, owner: &[u8], mode: Mode, mark: HoldMark) -> bool {
        let (own, token) = (stored.own(mode), mark.token);
        own.is_some_and(|(_, stored_token)| match mode {
            Mode::Write => match self.writer_token(owner, stored.ends_at()) {
                Some(known) => Some(known) == token,
                None => !mark.replaced || stored.ends_at() == mark.ends_at,
            },
            Mode::Read => stored_token.is_none() || stored_token == token,
            // A script's hold has no token. The key may have one that another owner in the hash was
            // given.
            Mode::Plain | Mode::Permits => token.is_none() || stored_token == token,
        })
    }

    /// Tells a session if its hold is lost.
    pub(crate) fn check_hold(&mut self, id: HoldId, stored: &Stored) {
        let Some(hold) = self.locks.holds.get(id) else {
            return;
        };
        let (owner, mode, mark) = (Rc::clone(&hold.owner), hold.mode, hold.mark());
        if self.is_hold(stored, &owner, mode, mark) {
            self.locks.holds.check_after(id, stored.own_end(mode));
        } else {
            self.lose(id, None);
        }
    }
}
