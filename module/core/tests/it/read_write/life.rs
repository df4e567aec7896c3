//! The naive sessions, whose holds are of one mode each: a map from names to what belongs to them,
//! searched from one end to the other.

use super::twin::mode_text;
use rlock_core::{Mode, Now};
use std::collections::{BTreeMap, BTreeSet};

/// A session, by its place among the names in `world::SESSIONS`.
pub(crate) type Name = usize;

/// What an event says.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) enum News {
    Granted(i64),
    Timeout(i64),
    Lost(&'static str),
    Error(String),
    /// Somebody wants the lock, and so many wait.
    Wanted(i64),
}

#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) struct TwinEvent {
    pub(crate) news: News,
    pub(crate) lock: Vec<u8>,
    pub(crate) owner: Vec<u8>,
}

#[derive(Clone, Debug)]
struct Unfetched {
    event: TwinEvent,
    /// Of a grant, how the lock was granted.
    mode: Mode,
    /// Whether the owner has heard of it by another way.
    is_confirmed: bool,
}

#[derive(Clone, Debug, Default)]
pub(crate) struct TwinSession {
    /// Whose connection it lives by; none while the grace runs.
    pub(crate) client: Option<u64>,
    grace_ms: i64,
    pub(crate) grace_end: Option<i64>,
    events: Vec<Unfetched>,
}

/// Which hold: the lock, the owner, how.
pub(crate) type HoldName = (Vec<u8>, Vec<u8>, Mode);

/// A hold that belongs to a session.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct TwinHold {
    pub(crate) session: Name,
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

impl TwinSession {
    /// What is there to be fetched, without the numbers that differ from history to history.
    pub(crate) fn events_shown(
        &self,
        present: impl Fn(&[u8], &[u8], Mode) -> Option<i64>,
    ) -> Vec<String> {
        let events = self.events.iter();
        events
            .map(|Unfetched { event, mode, .. }| match event.news {
                News::Granted(token) => {
                    let is_present = present(&event.lock, &event.owner, *mode) == Some(token);
                    format!("granted {:?} {mode:?} {is_present}", event.owner)
                }
                _ => format!("{:?} {:?}", event.news, event.owner),
            })
            .collect()
    }
}

#[derive(Debug, Default)]
pub(crate) struct Life {
    pub(crate) sessions: BTreeMap<Name, TwinSession>,
    pub(crate) holds: BTreeMap<HoldName, TwinHold>,
    pub(crate) endings: Vec<TwinEnding>,
    /// Sessions whose clients are to hear once that nobody knows them.
    pub(crate) untold_ends: BTreeSet<(u64, Name)>,
    pub(crate) lost: u64,
}

impl Life {
    pub(crate) fn is_listened(&self, name: Name) -> bool {
        self.client_of(name).is_some()
    }

    /// Whose connection the session lives by.
    pub(crate) fn client_of(&self, name: Name) -> Option<u64> {
        self.sessions.get(&name)?.client
    }

    pub(crate) fn attach(&mut self, name: Name, client: u64, grace_ms: i64) {
        let session = self.sessions.entry(name).or_default();
        session.client = Some(client);
        session.grace_ms = grace_ms;
        session.grace_end = None;
    }

    pub(crate) fn fetch(&mut self, name: Name) -> Vec<TwinEvent> {
        let events = std::mem::take(&mut self.sessions.get_mut(&name).unwrap().events);
        events
            .into_iter()
            .map(|unfetched| unfetched.event)
            .collect()
    }

    pub(crate) fn tell(&mut self, name: Name, news: News, lock: &[u8], owner: &[u8], mode: Mode) {
        let Some(session) = self.sessions.get_mut(&name) else {
            return;
        };
        let event = TwinEvent {
            news,
            lock: lock.to_vec(),
            owner: owner.to_vec(),
        };
        session.events.push(Unfetched {
            event,
            mode,
            is_confirmed: false,
        });
    }

    /// The connection of this session is gone: the grants that nobody fetched go back, and without
    /// a grace so does the rest. What it reads goes first.
    pub(crate) fn detach(&mut self, name: Name, now: Now) {
        let session = self.sessions.get_mut(&name).unwrap();
        session.client = None;
        let (mut unfetched, mut kept) = (Vec::new(), Vec::new());
        for event in std::mem::take(&mut session.events) {
            match event.event.news {
                News::Granted(token) if !event.is_confirmed => unfetched.push(TwinEnding {
                    hold: (event.event.lock, event.event.owner, event.mode),
                    token: Some(token),
                    whole: false,
                }),
                _ => kept.push(event),
            }
        }
        session.events = kept;
        // With nothing to lose it need not wait for its end.
        let has_none =
            session.events.is_empty() && self.holds.values().all(|hold| hold.session != name);
        if session.grace_ms > 0 && !has_none {
            session.grace_end = Some(now.mono_ms + session.grace_ms);
            self.endings.extend(unfetched);
            return;
        }
        self.sessions.remove(&name);
        self.end_holds(name, |mode| mode == Mode::Read);
        self.endings.extend(unfetched);
        self.end_holds(name, |_| true);
    }

    fn end(&mut self, name: Name) {
        self.sessions.remove(&name);
        self.end_holds(name, |mode| mode == Mode::Read);
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

    /// Graces end.
    pub(crate) fn passed(&mut self, now: Now) {
        let is_over = |session: &TwinSession| session.grace_end.is_some_and(|e| e <= now.mono_ms);
        let sessions = self.sessions.iter();
        let over: Vec<Name> = sessions
            .filter(|(_, session)| is_over(session))
            .map(|(name, _)| *name)
            .collect();
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
            }
            (None, Some(hold)) => {
                // A hold that a script took gets its token when it is entered again.
                hold.token = token.or(hold.token);
                hold.ends_at = ends_at;
            }
            (None, None) => {}
        }
    }

    /// The owner was told that it holds the lock: no grant of it can go unfetched.
    pub(crate) fn confirm(&mut self, lock: &[u8], owner: &[u8], mode: Mode) {
        let sessions = self.sessions.values_mut();
        for unfetched in sessions.flat_map(|session| &mut session.events) {
            let event = &unfetched.event;
            unfetched.is_confirmed |=
                event.lock == lock && event.owner == owner && unfetched.mode == mode;
        }
    }

    /// The owner has given the lock back: that is no loss.
    pub(crate) fn unbind(&mut self, of: &HoldName) {
        self.holds.remove(of);
    }

    pub(crate) fn lose_all(&mut self, lock: &[u8], reason: Option<&'static str>, now: Now) {
        let of_lock = self.holds.keys().filter(|(of, ..)| of == lock);
        for of in of_lock.cloned().collect::<Vec<_>>() {
            self.lose(&of, reason, now);
        }
    }

    pub(crate) fn lose(&mut self, of: &HoldName, reason: Option<&'static str>, now: Now) {
        if let Some(hold) = self.holds.remove(of) {
            let is_over = hold.ends_at.is_some_and(|end| end <= now.wall_ms());
            let by_time = if is_over { "expired" } else { "deleted" };
            self.lost += 1;
            let (lock, owner, mode) = of;
            let news = News::Lost(reason.unwrap_or(by_time));
            self.tell(hold.session, news, lock, owner, *mode);
        }
    }

    /// In words, for a failure.
    pub(crate) fn shown(&self) -> Vec<String> {
        let holds = self.holds.iter();
        holds
            .map(|((lock, owner, mode), hold)| {
                let (lock, owner) = (lock.escape_ascii(), owner.escape_ascii());
                format!("{owner} {} {lock}: {hold:?}", mode_text(*mode))
            })
            .collect()
    }
}

/// Brings events into one order whose order among themselves nobody promises: what one owner hears
/// of one lock stays in its order, but for losses, since it may have lost two holds at once.
pub(crate) fn in_any_order(mut events: Vec<TwinEvent>) -> Vec<TwinEvent> {
    let of = |event: &TwinEvent| (event.lock.clone(), event.owner.clone());
    events.sort_by_key(of);
    let is_together = |one: &TwinEvent, next: &TwinEvent| {
        let are_lost = [one, next].map(|event| matches!(event.news, News::Lost(_)));
        of(one) == of(next) && are_lost == [true, true]
    };
    for run in events.chunk_by_mut(is_together) {
        run.sort();
    }
    events
}
