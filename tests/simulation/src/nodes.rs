//! A cluster whose nodes have a replica or two each: its faults, and how they come about.

use std::cell::{Cell, RefCell};
use std::collections::{BTreeMap, BTreeSet};
use std::rc::Rc;
use std::time::Duration;

use rlock_test::{Cluster, Network, Server};
use serde::{Deserialize, Serialize};
use tokio::time::{Instant, sleep};

use crate::judge::Seen;
use crate::moves::ByKeys;
use crate::schedule::{self, Schedule};
use crate::sentinels::{Failover, Old, become_replica, may_be_replaced, server_address, step_down};

/// A cluster.
#[derive(Clone, Copy, Debug, Serialize, Deserialize)]
pub struct Clustered {
    /// How many nodes, without their replicas.
    pub nodes: usize,
    /// The longest time that a write is under way to a replica.
    pub lag: Duration,
    /// The same for a second replica of each node, if it has two.
    #[serde(default)]
    pub second: Option<Duration>,
}

/// The cluster, while a schedule is carried out.
pub(crate) struct Nodes {
    cluster: Cluster,
    /// The nodes, and their replicas in the same order, and then their second ones.
    servers: Vec<Server>,
    count: usize,
    clients: Vec<schedule::Client>,
    latency: Duration,
    /// The nodes that are being replaced.
    replaces: RefCell<BTreeSet<usize>>,
    /// The nodes between which slots are on their way.
    moves: RefCell<Vec<usize>>,
    /// When a node was last replaced that may have had more than its replica.
    lost: Cell<Option<Instant>>,
    /// The number of nodes that were replaced, and go on without knowing it.
    former_go_on: Cell<usize>,
    /// Whether a replica took a node's place that had less than another.
    has_overtaken: Cell<bool>,
    /// Whether a slot has moved.
    has_moved: Cell<bool>,
    /// Whether a slot moved from or to a node that was being replaced, or one was replaced by a
    /// replica that may not have what had moved: replicas of the one have acknowledged writes that
    /// replicas of the other have not heard of.
    has_moved_meanwhile: Cell<bool>,
    /// Until when each client that has stood still did.
    stood: RefCell<BTreeMap<usize, Instant>>,
}

impl Nodes {
    pub(crate) fn start(schedule: &Schedule, network: &Network) -> Option<Rc<Self>> {
        let clustered = schedule.clustered?;
        let count = clustered.nodes;
        let addresses: Vec<_> = (0..count).map(server_address).collect();
        let addresses: Vec<_> = addresses.iter().map(String::as_str).collect();
        let cluster = network.cluster(&addresses);
        let mut servers: Vec<_> = (0..count).map(|node| cluster.node(node)).collect();
        for server in &servers {
            server.set_lag(clustered.lag);
        }
        for lag in [Some(clustered.lag), clustered.second]
            .into_iter()
            .flatten()
        {
            for node in 0..count {
                let replica = network.server(&server_address(servers.len()));
                cluster.add_replica(node, &replica);
                replica.set_lag(lag);
                servers.push(replica);
            }
        }
        Some(Rc::new(Self {
            cluster,
            servers,
            count,
            clients: schedule.clients.clone(),
            latency: schedule.latency,
            replaces: RefCell::default(),
            moves: RefCell::default(),
            lost: Cell::default(),
            former_go_on: Cell::default(),
            has_overtaken: Cell::default(),
            has_moved: Cell::default(),
            has_moved_meanwhile: Cell::default(),
            stood: RefCell::default(),
        }))
    }

    pub(crate) fn servers(&self) -> &[Server] {
        &self.servers
    }

    /// Where clients are told to begin.
    pub(crate) fn urls(&self) -> impl Iterator<Item = String> {
        (0..self.count).map(|node| format!("redis://{}", server_address(node)))
    }

    /// This owner's hold of this lock, as its node stores it.
    pub(crate) fn seen(&self, name: &str, owner: &str) -> Seen {
        Seen {
            is_up: self.cluster.is_up(name),
            holders: self.cluster.holders(name),
            count: self.cluster.count(name, owner),
        }
    }

    /// Whether a guard of this client may still count on a hold that was lost with a node, without
    /// knowing it. Holds that a replica acknowledged are not lost, unless another replica with less
    /// took the place. While a former node goes on, nothing tells its clients that it was replaced.
    pub(crate) fn excuses(&self, client: usize, given_back: Option<Duration>) -> bool {
        let Some((lost, setup)) = self.lost.get().zip(self.clients.get(client)) else {
            return false;
        };
        let knows = self.latency * 50 + setup.grace * 2 + setup.response_timeout * 4 + SLACK;
        let stood = self.stood.borrow();
        let since = stood.get(&client).map_or(lost, |still| lost.max(*still));
        let copies = usize::try_from(setup.copies).unwrap_or_default();
        let has_all = !self.has_overtaken.get() || copies >= self.servers.len() / self.count - 1;
        let is_kept = setup.acknowledged.is_some() && has_all && !self.has_moved_meanwhile.get();
        let is_learning = self.former_go_on.get() > 0 || since.elapsed() <= knows;
        given_back.is_some_and(|since| since <= knows) || !is_kept && is_learning
    }

    /// A client is no longer cut off from a node. If it knew no other, it had nobody to ask.
    pub(crate) fn is_mended(&self, client: usize) {
        if self.count == 1 {
            self.goes_on(client);
        }
    }

    /// A client has stood still.
    pub(crate) fn goes_on(&self, client: usize) {
        self.stood.borrow_mut().insert(client, Instant::now());
    }

    pub(crate) fn has_lost(&self) -> bool {
        self.lost.get().is_some()
    }

    /// The slot of this lock moves to this node. Whether it does.
    pub(crate) fn move_slot(&self, name: &str, to: usize) -> bool {
        let (from, to) = (self.cluster.node_of(name), to % self.count);
        let replaces = self.replaces.borrow();
        if replaces.contains(&from) || replaces.contains(&to) {
            self.has_moved_meanwhile.set(true);
        }
        let moves = self.cluster.move_slot(name, to);
        self.has_moved.set(self.has_moved.get() || moves);
        moves
    }

    /// The same key by key: how many have gone so. None if it does not move.
    ///
    /// Not while one of the two nodes is replaced: a replica's knowledge of a moving slot differs
    /// between versions of the servers, and keys that went ahead could be lost.
    pub(crate) async fn move_by_keys(&self, name: &str, to: usize, how: ByKeys) -> Option<u64> {
        let from = self.cluster.node_of(name);
        let others: Vec<_> = (0..self.count).filter(|node| *node != from).collect();
        let to = *others.get(to % others.len().max(1))?;
        let is_replaced = |node| self.replaces.borrow().contains(&node);
        if is_replaced(from) || is_replaced(to) {
            return None;
        }
        let resharding = self.cluster.reshard(name, to)?;
        self.has_moved.set(true);
        self.moves.borrow_mut().extend([from, to]);
        let mut gone = 0;
        sleep(how.stays).await;
        loop {
            let left = resharding.keys_left();
            let Some(key) = left.get(how.order % left.len().max(1)) else {
                break;
            };
            if resharding.migrate(key) {
                gone += 1;
                sleep(how.every).await;
            } else {
                sleep(TRIED_AGAIN).await;
            }
        }
        sleep(how.stays).await;
        let mut told = vec![to, from];
        if how.source_first {
            told.reverse();
        }
        told.extend((0..self.count).filter(|node| ![from, to].contains(node)));
        for node in told {
            while !resharding.tell(node) {
                sleep(TRIED_AGAIN).await;
            }
            sleep(how.apart).await;
        }
        let mut moves = self.moves.borrow_mut();
        for node in [from, to] {
            let place = moves.iter().position(|other| *other == node);
            place.map(|place| moves.swap_remove(place));
        }
        Some(gone)
    }

    /// A replica takes the place of its node. Whether it does.
    pub(crate) async fn replace(&self, node: usize, failover: Failover) -> bool {
        let node = node % self.count;
        let moves = self.moves.borrow().contains(&node);
        if moves || !self.replaces.borrow_mut().insert(node) {
            return false;
        }
        let is_done = self.replace_one(node, failover).await;
        self.replaces.borrow_mut().remove(&node);
        is_done
    }

    async fn replace_one(&self, node: usize, failover: Failover) -> bool {
        let old = self.cluster.node(node);
        let places = (node..self.servers.len()).step_by(self.count);
        let mut replicas: Vec<_> = places.filter(|of| self.servers[*of].is_replica()).collect();
        if replicas.is_empty() {
            return false;
        }
        let place = replicas.remove(failover.to % replicas.len());
        let new = &self.servers[place];
        let may_be = new.is_running() && may_be_replaced(&old, failover.old);
        if !may_be || !step_down(&old, new, failover.old).await {
            return false;
        }
        if failover.old != Old::Waits {
            if self.has_moved.get() && !new.is_in_sync() {
                self.has_moved_meanwhile.set(true);
            }
            sleep(failover.tail).await;
            self.lost.set(Some(Instant::now()));
        }
        let others: Vec<_> = replicas.iter().map(|of| &self.servers[*of]).collect();
        if others.iter().any(|other| new.offset() < other.offset()) {
            self.has_overtaken.set(true);
        }
        self.cluster.replace(node, &server_address(place), new);
        new.mend_replication();
        for other in others {
            other.replicate(new);
        }
        match failover.old {
            Old::Waits => {
                old.replicate(new);
                old.resume();
            }
            Old::Follows => become_replica(&old, new),
            Old::GoesOn => {
                self.former_go_on.set(self.former_go_on.get() + 1);
                sleep(failover.lasts).await;
                become_replica(&old, new);
                self.former_go_on.set(self.former_go_on.get() - 1);
            }
            Old::Dies => {
                sleep(failover.lasts).await;
                // It asks the others before it serves anything.
                old.replicate(new);
                old.restart();
            }
            Old::StandsStill => {
                sleep(failover.lasts).await;
                old.resume();
                // Callers that wait there may be granted now.
                self.lost.set(Some(Instant::now()));
                sleep(failover.wakes).await;
                become_replica(&old, new);
            }
        }
        if failover.old != Old::Waits {
            // Until now somebody may have been granted something there.
            self.lost.set(Some(Instant::now()));
        }
        true
    }
}

/// The time between two tries of a step of a move, while a node is away.
const TRIED_AGAIN: Duration = Duration::from_millis(50);

/// How far timers are off.
const SLACK: Duration = Duration::from_millis(500);
