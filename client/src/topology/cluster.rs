//! The nodes of a cluster: who serves which slot, found out when somebody says otherwise.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;
use std::time::Duration;

use futures_util::future::{BoxFuture, FutureExt};
use futures_util::stream::{FuturesUnordered, StreamExt};
use tokio::time::{Instant, sleep, timeout};

use crate::topology::{Name, Names, Node, Route, Router, Table, slot_of};
use crate::wire::{
    Address, Connector, Listener, NAMELESS, Range, Redirect, ServerId, Session, request,
};
use crate::{Backoff, Error, locked};

/// A cluster, as far as it is known. Its nodes are connected to when something is to be asked
/// there.
#[derive(Default)]
pub(super) struct Map {
    names: Names,
    table: Table,
    nodes: BTreeMap<Arc<Name>, Arc<Node>>,
    /// Nodes in whose place there are others now. They do not attach any more, and are left as soon
    /// as nobody has anything there.
    replaced: Vec<Arc<Node>>,
    /// Slots that have moved, and whose holds are yet to be confirmed where they are now.
    moved: BTreeSet<u16>,
    /// How often has been asked.
    turn: usize,
}

/// Who serves what, as the node at this address says.
type Told = Result<(Address, Vec<Range>), Error>;

impl Map {
    /// Takes over what the node at `asked` says: the slots that are to be asked for at other nodes
    /// than before.
    fn learn(&mut self, ranges: &[Range], asked: &Address) -> BTreeSet<u16> {
        self.names.learn(ranges, asked, &self.table.primaries());
        let mut moved = self.table.update(ranges, asked);
        self.replace(&mut moved);
        moved
    }

    /// Calls the nodes by the names that their addresses have now, and takes out those that are not
    /// where their names say: their slots have `moved`.
    ///
    /// A node may be told by another address each time, depending on who is asked. So it may stay
    /// at an address that is not told any more, but only as long as it is attached to the server
    /// that it found there first: any other may be a stranger that has the address now, and would
    /// grant what is held at the node.
    fn replace(&mut self, moved: &mut BTreeSet<u16>) {
        let names = &self.names;
        let stays = |(name, node): &(Arc<Name>, Arc<Node>)| {
            let is_its_name = names.of(&node.address) == *name;
            is_its_name && (node.session.is_where_it_began() || names.is_at(name, &node.address))
        };
        let (stay, mut others): (Vec<_>, Vec<_>) =
            std::mem::take(&mut self.nodes).into_iter().partition(stays);
        self.nodes.extend(stay);
        // Of two that are one by now, that stays which has the session.
        others.sort_by_key(|(_, node)| !node.is_attached());
        for (name, node) in others {
            let present = self.names.of(&node.address);
            let is_provisional = matches!(*name, Name::At(_));
            if is_provisional && !self.nodes.contains_key(&present) {
                self.nodes.insert(present, node);
            } else {
                self.replaced.push(node);
                moved.extend(self.table.slots_of(&name));
            }
        }
    }

    /// Whether the node of this id was said to be at other addresses only when it was told of last.
    fn is_told_elsewhere(&self, node: &Arc<Node>) -> bool {
        let mut nodes = self.nodes.iter();
        let name = nodes.find(|(_, one)| Arc::ptr_eq(one, node));
        name.is_some_and(|(name, _)| {
            matches!(**name, Name::Id(_)) && !self.names.is_at(name, &node.address)
        })
    }

    fn is_replaced(&self, node: &Arc<Node>) -> bool {
        self.replaced.iter().any(|one| Arc::ptr_eq(one, node))
    }
}

impl Router {
    /// Waits until the first try to reach a server has ended: the error, if it failed. In a
    /// cluster, asks who is there, and waits until the session is attached at one of them.
    pub(crate) async fn tried(&self) -> Result<(), Error> {
        if let Some(only) = &self.only {
            return only.tried().await;
        }
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
    pub(super) fn home(&self, name: &[u8]) -> Arc<Node> {
        if let Some(only) = &self.only {
            return Arc::clone(only);
        }
        let mut map = locked(&self.map);
        let home = map.table.get(slot_of(name)).cloned();
        let somebody = || map.nodes.keys().next().cloned();
        let seed = || map.names.of(&self.first.address());
        let name = home.or_else(somebody).unwrap_or_else(seed);
        self.node(&mut map, &name)
    }

    /// The node of this name; nothing is connected yet if it is new.
    fn node(&self, map: &mut Map, name: &Arc<Name>) -> Arc<Node> {
        let node = map.nodes.entry(Arc::clone(name)).or_insert_with(|| {
            let address = map.names.address(name);
            let address = address.unwrap_or_else(|| self.first.address());
            let connector = self.first.other(&address);
            Node::start(connector, &self.identity)
        });
        node.twin().unwrap_or_else(|| Arc::clone(node))
    }

    /// The node that has this one's place by now.
    pub(super) fn present(&self, node: &Node) -> Arc<Node> {
        let mut map = locked(&self.map);
        let name = map.names.of(&node.address);
        self.node(&mut map, &name)
    }

    /// Whether the node with this session may attach to the server that it has reached. One at
    /// which another node is attached is the same by another name: that one takes this one's place.
    pub(crate) fn may_attach(&self, session: &Session, server: &ServerId) -> bool {
        let mut map = locked(&self.map);
        let mut nodes = map.nodes.values().chain(&map.replaced);
        // The only server is not among them.
        let is_of_it = |node: &&Arc<Node>| node.session.number == session.number;
        let node = nodes.find(is_of_it).cloned();
        let Some(node) = &node else { return true };
        let mut others = map.nodes.values().filter(|one| !Arc::ptr_eq(one, node));
        let twin = others.find(|one| one.is_attached_to(server)).cloned();
        if node.set_twin(twin.as_ref()) {
            let name = map.names.of(&node.address);
            let slots: Vec<_> = map.table.slots_of(&name).collect();
            self.has_moved(&mut map, slots);
        }
        // Where it is not any more by what was told, a stranger may be: it is asked who serves what
        // first.
        if map.is_told_elsewhere(node) && node.session.began_elsewhere(server) {
            drop(map);
            self.request_refresh();
            return false;
        }
        // The node in its place would be taken over by one that is left soon.
        twin.is_none() && !map.is_replaced(node)
    }

    /// Where a command has to go instead, if a node has sent us on with this error; with one server
    /// there is nowhere else. If a slot has moved, others may have too, so this and other errors
    /// may make us look up who serves what.
    pub(crate) fn redirected(&self, error: &Error, from: &Route) -> Option<Route> {
        if !self.are_several() {
            return None;
        }
        let Some(redirect) = error.refusal().and_then(Redirect::read) else {
            if error.is_unanswered() {
                self.request_refresh();
            }
            return None;
        };
        let mut map = locked(&self.map);
        let nameless = redirect.host.as_deref() == Some(NAMELESS);
        let only = nameless.then(|| map.names.at_port(redirect.port)).flatten();
        let host = redirect.host.filter(|_| !nameless);
        let name =
            only.unwrap_or_else(|| map.names.of(&from.node.address.or_at(host, redirect.port)));
        if !redirect.only_this {
            if map.table.set(redirect.slot, &name) {
                self.has_moved(&mut map, [redirect.slot]);
            }
            self.request_refresh();
        }
        let sent_by = redirect.only_this.then(|| Arc::clone(&from.node));
        let node = self.node(&mut map, &name);
        Some(Route { node, sent_by })
    }

    /// Somebody is not where he was, or cannot be reached: who serves what is asked soon.
    pub(crate) fn request_refresh(&self) {
        self.stale.notify_one();
    }

    fn has_moved(&self, map: &mut Map, slots: impl IntoIterator<Item = u16>) {
        map.moved.extend(slots);
        self.moves.notify_waiters();
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
    async fn ask_around(&self) -> Told {
        let mut whom = self.whom_to_ask().into_iter();
        let mut asked = FuturesUnordered::new();
        let mut last = Error::no_cluster();
        loop {
            asked.extend(whom.next());
            match timeout(HEDGE, asked.next()).await {
                Ok(Some(Ok(answer))) => return Ok(answer),
                Ok(Some(Err(error))) => last = error,
                Ok(None) => return Err(last),
                Err(_) => {}
            }
        }
    }

    /// First those to whom there is a connection, each time another of them: one may have been cut
    /// off from the cluster and not know it.
    fn whom_to_ask(&self) -> Vec<BoxFuture<'static, Told>> {
        let mut map = locked(&self.map);
        let attached = map.nodes.values().filter(|node| node.is_attached());
        let mut whom: Vec<_> = attached.cloned().map(|node| ask(node).boxed()).collect();
        let first = map.turn.checked_rem(whom.len()).unwrap_or_default();
        whom.rotate_left(first);
        map.turn = map.turn.wrapping_add(1);
        let known = map.names.addresses().map(|known| self.first.other(known));
        let seeds = std::iter::once(&self.first).chain(&self.seeds).cloned();
        whom.extend(known.chain(seeds).map(|seed| ask_anew(seed).boxed()));
        whom
    }

    /// Asks whenever that is requested, and now and then without; until it is aborted.
    pub(crate) async fn keep_fresh(self: Arc<Self>) {
        let mut backoff = Backoff::new();
        let mut asked = Instant::now();
        loop {
            // Without a request it is time all the same, however long the pause was.
            let next = EVERY.saturating_sub(asked.elapsed());
            let requested = timeout(next, self.stale.notified()).await.is_ok();
            asked = Instant::now();
            if self.refresh().await.is_err() {
                self.request_refresh();
            }
            let moved = std::mem::take(&mut locked(&self.map).moved);
            // Requests that change nothing, as while a node is down until it is replaced, are
            // served ever more slowly.
            if !requested || !moved.is_empty() {
                backoff = Backoff::new();
            }
            if let Some(listener) = self.identity.listener.upgrade() {
                self.leave_idle(&*listener);
                if !moved.is_empty() {
                    // The node where they are now does not know yet whose session the holds belong
                    // to, and that where they were will not be asked again.
                    listener.moved(&moved);
                }
            }
            sleep(PAUSE.max(backoff.next())).await;
        }
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
        let twin = |name| map.nodes.get(name)?.twin();
        let twins: Vec<_> = serving.iter().filter_map(twin).collect();
        map.nodes
            .retain(|name, node| serving.contains(name) || is_used(node));
        drop(twins);
        map.replaced.retain(is_used);
    }
}

async fn ask(node: Arc<Node>) -> Told {
    let (address, sent_by) = (node.address.clone(), None);
    let ranges = Route { node, sent_by }.send(request::slots()).await?;
    Ok((address, ranges))
}

async fn ask_anew(seed: Connector) -> Told {
    Ok((seed.address(), seed.ask(request::slots()).await?))
}

/// So long a node that was asked may be silent until the next is asked too.
const HEDGE: Duration = Duration::from_millis(200);

/// So long it is not asked again, however many say that a slot has moved.
const PAUSE: Duration = Duration::from_millis(100);

/// So often it is asked when nobody says anything: a slot that moves is no news to who neither asks
/// for its locks nor waits for them. It hears of it within five seconds, the answer included.
const EVERY: Duration = Duration::from_millis(4_500);

#[cfg(test)]
mod tests {
    use tokio::runtime::Handle;

    use super::*;
    use std::sync::Weak;

    use crate::flows::Context;
    use crate::topology::Identity;
    use crate::wire::{Dialer, Member, named};

    fn address(host: &str) -> Address {
        let host = host.into();
        Address { host, port: 1 }
    }

    /// Puts a node into the map under this name. It reaches nobody.
    fn add(map: &mut Map, name: &Name, host: &str) -> Arc<Node> {
        let second = Duration::from_secs(1);
        let connector = Connector::new("redis://127.0.0.1", &[], &Dialer::within(second));
        let connector = connector.expect("it can be read");
        let identity = Identity {
            session: "client".into(),
            grace: second,
            durability: None,
            listener: Weak::<Context>::new(),
            runtime: Handle::current(),
        };
        let node = Node::start(connector.other(&address(host)), &identity);
        map.nodes.insert(Arc::new(name.clone()), Arc::clone(&node));
        node
    }

    /// Has the map learn that nodes of these ids at these hosts serve one slot each.
    fn learn(map: &mut Map, told: &[(&str, &str, &[&str])]) -> BTreeSet<u16> {
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
        let mut map = Map::default();
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
        let mut map = Map::default();
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
        let mut map = Map::default();
        learn(&mut map, &[("x", "a", &[]), ("y", "b", &[])]);
        let nodes = [("x", "a"), ("y", "b")].map(|(name, host)| add(&mut map, &id(name), host));
        let moved = learn(&mut map, &[("x", "b", &[]), ("y", "a", &[])]);
        assert_eq!(moved, BTreeSet::from([0, 1]));
        assert!(map.nodes.is_empty());
        assert!(nodes.iter().all(|node| map.is_replaced(node)));
    }

    #[tokio::test]
    async fn a_node_that_is_not_reached_is_looked_for_where_it_is_said_to_be() {
        let mut map = Map::default();
        learn(&mut map, &[("x", "a", &[])]);
        let node = add(&mut map, &id("x"), "a");
        assert_eq!(learn(&mut map, &[("x", "b", &[])]), BTreeSet::from([0]));
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
        let mut map = Map::default();
        let nodes = ["a", "b"].map(|host| add(&mut map, &Name::At(address(host)), host));
        assert!(learn(&mut map, &[("", "a", &[])]).is_empty());
        assert_eq!(learn(&mut map, &[("", "b", &[])]), BTreeSet::from([0]));
        assert!(nodes.iter().all(|node| !map.is_replaced(node)));
    }
}
