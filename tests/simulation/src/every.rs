//! Everything that may go wrong at a step of a small program.

use std::time::Duration;

use rlock_test::Direction;

use crate::scenarios::failover;
use crate::schedule::{self, Fault, FaultKind, Schedule};
use crate::sentinels::Old;
use crate::steps::{Step, Uses};
use crate::stops;

/// A fault that may come at a step.
#[derive(Clone, Copy, Debug)]
pub struct Possible {
    /// The fault.
    pub fault: Fault,
    strikes: Strikes,
}

/// The state that a fault strikes at a step.
#[derive(Clone, Debug, PartialEq)]
struct Found {
    at: Duration,
    /// How often each thing was used that it strikes.
    used: Vec<u64>,
    connections: Connections,
}

impl Found {
    fn at(step: &Step) -> Self {
        let (used, connections) = Default::default();
        Self {
            at: step.at,
            used,
            connections,
        }
    }

    fn adds(&mut self, used: impl IntoIterator<Item = u64>) {
        self.used.extend(used);
    }
}

/// The numbers of connections, each with how often its directions were changed.
type Connections = Vec<(usize, Vec<u64>)>;

/// The part of the links of a client to a server that a fault strikes.
#[derive(Clone, Copy, Debug)]
struct Part {
    client: usize,
    /// Of the open ones. None: all.
    connection: Option<usize>,
    /// The direction to the server, and that to the client.
    directions: [bool; 2],
}

impl Part {
    fn all(client: usize) -> Self {
        Self {
            client,
            connection: None,
            directions: [true, true],
        }
    }

    fn of(kind: FaultKind) -> Option<Self> {
        let all = Self::all;
        let one = |client, connection| Self {
            connection: Some(connection),
            ..all(client)
        };
        Some(match kind {
            FaultKind::Reset(client) => all(client),
            FaultKind::ResetOne { client, connection }
            | FaultKind::HalfOpen {
                client, connection, ..
            } => one(client, connection),
            FaultKind::Cut {
                client,
                to_server,
                to_host,
                ..
            } => Self {
                directions: [to_server, to_host],
                ..all(client)
            },
            FaultKind::CutOne {
                client,
                connection,
                to_server,
                to_host,
                ..
            } => Self {
                directions: [to_server, to_host],
                ..one(client, connection)
            },
            _ => return None,
        })
    }

    /// Its open connections at this step.
    fn connections(&self, step: &Step, server: usize) -> Connections {
        let links = step.uses.links.get(self.client);
        let open = links.and_then(|links| Some(links.get(server)?.0.as_slice()));
        let open = open.unwrap_or_default();
        let struck = match self.connection {
            Some(number) => open.get(number..).and_then(|from| from.get(..1)),
            None => Some(open),
        };
        let connections = struck.unwrap_or_default().iter();
        let connections = connections.map(|(number, changes)| {
            let ways = changes.iter().zip(self.directions);
            let ways = ways.filter_map(|(changes, is_struck)| is_struck.then_some(*changes));
            (*number, ways.collect())
        });
        connections.collect()
    }
}

/// The processes, links and servers that a fault changes. It comes only at their steps.
#[derive(Clone, Copy, Debug)]
enum Strikes {
    /// The call that is about to be polled.
    Call,
    /// The message that is in flight, on this connection of a client to a server.
    Message {
        client: usize,
        connection: usize,
        direction: Direction,
    },
    /// A process alone: it stands still.
    Client(usize),
    /// A server alone, or its keys.
    Server,
    /// A process, and all servers that hear of it.
    ClientAndServers(usize),
    /// A link, and so a process and a server.
    Link(usize),
    /// A server, and all processes that hear of it.
    ServerAndClients,
    /// All servers.
    Servers,
    /// All.
    All,
}

impl Possible {
    /// Whether its connection is open. Faults that need no open connection can always come.
    fn is_there(&self, step: &Step) -> bool {
        let needs_none = matches!(self.fault.kind, FaultKind::Cut { .. });
        let part = Part::of(self.fault.kind).filter(|_| !needs_none);
        part.is_none_or(|part| !part.connections(step, self.fault.server).is_empty())
    }

    /// The state that it would change at this step. `None`: two of these are never taken for equal.
    fn found(&self, step: &Step) -> Option<Found> {
        let Uses {
            clients,
            links,
            servers,
            ..
        } = &step.uses;
        let at = self.fault.server;
        let mut found = Found::at(step);
        match (self.strikes, self.fault.kind) {
            (Strikes::Client(client), _) => found.adds([*clients.get(client)?]),
            (Strikes::Server, FaultKind::Pause(_)) => found.adds([servers.get(at)?.0]),
            (Strikes::Server, kind) => {
                if matches!(kind, FaultKind::StepClock(_)) {
                    // It reads the clock also when nothing changes.
                    return None;
                }
                found.adds([servers.get(at)?.1]);
            }
            (Strikes::Servers, _) => found.adds(servers.iter().map(|(_, changes)| *changes)),
            // Both ends hear later that it has ended, after the other work of that moment.
            (Strikes::Link(client), kind) => {
                if matches!(kind, FaultKind::Cut { .. }) {
                    found.adds([links.get(client)?.get(at)?.1]);
                }
                found.connections = Part::of(kind)?.connections(step, at);
            }
            // It stands still from now on, and servers hear later of its end.
            (Strikes::ClientAndServers(client), _) => {
                let links = links.get(client)?;
                found.adds([*clients.get(client)?]);
                found.adds(links.iter().map(|(_, passed)| *passed));
                let all = Part::all(client);
                let servers = 0..links.len();
                found.connections = servers.flat_map(|at| all.connections(step, at)).collect();
            }
            // They change more at once than is counted.
            (
                Strikes::Call | Strikes::Message { .. } | Strikes::ServerAndClients | Strikes::All,
                _,
            ) => return None,
        }
        Some(found)
    }

    /// Whether it comes at this step: the step is one of something that it changes.
    fn comes_at(&self, step: &Step) -> bool {
        let place = step.place;
        if !place.suits(&self.fault.kind) || !self.is_there(step) {
            return false;
        }
        let server = self.fault.server;
        let is_client = |client| place.client() == Some(client);
        let is_server = place.server() == Some(server);
        match self.strikes {
            Strikes::Call | Strikes::All => true,
            Strikes::Message {
                client,
                connection,
                direction,
            } => {
                let is_open = step.uses.open == Some(connection);
                is_open && place.is_in_flight(client, server, direction)
            }
            Strikes::Client(client) => is_client(client),
            Strikes::Server => is_server,
            Strikes::ClientAndServers(client) => is_client(client) || place.server().is_some(),
            Strikes::Link(client) => is_client(client) || is_server,
            Strikes::ServerAndClients => place.client().is_some() || is_server,
            Strikes::Servers => place.server().is_some(),
        }
    }
}

/// A fault that may come at a step, by the numbers of both.
#[derive(Clone, Copy, Debug)]
pub struct Coming {
    /// The step.
    pub step: usize,
    /// The fault.
    pub fault: usize,
    /// The earlier step at which the fault would have the same effect: no time has passed since
    /// then, and nothing that it changes was used.
    pub is_as_at: Option<usize>,
}

/// All that may go wrong, from this fault on. Two faults at one step come in one order.
pub fn coming(possible: &[Possible], steps: &[Step], after: Option<(usize, usize)>) -> Vec<Coming> {
    let mut coming = Vec::new();
    let mut last: Vec<Option<(Found, usize)>> = vec![None; possible.len()];
    let from = after.map_or(0, |(step, _)| step);
    for (number, step) in steps.iter().enumerate().skip(from) {
        for (fault, (of, last)) in possible.iter().zip(&mut last).enumerate() {
            if of.comes_at(step) && Some((number, fault)) > after {
                let found = of.found(step);
                let before = last.take().zip(found.as_ref());
                let same = before.filter(|((before, _), found)| before == *found);
                let is_as_at = same.map(|((_, step), _)| step);
                coming.push(Coming {
                    step: number,
                    fault,
                    is_as_at,
                });
                *last = found.map(|found| (found, is_as_at.unwrap_or(number)));
            }
        }
    }
    coming
}

/// All faults that may come at one step, each at each server and for each client.
pub fn faults(schedule: &Schedule) -> Vec<Possible> {
    let late = late(schedule);
    let possible = every_fault(schedule).into_iter().map(|fault| Possible {
        fault,
        strikes: strikes(&fault.kind, late),
    });
    possible.collect()
}

fn strikes(kind: &FaultKind, late: Duration) -> Strikes {
    match *kind {
        FaultKind::DropCall => Strikes::Call,
        FaultKind::StandStill { client, .. } => Strikes::Client(client),
        FaultKind::Kill(client) => Strikes::ClientAndServers(client),
        FaultKind::CutOne {
            client,
            connection,
            to_server,
            lasts,
            ..
        } if lasts == late => Strikes::Message {
            client,
            connection,
            direction: if to_server {
                Direction::ToServer
            } else {
                Direction::ToHost
            },
        },
        FaultKind::Cut { client, .. }
        | FaultKind::CutOne { client, .. }
        | FaultKind::Reset(client)
        | FaultKind::ResetOne { client, .. }
        | FaultKind::HalfOpen { client, .. } => Strikes::Link(client),
        FaultKind::Pause(_)
        | FaultKind::Delete(_)
        | FaultKind::Break(_)
        | FaultKind::Flush
        | FaultKind::StepClock(_) => Strikes::Server,
        FaultKind::Crash { .. } => Strikes::ServerAndClients,
        FaultKind::MoveSlot { .. } => Strikes::Servers,
        FaultKind::Failover(_) | FaultKind::Replace(_) | FaultKind::Sentinel(_) => Strikes::All,
    }
}

/// Later than the next message, and than the one after it.
fn late(schedule: &Schedule) -> Duration {
    schedule.latency * 10
}

fn every_fault(schedule: &Schedule) -> Vec<Fault> {
    // The primary and its replica.
    let watched = schedule.watched.map(|_| 2);
    let nodes = schedule.clustered.map(|of| of.nodes);
    let servers = watched.or(nodes).unwrap_or(schedule.servers);
    let mut all = vec![fault(0, FaultKind::DropCall)];
    for client in 0..schedule.clients.len() {
        all.extend(of_process(schedule, client).map(|kind| fault(0, kind)));
    }
    for server in 0..servers {
        for client in 0..schedule.clients.len() {
            let kinds = of_link(schedule, client);
            all.extend(kinds.into_iter().map(|kind| fault(server, kind)));
        }
        let kinds = of_server(schedule);
        all.extend(kinds.into_iter().map(|kind| fault(server, kind)));
    }
    all.extend(of_service(schedule).into_iter().map(|kind| fault(0, kind)));
    all
}

fn fault(server: usize, kind: FaultKind) -> Fault {
    Fault {
        at: Duration::ZERO,
        kind,
        server,
        step: None,
    }
}

/// Half of the grace, nine tenths and twice as long: before, about when and after a client must
/// give up its session.
fn about_the_grace(schedule: &Schedule) -> [Duration; 3] {
    let grace = grace(schedule);
    [grace / 2, grace * 9 / 10, grace * 2]
}

fn grace(schedule: &Schedule) -> Duration {
    let graces = schedule.clients.iter().map(|client| client.grace);
    graces.max().unwrap_or_default()
}

fn of_process(schedule: &Schedule, client: usize) -> impl Iterator<Item = FaultKind> {
    let still = about_the_grace(schedule).map(|lasts| FaultKind::StandStill { client, lasts });
    still.into_iter().chain([FaultKind::Kill(client)])
}

/// To the server, from it, both.
const DIRECTIONS: [(bool, bool); 3] = [(true, false), (false, true), (true, true)];

/// The command connection and the session connection, in the order in which they were opened, and a
/// third while one of them is replaced or the map of a cluster is read.
const CONNECTIONS: [usize; 3] = [0, 1, 2];

/// The faults between a client and a server.
fn of_link(schedule: &Schedule, client: usize) -> Vec<FaultKind> {
    // The session ends meanwhile.
    let long = grace(schedule) * 5 / 4;
    let late = late(schedule);
    let mut kinds = vec![FaultKind::Reset(client)];
    for (to_server, to_host) in DIRECTIONS {
        kinds.push(FaultKind::Cut {
            client,
            to_server,
            to_host,
            lasts: long,
        });
    }
    for connection in CONNECTIONS {
        kinds.push(FaultKind::ResetOne { client, connection });
        for to_server in [true, false] {
            kinds.push(FaultKind::HalfOpen {
                client,
                connection,
                to_server,
            });
        }
        let cut = |(to_server, to_host), lasts, arrives| FaultKind::CutOne {
            client,
            connection,
            to_server,
            to_host,
            lasts,
            arrives,
        };
        kinds.extend(DIRECTIONS.map(|directions| cut(directions, long, true)));
        // A message in flight is late, or is lost and the connection ends.
        let (to_server, to_host) = (DIRECTIONS[0], DIRECTIONS[1]);
        kinds.extend([to_server, to_host].map(|directions| cut(directions, late, true)));
        kinds.extend([to_server, to_host].map(|directions| cut(directions, late, false)));
    }
    kinds
}

/// The faults at a server.
fn of_server(schedule: &Schedule) -> Vec<FaultKind> {
    let mut kinds: Vec<_> = about_the_grace(schedule).map(FaultKind::Pause).into();
    let crash = |ms, loses_keys| FaultKind::Crash {
        lasts: Duration::from_millis(ms),
        loses_keys,
    };
    // Longer than clients may go on at once.
    kinds.push(crash(1_000, false));
    let has_replicas = schedule.watched.is_some() || schedule.clustered.is_some();
    if has_replicas {
        // Keys are lost by failovers there, and nodes have one clock.
        return kinds;
    }
    let leases = schedule.clients.iter().map(|client| client.lease);
    let lease = i64::try_from(leases.max().unwrap_or_default().as_millis());
    kinds.push(crash(50, true));
    // All leases end.
    kinds.push(FaultKind::StepClock(lease.unwrap_or(i64::MAX)));
    for lock in locks(schedule) {
        kinds.extend([FaultKind::Delete(lock), FaultKind::Break(lock)]);
    }
    kinds
}

/// The faults of a service or a cluster.
fn of_service(schedule: &Schedule) -> Vec<FaultKind> {
    let olds = [
        Old::Waits,
        Old::Follows,
        Old::GoesOn,
        Old::Dies,
        Old::StandsStill,
    ];
    if schedule.watched.is_some() {
        return olds.map(|old| FaultKind::Failover(failover(old))).into();
    }
    let Some(clustered) = schedule.clustered else {
        return Vec::new();
    };
    let mut kinds: Vec<_> = olds.map(|old| FaultKind::Replace(failover(old))).into();
    for lock in locks(schedule) {
        kinds.extend((0..clustered.nodes).map(|to| FaultKind::MoveSlot {
            lock,
            to,
            by_keys: None,
        }));
    }
    kinds
}

/// The locks of a schedule, from the beginning of its steps on.
fn locks(schedule: &Schedule) -> Vec<u8> {
    let mut schedule = schedule.clone();
    let begins = schedule.small.map_or(Duration::ZERO, |small| small.begins);
    schedule.tasks.retain(|task| task.at >= begins);
    let steps = stops::steps(&schedule);
    let mut locks: Vec<_> = steps
        .iter()
        .flat_map(|step: &&schedule::Step| step.locks.clone())
        .collect();
    locks.sort_unstable();
    locks.dedup();
    locks
}
