//! The naive sessions: a map from names to what belongs to them, searched from one end to the
//! other. Their holds are of one mode each.

use crate::keyspace::Place;
use rlock_core::{Mode, Now, SessionLimits};
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
    pub(crate) events: Vec<Unfetched>,
}

/// An event that nobody has fetched yet.
#[derive(Clone, Debug)]
pub(crate) struct Unfetched {
    pub(crate) event: TwinEvent,
    /// Of a grant, how the lock was granted.
    mode: Mode,
    /// Whether the owner has heard of it by another way.
    is_confirmed: bool,
}

/// Which hold: the lock, the owner, how.
pub(crate) type HoldName = (Place, Vec<u8>, Mode);

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
    pub(crate) hold: HoldName,
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
    pub(crate) holds: BTreeMap<HoldName, TwinHold>,
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

impl TwinSession {
    /// What is there to be fetched, without the numbers that differ from history to history.
    pub(crate) fn events_shown(
        &self,
        present: impl Fn(&Place, &[u8], Mode) -> Option<i64>,
    ) -> Vec<String> {
        let shown = |of: &Unfetched| {
            let Unfetched {
                event,
                mode,
                is_confirmed,
            } = of;
            let TwinEvent { news, place, owner } = event;
            let news = match news {
                News::Granted { token, .. } => {
                    format!("granted {}", present(place, owner, *mode) == Some(*token))
                }
                news => format!("{news:?}"),
            };
            format!("{news} {place:?} {owner:?} {mode:?} {is_confirmed}")
        };
        self.events.iter().map(shown).collect()
    }
}

/// Whether a hold on record is the one that is there. A reader with only a script's timeout keys
/// left cannot be told from a later one; nor can a script's hold, which had no token.
pub(crate) fn is_same(mode: Mode, recorded: Option<i64>, present: Option<i64>) -> bool {
    let unknown = match mode {
        Mode::Plain | Mode::Write => recorded,
        Mode::Read => present,
        Mode::Permits => crate::no_permits(),
    };
    recorded == present || unknown.is_none()
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
        events.into_iter().map(|of| of.event).collect()
    }

    pub(crate) fn tell(&mut self, name: Name, news: News, place: &Place, owner: &[u8], mode: Mode) {
        let Some(session) = self.sessions.get_mut(&name) else {
            return;
        };
        let event = TwinEvent {
            news,
            place: place.clone(),
            owner: owner.to_vec(),
        };
        session.events.push(Unfetched {
            event,
            mode,
            is_confirmed: false,
        });
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
        let (mut unfetched, mut kept) = (Vec::new(), Vec::new());
        for of in std::mem::take(&mut session.events) {
            match of.event.news {
                News::Granted { token, several } if !of.is_confirmed => {
                    let TwinEvent { place, owner, .. } = of.event;
                    unfetched.extend(each_of(place, token, several).map(|(place, token)| {
                        TwinEnding {
                            hold: (place, owner.clone(), of.mode),
                            token: Some(token),
                            whole: false,
                        }
                    }));
                }
                _ => kept.push(of),
            }
        }
        session.events = kept;
        let has_holds = self.holds.values().any(|hold| hold.session == name);
        if session.grace_ms > 0 && has_holds {
            session.grace_end = Some(now.mono_ms + session.grace_ms);
            self.endings.extend(unfetched);
            return;
        }
        self.end_with(name, unfetched);
    }

    /// A grant did not arrive: what it gave is to end.
    pub(crate) fn take_back(
        &mut self,
        place: Place,
        owner: &[u8],
        mode: Mode,
        token: i64,
        several: Vec<(Place, i64)>,
    ) {
        let each = each_of(place, token, several);
        self.endings.extend(each.map(|(place, token)| TwinEnding {
            hold: (place, owner.to_vec(), mode),
            token: Some(token),
            whole: false,
        }));
    }

    /// The session ends. What it reads goes first, and then what nobody fetched.
    fn end_with(&mut self, name: Name, unfetched: Vec<TwinEnding>) {
        self.sessions.remove(&name);
        self.overflowing.remove(&name);
        self.end_holds(name, |mode| mode == Mode::Read);
        self.endings.extend(unfetched);
        self.end_holds(name, |_| true);
    }

    /// The session's holds of these modes are to end.
    fn end_holds(&mut self, name: Name, is_meant: impl Fn(Mode) -> bool) {
        let is_meant =
            |(_, _, mode): &HoldName, hold: &TwinHold| hold.session == name && is_meant(*mode);
        for (of, hold) in self.holds.iter().filter(|(of, hold)| is_meant(of, hold)) {
            self.endings.push(TwinEnding {
                hold: of.clone(),
                token: hold.token,
                whole: true,
            });
        }
        self.holds.retain(|of, hold| !is_meant(of, hold));
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
            self.end_with(name, Vec::new());
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
        of: HoldName,
        session: Option<Name>,
        token: Option<i64>,
        ends_at: Option<i64>,
    ) {
        match (session, self.holds.get_mut(&of)) {
            (Some(session), known) => {
                let hold = TwinHold {
                    session,
                    token,
                    ends_at,
                    asks_if_wanted: known.is_some_and(|known| known.asks_if_wanted),
                };
                self.holds.insert(of, hold);
                self.end_without_holds();
            }
            (None, Some(hold)) => {
                // A hold that a script took gets its token when it is entered again.
                hold.token = token.or(hold.token);
                hold.ends_at = ends_at;
            }
            (None, None) => {}
        }
    }

    /// The owner was told that it holds the lock: what the grant gave it there is not taken back.
    /// Of several locks it may have held this one before, and then knows of the grant only if it
    /// was told the count.
    pub(crate) fn confirm(&mut self, place: &Place, owner: &[u8], mode: Mode, knows_count: bool) {
        let sessions = self.sessions.values_mut();
        for of in sessions.flat_map(|session| &mut session.events) {
            if of.event.owner != owner || of.mode != mode {
                continue;
            }
            match &mut of.event.news {
                News::Granted { several, token } if !several.is_empty() => {
                    several
                        .retain(|(at, of_hold)| at != place || !(knows_count || of_hold == token));
                    of.is_confirmed |= several.is_empty();
                }
                _ => of.is_confirmed |= of.event.place == *place,
            }
        }
    }

    /// The owner has given the lock back: that is no loss.
    pub(crate) fn unbind(&mut self, of: &HoldName) {
        self.holds.remove(of);
        self.end_without_holds();
    }

    /// Sessions whose connections are gone end with their last holds.
    pub(crate) fn end_without_holds(&mut self) {
        let holds = &self.holds;
        self.sessions.retain(|name, session| {
            session.client.is_some() || holds.values().any(|hold| hold.session == *name)
        });
    }

    pub(crate) fn lose_all(&mut self, place: &Place, reason: Option<&'static str>, now: Now) {
        let of_lock = self.holds.keys().filter(|(of, ..)| of == place);
        for of in of_lock.cloned().collect::<Vec<_>>() {
            self.lose(&of, reason, now);
        }
    }

    pub(crate) fn lose(&mut self, of: &HoldName, reason: Option<&'static str>, now: Now) {
        if let Some(hold) = self.holds.remove(of) {
            let is_over = hold.ends_at.is_some_and(|end| end <= now.wall_ms());
            let by_time = if is_over { "expired" } else { "deleted" };
            self.lost += 1;
            let (place, owner, mode) = of;
            let news = News::Lost(reason.unwrap_or(by_time));
            self.tell(hold.session, news, place, owner, *mode);
            self.end_without_holds();
        }
    }
}

/// The locks that a grant gave, each with the token of its hold.
fn each_of(
    place: Place,
    token: i64,
    several: Vec<(Place, i64)>,
) -> impl Iterator<Item = (Place, i64)> {
    let one = several.is_empty().then_some((place, token));
    several.into_iter().chain(one)
}

/// Brings events into one order whose order among themselves nobody promises: those who leave
/// together because there is nothing left to wait for, the holders of one lock, and who is wanted
/// there beside what happens at another.
pub(crate) fn in_any_order(mut events: Vec<TwinEvent>) -> Vec<TwinEvent> {
    let together = |one: &TwinEvent, next: &TwinEvent| match (&one.news, &next.news) {
        (News::Error(text), News::Error(next)) => text == next,
        (News::Lost(_), News::Lost(_)) | (News::Wanted(_), News::Wanted(_)) => {
            one.place == next.place
        }
        (News::Wanted(_), _) | (_, News::Wanted(_)) => one.place != next.place,
        _ => false,
    };
    for run in events.chunk_by_mut(together) {
        run.sort();
    }
    events
}
