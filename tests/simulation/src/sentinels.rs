//! A primary and its replica, watched by sentinels: the faults there, and how they come about.

use std::cell::{Cell, RefCell};
use std::collections::BTreeSet;
use std::rc::Rc;
use std::time::Duration;

use rlock_test::{Direction, Host, Network, Sentinel, Server};
use serde::{Deserialize, Serialize};
use tokio::task::spawn_local;
use tokio::time::{Instant, sleep};

use crate::schedule::{self, FaultKind, Schedule};

/// The name of the service at the sentinels.
pub(crate) const SERVICE: &str = "orders";

/// Servers that sentinels watch.
#[derive(Clone, Copy, Debug, Serialize, Deserialize)]
pub struct Watched {
    /// How many sentinels.
    pub sentinels: usize,
    /// The longest time that a write is under way to the replica.
    pub lag: Duration,
    /// Whether clients may not subscribe to the sentinels' messages.
    #[serde(default)]
    pub are_mute: bool,
    /// The same as `lag` for a second replica, if the primary has one.
    #[serde(default)]
    pub second: Option<Duration>,
}

/// The replica becomes the primary.
#[derive(Clone, Copy, Debug, Serialize, Deserialize)]
pub struct Failover {
    /// The fate of the old primary.
    pub old: Old,
    /// The time before the promotion in which nothing has got to the replica.
    pub tail: Duration,
    /// The time after it in which the old primary goes on alone, is dead, or stands still.
    pub lasts: Duration,
    /// The time after that in which it takes itself for a primary.
    pub wakes: Duration,
    /// The time from the first sentinel that hears of it to the last.
    pub spread: Duration,
    /// The one that hears of it first.
    pub first: usize,
    /// Which of two replicas it is.
    #[serde(default)]
    pub to: usize,
}

/// The fate of a primary in a failover.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum Old {
    /// By order, as `FAILOVER`: nothing is written until the replica has all. Clients keep their
    /// connections.
    Waits,
    /// It becomes a replica at once.
    Follows,
    /// It is cut off from the sentinels and the replica, and not from clients.
    GoesOn,
    /// It dies. Started again, it is a primary at first.
    Dies,
    /// It stands still, and wakes as a primary.
    StandsStill,
}

/// A fault of a sentinel, and how long it lasts.
#[derive(Clone, Copy, Debug, Serialize, Deserialize)]
pub struct SentinelFault {
    /// Which.
    pub sentinel: usize,
    /// The fault.
    pub kind: SentinelFaultKind,
    /// For how long.
    pub lasts: Duration,
}

/// A kind of fault of a sentinel.
#[derive(Clone, Copy, Debug, Serialize, Deserialize)]
pub enum SentinelFaultKind {
    /// It stands still.
    Silent,
    /// It dies, and its connections end.
    Dies,
    /// It names the other server.
    Disagrees,
    /// This client does not reach it.
    Cut(usize),
}

/// The servers and their sentinels, while a schedule is carried out.
pub(crate) struct Service {
    servers: Vec<Server>,
    sentinels: Vec<Sentinel>,
    clients: Vec<schedule::Client>,
    latency: Duration,
    /// Whether something else goes wrong than failovers.
    is_disturbed: bool,
    /// Which server is the primary, as the sentinels have decided.
    primary: Cell<usize>,
    /// Which was it before.
    former: Cell<usize>,
    fails_over: Cell<bool>,
    /// Whether there was a failover that may have lost something.
    has_lost: Cell<bool>,
    /// Whether a replica was promoted that had less than another.
    has_overtaken: Cell<bool>,
    /// Sentinels that name another server.
    disagree: RefCell<BTreeSet<usize>>,
    /// Sentinels that have not yet heard of the last failover.
    unaware: RefCell<BTreeSet<usize>>,
    /// Which clients do not reach which sentinel.
    cut: RefCell<BTreeSet<(usize, usize)>>,
    /// Since when a majority of the sentinels tells each client the truth.
    told: RefCell<Vec<Option<Instant>>>,
    /// The clients to which a majority once did not, when all could know of the last failover.
    misled: RefCell<BTreeSet<usize>>,
}

pub(crate) fn server_address(server: usize) -> String {
    format!("server-{server}:6379")
}

pub(crate) fn sentinel_address(sentinel: usize) -> String {
    format!("sentinel-{sentinel}:26379")
}

/// The URLs of the sentinels.
pub(crate) fn urls(watched: Watched) -> impl Iterator<Item = String> {
    (0..watched.sentinels).map(|number| format!("redis://{}", sentinel_address(number)))
}

impl Service {
    pub(crate) fn start(schedule: &Schedule, network: &Network) -> Option<Rc<Self>> {
        let watched = schedule.watched?;
        let primary = network.server(&server_address(0));
        primary.set_lag(watched.lag);
        let mut servers = vec![primary.clone()];
        let lags = [Some(watched.lag), watched.second];
        for (number, lag) in (1..).zip(lags.into_iter().flatten()) {
            let replica = network.replica(&server_address(number), &primary);
            replica.set_lag(lag);
            servers.push(replica);
        }
        let sentinels = (0..watched.sentinels).map(|number| {
            let sentinel = network.sentinel(&sentinel_address(number), SERVICE);
            sentinel.set_primary(&server_address(0));
            if watched.are_mute {
                sentinel.refuse_subscribers();
            }
            sentinel
        });
        let is_other = |kind| !matches!(kind, FaultKind::Failover(_) | FaultKind::Kill(_));
        Some(Rc::new(Self {
            servers,
            sentinels: sentinels.collect(),
            clients: schedule.clients.clone(),
            latency: schedule.latency,
            is_disturbed: schedule.faults.iter().any(|fault| is_other(fault.kind)),
            primary: Cell::new(0),
            former: Cell::new(1),
            fails_over: Cell::new(false),
            has_lost: Cell::new(false),
            has_overtaken: Cell::new(false),
            disagree: RefCell::default(),
            unaware: RefCell::default(),
            cut: RefCell::default(),
            told: RefCell::new(vec![Some(Instant::now()); schedule.clients.len()]),
            misled: RefCell::default(),
        }))
    }

    pub(crate) fn servers(&self) -> &[Server] {
        &self.servers
    }

    /// The primary, as the sentinels have decided.
    pub(crate) fn primary(&self) -> &Server {
        &self.servers[self.primary.get()]
    }

    /// Whether a guard of this client may still count on a hold that a failover has lost, without
    /// knowing it. No failover loses a hold that a replica has acknowledged, unless another replica
    /// with less was promoted, or most sentinels name a primary that was replaced: the new primary
    /// ends the session then, and the old one, which goes on, confirms it.
    pub(crate) fn excuses(&self, client: usize, given_back: Option<Duration>) -> bool {
        let Some(setup) = self.clients.get(client) else {
            return false;
        };
        let copies = usize::try_from(setup.copies).unwrap_or_default();
        let has_all = !self.has_overtaken.get() || copies + 1 >= self.servers.len();
        // It needs a while to find the new primary, whose session has ended meanwhile.
        let is_misled = self.misled.borrow().contains(&client);
        let is_kept = setup.acknowledged.is_some() && has_all && !is_misled;
        let may_be_lost = !is_kept && !self.knows(client, setup);
        let may_be_telling = given_back.is_some_and(|since| since <= self.knows_after(setup));
        self.has_lost.get() && (may_be_telling || may_be_lost)
    }

    /// Whether a failover may have lost something. Then tokens may be smaller than those of a
    /// primary that does not know that it was replaced.
    pub(crate) fn has_lost(&self) -> bool {
        self.has_lost.get()
    }

    /// A client has stood still.
    pub(crate) fn goes_on(&self, client: usize) {
        if let Some(told) = self.told.borrow_mut().get_mut(client) {
            *told = told.map(|_| Instant::now());
        }
    }

    /// Whether a client with a grace has had the time that is documented to leave a primary that
    /// was replaced.
    fn knows(&self, client: usize, setup: &schedule::Client) -> bool {
        let told = self.told.borrow().get(client).copied().flatten();
        told.is_some_and(|told| told.elapsed() > self.knows_after(setup))
    }

    fn knows_after(&self, setup: &schedule::Client) -> Duration {
        let interval = setup.grace.clamp(INTERVAL_MIN, INTERVAL_MAX);
        let asks = (interval * 3) / 4 + ASKED_AGAIN;
        let answers = self.latency * DELAYS + SLACK;
        // A new primary that cannot be reached ends the confidence in the session. And all of it
        // may begin when the fault ends.
        let disturbed = if self.is_disturbed {
            setup.grace * 2 + setup.response_timeout * 4
        } else {
            Duration::ZERO
        };
        asks + answers + disturbed
    }

    /// The sentinels' answers have changed, or the clients that hear them.
    fn changed(&self) {
        let truth = server_address(self.primary.get());
        let cut = self.cut.borrow();
        for (client, told) in self.told.borrow_mut().iter_mut().enumerate() {
            let tells = self.sentinels.iter().enumerate().filter(|(number, one)| {
                one.is_running() && one.primary() == truth && !cut.contains(&(client, *number))
            });
            let is_told = tells.count() > self.sentinels.len() / 2;
            *told = is_told.then(|| told.unwrap_or_else(Instant::now));
            if !is_told && self.unaware.borrow().is_empty() {
                self.misled.borrow_mut().insert(client);
            }
        }
    }

    /// Sets the answer of each sentinel by the events so far.
    fn tell(&self) {
        for (number, sentinel) in self.sentinels.iter().enumerate() {
            let disagrees = self.disagree.borrow().contains(&number);
            let is_unaware = self.unaware.borrow().contains(&number);
            let is_wrong = disagrees != is_unaware;
            let named = if is_wrong {
                &self.former
            } else {
                &self.primary
            };
            sentinel.set_primary(&server_address(named.get()));
        }
        self.changed();
    }

    // --- What goes wrong -------------------------------------------------------------------------

    /// Whether it was done.
    pub(crate) async fn fail_over(self: &Rc<Self>, failover: Failover) -> bool {
        let old = self.primary();
        let places = 0..self.servers.len();
        let mut replicas: Vec<_> = places.filter(|of| *of != self.primary.get()).collect();
        let chosen = replicas.remove(failover.to % replicas.len());
        let new = &self.servers[chosen];
        let may_be = new.is_running() && new.is_replica() && may_be_replaced(old, failover.old);
        if self.fails_over.get() || !may_be {
            return false;
        }
        self.fails_over.set(true);
        let others: Vec<_> = replicas.iter().map(|of| &self.servers[*of]).collect();
        let is_done = self.replace(failover, old, chosen, &others).await;
        self.fails_over.set(false);
        is_done
    }

    async fn replace(
        self: &Rc<Self>,
        failover: Failover,
        old: &Server,
        chosen: usize,
        others: &[&Server],
    ) -> bool {
        let new = &self.servers[chosen];
        if !step_down(old, new, failover.old).await {
            return false;
        }
        if failover.old != Old::Waits {
            sleep(failover.tail).await;
            self.has_lost.set(true);
        }
        let has_less = |other: &&&Server| new.offset() < other.offset();
        if others.iter().any(|other| has_less(&other)) {
            self.has_overtaken.set(true);
        }
        new.promote();
        new.mend_replication();
        for other in others {
            other.replicate(new);
        }
        self.former.set(self.primary.replace(chosen));
        self.unaware.replace((0..self.sentinels.len()).collect());
        self.changed();
        spawn_local(Rc::clone(self).spread(failover));
        match failover.old {
            Old::Waits => {
                old.replicate(new);
                old.resume();
            }
            Old::Follows => become_replica(old, new),
            Old::GoesOn => {
                sleep(failover.lasts).await;
                become_replica(old, new);
            }
            Old::Dies => {
                sleep(failover.lasts).await;
                old.restart();
                sleep(failover.wakes).await;
                become_replica(old, new);
            }
            Old::StandsStill => {
                sleep(failover.lasts).await;
                old.resume();
                sleep(failover.wakes).await;
                become_replica(old, new);
            }
        }
        // The last sentinel has heard of it when the next begins.
        sleep(failover.spread).await;
        true
    }

    /// One sentinel after the other hears of it.
    async fn spread(self: Rc<Self>, failover: Failover) {
        let count = self.sentinels.len();
        let pause = failover.spread / u32::try_from(count).unwrap_or(1).max(1);
        for number in 0..count {
            let sentinel = (failover.first + number) % count;
            self.unaware.borrow_mut().remove(&sentinel);
            self.tell();
            sleep(pause).await;
        }
    }

    pub(crate) async fn sentinel_fault(
        &self,
        fault: SentinelFault,
        host: impl Fn(usize) -> Option<Host>,
    ) {
        let number = fault.sentinel;
        let Some(sentinel) = self.sentinels.get(number) else {
            return;
        };
        let at = sentinel_address(number);
        match fault.kind {
            SentinelFaultKind::Silent => {
                sentinel.pause();
                self.changed();
                sleep(fault.lasts).await;
                sentinel.resume();
            }
            SentinelFaultKind::Dies => {
                sentinel.crash();
                self.changed();
                sleep(fault.lasts).await;
                sentinel.restart();
            }
            SentinelFaultKind::Disagrees => {
                self.disagree.borrow_mut().insert(number);
                self.tell();
                sleep(fault.lasts).await;
                self.disagree.borrow_mut().remove(&number);
                self.tell();
            }
            SentinelFaultKind::Cut(client) => {
                let Some(host) = host(client) else { return };
                host.cut(&at, Direction::ToServer);
                host.cut(&at, Direction::ToHost);
                self.cut.borrow_mut().insert((client, number));
                self.changed();
                sleep(fault.lasts).await;
                host.mend(&at);
                self.cut.borrow_mut().remove(&(client, number));
            }
        }
        self.changed();
    }
}

/// Whether a primary may be replaced in this way. It may be dead already, or stand still.
pub(crate) fn may_be_replaced(old: &Server, how: Old) -> bool {
    let may_be_away = matches!(how, Old::Dies | Old::StandsStill);
    !old.is_replica() && (may_be_away || old.is_running())
}

/// Makes the old primary step down in this way, before the new one is promoted. Returns whether
/// that was possible.
pub(crate) async fn step_down(old: &Server, new: &Server, how: Old) -> bool {
    // It has to have begun to copy. Those that lose writes do not wait until it has all.
    if new.offset() == 0 && !is_in_sync(new).await {
        return false;
    }
    match how {
        Old::Waits => {
            old.pause();
            if !is_in_sync(new).await {
                old.resume();
                return false;
            }
        }
        Old::Follows | Old::GoesOn => new.cut_replication(),
        Old::Dies => {
            new.cut_replication();
            old.crash(false);
        }
        Old::StandsStill => {
            new.cut_replication();
            old.pause();
        }
    }
    true
}

/// As sentinels make a server a replica: with all connections closed.
pub(crate) fn become_replica(old: &Server, new: &Server) {
    old.replicate(new);
    old.disconnect_clients();
}

/// Waits until a replica has all. It may take too long.
async fn is_in_sync(replica: &Server) -> bool {
    for _ in 0..IN_SYNC_TRIES {
        if replica.is_in_sync() {
            return true;
        }
        sleep(Duration::from_millis(20)).await;
    }
    false
}

const IN_SYNC_TRIES: u32 = 200;

// See `docs/guarantees.md`, "At a replaced primary".
const INTERVAL_MIN: Duration = Duration::from_millis(100);
const INTERVAL_MAX: Duration = Duration::from_secs(5);
const ASKED_AGAIN: Duration = Duration::from_millis(100);

/// So often a message is under way for the answers of the sentinels, three times, of the new
/// primary to two connections, and to one renewal. Opening a connection takes three times there and
/// back.
const DELAYS: u32 = 50;

/// How far timers are off.
const SLACK: Duration = Duration::from_millis(300);
