//! A slot that moves key by key.

use std::collections::BTreeSet;

use super::{Cluster, OnItsWay, slot_of};

/// A slot that is on its way from one node to another, step by step as a resharding does it:
/// [`migrate`](Self::migrate) until no key is left, then [`tell`](Self::tell) each node.
///
/// Meanwhile the old node sends clients on (`ASK`) for keys that are not there any more, and the
/// new one answers only clients that say that they were sent (`ASKING`). A command gets `TRYAGAIN`
/// if some of its keys are at one node and some at the other.
#[derive(Clone, Debug)]
pub struct Resharding {
    cluster: Cluster,
    slot: u16,
    from: usize,
    to: usize,
}

impl Cluster {
    /// Begins to move the slot of this name to another node. None if it is there, or is on its way.
    pub fn reshard(&self, name: &str, to: usize) -> Option<Resharding> {
        let slot = slot_of(name.as_bytes());
        let from = self.slots.node_of(slot);
        let mut on_their_way = self.slots.on_their_way.borrow_mut();
        if from == to || on_their_way.contains_key(&slot) {
            return None;
        }
        let know = BTreeSet::new();
        on_their_way.insert(slot, OnItsWay { from, to, know });
        self.node(from).inner.count_change();
        let cluster = self.clone();
        Some(Resharding {
            cluster,
            slot,
            from,
            to,
        })
    }
}

impl Resharding {
    /// The number of the node that the slot leaves.
    pub fn from(&self) -> usize {
        self.from
    }

    /// The number of the node to which it goes.
    pub fn to(&self) -> usize {
        self.to
    }

    /// The keys that are still at the old node, those of readers' leases included.
    pub fn keys_left(&self) -> Vec<String> {
        let from = self.cluster.node(self.from);
        let (mut engine, now) = from.look();
        engine.expire(now);
        let keys = engine.keys().names_in(self.slot);
        let keys = keys.map(|key| String::from_utf8_lossy(key).into_owned());
        keys.collect()
    }

    /// Moves a key, as `MIGRATE … REPLACE`: it keeps the time that it has left. Returns false if
    /// the key is not there any more, or one of the two nodes does not run.
    pub fn migrate(&self, key: &str) -> bool {
        let (from, to) = (self.cluster.node(self.from), self.cluster.node(self.to));
        if !from.is_running() || !to.is_running() {
            return false;
        }
        let now = from.inner.now();
        let taken = from.inner.engine.borrow_mut().take_key(key.as_bytes(), now);
        let Some(taken) = taken else { return false };
        let (mut there, now) = (to.inner.engine.borrow_mut(), to.inner.now());
        there.put_key(key.as_bytes(), taken, now);
        drop(there);
        from.turned();
        to.turned();
        true
    }

    /// Tells a node that the slot has moved, as `CLUSTER SETSLOT … NODE`. Returns false if the node
    /// does not run, or is the old node and still has keys. When all have been told, the move is
    /// over.
    pub fn tell(&self, node: usize) -> bool {
        let keeps = node == self.from && !self.keys_left().is_empty();
        if keeps || !self.cluster.node(node).is_running() {
            return false;
        }
        let slots = &self.cluster.slots;
        let mut on_their_way = slots.on_their_way.borrow_mut();
        let Some(way) = on_their_way.get_mut(&self.slot) else {
            return true;
        };
        way.know.insert(node);
        self.cluster.node(node).inner.count_change();
        if way.know.len() == self.cluster.nodes.borrow().len() {
            on_their_way.remove(&self.slot);
            let mut nodes = slots.nodes.borrow_mut();
            if let Some(node) = nodes.get_mut(usize::from(self.slot)) {
                *node = self.to;
            }
        }
        true
    }
}
