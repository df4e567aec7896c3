//! Steps without a keyspace: whatever the core reads is anything at all, other at each step, as if
//! somebody rewrote every key between any two of them, and both clocks may be anywhere.
//!
//! No twin could say which outcome is right then. These statements hold all the same: no step
//! panics or goes on for ever; a refusal changes nothing; a client that is told something waited
//! for it, and is told once; every number that a client is told is one that it can be told; new
//! tokens grow; and when all connections are closed nothing is left.

use super::choices::Choices;
use rlock_core::request::{
    Acquire, Bind, Cancel, Events, Limit, MultiAcquire, MultiRelease, MultiRenew, NamedKey,
    Release, Renew, WaitMode,
};
use rlock_core::{
    Attached, BlockedClient, Command, CommandError, Count, Effect, EventKind, GRACE_MS_MAX,
    HOLD_COUNT_MAX, Hash, INTEGER_MAX, Keys, Known, Lease, LockRef, Locks, Mode, Moment, NEVER,
    Now, Outcome, PERMITS_MAX, Permits, PermitsHash, PermitsHold, PermitsRequest, Purpose, Read,
    ReadHold, ReadWrite, Room, SessionLimits, SessionRef, Stored, Subject, Token, Turn, Wait,
    WaitOutcome, WaiterId, Write, WriteHold,
};
use std::collections::{BTreeMap, BTreeSet};

const LOCKS: [&[u8]; 3] = [b"a", b"", b"x{b}y"];
const OWNERS: [&[u8]; 3] = [b"A", b"B", b"\xff\0"];
const SESSIONS: [&[u8]; 2] = [b"s", b"\xff\0"];
/// The connections of sessions have the first numbers, blocked clients those after.
const CONNECTIONS: usize = 3;
const WAITERS_MAX: u32 = 5;
const MODES: [Mode; 3] = [Mode::Plain, Mode::Read, Mode::Write];

/// Any steps, over anything that is read.
pub fn any_state(data: &[u8]) {
    any_steps(Core::new(Choices::new(data)));
}

/// The same with permits among them. (With a body of its own, so that the bytes which once found
/// something go on saying the same.)
pub fn any_state_of_permits(data: &[u8]) {
    any_steps(Core {
        has_permits: true,
        ..Core::new(Choices::new(data))
    });
}

fn any_steps(mut core: Core<'_>) {
    for _ in 0..200 {
        if core.choices.are_over() {
            break;
        }
        core.step();
        crate::assert_invariants(&core.locks);
        core.come_to_rest();
        crate::assert_invariants(&core.locks);
        core.is_consistent();
    }
    core.close_all();
}

#[derive(Debug)]
struct Core<'a> {
    locks: Locks,
    choices: Choices<'a>,
    now: Now,
    /// Blocked clients that have heard nothing yet.
    blocked: BTreeMap<usize, WaiterId>,
    /// Whether every key can be looked at: no slot is on its way.
    is_settled: bool,
    /// Clients that wait for their session's events.
    listening: BTreeSet<usize>,
    clients: usize,
    last_token: i64,
    /// The last life of each session.
    lives: BTreeMap<&'static [u8], i64>,
    has_permits: bool,
}

impl<'a> Core<'a> {
    fn new(choices: Choices<'a>) -> Self {
        let (wall_us, mono_ms) = (1_000_000_500, 70);
        Self {
            locks: crate::locks_that_log(),
            choices,
            now: Now { wall_us, mono_ms },
            blocked: BTreeMap::new(),
            is_settled: false,
            listening: BTreeSet::new(),
            clients: CONNECTIONS,
            last_token: 0,
            lives: BTreeMap::new(),
            has_permits: false,
        }
    }

    // --- What is read ----------------------------------------------------------------------------

    fn moment(&mut self) -> i64 {
        let near = self.choices.of(&[50, 0, -1, 1, 7, 900]);
        match self.choices.below(8) {
            7 => self.choices.number(),
            6 => NEVER,
            _ => self.now.wall_ms().saturating_add(near),
        }
    }

    fn maybe_moment(&mut self) -> Option<i64> {
        (!self.choices.one_in(4)).then(|| self.moment())
    }

    fn token(&mut self) -> Option<Token> {
        match self.choices.below(4) {
            0 => None,
            1 => Token::new(self.choices.number()),
            2 => Token::new(self.last_token),
            _ => Token::new(1),
        }
    }

    fn count(&mut self) -> Count {
        let counts = [1, 2, 3, HOLD_COUNT_MAX - 1, HOLD_COUNT_MAX, i64::MAX];
        match self.choices.below(8) {
            7 => Count::Malformed,
            _ => Count::Valid(self.choices.of(&counts)),
        }
    }

    fn maybe_count(&mut self) -> Option<Count> {
        (self.choices.below(2) == 1).then(|| self.count())
    }

    /// Anything that a key can be read as.
    fn stored(&mut self) -> Stored {
        if self.has_permits && self.choices.below(2) == 1 {
            return self.permits_hash();
        }
        match self.choices.below(8) {
            0 | 1 => Stored::Free,
            2 => Stored::NoHolder,
            3 => self.choices.of(&[Stored::OtherType, Stored::Data]),
            4 | 5 => {
                let own = self.maybe_count();
                Stored::Plain(Hash {
                    own,
                    token: Known::read(self.token()),
                    others: own.is_none() || self.choices.one_in(4),
                    ends_at: Known::read(self.maybe_moment()),
                })
            }
            _ => self.read_write(),
        }
    }

    fn mode(&mut self) -> Mode {
        if self.has_permits && self.choices.below(2) == 1 {
            return Mode::Permits;
        }
        self.choices.of(&MODES)
    }

    fn permits(&mut self) -> Permits {
        Permits::new(self.choices.of(&[1, 2, 3, PERMITS_MAX])).unwrap()
    }

    fn asked(&mut self, mode: Mode) -> Option<PermitsRequest> {
        (mode == Mode::Permits).then(|| PermitsRequest {
            permits: self.permits(),
            limit: self.choices.maybe(|_| Permits::new(3).unwrap()),
        })
    }

    /// Anything that a hash of permits can be read as.
    fn permits_hash(&mut self) -> Stored {
        let own = self.choices.one_in(3).then(|| PermitsHold {
            permits: self.permits(),
            ends_at: self.moment(),
            token: self.token().unwrap_or(Token::new(7).unwrap()),
        });
        let is_there = own.is_some() || self.choices.one_in(2);
        Stored::Permits(PermitsHash {
            own,
            others_end: (is_there && self.choices.one_in(2)).then(|| self.moment()),
            room: match self.choices.below(5) {
                0 => Room::Now,
                1 => Room::Never,
                2 => Room::NoLimit,
                3 => Room::Unknown,
                _ => Room::At(self.moment()),
            },
            over: self.choices.of(&[0, 100]),
            limit: self.choices.maybe(|_| Permits::new(2).unwrap()),
            ends_at: self.maybe_moment(),
            is_there,
        })
    }

    fn read_write(&mut self) -> Stored {
        let own_write = self.maybe_count().map(|count| WriteHold {
            count,
            token: self.token(),
        });
        let own_read = self.maybe_count().map(|count| ReadHold {
            count,
            token: self.token(),
            ends_at: Known::read(self.moment()),
        });
        let others_read = self.choices.one_in(3).then(|| self.moment());
        let is_nobody = own_write.is_none() && own_read.is_none() && others_read.is_none();
        Stored::ReadWrite(ReadWrite {
            own_write,
            own_read,
            others_write: is_nobody || self.choices.one_in(4),
            others_token: self.token(),
            others_read,
            ends_at: Known::read(self.maybe_moment()),
            is_partial: self.choices.one_in(4),
        })
    }

    fn lock(&mut self) -> LockRef<'static> {
        let (db, name) = (0, self.choices.of(&LOCKS));
        LockRef { db, name }
    }

    fn lease(&mut self) -> Lease {
        let ms = self.choices.of(&[50, 1, 7, 800, INTEGER_MAX]);
        Lease::from_ms(ms).unwrap()
    }

    fn wait_mode(&mut self) -> (WaitMode, Option<SessionRef<'static>>) {
        let ms = self.choices.of(&[0, 1, 7, 60, INTEGER_MAX]);
        let (wait, session) = (Wait::from_ms(ms).unwrap(), self.choices.of(&SESSIONS));
        let session = SessionRef::from(session);
        match self.choices.below(4) {
            0 => (WaitMode::Block(wait), None),
            1 => (WaitMode::Queue(wait), Some(session)),
            2 => (WaitMode::Block(wait), Some(session)),
            _ => (WaitMode::None, self.choices.maybe(|_| session)),
        }
    }

    // --- What happens ----------------------------------------------------------------------------

    fn step(&mut self) {
        match self.choices.below(14) {
            0..3 => self.acquire(),
            3 | 4 => self.acquire_several(),
            5 => self.release(),
            6 => self.renew(),
            7 if self.choices.again().one_in(8) => self.bind(),
            7 => self.events(),
            8 => self.pass(),
            9 => self.depart(),
            10 => {
                let client = self.choices.below(CONNECTIONS);
                self.close(client);
            }
            11 => {
                let lock = self.lock();
                self.locks.changed(lock);
            }
            12 => self.release_and_renew_several(),
            _ => self.seldom(),
        }
    }

    fn seldom(&mut self) {
        let (lock, owner) = (self.lock(), self.choices.of(&OWNERS));
        let mut effects = Vec::new();
        let also_limits = usize::from(self.has_permits);
        match self.choices.below(6 + also_limits) {
            6 => {
                let key = lock.name;
                let limit = self.choices.maybe(|_| Permits::new(2).unwrap());
                let told = self.decide(Command::Limit(&Limit { key, limit }));
                assert!(
                    matches!(told, Ok(Outcome::Number(0..)) | Err(_)),
                    "{told:?}"
                );
            }
            0 => {
                let (key, mode) = (lock.name, self.choices.again().maybe(|_| Mode::Write));
                let told = self.decide(Command::Cancel(&Cancel { key, owner, mode }));
                assert!(matches!(told, Ok(Outcome::Number(0 | 1))), "{told:?}");
            }
            1 => {
                let told = self.decide(Command::Break(lock.name));
                assert!(
                    matches!(told, Ok(Outcome::Number(0 | 1)) | Err(_)),
                    "{told:?}"
                );
            }
            2 => self.locks.all_changed(self.choices.maybe(|_| 0)),
            3 => self.locks.demoted(&mut effects),
            4 => {
                let guard_ms = self.choices.of(&[0, 10_000]);
                self.locks.start_tokens(self.now, guard_ms);
            }
            _ => self.locks.all_changed(None),
        }
        self.carry_out(&effects);
    }

    // --- Turns -----------------------------------------------------------------------------------

    /// A command that does not wait.
    fn decide(&mut self, command: Command<'_>) -> Result<Outcome, CommandError> {
        let mut turn = Turn::of(command, 0, WAITERS_MAX);
        self.drive(&mut turn, Some(command));
        turn.outcome()
    }

    /// Drives a turn as the module does; whatever it asks for is anything at all. Now and then the
    /// driver is interrupted between reading and deciding, as by another module.
    fn drive(&mut self, turn: &mut Turn<'_>, command: Option<Command<'_>>) {
        for _ in 0..20_000 {
            let Some(task) = self.locks.next_task(turn, self.now) else {
                return;
            };
            if self.choices.one_in(16) {
                self.interrupt();
            }
            let number = match (&task.subject, command.map(|command| command.keys())) {
                (Subject::Command, Some(Keys::Several(keys))) => Some(keys.len()),
                (Subject::Several(locks, _), _) => Some(locks.len()),
                _ => None,
            };
            let all: Vec<Stored> = (0..number.unwrap_or(1)).map(|_| self.stored()).collect();
            let owners = (0..self.choices.below(3)).map(|_| self.choices.of(&OWNERS).into());
            let owners: Vec<Box<[u8]>> = owners.collect();
            let readers = owners.iter().map(|owner| (owner.clone(), Count::Valid(2)));
            let readers: Vec<(Box<[u8]>, Count)> = readers.collect();
            let is_break = matches!(command, Some(Command::Break(_)));
            let moved = CommandError::NoSession;
            let read = match task.purpose {
                Purpose::Holders => Read::Owners(&owners),
                Purpose::LongWait => Read::Holder(crate::first_of(&owners)),
                Purpose::Sweep => Read::Gone {
                    readers: &owners,
                    more: self.choices.one_in(2),
                },
                Purpose::Command if is_break => {
                    Read::Holds(all[0], &readers, crate::first_of(&owners))
                }
                Purpose::Command | Purpose::TimeOut if number.is_none() => Read::One(&all[0]),
                Purpose::Command | Purpose::TimeOut => Read::Several(&all),
                _ if self.choices.one_in(16) && !self.is_settled => Read::Unknown,
                Purpose::GrantSeveral(_) if self.choices.one_in(16) => Read::NotHere(0),
                Purpose::GrantSeveral(_) => Read::Several(&all),
                _ if self.choices.one_in(16) => Read::Elsewhere(moved),
                _ => Read::One(&all[0]),
            };
            let (purpose, was_free) = (task.purpose, all.iter().any(Stored::is_free));
            let mut effects = Vec::new();
            self.locks
                .decide(turn, task.found(read), self.now, &mut effects);
            if purpose == Purpose::Command
                && let Some(Ok(Outcome::Held { count, token })) = turn.decided()
            {
                let (count, token) = (*count, *token);
                self.is_held(count, token, was_free);
            }
            let is_refused = purpose == Purpose::Command && matches!(turn.decided(), Some(Err(_)));
            assert!(!is_refused || effects.is_empty(), "refused: {effects:?}");
            self.carry_out(&effects);
        }
        panic!("there is always something more to decide");
    }

    /// Another module calls us, while a key is opened.
    fn interrupt(&mut self) {
        let (lock, owner) = (self.lock(), self.choices.of(&OWNERS));
        let request = Release {
            key: lock.name,
            owner,
            mode: self.mode(),
            permits: None,
            token: None,
            lease: None,
            by: None,
        };
        let command = Command::Release(&request);
        let mut turn = Turn::of(command, 0, WAITERS_MAX);
        for _ in 0..20_000 {
            let Some(task) = self.locks.next_task(&mut turn, self.now) else {
                return;
            };
            let all: Vec<Stored> = match &task.subject {
                Subject::Several(locks, _) => locks.iter().map(|_| self.stored()).collect(),
                _ => vec![self.stored()],
            };
            let read = match (&task.subject, task.purpose) {
                (_, Purpose::Sweep) => Read::Unknown,
                (Subject::Several(..), _) => Read::Several(&all),
                _ => Read::One(&all[0]),
            };
            let mut effects = Vec::new();
            let reading = task.found(read);
            self.locks
                .decide(&mut turn, reading, self.now, &mut effects);
            self.carry_out(&effects);
        }
        panic!("there is always something more to decide");
    }

    // --- Commands --------------------------------------------------------------------------------

    fn acquire(&mut self) {
        let (lock, owner) = (self.lock(), self.choices.of(&OWNERS));
        let mode = self.mode();
        let asked = self.asked(mode);
        let lease = self.lease();
        let (wait_mode, session) = self.wait_mode();
        let request = Acquire {
            key: lock.name,
            owner,
            lease,
            mode,
            asked,
            wait_mode,
            session,
            wanted: session.is_some(),
            once: self.choices.one_in(3),
        };
        self.ask(Command::Acquire(&request), wait_mode);
    }

    fn ask(&mut self, command: Command<'_>, wait_mode: WaitMode) {
        let mut turn = Turn::of(command, 0, WAITERS_MAX);
        self.drive(&mut turn, Some(command));
        match turn.outcome() {
            Ok(Outcome::NotHeld { ttl_ms }) => assert!(ttl_ms >= -1, "{ttl_ms}"),
            Ok(Outcome::MustWait { ttl_ms }) => {
                assert!(ttl_ms >= -1, "{ttl_ms}");
                self.clients += 1;
                let handle = self.clients;
                let client_id = u64::try_from(handle).unwrap();
                let client = matches!(wait_mode, WaitMode::Block(_))
                    .then_some(BlockedClient { handle, client_id });
                let mut effects = Vec::new();
                let joined = self
                    .locks
                    .enqueue(&mut turn, client, self.now, &mut effects);
                self.carry_out(&effects);
                let joined = joined.expect("there is room for some");
                assert!(joined.position >= 0, "{joined:?}");
                if client.is_some() {
                    self.blocked.insert(handle, joined.waiter);
                }
            }
            Ok(Outcome::Held { .. }) | Err(_) => {}
            Ok(other) => panic!("{other:?}"),
        }
    }

    /// The new holder of a free lock has a token larger than any before.
    fn is_held(&mut self, count: i64, token: Token, is_new: bool) {
        assert!(count >= 1, "{count}");
        if is_new {
            assert!(token.get() > self.last_token, "{token:?} again");
            self.last_token = token.get();
        }
    }

    /// Some of the locks, each once.
    fn several(&mut self) -> Vec<LockRef<'static>> {
        let first = self.choices.below(LOCKS.len());
        let count = 1 + self.choices.below(LOCKS.len());
        let names = (0..count).map(|at| LOCKS[(first + at) % LOCKS.len()]);
        names.map(|name| LockRef { db: 0, name }).collect()
    }

    fn acquire_several(&mut self) {
        let locks = self.several();
        let (owner, lease) = (self.choices.of(&OWNERS), self.lease());
        let (wait_mode, session) = self.wait_mode();
        let keys = locks.iter().zip(4..);
        let request = MultiAcquire {
            owner,
            lease,
            keys: keys
                .map(|(lock, place)| NamedKey {
                    place,
                    name: lock.name,
                })
                .collect(),
            wait_mode,
            session,
            wanted: session.is_some(),
            once: self.choices.one_in(3),
        };
        self.ask(Command::MultiAcquire(&request), wait_mode);
    }

    fn release_and_renew_several(&mut self) {
        let (locks, owner) = (self.several(), self.choices.of(&OWNERS));
        let names = locks.iter().zip(3..);
        let keys: Vec<NamedKey<'_>> = names
            .map(|(lock, place)| NamedKey {
                place,
                name: lock.name,
            })
            .collect();
        let lease = self.lease();
        let told = if self.choices.one_in(2) {
            let by = self.by();
            self.decide(Command::MultiRelease(&MultiRelease { owner, keys, by }))
        } else {
            let session = self.choices.of(&SESSIONS);
            let session = self.choices.maybe(|_| session.into());
            self.decide(Command::MultiRenew(&MultiRenew {
                owner,
                lease,
                keys,
                session,
            }))
        };
        if let Ok(told) = told {
            assert!(matches!(told, Outcome::Number(0..=3)), "{told:?}");
        }
    }

    fn release(&mut self) {
        let lock = self.lock();
        let request = Release {
            key: lock.name,
            owner: self.choices.of(&OWNERS),
            mode: self.mode(),
            permits: None,
            token: self.token(),
            lease: self.choices.one_in(3).then(|| self.lease()),
            by: self.by(),
        };
        if let Ok(left) = self.decide(Command::Release(&request)) {
            let Outcome::Left(left) = left else {
                panic!("{left:?}");
            };
            assert!(left.is_none_or(|left| left >= 0), "{left:?}");
        }
    }

    fn renew(&mut self) {
        let lock = self.lock();
        let session = self.choices.of(&SESSIONS);
        let mut request = Renew {
            key: lock.name,
            owner: self.choices.of(&OWNERS),
            lease: self.lease(),
            mode: self.mode(),
            token: self.token(),
            session: self.choices.maybe(|_| session.into()),
            wanted: false,
        };
        request.wanted = request.session.is_some();
        let renewed = self.decide(Command::Renew(&request));
        assert!(
            matches!(renewed, Ok(Outcome::Number(0 | 1)) | Err(_)),
            "{renewed:?}"
        );
    }

    fn events(&mut self) {
        let client = self.choices.below(CONNECTIONS);
        if self.listening.contains(&client) {
            return;
        }
        let (wait, _) = self.wait_mode();
        let name = self.choices.of(&SESSIONS);
        let mut again = self.choices.again();
        let life = self.lives.get(name).copied().unwrap_or_default();
        let request = Events {
            session: name.into(),
            epoch: again.maybe(|of| of.of(&[0, 1, u64::MAX])),
            after: again.maybe(|of| Moment {
                life: of.of(&[life, life, life, 0]),
                seq: of.of(&[0, 1, 2, 9, u64::MAX]),
            }),
            block: None,
            grace_ms: self.choices.of(&[0, 30, GRACE_MS_MAX]),
        };
        let mut effects = Vec::new();
        let client_id = u64::try_from(client).unwrap();
        let limits = SessionLimits {
            sessions: 10,
            events_per_session: 2,
            out_of_memory: false,
        };
        let attached = self
            .locks
            .attach(&request, client_id, limits, self.now, &mut effects);
        self.carry_out(&effects);
        let attached = match attached {
            Err(CommandError::Stale(known)) => {
                assert!(request.epoch.is_some_and(|epoch| epoch < known));
                assert!(effects.is_empty(), "{effects:?}");
                return;
            }
            attached => attached.expect("there is room for some"),
        };
        assert!(self.locks.lives_by(attached.session, client_id));
        if let WaitMode::Block(wait) = wait
            && !attached.at_once
        {
            self.locks.listen(attached.session, client, wait, self.now);
            self.listening.insert(client);
            return;
        }
        self.take_events(name, attached);
    }

    /// Lives never come twice, and begin with the first event.
    fn take_events(&mut self, name: &'static [u8], attached: Attached) {
        let told = self.locks.take_events(attached.session, self.now);
        let told = told.expect("it is there");
        assert!(attached.at_once || told.events.is_empty(), "{told:?}");
        let life = self.lives.entry(name).or_default();
        assert!(*life <= told.after.life, "{told:?} after {life}");
        if *life < told.after.life {
            assert_eq!((told.after.seq, attached.at_once), (0, true), "{told:?}");
            *life = told.after.life;
        }
        for event in &told.events {
            match event.kind {
                EventKind::Timeout { ttl_ms } => assert!(ttl_ms >= -1, "{event:?}"),
                EventKind::Granted => assert!(event.token.is_some(), "{event:?}"),
                EventKind::Left => assert_eq!(event.token, None, "{event:?}"),
                _ => {}
            }
        }
    }

    fn bind(&mut self) {
        let client = self.choices.below(CONNECTIONS);
        if self.listening.contains(&client) {
            return;
        }
        let request = Bind {
            session: self.choices.of(&SESSIONS).into(),
            epoch: self.choices.of(&[1, 2, 3, 4, 5, 6]),
        };
        let bound = self.locks.bind(&request, u64::try_from(client).unwrap());
        match bound {
            Ok(None) => {
                self.locks.life_of(request.session).unwrap();
            }
            Ok(Some(former)) => {
                assert_ne!(former, u64::try_from(client).unwrap());
                self.close(usize::try_from(former).unwrap());
            }
            Err(
                CommandError::NoSession | CommandError::Stale(_) | CommandError::BoundToAnother,
            ) => {}
            Err(error) => panic!("{error}"),
        }
    }

    /// The connection that gives something back.
    fn by(&self) -> Option<u64> {
        let client = self.choices.again().below(CONNECTIONS + 1);
        let client = (client < CONNECTIONS).then_some(client);
        client.map(|client| u64::try_from(client).unwrap())
    }

    fn pass(&mut self) {
        let ms = match self.choices.below(8) {
            0 => self.locks.next_deadline(self.now).unwrap_or(0),
            1 => INTEGER_MAX,
            2..5 => 1,
            _ => self.choices.of(&[0, 7, 50, 51, 1000]),
        };
        self.now.mono_ms = self.now.mono_ms.saturating_add(ms);
        let passed_us = self.now.wall_us.saturating_add(ms.saturating_mul(1000));
        self.now.wall_us = match self.choices.below(8) {
            7 => self.choices.number(),
            _ => passed_us,
        };
        // Tokens follow it, and must not come to the end of all numbers.
        self.now.wall_us = self.now.wall_us.min(i64::MAX / 2);
    }

    fn depart(&mut self) {
        let which = self.choices.below(256);
        let which = which.checked_rem(self.blocked.len()).unwrap_or(0);
        if let Some((&client, &id)) = self.blocked.iter().nth(which) {
            self.blocked.remove(&client);
            let left = self.locks.waiter_gone(id);
            assert!(left.is_some(), "{id:?} was told nothing and is not there");
            assert_eq!(self.locks.waiter_gone(id), None, "it departs twice");
        }
    }

    fn close(&mut self, client: usize) {
        self.listening.remove(&client);
        let (client_id, mut effects) = (u64::try_from(client).unwrap(), Vec::new());
        self.locks.client_gone(client_id, self.now, &mut effects);
        self.carry_out(&effects);
    }

    // --- What the driver does in any case --------------------------------------------------------

    /// The timer, as often as it is due.
    fn come_to_rest(&mut self) {
        for _ in 0..1000 {
            if self.locks.next_deadline(self.now) != Some(0) {
                return;
            }
            self.drive(&mut Turn::of_deadlines(), None);
            let mut effects = Vec::new();
            self.locks.passed(self.now, &mut effects);
            self.carry_out(&effects);
            let budget = self.choices.of(&[1, 2, 1000]);
            self.drive(&mut Turn::of_timer().with_budget(budget), None);
        }
        panic!("there is always something more to do");
    }

    fn carry_out(&mut self, effects: &[Effect]) {
        for effect in effects {
            match effect {
                Effect::Grant {
                    client,
                    lock,
                    owner,
                    count,
                    grant,
                } => {
                    assert!(*count >= 1, "{effect:?}");
                    self.hears(*client, effect);
                    if self.choices.one_in(4) {
                        // It is gone before it hears of it.
                        self.locks.end_grant_later(lock, owner, grant);
                    }
                }
                Effect::Leave { client, why } => {
                    self.hears(*client, effect);
                    if let WaitOutcome::NotAcquired { ttl_ms } = why {
                        assert!(*ttl_ms >= -1, "{effect:?}");
                    }
                }
                Effect::Wake(listener) | Effect::TakenOver { listener, .. } => {
                    assert!(
                        self.listening.remove(listener),
                        "{effect:?} does not listen"
                    );
                }
                Effect::Write { write, .. } => {
                    let numbers = match write {
                        Write::SetTimeout(key, ..) | Write::DeleteTimeout(key) => Some(key.number),
                        _ => None,
                    };
                    assert!(numbers.is_none_or(|number| number >= 1), "{effect:?}");
                }
                Effect::Publish { .. } | Effect::Log(_) => {}
            }
        }
    }

    fn hears(&mut self, client: usize, effect: &Effect) {
        assert!(self.blocked.remove(&client).is_some(), "twice: {effect:?}");
    }

    /// INFO and LIST agree, and show every blocked client.
    fn is_consistent(&self) {
        let mut waiters = 0;
        let mut shown = BTreeSet::new();
        for name in LOCKS {
            let line = self.locks.queue(LockRef { db: 0, name }, self.now);
            waiters += line.len();
            for waiter in line {
                assert!(waiter.waited_ms >= 0 && waiter.left_ms >= -1, "{waiter:?}");
                shown.insert(usize::try_from(waiter.client_id).unwrap());
            }
        }
        let gauges = self.locks.gauges();
        assert_eq!(waiters, gauges.waiters, "{gauges:?}");
        let hidden = self.blocked.keys().find(|client| !shown.contains(client));
        assert_eq!(hidden, None, "it waits, and is shown in no line");
        let deadline = self.locks.next_deadline(self.now);
        assert!(deadline.is_none_or(|due_in| due_in > 0), "{deadline:?}");
    }

    /// Everybody goes, time passes, and every key is free.
    fn close_all(&mut self) {
        while !self.blocked.is_empty() {
            self.depart();
        }
        for client in 0..CONNECTIONS {
            self.close(client);
        }
        self.choices = Choices::new(&[]);
        self.is_settled = true;
        self.come_to_rest();
        // A lock that could not be looked at is tried again a second later.
        self.now.wall_us += 10_000_000;
        self.now.mono_ms = i64::MAX;
        self.locks.all_changed(None);
        self.come_to_rest();
        let gauges = self.locks.gauges();
        let holds = (gauges.session_holds, gauges.pending_releases);
        let left = (gauges.waiters, gauges.sessions, holds);
        assert_eq!(left, (0, 0, (0, 0)), "{gauges:?}");
        assert_eq!(self.locks.next_deadline(self.now), None);
    }
}
