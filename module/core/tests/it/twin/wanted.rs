//! WANTED: who hears that somebody waits whom its hold keeps out.

use super::{Reply, Twin};
use crate::keyspace::Place;
use crate::life::{Name, News};

impl Twin {
    /// Whether a command for this session asks to be told.
    pub(crate) fn asks_if_wanted(&self, session: Option<Name>) -> bool {
        self.asks_if_wanted && session.is_some()
    }

    /// The owner's hold asks, and hears at once if somebody else waits.
    pub(super) fn ask_if_wanted(&mut self, place: &Place, owner: &[u8]) {
        if let Some(hold) = self.life.holds.get_mut(&(place.clone(), owner.to_vec())) {
            hold.asks_if_wanted = true;
        }
        self.tell_who_keeps_out(place, None);
    }

    /// This owner wants the lock, and others have it.
    pub(super) fn is_wanted_by(&mut self, place: &Place, owner: &[u8]) {
        self.tell_who_keeps_out(place, Some(owner));
    }

    /// Tells the holds that ask and keep this owner out; without one, somebody in the line.
    pub(super) fn tell_who_keeps_out(&mut self, place: &Place, owner: Option<&[u8]>) {
        let line = self.line(place).to_vec();
        let length = i64::try_from(line.len()).unwrap();
        let in_line = line.iter().map(|waiter| waiter.owner.as_slice());
        let kept_out: Vec<&[u8]> = owner.map_or_else(|| in_line.collect(), |owner| vec![owner]);
        let mut told = Vec::new();
        for ((of, holder), hold) in &mut self.life.holds {
            let keeps_out = of == place && kept_out.iter().any(|out| out != holder);
            if hold.asks_if_wanted && keeps_out {
                hold.asks_if_wanted = false;
                told.push((hold.session, holder.clone()));
            }
        }
        for (session, holder) in told {
            self.life
                .tell(session, News::Wanted(length), place, &holder);
        }
    }

    /// After a step in which nothing was put off, a hold that asks keeps out nobody in a line.
    pub(crate) fn nobody_is_left_to_be_told(&self) -> Result<(), String> {
        let mut asking = self
            .life
            .holds
            .iter()
            .filter(|(_, hold)| hold.asks_if_wanted);
        let keeps_out = |place: &Place, owner: &[u8]| {
            !self.is_free(place) && self.line(place).iter().any(|waiter| waiter.owner != owner)
        };
        match asking.find(|((place, owner), _)| keeps_out(place, owner)) {
            Some(hold) => Err(format!("{hold:?} asks, and was not told who waits")),
            None => Ok(()),
        }
    }

    /// What an ACQUIRE or RENEW was answered: a hold of it asks, if it is to.
    pub(super) fn asking(
        &mut self,
        reply: Reply,
        place: &Place,
        owner: &[u8],
        asks: bool,
    ) -> Reply {
        if asks && matches!(reply, Reply::Held { .. } | Reply::Number(1)) {
            self.ask_if_wanted(place, owner);
        }
        reply
    }
}
