//! The naive sessions: a map from names to what belongs to them, searched from one end to the
//! other.

use crate::keyspace::Place;
use rlock_core::{Now, SessionLimits};
use std::collections::{BTreeMap, BTreeSet};

/// A session, by its place among the names in `world::SESSIONS`.
pub(crate) type Name = usize;

/// What an event says.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) enum News {
    Granted {
        token: i64,
        /// Of several locks at once, each with the token of its hold.
        several: Vec<(Place, i64)>,
    },
    Timeout(i64),
    Lost(&'static str),
    Error(String),
    /// Somebody wants the lock, and so many wait.
    Wanted(i64),
}

#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) struct TwinEvent {
    pub(crate) news: News,
    pub(crate) place: Place,
    pub(crate) owner: Vec<u8>,
}

/// What a client that listens hears before it gets its events.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) enum Call {
    /// There are some, or it has waited for long enough.
    Woken,
    /// By the client with this number.
    TakenOver(u64),
}

#[derive(Clone, Debug, Default)]
pub(crate) struct TwinSession {
    /// Who began it, by the place among the names in `world::USERS`.
    pub(crate) user: usize,
    /// Whether somebody stopped to wait for events and has not fetched since.
    is_woken: bool,
    /// Whose connection it lives by; none while the grace runs.
    pub(crate) client: Option<u64>,
    grace_ms: i64,
    pub(crate) grace_end: Option<i64>,
    /// Who waits for events, and until when.
    pub(crate) listener: Option<(usize, Option<i64>)>,
    /// Each with whether its owner has heard of it by another way.
    pub(crate) events: Vec<(TwinEvent, bool)>,
}

/// A hold that belongs to a session.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct TwinHold {
    pub(crate) session: Name,
    /// None of one that a script took.
    pub(crate) token: Option<i64>,
    /// When its lease ends, as far as anybody has looked.
    pub(crate) ends_at: Option<i64>,
    /// Whether its session is to hear when the lock is wanted.
    pub(crate) asks_if_wanted: bool,
}

/// A hold that must end.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct TwinEnding {
    pub(crate) place: Place,
    pub(crate) owner: Vec<u8>,
    pub(crate) token: Option<i64>,
    /// Whether all of it ends, or what one grant added.
    pub(crate) whole: bool,
}

#[derive(Debug)]
pub(crate) struct Life {
    /// Who sends the commands.
    pub(crate) user: usize,
    /// What the server allows now.
    pub(crate) limits: SessionLimits,
    /// What it allowed at the last EVENTS.
    events_max: Option<u32>,
    /// Those that were found with more unfetched events than that.
    overflowing: BTreeSet<Name>,
    /// Sessions that ended because of that, of whose end their clients are yet to hear.
    pub(crate) untold_ends: BTreeSet<(u64, Name)>,
    pub(crate) sessions: BTreeMap<Name, TwinSession>,
    pub(crate) holds: BTreeMap<(Place, Vec<u8>), TwinHold>,
    pub(crate) endings: Vec<TwinEnding>,
    /// Who was called, in any order.
    pub(crate) called: Vec<(usize, Call)>,
    pub(crate) lost: u64,
}

impl Default for Life {
    fn default() -> Self {
        Self {
            user: 0,
            limits: SessionLimits {
                sessions: 10,
                events_per_session: 1000,
                out_of_memory: false,
            },
            events_max: None,
            overflowing: BTreeSet::new(),
            untold_ends: BTreeSet::new(),
            sessions: BTreeMap::new(),
            holds: BTreeMap::new(),
            endings: Vec::new(),
            called: Vec::new(),
            lost: 0,
        }
    }
}

impl TwinHold {
    /// Whether this is the hold, which the owner has with this token. That of a script has none,
    /// and the key has one if somebody else in it was given it.
    pub(crate) fn is(&self, token: Option<i64>) -> bool {
        self.token.is_none() || self.token == token
    }
}

impl Life {
    pub(crate) fn is_listened(&self, name: Name) -> bool {
        let session = self.sessions.get(&name);
        session.is_some_and(|session| session.client.is_some())
    }

    pub(crate) fn is_of_another(&self, name: Name) -> bool {
        let session = self.sessions.get(&name);
        session.is_some_and(|session| session.user != self.user)
    }

    /// EVENTS was called, whatever it answered.
    pub(crate) fn limits_are_heard(&mut self) {
        self.events_max = Some(self.limits.events_per_session);
    }

    fn overflows(&self, name: Name) -> bool {
        let session = self.sessions.get(&name);
        session.is_some_and(|session| {
            let events = u32::try_from(session.events.len()).unwrap();
            let has_more = self.events_max.is_some_and(|max| events > max);
            has_more && !session.is_woken && session.client.is_some()
        })
    }

    /// Those that must end, which are found no more.
    pub(crate) fn overflowing(&mut self) -> Vec<Name> {
        let found = std::mem::take(&mut self.overflowing);
        found.into_iter().filter(|of| self.overflows(*of)).collect()
    }

    /// Whose connection the session lives by.
    pub(crate) fn client_of(&self, name: Name) -> Option<u64> {
        self.sessions.get(&name)?.client
    }

    pub(crate) fn attach(&mut self, name: Name, client: u64, grace_ms: i64) {
        let user = self.user;
        let begun = || TwinSession {
            user,
            ..TwinSession::default()
        };
        let session = self.sessions.entry(name).or_insert_with(begun);
        if let Some((former, _)) = session.listener.take() {
            self.called.push((former, Call::TakenOver(client)));
        }
        session.client = Some(client);
        session.grace_ms = grace_ms;
        session.grace_end = None;
    }

    pub(crate) fn listen(&mut self, name: Name, listener: usize, wait_ms: i64, now: Now) {
        let until = (wait_ms > 0).then(|| now.mono_ms + wait_ms);
        let session = self.sessions.get_mut(&name).unwrap();
        session.listener = Some((listener, until));
    }

    pub(crate) fn listen_no_more(&mut self, name: Name, listener: usize) {
        if let Some(session) = self.sessions.get_mut(&name)
            && session.listener.is_some_and(|(of, _)| of == listener)
        {
            session.listener = None;
            session.is_woken = true;
        }
    }

    pub(crate) fn fetch(&mut self, name: Name) -> Vec<TwinEvent> {
        let session = self.sessions.get_mut(&name).unwrap();
        session.is_woken = false;
        let events = std::mem::take(&mut session.events);
        events.into_iter().map(|(event, _)| event).collect()
    }

    pub(crate) fn tell(&mut self, name: Name, news: News, place: &Place, owner: &[u8]) {
        let Some(session) = self.sessions.get_mut(&name) else {
            return;
        };
        let event = TwinEvent {
            news,
            place: place.clone(),
            owner: owner.to_vec(),
        };
        session.events.push((event, false));
        if let Some((listener, _)) = session.listener.take() {
            self.called.push((listener, Call::Woken));
            session.is_woken = true;
        }
        if self.overflows(name) {
            self.overflowing.insert(name);
        }
    }

    /// The connection of this session is gone: the grants that nobody fetched go back, and without
    /// a grace so does the rest.
    pub(crate) fn detach(&mut self, name: Name, now: Now) {
        let session = self.sessions.get_mut(&name).unwrap();
        session.client = None;
        session.listener = None;
        session.is_woken = false;
        let has_grace = session.grace_ms > 0;
        let end = now.mono_ms + session.grace_ms;
        session.grace_end = has_grace.then_some(end);
        let is_unheard = |(event, confirmed): &(TwinEvent, bool)| {
            !confirmed && matches!(event.news, News::Granted { .. })
        };
        let events = std::mem::take(&mut session.events);
        let (unfetched_grants, kept) = events.into_iter().partition(is_unheard);
        session.events = kept;
        let unfetched_grants: Vec<_> = unfetched_grants;
        for (event, _) in unfetched_grants {
            if let News::Granted { token, several } = event.news {
                self.take_back(event.place, &event.owner, token, several);
            }
        }
        // With nothing to lose it need not wait for its end.
        let session = &self.sessions[&name];
        let has_none =
            session.events.is_empty() && self.holds.values().all(|hold| hold.session != name);
        if !has_grace || has_none {
            self.end(name);
        }
    }

    /// A grant went unfetched: what it gave is to end.
    pub(crate) fn take_back(
        &mut self,
        place: Place,
        owner: &[u8],
        token: i64,
        several: Vec<(Place, i64)>,
    ) {
        let one = several.is_empty().then_some((place, token));
        for (place, token) in several.into_iter().chain(one) {
            self.endings.push(TwinEnding {
                place,
                owner: owner.to_vec(),
                token: Some(token),
                whole: false,
            });
        }
    }

    fn end(&mut self, name: Name) {
        self.sessions.remove(&name);
        self.overflowing.remove(&name);
        for ((place, owner), hold) in &self.holds {
            if hold.session == name {
                self.endings.push(TwinEnding {
                    place: place.clone(),
                    owner: owner.clone(),
                    token: hold.token,
                    whole: true,
                });
            }
        }
        self.holds.retain(|_, hold| hold.session != name);
    }

    /// Waits for events and graces end.
    pub(crate) fn passed(&mut self, now: Now) {
        let mut over = Vec::new();
        for (name, session) in &mut self.sessions {
            if let Some((listener, Some(until))) = session.listener
                && until <= now.mono_ms
            {
                session.listener = None;
                session.is_woken = true;
                self.called.push((listener, Call::Woken));
            }
            if session.grace_end.is_some_and(|end| end <= now.mono_ms) {
                over.push(*name);
            }
        }
        for name in over {
            self.end(name);
        }
    }

    /// Somebody ends a hold: was it to be ended?
    pub(crate) fn is_to_end(&mut self, ending: &TwinEnding) -> Result<(), String> {
        let at = self.endings.iter().position(|other| other == ending);
        let at = at.ok_or_else(|| format!("{ending:?} is not among {:?}", self.endings))?;
        self.endings.remove(at);
        Ok(())
    }

    // --- Holds -----------------------------------------------------------------------------------

    /// The owner holds the lock until then. It belongs to the session, if one is named, and
    /// otherwise to the one it belonged to.
    pub(crate) fn bind(
        &mut self,
        place: &Place,
        owner: &[u8],
        session: Option<Name>,
        token: Option<i64>,
        ends_at: Option<i64>,
    ) {
        let at = (place.clone(), owner.to_vec());
        match (session, self.holds.get_mut(&at)) {
            (Some(session), known) => {
                let hold = TwinHold {
                    session,
                    token,
                    ends_at,
                    asks_if_wanted: known.is_some_and(|known| known.asks_if_wanted),
                };
                self.holds.insert(at, hold);
            }
            (None, Some(hold)) => {
                hold.ends_at = ends_at;
                hold.token = token.or(hold.token);
            }
            (None, None) => {}
        }
    }

    /// The owner was told that it holds the lock: what the grant gave it there is not taken back.
    /// Of several locks it may have held this one before, and then knows of the grant only if it
    /// was told the count.
    pub(crate) fn confirm(&mut self, place: &Place, owner: &[u8], knows_count: bool) {
        for session in self.sessions.values_mut() {
            for (event, confirmed) in &mut session.events {
                if event.owner != owner {
                    continue;
                }
                match &mut event.news {
                    News::Granted { several, token } if !several.is_empty() => {
                        several.retain(|(of, of_hold)| {
                            of != place || !(knows_count || of_hold == token)
                        });
                        *confirmed |= several.is_empty();
                    }
                    _ => *confirmed |= event.place == *place,
                }
            }
        }
    }

    /// The owner has given the lock back: that is no loss.
    pub(crate) fn unbind(&mut self, place: &Place, owner: &[u8]) {
        self.holds.remove(&(place.clone(), owner.to_vec()));
    }

    pub(crate) fn lose_all(&mut self, place: &Place, reason: Option<&'static str>, now: Now) {
        let of_lock = self.holds.keys().filter(|(of, _)| of == place);
        let owners: Vec<Vec<u8>> = of_lock.map(|(_, owner)| owner.clone()).collect();
        for owner in owners {
            self.lose(place, &owner, reason, now);
        }
    }

    pub(crate) fn lose(
        &mut self,
        place: &Place,
        owner: &[u8],
        reason: Option<&'static str>,
        now: Now,
    ) {
        let hold = self.holds.remove(&(place.clone(), owner.to_vec()));
        if let Some(TwinHold {
            session, ends_at, ..
        }) = hold
        {
            let over = ends_at.is_some_and(|end| end <= now.wall_ms());
            let by_time = if over { "expired" } else { "deleted" };
            self.lost += 1;
            let news = News::Lost(reason.unwrap_or(by_time));
            self.tell(session, news, place, owner);
        }
    }
}

/// Brings events into one order whose order among themselves nobody promises: those who leave
/// together because there is nothing left to wait for, and the holders of one lock.
pub(crate) fn in_any_order(mut events: Vec<TwinEvent>) -> Vec<TwinEvent> {
    let together = |one: &TwinEvent, next: &TwinEvent| match (&one.news, &next.news) {
        (News::Error(text), News::Error(next)) => text == next,
        (News::Lost(_), News::Lost(_)) | (News::Wanted(_), News::Wanted(_)) => {
            one.place == next.place
        }
        _ => false,
    };
    for run in events.chunk_by_mut(together) {
        run.sort();
    }
    events
}
