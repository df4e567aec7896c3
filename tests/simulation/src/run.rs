//! Carrying a schedule out.

use std::cell::{Cell, RefCell};
use std::collections::BTreeMap;
use std::rc::Rc;
use std::time::Duration;

use rlock_client::{ClientBuilder, Owner};
use rlock_test::{Contents, Direction, Host, Network, Server, Stats};
use tokio::task::{AbortHandle, JoinHandle, spawn_local};
use tokio::time::{Instant, sleep, sleep_until, timeout};

use crate::judge::{Judge, Report, limit_name, name};
use crate::nodes::Nodes;
use crate::permits::{SetLimit, semaphores};
use crate::schedule::{self, Fault, FaultKind, Owning, Schedule};
use crate::sentinels::{self, SERVICE, Service, sentinel_address, server_address as address};
use crate::steps::{self, Place, Uses};
use crate::stops::StopKind;
use crate::task::{AnyClient, Task};

/// Carries it out, and reports; if asked to, with all that is said to servers.
pub fn run(schedule: &Schedule, is_verbose: bool) -> Report {
    let also = if is_verbose {
        Also::Trace
    } else {
        Also::Nothing
    };
    carry_out(schedule, also)
}

/// Carries a small program out, and keeps with its steps what a fault may strike there.
pub fn with_steps(schedule: &Schedule) -> Report {
    carry_out(schedule, Also::Uses)
}

/// Carries it out, with a digest of all steps and all that is said to servers.
pub fn digested(schedule: &Schedule) -> Report {
    carry_out(schedule, Also::Digest)
}

/// More that a report may have.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Also {
    Nothing,
    /// All that is said to servers.
    Trace,
    /// With each step what a fault may strike there.
    Uses,
    /// See [`digested`].
    Digest,
}

fn carry_out(schedule: &Schedule, also: Also) -> Report {
    let judge = rlock_test::run(schedule.seed, async |network| {
        let world = Rc::new(World::new(schedule, &network, also));
        let witness = Rc::downgrade(&world);
        network.observe(move |moment, connection| {
            if let Some(world) = witness.upgrade() {
                world.comes_to(Place::Message(moment, connection));
            }
        });
        world.live().await;
        let judge = Rc::clone(&world.judge);
        world.clients.take();
        judge
    });
    judge.into_report()
}

struct World {
    also: Also,
    schedule: Schedule,
    servers: Vec<Server>,
    /// If sentinels watch them.
    service: Option<Rc<Service>>,
    /// If they are a cluster.
    nodes: Option<Rc<Nodes>>,
    /// Owners that several tasks of a client share.
    shared: RefCell<BTreeMap<usize, Owner>>,
    judge: Rc<Judge>,
    clients: RefCell<Vec<Process>>,
    /// All processes have connected: steps are counted.
    have_connected: Cell<bool>,
    counts_steps: Cell<bool>,
}

/// A client process.
struct Process {
    host: Host,
    tasks: Vec<AbortHandle>,
    /// Its client, once one of its tasks has connected it; the others wait for that.
    client: Rc<tokio::sync::Mutex<Option<AnyClient>>>,
    is_dead: bool,
    /// How often it has been stopped and does not yet go on.
    stops: u32,
}

/// For how long steps are counted after the last call, while something is held.
const GIVING_BACK: Duration = Duration::from_millis(400);

/// The time between two looks of the judge at all guards.
const LOOK_EVERY: Duration = Duration::from_millis(97);

/// The time after which a process tries to connect again.
const CONNECT_AGAIN: Duration = Duration::from_secs(3);

/// After the last repair calls may go on for this long, and leftovers may stay this long.
const SETTLE: Duration = Duration::from_secs(600);

/// The same in a small program: longer than a lease and two faults together.
const SETTLE_SMALL: Duration = Duration::from_secs(60);

/// The directions that are set.
fn directions(to_server: bool, to_host: bool) -> impl Iterator<Item = Direction> {
    let to_server = to_server.then_some(Direction::ToServer);
    to_server
        .into_iter()
        .chain(to_host.then_some(Direction::ToHost))
}

impl World {
    fn new(schedule: &Schedule, network: &Network, also: Also) -> Self {
        let service = Service::start(schedule, network);
        let nodes = Nodes::start(schedule, network);
        let are_others = service.is_some() || nodes.is_some();
        let apart = if are_others { 0 } else { schedule.servers };
        let servers = (0..apart).map(|number| {
            let server = network.server(&address(number));
            server.set_grant_delay(schedule.grant_delay);
            if schedule.is_busy {
                server.make_busy();
            }
            server
        });
        let watched = service
            .iter()
            .flat_map(|service| service.servers())
            .cloned();
        let of_cluster = nodes.iter().flat_map(|nodes| nodes.servers()).cloned();
        let servers: Vec<_> = servers.chain(watched).chain(of_cluster).collect();
        let clients = schedule.clients.iter().map(|_| {
            let host = network.host();
            host.set_latency(schedule.latency);
            Process {
                host,
                tasks: Vec::new(),
                client: Rc::default(),
                is_dead: false,
                stops: 0,
            }
        });
        Self {
            schedule: schedule.clone(),
            also,
            judge: Rc::new(Judge::new(
                servers.clone(),
                service.clone(),
                nodes.clone(),
                schedule,
            )),
            servers,
            service,
            nodes,
            shared: RefCell::default(),
            clients: RefCell::new(clients.collect()),
            have_connected: Cell::default(),
            counts_steps: Cell::new(true),
        }
    }

    /// With all that is said to servers in the trace.
    fn listen_in(&self) {
        let hides_nothing = std::env::var_os("SIMULATE_ALL").is_some_and(|all| !all.is_empty());
        for (number, server) in self.servers.iter().enumerate() {
            let judge = Rc::downgrade(&self.judge);
            let is_brief = self.schedule.is_brief();
            let also = self.also;
            server.observe(move |said| {
                let judge = judge.upgrade();
                if is_brief
                    && let Some(judge) = &judge
                    && let Some(wrong) = judge.surplus.hears(said)
                {
                    judge.violation(format_args!("{wrong}"));
                }
                let hides = ["EVENTS", "HELLO", "CLIENT", "INFO", "events: []"];
                // A fault's own command may come at another step of the same moment.
                let is_own = said.starts_with("0: ");
                let digests = also == Also::Digest && !is_own;
                if let Some(judge) = judge.as_ref().filter(|_| digests) {
                    judge.digests(&(judge.elapsed(), number, said));
                }
                if let Some(judge) = judge.filter(|_| also == Also::Trace)
                    && (hides_nothing || !hides.iter().any(|word| said.contains(word)))
                {
                    judge.note(format_args!("    server {number}, {said}"));
                }
            });
        }
    }

    async fn live(self: &Rc<Self>) {
        let are_heard = matches!(self.also, Also::Trace | Also::Digest);
        if are_heard || self.schedule.is_brief() {
            self.listen_in();
        }
        for server in &self.servers {
            let judge = Rc::downgrade(&self.judge);
            server.observe_guarded(move |guarded| {
                if let Some(judge) = judge.upgrade() {
                    judge.runs(guarded);
                }
            });
        }
        let mut tasks = Vec::new();
        for (number, plan) in self.schedule.tasks.iter().enumerate() {
            if let Some(process) = self.clients.borrow_mut().get_mut(plan.client) {
                // Also if its process dies before it begins.
                let (world, active) = (Rc::clone(self), self.judge.listening.task());
                let task = async move {
                    let _active = active;
                    world.task(number).await;
                };
                let task = spawn_local(process.host.run(task));
                process.tasks.push(task.abort_handle());
                tasks.push(task);
            }
        }
        for set in &self.schedule.limits {
            if let Some(process) = self.clients.borrow_mut().get_mut(set.client) {
                let task = spawn_local(process.host.run(Rc::clone(self).set_limit(*set)));
                process.tasks.push(task.abort_handle());
                tasks.push(task);
            }
        }
        let looks = spawn_local(Rc::clone(self).look());
        let faults = self.schedule.faults.iter();
        for fault in faults.filter(|fault| fault.step.is_none()) {
            spawn_local(Rc::clone(self).fault(*fault));
        }
        self.all_end(tasks).await;
        self.rest().await;
        looks.abort();
        self.judge.in_order();
        self.nothing_is_left().await;
        self.was_modest();
        self.judge.end();
    }

    async fn look(self: Rc<Self>) {
        loop {
            sleep(LOOK_EVERY).await;
            self.judge.look();
        }
    }

    async fn task(self: Rc<Self>, number: usize) {
        let Some(plan) = self.schedule.tasks.get(number) else {
            return;
        };
        sleep(plan.at).await;
        let Some(setup) = self.schedule.clients.get(plan.client) else {
            return;
        };
        let Some(client) = self.client(plan.client, setup).await else {
            return;
        };
        let task = Task {
            number,
            process: plan.client,
            owner: self.owner(plan, &client),
            is_own: plan.owner == Owning::Call,
            client,
            setup: *setup,
            judge: Rc::clone(&self.judge),
            latency: self.schedule.latency,
            polls: {
                let (world, client) = (Rc::downgrade(&self), plan.client);
                Rc::new(move || {
                    let world = world.upgrade();
                    world.is_some_and(|world| world.comes_to(Place::Poll(client)))
                })
            },
            stops: {
                let (world, client) = (Rc::downgrade(&self), plan.client);
                Rc::new(move |kind| {
                    if let Some(world) = world.upgrade() {
                        world.stop(client, kind);
                    }
                })
            },
        };
        task.run(&plan.steps).await;
    }

    /// Sets a limit.
    async fn set_limit(self: Rc<Self>, set: SetLimit) {
        let SetLimit {
            at,
            client: number,
            lock,
            limit,
        } = set;
        sleep(at).await;
        let Some(setup) = self.schedule.clients.get(number) else {
            return;
        };
        let Some(AnyClient::One(client)) = self.client(number, setup).await else {
            return;
        };
        let judge = &self.judge;
        let place = judge.limits.sets(lock, limit);
        judge.note(format_args!(
            "client {number}: limit {limit:?} of {}",
            name(lock)
        ));
        match client.set_limit(name(lock), limit).await {
            Ok(before) => {
                judge.count("limit set");
                judge.note(format_args!("client {number}: in the place of {before:?}"));
                if !judge.limits.is_set(lock, place, before) {
                    judge.violation(format_args!("{before:?} was no limit of {}", name(lock)));
                }
            }
            Err(error) => {
                judge.count("limit not set");
                judge.note(format_args!("client {number}: the limit, {error}"));
                judge.must_not_fail(number, &error.to_string());
            }
        }
    }

    /// The client of a process, connected by its first task.
    async fn client(&self, number: usize, setup: &schedule::Client) -> Option<AnyClient> {
        let host = self.host(number)?;
        let its = Rc::clone(&self.clients.borrow().get(number)?.client);
        let mut its = its.lock().await;
        if let Some(client) = &*its {
            return Some(client.clone());
        }
        loop {
            let mut settings = rlock_client::Client::builder()
                .grace(setup.grace)
                .lease(setup.lease)
                .response_timeout(setup.response_timeout)
                .dial(host.dial());
            if let Some(within) = setup.acknowledged {
                settings = settings.acknowledged_by(setup.copies, within);
            }
            match self.connect(settings).await {
                Ok(client) => {
                    self.judge.entries.connected();
                    return Some(its.insert(client).clone());
                }
                Err(error) => {
                    self.judge.note(format_args!("client {number}: {error}"));
                    self.judge.count("not connected");
                    sleep(CONNECT_AGAIN).await;
                }
            }
        }
    }

    async fn connect(&self, settings: ClientBuilder) -> Result<AnyClient, String> {
        let url = |server| format!("redis://{}", address(server));
        if let Some(nodes) = &self.nodes {
            let client = settings.connect_cluster(nodes.urls()).await;
            return client
                .map(AnyClient::One)
                .map_err(|error| error.to_string());
        }
        if let Some(watched) = self.schedule.watched {
            let settings = settings.sentinels(sentinels::urls(watched));
            let client = settings.connect(&format!("redis://{SERVICE}")).await;
            return client
                .map(AnyClient::One)
                .map_err(|error| error.to_string());
        }
        if self.schedule.servers == 1 {
            let client = settings.connect(&url(0)).await;
            return client
                .map(AnyClient::One)
                .map_err(|error| error.to_string());
        }
        let builder = rlock_client::QuorumClient::builder().settings(settings);
        let client = builder.connect((0..self.schedule.servers).map(url)).await;
        client
            .map(AnyClient::Quorum)
            .map_err(|error| error.to_string())
    }

    fn owner(&self, plan: &schedule::Task, client: &AnyClient) -> Option<Owner> {
        let AnyClient::One(client) = client else {
            return None;
        };
        match plan.owner {
            Owning::Call => None,
            Owning::Task => Some(client.owner()),
            Owning::Shared => {
                let mut shared = self.shared.borrow_mut();
                let owner = shared.entry(plan.client).or_insert_with(|| client.owner());
                Some(owner.clone())
            }
            Owning::Foreign => {
                let shared = self.shared.borrow();
                let other = shared.iter().find(|(number, _)| **number != plan.client);
                // The first to come has nobody's owner but its own.
                Some(other.map_or_else(|| client.owner(), |(_, owner)| owner.clone()))
            }
        }
    }

    // --- Faults ----------------------------------------------------------------------------------

    async fn fault(self: Rc<Self>, fault: Fault) {
        sleep(fault.at).await;
        self.fault_now(fault).await;
    }

    /// The run comes to a step, and its faults begin, if all processes have connected. Whether the
    /// call is dropped that is about to be polled.
    fn comes_to(self: &Rc<Self>, place: Place) -> bool {
        if !self.counts_steps.get() || !self.all_have_connected() {
            return false;
        }
        let begins = self.schedule.small.map(|small| small.begins);
        if begins.is_some_and(|begins| self.judge.elapsed() < begins) {
            return false;
        }
        if self.also == Also::Digest {
            let at = self.judge.elapsed();
            self.judge.digests(&(at, format!("{place:?}")));
        }
        let uses = (self.also == Also::Uses).then(|| self.uses(place));
        let number = self.judge.comes_to(place, uses.unwrap_or_default());
        let faults = self.schedule.faults.iter();
        let mut drops = false;
        for fault in faults.filter(|fault| fault.step == Some(number)) {
            if matches!(fault.kind, FaultKind::DropCall) {
                drops |= matches!(place, Place::Poll(_));
            } else {
                steps::begin(Rc::clone(self).fault_now(*fault));
            }
        }
        drops
    }

    /// How often everything was used that a fault may strike.
    fn uses(&self, place: Place) -> Uses {
        let clients = self.clients.borrow();
        let open = match place {
            Place::Message(_, connection) => clients.get(connection.host).and_then(|process| {
                let server = address(connection.server?);
                process.host.number_of(&server, connection)
            }),
            Place::Poll(_) => None,
        };
        let hosts = || clients.iter().map(|process| &process.host);
        let sentinels = self.schedule.watched.map_or(0, |of| of.sentinels);
        let servers = (0..self.servers.len()).map(address);
        let addresses: Vec<_> = servers
            .chain((0..sentinels).map(sentinel_address))
            .collect();
        let links = hosts().map(|host| {
            let addresses = addresses.iter();
            addresses.map(|at| host.connections_used(at)).collect()
        });
        Uses {
            open,
            clients: hosts().map(Host::turns).collect(),
            links: links.collect(),
            servers: self.servers.iter().map(Server::turns).collect(),
        }
    }

    /// Whether each process has connected that has something to do.
    fn all_have_connected(&self) -> bool {
        if !self.have_connected.get() {
            let clients = self.clients.borrow();
            let mut tasks = self.schedule.tasks.iter();
            let has = |process: &Process| process.client.try_lock().is_ok_and(|its| its.is_some());
            let all = tasks.all(|task| clients.get(task.client).is_none_or(has));
            self.have_connected.set(all);
        }
        self.have_connected.get()
    }

    /// Begins at once.
    async fn fault_now(self: Rc<Self>, fault: Fault) {
        let Fault { kind, server, .. } = fault;
        if kind.may_break_exclusion(self.schedule.grant_delay) {
            self.judge.may_be_two();
        }
        self.judge.note(format_args!("server {server}: {kind:?}"));
        let (at, number) = (address(server), server);
        let Some(server) = self.servers.get(server) else {
            return;
        };
        match kind {
            FaultKind::Cut {
                client,
                to_server,
                to_host,
                lasts,
            } => {
                self.judge.count("cut");
                let Some(host) = self.host(client) else {
                    return;
                };
                for direction in directions(to_server, to_host) {
                    host.cut(&at, direction);
                }
                sleep(lasts).await;
                host.mend(&at);
                self.judge.is_mended(client);
            }
            FaultKind::Reset(_)
            | FaultKind::CutOne { .. }
            | FaultKind::ResetOne { .. }
            | FaultKind::HalfOpen { .. } => {
                self.fault_of_connections(&at, kind).await;
            }
            FaultKind::Kill(client) => self.kill(client),
            FaultKind::StandStill { client, lasts } => {
                self.stop(client, StopKind::StandStill(lasts));
            }
            FaultKind::Pause(lasts) => {
                self.judge.count("pause");
                server.pause();
                sleep(lasts).await;
                server.resume();
                self.judge.note(format_args!("the server goes on"));
            }
            FaultKind::Crash { lasts, loses_keys } => {
                self.judge.count("crash");
                server.crash(loses_keys);
                sleep(lasts).await;
                server.restart();
                self.judge.note(format_args!("the server is back"));
            }
            FaultKind::StepClock(by) => {
                self.judge.count("clock step");
                server.step_clock_ms(by);
            }
            FaultKind::Break(_) | FaultKind::Delete(_) | FaultKind::Flush => {
                self.fault_of_keys(server, kind);
            }
            FaultKind::DropCall => {}
            FaultKind::Failover(_)
            | FaultKind::Replace(_)
            | FaultKind::MoveSlot { .. }
            | FaultKind::Sentinel(_) => self.fault_of_service(number, kind).await,
        }
    }

    /// Somebody ends holds.
    fn fault_of_keys(&self, server: &Server, kind: FaultKind) {
        match kind {
            FaultKind::Break(lock) => {
                self.judge.count("break");
                server.break_lock(&name(lock));
            }
            FaultKind::Delete(lock) => {
                self.judge.count("delete");
                server.delete(&name(lock));
            }
            FaultKind::Flush => {
                self.judge.count("flush");
                server.flush();
            }
            _ => {}
        }
    }

    /// A fault of a service or a cluster.
    async fn fault_of_service(&self, number: usize, kind: FaultKind) {
        match kind {
            FaultKind::Failover(failover) => {
                let Some(service) = &self.service else { return };
                if service.fail_over(failover).await {
                    self.judge.count("failover");
                    self.judge.note(format_args!("the failover is over"));
                }
            }
            FaultKind::Replace(failover) => {
                let Some(nodes) = &self.nodes else { return };
                if nodes.replace(number, failover).await {
                    self.judge.count("node replaced");
                    self.judge.note(format_args!("the node is replaced"));
                }
            }
            FaultKind::MoveSlot { lock, to, by_keys } => {
                let Some(nodes) = &self.nodes else { return };
                let name = name(lock);
                match by_keys {
                    Some(how) => {
                        if let Some(gone) = nodes.move_by_keys(&name, to, how).await {
                            self.judge.count("slot moved by keys");
                            self.judge.count_all("gone ahead", gone);
                            self.judge
                                .note(format_args!("the slot of {name} has moved"));
                        }
                    }
                    None if nodes.move_slot(&name, to) => self.judge.count("slot moved"),
                    None => {}
                }
            }
            FaultKind::Sentinel(fault) => {
                let Some(service) = &self.service else { return };
                self.judge.count("sentinel fault");
                service
                    .sentinel_fault(fault, |client| self.host(client))
                    .await;
                self.judge.note(format_args!("the sentinel is right again"));
            }
            _ => {}
        }
    }

    /// A fault of connections to the server there.
    async fn fault_of_connections(&self, at: &str, kind: FaultKind) {
        match kind {
            FaultKind::CutOne {
                client,
                connection,
                to_server,
                to_host,
                lasts,
                arrives,
            } => {
                self.judge.count("one connection cut");
                let Some(host) = self.host(client) else {
                    return;
                };
                let mut cut = None;
                for direction in directions(to_server, to_host) {
                    cut = host.cut_one(at, connection, direction);
                }
                sleep(lasts).await;
                if let Some(cut) = cut {
                    cut.end(arrives);
                }
                self.judge.note(format_args!("client {client} is mended"));
            }
            FaultKind::Reset(client) => {
                self.judge.count("reset");
                if let Some(host) = self.host(client) {
                    host.reset(at);
                }
            }
            FaultKind::ResetOne { client, connection } => {
                self.judge.count("one connection reset");
                if let Some(host) = self.host(client) {
                    host.reset_one(at, connection);
                }
            }
            FaultKind::HalfOpen {
                client,
                connection,
                to_server,
            } => {
                self.judge.count("half open");
                if let Some(host) = self.host(client) {
                    let told = directions(to_server, !to_server).next();
                    host.half_open(at, connection, told.unwrap_or(Direction::ToHost));
                }
            }
            _ => {}
        }
    }

    fn host(&self, client: usize) -> Option<Host> {
        let clients = self.clients.borrow();
        clients.get(client).map(|process| process.host.clone())
    }

    /// A fault of a process.
    fn stop(self: &Rc<Self>, client: usize, kind: StopKind) {
        let (lasts, dies) = match kind {
            StopKind::Drop => return self.judge.count("dropped at a poll"),
            StopKind::StandStill(lasts) => (lasts, false),
            StopKind::Die(after) => (after, true),
        };
        self.judge.count("stood still");
        self.judge.stands_still(client);
        let Some(host) = self.host(client) else {
            return;
        };
        host.pause();
        self.add_stops(client, 1);
        let world = Rc::clone(self);
        spawn_local(async move {
            sleep(lasts).await;
            if dies {
                world.kill(client);
            }
            if world.add_stops(client, -1) == 0 {
                world.judge.note(format_args!("client {client} goes on"));
                world.judge.goes_on(client);
                host.resume();
            }
        });
    }

    /// How often it is stopped then.
    fn add_stops(&self, client: usize, more: i32) -> u32 {
        let mut clients = self.clients.borrow_mut();
        clients.get_mut(client).map_or(0, |process| {
            process.stops = process.stops.saturating_add_signed(more);
            process.stops
        })
    }

    fn kill(&self, number: usize) {
        self.judge.count("kill");
        let mut clients = self.clients.borrow_mut();
        let Some(process) = clients.get_mut(number) else {
            return;
        };
        process.is_dead = true;
        process.host.kill();
        for task in &process.tasks {
            task.abort();
        }
        self.judge.dead(number);
    }

    // --- The end ---------------------------------------------------------------------------------

    /// Every call ends, once all faults are mended.
    async fn all_end(&self, tasks: Vec<JoinHandle<()>>) {
        let last = self.schedule.faults.iter().map(|fault| fault.at);
        let last = last.max().unwrap_or_default();
        let is_small = self.schedule.small.is_some();
        let settle = if is_small { SETTLE_SMALL } else { SETTLE };
        let deadline = Instant::now() + last + settle;
        for task in tasks {
            let handle = task.abort_handle();
            tokio::select! {
                biased;
                _ = task => {}
                () = sleep_until(deadline) => {
                    self.judge.violation(format_args!("a task has not ended"));
                    handle.abort();
                }
            }
        }
    }

    /// All tasks have ended: nobody but the clients does anything. Steps are not counted meanwhile.
    async fn rest(&self) {
        if self.schedule.small.is_some() {
            // A call may have sent something last, such as a release.
            sleep(self.schedule.latency * 10).await;
            // After a fault it may take a while until all is given back.
            let begun = Instant::now();
            while self.has_anything().is_some() && begun.elapsed() < GIVING_BACK {
                sleep(self.schedule.latency).await;
            }
        }
        self.counts_steps.set(false);
        let rest = self.judge.entries.rest();
        if let Some(rest) = self.schedule.small.map(|small| small.rests).or(rest) {
            sleep(rest).await;
            if self.judge.entries.are_counted() {
                self.judge.count("entries counted");
            }
            self.judge.look();
        }
        if self.schedule.small.is_some() {
            self.nobody_has_anything().await;
        }
        self.counts_steps.set(true);
    }

    /// No task has a guard or a call: no hold and no waiter may stay, also while clients live.
    async fn nobody_has_anything(&self) {
        let begun = Instant::now();
        loop {
            let Some(left) = self.has_anything() else {
                return;
            };
            let may_last = self.schedule.has_faults() || self.schedule.keeps();
            let longest = if may_last { LEFT_MAX } else { LOOK_EVERY };
            if begun.elapsed() >= longest {
                self.judge
                    .violation(format_args!("left while nobody does anything: {left:?}"));
                return;
            }
            sleep(Duration::from_millis(500)).await;
        }
    }

    /// The contents of a server with a hold or a waiter, if there is one.
    fn has_anything(&self) -> Option<Contents> {
        let mut contents = self.servers.iter().map(Server::contents);
        contents.find(|of| of.waiters > 0 || of.holds > 0)
    }

    /// All clients have shut down: no waiter, hold, session or key may stay.
    async fn nothing_is_left(&self) {
        while !self.judge.all_go_on() {
            sleep(LOOK_EVERY).await;
        }
        let clients: Vec<_> = {
            let mut clients = self.clients.borrow_mut();
            let all = clients.iter_mut().enumerate();
            let living = all.filter(|(_, process)| !process.is_dead);
            living
                .filter_map(|(number, process)| {
                    Some((number, process.client.try_lock().ok()?.take()?))
                })
                .collect()
        };
        self.judge.note(format_args!("all tasks have ended"));
        for (number, client) in clients {
            let ended = timeout(SHUTDOWN_MAX, client.shutdown()).await;
            // A process that is killed meanwhile shuts nothing down.
            let is_dead = self.clients.borrow()[number].is_dead;
            if ended.is_err() && !is_dead {
                self.judge
                    .violation(format_args!("a shutdown has not ended"));
            }
        }
        self.judge.note(format_args!("all clients have shut down"));
        // The last message is under way; it may be a limit whose caller has heard of no answer.
        sleep(Duration::from_secs(1)).await;
        if !self.schedule.limits.is_empty() {
            self.take_limits_away();
            // Replicas hear of it.
            sleep(Duration::from_secs(1)).await;
        }
        // The holds of a dead process end with their lease, and so do those left by a lost reply.
        let begun = Instant::now();
        let at_once = !self.schedule.has_faults() && !self.schedule.may_leave();
        let left = || {
            let contents = self.servers.iter().map(Server::contents);
            let mut left = contents.filter(|contents| *contents != Contents::default());
            left.next()
        };
        while let Some(left) = left() {
            self.take_limits_away();
            let is_session = left
                == Contents {
                    sessions: left.sessions,
                    ..Contents::default()
                };
            let longest = match (at_once, is_session) {
                (false, _) => LEFT_MAX,
                (true, true) => GRACE_MAX,
                (true, false) => Duration::ZERO,
            };
            if begun.elapsed() >= longest {
                self.judge.violation(format_args!("left behind: {left:?}"));
                return;
            }
            sleep(Duration::from_millis(500)).await;
        }
        if begun.elapsed() > Duration::from_secs(1) {
            self.judge.count("something left for a while");
        }
    }

    /// Limits that were set stay until somebody takes them away, at replicas too.
    fn take_limits_away(&self) {
        if self.schedule.limits.is_empty() {
            return;
        }
        for server in &self.servers {
            for lock in semaphores() {
                server.delete(&limit_name(lock));
            }
        }
    }

    /// A storm of retries is seen even if all ends well.
    fn was_modest(&self) {
        let mut stats = Stats::default();
        for server in &self.servers {
            let of = server.stats();
            stats.connections += of.connections;
            stats.commands += of.commands;
            stats.renewals += of.renewals;
            self.judge.count_all("asked", of.asked);
            self.judge.count_all("tryagain", of.tried_again);
        }
        let hosts = self.clients.borrow();
        let dials: u64 = hosts.iter().map(|process| process.host.dials()).sum();
        let sentinels = self.schedule.watched.map_or(0, |of| of.sentinels);
        let peers = self.schedule.clients.len() * (self.servers.len() + sentinels);
        let peers = u64::try_from(peers).unwrap_or(u64::MAX);
        let clients = self.schedule.clients.len() * self.servers.len();
        let clients = u64::try_from(clients).unwrap_or(u64::MAX);
        let seconds = self.judge.elapsed().as_secs() + 1;
        let (connections, commands) = (stats.connections, stats.commands);
        let steps = u64::try_from(self.schedule.size()).unwrap_or(u64::MAX);
        // A replica that sentinels name for the primary accepts connections, and is left at once.
        let a_second = if self.service.is_some() { 10 } else { 3 };
        if connections > clients * (20 + a_second * seconds) {
            self.judge
                .violation(format_args!("{connections} connections in {seconds} s"));
        }
        if dials > peers * (20 + DIALS_MAX * seconds) {
            self.judge
                .violation(format_args!("{dials} tries to connect in {seconds} s"));
        }
        self.judge.was_modest(stats.renewals);
        if commands > clients * (COMMANDS_MAX * seconds) + 100 * steps {
            self.judge
                .violation(format_args!("{commands} commands in {seconds} s"));
        }
    }
}

/// A client's shutdown waits within these times for the work that it can still do.
const SHUTDOWN_MAX: Duration = Duration::from_secs(60);

/// The longest lease, a lock entered more than once included.
const LEFT_MAX: Duration = Duration::from_secs(100);

/// Events that a session has not fetched keep it for its grace.
const GRACE_MAX: Duration = Duration::from_secs(6);

/// A client's tries to connect in a second, at most: calls that wait for the command connection
/// follow each other every 50 ms at most.
const DIALS_MAX: u64 = 25;

/// A client's commands in a second, at most, beside those for its calls: a call of EVENTS goes out
/// some 20 times in a grace.
const COMMANDS_MAX: u64 = 60;
