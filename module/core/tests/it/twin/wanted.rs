//! WANTED: which sessions hear that a hold of theirs keeps a waiter out.

use super::{PermitsRequest, Reply, Twin};
use crate::keyspace::Place;
use crate::life::{HoldName, Name, News, event_of};
use rlock_core::Mode;

/// Readers let others read, and an owner does not wait for its own hold.
fn keeps_out((_, holder, held_as): &HoldName, owner: &[u8], mode: Mode) -> bool {
    holder != owner && !(*held_as == Mode::Read && mode == Mode::Read)
}

impl Twin {
    /// Whether a command for this session asks to be told.
    pub(crate) fn asks_if_wanted(&self, session: Option<Name>) -> bool {
        self.asks_if_wanted && session.is_some()
    }

    /// The owner's hold asks. A hold that has the lock alone hears at once if somebody waits;
    /// beside a reader others may come in first.
    pub(super) fn ask_if_wanted(&mut self, place: &Place, owner: &[u8], mode: Mode) {
        let of = (place.clone(), owner.to_vec(), mode);
        if let Some(hold) = self.life.holds.get_mut(&of) {
            hold.asks_if_wanted = true;
        }
        if mode != Mode::Read {
            self.tell_who_keeps_out_any(place);
        }
    }

    /// An ACQUIRE or RENEW got this reply: its hold asks, if the command does.
    pub(super) fn asking(&mut self, reply: Reply, of: (&Place, &[u8], Mode), asks: bool) -> Reply {
        if asks && matches!(reply, Reply::Held { .. } | Reply::Number(1)) {
            self.ask_if_wanted(of.0, of.1, of.2);
        }
        reply
    }

    /// This owner wants the lock, and others have it.
    pub(super) fn is_wanted_by(&mut self, place: &Place, asked: PermitsRequest<'_>) {
        let wants = (asked.owner.to_vec(), asked.mode);
        self.tell_who_keeps_out(place, &[wants]);
    }

    /// Tells the holds that ask and keep a waiter out.
    pub(super) fn tell_who_keeps_out_any(&mut self, place: &Place) {
        let line = self.line(place).iter();
        let waiting: Vec<_> = line.map(|of| (of.owner.clone(), of.mode)).collect();
        self.tell_who_keeps_out(place, &waiting);
    }

    /// Tells the holds that ask and keep one of these out.
    fn tell_who_keeps_out(&mut self, place: &Place, kept_out: &[(Vec<u8>, Mode)]) {
        let length = i64::try_from(self.line(place).len()).unwrap();
        let mut told = Vec::new();
        for (of, hold) in &mut self.life.holds {
            let is_wanted = of.0 == *place
                && kept_out
                    .iter()
                    .any(|(owner, mode)| keeps_out(of, owner, *mode));
            if hold.asks_if_wanted && is_wanted {
                hold.asks_if_wanted = false;
                told.push((hold.session, hold.token, of.clone()));
            }
        }
        for (session, token, of) in told {
            let event = event_of(&of, News::Wanted(length), token);
            self.life.tell(session, event);
        }
    }

    /// With nothing left to do, a hold that asks keeps out no waiter.
    pub(crate) fn nobody_is_left_to_be_told(&self) -> Result<(), String> {
        let is_left = |of: &HoldName| {
            let mut line = self.line(&of.0).iter();
            !self.is_free(&of.0) && line.any(|waiter| keeps_out(of, &waiter.owner, waiter.mode))
        };
        let asking = self.life.holds.iter();
        let mut asking = asking.filter(|(_, hold)| hold.asks_if_wanted);
        match asking.find(|(of, _)| is_left(of)) {
            Some(hold) => Err(format!("{hold:?} asks, and was not told who waits")),
            None => Ok(()),
        }
    }
}
