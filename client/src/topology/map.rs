//! The known state of a cluster: which node serves which slot, and where each node is. The id
//! identifies a node, not the address by which it is reached.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;

use crate::topology::{Node, Slots};
use crate::wire::{Address, Member, Range};

/// A node's id.
pub(super) type Id = Arc<str>;

#[derive(Default)]
pub(super) struct Map {
    pub(super) slots: Slots,
    /// The addresses of each node; the first is the one that the node prefers.
    pub(super) addresses: BTreeMap<Id, Vec<Address>>,
    pub(super) nodes: BTreeMap<Id, Arc<Node>>,
    /// Which node to ask first, so that one node does not get all questions.
    pub(super) turn: usize,
}

impl Map {
    /// Takes note of what the node at this address has told. The slots that have moved; `None` if
    /// none has, and no node is retired.
    pub(super) fn learn(&mut self, ranges: &[Range], asked: &Address) -> Option<BTreeSet<u16>> {
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

    /// The node at this address. Without a host it is found by its port, if only one node has that
    /// port.
    pub(super) fn at(&self, host: Option<&str>, port: u16) -> Option<Id> {
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

/// The id of a node that told none begins with this; its address follows.
pub(super) const NO_ID: &str = "at ";

#[cfg(test)]
mod tests {
    use std::sync::Weak;
    use std::time::Duration;

    use tokio::runtime::Handle;

    use super::*;
    use crate::locks::Context;
    use crate::topology::Identity;
    use crate::wire::{Connector, Dialer, named};

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
