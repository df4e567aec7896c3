//! The nodes of a cluster: who serves which slot. A node is its id, by whatever address it is
//! reached. The map is read when a connection is opened or a lock is not where it was.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::{Arc, Weak};
use std::time::Duration;

use futures_util::stream::{FuturesUnordered, StreamExt};
use tokio::time::{sleep, timeout};

use crate::topology::{Node, Route, Router, Slots, slot_of};
use crate::wire::reply::read_slots;
use crate::wire::{Address, Connector, Member, NAMELESS, Range, Redirect, request};
use crate::{Backoff, Error, locked};

/// A node's id.
pub(super) type Id = Arc<str>;

#[derive(Default)]
pub(super) struct Map {
    slots: Slots,
    /// By which addresses each is reached; the first is the one it wants to be called by.
    addresses: BTreeMap<Id, Vec<Address>>,
    pub(super) nodes: BTreeMap<Id, Arc<Node>>,
    /// Whom to ask first, so that not all is asked of one.
    turn: usize,
}

/// Receives the slots that have moved.
pub(crate) trait Moves: Send + Sync {
    /// These slots are served by another node than before, or nodes have been retired.
    fn moved(self: Arc<Self>, slots: &BTreeSet<u16>);
}

impl Map {
    /// Takes note of what the node at this address has told. The slots that have moved; `None` if
    /// none has, and no node is retired.
    fn learn(&mut self, ranges: &[Range], asked: &Address) -> Option<BTreeSet<u16>> {
        for member in ranges.iter().flat_map(|range| &range.nodes) {
            let hosts = std::iter::once(member.host.clone());
            let hosts = hosts.chain(member.other_hosts.iter().cloned().map(Some));
            let addresses = hosts.map(|host| asked.or_at(host, member.port)).collect();
            self.addresses.insert(id_of(member, asked), addresses);
        }
        let mut moved = BTreeSet::new();
        for range in ranges {
            if let Some(primary) = range.nodes.first() {
                let id = id_of(primary, asked);
                moved.extend((range.first..=range.last).filter(|slot| self.slots.set(*slot, &id)));
            }
        }
        let before = self.nodes.len();
        self.retire(&mut moved);
        let is_news = !moved.is_empty() || self.nodes.len() < before;
        is_news.then_some(moved)
    }

    /// Leaves the nodes that serve nothing any more, or are at another address by now.
    fn retire(&mut self, moved: &mut BTreeSet<u16>) {
        let serving = self.slots.ids();
        let (addresses, slots) = (&mut self.addresses, &self.slots);
        addresses.retain(|id, _| serving.contains(id));
        self.nodes.retain(|id, node| {
            let known = addresses.get(id);
            let stays = known.is_some_and(|known| known.contains(&node.address));
            if !stays {
                node.session.retire();
                moved.extend(slots.of(id));
            }
            stays
        });
    }

    /// The node at this address. One that should be called by its name and has none is known by
    /// its port, if that is one node's.
    fn at(&self, host: Option<&str>, port: u16) -> Option<Id> {
        let is_it = |address: &&Address| {
            address.port == port && host.is_none_or(|host| *address.host == *host)
        };
        let mut there = self
            .addresses
            .iter()
            .filter(|(_, known)| known.iter().any(|one| is_it(&one)));
        let (only, _) = there.next()?;
        let is_only = host.is_some() || there.next().is_none();
        is_only.then(|| Arc::clone(only))
    }
}

fn id_of(member: &Member, asked: &Address) -> Id {
    let at = || {
        let address = asked.or_at(member.host.clone(), member.port);
        format!("{NO_ID}{}:{}", address.host, address.port).into()
    };
    member.id.as_deref().map_or_else(at, Arc::from)
}

impl Router {
    pub(super) async fn cluster_tried(&self) -> Result<(), Error> {
        self.refresh().await?;
        let ids = locked(&self.map).slots.ids();
        let mut tried = Err(Error::no_cluster());
        for id in ids {
            let node = self.node(&mut locked(&self.map), &id);
            tried = node.session.tried().await;
            if tried.as_ref().err().is_none_or(Error::is_final) {
                break;
            }
        }
        tried
    }

    /// Somebody, if nobody is known: that node says who serves it.
    pub(super) fn home_in_cluster(&self, name: &[u8]) -> Arc<Node> {
        let mut map = locked(&self.map);
        let home = map.slots.get(slot_of(name)).cloned();
        let somebody = || map.nodes.keys().next().cloned();
        let first = || Id::from("");
        let id = home.or_else(somebody).unwrap_or_else(first);
        self.node(&mut map, &id)
    }

    fn node(&self, map: &mut Map, id: &Id) -> Arc<Node> {
        let Map {
            nodes, addresses, ..
        } = map;
        let start = || {
            let address = addresses.get(id).and_then(|known| known.first());
            let connector = address.map(|address| self.first.other(address));
            let connector = connector.unwrap_or_else(|| self.first.clone());
            let told = Some(Arc::clone(id)).filter(|id| !id.is_empty() && !id.starts_with(NO_ID));
            Node::start(connector, told, &self.identity)
        };
        Arc::clone(nodes.entry(Arc::clone(id)).or_insert_with(start))
    }

    pub(super) fn follow(&self, redirect: &Redirect) -> Option<Route> {
        let mut map = locked(&self.map);
        let nameless = redirect.host.as_deref().filter(|host| *host != NAMELESS);
        let there = map.at(nameless, redirect.port);
        if !redirect.only_this || there.is_none() {
            self.request_refresh();
        }
        let id = there?;
        let node = self.node(&mut map, &id);
        Some(Route {
            node,
            asking: redirect.only_this,
        })
    }

    /// Reads the map: see [`Map::learn`].
    async fn refresh(&self) -> Result<Option<BTreeSet<u16>>, Error> {
        let (asked, ranges) = self.ask_around().await?;
        Ok(locked(&self.map).learn(&ranges, &asked))
    }

    /// Asks one node after the other, and the next before one that is slow has answered.
    async fn ask_around(&self) -> Result<(Address, Vec<Range>), Error> {
        let mut whom = self.whom_to_ask().into_iter();
        let mut asked = FuturesUnordered::new();
        let mut last = Error::no_cluster();
        loop {
            asked.extend(whom.next().map(|one| async move {
                Ok((one.address(), one.ask(request::slots(), read_slots).await?))
            }));
            match timeout(HEDGE, asked.next()).await {
                Ok(Some(Ok(answer))) => return Ok(answer),
                Ok(Some(Err(error))) => last = error,
                Ok(None) => return Err(last),
                Err(_) => {}
            }
        }
    }

    fn whom_to_ask(&self) -> Vec<Connector> {
        let mut map = locked(&self.map);
        let firsts = map.addresses.values().filter_map(|known| known.first());
        let mut whom: Vec<_> = firsts.map(|known| self.first.other(known)).collect();
        let first = map.turn.checked_rem(whom.len()).unwrap_or_default();
        whom.rotate_left(first);
        map.turn = map.turn.wrapping_add(1);
        whom.extend(std::iter::once(&self.first).chain(&self.seeds).cloned());
        whom
    }

    /// Reads the map whenever that was requested, until it is aborted, with the client. Requests
    /// that change nothing, as while a node is down until it is replaced, are served ever more
    /// slowly.
    pub(crate) async fn keep_fresh(&self, moves: Weak<dyn Moves>) {
        let mut backoff = Backoff::new();
        loop {
            self.stale.notified().await;
            let read = self.refresh().await;
            if read.is_err() {
                self.request_refresh();
            }
            if let Ok(Some(moved)) = read
                && let Some(client) = moves.upgrade()
            {
                backoff = Backoff::new();
                client.moved(&moved);
            }
            sleep(PAUSE.max(backoff.next())).await;
        }
    }
}

/// Of a node whose id was not told, behind which stands its address.
const NO_ID: &str = "at ";

/// A node that has not told for so long is asked no more alone.
const HEDGE: Duration = Duration::from_millis(200);

/// From the end of one question to the next at least.
const PAUSE: Duration = Duration::from_millis(100);

#[cfg(test)]
mod tests {
    use std::sync::Weak;

    use tokio::runtime::Handle;

    use super::*;
    use crate::locks::Context;
    use crate::topology::Identity;
    use crate::wire::{Dialer, named};

    fn address(host: &str) -> Address {
        let host = host.into();
        Address { host, port: 1 }
    }

    fn learn(map: &mut Map, told: &[(&str, &str, &[&str])]) -> Option<BTreeSet<u16>> {
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

    fn add(map: &mut Map, id: &str, host: &str) -> Arc<Node> {
        let second = Duration::from_secs(1);
        let connector = Connector::new("redis://127.0.0.1", &[], &Dialer::within(second));
        let connector = connector.expect("it can be read");
        let identity = Identity {
            session: "client".into(),
            grace: second,
            durability: None,
            listener: Weak::<Context>::new(),
            runtime: Handle::current(),
            gathering: Arc::default(),
            epochs: Arc::default(),
        };
        let node = Node::start(connector.other(&address(host)), None, &identity);
        map.nodes.insert(id.into(), Arc::clone(&node));
        node
    }

    #[tokio::test]
    async fn a_node_stays_the_same_when_it_is_called_otherwise() {
        let mut map = Map::default();
        learn(&mut map, &[("x", "a", &[]), ("y", "b", &[])]);
        let nodes = [("x", "a"), ("y", "b")].map(|(id, host)| add(&mut map, id, host));
        for told in ["c", "a", ""] {
            let moved = learn(&mut map, &[("x", told, &["a"]), ("y", "b", &[told])]);
            assert_eq!(moved, None, "{told}");
        }
        assert!(Arc::ptr_eq(&map.nodes["x"], &nodes[0]));
        assert!(Arc::ptr_eq(&map.nodes["y"], &nodes[1]));
    }

    #[tokio::test]
    async fn nodes_that_have_changed_places_are_connected_to_anew() {
        let mut map = Map::default();
        learn(&mut map, &[("x", "a", &[]), ("y", "b", &[])]);
        let _nodes = [("x", "a"), ("y", "b")].map(|(id, host)| add(&mut map, id, host));
        let moved = learn(&mut map, &[("x", "b", &[]), ("y", "a", &[])]);
        assert_eq!(moved, Some(BTreeSet::from([0, 1])));
        assert!(map.nodes.is_empty());
    }

    #[test]
    fn a_redirect_without_a_name_is_to_the_only_node_at_its_port() {
        let mut map = Map::default();
        learn(&mut map, &[("x", "a", &[])]);
        assert_eq!(map.at(None, 1).as_deref(), Some("x"));
        assert_eq!(map.at(Some("a"), 1).as_deref(), Some("x"));
        assert_eq!(map.at(Some("b"), 1), None);
        learn(&mut map, &[("x", "a", &[]), ("y", "b", &[])]);
        assert_eq!(map.at(None, 1), None);
    }
}
