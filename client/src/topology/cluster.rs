//! The nodes of a cluster: who serves which slot, found out when somebody says otherwise.

use std::collections::{HashMap, HashSet};
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, Weak};
use std::time::Duration;

use tokio::runtime::Handle;
use tokio::sync::{Notify, watch};
use tokio::task::{AbortHandle, JoinSet};
use tokio::time::{sleep, timeout};

use crate::backoff::Backoff;
use crate::error::Error;
use crate::locked;
use crate::topology::node::{Identity, Listener, Node};
use crate::topology::router::Route;
use crate::topology::slots::{Table, slot_of};
use crate::wire::connection::Connector;
use crate::wire::endpoint::Address;
use crate::wire::reply::{NAMELESS, Range, Redirect};
use crate::wire::request;

/// A cluster, as far as it is known. Its nodes are connected to when something is to be asked
/// there.
pub(crate) struct Cluster {
    /// Tells how to connect to any node, and is asked like the other seeds.
    first: Connector,
    seeds: Vec<Connector>,
    identity: Identity,
    runtime: Handle,
    listener: Weak<dyn Listener>,
    map: Mutex<Map>,
    /// How often a slot has been seen to move.
    moves: watch::Sender<u64>,
    stale: Arc<Notify>,
    /// How often has been asked.
    turn: AtomicUsize,
    refreshing: AbortHandle,
}

struct Map {
    table: Table,
    nodes: HashMap<Arc<Address>, Arc<Node>>,
    /// All nodes of which the cluster has told, replicas too: any of them can be asked.
    known: HashSet<Address>,
    /// Slots that have moved, and whose holds are yet to be confirmed where they are now.
    moved: HashSet<u16>,
}

impl Map {
    /// The host of the only node that is known to listen at this port.
    fn at_port(&self, port: u16) -> Option<Box<str>> {
        let mut there = self.known.iter().filter(|one| one.port == port);
        match (there.next(), there.next()) {
            (Some(only), None) => Some(only.host.clone()),
            _ => None,
        }
    }
}

impl Cluster {
    pub(crate) fn start(
        runtime: &Handle,
        first: Connector,
        seeds: Vec<Connector>,
        identity: Identity,
        listener: Weak<dyn Listener>,
    ) -> Arc<Self> {
        let map = Map {
            table: Table::new(),
            nodes: HashMap::new(),
            known: HashSet::new(),
            moved: HashSet::new(),
        };
        Arc::new_cyclic(|cluster| {
            let stale = Arc::new(Notify::new());
            let refreshing = keep_fresh(Weak::clone(cluster), Arc::clone(&stale));
            Self {
                first,
                seeds,
                identity,
                listener,
                map: Mutex::new(map),
                moves: watch::Sender::new(0),
                stale,
                turn: AtomicUsize::new(0),
                refreshing: runtime.spawn(refreshing).abort_handle(),
                runtime: runtime.clone(),
            }
        })
    }

    /// Asks the cluster who is there, and waits until the session is attached at one of them.
    pub(crate) async fn tried(&self) -> Result<(), Error> {
        self.refresh().await?;
        let primaries = locked(&self.map).table.primaries();
        let mut tried = Err(Error::no_cluster());
        for address in primaries {
            let node = self.node(&mut locked(&self.map), &address);
            tried = node.tried().await;
            if tried.as_ref().err().is_none_or(Error::is_final) {
                break;
            }
        }
        tried
    }

    /// The node that serves this name, or one that can say who does.
    pub(crate) fn home(&self, name: &[u8]) -> Arc<Node> {
        let mut map = locked(&self.map);
        let home = map.table.get(slot_of(name)).cloned();
        let somebody = || map.nodes.keys().next().cloned();
        let seed = || Arc::new(self.first.address());
        let address = home.or_else(somebody).unwrap_or_else(seed);
        self.node(&mut map, &address)
    }

    /// The node at this address; nothing is connected yet if it is new.
    fn node(&self, map: &mut Map, address: &Arc<Address>) -> Arc<Node> {
        let new = || {
            let connector = self.first.other(address);
            let (identity, listener) = (self.identity.clone(), Weak::clone(&self.listener));
            Node::start(&self.runtime, connector, identity, listener)
        };
        let node = map.nodes.entry(Arc::clone(address)).or_insert_with(new);
        Arc::clone(node)
    }

    /// Hears of every slot that is seen to move from now on.
    pub(crate) fn moves(&self) -> watch::Receiver<u64> {
        self.moves.subscribe()
    }

    /// Somebody is not where he was: who serves what is asked soon.
    pub(crate) fn request_refresh(&self) {
        self.stale.notify_one();
    }

    /// Where a node sends us with this error. If a slot has moved, others may have too.
    pub(crate) fn redirected(&self, error: &Error, from: &Arc<Node>) -> Option<Route> {
        let Some(redirect) = Redirect::of(error) else {
            if error.is_unavailable() || error.is_unknown() {
                self.request_refresh();
            }
            return None;
        };
        let mut map = locked(&self.map);
        let mut known = map.nodes.iter();
        let (asked, _) = known.find(|(_, node)| Arc::ptr_eq(node, from))?;
        let host = match redirect.host {
            Some(host) if *host == *NAMELESS => map.at_port(redirect.port),
            host => host,
        };
        let address = Arc::new(asked.or_at(host, redirect.port));
        if redirect.only_this {
            let node = self.node(&mut map, &address);
            return Some(Route::asking(Arc::clone(from), node));
        }
        if map.table.set(redirect.slot, &address) {
            self.has_moved(&mut map, [redirect.slot]);
        }
        self.request_refresh();
        Some(Route::to(self.node(&mut map, &address)))
    }

    fn has_moved(&self, map: &mut Map, slots: impl IntoIterator<Item = u16>) {
        map.moved.extend(slots);
        self.moves
            .send_modify(|moves| *moves = moves.wrapping_add(1));
    }

    /// Asks who serves what, and takes it over.
    async fn refresh(&self) -> Result<(), Error> {
        let (asked, ranges) = self.ask_around().await?;
        let told = ranges.iter().flat_map(|range| &range.nodes);
        let known = told.map(|(host, port)| asked.or_at(host.clone(), *port));
        let known = known.collect();
        let mut map = locked(&self.map);
        map.known = known;
        let moved = map.table.update(&ranges, &asked);
        if !moved.is_empty() {
            self.has_moved(&mut map, moved);
        }
        Ok(())
    }

    /// The first answer of any node. One that is silent does not keep the others from being asked.
    async fn ask_around(&self) -> Result<(Address, Vec<Range>), Error> {
        let mut whom = self.whom_to_ask().into_iter();
        let mut asked = JoinSet::new();
        let mut last = Error::no_cluster();
        loop {
            match whom.next() {
                Some(one) => drop(asked.spawn(one.ask())),
                None if asked.is_empty() => return Err(last),
                None => {}
            }
            let next = timeout(HEDGE, asked.join_next()).await;
            match next.ok().flatten() {
                Some(Ok(Ok(answer))) => return Ok(answer),
                Some(Ok(Err(error))) => last = error,
                Some(Err(_)) | None => {}
            }
        }
    }

    /// First those to whom there is a connection, each time another of them: one may have been cut
    /// off from the cluster and not know it.
    fn whom_to_ask(&self) -> Vec<Seed> {
        let map = locked(&self.map);
        let reached = map.nodes.iter();
        let reached = reached.filter(|(_, node)| node.session.attachment().is_some());
        let mut whom: Vec<_> = reached
            .map(|(address, node)| Seed::Reached(Arc::clone(address), Arc::clone(node)))
            .collect();
        if !whom.is_empty() {
            let turn = self.turn.fetch_add(1, Ordering::Relaxed);
            let first = turn.checked_rem(whom.len()).unwrap_or_default();
            whom.rotate_left(first);
        }
        let known = map.known.iter().map(|address| self.first.other(address));
        let seeds = std::iter::once(&self.first).chain(&self.seeds).cloned();
        let unknown = known.chain(seeds).map(Box::new);
        whom.extend(unknown.map(Seed::Unknown));
        whom
    }

    /// The slots whose holds are to be confirmed at other nodes than before.
    fn take_moved(&self) -> HashSet<u16> {
        std::mem::take(&mut locked(&self.map).moved)
    }

    /// Leaves nodes that serve no slot, if nobody has anything there.
    fn leave_idle(&self, listener: &dyn Listener) {
        let mut map = locked(&self.map);
        let serving = map.table.primaries();
        map.nodes.retain(|address, node| {
            let counted_on = || {
                let attachment = node.session.attachment();
                attachment.is_some_and(|attachment| listener.counts_on(&attachment))
            };
            // A wait there, or a command under way, has the node as well.
            serving.contains(address) || Arc::strong_count(node) > 1 || counted_on()
        });
    }
}

/// A node that may tell of the others.
enum Seed {
    Reached(Arc<Address>, Arc<Node>),
    Unknown(Box<Connector>),
}

impl Seed {
    async fn ask(self) -> Result<(Address, Vec<Range>), Error> {
        match self {
            Self::Reached(address, node) => {
                let ranges = node.commands.send(request::slots()).await?;
                Ok((Address::clone(&address), ranges))
            }
            Self::Unknown(connector) => {
                let ranges = connector.ask(request::slots()).await?;
                Ok((connector.address(), ranges))
            }
        }
    }
}

impl Drop for Cluster {
    fn drop(&mut self) {
        self.refreshing.abort();
    }
}

/// Asks whenever that is requested, and now and then without; until the client has gone.
async fn keep_fresh(cluster: Weak<Cluster>, stale: Arc<Notify>) {
    let mut backoff = Backoff::new();
    let mut seen = 0;
    loop {
        // Without a request it is time all the same.
        let requested = timeout(EVERY, stale.notified()).await.is_ok();
        let Some(cluster) = cluster.upgrade() else {
            return;
        };
        if cluster.refresh().await.is_err() {
            cluster.request_refresh();
        }
        // Requests that change nothing, as while a node is down until it is replaced, are served
        // ever more slowly.
        let moves = *cluster.moves.borrow();
        if !requested || moves != seen {
            (backoff, seen) = (Backoff::new(), moves);
        }
        if let Some(listener) = cluster.listener.upgrade() {
            cluster.leave_idle(&*listener);
            let slots = cluster.take_moved();
            if !slots.is_empty() {
                // The node where they are now does not know yet whose session the holds belong to,
                // and that where they were will not be asked again.
                listener.moved(&slots);
            }
        }
        drop(cluster);
        sleep(PAUSE.max(backoff.next())).await;
    }
}

/// So long a node that was asked may be silent until the next is asked too.
const HEDGE: Duration = Duration::from_millis(200);

/// So long it is not asked again, however many say that a slot has moved.
const PAUSE: Duration = Duration::from_millis(100);

/// So often it is asked when nobody says anything: a slot that moves is no news to who neither asks
/// for its locks nor waits for them.
const EVERY: Duration = Duration::from_secs(5);

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_node_without_a_name_is_the_only_one_at_its_port() {
        let at = |(host, port): (&str, u16)| Address {
            host: host.into(),
            port,
        };
        let map = Map {
            table: Table::new(),
            nodes: HashMap::new(),
            known: [("a", 1), ("b", 2), ("c", 2)].map(at).into(),
            moved: HashSet::new(),
        };
        assert_eq!(map.at_port(1).as_deref(), Some("a"));
        assert_eq!(map.at_port(2), None, "it may be either");
        assert_eq!(map.at_port(3), None);
    }
}
