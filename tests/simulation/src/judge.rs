//! The promises of the documents, which hold whatever happens, looked at from outside.

use std::cell::{Cell, RefCell};
use std::collections::{BTreeMap, BTreeSet};
use std::fmt;
use std::hash::{DefaultHasher, Hash};
use std::rc::Rc;
use std::time::Duration;

use rlock_client::mode::{Multi, Permits, Plain, Read, Write};
use rlock_client::redis::cmd;
use rlock_client::{Error, Guard, QuorumGuard};
use rlock_test::{Guarded, Server};
use tokio::time::Instant;

use crate::entries::Entries;
use crate::limits::{self, Limits, Share};
use crate::listens::Listening;
use crate::nodes::Nodes;
use crate::schedule::{FaultKind, Mode, Schedule};
use crate::sentinels::Service;
use crate::steps::{Place, Step, Uses};
use crate::surplus::Surplus;
use crate::task::Refusal;

/// The results of a run.
#[derive(Debug, Default)]
pub struct Report {
    /// The events of the run, a line each, with the time in milliseconds.
    pub trace: Vec<String>,
    /// Broken promises.
    pub violations: Vec<String>,
    /// How often each thing was seen.
    pub seen: BTreeMap<&'static str, u64>,
    /// How long it took by the clock of the run.
    pub lasted: Duration,
    /// The steps at which a fault may come.
    pub steps: Vec<Step>,
    /// If asked for: equal runs have equal ones.
    pub digest: DefaultHasher,
}

/// A guard of any kind.
pub(crate) enum AnyGuard {
    Plain(Guard<Plain>),
    Read(Guard<Read>),
    Write(Guard<Write>),
    Several(Guard<Multi>),
    Permits(Guard<Permits>),
    /// At a majority, with the name of its owner.
    Quorum(QuorumGuard, String),
}

macro_rules! of_any {
    ($guard:expr, $inner:ident => $work:expr, $owner:pat => $of_quorum:expr) => {
        match $guard {
            AnyGuard::Quorum($inner, $owner) => $of_quorum,
            AnyGuard::Plain($inner) => $work,
            AnyGuard::Read($inner) => $work,
            AnyGuard::Write($inner) => $work,
            AnyGuard::Several($inner) => $work,
            AnyGuard::Permits($inner) => $work,
        }
    };
}

impl AnyGuard {
    pub(crate) fn is_lost(&self) -> bool {
        of_any!(self, guard => guard.is_lost(), _ => guard.is_lost())
    }

    pub(crate) fn token(&self) -> u64 {
        of_any!(self, guard => guard.token(), _ => guard.tokens().first().map_or(0, |of| of.1))
    }

    pub(crate) fn owner(&self) -> String {
        of_any!(self, guard => guard.owner().to_string(), owner => {
            let _ = guard;
            owner.clone()
        })
    }

    pub(crate) async fn renew(&self) -> Result<(), String> {
        of_any!(
            self,
            guard => guard.renew().await.map_err(|error| error.to_string()),
            _ => guard.renew().await.map_err(|error| error.to_string())
        )
    }

    pub(crate) async fn unlock(self) -> Result<(), String> {
        of_any!(
            self,
            guard => guard.unlock().await.map_err(|error| error.to_string()),
            _ => guard.unlock().await.map_err(|error| error.to_string())
        )
    }

    /// Ends when somebody is kept out.
    pub(crate) async fn wanted(&self) -> Result<(), Refusal> {
        of_any!(
            self,
            guard => guard.wanted().await.map_err(Refusal::from),
            _ => guard.wanted().await.map_err(Refusal::from)
        )
    }

    /// Has a command run under it that answers with this text. None if that cannot be.
    pub(crate) async fn echo(&self, text: &str) -> Option<Result<String, Error>> {
        let mut echo = cmd("ECHO");
        echo.arg(text);
        match self {
            Self::Plain(guard) => Some(guard.call(&echo).await),
            Self::Read(guard) => Some(guard.call(&echo).await),
            Self::Write(guard) => Some(guard.call(&echo).await),
            Self::Permits(guard) => Some(guard.call(&echo).await),
            Self::Several(_) | Self::Quorum(..) => None,
        }
    }

    pub(crate) fn mode(&self) -> Mode {
        match self {
            Self::Plain(_) | Self::Quorum(..) => Mode::Plain,
            Self::Read(_) => Mode::Read,
            Self::Write(_) => Mode::Write,
            Self::Several(_) => Mode::Several,
            Self::Permits(_) => Mode::Permits,
        }
    }

    fn is_exclusive(&self) -> bool {
        !matches!(self, Self::Read(_) | Self::Permits(_))
    }
}

/// A guard that somebody has, and on which the judge looks.
pub(crate) struct Held {
    pub(crate) locks: Vec<u8>,
    pub(crate) owner: String,
    /// See [`Held::counts_as`].
    counted_as: Cell<u8>,
    /// None while its task is about to give it back.
    pub(crate) guard: RefCell<Option<AnyGuard>>,
    /// The process.
    pub(crate) client: usize,
    /// Whether its client hears in time that it has lost its session.
    pub(crate) has_grace: bool,
    /// The lease that the watchdog renews, if the owner has nothing else there.
    pub(crate) lease: Cell<Option<Duration>>,
    /// The one that it may renew, for this guard or another that shares its hold.
    pub(crate) shared_lease: Cell<Option<Duration>>,
    /// The time for which it cannot be lost, without faults and other holds of its owner there.
    pub(crate) lasts: Cell<Duration>,
    /// Of a semaphore's permits.
    share: Option<Share>,
    /// Whether its owner is that of one guard after the other, and never of two.
    is_kept: Cell<bool>,
    since: Instant,
}

impl Held {
    /// Whether the guard says that it is held, and alone.
    pub(crate) fn says_held(&self) -> Option<bool> {
        let guard = self.guard.borrow();
        let guard = guard.as_ref().filter(|guard| !guard.is_lost())?;
        Some(guard.is_exclusive())
    }

    pub(crate) fn since(&self) -> Instant {
        self.since
    }

    /// In which mode the server counts it: as a reader, as a writer, or otherwise.
    fn counts_as(&self) -> u8 {
        if let Some(guard) = &*self.guard.borrow() {
            self.counted_as.set(match guard.mode() {
                Mode::Read => 1,
                Mode::Write => 2,
                _ => 0,
            });
        }
        self.counted_as.get()
    }
}

/// How often the server must count the owner of these: the permits; or once in each mode, however
/// often it was entered.
pub(crate) fn counted<'a>(held: impl Iterator<Item = &'a Rc<Held>>) -> u64 {
    let (mut modes, mut permits) = (BTreeSet::new(), 0);
    for held in held {
        match held.share {
            Some(share) => permits += u64::from(share.permits),
            None => drop(modes.insert(held.counts_as())),
        }
    }
    permits + u64::try_from(modes.len()).unwrap_or(u64::MAX)
}

/// The promises that the documents do not make under the faults of this run.
#[derive(Clone, Copy, Debug)]
#[expect(
    clippy::struct_excessive_bools,
    reason = "each is a question of its own"
)]
pub(crate) struct Allows {
    /// A lock may have two holders for a while.
    pub(crate) two_in: bool,
    /// The server may forget the holder of a lock, and meanwhile grants the lock to nobody else.
    pub(crate) lost_keys: bool,
    /// Tokens may go back: the clock was set back and the server started anew, or it was started
    /// twice in a short time.
    pub(crate) old_tokens: bool,
    /// A guard may be lost that is renewed, and calls may fail.
    pub(crate) losses: bool,
    /// Something goes wrong at all.
    pub(crate) trouble: bool,
    /// A lease may end before its owner knows of the grant, which then asks again; or the time for
    /// a reply is not enough for the few times that a grant in doubt asks.
    pub(crate) asks_again: bool,
    /// Clients may ask about holds, beside the renewals of the watchdog.
    pub(crate) questions: bool,
}

impl Allows {
    pub(crate) fn of(schedule: &Schedule) -> Self {
        let kinds = || schedule.faults.iter().map(|fault| fault.kind);
        let breaks = |kind: FaultKind| kind.may_break_exclusion(schedule.grant_delay);
        let loses = |kind| matches!(kind, FaultKind::Crash { loses_keys, .. } if loses_keys);
        let sets_back = |kind| matches!(kind, FaultKind::StepClock(by) if by < 0);
        let crashes = kinds().filter(|kind| matches!(kind, FaultKind::Crash { .. }));
        let crashes = crashes.count();
        Self {
            // Each server may forget its holds, and one alone must not matter much; but two of them
            // may, one after the other.
            two_in: kinds().any(breaks),
            lost_keys: kinds().any(loses),
            old_tokens: crashes > 1 || crashes > 0 && kinds().any(sets_back),
            losses: schedule.servers > 1 || !schedule.is_calm(),
            trouble: schedule.has_faults(),
            asks_again: schedule.shortest_lease() < schedule.latency * 8 + MESSAGE_MIN
                || schedule.response_timeout() < schedule.latency * 25,
            questions: !schedule.is_plain(),
        }
    }
}

/// The tokens of calls in their order; none if one has brought no guard.
type Order = Vec<Option<u64>>;

/// Which client keeps which locks, idle for how long, and with which lease.
pub(crate) type Terms = (usize, Vec<u8>, Duration, Option<Duration>);

/// Looks at all of it.
pub(crate) struct Judge {
    started: Instant,
    servers: Vec<Server>,
    /// If sentinels watch them.
    service: Option<Rc<Service>>,
    /// If they are a cluster.
    nodes: Option<Rc<Nodes>>,
    held: RefCell<Vec<Rc<Held>>>,
    /// Of each lock the largest token of a guard that was there before.
    tokens: RefCell<BTreeMap<u8, u64>>,
    /// The owner that was granted each token.
    owners: RefCell<BTreeMap<u64, String>>,
    /// How many calls and guards an owner that several calls share has at a lock.
    asked: RefCell<BTreeMap<(String, u8), usize>>,
    /// Owners who have entered a lock again, or have tried to, and when they last gave one back.
    entered_again: RefCell<BTreeMap<String, Instant>>,
    report: RefCell<Report>,
    names: Cell<u64>,
    /// How many guards of kept locks there were.
    grants: Cell<u64>,
    /// The grants of each lock to each client, in the order in which it asked.
    orders: RefCell<BTreeMap<(usize, u8), Order>>,
    /// The same for calls that would keep it, on each client's terms.
    kept_orders: RefCell<BTreeMap<Terms, Order>>,
    /// The number of renewals that may have been sent.
    renewals: Cell<f64>,
    /// Which processes stand still, and since when.
    still: RefCell<BTreeMap<usize, Instant>>,
    /// How long each process has stood still.
    stood: RefCell<BTreeMap<usize, Duration>>,
    pub(crate) surplus: Rc<Surplus>,
    pub(crate) entries: Rc<Entries>,
    pub(crate) limits: Rc<Limits>,
    pub(crate) listening: Rc<Listening>,
    /// When a process last went on that had stood still.
    went_on: Cell<Option<Instant>>,
    /// How often each command was run that a guard was to have run.
    guarded: RefCell<BTreeMap<String, u64>>,
    allows: Allows,
    /// Whether a fault has come that ends holds while guards may still count on them.
    may_be_two: Cell<bool>,
}

/// The time that a busy server needs for a message, beside its time in flight.
const MESSAGE_MIN: Duration = Duration::from_millis(50);

/// More than there are.
const ALL_LOCKS: u8 = 8;

/// From this number on locks are all in one slot of a cluster.
pub(crate) const TAGGED: u8 = ALL_LOCKS;

/// The name of a lock.
pub(crate) fn name(lock: u8) -> String {
    if lock < TAGGED {
        format!("lock-{lock}")
    } else {
        format!("{{lock}}-{lock}")
    }
}

/// The key in which its limit is kept.
pub(crate) fn limit_name(semaphore: u8) -> String {
    let name = name(semaphore);
    if semaphore < TAGGED {
        format!("{{{name}}}:rlock_limit")
    } else {
        format!("{name}:rlock_limit")
    }
}

/// An owner's hold of a lock, as the servers store it.
pub(crate) struct Seen {
    pub(crate) is_up: bool,
    /// All holders.
    pub(crate) holders: Vec<String>,
    /// How often that owner does.
    pub(crate) count: u64,
}

impl Judge {
    pub(crate) fn new(
        servers: Vec<Server>,
        service: Option<Rc<Service>>,
        nodes: Option<Rc<Nodes>>,
        schedule: &Schedule,
    ) -> Self {
        Self {
            started: Instant::now(),
            surplus: Rc::new(Surplus::of(schedule, &servers, ALL_LOCKS)),
            entries: Rc::new(Entries::of(schedule, &servers, ALL_LOCKS)),
            limits: Rc::new(Limits::of(schedule)),
            listening: Rc::new(Listening::of(schedule)),
            went_on: Cell::default(),
            guarded: RefCell::default(),
            allows: Allows::of(schedule),
            may_be_two: Cell::default(),
            servers,
            service,
            nodes,
            held: RefCell::default(),
            tokens: RefCell::default(),
            owners: RefCell::default(),
            asked: RefCell::default(),
            entered_again: RefCell::default(),
            report: RefCell::default(),
            names: Cell::new(0),
            grants: Cell::new(0),
            orders: RefCell::default(),
            kept_orders: RefCell::default(),
            renewals: Cell::new(0.0),
            still: RefCell::default(),
            stood: RefCell::default(),
        }
    }

    /// Such a fault comes now.
    pub(crate) fn may_be_two(&self) {
        self.may_be_two.set(true);
    }

    pub(crate) fn note(&self, what: fmt::Arguments<'_>) {
        let ms = self.started.elapsed().as_millis();
        self.report
            .borrow_mut()
            .trace
            .push(format!("{ms:>7} {what}"));
    }

    pub(crate) fn count(&self, what: &'static str) {
        let mut report = self.report.borrow_mut();
        let seen = report.seen.entry(what).or_default();
        *seen = seen.saturating_add(1);
    }

    /// It was seen this often.
    pub(crate) fn count_all(&self, what: &'static str, times: u64) {
        if times > 0 {
            let mut report = self.report.borrow_mut();
            let seen = report.seen.entry(what).or_default();
            *seen = seen.saturating_add(times);
        }
    }

    pub(crate) fn violation(&self, what: fmt::Arguments<'_>) {
        self.note(format_args!("VIOLATION {what}"));
        self.report.borrow_mut().violations.push(what.to_string());
    }

    pub(crate) fn into_report(self: Rc<Self>) -> Report {
        self.report.take()
    }

    /// The run has come to a step. Its number.
    pub(crate) fn comes_to(&self, place: Place, uses: Uses) -> usize {
        let at = self.started.elapsed();
        let steps = &mut self.report.borrow_mut().steps;
        steps.push(Step { at, place, uses });
        steps.len().saturating_sub(1)
    }

    /// Adds this to the digest.
    pub(crate) fn digests(&self, this: &impl Hash) {
        this.hash(&mut self.report.borrow_mut().digest);
    }

    /// The run is over.
    pub(crate) fn end(&self) {
        let mut report = self.report.borrow_mut();
        let Report {
            violations,
            seen,
            lasted,
            digest,
            ..
        } = &mut *report;
        *lasted = self.started.elapsed();
        (violations, seen, lasted).hash(digest);
    }

    /// A name that nobody else has.
    pub(crate) fn new_name(&self) -> String {
        let number = self.names.get().saturating_add(1);
        self.names.set(number);
        format!("guard-{number}")
    }

    pub(crate) fn elapsed(&self) -> Duration {
        self.started.elapsed()
    }

    /// A client is no longer cut off from a server.
    pub(crate) fn is_mended(&self, client: usize) {
        self.note(format_args!("client {client} is mended"));
        if let Some(nodes) = &self.nodes {
            nodes.is_mended(client);
        }
    }

    /// A process is dead: nobody counts on its guards.
    pub(crate) fn dead(&self, client: usize) {
        self.held.borrow_mut().retain(|held| held.client != client);
    }

    /// A process stands still: nobody asks its guards.
    pub(crate) fn stands_still(&self, client: usize) {
        let mut still = self.still.borrow_mut();
        still.entry(client).or_insert_with(Instant::now);
    }

    /// It goes on, and the first thing that it does is to ask them.
    pub(crate) fn goes_on(&self, client: usize) {
        let since = self.still.borrow_mut().remove(&client);
        let stood = since.map(|since| since.elapsed()).unwrap_or_default();
        *self.stood.borrow_mut().entry(client).or_default() += stood;
        self.went_on.set(Some(Instant::now()));
        // The process learns only from now on of all that happened meanwhile.
        if let Some(service) = &self.service {
            service.goes_on(client);
        }
        if let Some(nodes) = &self.nodes {
            nodes.goes_on(client);
        }
        self.look();
    }

    /// How long a process has stood still until now.
    pub(crate) fn stood(&self, client: usize) -> Duration {
        let stood = self.stood.borrow();
        stood.get(&client).copied().unwrap_or_default()
    }

    /// Whether all processes go on.
    pub(crate) fn all_go_on(&self) -> bool {
        self.still.borrow().is_empty()
    }

    /// A call of this owner begins.
    pub(crate) fn asks(&self, owner: &str, locks: &[u8]) {
        let mut asked = self.asked.borrow_mut();
        for lock in locks {
            let count = asked.entry((owner.to_owned(), *lock)).or_default();
            *count = count.saturating_add(1);
            if *count > 1 {
                let mut again = self.entered_again.borrow_mut();
                again.insert(owner.to_owned(), Instant::now());
            }
        }
    }

    /// A call of this owner has failed, or its guard was given back.
    pub(crate) fn asks_no_more(&self, owner: &str, locks: &[u8]) {
        if let Some(at) = self.entered_again.borrow_mut().get_mut(owner) {
            *at = Instant::now();
        }
        let mut asked = self.asked.borrow_mut();
        for lock in locks {
            if let Some(count) = asked.get_mut(&(owner.to_owned(), *lock)) {
                *count = count.saturating_sub(1);
            }
        }
    }

    /// The token that a guard must surpass which is asked for now.
    pub(crate) fn tokens_before(&self, locks: &[u8]) -> u64 {
        let tokens = self.tokens.borrow();
        let of = locks.iter().filter_map(|lock| tokens.get(lock));
        of.copied().max().unwrap_or(0)
    }

    /// A call begins, which may be one that waits in the queue like others of its client. Its place
    /// in their order.
    pub(crate) fn asked(&self, (client, locks): (usize, &[u8]), waits: bool) -> Option<usize> {
        if self.allows.questions {
            self.renewals.set(self.renewals.get() + 4.0);
        }
        let lock = locks.first().filter(|_| waits)?;
        let mut orders = self.orders.borrow_mut();
        let order = orders.entry((client, *lock)).or_default();
        order.push(None);
        order.len().checked_sub(1)
    }

    /// It has brought a guard.
    pub(crate) fn granted(
        &self,
        (client, locks): (usize, &[u8]),
        place: Option<usize>,
        token: u64,
    ) {
        let mut orders = self.orders.borrow_mut();
        let lock = locks.first().zip(place);
        let order = lock.and_then(|(lock, place)| {
            let order = orders.get_mut(&(client, *lock))?;
            order.get_mut(place)
        });
        if let Some(entry) = order {
            *entry = Some(token);
        }
    }

    /// A call begins that waits, and would keep the lock. Its place in their order.
    pub(crate) fn asked_to_keep(&self, terms: Terms) -> (Terms, usize) {
        let mut orders = self.kept_orders.borrow_mut();
        let order = orders.entry(terms.clone()).or_default();
        order.push(None);
        (terms, order.len().saturating_sub(1))
    }

    /// It has brought a guard.
    pub(crate) fn granted_to_keep(&self, place: Option<(Terms, usize)>) {
        let Some((terms, place)) = place else { return };
        let number = self.grants.get().saturating_add(1);
        self.grants.set(number);
        let mut orders = self.kept_orders.borrow_mut();
        let entry = orders.get_mut(&terms).and_then(|of| of.get_mut(place));
        if let Some(entry) = entry {
            // Guards that share a hold have one token.
            *entry = Some(number);
        }
    }

    /// It is a lock that is kept idle for this time, and then must go back.
    pub(crate) fn is_kept(&self, held: &Held, idle: Duration) {
        held.is_kept.set(true);
        self.surplus.is_kept(&held.owner, idle);
        self.entries.is_kept(&held.owner);
        // The server is asked to tell, and the watchdog goes on while nobody uses it.
        let lease = held.lease.get().map(|lease| lease.as_secs_f64());
        let rounds = lease.map_or(0.0, |lease| idle.as_secs_f64() * 3.0 / lease);
        self.renewals.set(self.renewals.get() + rounds.ceil() + 2.0);
        self.count("guard of a kept lock");
    }

    /// Calls of one client join the queue in the order in which they were made, and are granted in
    /// it, if nothing goes wrong.
    pub(crate) fn in_order(&self) {
        if self.allows.trouble || self.allows.asks_again || self.servers.len() > 1 {
            return;
        }
        for (terms, order) in &*self.kept_orders.borrow() {
            let grants: Vec<_> = order.iter().flatten().collect();
            if !grants.is_sorted() {
                self.violation(format_args!("{terms:?} kept out of order: {grants:?}"));
            }
        }
        for ((client, lock), order) in &*self.orders.borrow() {
            let tokens: Vec<_> = order.iter().flatten().collect();
            if !tokens.is_sorted() {
                let lock = name(*lock);
                self.violation(format_args!(
                    "client {client} was granted {lock} out of order: {tokens:?}"
                ));
            }
        }
    }

    /// Nothing goes wrong, and yet a call fails.
    pub(crate) fn must_not_fail(&self, task: usize, error: &str) {
        // At a majority an answer is waited for so briefly that a slow link is enough. And where
        // leases are hardly longer than the way, a grant may be in doubt until the time is up.
        if !self.allows.trouble && !self.allows.asks_again && self.servers.len() == 1 {
            self.violation(format_args!("task {task} fails without a fault: {error}"));
        }
    }

    /// Whether the watchdog renews all that the owner of a guard has there. Of an owner of several
    /// calls that is known in a run in which entries are counted.
    pub(crate) fn is_renewed(&self, held: &Held) -> bool {
        let are_all = held.shared_lease.get().is_some() && self.entries.are_counted();
        held.lease.get().is_some() || are_all
    }

    /// The faults of this run are too few to lose a guard.
    pub(crate) fn must_be_held(&self, held: &Held, guard: &AnyGuard) {
        if let Some(lease) = held.lease.get().or(held.shared_lease.get()) {
            let rounds = held.since.elapsed().as_secs_f64() * 3.0 / lease.as_secs_f64();
            // The watchdog's rounds go on whenever a hold begins.
            let each = f64::from(u32::try_from(held.locks.len()).unwrap_or(u32::MAX));
            self.renewals
                .set(self.renewals.get() + rounds.ceil() * each);
        }
        let is_kept = self.is_renewed(held) && held.has_grace;
        if !self.allows.losses && is_kept && guard.is_lost() {
            let owner = &held.owner;
            self.violation(format_args!("{owner} has lost its guard for nothing"));
        }
    }

    /// Nothing goes wrong, and a guard is lost before its lease can have ended.
    fn must_last(&self, held: &Held) {
        let is_sound = !self.allows.trouble && self.servers.len() == 1 && held.has_grace;
        let is_only = !self.entered_again.borrow().contains_key(&held.owner);
        let guard = held.guard.borrow();
        let is_lost = guard.as_ref().is_some_and(AnyGuard::is_lost);
        if is_sound && is_only && is_lost && held.since.elapsed() < held.lasts.get() {
            let owner = &held.owner;
            self.violation(format_args!("{owner} has lost its guard early"));
        }
    }

    /// Without a fault a hold is renewed three times in its lease, and some are asked about.
    pub(crate) fn was_modest(&self, renewals: u64) {
        let servers = u32::try_from(self.servers.len()).unwrap_or(u32::MAX);
        let sent = u32::try_from(renewals).map_or(f64::INFINITY, f64::from);
        let mut most = self.renewals.get();
        if self.allows.questions {
            most *= 2.0 * f64::from(servers);
        }
        let is_known = !self.allows.trouble || !self.allows.questions;
        if is_known && sent > most {
            self.violation(format_args!("{renewals} renewals, {most:.0} at most"));
        }
    }

    /// These are renewed by hand, each by a command of its own.
    pub(crate) fn renews(&self, locks: &[u8]) {
        let each = u32::try_from(locks.len()).unwrap_or(u32::MAX);
        self.renewals.set(self.renewals.get() + f64::from(each));
    }

    /// The server is asked to tell when these are wanted, which is a renewal each.
    pub(crate) fn asks_to_be_told(&self, locks: &[u8]) {
        self.renews(locks);
    }

    /// Somebody has a guard.
    pub(crate) fn taken(
        &self,
        guard: AnyGuard,
        mode: Mode,
        locks: &[u8],
        tokens_before: u64,
        by: (usize, bool),
        limit: u32,
    ) -> Rc<Held> {
        let (owner, token) = (guard.owner(), guard.token());
        // A lock that is entered again keeps its token, also one that its owner had lost sight of,
        // or that a waiting call of its owner has kept. Whether it is held still is judged by who
        // else holds it.
        let is_its = |token| self.owners.borrow().get(&token) == Some(&owner);
        let enters = is_its(tokens_before)
            || is_its(token)
            || self.held.borrow().iter().any(|held| held.owner == owner);
        let service = self.service.as_ref();
        let after_failover = service.is_some_and(|service| service.has_lost());
        let must_grow =
            !enters && !self.allows.two_in && !self.allows.old_tokens && !after_failover;
        // Tokens do not move with a slot.
        let is_one = self.servers.len() == 1 || self.service.is_some();
        if is_one && mode != Mode::Read && must_grow && token <= tokens_before {
            self.violation(format_args!(
                "token {token} of {owner} at {locks:?} is not above {tokens_before}"
            ));
        }
        let share = match &guard {
            AnyGuard::Permits(guard) => Some(Share {
                lock: locks.first().copied().unwrap_or_default(),
                permits: guard.permits(),
                limit,
                token,
            }),
            _ => None,
        };
        self.owners.borrow_mut().insert(token, owner.clone());
        let mut tokens = self.tokens.borrow_mut();
        for lock in locks {
            let largest = tokens.entry(*lock).or_default();
            *largest = token.max(*largest);
        }
        drop(tokens);
        let held = Rc::new(Held {
            locks: locks.to_vec(),
            owner,
            counted_as: Cell::default(),
            guard: RefCell::new(Some(guard)),
            client: by.0,
            has_grace: by.1,
            lease: Cell::new(None),
            shared_lease: Cell::new(None),
            lasts: Cell::default(),
            share,
            is_kept: Cell::default(),
            since: Instant::now(),
        });
        self.held.borrow_mut().push(Rc::clone(&held));
        self.look();
        held
    }

    /// It is given back, or its process is dead: nobody counts on it any more.
    pub(crate) fn given_back(&self, held: &Rc<Held>) -> Option<AnyGuard> {
        self.held
            .borrow_mut()
            .retain(|other| !Rc::ptr_eq(other, held));
        // From now on its RELEASE may end a hold that a failover has left.
        if let Some(at) = self.entered_again.borrow_mut().get_mut(&held.owner) {
            *at = Instant::now();
        }
        held.guard.take()
    }

    /// A guard is there again that was taken to work on.
    pub(crate) fn again(&self, held: &Rc<Held>, guard: AnyGuard) {
        held.guard.replace(Some(guard));
        self.held.borrow_mut().push(Rc::clone(held));
        self.look();
    }

    /// An owner's hold at the server that decides about this lock; none if that is a majority.
    fn seen(&self, lock: u8, owner: &str) -> Option<Seen> {
        let name = name(lock);
        if let Some(nodes) = &self.nodes {
            return Some(nodes.seen(&name, owner));
        }
        let server = match (&self.service, self.servers.as_slice()) {
            (Some(service), _) => service.primary(),
            (None, [server]) => server,
            (None, _) => return None,
        };
        Some(Seen {
            is_up: server.is_up(),
            holders: server.holders(&name),
            count: server.count(&name, owner),
        })
    }

    /// Whether a guard may have been lost by a failover without knowing it yet.
    ///
    /// A failover may lose the second entry alone of a hold that was entered twice. The release of
    /// the second entry then ends the first too. The first entry's guard hears of that by the reply
    /// or, if the reply is lost, when it is renewed.
    fn is_excused(&self, held: &Held) -> bool {
        let again = self.entered_again.borrow();
        let since = again.get(&held.owner).map(Instant::elapsed);
        let (service, nodes) = (self.service.as_ref(), self.nodes.as_ref());
        service.is_some_and(|service| service.excuses(held.client, since))
            || nodes.is_some_and(|nodes| nodes.excuses(held.client, since))
    }

    /// Whether a failover may have lost something.
    fn may_have_failed_over(&self) -> bool {
        let (service, nodes) = (self.service.as_ref(), self.nodes.as_ref());
        service.is_some_and(|service| service.has_lost())
            || nodes.is_some_and(|nodes| nodes.has_lost())
    }

    /// The server must have nothing that nobody needs, and a hold with a guard must last.
    fn look_for_more_and_less(&self) {
        let held = self.held.borrow().clone();
        let has_others = |owner: &str| self.asked.borrow().keys().any(|(name, _)| name == owner);
        let surplus = self.surplus.look(&held, has_others);
        for what in surplus.into_iter().chain(self.entries.look(&held)) {
            self.violation(format_args!("{what}"));
        }
        for held in &held {
            self.must_last(held);
        }
        let still = |client| self.still.borrow().contains_key(&client);
        for what in self.listening.look(still, self.went_on.get()) {
            self.violation(format_args!("{what}"));
        }
    }

    /// Guards that say that they are held must be alone, and the server must say the same; and it
    /// must have nothing that nobody needs.
    pub(crate) fn look(&self) {
        self.look_for_more_and_less();
        if self.may_be_two.get() {
            return;
        }
        let mut all = self.held.borrow().clone();
        let still = self.still.borrow();
        all.retain(|held| !still.contains_key(&held.client));
        drop(still);
        let mut wrong = Vec::new();
        for (place, one) in all.iter().enumerate() {
            let is_seen = |held: &Held| held.has_grace && !self.is_excused(held);
            let Some(is_exclusive) = one.says_held().filter(|_| is_seen(one)) else {
                continue;
            };
            for other in all.iter().skip(place.saturating_add(1)) {
                let Some(other_is) = other.says_held().filter(|_| is_seen(other)) else {
                    continue;
                };
                let shared = one.locks.iter().find(|lock| other.locks.contains(lock));
                if let Some(lock) = shared
                    && (one.owner != other.owner || one.is_kept.get())
                    && (is_exclusive || other_is)
                {
                    let (one, other) = (&one.owner, &other.owner);
                    wrong.push(format!("two guards of {}: {one}, {other}", name(*lock)));
                }
            }
            // At a majority a server may not know of it.
            for lock in &one.locks {
                let Some(Seen {
                    is_up,
                    holders,
                    count,
                }) = self.seen(*lock, &one.owner)
                else {
                    continue;
                };
                let same = |other: &&Rc<Held>| {
                    other.owner == one.owner
                        && other.locks.contains(lock)
                        && other.says_held().is_some()
                };
                let guards = counted(all.iter().filter(same));
                // Permits have one guard.
                let is_more = one.share.is_some() && guards < count;
                let is_short = count > 0 && (guards > count || is_more);
                if is_up && is_short && !self.may_have_failed_over() {
                    let owner = &one.owner;
                    wrong.push(format!(
                        "{owner} has {guards} guards of {}, the server counts {count}",
                        name(*lock)
                    ));
                }
                let may_be_none = self.allows.lost_keys && holders.is_empty();
                if is_up && !may_be_none && !holders.contains(&one.owner) {
                    let owner = &one.owner;
                    wrong.push(format!(
                        "{owner} counts on {}, the server says {holders:?}",
                        name(*lock)
                    ));
                }
            }
        }
        wrong.extend(self.look_at_permits(&all));
        for what in wrong {
            self.violation(format_args!("{what}"));
        }
    }

    // --- Commands that are run under locks -------------------------------------------------------

    /// A server runs a command. Its owner must hold the lock, and the command runs only once.
    pub(crate) fn runs(&self, guarded: &Guarded) {
        let Guarded {
            name,
            owner,
            words,
            holders,
        } = guarded;
        let text = words.last().cloned().unwrap_or_default();
        if !holders.contains(owner) {
            self.violation(format_args!(
                "{text} was run for {owner}, and {holders:?} hold {name}"
            ));
        }
        let mut all = self.guarded.borrow_mut();
        let times = all.entry(text.clone()).or_default();
        *times = times.saturating_add(1);
        if *times > 1 {
            self.violation(format_args!("{text} was run {times} times"));
        }
    }

    /// A guard was told that it was run.
    pub(crate) fn was_run(&self, text: &str) {
        if !self.guarded.borrow().contains_key(text) {
            self.violation(format_args!("{text} was not run"));
        }
    }

    // --- Permits ---------------------------------------------------------------------------------

    /// Checks the permits of the guards that say that they hold some, and the permits that are out
    /// at servers.
    fn look_at_permits(&self, held: &[Rc<Held>]) -> Vec<String> {
        let is_seen = |held: &&Rc<Held>| {
            held.has_grace && !self.is_excused(held) && held.says_held().is_some()
        };
        let shares: Vec<_> = held
            .iter()
            .filter(is_seen)
            .filter_map(|of| of.share)
            .collect();
        // Nodes of a cluster count their tokens each for itself.
        let is_one = self.nodes.is_none() && !self.may_have_failed_over();
        let has_order = is_one && !self.allows.old_tokens;
        let mut wrong = limits::are_kept(&shares, has_order);
        let is_sound = !self.allows.trouble && self.servers.len() == 1;
        for lock in self.limits.semaphores() {
            let holders = self.seen(lock, "").map(|seen| seen.holders);
            let count = |owner: &String| self.seen(lock, owner).map_or(0, |seen| seen.count);
            let out = holders.iter().flatten().map(count).sum();
            wrong.extend(self.limits.is_kept_at(lock, out));
            wrong.extend(
                self.limits
                    .nobody_waits_for_free_ones(lock, out)
                    .filter(|_| is_sound),
            );
        }
        wrong
    }
}
