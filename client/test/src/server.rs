//! A server in memory: its lives, its connections, its clock.

mod cluster;
mod replica;

use std::cell::{Cell, RefCell, RefMut};
use std::collections::{BTreeMap, VecDeque};
use std::fmt;
use std::pin::pin;
use std::rc::Rc;
use std::time::Duration;

use bytes::Bytes;
use futures_util::{SinkExt, StreamExt};
use redis_protocol::resp3::types::BytesFrame as Frame;
use rlock_core::{Gauges, Now};
use tokio::sync::{Notify, oneshot, watch};
use tokio::task::{spawn_local, yield_now};
use tokio::time::{Instant, sleep};
use tokio_util::codec::Framed;
use tokio_util::sync::CancellationToken;

use crate::chance::Chance;
use crate::commands::{self, Client, Connections, Copied, Identity, Reply};
use crate::engine::{Closing, Engine, Guarded, Listener};
use crate::keyspace::Keyspace;
use crate::life::while_alive;
use crate::moments::{self, ConnectionId, Moment};
use crate::network::Direction;
use crate::resp::Resp;
use crate::wire::End;
pub use cluster::{Cluster, Resharding};
pub(crate) use cluster::{Membership, slot_of};
use replica::Replication;

/// A server in memory. Clones are the same server.
///
/// It carries out the commands that `rlock-client` sends, with the algorithm of the module itself.
/// It has one user and no disk, may have [replicas](crate::Network::replica), and does not block:
/// `BLOCK` of ACQUIRE is as if it were not there.
#[derive(Clone, Debug)]
pub struct Server {
    inner: Rc<Inner>,
}

#[derive(Debug)]
struct Inner {
    /// How many servers were started before in its network.
    number: usize,
    chance: Chance,
    id: u64,
    started: Instant,
    /// How far the wall clock is ahead of where it began.
    wall_offset_ms: Cell<i64>,
    engine: RefCell<Engine>,
    /// The present life; cancelled when it ends.
    life: RefCell<CancellationToken>,
    lives: Cell<u64>,
    is_up: Cell<bool>,
    /// How often it has died, and was not started again since.
    deaths: Cell<u32>,
    /// How often it was about to do something.
    turns: Cell<u64>,
    /// How often it has done something.
    changes: Cell<u64>,
    /// How often it was made to stand still, and does not yet go on.
    stops: watch::Sender<u32>,
    /// Something is due at another time than before.
    rearm: Notify,
    /// A waiting call gets its reply at the end of this turn of the event loop.
    turn_ends: Notify,
    waiting: RefCell<BTreeMap<Listener, oneshot::Sender<Frame>>>,
    clients: Cell<u64>,
    connections: Connections,
    stats: Cell<Stats>,
    grant_delay_ms: Cell<i64>,
    is_busy: Cell<bool>,
    replication: Replication,
    /// If it is a node of a cluster.
    membership: RefCell<Option<Membership>>,
    observer: RefCell<Observer>,
    guarded: RefCell<GuardedObserver>,
}

/// The test's function that is told of each command and its reply.
#[derive(Default)]
struct Observer(Option<Listening>);

type Listening = Box<dyn Fn(&str)>;

/// The test's function that is told of each command that is run under a lock.
#[derive(Default)]
struct GuardedObserver(Option<ListeningToGuarded>);

type ListeningToGuarded = Box<dyn Fn(&Guarded)>;

impl fmt::Debug for GuardedObserver {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_tuple("GuardedObserver").finish_non_exhaustive()
    }
}

impl fmt::Debug for Observer {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_tuple("Observer").finish_non_exhaustive()
    }
}

/// Counts of a server's work.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Stats {
    /// Connections that were accepted.
    pub connections: u64,
    /// Commands that were carried out.
    pub commands: u64,
    /// Of these, those that renew a hold.
    pub renewals: u64,
    /// Commands that were sent on to where their keys have gone (`ASK`).
    pub asked: u64,
    /// Commands that were refused with `TRYAGAIN`, since some of their keys had gone.
    pub tried_again: u64,
}

/// Counts of a server's keys, waiters, sessions and holds.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Contents {
    /// Keys, those of readers' leases included.
    pub keys: usize,
    /// Waiters in all queues.
    pub waiters: usize,
    /// Sessions.
    pub sessions: usize,
    /// Holds that belong to sessions.
    pub holds: usize,
}

/// Where wall clocks begin, in milliseconds since 1970.
const EPOCH_MS: i64 = 1_700_000_000_000;

/// The server's words for blocked clients when it becomes a replica.
const UNBLOCKED: &str =
    "UNBLOCKED force unblock from blocking operation, instance state changed (master -> replica?)";

/// How often it looks for expired keys, and reads the wall clock.
const CRON: Duration = Duration::from_millis(100);

/// Servers count the lives of sessions from moments that differ by less than this, in microseconds.
const APART_US: u64 = 1_000;

/// How late a busy server does something at most.
const LATE: Duration = Duration::from_millis(20);

impl Server {
    pub(crate) fn start(number: usize, chance: Chance, started: Instant) -> Self {
        let inner = Inner {
            number,
            id: chance.seed(),
            chance,
            started,
            wall_offset_ms: Cell::new(0),
            engine: RefCell::default(),
            life: RefCell::default(),
            lives: Cell::new(0),
            is_up: Cell::new(false),
            deaths: Cell::new(0),
            turns: Cell::default(),
            changes: Cell::default(),
            stops: watch::Sender::new(0),
            rearm: Notify::new(),
            turn_ends: Notify::new(),
            waiting: RefCell::default(),
            clients: Cell::new(0),
            connections: Connections::default(),
            stats: Cell::default(),
            grant_delay_ms: Cell::new(0),
            is_busy: Cell::new(false),
            replication: Replication::default(),
            membership: RefCell::default(),
            observer: RefCell::default(),
            guarded: RefCell::default(),
        };
        let server = Self {
            inner: Rc::new(inner),
        };
        server.begin_life(Keyspace::default());
        server
    }

    // --- Faults ----------------------------------------------------------------------------------

    /// The process stands still: it answers nothing, and its clocks go on.
    pub fn pause(&self) {
        self.inner.count_change();
        let more = |stops: &mut u32| *stops = stops.saturating_add(1);
        self.inner.stops.send_modify(more);
    }

    /// It goes on, unless it stands still for another reason too.
    pub fn resume(&self) {
        self.inner.count_change();
        let fewer = |stops: &mut u32| *stops = stops.saturating_sub(1);
        self.inner.stops.send_modify(fewer);
        self.inner.rearm.notify_one();
    }

    /// The process dies, and all its connections with it. Its keys stay as if each write had been
    /// on disk, unless they are lost as well.
    pub fn crash(&self, loses_keys: bool) {
        self.inner.count_change();
        let deaths = self.inner.deaths.get();
        self.inner.deaths.set(deaths.saturating_add(1));
        self.inner.is_up.set(false);
        self.inner.life.borrow().cancel();
        self.inner.waiting.take();
        self.inner.forget_replicas();
        let keys = self.inner.engine.take().into_keys();
        if !loses_keys {
            self.inner.engine.replace(Engine::dead(keys));
        }
    }

    /// It starts again after a [`crash`](Self::crash); after several, with the last of as many
    /// calls of this. One that was made to stand still does so then too.
    pub fn restart(&self) {
        let left = self.inner.deaths.get().saturating_sub(1);
        self.inner.deaths.set(left);
        if left == 0 && !self.inner.is_up.get() {
            self.inner.count_change();
            self.begin_life(self.inner.engine.take().into_keys());
        }
    }

    /// Sets the wall clock forwards or back by this time: leases follow it.
    pub fn step_clock_ms(&self, by: i64) {
        self.inner.count_change();
        let ahead = self.inner.wall_offset_ms.get().saturating_add(by);
        self.inner.wall_offset_ms.set(ahead);
    }

    /// As `rlock.grant-delay-ms`: from the next start on no lock is granted for this time.
    pub fn set_grant_delay(&self, delay: Duration) {
        let ms = i64::try_from(delay.as_millis()).unwrap_or(i64::MAX);
        self.inner.grant_delay_ms.set(ms);
    }

    /// From now on it has much else to do: its timer fires late, it hears late of connections that
    /// have ended, its turns end before all is done, and between reading a lock and deciding about
    /// it something else may happen. It must not be, or get, a replica.
    pub fn make_busy(&self) {
        self.inner.is_busy.set(true);
        let chance = self.inner.chance.clone();
        self.inner.engine.borrow_mut().strain(chance);
    }

    /// Deletes a key, as `DEL` by another client: the holder of that lock has lost it.
    pub fn delete(&self, name: &str) {
        self.inner.engine.borrow_mut().delete(0, name.as_bytes());
        self.turned();
    }

    /// Ends all holds of a lock, as `RLOCK.BREAK` by an operator.
    pub fn break_lock(&self, name: &str) {
        let words = ["RLOCK.BREAK", name].map(|word| Bytes::copy_from_slice(word.as_bytes()));
        let mut operator = Client {
            id: 0,
            db: 0,
            written: 0,
            is_asking: false,
        };
        self.inner.call(&mut operator, &words);
    }

    /// Deletes all keys, as `FLUSHALL`.
    pub fn flush(&self) {
        self.inner.engine.borrow_mut().flush();
        self.turned();
    }

    // --- To look at ------------------------------------------------------------------------------

    /// Its run id, which `RLOCK.BIND` returns outside a cluster. After a restart it has another.
    pub fn run_id(&self) -> String {
        commands::run_id((self.inner.id, self.inner.lives.get()))
    }

    /// To look at keys, which removes those whose time is over.
    fn look(&self) -> (RefMut<'_, Engine>, Now) {
        self.inner.count_change();
        (self.inner.engine.borrow_mut(), self.inner.now())
    }

    /// The owners who hold this lock now.
    pub fn holders(&self, name: &str) -> Vec<String> {
        let (mut engine, now) = self.look();
        let holders = engine.holders(0, name.as_bytes(), now);
        let holders = holders.iter().map(|of| String::from_utf8_lossy(of).into());
        holders.collect()
    }

    /// How often this owner holds this lock, in whatever mode.
    pub fn count(&self, name: &str, owner: &str) -> u64 {
        let (mut engine, now) = self.look();
        engine.count(0, name.as_bytes(), owner.as_bytes(), now)
    }

    /// How long the lease of this lock lasts yet; of several readers the longest.
    pub fn lease_left(&self, name: &str) -> Option<Duration> {
        let (mut engine, now) = self.look();
        let left = engine.lease_left_ms(0, name.as_bytes(), now)?;
        Some(Duration::from_millis(left.unsigned_abs()))
    }

    /// How many waiters are in its queues: one that waits for several locks is in the queue of
    /// each.
    pub fn waiters(&self) -> usize {
        self.inner.engine.borrow().gauges().waiters
    }

    /// How many wait for this lock.
    pub fn waiting(&self, name: &str) -> usize {
        let now = self.inner.now();
        let engine = self.inner.engine.borrow();
        engine.waiting(0, name.as_bytes(), now)
    }

    /// How many keys, waiters, sessions and holds it has.
    pub fn contents(&self) -> Contents {
        let (mut engine, now) = self.look();
        engine.expire(now);
        let Gauges {
            waiters,
            sessions,
            session_holds: holds,
            ..
        } = engine.gauges();
        Contents {
            keys: engine.keys().len(),
            waiters,
            sessions,
            holds,
        }
    }

    /// How much work it has done.
    pub fn stats(&self) -> Stats {
        self.inner.stats.get()
    }

    /// Tells of each command that is carried out, with the answer: for a test's log. It must not
    /// call the server.
    pub fn observe(&self, observer: impl Fn(&str) + 'static) {
        self.inner
            .observer
            .replace(Observer(Some(Box::new(observer))));
    }

    /// Tells of each command that is run under a lock (`RLOCK.GUARD`), with those who hold it then.
    /// It must not call the server.
    pub fn observe_guarded(&self, observer: impl Fn(&Guarded) + 'static) {
        let observer = GuardedObserver(Some(Box::new(observer)));
        self.inner.guarded.replace(observer);
    }

    /// Whether its process is there and does not stand still.
    pub fn is_running(&self) -> bool {
        self.inner.count_turn();
        self.is_up() && *self.inner.stops.borrow() == 0
    }

    /// Whether its process is there; it may stand still.
    pub fn is_up(&self) -> bool {
        self.inner.is_up.get()
    }

    // --- A life ----------------------------------------------------------------------------------

    fn begin_life(&self, keys: Keyspace) {
        let inner = &self.inner;
        inner.lives.set(inner.lives.get().saturating_add(1));
        let engine = Engine::start(keys, inner.begins(), inner.grant_delay_ms.get());
        inner.engine.replace(engine);
        if inner.is_busy.get() {
            self.make_busy();
        }
        if let Some(membership) = inner.membership.borrow().clone() {
            inner.engine.borrow_mut().join(membership, inner.begins());
        }
        inner.is_up.set(true);
        let life = CancellationToken::new();
        inner.life.replace(life.clone());
        let work = Rc::clone(inner).live();
        spawn_local(async move {
            while_alive(&life, work).await;
        });
        self.inner.follow();
    }

    /// How often the server was about to do something, and how often it has: from one moment to
    /// another of the same numbers it has not been asked whether it stands still, and its keys,
    /// queues and sessions are the same.
    pub fn turns(&self) -> (u64, u64) {
        (self.inner.turns.get(), self.inner.changes.get())
    }

    pub(crate) fn number(&self) -> usize {
        self.inner.number
    }

    /// Serves a connection until it closes or this life of the server ends.
    pub(crate) fn accept(&self, stream: End) {
        let (inner, life) = (Rc::clone(&self.inner), self.inner.life.borrow().clone());
        spawn_local(async move {
            while_alive(&life, inner.serve(stream)).await;
        });
    }

    fn turned(&self) {
        self.inner.turned();
    }
}

impl Inner {
    /// It is asked whether it runs.
    fn count_turn(&self) {
        self.turns.set(self.turns.get().wrapping_add(1));
    }

    /// It is changed from outside.
    fn count_change(&self) {
        self.count_turn();
        self.changes.set(self.changes.get().wrapping_add(1));
    }

    fn now(&self) -> Now {
        let elapsed = self.started.elapsed();
        let since_us = i64::try_from(elapsed.as_micros()).unwrap_or(i64::MAX);
        let wall_ms = EPOCH_MS.saturating_add(self.wall_offset_ms.get());
        Now {
            wall_us: wall_ms.saturating_mul(1000).saturating_add(since_us),
            mono_ms: i64::try_from(elapsed.as_millis()).unwrap_or(i64::MAX),
        }
    }

    /// The moment from which it counts the lives of sessions. All servers here have one clock, and
    /// two that start at once would otherwise give two sessions the same life.
    fn begins(&self) -> Now {
        let now = self.now();
        let apart = i64::try_from(self.id % APART_US).unwrap_or_default();
        Now {
            wall_us: now.wall_us.saturating_add(apart),
            ..now
        }
    }

    /// The work that a server does without a command.
    async fn live(self: Rc<Self>) {
        tokio::join!(self.timer(), self.cron(), self.end_turns());
    }

    async fn is_running(&self) {
        self.count_turn();
        if *self.stops.borrow() == 0 {
            return;
        }
        let mut stops = self.stops.subscribe();
        // The sender is `self`: there is no other end to this.
        let goes_on = stops.wait_for(|stops| {
            self.count_turn();
            *stops == 0
        });
        let _ = goes_on.await;
    }

    /// Tells of a moment, at which the server may stop or die.
    async fn comes_to(&self, moment: Moment, connection: ConnectionId) {
        moments::tell(moment, connection);
        if !self.is_up.get() {
            // This life has ended, and its connections are about to hear of it.
            std::future::pending::<()>().await;
        }
        self.is_running().await;
    }

    async fn timer(&self) {
        loop {
            let due = self.engine.borrow().next_deadline(self.now());
            let fires = async {
                match due {
                    Some(ms) => {
                        let ms = Duration::from_millis(ms.unsigned_abs());
                        sleep(ms.saturating_add(self.lateness())).await;
                    }
                    None => std::future::pending().await,
                }
            };
            tokio::select! {
                biased;
                () = self.rearm.notified() => continue,
                () = fires => {}
            }
            self.is_running().await;
            let is_replica = self.is_replica();
            self.engine.borrow_mut().fire(self.now(), is_replica);
            self.turned();
            // A turn that leaves something to do lets clients come between.
            yield_now().await;
        }
    }

    /// How late it does the work that is due.
    fn lateness(&self) -> Duration {
        if self.is_busy.get() && self.chance.below(2) == 0 {
            self.chance.up_to(LATE)
        } else {
            Duration::ZERO
        }
    }

    async fn cron(&self) {
        let mut offset = self.wall_offset_ms.get();
        loop {
            sleep(CRON).await;
            self.is_running().await;
            let present = self.wall_offset_ms.get();
            let was_set = std::mem::replace(&mut offset, present) != present;
            let mut engine = self.engine.borrow_mut();
            let has_expired = !self.is_replica() && engine.expire(self.now());
            if was_set {
                engine.clock_was_set();
            }
            drop(engine);
            if was_set || has_expired {
                self.turned();
            }
        }
    }

    /// Something was done: sets the timer anew, and answers the calls that were woken.
    fn turned(&self) {
        self.changes.set(self.changes.get().wrapping_add(1));
        self.feed_replicas();
        self.rearm.notify_one();
        self.turn_ends.notify_one();
    }

    async fn end_turns(&self) {
        loop {
            self.turn_ends.notified().await;
            if !self.engine.borrow().has_woken() {
                continue;
            }
            // More of this turn may come before its end.
            for _ in 0..self.chance.below(3) {
                yield_now().await;
            }
            self.is_running().await;
            let answers = self.engine.borrow_mut().answers(self.now());
            self.changes.set(self.changes.get().wrapping_add(1));
            for (listener, answer) in answers {
                let answer = match answer {
                    Ok(told) => commands::events(&told),
                    Err(refusal) => commands::error(&refusal.to_string()),
                };
                if let Observer(Some(observer)) = &*self.observer.borrow() {
                    observer(&format!("events: {}", commands::shown(&answer)));
                }
                if let Some(waiting) = self.waiting.borrow_mut().remove(&listener) {
                    // If the connection has just closed, its reply is lost.
                    let _ = waiting.send(answer);
                }
            }
        }
    }

    async fn serve(self: Rc<Self>, stream: End) {
        self.clients.set(self.clients.get().saturating_add(1));
        self.count(|stats| stats.connections = stats.connections.saturating_add(1));
        let client = Client {
            id: self.clients.get(),
            db: 0,
            written: 0,
            is_asking: false,
        };
        let mut connection = Connection {
            stream: Framed::new(stream, Resp::default()),
            unread: VecDeque::new(),
            listener: None,
            is_sent_away: false,
        };
        let id = client.id;
        let open = self
            .connections
            .open(id, &self.replication.clients.borrow());
        // Once it is closed, nothing more is read that has come on it.
        tokio::select! {
            biased;
            () = open.cancelled() => {}
            () = connection.run(&self, client) => {}
        }
        self.connections.close(id);
        // A server that stands still hears of it later.
        self.is_running().await;
        let closing = Closing {
            client_id: id,
            listener: connection.listener,
        };
        self.engine.borrow_mut().closes(closing);
        let late = self.lateness();
        if !late.is_zero() {
            sleep(late).await;
            self.is_running().await;
        }
        self.engine.borrow_mut().is_closed(closing, self.now());
        if let Some(listener) = closing.listener {
            self.waiting.borrow_mut().remove(&listener);
        }
        self.turned();
    }

    fn call(&self, client: &mut Client, args: &[Bytes]) -> Reply {
        let renews = args.first().is_some_and(|name| {
            let name: &[u8] = name;
            name == b"RLOCK.RENEW" || name == b"RLOCK.MRENEW"
        });
        self.count(|stats| {
            stats.commands = stats.commands.saturating_add(1);
            stats.renewals = stats.renewals.saturating_add(renews.into());
        });
        let membership = self.membership.borrow();
        let who = Identity {
            run_id: (self.id, self.lives.get()),
            is_replica: self.is_replica(),
            connections: &self.connections,
            membership: membership.as_ref(),
        };
        let mut engine = self.engine.borrow_mut();
        let before = engine.keys().written();
        let reply = commands::carry_out(&mut engine, client, &who, args, self.now());
        let written = engine.keys().written();
        if written != before {
            client.written = written;
        }
        engine.set_asking(false);
        let guarded = engine.take_guarded();
        drop(engine);
        if let (Some(guarded), GuardedObserver(Some(observer))) = (guarded, &*self.guarded.borrow())
        {
            observer(&guarded);
        }
        if let Reply::Now(Frame::SimpleError { data, .. }) = &reply {
            self.count(|stats| {
                let asked = data.starts_with("ASK ");
                let tried_again = data.starts_with("TRYAGAIN ");
                stats.asked = stats.asked.saturating_add(asked.into());
                stats.tried_again = stats.tried_again.saturating_add(tried_again.into());
            });
        }
        if let Observer(Some(observer)) = &*self.observer.borrow() {
            let words: Vec<_> = args
                .iter()
                .map(|arg| arg.escape_ascii().to_string())
                .collect();
            let answer = match &reply {
                Reply::Now(frame) => commands::shown(frame),
                Reply::Later(_) | Reply::Copied(_) => "waits".to_owned(),
            };
            observer(&format!("{}: {} -> {answer}", client.id, words.join(" ")));
        }
        self.turned();
        reply
    }

    fn count(&self, count: impl FnOnce(&mut Stats)) {
        let mut stats = self.stats.get();
        count(&mut stats);
        self.stats.set(stats);
    }
}

/// A client's connection, from the server's side.
struct Connection {
    stream: Framed<End, Resp>,
    /// Commands that came while an earlier one waits.
    unread: VecDeque<Vec<Bytes>>,
    /// The call that waits.
    listener: Option<Listener>,
    /// Whether it is closed with the next answer.
    is_sent_away: bool,
}

impl Connection {
    /// Ends when the connection is closed, or a command cannot be read.
    async fn run(&mut self, server: &Inner, mut client: Client) {
        let id = self.stream.get_ref().id();
        while let Some(args) = self.next().await {
            server.comes_to(Moment::CarriesOut, id).await;
            let reply = match server.call(&mut client, &args) {
                Reply::Now(frame) => frame,
                Reply::Later(listener) => {
                    server.comes_to(Moment::Waits, id).await;
                    match self.wait(server, listener).await {
                        Some(frame) => frame,
                        None => return,
                    }
                }
                Reply::Copied(copied) => {
                    server.comes_to(Moment::Waits, id).await;
                    match self.wait_for_copies(server, copied, client.written).await {
                        Some(frame) => frame,
                        None => return,
                    }
                }
            };
            server.comes_to(Moment::Sends(Direction::ToHost), id).await;
            let is_last = self.is_sent_away;
            if self.stream.send(reply).await.is_err() || is_last {
                return;
            }
        }
    }

    async fn next(&mut self) -> Option<Vec<Bytes>> {
        match self.unread.pop_front() {
            Some(args) => Some(args),
            None => self.stream.next().await?.ok(),
        }
    }

    /// None if the connection closes first.
    async fn wait(&mut self, server: &Inner, listener: Listener) -> Option<Frame> {
        let (told, mut answer) = oneshot::channel();
        server.waiting.borrow_mut().insert(listener, told);
        self.listener = Some(listener);
        let mut demoted = server.replication.demoted.subscribe();
        loop {
            tokio::select! {
                biased;
                Ok(()) = demoted.changed() => return Some(self.send_away()),
                answer = &mut answer => {
                    self.listener = None;
                    return answer.ok();
                }
                args = self.stream.next() => self.unread.push_back(args?.ok()?),
            }
        }
    }

    /// As [`wait`](Self::wait), until enough replicas have all that was written before.
    async fn wait_for_copies(
        &mut self,
        server: &Inner,
        copied: Copied,
        written: u64,
    ) -> Option<Frame> {
        let mut demoted = server.replication.demoted.subscribe();
        let mut acknowledged = server.replication.acknowledged.subscribe();
        let limit = async {
            match copied.within_ms {
                0 => std::future::pending().await,
                ms => sleep(Duration::from_millis(ms)).await,
            }
        };
        let mut limit = pin!(limit);
        let mut is_over = false;
        loop {
            server.is_running().await;
            let replicas = server.copies_of(written);
            if is_over || replicas >= copied.replicas {
                return Some(copied.answer(replicas));
            }
            tokio::select! {
                biased;
                Ok(()) = demoted.changed() => return Some(self.send_away()),
                Ok(()) = acknowledged.changed() => {}
                () = &mut limit => is_over = true,
                args = self.stream.next() => self.unread.push_back(args?.ok()?),
            }
        }
    }

    /// The reply to a blocked call when the server becomes a replica. It closes the connection.
    fn send_away(&mut self) -> Frame {
        self.is_sent_away = true;
        commands::error(UNBLOCKED)
    }
}
