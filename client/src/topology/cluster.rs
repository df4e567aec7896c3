//! The nodes of a cluster: who serves which slot, found out when somebody says otherwise.

use std::collections::{HashMap, HashSet};
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, Weak};
use std::time::Duration;

use tokio::runtime::Handle;
use tokio::sync::{Notify, watch};
use tokio::task::{AbortHandle, JoinSet};
use tokio::time::{Instant, sleep, timeout};

use crate::backoff::Backoff;
use crate::error::Error;
use crate::locked;
use crate::topology::names::{Name, Names};
use crate::topology::node::{Identity, Listener, Node};
use crate::topology::router::Route;
use crate::topology::slots::{Table, slot_of};
use crate::wire::connection::{Connector, ServerId};
use crate::wire::endpoint::Address;
use crate::wire::events::STRAY_FOR;
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
    this: Weak<Self>,
    map: Mutex<Map>,
    /// How often a slot has been seen to move.
    moves: watch::Sender<u64>,
    stale: Arc<Notify>,
    /// How often has been asked.
    turn: AtomicUsize,
    refreshing: AbortHandle,
}

struct Map {
    names: Names,
    table: Table,
    nodes: HashMap<Arc<Name>, Arc<Node>>,
    /// Nodes in whose place there are others now. They do not attach any more, and are left as soon
    /// as nobody has anything there.
    replaced: Vec<Arc<Node>>,
    calls: Vec<Call>,
    /// Slots that have moved, and whose holds are yet to be confirmed where they are now.
    moved: HashSet<u16>,
}

/// The session was, or is about to be, attached by a node.
struct Call {
    node: Weak<Node>,
    server: ServerId,
    at: Instant,
}

impl Call {
    fn is_by(&self, node: &Arc<Node>) -> bool {
        std::ptr::eq(self.node.as_ptr(), Arc::as_ptr(node))
    }

    /// Whether it can be what has taken the session over there just now. It may have been carried
    /// out without our having heard its answer, even if the node is gone.
    fn may_have_taken_over(&self, server: &ServerId) -> bool {
        let is_there = |node: Arc<Node>| node.is_attached_to(server);
        let is_recent = self.at.elapsed() < STRAY_FOR && self.server.may_be(server);
        is_recent || self.node.upgrade().is_some_and(is_there)
    }
}

impl Map {
    fn new() -> Self {
        Self {
            names: Names::default(),
            table: Table::new(),
            nodes: HashMap::new(),
            replaced: Vec::new(),
            calls: Vec::new(),
            moved: HashSet::new(),
        }
    }

    /// Takes over what the node at `asked` says: the slots that are to be asked for at other nodes
    /// than before.
    fn learn(&mut self, ranges: &[Range], asked: &Address) -> HashSet<u16> {
        self.names.learn(ranges, asked, &self.table.primaries());
        let mut moved = self.table.update(ranges, asked);
        for name in self.replace() {
            moved.extend(self.table.slots_of(&name));
        }
        moved
    }

    /// Calls the nodes by the names that their addresses have now, and takes out those that are not
    /// where their names say: which names these were.
    ///
    /// A node may be told by another address each time, depending on who is asked. So it may stay
    /// at an address that is not told any more, but only as long as it is attached to the server
    /// that it found there first: any other may be a stranger that has the address now, and would
    /// grant what is held at the node.
    fn replace(&mut self) -> Vec<Arc<Name>> {
        let names = &self.names;
        let stays = |(name, node): &(Arc<Name>, Arc<Node>)| {
            let is_its_name = names.of(&node.address) == *name;
            is_its_name && (node.session.is_where_it_began() || names.is_at(name, &node.address))
        };
        let (stay, mut others): (Vec<_>, Vec<_>) = self.nodes.drain().partition(stays);
        self.nodes.extend(stay);
        // Of two that are one by now, that stays which has the session.
        others.sort_by_key(|(_, node)| !node.is_attached());
        let mut replaced = Vec::new();
        for (name, node) in others {
            let present = self.names.of(&node.address);
            let is_provisional = matches!(*name, Name::At(_));
            if is_provisional && !self.nodes.contains_key(&present) {
                self.nodes.insert(present, node);
            } else {
                self.replaced.push(node);
                replaced.push(name);
            }
        }
        replaced
    }

    fn is_replaced(&self, node: &Arc<Node>) -> bool {
        self.replaced.iter().any(|one| Arc::ptr_eq(one, node))
    }

    /// Another node that is attached to this server.
    fn twin(&self, node: &Arc<Node>, server: &ServerId) -> Option<Arc<Node>> {
        let mut others = self.nodes.values().filter(|one| !Arc::ptr_eq(one, node));
        others.find(|one| one.is_attached_to(server)).cloned()
    }

    fn slots_of(&self, node: &Arc<Node>) -> Vec<u16> {
        let mut nodes = self.nodes.iter();
        let name = nodes.find(|(_, one)| Arc::ptr_eq(one, node));
        name.map_or_else(Vec::new, |(name, _)| self.table.slots_of(name).collect())
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
        Arc::new_cyclic(|cluster| {
            let stale = Arc::new(Notify::new());
            let refreshing = keep_fresh(Weak::clone(cluster), Arc::clone(&stale));
            Self {
                first,
                seeds,
                identity,
                listener,
                this: Weak::clone(cluster),
                map: Mutex::new(Map::new()),
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
        for name in primaries {
            let node = self.node(&mut locked(&self.map), &name);
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
        let seed = || map.names.of(&self.first.address());
        let name = home.or_else(somebody).unwrap_or_else(seed);
        self.node(&mut map, &name)
    }

    /// The node of this name; nothing is connected yet if it is new.
    fn node(&self, map: &mut Map, name: &Arc<Name>) -> Arc<Node> {
        let new = || {
            let address = map.names.address(name);
            let connector = self
                .first
                .other(&address.unwrap_or_else(|| self.first.address()));
            let (identity, listener) = (self.identity.clone(), Weak::clone(&self.listener));
            let cluster = Some(Weak::clone(&self.this));
            Node::start(&self.runtime, connector, identity, listener, cluster)
        };
        let node = map.nodes.entry(Arc::clone(name)).or_insert_with(new);
        node.twin().unwrap_or_else(|| Arc::clone(node))
    }

    /// The node that has this one's place by now.
    pub(crate) fn present(&self, node: &Arc<Node>) -> Arc<Node> {
        let mut map = locked(&self.map);
        if map.is_replaced(node) {
            let name = map.names.of(&node.address);
            return self.node(&mut map, &name);
        }
        node.twin().unwrap_or_else(|| Arc::clone(node))
    }

    /// Whether a node may attach to the server that it has reached. One at which another node is
    /// attached is the same by another name: that one takes this one's place.
    pub(crate) fn may_attach(&self, node: &Arc<Node>, server: &ServerId) -> bool {
        let mut map = locked(&self.map);
        let twin = map.twin(node, server);
        if node.set_twin(twin.as_ref()) {
            let slots = map.slots_of(node);
            self.has_moved(&mut map, slots);
        }
        // The node in its place would be taken over by one that is left soon.
        let may = twin.is_none() && !map.is_replaced(node);
        if may {
            map.calls
                .retain(|call| !call.is_by(node) && call.may_have_taken_over(&call.server));
            map.calls.push(Call {
                node: Arc::downgrade(node),
                server: server.clone(),
                at: Instant::now(),
            });
        }
        may
    }

    /// Whether it may be another node that has taken the session over from this one.
    pub(crate) fn may_be_a_twin(&self, node: &Arc<Node>, server: &ServerId) -> bool {
        let map = locked(&self.map);
        let mut others = map.calls.iter().filter(|call| !call.is_by(node));
        others.any(|call| call.may_have_taken_over(server))
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
        let at = |host| map.names.of(&from.address.or_at(host, redirect.port));
        let name = match redirect.host {
            Some(host) if *host == *NAMELESS => {
                let only = map.names.at_port(redirect.port);
                only.unwrap_or_else(|| at(None))
            }
            host => at(host),
        };
        if redirect.only_this {
            let node = self.node(&mut map, &name);
            return Some(Route::asking(Arc::clone(from), node));
        }
        if map.table.set(redirect.slot, &name) {
            self.has_moved(&mut map, [redirect.slot]);
        }
        self.request_refresh();
        Some(Route::to(self.node(&mut map, &name)))
    }

    fn has_moved(&self, map: &mut Map, slots: impl IntoIterator<Item = u16>) {
        map.moved.extend(slots);
        self.moves
            .send_modify(|moves| *moves = moves.wrapping_add(1));
    }

    /// Asks who serves what, and takes it over.
    async fn refresh(&self) -> Result<(), Error> {
        let (asked, ranges) = self.ask_around().await?;
        let mut map = locked(&self.map);
        let before = map.replaced.len();
        let moved = map.learn(&ranges, &asked);
        // Who is about to reach a node that serves nothing has to look again as well.
        if !moved.is_empty() || map.replaced.len() > before {
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
        let reached = map.nodes.values().filter(|node| node.is_attached());
        let mut whom: Vec<_> = reached.cloned().map(Seed::Reached).collect();
        if !whom.is_empty() {
            let turn = self.turn.fetch_add(1, Ordering::Relaxed);
            let first = turn.checked_rem(whom.len()).unwrap_or_default();
            whom.rotate_left(first);
        }
        let known = map
            .names
            .addresses()
            .map(|address| self.first.other(address));
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
        let is_used = |node: &Arc<Node>| {
            // A wait there, or a command under way, has the node as well.
            Arc::strong_count(node) > 1 || listener.counts_on(&node.session)
        };
        // In this time it has those as well that are attached in the place of one that serves.
        let by_name = serving.iter().filter_map(|name| map.nodes.get(name));
        let twins: Vec<_> = by_name.filter_map(|node| node.twin()).collect();
        map.nodes
            .retain(|name, node| serving.contains(name) || is_used(node));
        drop(twins);
        map.replaced.retain(is_used);
    }
}

/// A node that may tell of the others.
enum Seed {
    Reached(Arc<Node>),
    Unknown(Box<Connector>),
}

impl Seed {
    async fn ask(self) -> Result<(Address, Vec<Range>), Error> {
        match self {
            Self::Reached(node) => {
                let ranges = node.commands.send(request::slots()).await?;
                Ok((node.address.clone(), ranges))
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
    use crate::flows::Context;
    use crate::wire::endpoint::{Certificates, Endpoint};
    use crate::wire::reply::{Member, named};

    fn address(host: &str) -> Address {
        let host = host.into();
        Address { host, port: 1 }
    }

    /// Puts a node into the map under this name. It reaches nobody.
    fn add(map: &mut Map, name: &Name, host: &str) -> Arc<Node> {
        let second = Duration::from_secs(1);
        let place = Endpoint::new("redis://127.0.0.1", &[], &Certificates::default());
        let connector = Connector::new(place.expect("it can be read"), second);
        let identity = Identity {
            session: "client".into(),
            grace: second,
            durability: None,
        };
        let node = Node::start(
            &Handle::current(),
            connector.other(&address(host)),
            identity,
            Weak::<Context>::new(),
            None,
        );
        map.nodes.insert(Arc::new(name.clone()), Arc::clone(&node));
        node
    }

    /// Has the map learn that nodes of these ids at these hosts serve one slot each.
    fn learn(map: &mut Map, told: &[(&str, &str, &[&str])]) -> HashSet<u16> {
        let ranges = (0..)
            .zip(told)
            .map(|(slot, (id, host, other_hosts))| Range {
                first: slot,
                last: slot,
                nodes: vec![Member {
                    id: named(id),
                    host: named(host),
                    port: 1,
                    other_hosts: other_hosts.iter().map(|host| Box::from(*host)).collect(),
                }],
            });
        map.learn(&ranges.collect::<Vec<_>>(), &address("asked"))
    }

    fn id(id: &str) -> Name {
        Name::Id(id.into())
    }

    #[tokio::test]
    async fn a_node_stays_the_same_when_its_id_is_told_and_when_it_is_called_otherwise() {
        let mut map = Map::new();
        let first = add(&mut map, &Name::At(address("a")), "a");
        let second = add(&mut map, &Name::At(address("b")), "b");
        learn(&mut map, &[("x", "a", &[]), ("y", "b", &[])]);
        for told in ["c", "a", ""] {
            let moved = learn(&mut map, &[("x", told, &["a"]), ("y", "b", &[told])]);
            assert!(moved.is_empty(), "{told}: {moved:?}");
        }
        assert!(Arc::ptr_eq(&map.nodes[&id("x")], &first));
        assert!(Arc::ptr_eq(&map.nodes[&id("y")], &second));
        assert!(map.replaced.is_empty());
    }

    #[tokio::test]
    async fn two_nodes_that_are_one_by_its_id_become_one() {
        let mut map = Map::new();
        let nodes = ["a", "b"].map(|host| add(&mut map, &Name::At(address(host)), host));
        learn(&mut map, &[("x", "a", &["b"])]);
        assert_eq!((map.nodes.len(), map.replaced.len()), (1, 1));
        let stays = &map.nodes[&id("x")];
        assert!(nodes.iter().any(|node| Arc::ptr_eq(node, stays)));
        assert!(!map.is_replaced(stays));
        // So does one of which a redirect told while the id was known.
        let third = add(&mut map, &Name::At(address("c")), "c");
        learn(&mut map, &[("x", "a", &["b", "c"])]);
        assert!(map.is_replaced(&third));
    }

    #[tokio::test]
    async fn nodes_that_have_changed_places_are_connected_to_anew() {
        let mut map = Map::new();
        learn(&mut map, &[("x", "a", &[]), ("y", "b", &[])]);
        let nodes = [("x", "a"), ("y", "b")].map(|(name, host)| add(&mut map, &id(name), host));
        let moved = learn(&mut map, &[("x", "b", &[]), ("y", "a", &[])]);
        assert_eq!(moved, HashSet::from([0, 1]));
        assert!(map.nodes.is_empty());
        assert!(nodes.iter().all(|node| map.is_replaced(node)));
    }

    #[tokio::test]
    async fn a_node_that_is_not_reached_is_looked_for_where_it_is_said_to_be() {
        let mut map = Map::new();
        learn(&mut map, &[("x", "a", &[])]);
        let node = add(&mut map, &id("x"), "a");
        assert_eq!(learn(&mut map, &[("x", "b", &[])]), HashSet::from([0]));
        assert!(map.is_replaced(&node));
        assert_eq!(map.names.address(&id("x")), Some(address("b")));
        assert_eq!(
            *map.names.of(&address("a")),
            id("x"),
            "a redirect may say so"
        );
    }

    #[tokio::test]
    async fn without_ids_each_address_is_a_node() {
        let mut map = Map::new();
        let nodes = ["a", "b"].map(|host| add(&mut map, &Name::At(address(host)), host));
        assert!(learn(&mut map, &[("", "a", &[])]).is_empty());
        assert_eq!(learn(&mut map, &[("", "b", &[])]), HashSet::from([0]));
        assert!(nodes.iter().all(|node| !map.is_replaced(node)));
    }
}
