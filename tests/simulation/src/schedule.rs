//! The actions of clients in a run, and its faults with their times. It follows from a seed, and
//! can be made shorter by leaving parts of it out.

use std::fmt;
use std::time::Duration;

use serde::{Deserialize, Serialize};

use crate::hands::{self, Ahead};
use crate::kept;
use crate::listens::{self, Listens};
use crate::moves::{self, ByKeys};
use crate::nodes::Clustered;
use crate::permits::{self, Asked, SetLimit};
use crate::replicas;
use crate::sentinels::{Failover, Old, SentinelFault, SentinelFaultKind, Watched};
use crate::stops::{self, Stop};

/// A run, as planned.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct Schedule {
    /// Seeds the random choices that are made while it runs.
    pub seed: u64,
    /// The longest time a message is under way.
    pub latency: Duration,
    /// How many servers there are; with more than one the clients take locks at a majority.
    pub servers: usize,
    /// Sentinels, if there are some: then the one server has a replica.
    #[serde(default)]
    pub watched: Option<Watched>,
    /// A cluster in the place of the one server.
    #[serde(default)]
    pub clustered: Option<Clustered>,
    /// As `rlock.grant-delay-ms`.
    pub grant_delay: Duration,
    /// The processes.
    pub clients: Vec<Client>,
    /// Their tasks.
    pub tasks: Vec<Task>,
    /// The limits of semaphores that they set.
    #[serde(default)]
    pub limits: Vec<SetLimit>,
    /// The faults.
    pub faults: Vec<Fault>,
    /// Whether the servers have much else to do: see `Server::make_busy`.
    #[serde(default)]
    pub is_busy: bool,
    /// If it is a small program, whose faults come at steps.
    #[serde(default)]
    pub small: Option<Small>,
}

/// The settings of a small program.
#[derive(Clone, Copy, Debug, Serialize, Deserialize)]
pub struct Small {
    /// Its steps are counted from here on.
    pub begins: Duration,
    /// After the end of its tasks a run rests for this time, even with faults in it, and then until
    /// nobody holds or waits. Other schedules rest only if a judge needs it.
    pub rests: Duration,
}

/// A client process.
#[derive(Clone, Copy, Debug, Serialize, Deserialize)]
pub struct Client {
    /// See `ClientBuilder`.
    pub grace: Duration,
    /// See `ClientBuilder`.
    pub lease: Duration,
    /// See `ClientBuilder`.
    pub response_timeout: Duration,
    /// As `ClientBuilder::acknowledged_by`.
    #[serde(default)]
    pub acknowledged: Option<Duration>,
    /// The number of replicas.
    #[serde(default = "one")]
    pub copies: u32,
}

/// One task of a process: it takes locks one after the other.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct Task {
    /// The client that it uses.
    pub client: usize,
    /// When it begins.
    pub at: Duration,
    /// The owner of its calls.
    pub owner: Owning,
    /// Its steps.
    pub steps: Vec<Step>,
}

/// The owner of a task's calls.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum Owning {
    /// Each call is an owner of its own.
    Call,
    /// All calls of the task are one owner's.
    Task,
    /// All calls of the client's tasks with the same are one owner's.
    Shared,
    /// They name the shared owner of the client before this one, which must be refused.
    Foreign,
}

/// One lock taken and given back.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct Step {
    /// Which locks, by number: several for a call that takes several at once.
    pub locks: Vec<u8>,
    /// How.
    pub mode: Mode,
    /// How many permits, of a semaphore.
    #[serde(default)]
    pub asked: Option<Asked>,
    /// How long it is kept for its next use: a plain lock. Whatever its task's owner is, the call
    /// is one of its own.
    #[serde(default)]
    pub kept: Option<Duration>,
    /// By which verb.
    pub verb: Verb,
    /// A lease that the watchdog does not renew.
    pub lease: Option<Duration>,
    /// After this the call is dropped, if it has not ended.
    pub drop_after: Option<Duration>,
    /// The call is dropped when it is woken this often, before it sees why.
    #[serde(default)]
    pub drop_when_woken: Option<u8>,
    /// A fault in the midst of one of its calls.
    #[serde(default)]
    pub stop: Option<Stop>,
    /// Whether its call begins before the step before it is over.
    #[serde(default)]
    pub ahead: Option<Ahead>,
    /// How long it is held.
    pub hold: Duration,
    /// The steps done meanwhile, with the same owner.
    pub inside: Vec<Step>,
    /// Whether it is renewed by hand half way.
    pub renews: bool,
    /// Whether a writer becomes a reader half way.
    pub downgrades: bool,
    /// The number of commands that are run under it half way.
    #[serde(default)]
    pub calls: u8,
    /// Whether it is held for as long as nobody else wants it.
    #[serde(default)]
    pub listens: Option<Listens>,
    /// How it ends.
    pub end: End,
}

impl Step {
    /// Whether its call is an owner of its own, whatever its task's is.
    pub(crate) fn has_own_owner(&self) -> bool {
        self.mode.is_permits() || self.kept.is_some()
    }
}

/// How a lock is held.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum Mode {
    /// As a mutex.
    Plain,
    /// Together with other readers.
    Read,
    /// Alone.
    Write,
    /// Several at once.
    Several,
    /// Some of the permits of a semaphore. Whatever its task's owner is, the call is one of its
    /// own.
    Permits,
}

impl Mode {
    pub(crate) fn is_permits(self) -> bool {
        self == Self::Permits
    }
}

/// The verb of a call.
#[derive(Clone, Copy, Debug, Serialize, Deserialize)]
pub enum Verb {
    /// `lock()`.
    Lock,
    /// `try_lock()`.
    Try,
    /// `lock_timeout()`.
    Within(Duration),
}

/// How a guard ends.
#[derive(Clone, Copy, Debug, Serialize, Deserialize)]
pub enum End {
    /// `unlock()`, waited for.
    Unlock,
    /// `unlock()`, dropped at once: the release that it began goes on.
    UnlockUnheard,
    /// Dropped.
    Drop,
}

/// Something that goes wrong, and when.
#[derive(Clone, Copy, Debug, Serialize, Deserialize)]
pub struct Fault {
    /// When.
    pub at: Duration,
    /// The fault.
    pub kind: FaultKind,
    /// At which server, of several.
    pub server: usize,
    /// It comes at this step of the run, which happens at that time: see [`Steps`](crate::steps).
    #[serde(default)]
    pub step: Option<usize>,
}

/// A fault.
#[derive(Clone, Copy, Debug, Serialize, Deserialize)]
pub enum FaultKind {
    /// Nothing gets through from this client to the server for a time, or back, or neither.
    Cut {
        /// Which client.
        client: usize,
        /// Whether messages to the server are held up.
        to_server: bool,
        /// Whether messages to the client are held up.
        to_host: bool,
        /// For how long.
        lasts: Duration,
    },
    /// The same with one of its connections; the others go on.
    CutOne {
        /// Which client.
        client: usize,
        /// Which of its connections.
        connection: usize,
        /// Whether messages to the server are held up.
        to_server: bool,
        /// Whether messages to the client are held up.
        to_host: bool,
        /// For how long.
        lasts: Duration,
        /// Whether messages that were held up arrive then; otherwise the connection has ended, and
        /// they are lost.
        #[serde(default = "yes")]
        arrives: bool,
    },
    /// This client's connections end.
    Reset(usize),
    /// One of them ends.
    ResetOne {
        /// Which client.
        client: usize,
        /// Which of its connections.
        connection: usize,
    },
    /// One of them ends, and only one side is told.
    HalfOpen {
        /// Which client.
        client: usize,
        /// Which of its connections.
        connection: usize,
        /// Whether the server is told, and the client is not.
        to_server: bool,
    },
    /// The process dies.
    Kill(usize),
    /// The process stands still: nothing of it does anything, and clocks go on.
    StandStill {
        /// Which client.
        client: usize,
        /// For how long.
        lasts: Duration,
    },
    /// The server stands still for this time.
    Pause(Duration),
    /// The server dies and is started again after a time.
    Crash {
        /// For how long it is down.
        lasts: Duration,
        /// Whether it starts empty.
        loses_keys: bool,
    },
    /// The server's wall clock is set forwards (or back) by this many milliseconds.
    StepClock(i64),
    /// Somebody deletes this lock.
    Delete(u8),
    /// An operator ends all holds of this lock.
    Break(u8),
    /// The call is dropped whose poll its step is.
    DropCall,
    /// Somebody deletes all locks.
    Flush,
    /// The replica becomes the primary.
    Failover(Failover),
    /// Something is wrong with a sentinel.
    Sentinel(SentinelFault),
    /// The replica of a node takes its place.
    Replace(Failover),
    /// The slot of a lock moves to another node.
    MoveSlot {
        /// Which lock.
        lock: u8,
        /// To which node.
        to: usize,
        /// None for one step.
        #[serde(default)]
        by_keys: Option<ByKeys>,
    },
}

fn yes() -> bool {
    true
}

pub(crate) const fn one() -> u32 {
    1
}

impl FaultKind {
    /// Whether a lock may have two holders after it for a while, as the documents say: a lease ends
    /// before its time, or its key goes, and its holder hears of it later.
    pub fn may_break_exclusion(&self, grant_delay: Duration) -> bool {
        match self {
            Self::StepClock(by) => *by > 0,
            Self::Delete(_) | Self::Break(_) | Self::Flush => true,
            Self::Crash { loses_keys, .. } => *loses_keys && grant_delay.is_zero(),
            // The service itself says which promises these may break, and for how long.
            Self::DropCall
            | Self::Cut { .. }
            | Self::CutOne { .. }
            | Self::HalfOpen { .. }
            | Self::Reset(_)
            | Self::ResetOne { .. }
            | Self::Kill(_)
            | Self::StandStill { .. }
            | Self::Pause(_)
            | Self::Failover(_)
            | Self::Sentinel(_)
            | Self::Replace(_)
            | Self::MoveSlot { .. } => false,
        }
    }
}

/// How many locks there are.
pub(crate) const LOCKS: u8 = 3;

impl Schedule {
    /// The run that follows from a seed.
    pub fn of(seed: u64) -> Self {
        let mut draw = Draw(fastrand::Rng::with_seed(seed));
        let mut schedule = if draw.one_in(2) {
            draw.theme()
        } else {
            draw.all_sorts(seed)
        };
        hands::add(&mut schedule, seed);
        permits::add(&mut schedule, seed);
        listens::add(&mut schedule, seed);
        kept::add(&mut schedule, seed);
        schedule
    }

    /// Whether the faults are too few to lose a guard that is renewed: all silences together are
    /// shorter than nine tenths of each grace less 100 ms, and leave time to renew each lease. A
    /// connection that ends costs no more than the pause before the next, and so does a server that
    /// has its keys when it is back.
    pub fn is_calm(&self) -> bool {
        let cost = |fault: &Fault| match fault.kind {
            FaultKind::Cut { lasts, .. }
            | FaultKind::CutOne { lasts, .. }
            | FaultKind::StandStill { lasts, .. }
            | FaultKind::Pause(lasts) => Some(lasts),
            FaultKind::Reset(_) | FaultKind::ResetOne { .. } => Some(RESET),
            FaultKind::DropCall => Some(Duration::ZERO),
            FaultKind::Crash {
                lasts,
                loses_keys: false,
            } => self.small.map(|_| lasts + RESET),
            FaultKind::MoveSlot { .. } => self.small.map(|_| RESET),
            FaultKind::Failover(of) | FaultKind::Replace(of) if of.old == Old::Waits => {
                self.small.map(|_| RESET)
            }
            _ => None,
        };
        let costs: Option<Vec<_>> = self.faults.iter().map(cost).collect();
        let Some(costs) = costs.filter(|_| !stops::are_in(self)) else {
            return false;
        };
        let slack = self.latency.saturating_mul(10).saturating_add(SLACK);
        let sum: Duration = costs.iter().sum();
        self.clients.iter().all(|client| {
            let grace = client
                .grace
                .checked_mul(9)
                .and_then(|of| of.checked_div(10));
            let grace = grace.filter(|of| !of.is_zero()).unwrap_or(Duration::MAX);
            let lease = client.lease.checked_div(2).unwrap_or_default();
            // A renewal waits for the acknowledgement of another, and for its own, and each is
            // under way there and back.
            let both = self.lag().saturating_mul(4).saturating_add(slack);
            let is_heard = |within| self.lag().saturating_add(slack) < within && both < lease;
            let by_enough = client.acknowledged.is_none_or(is_heard);
            by_enough && (self.faults.is_empty() || sum.saturating_add(slack) < grace.min(lease))
        })
    }

    /// How long replicas, if there are some, take to hear of a write.
    fn lag(&self) -> Duration {
        let clustered = self.clustered.as_ref();
        let clustered = || clustered.map(|of| of.lag.max(of.second.unwrap_or_default()));
        let watched = self.watched.as_ref();
        let watched = watched.map(|of| of.lag.max(of.second.unwrap_or_default()));
        watched.or_else(clustered).unwrap_or_default()
    }

    /// Whether a guard may be lost while its lease lasts at the server, and its entry cannot be
    /// given back: the owner's other guards have the longer lease, and the release could take
    /// theirs.
    pub fn may_leave(&self) -> bool {
        fn has_lease(steps: &[Step]) -> bool {
            let has = |step: &Step| step.lease.is_some() || has_lease(&step.inside);
            steps.iter().any(has)
        }
        let mut tasks = self.tasks.iter();
        tasks.any(|task| task.owner != Owning::Call && has_lease(&task.steps))
    }

    /// Whether each hold is renewed by the watchdog and by hand alone: no owner has two of them, no
    /// lease ends, no call is dropped, and an answer is late at most, and not so late that it is
    /// not waited for.
    pub fn is_plain(&self) -> bool {
        let is_waited_for = |lasts: Duration| {
            let mut clients = self.clients.iter();
            clients.all(|of| lasts < of.response_timeout.saturating_sub(SLACK))
        };
        let late = |fault: &Fault| {
            matches!(fault.kind, FaultKind::CutOne { to_server, to_host, arrives: true, lasts, .. }
                if to_server != to_host && is_waited_for(lasts))
        };
        let task = |task: &Task| {
            let step = |step: &Step| {
                let is_dropped = step.drop_after.is_some() || step.drop_when_woken.is_some();
                let is_dropped = is_dropped || step.stop.is_some() || step.ahead.is_some();
                let is_dropped = is_dropped || step.kept.is_some() || step.listens.is_some();
                step.lease.is_none() && !is_dropped && step.inside.is_empty() && !step.downgrades
            };
            task.owner == Owning::Call && task.steps.iter().all(step)
        };
        let long = Duration::from_secs(10);
        let is_one = self.servers == 1 && self.watched.is_none() && self.clustered.is_none();
        is_one
            && self.clients.iter().all(|client| client.lease >= long)
            && self.latency <= Duration::from_millis(10)
            && self.faults.iter().all(late)
            && self.tasks.iter().all(task)
    }

    /// Whether a lock is kept at a client.
    pub fn keeps(&self) -> bool {
        let mut steps = self.tasks.iter().flat_map(|task| &task.steps);
        steps.any(|step| step.kept.is_some())
    }

    /// Whether anything goes wrong but calls that are dropped.
    pub fn has_faults(&self) -> bool {
        let is_other = |fault: &Fault| !matches!(fault.kind, FaultKind::DropCall);
        self.faults.iter().any(is_other) || stops::are_in(self)
    }

    /// Whether each hold ends with a lease of its own, no owner has two of them, and nothing else
    /// goes wrong; and leases are so long that a grant is fresh when word of it comes.
    pub fn is_brief(&self) -> bool {
        let task = |task: &Task| {
            let step = |step: &Step| {
                let is_dropped = step.drop_after.is_some() || step.drop_when_woken.is_some();
                let is_long = step.lease.is_some_and(|lease| lease >= BRIEF_MIN);
                let is_one = step.inside.is_empty() && step.mode == Mode::Plain;
                let is_one = is_one && step.ahead.is_none();
                let is_one = is_one && step.kept.is_none() && step.listens.is_none();
                is_long && is_one && !is_dropped && !step.renews
            };
            matches!(task.owner, Owning::Call | Owning::Task) && task.steps.iter().all(step)
        };
        let is_one = self.servers == 1 && self.watched.is_none() && self.clustered.is_none();
        is_one
            && !self.is_busy
            && !self.has_faults()
            && self.faults.is_empty()
            && self.latency <= Duration::from_millis(50)
            && self.clients.iter().all(|of| of.grace >= BRIEF_MIN)
            && self.tasks.iter().all(task)
    }

    /// The shortest lease that a call asks for.
    pub fn shortest_lease(&self) -> Duration {
        fn shortest(steps: &[Step]) -> Option<Duration> {
            let of = |step: &Step| step.lease.into_iter().chain(shortest(&step.inside)).min();
            steps.iter().filter_map(of).min()
        }
        let leases = self.tasks.iter().filter_map(|task| shortest(&task.steps));
        leases.min().unwrap_or(Duration::MAX)
    }

    /// The shortest time for which a client waits for a reply.
    pub fn response_timeout(&self) -> Duration {
        let of = self.clients.iter().map(|client| client.response_timeout);
        of.min().unwrap_or(Duration::MAX)
    }

    /// Whether owners may come to wait for each other unseen: through several nodes, none of which
    /// sees it; or after the end of a hold of one of several locks that its owner waits for.
    fn may_close_circles(&self) -> bool {
        fn take_several(steps: &[Step]) -> bool {
            let mut steps = steps.iter();
            steps.any(|step| step.mode == Mode::Several || take_several(&step.inside))
        }
        let mut tasks = self.tasks.iter();
        self.clustered.is_some() || self.has_faults() && tasks.any(|task| take_several(&task.steps))
    }

    /// How many parts could be left out.
    pub fn size(&self) -> usize {
        let steps = self.tasks.iter().map(|task| size_of(&task.steps));
        let others = self.faults.len().saturating_add(self.limits.len());
        steps.sum::<usize>().saturating_add(others)
    }
}

fn size_of(steps: &[Step]) -> usize {
    let sizes = steps
        .iter()
        .map(|step| size_of(&step.inside).saturating_add(1));
    sizes.sum()
}

/// Draws the parts of a run.
pub(crate) struct Draw(pub(crate) fastrand::Rng);

impl Draw {
    /// A run with a bit of everything.
    fn all_sorts(&mut self, seed: u64) -> Schedule {
        let mut clients: Vec<_> = (0..self.up_to(1, 4)).map(|_| self.client()).collect();
        let is_rough = self.one_in(4);
        let servers = if self.one_in(4) { 3 } else { 1 };
        let watched = if servers == 1 { self.watched() } else { None };
        let is_one = servers == 1 && watched.is_none();
        let clustered = if is_one { self.clustered() } else { None };
        let lag = watched.map(|of| of.lag).or(clustered.map(|of| of.lag));
        let grant_delay = match lag {
            Some(_) => Duration::ZERO,
            None => self.grant_delay(&clients),
        };
        for client in &mut clients {
            client.acknowledged = lag.and_then(|_| self.acknowledged());
        }
        let tasks = (0..self.up_to(1, 10)).map(|_| self.task(clients.len(), servers > 1));
        let mut tasks: Vec<Task> = tasks.collect();
        let is_calm = self.one_in(4);
        let faults = self.up_to(0, if is_calm { 3 } else { 6 });
        let faults = (0..faults).map(|_| {
            let mut fault = match (watched, clustered) {
                (_, Some(clustered)) => self.clustered_fault(clients.len(), clustered),
                (Some(watched), _) => self.watched_fault(clients.len(), watched),
                (None, None) => self.fault(clients.len(), servers, is_rough, grant_delay),
            };
            if is_calm {
                fault.kind = self.calm(clients.len());
            }
            fault
        });
        let mut faults: Vec<_> = faults.collect();
        if servers == 1 && lag.is_none() && self.one_in(6) {
            faults = self.make_plain(&mut clients, &mut tasks);
        }
        faults.sort_by_key(|fault| fault.at);
        let mut schedule = Schedule {
            seed: self.0.u64(..),
            servers,
            watched,
            clustered,
            latency: self.latency(&clients),
            grant_delay,
            clients,
            tasks,
            limits: Vec::new(),
            faults,
            is_busy: lag.is_none() && self.one_in(3),
            small: None,
        };
        stops::add(&mut schedule, seed);
        moves::add(&mut schedule, seed);
        replicas::add(&mut schedule, seed);
        if schedule.may_close_circles() {
            for task in &mut schedule.tasks {
                avoid_circles(&mut task.steps);
            }
        }
        schedule
    }

    pub(crate) fn one_in(&mut self, of: u32) -> bool {
        self.0.u32(0..of) == 0
    }

    pub(crate) fn up_to(&mut self, least: u8, most: u8) -> u8 {
        self.0.u8(least..=most)
    }

    pub(crate) fn pick<T: Copy>(&mut self, of: &[T]) -> Option<T> {
        self.0.choice(of).copied()
    }

    pub(crate) fn ms(&mut self, of: &[u64]) -> Duration {
        Duration::from_millis(self.pick(of).unwrap_or_default())
    }

    /// Up to this, most often far less.
    fn time(&mut self, longest_ms: u64) -> Duration {
        let longest = match self.0.u8(0..4) {
            0 => longest_ms,
            1 => longest_ms / 10,
            _ => longest_ms / 100,
        };
        Duration::from_millis(self.0.u64(0..=longest))
    }

    fn client(&mut self) -> Client {
        Client {
            grace: self.ms(&[0, 500, 1_000, 5_000, 5_000, 5_000]),
            lease: self.ms(&[2_000, 10_000, 30_000, 30_000]),
            response_timeout: self.ms(&[500, 2_000, 2_000]),
            acknowledged: None,
            copies: 1,
        }
    }

    fn watched(&mut self) -> Option<Watched> {
        self.one_in(3).then(|| Watched {
            sentinels: if self.one_in(4) { 1 } else { 3 },
            lag: self.ms(&[0, 1, 10, 100]),
            are_mute: self.one_in(2),
            second: None,
        })
    }

    fn clustered(&mut self) -> Option<Clustered> {
        self.one_in(3).then(|| Clustered {
            nodes: self.up_to(1, 3).into(),
            lag: self.ms(&[0, 1, 10, 100]),
            second: None,
        })
    }

    fn clustered_fault(&mut self, clients: usize, clustered: Clustered) -> Fault {
        let servers = clustered.nodes.saturating_mul(2);
        let kind = match self.0.u8(0..8) {
            0..4 => FaultKind::MoveSlot {
                lock: self.0.u8(0..LOCKS.saturating_add(2)),
                to: self.0.usize(0..clustered.nodes),
                by_keys: None,
            },
            4 | 5 => FaultKind::Replace(self.failover(1)),
            // Nothing else that breaks exclusion.
            _ => return self.fault(clients, servers, false, Duration::ZERO),
        };
        let at = self.time(30_000);
        let server = self.0.usize(0..clustered.nodes);
        Fault {
            at,
            kind,
            server,
            step: None,
        }
    }

    fn acknowledged(&mut self) -> Option<Duration> {
        self.one_in(3).then(|| self.ms(&[100, 500, 1_000]))
    }

    fn watched_fault(&mut self, clients: usize, watched: Watched) -> Fault {
        let kind = match self.0.u8(0..7) {
            0..3 => FaultKind::Failover(self.failover(watched.sentinels)),
            3 | 4 => FaultKind::Sentinel(self.sentinel_fault(clients, watched)),
            _ => {
                // Nothing else that breaks exclusion: the judge shall look.
                let plain = self.fault(clients, 2, false, Duration::ZERO);
                return plain;
            }
        };
        let at = self.time(30_000);
        Fault {
            at,
            kind,
            server: 0,
            step: None,
        }
    }

    fn failover(&mut self, sentinels: usize) -> Failover {
        let olds = [
            Old::Waits,
            Old::Follows,
            Old::GoesOn,
            Old::GoesOn,
            Old::Dies,
            Old::StandsStill,
        ];
        Failover {
            old: self.pick(&olds).unwrap_or(Old::Waits),
            tail: self.time(5_000),
            lasts: self.time(30_000),
            wakes: self.time(3_000),
            spread: self.time(5_000),
            first: self.0.usize(0..sentinels),
            to: 0,
        }
    }

    fn sentinel_fault(&mut self, clients: usize, watched: Watched) -> SentinelFault {
        let kind = match self.0.u8(0..4) {
            0 => SentinelFaultKind::Silent,
            1 => SentinelFaultKind::Dies,
            2 => SentinelFaultKind::Disagrees,
            _ => SentinelFaultKind::Cut(self.0.usize(0..clients)),
        };
        SentinelFault {
            sentinel: self.0.usize(0..watched.sentinels),
            kind,
            lasts: self.time(30_000),
        }
    }

    /// A grace must leave time for a few messages there and back.
    fn latency(&mut self, clients: &[Client]) -> Duration {
        let graces = clients.iter().map(|client| client.grace);
        let shortest = graces.filter(|grace| !grace.is_zero()).min();
        let longest = shortest.and_then(|grace| grace.checked_div(50));
        let drawn = self.ms(&[0, 1, 2, 10, 50, 100]);
        longest.map_or(drawn, |longest| drawn.min(longest))
    }

    /// None, or enough for whatever these clients hold.
    fn grant_delay(&mut self, clients: &[Client]) -> Duration {
        if self.one_in(2) {
            return Duration::ZERO;
        }
        let longest = clients.iter().map(|client| client.lease.max(client.grace));
        let longest = longest.max().unwrap_or_default();
        longest
            .max(LEASE_MAX)
            .saturating_add(Duration::from_secs(1))
    }

    fn task(&mut self, clients: usize, at_quorum: bool) -> Task {
        let mut owners = vec![Owning::Call, Owning::Task, Owning::Shared, Owning::Shared];
        owners.extend(self.one_in(4).then_some(Owning::Foreign));
        let owner = self.pick(&owners).filter(|_| !at_quorum);
        let owner = owner.unwrap_or(Owning::Call);
        let steps = self.up_to(1, 4);
        Task {
            client: self.0.usize(0..clients),
            at: self.time(20_000),
            owner,
            steps: (0..steps).map(|_| self.step(owner, at_quorum, 0)).collect(),
        }
    }

    fn step(&mut self, owner: Owning, at_quorum: bool, depth: u8) -> Step {
        let modes = [
            Mode::Plain,
            Mode::Plain,
            Mode::Read,
            Mode::Write,
            Mode::Several,
        ];
        let mode = self.pick(&modes).filter(|_| !at_quorum);
        let mode = mode.unwrap_or(Mode::Plain);
        let is_inner = depth > 0;
        let verb = match self.0.u8(0..4) {
            0 => Verb::Try,
            1 => Verb::Within(self.time(10_000)),
            // Without a scope the server does not see that they are one task's: they could wait for
            // each other for ever.
            _ if is_inner && owner == Owning::Call => Verb::Try,
            _ => Verb::Lock,
        };
        let nests = depth < 2 && self.one_in(4);
        let inner = if nests { self.up_to(1, 2) } else { 0 };
        Step {
            locks: self.locks(mode),
            mode,
            asked: None,
            verb,
            lease: self.one_in(4).then(|| self.ms(&[200, 1_000, 20_000])),
            drop_after: self.one_in(5).then(|| self.time(5_000)),
            drop_when_woken: self.one_in(10).then(|| self.0.u8(0..3)),
            stop: None,
            ahead: None,
            kept: None,
            hold: self.time(8_000),
            inside: (0..inner)
                .map(|_| self.step(owner, at_quorum, depth.saturating_add(1)))
                .collect(),
            renews: self.one_in(6),
            downgrades: mode == Mode::Write && self.one_in(3),
            calls: 0,
            listens: None,
            end: self
                .pick(&[End::Unlock, End::Unlock, End::UnlockUnheard, End::Drop])
                .unwrap_or(End::Drop),
        }
    }

    /// Read-write locks have numbers of their own.
    pub(crate) fn locks(&mut self, mode: Mode) -> Vec<u8> {
        match mode {
            Mode::Plain => vec![self.0.u8(0..LOCKS)],
            Mode::Permits => vec![permits::SEMAPHORES],
            Mode::Read | Mode::Write => vec![self.0.u8(LOCKS..LOCKS.saturating_add(2))],
            Mode::Several => {
                let mut all: Vec<u8> = (0..LOCKS).collect();
                self.0.shuffle(&mut all);
                all.truncate(self.up_to(1, LOCKS).into());
                all
            }
        }
    }

    /// Makes tasks such that no command renews a hold but the watchdog's and their own, see
    /// [`Schedule::is_plain`]. What goes wrong is then only that an answer is so late that the
    /// session connection is opened anew.
    fn make_plain(&mut self, clients: &mut [Client], tasks: &mut [Task]) -> Vec<Fault> {
        for client in clients.iter_mut() {
            client.grace = Duration::from_secs(5);
            client.lease = Duration::from_secs(30);
            client.response_timeout = Duration::from_secs(2);
        }
        for task in tasks.iter_mut() {
            task.owner = Owning::Call;
            for step in &mut task.steps {
                (step.lease, step.drop_after, step.drop_when_woken) = (None, None, None);
                (step.inside, step.downgrades) = (Vec::new(), false);
            }
        }
        let faults = (0..self.up_to(0, 3)).map(|number| Fault {
            at: Duration::from_millis(self.0.u64(0..5_000))
                .saturating_add(Duration::from_secs(10).saturating_mul(number.into())),
            kind: FaultKind::CutOne {
                client: self.0.usize(0..clients.len()),
                connection: self.0.usize(0..2),
                to_server: false,
                to_host: true,
                lasts: Duration::from_millis(self.0.u64(1_450..1_750)),
                arrives: true,
            },
            server: 0,
            step: None,
        });
        faults.collect()
    }

    fn cut_one(&mut self, client: usize, connection: usize, longest_ms: u64) -> FaultKind {
        let lasts = self.time(longest_ms);
        FaultKind::CutOne {
            client,
            connection,
            to_server: !self.one_in(3),
            to_host: !self.one_in(3),
            lasts,
            arrives: true,
        }
    }

    /// A fault that a guard outlives, see [`Schedule::is_calm`].
    fn calm(&mut self, clients: usize) -> FaultKind {
        let (client, connection) = (self.0.usize(0..clients), self.0.usize(0..2));
        let lasts = self.time(4_000);
        match self.0.u8(0..5) {
            0 => FaultKind::Pause(lasts),
            1 => FaultKind::Cut {
                client,
                to_server: !self.one_in(3),
                to_host: !self.one_in(3),
                lasts,
            },
            2 => self.cut_one(client, connection, 4_000),
            3 => FaultKind::Reset(client),
            _ => FaultKind::ResetOne { client, connection },
        }
    }

    fn fault(
        &mut self,
        clients: usize,
        servers: usize,
        is_rough: bool,
        grant_delay: Duration,
    ) -> Fault {
        let client = self.0.usize(0..clients);
        let connection = self.0.usize(0..2);
        let kinds = if is_rough { 15 } else { 12 };
        let kind = match self.0.u8(0..kinds) {
            0 | 1 => FaultKind::Cut {
                client,
                to_server: !self.one_in(3),
                to_host: !self.one_in(3),
                lasts: self.time(40_000),
            },
            2 | 3 => FaultKind::Reset(client),
            4 => FaultKind::Pause(self.time(10_000)),
            5 => FaultKind::Crash {
                lasts: self.time(10_000),
                loses_keys: is_rough || !grant_delay.is_zero() && self.one_in(2),
            },
            6 => FaultKind::Kill(client),
            7 | 8 => self.cut_one(client, connection, 20_000),
            9 | 10 => FaultKind::ResetOne { client, connection },
            11 => FaultKind::HalfOpen {
                client,
                connection,
                to_server: self.one_in(2),
            },
            12 => FaultKind::StepClock(self.0.i64(-60_000..60_000)),
            13 => FaultKind::Delete(self.0.u8(0..LOCKS.saturating_add(2))),
            _ => FaultKind::Flush,
        };
        let at = self.time(30_000);
        let server = self.0.usize(0..servers);
        Fault {
            at,
            kind,
            server,
            step: None,
        }
    }
}

/// Word of a grant is never older than a third of this, at latencies of up to 50 ms.
const BRIEF_MIN: Duration = Duration::from_secs(2);

/// The longest pause before a connection that follows one or two others.
const RESET: Duration = Duration::from_millis(50);

/// A silence must be shorter than the grace by this, and a tenth.
const SLACK: Duration = Duration::from_millis(150);

/// Has nobody wait without limit while it holds something.
pub(crate) fn avoid_circles(steps: &mut [Step]) {
    for step in steps {
        for inner in &mut step.inside {
            if matches!(inner.verb, Verb::Lock) {
                inner.verb = Verb::Within(Duration::from_secs(2));
            }
        }
        avoid_circles(&mut step.inside);
    }
}

/// The longest lease that a call asks for.
const LEASE_MAX: Duration = Duration::from_secs(20);

impl fmt::Display for Schedule {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let (latency, delay) = (self.latency, self.grant_delay);
        let busy = if self.is_busy { ", busy" } else { "" };
        writeln!(
            f,
            "{} servers{busy}, latency up to {latency:?}, grant delay {delay:?}",
            self.servers
        )?;
        if let Some(watched) = self.watched {
            writeln!(f, "a replica, watched: {watched:?}")?;
        }
        if let Some(clustered) = self.clustered {
            writeln!(f, "a cluster: {clustered:?}")?;
        }
        for (number, client) in self.clients.iter().enumerate() {
            writeln!(f, "client {number}: {client:?}")?;
        }
        for (number, task) in self.tasks.iter().enumerate() {
            let (client, at) = (task.client, task.at);
            writeln!(
                f,
                "task {number} of client {client} from {at:?}, owner {:?}:",
                task.owner
            )?;
            for step in &task.steps {
                writeln!(f, "    {step:?}")?;
            }
        }
        for set in &self.limits {
            writeln!(f, "{set:?}")?;
        }
        for fault in &self.faults {
            if let Some(step) = fault.step {
                write!(f, "step {step}, ")?;
            }
            writeln!(
                f,
                "at {:?}, server {}: {:?}",
                fault.at, fault.server, fault.kind
            )?;
        }
        Ok(())
    }
}
