//! The server: sessions, and what each command does.

use std::mem;

use crate::locks::{Hold, Locks, Notice, Wait};
use crate::message::{Command, Event, Kind, Mode, Names, Reply, Request, Subject};
use crate::setup::Setup;

/// Lives and tokens of a promoted server are larger.
pub(crate) const PROMOTED: u8 = 100;

#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub(crate) struct Session {
    /// `None` once its events were too many: its holds stay for the grace, and the client's next
    /// EVENTS begins another session.
    pub(crate) client: Option<usize>,
    pub(crate) life: u8,
    pub(crate) epoch: u8,
    /// The session connection that is there, by number.
    pub(crate) connection: Option<u8>,
    /// An EVENTS call is blocked on it.
    pub(crate) is_asking: bool,
    /// Those that are not acknowledged.
    pub(crate) events: Vec<Event>,
    pub(crate) last_seq: u8,
    /// Ticks left while no connection is there.
    pub(crate) grace: u8,
}

#[derive(Clone, Debug, PartialEq, Eq, Hash, Default)]
pub(crate) struct Server {
    pub(crate) locks: Locks,
    pub(crate) sessions: Vec<Session>,
    /// The locks' slot is at another node.
    pub(crate) has_moved: bool,
    /// Of each client: its bound connection. BIND numbers are compared with this one's alone.
    pub(crate) bound: Vec<Option<u8>>,
    /// The last life. It survives restarts.
    pub(crate) lives: u8,
    /// For the checks: tokens of holds whose end P2 does not speak of. BREAK ended them, or the
    /// server lost its data, or the grace is 0.
    pub(crate) excused: Vec<(Names, u8)>,
    /// For the checks: a command that hit another subject than was meant.
    pub(crate) violation: Option<&'static str>,
}

impl Server {
    pub(crate) fn session(&mut self, client: usize) -> Option<&mut Session> {
        let is_its = |session: &&mut Session| session.client == Some(client);
        self.sessions.iter_mut().find(is_its)
    }

    /// The life of the client's session, if somebody listens to it.
    fn listened_to(&mut self, client: usize) -> Option<u8> {
        let session = self.session(client)?;
        session.connection.map(|_| session.life)
    }

    /// For the checks: a hold that came with a failover and that nobody has confirmed here. The
    /// failover may have lost its RELEASE, so a later call that finds it did nothing wrong.
    pub(crate) fn is_inherited(&self, hold: &Hold) -> bool {
        self.lives >= PROMOTED && hold.life == 0
    }

    fn check_call(&mut self, hit: u8, meant: u8, what: &'static str) {
        if hit != meant {
            self.violation = Some(what);
        }
    }

    // Commands.

    pub(crate) fn request(
        &mut self,
        client: usize,
        connection: u8,
        request: &Request,
        setup: &Setup,
    ) -> Reply {
        let Request {
            command,
            subject,
            call,
        } = *request;
        if self.has_moved {
            return Reply::Moved;
        }
        self.adopt(subject, call);
        match command {
            Command::Acquire => self.acquire(client, subject, call, setup),
            Command::Release { token } => {
                let is_bound = self.bound[client] == Some(connection);
                self.release(subject, call, token, !is_bound, setup)
            }
            Command::Renew { token } => self.renew(client, subject, call, token, setup),
            Command::Cancel => self.cancel(subject, call, setup),
        }
    }

    /// For the checks: an inherited hold becomes that of the call that finds it.
    fn adopt(&mut self, subject: Subject, call: u8) {
        let is_promoted = self.lives >= PROMOTED;
        let mut holds = self.locks.holds.iter_mut();
        if let Some(hold) = holds.find(|hold| hold.subject == subject)
            && is_promoted
            && hold.life == 0
        {
            hold.call = call;
        }
    }

    fn acquire(&mut self, client: usize, subject: Subject, call: u8, setup: &Setup) -> Reply {
        let Some(session) = self.session(client).filter(|s| s.connection.is_some()) else {
            return Reply::NoSession;
        };
        let (life, seq) = (session.life, session.last_seq);
        let held = subject.each().map(|one| self.locks.hold(one));
        if let Some(holds) = held.collect::<Option<Vec<&Hold>>>() {
            let token = holds
                .iter()
                .map(|hold| hold.token)
                .max()
                .unwrap_or_default();
            let hit = holds[0].call;
            let its = self.locks.holds.iter_mut();
            its.filter(|hold| hold.subject.meets(subject))
                .for_each(|hold| {
                    (hold.left, hold.life) = (setup.size.lease, life);
                });
            self.check_call(
                hit,
                call,
                "an ACQUIRE finds a hold of an earlier call of its owner",
            );
            return Reply::Held { token };
        }
        let mut waits = self.locks.waits.iter_mut();
        if let Some(wait) = waits.find(|wait| wait.subject == subject) {
            wait.life = life;
            let (taken_over, hit) = (wait.clone(), wait.call);
            self.check_call(
                hit,
                call,
                "an ACQUIRE finds a wait of an earlier call of its owner",
            );
            if !setup.rules.takeover_silent {
                self.tell(taken_over.ended(Kind::Timeout, 0));
            }
            return Reply::Queued { seq, life };
        }
        if self.would_wait_twice(subject) {
            return Reply::Refused;
        }
        let wait = Wait {
            subject,
            life,
            call,
        };
        let ahead = self.locks.waits.len();
        if self.locks.may_enter(&wait, ahead, setup) {
            let token = self.locks.grant(&wait, ahead, setup);
            return Reply::Held { token };
        }
        self.locks.waits.push(wait);
        Reply::Queued { seq, life }
    }

    /// `WAITING`: an owner stands in a queue once. `DEADLOCK`: WRITE would wait for its own READ.
    fn would_wait_twice(&self, subject: Subject) -> bool {
        let mut waits = self.locks.waits.iter().map(|wait| wait.subject);
        let read = Subject {
            mode: Mode::Read,
            ..subject
        };
        waits.any(|other| other.owner == subject.owner && other.names.meets(subject.names))
            || subject.mode == Mode::Write && self.locks.hold(read).is_some()
    }

    fn release(
        &mut self,
        subject: Subject,
        call: u8,
        token: Option<u8>,
        is_told: bool,
        setup: &Setup,
    ) -> Reply {
        let Some(hold) = self.named(subject, token) else {
            return Reply::Done(false);
        };
        self.check_call(
            hold.call,
            call,
            "a RELEASE ends another hold than the one meant",
        );
        self.end(&hold, is_told, setup);
        Reply::Done(true)
    }

    fn renew(
        &mut self,
        client: usize,
        subject: Subject,
        call: u8,
        token: Option<u8>,
        setup: &Setup,
    ) -> Reply {
        let Some(named) = self.named(subject, token) else {
            return Reply::Done(false);
        };
        let Some(life) = self.listened_to(client) else {
            return Reply::NoSession;
        };
        self.check_call(
            named.call,
            call,
            "a RENEW changes another hold than the one meant",
        );
        for hold in self.locks.holds.iter_mut().filter(|hold| **hold == named) {
            (hold.left, hold.life) = (setup.size.lease, life);
        }
        Reply::Done(true)
    }

    fn cancel(&mut self, subject: Subject, call: u8, setup: &Setup) -> Reply {
        let is_it = |wait: &Wait| {
            let same_mode = wait.subject.mode == subject.mode || !setup.rules.cancel_mode;
            let same_name = wait.subject.names.meets(subject.names);
            same_mode && same_name && wait.subject.owner == subject.owner
        };
        let Some(i) = self.locks.waits.iter().position(is_it) else {
            return Reply::Done(false);
        };
        let hit = self.locks.waits[i].call;
        self.check_call(hit, call, "a CANCEL ends another wait than the one meant");
        self.leave(i, Kind::Timeout, setup);
        Reply::Done(true)
    }

    /// The owner's hold, if it has one and, where a token is named, this one.
    fn named(&self, subject: Subject, token: Option<u8>) -> Option<Hold> {
        let hold = self.locks.hold(subject);
        hold.filter(|hold| token.is_none_or(|token| token == hold.token))
            .cloned()
    }

    /// `None`: the call blocks.
    pub(crate) fn events(
        &mut self,
        client: usize,
        connection: u8,
        epoch: u8,
        after: (u8, u8),
        at_once: bool,
        setup: &Setup,
    ) -> Option<Reply> {
        if self.session(client).is_none() {
            self.begin(client);
        }
        let session = self.session(client)?;
        if setup.rules.epoch && epoch < session.epoch {
            return Some(Reply::Stale);
        }
        session.epoch = session.epoch.max(epoch);
        session.connection = Some(connection);
        session.is_asking = true;
        if after.0 == session.life || !setup.rules.after_life {
            session.events.retain(|event| event.seq > after.1);
        }
        let is_new = after.0 != session.life && setup.rules.new_life_at_once;
        if at_once || is_new || !session.events.is_empty() {
            return self.answer_events(client);
        }
        None
    }

    fn begin(&mut self, client: usize) {
        self.lives += 1;
        self.sessions.push(Session {
            client: Some(client),
            life: self.lives,
            epoch: 0,
            connection: None,
            is_asking: false,
            events: vec![],
            last_seq: 0,
            grace: 0,
        });
        self.sessions
            .sort_by_key(|session| (session.client, session.life));
    }

    /// The reply to the EVENTS call that is blocked, if any is.
    pub(crate) fn answer_events(&mut self, client: usize) -> Option<Reply> {
        let session = self.session(client).filter(|session| session.is_asking)?;
        session.is_asking = false;
        let events = session.events.clone();
        Some(Reply::Events {
            life: session.life,
            events,
        })
    }

    /// The second value: the connection to close before the reply.
    pub(crate) fn bind(&mut self, client: usize, connection: u8) -> (Reply, Option<u8>) {
        let before = self.bound[client];
        if before.is_some_and(|before| connection <= before) {
            return (Reply::Stale, None);
        }
        let Some(life) = self.listened_to(client) else {
            return (Reply::NoSession, None);
        };
        self.bound[client] = Some(connection);
        (Reply::Bound { life }, before)
    }

    // Consequences of a change.

    pub(crate) fn tell(&mut self, notice: Notice) {
        let Notice {
            life,
            kind,
            subject,
            token,
            call,
        } = notice;
        let mut sessions = self.sessions.iter_mut();
        if let Some(session) = sessions.find(|session| session.life == life) {
            session.last_seq += 1;
            let seq = session.last_seq;
            session.events.push(Event {
                seq,
                kind,
                subject,
                token,
                call,
            });
        }
    }

    /// Locks that have become free go to the next waiters, in the same step.
    fn pass_on(&mut self, setup: &Setup) {
        for notice in self.locks.pass_on(setup) {
            self.tell(notice);
        }
    }

    /// Ends a hold. `is_told`: its session hears of it.
    pub(crate) fn end(&mut self, hold: &Hold, is_told: bool, setup: &Setup) {
        self.locks.holds.retain(|other| other != hold);
        if is_told {
            self.tell(hold.lost());
        }
        self.pass_on(setup);
        self.end_idle_sessions(setup);
    }

    /// Takes a waiter out of the queue.
    pub(crate) fn leave(&mut self, index: usize, kind: Kind, setup: &Setup) {
        let wait = self.locks.waits.remove(index);
        self.tell(wait.ended(kind, 0));
        if setup.rules.leave_lets_in {
            self.pass_on(setup);
        }
    }

    /// A session that nobody listens to ends with its last hold.
    fn end_idle_sessions(&mut self, setup: &Setup) {
        let holds = &self.locks.holds;
        let is_idle = |session: &&Session| {
            session.connection.is_none() && !holds.iter().any(|hold| hold.life == session.life)
        };
        if let Some(life) = self
            .sessions
            .iter()
            .find(is_idle)
            .map(|session| session.life)
        {
            self.end_session(life, setup);
        }
    }

    fn end_session(&mut self, life: u8, setup: &Setup) {
        self.sessions.retain(|session| session.life != life);
        self.locks.waits.retain(|wait| wait.life != life);
        let its = |hold: &Hold| hold.life == life;
        while let Some(hold) = self.locks.holds.iter().find(|hold| its(hold)).cloned() {
            if setup.size.grace == 0 {
                // A guard may learn of it only afterwards.
                self.excused.push((hold.subject.names, hold.token));
            }
            self.end(&hold, false, setup);
        }
        self.pass_on(setup);
    }

    // Changes without a command of these clients.

    /// A connection is gone, as the server sees it.
    pub(crate) fn command_connection_closed(&mut self, client: usize, connection: u8) {
        if self.bound[client] == Some(connection) {
            self.bound[client] = None;
        }
    }

    pub(crate) fn session_connection_closed(
        &mut self,
        client: usize,
        connection: u8,
        setup: &Setup,
    ) {
        let mut sessions = self.sessions.iter_mut();
        let is_it = |s: &&mut Session| s.client == Some(client) && s.connection == Some(connection);
        let Some(session) = sessions.find(is_it) else {
            return;
        };
        (session.connection, session.is_asking) = (None, false);
        session.grace = setup.size.grace;
        let life = session.life;
        while let Some(i) = self.locks.waits.iter().position(|wait| wait.life == life) {
            self.leave(i, Kind::Left, setup);
        }
        if setup.size.grace == 0 {
            self.end_session(life, setup);
        }
        self.end_idle_sessions(setup);
    }

    /// Too many events were not acknowledged.
    pub(crate) fn overflow(&mut self, client: usize, setup: &Setup) {
        let Some(session) = self.session(client) else {
            return;
        };
        let life = session.life;
        if !setup.rules.overflow_grace || setup.size.grace == 0 {
            return self.end_session(life, setup);
        }
        (session.client, session.connection, session.is_asking) = (None, None, false);
        session.grace = setup.size.grace;
        session.events.clear();
        self.locks.waits.retain(|wait| wait.life != life);
        self.pass_on(setup);
        self.end_idle_sessions(setup);
    }

    pub(crate) fn break_lock(&mut self, name: u8, setup: &Setup) {
        let (broken, kept) = self
            .locks
            .holds
            .drain(..)
            .partition(|hold| hold.subject.names == Names::one(name));
        self.locks.holds = kept;
        let broken: Vec<Hold> = broken;
        for hold in broken {
            self.excused.push((hold.subject.names, hold.token));
            self.tell(hold.lost());
        }
        self.pass_on(setup);
        self.end_idle_sessions(setup);
    }

    pub(crate) fn tick(&mut self, setup: &Setup) {
        self.locks.holds.iter_mut().for_each(|hold| hold.left -= 1);
        let detached = self
            .sessions
            .iter_mut()
            .filter(|session| session.connection.is_none());
        detached.for_each(|session| session.grace -= 1);
        while let Some(hold) = self.locks.holds.iter().find(|hold| hold.left == 0).cloned() {
            self.end(&hold, true, setup);
        }
        let is_over = |session: &&Session| session.connection.is_none() && session.grace == 0;
        while let Some(life) = self
            .sessions
            .iter()
            .find(is_over)
            .map(|session| session.life)
        {
            self.end_session(life, setup);
        }
    }

    /// The slot goes to another node: the waits end, and the holds go with it.
    pub(crate) fn move_away(&mut self, setup: &Setup) -> Vec<Hold> {
        self.has_moved = true;
        for wait in mem::take(&mut self.locks.waits) {
            self.tell(wait.ended(Kind::Moved, 0));
        }
        let mut holds = mem::take(&mut self.locks.holds);
        for hold in holds.iter().filter(|_| setup.rules.moved_told) {
            self.tell(Notice {
                kind: Kind::Moved,
                ..hold.lost()
            });
        }
        for hold in &mut holds {
            hold.life = 0;
        }
        self.end_idle_sessions(setup);
        holds
    }

    /// Sessions and waits are not stored; holds are, unless the data is lost.
    pub(crate) fn restart(&mut self, keeps_holds: bool) {
        self.sessions.clear();
        self.bound.fill(None);
        self.locks.waits.clear();
        if keeps_holds {
            self.locks.holds.iter_mut().for_each(|hold| hold.life = 0);
        } else {
            let lost = self
                .locks
                .holds
                .drain(..)
                .map(|hold| (hold.subject.names, hold.token));
            self.excused.extend(lost);
        }
    }

    /// A new primary with the same keys, or without the last that were written.
    pub(crate) fn promoted(&self, keeps_holds: bool) -> Self {
        let mut new = self.clone();
        new.restart(keeps_holds);
        (new.lives, new.locks.tokens) = (PROMOTED, PROMOTED);
        new
    }
}
