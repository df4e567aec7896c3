//! The known state of a cluster: which node serves which slot, and where each node is. The id
//! identifies a node, not the address by which it is reached. Also which slot a name is in.

use std::collections::{BTreeMap, BTreeSet};
use std::ops::RangeInclusive;
use std::sync::Arc;

use crate::topology::Node;
use crate::wire::{Address, Cluster, Id, Primaries, SLOTS};

#[derive(Default)]
pub(super) struct Map {
    /// Which node serves which slots, as far as somebody has told.
    slots: Runs,
    /// Each node that serves something, or is a primary to which a slot may be on its way.
    pub(super) addresses: Primaries,
    pub(super) nodes: BTreeMap<Id, Arc<Node>>,
}

impl Map {
    /// Takes note of what a node has told. The slots that have moved; `None` if none has, no node
    /// is retired, and no new one is known.
    pub(super) fn learn(&mut self, told: Cluster) -> Option<BTreeSet<u16>> {
        let (mut moved, served) = (BTreeSet::new(), self.serving());
        for (slots, primary) in told.ranges {
            self.slots.insert(slots, &primary, &mut moved);
        }
        let mut ids = told.primaries.keys();
        let knows_more = ids.any(|id| !self.addresses.contains_key(id));
        let (serving, nodes) = (self.serving(), &self.nodes);
        // One to which its first slot is on its way stays, whoever does not know it yet; and one
        // that has served and is no primary any more does not.
        let is_there = |id: &Id| nodes.get(id).is_some_and(|node| node.session.is_attached());
        self.addresses.retain(|id, _| {
            let may_be_new = !served.contains(id) && is_there(id);
            serving.contains(id) || may_be_new
        });
        self.addresses.extend(told.primaries);
        let before = self.nodes.len();
        self.retire(&mut moved);
        let is_news = knows_more || !moved.is_empty() || self.nodes.len() < before;
        is_news.then_some(moved)
    }

    /// All nodes that serve any slot.
    pub(super) fn serving(&self) -> BTreeSet<Id> {
        self.slots
            .0
            .values()
            .map(|(_, by)| Arc::clone(by))
            .collect()
    }

    /// The node that serves this slot.
    pub(super) fn node_of(&self, slot: u16) -> Option<&Id> {
        self.slots.at(slot)
    }

    /// Leaves the nodes that are not known any more, or are at another address by now.
    fn retire(&mut self, moved: &mut BTreeSet<u16>) {
        let (addresses, slots) = (&self.addresses, &self.slots);
        self.nodes.retain(|id, node| {
            let known = addresses.get(id);
            let address = node.session.connector.address();
            let stays = known.is_some_and(|known| known.contains(&address));
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
        let is_it = |address: &Address| {
            address.port == port && host.is_none_or(|host| *address.host == *host)
        };
        let nodes = self.addresses.iter();
        let mut there = nodes.filter(|(_, known)| known.iter().any(is_it));
        let (only, _) = there.next()?;
        let is_only = host.is_some() || there.next().is_none();
        is_only.then(|| Arc::clone(only))
    }
}

/// The node of each slot, as runs of slots that have one node. The key is the first slot of a run,
/// the value its last slot and the node. Runs do not overlap.
#[derive(Default)]
struct Runs(BTreeMap<u16, (u16, Id)>);

impl Runs {
    fn at(&self, slot: u16) -> Option<&Id> {
        let (_, (last, by)) = self.0.range(..=slot).next_back()?;
        (slot <= *last).then_some(by)
    }

    /// The slots that this node serves.
    fn of(&self, id: &Id) -> impl Iterator<Item = u16> {
        let runs = self.0.iter().filter(move |(_, (_, by))| by == id);
        runs.flat_map(|(first, (last, _))| *first..=*last)
    }

    /// This node serves these slots from now on. Those that another served have moved.
    fn insert(&mut self, slots: RangeInclusive<u16>, by: &Id, moved: &mut BTreeSet<u16>) {
        let (first, last) = (*slots.start(), *slots.end());
        if first > last {
            return;
        }
        while let Some((run, (end, before))) = self.take_last(first, last) {
            // The slots of that run which are not among these stay as they were.
            if run < first {
                self.0
                    .insert(run, (first.saturating_sub(1), before.clone()));
            }
            if end > last {
                let behind = last.saturating_add(1);
                self.0.insert(behind, (end, before.clone()));
            }
            if before != *by {
                moved.extend(run.max(first)..=end.min(last));
            }
        }
        self.0.insert(first, (last, Arc::clone(by)));
    }

    /// Takes the last run out that has any of these slots.
    fn take_last(&mut self, first: u16, last: u16) -> Option<(u16, (u16, Id))> {
        let (run, (end, _)) = self.0.range(..=last).next_back()?;
        let run = (*end >= first).then_some(*run)?;
        self.0.remove_entry(&run)
    }
}

/// The slot of a name, or of the part between its first `{` and the next `}` if that is not empty,
/// so that names can be kept together.
pub(crate) fn slot_of(name: &[u8]) -> u16 {
    let tag = || {
        let from = name.splitn(2, |byte| *byte == b'{').nth(1)?;
        let end = from.iter().position(|byte| *byte == b'}')?;
        from.get(..end).filter(|tag| !tag.is_empty())
    };
    crc16(tag().unwrap_or(name)) % SLOTS
}

/// The checksum by which clusters tell slots: CRC-16 with the polynomial 0x1021 (XMODEM).
fn crc16(bytes: &[u8]) -> u16 {
    bytes.iter().fold(0, |crc, byte| {
        (0..8).fold(crc ^ (u16::from(*byte) << 8), |crc, _| {
            let carry = crc & 0x8000 != 0;
            (crc << 1) ^ if carry { 0x1021 } else { 0 }
        })
    })
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use super::*;
    use crate::wire::session::tests::identity;
    use crate::wire::{Connector, Dialer};

    fn address(host: &str) -> Address {
        let host = host.into();
        Address { host, port: 1 }
    }

    /// Each of these serves one slot.
    fn learn(map: &mut Map, told: &[(&str, &str, &[&str])]) -> Option<BTreeSet<u16>> {
        let ids = told.iter().map(|(id, ..)| Id::from(*id));
        let known = told.iter().map(|(id, host, other_hosts)| {
            let hosts = [host].into_iter().chain(*other_hosts);
            (Id::from(*id), hosts.map(|host| address(host)).collect())
        });
        map.learn(Cluster {
            ranges: (0..).map(|slot| slot..=slot).zip(ids).collect(),
            primaries: known.collect(),
        })
    }

    fn add(map: &mut Map, id: &str, host: &str) -> Arc<Node> {
        let second = Duration::from_secs(1);
        let connector = Connector::new("redis://127.0.0.1", &[], &Dialer::within(second));
        let connector = connector.expect("it can be read");
        let node = Node::start(connector.other(&address(host)), None, &identity(second));
        map.nodes.insert(id.into(), Arc::clone(&node));
        node
    }

    #[test]
    fn the_slot_is_that_of_the_tag_if_there_is_one() {
        assert_eq!(crc16(b"123456789"), 0x31c3);
        assert_eq!(slot_of(b"foo"), 12_182);
        assert_eq!(slot_of(b"{foo}bar"), slot_of(b"foo"));
        assert_eq!(slot_of(b"a{foo}{bar}"), slot_of(b"foo"));
        assert_eq!(slot_of(b"a{{foo}}"), slot_of(b"{foo"));
        for whole in [&b"{}foo"[..], b"foo{", b"}foo{", b""] {
            assert_eq!(slot_of(whole), crc16(whole) % SLOTS, "{whole:?}");
        }
    }

    /// All runs of up to six slots, three after each other.
    #[test]
    fn runs_of_slots_are_as_each_slot_by_itself() {
        let ids = ["x", "y"].map(Id::from);
        let ends = || (1..=6).flat_map(|first| (first - 1..=6).map(move |last| (first, last)));
        let told: Vec<_> = ends()
            .flat_map(|of| ids.each_ref().map(|id| (of, id)))
            .collect();
        let pairs = || told.iter().flat_map(|a| told.iter().map(move |b| [a, b]));
        for [before, then] in pairs() {
            for now in &told {
                let (mut runs, mut plain) = (Runs::default(), BTreeMap::new());
                for ((first, last), by) in [before, then, now] {
                    let (mut moved, mut meant) = (BTreeSet::new(), BTreeSet::new());
                    runs.insert(*first..=*last, by, &mut moved);
                    for slot in *first..=*last {
                        let before = plain.insert(slot, *by);
                        meant.extend(before.filter(|before| before != by).map(|_| slot));
                    }
                    assert_eq!(moved, meant);
                }
                assert!((0..8).all(|slot| runs.at(slot) == plain.get(&slot).copied()));
                let served = plain.iter().filter(|(_, by)| **by == &ids[0]);
                assert!(runs.of(&ids[0]).eq(served.map(|(slot, _)| *slot)));
            }
        }
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

    #[tokio::test]
    async fn a_primary_without_a_slot_is_known_and_stays_until_it_is_none() {
        let mut map = Map::default();
        learn(&mut map, &[("x", "a", &[])]);
        let also = |map: &mut Map, primaries: &[&str]| {
            let known = primaries
                .iter()
                .map(|id| (Id::from(*id), vec![address(id)]));
            map.learn(Cluster {
                ranges: Vec::new(),
                primaries: known.collect(),
            })
        };
        assert_eq!(also(&mut map, &["y"]), Some(BTreeSet::new()), "it is new");
        assert_eq!(map.at(Some("y"), 1).as_deref(), Some("y"));
        let node = add(&mut map, "y", "y");
        assert_eq!(also(&mut map, &["y"]), None);
        assert!(!node.session.is_retired());
        assert_eq!(also(&mut map, &[]), Some(BTreeSet::new()));
        assert!(node.session.is_retired());
        assert_eq!(map.at(Some("a"), 1).as_deref(), Some("x"), "it serves");
        let served = add(&mut map, "x", "a");
        learn(&mut map, &[("y", "y", &[])]);
        assert!(served.session.is_retired(), "it has served");
    }

    #[test]
    fn what_was_told_stands_and_a_change_is_noticed() {
        let mut map = Map::default();
        let no_slot = Some(BTreeSet::new());
        assert_eq!(
            learn(&mut map, &[("x", "a", &[])]),
            no_slot,
            "nobody had it"
        );
        assert_eq!(learn(&mut map, &[("x", "a", &[])]), None);
        let moved = learn(&mut map, &[("y", "b", &[])]);
        assert_eq!(moved, Some(BTreeSet::from([0])));
        let both: &[(&str, &str, &[&str])] = &[("y", "b", &[]), ("z", "c", &[])];
        assert_eq!(learn(&mut map, both), no_slot, "the third is new");
        assert_eq!(map.serving(), BTreeSet::from(["y", "z"].map(Id::from)));
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
