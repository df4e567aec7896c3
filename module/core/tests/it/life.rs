//! The naive sessions: a map from names to sessions, searched from one end to the other. Their
//! holds are of one mode each. Events have their numbers beside them.

use crate::keyspace::Place;
use rlock_core::{Mode, Now, SessionLimits};
use std::collections::{BTreeMap, BTreeSet};

/// A session, by its place among the names in `world::SESSIONS`.
pub(crate) type Name = usize;

/// The content of an event.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) enum News {
    Granted,
    Timeout(i64),
    /// The wait left the queue because the session connection closed.
    Left,
    Lost(&'static str),
    Error(String),
    /// Somebody wants the lock; the number of its waiters.
    Wanted(i64),
}

#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) struct TwinEvent {
    pub(crate) news: News,
    pub(crate) place: Place,
    pub(crate) owner: Vec<u8>,
    pub(crate) mode: Mode,
    /// Of the hold that it is about; none if it is about a wait.
    pub(crate) token: Option<i64>,
}

impl TwinEvent {
    /// Whether it tells how a wait ended.
    pub(crate) fn ends_a_wait(&self) -> bool {
        !matches!(self.news, News::Lost(_) | News::Wanted(_))
    }
}

/// The answer to EVENTS.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct TwinTold {
    pub(crate) life: i64,
    /// The number of the first event, less one.
    pub(crate) after: u64,
    pub(crate) events: Vec<TwinEvent>,
}

/// The number that a client gives to its connection, beside the largest it gave before.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Epoch {
    Smaller,
    Equal,
    Larger,
}

impl Epoch {
    pub(crate) fn number(self, known: Option<u64>) -> u64 {
        let known = known.unwrap_or(7);
        match self {
            Self::Smaller => known.saturating_sub(1),
            Self::Equal => known,
            Self::Larger => known + 1,
        }
    }
}

/// The events that a client says it has heard.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum After {
    /// All that it was told.
    Told,
    /// The events of the present life up to this number. No event has the largest number yet, and
    /// after it they begin anew.
    Seq(u64),
    /// The events of another life up to this number.
    OtherLife(u64),
}

/// The call that ends a client's wait for events.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) enum Call {
    /// There are some, or it has waited for long enough.
    Woken,
    /// By the client with this number.
    TakenOver(u64),
}

#[derive(Clone, Debug, Default)]
pub(crate) struct TwinSession {
    /// The user that began it, by the place among the names in `world::USERS`.
    pub(crate) user: usize,
    /// Whether somebody stopped to wait for events and was not told since.
    is_woken: bool,
    /// The connection that it lives by; none while the grace runs.
    pub(crate) client: Option<u64>,
    grace_ms: i64,
    pub(crate) grace_end: Option<i64>,
    /// The client that waits for events, and until when.
    pub(crate) listener: Option<(usize, Option<i64>)>,
    /// None if the next EVENTS begins one.
    pub(crate) life: Option<i64>,
    /// The largest number of a session connection.
    pub(crate) epoch: Option<u64>,
    /// The command connection.
    pub(crate) bound: Option<u64>,
    /// The largest number of a command connection.
    pub(crate) bind_epoch: Option<u64>,
    /// The numbers of the last event and of the last that was told.
    pub(crate) last: u64,
    pub(crate) told: u64,
    /// The events that are not acknowledged, each with its number.
    pub(crate) events: Vec<(u64, TwinEvent)>,
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
    /// Whether the whole hold ends, or only the entry that one grant added.
    pub(crate) whole: bool,
}

#[derive(Debug)]
pub(crate) struct Life {
    /// The user that sends the commands.
    pub(crate) user: usize,
    /// The server's limits now.
    pub(crate) limits: SessionLimits,
    /// The limit of events at the last EVENTS.
    events_max: Option<u32>,
    /// The sessions that were found with more unacknowledged events than that.
    overflowing: BTreeSet<Name>,
    /// The life that began last.
    newest: i64,
    /// The connections that BIND has bound last, with their numbers, by user and session.
    bindings: BTreeMap<(usize, Name), (u64, u64)>,
    pub(crate) sessions: BTreeMap<Name, TwinSession>,
    pub(crate) holds: BTreeMap<HoldName, TwinHold>,
    pub(crate) endings: Vec<TwinEnding>,
    /// The clients that were called, in any order.
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
            newest: 0,
            bindings: BTreeMap::new(),
            sessions: BTreeMap::new(),
            holds: BTreeMap::new(),
            endings: Vec::new(),
            called: Vec::new(),
            lost: 0,
        }
    }
}

impl TwinSession {
    /// The events that are kept, without the numbers that differ from history to history.
    pub(crate) fn events_shown(
        &self,
        present: impl Fn(&Place, &[u8], Mode) -> Option<i64>,
    ) -> Vec<String> {
        let shown = |(seq, event): &(u64, TwinEvent)| {
            let TwinEvent {
                news,
                place,
                owner,
                mode,
                token,
            } = event;
            let is_present = token.map(|token| present(place, owner, *mode) == Some(token));
            let is_told = *seq <= self.told;
            format!("{news:?} {place:?} {owner:?} {mode:?} {is_present:?} {is_told}")
        };
        self.events.iter().map(shown).collect()
    }

    /// The number of the last event that is dropped.
    pub(crate) fn acknowledged(&self) -> u64 {
        self.last - u64::try_from(self.events.len()).unwrap()
    }

    fn acknowledge(&mut self, seq: u64) {
        self.events.retain(|(of, _)| *of > seq);
    }

    /// Whether it is known which events have the numbers up to this one: none of them may change
    /// places with a later one, unless it was told.
    fn is_certain(&self, seq: u64) -> bool {
        let untold = self.events.iter().filter(|(of, _)| *of > self.told);
        let (before, after): (Vec<_>, Vec<_>) = untold.partition(|(of, _)| *of <= seq);
        let may_change = |one: &TwinEvent| after.iter().any(|(_, of)| may_change_places(one, of));
        !before.iter().any(|(_, one)| may_change(one))
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
        session.is_some_and(|session| session.client.is_some() && session.life.is_some())
    }

    pub(crate) fn is_of_another(&self, name: Name) -> bool {
        let session = self.sessions.get(&name);
        session.is_some_and(|session| session.user != self.user)
    }

    /// EVENTS was called, with any reply.
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

    /// Takes out the sessions that must end because they have too many events.
    pub(crate) fn overflowing(&mut self) -> Vec<Name> {
        let found = std::mem::take(&mut self.overflowing);
        found.into_iter().filter(|of| self.overflows(*of)).collect()
    }

    /// The connection that the session lives by.
    pub(crate) fn client_of(&self, name: Name) -> Option<u64> {
        self.sessions.get(&name)?.client
    }

    /// The numbers that this names: a life and an event.
    pub(crate) fn moment(&self, name: Name, after: After) -> (i64, u64) {
        let session = self.sessions.get(&name).cloned().unwrap_or_default();
        let life = session.life.unwrap_or(self.newest);
        match after {
            After::Told => (life, session.told),
            After::Seq(seq) => {
                let seq = seq % (session.last + 2);
                let seq = Some(seq).filter(|seq| session.is_certain(*seq));
                (life, seq.unwrap_or(session.last))
            }
            After::OtherLife(seq) => (life.max(1) - 1, seq),
        }
    }

    /// Whether it must be answered at once.
    pub(crate) fn attach(
        &mut self,
        name: Name,
        client: u64,
        epoch: Option<u64>,
        after: Option<(i64, u64)>,
        grace_ms: i64,
    ) -> bool {
        let user = self.user;
        let begun = || TwinSession {
            user,
            ..TwinSession::default()
        };
        let session = self.sessions.entry(name).or_insert_with(begun);
        if let Some((former, _)) = session.listener.take() {
            self.called.push((former, Call::TakenOver(client)));
        }
        session.is_woken = false;
        session.client = Some(client);
        session.epoch = session.epoch.max(epoch);
        session.grace_ms = grace_ms;
        session.grace_end = None;
        let knows_life = match (session.life, after) {
            (Some(_), None) => {
                session.acknowledge(session.told);
                true
            }
            (Some(life), Some((of, seq))) if life == of => {
                session.acknowledge(seq);
                true
            }
            _ => false,
        };
        !knows_life || !session.events.is_empty()
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

    /// Returns at most a thousand unacknowledged events. Begins a life if the session has none.
    /// (Names in these tests are short, so the limit of bytes is never reached.)
    pub(crate) fn take_events(&mut self, name: Name, now: Now) -> TwinTold {
        let session = self.sessions.get_mut(&name).unwrap();
        session.is_woken = false;
        if session.life.is_none() {
            self.newest = (self.newest + 1).max(now.wall_us);
            session.life = Some(self.newest);
            session.last = 0;
        }
        let events: Vec<_> = session.events.iter().take(1000).collect();
        session.told = session.acknowledged() + u64::try_from(events.len()).unwrap();
        TwinTold {
            life: session.life.unwrap(),
            after: session.acknowledged(),
            events: events.into_iter().map(|(_, of)| of.clone()).collect(),
        }
    }

    /// The events that were told before come in the same order.
    pub(crate) fn are_in_order(&mut self, name: Name, events: &[TwinEvent]) {
        let session = self.sessions.get_mut(&name).unwrap();
        for (kept, told) in session.events.iter_mut().zip(events) {
            kept.1 = told.clone();
        }
    }

    /// Lives begin after the numbers that another server has given.
    pub(crate) fn start_lives(&mut self, guard_ms: i64, now: Now) {
        self.newest = self.newest.max(now.wall_us + guard_ms * 1000);
    }

    /// The next EVENTS begins another life.
    pub(crate) fn end_life(&mut self, name: Name) {
        let Some(session) = self.sessions.get_mut(&name) else {
            return;
        };
        session.life = None;
        session.events.clear();
        if let Some((listener, _)) = session.listener.take() {
            session.is_woken = true;
            self.called.push((listener, Call::Woken));
        }
    }

    pub(crate) fn tell(&mut self, name: Name, event: TwinEvent) {
        let Some(session) = self.sessions.get_mut(&name) else {
            return;
        };
        if session.life.is_none() {
            return;
        }
        session.last += 1;
        session.events.push((session.last, event));
        if let Some((listener, _)) = session.listener.take() {
            self.called.push((listener, Call::Woken));
            session.is_woken = true;
        }
        if self.overflows(name) {
            self.overflowing.insert(name);
        }
    }

    /// The connection of this session is gone, and without a grace so is the rest.
    pub(crate) fn detach(&mut self, name: Name, now: Now) {
        let session = self.sessions.get_mut(&name).unwrap();
        session.client = None;
        session.listener = None;
        session.is_woken = false;
        let has_holds = self.holds.values().any(|hold| hold.session == name);
        if session.grace_ms > 0 && has_holds {
            session.grace_end = Some(now.mono_ms + session.grace_ms);
        } else {
            self.end_session(name);
        }
    }

    // --- The command connection ------------------------------------------------------------------

    /// The largest number that BIND has named for this session.
    pub(crate) fn bind_epoch(&self, name: Name) -> Option<u64> {
        let session = self.sessions.get(&name);
        let bound = self.bindings.get(&(self.user, name));
        let bound = bound.map(|(_, epoch)| *epoch);
        bound.max(session.and_then(|session| session.bind_epoch))
    }

    /// Whether this connection is bound to another session.
    pub(crate) fn is_bound_to_another(&self, name: Name, client: u64) -> bool {
        let mut bindings = self.bindings.iter();
        bindings.any(|(of, (bound, _))| *of != (self.user, name) && *bound == client)
    }

    /// The connection that was bound before.
    pub(crate) fn bind_connection(&mut self, name: Name, client: u64, epoch: u64) -> Option<u64> {
        let session = self.sessions.get_mut(&name).unwrap();
        session.bound = Some(client);
        session.bind_epoch = Some(epoch);
        let former = self.bindings.insert((self.user, name), (client, epoch));
        former.map(|(of, _)| of).filter(|of| *of != client)
    }

    pub(crate) fn is_bound(&self, name: Name, client: u64) -> bool {
        let session = self.sessions.get(&name);
        session.is_some_and(|session| session.bound == Some(client))
    }

    pub(crate) fn unbind_connection(&mut self, client: u64) {
        self.bindings.retain(|_, (bound, _)| *bound != client);
        for session in self.sessions.values_mut() {
            session.bound = session.bound.filter(|bound| *bound != client);
        }
    }

    // --- Ends ------------------------------------------------------------------------------------

    /// A grant did not arrive: its holds must end.
    pub(crate) fn take_back(
        &mut self,
        place: Place,
        owner: &[u8],
        mode: Mode,
        token: i64,
        several: Option<Vec<(Place, i64)>>,
    ) {
        let each = several.unwrap_or_else(|| vec![(place, token)]);
        self.endings
            .extend(each.into_iter().map(|(place, token)| TwinEnding {
                hold: (place, owner.to_vec(), mode),
                token: Some(token),
                whole: false,
            }));
    }

    /// The session ends. Its read holds go first.
    fn end_session(&mut self, name: Name) {
        self.sessions.remove(&name);
        self.overflowing.remove(&name);
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
            self.end_session(name);
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
    /// otherwise to the one it belonged to. Another session that had it loses it.
    pub(crate) fn bind(
        &mut self,
        of: &HoldName,
        session: Option<Name>,
        token: Option<i64>,
        ends_at: Option<i64>,
    ) {
        match (session, self.holds.get_mut(of)) {
            (Some(session), known) => {
                let hold = TwinHold {
                    session,
                    token,
                    ends_at,
                    asks_if_wanted: known.is_some_and(|known| known.asks_if_wanted),
                };
                let former = self.holds.insert(of.clone(), hold);
                self.end_without_holds();
                if let Some(former) = former.filter(|former| former.session != session) {
                    let event = event_of(of, News::Lost("taken"), former.token);
                    self.tell(former.session, event);
                }
            }
            (None, Some(hold)) => {
                // A hold that a script took gets its token when it is entered again.
                hold.token = token.or(hold.token);
                hold.ends_at = ends_at;
            }
            (None, None) => {}
        }
    }

    /// The owner gives its last hold back on this connection: the session hears of it, unless it is
    /// bound to that connection.
    pub(crate) fn given_back(&mut self, of: &HoldName, by: u64) {
        if let Some(hold) = self.holds.get(of)
            && !self.is_bound(hold.session, by)
        {
            let session = hold.session;
            let event = event_of(of, News::Lost("released"), hold.token);
            self.tell(session, event);
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
            let news = News::Lost(reason.unwrap_or(by_time));
            self.tell(hold.session, event_of(of, news, hold.token));
            self.end_without_holds();
        }
    }
}

/// An event about a hold.
pub(crate) fn event_of(of: &HoldName, news: News, token: Option<i64>) -> TwinEvent {
    let (place, owner, mode) = of.clone();
    TwinEvent {
        news,
        place,
        owner,
        mode,
        token,
    }
}

/// Whether nothing promises which of these comes first: waiters that leave together because
/// nothing is left to wait for or because their connection closed, and the holders of one lock.
fn are_one_step(one: &TwinEvent, next: &TwinEvent) -> bool {
    match (&one.news, &next.news) {
        (News::Error(text), News::Error(next)) => text == next,
        (News::Left, News::Left) => true,
        (News::Lost(_), News::Lost(_)) | (News::Wanted(_), News::Wanted(_)) => {
            one.place == next.place
        }
        _ => false,
    }
}

/// The same, and also a WANTED beside an event at another lock.
fn may_change_places(one: &TwinEvent, next: &TwinEvent) -> bool {
    let is_wanted = |of: &TwinEvent| matches!(of.news, News::Wanted(_));
    let beside = (is_wanted(one) || is_wanted(next)) && one.place != next.place;
    are_one_step(one, next) || beside
}

/// Brings events into one order whose order among themselves nobody promises.
pub(crate) fn in_any_order(mut events: Vec<TwinEvent>) -> Vec<TwinEvent> {
    for run in events.chunk_by_mut(are_one_step) {
        run.sort();
    }
    for run in events.chunk_by_mut(may_change_places) {
        run.sort();
    }
    events
}
