//! A cluster in memory: which node serves which slot, and slots that move: in one step, or key by
//! key, with a time in which the slot is on its way (`ASK`, `TRYAGAIN`).

mod resharding;

use std::cell::RefCell;
use std::collections::{BTreeMap, BTreeSet};
use std::rc::Rc;

use bytes::Bytes;
use redis_protocol::resp3::types::BytesFrame as Frame;
use rlock_core::CommandError;

use super::{Inner, Server};
use crate::commands::{array, blob, error, number};
use crate::keyspace::Keyspace;
pub use resharding::Resharding;

/// How many slots a cluster has.
const SLOTS: u16 = 16_384;

/// The slot of a key. If there is text between its first `{` and the next `}`, only that text
/// counts.
pub(crate) fn slot_of(key: &[u8]) -> u16 {
    let tag = || {
        let from = key.splitn(2, |byte| *byte == b'{').nth(1)?;
        let end = from.iter().position(|byte| *byte == b'}')?;
        from.get(..end).filter(|tag| !tag.is_empty())
    };
    crc16(tag().unwrap_or(key)) % SLOTS
}

/// CRC-16 with the polynomial 0x1021 (XMODEM).
fn crc16(bytes: &[u8]) -> u16 {
    bytes.iter().fold(0, |crc, byte| {
        (0..8).fold(crc ^ (u16::from(*byte) << 8), |crc, _| {
            let carry = crc & 0x8000 != 0;
            (crc << 1) ^ if carry { 0x1021 } else { 0 }
        })
    })
}

/// The node of each slot. Nodes are numbered; a node may be replaced by its replica.
#[derive(Debug)]
pub(crate) struct Slots {
    /// The number of the node that serves each slot.
    nodes: RefCell<Vec<usize>>,
    /// Slots that move key by key.
    on_their_way: RefCell<BTreeMap<u16, OnItsWay>>,
    /// Where each node is now.
    addresses: RefCell<Vec<String>>,
}

/// A slot that moves key by key. Until a node knows that it has moved, it is the old node's there.
#[derive(Clone, Debug)]
struct OnItsWay {
    from: usize,
    to: usize,
    know: BTreeSet<usize>,
}

/// How a node sees a slot.
enum Slot {
    Served,
    /// This node serves the slot, which is on its way to the node of this number.
    Migrating(usize),
    /// The node of this number serves the slot, which is on its way here.
    Importing(usize),
    /// The node of this number serves it.
    Elsewhere(usize),
}

/// Why a command cannot be carried out at a node.
pub(crate) enum Misrouted {
    CrossSlot,
    /// Some of its keys are here, and others are not.
    TryAgain,
    Ask {
        slot: u16,
        address: String,
    },
    Moved(CommandError),
}

impl Misrouted {
    fn shown(&self) -> Frame {
        match self {
            Self::CrossSlot => error("CROSSSLOT Keys in request don't hash to the same slot"),
            Self::TryAgain => error("TRYAGAIN Multiple keys request during rehashing of slot"),
            Self::Ask { slot, address } => error(&format!("ASK {slot} {address}")),
            Self::Moved(moved) => error(&moved.to_string()),
        }
    }
}

impl Slots {
    fn node_of(&self, slot: u16) -> usize {
        let nodes = self.nodes.borrow();
        nodes.get(usize::from(slot)).copied().unwrap_or_default()
    }

    fn on_its_way(&self, slot: u16) -> Option<OnItsWay> {
        self.on_their_way.borrow().get(&slot).cloned()
    }

    /// The node that serves a slot, as this node sees it.
    fn seen_by(&self, node: usize, slot: u16) -> usize {
        let way = self.on_its_way(slot);
        let moved = way.filter(|way| way.know.contains(&node));
        moved.map_or_else(|| self.node_of(slot), |way| way.to)
    }

    fn state(&self, node: usize, slot: u16) -> Slot {
        let served_by = self.seen_by(node, slot);
        let way = self.on_its_way(slot);
        match way.filter(|way| !way.know.contains(&node)) {
            Some(way) if way.from == node => Slot::Migrating(way.to),
            Some(way) if way.to == node => Slot::Importing(served_by),
            _ if served_by == node => Slot::Served,
            _ => Slot::Elsewhere(served_by),
        }
    }

    fn address_of(&self, node: usize) -> String {
        let addresses = self.addresses.borrow();
        addresses.get(node).cloned().unwrap_or_default()
    }

    fn id_of(&self, node: usize) -> String {
        let address = self.address_of(node);
        format!("{address:0<40}")
    }

    /// The answer of any node to `CLUSTER SHARDS`, without the slots.
    fn primaries(&self) -> Frame {
        let text = |text: &str| blob(text.to_owned());
        let primaries = (0..self.addresses.borrow().len()).map(|node| {
            let address = self.address_of(node);
            let (host, port) = address.rsplit_once(':').unwrap_or((&address, "6379"));
            let port = number(port.parse().unwrap_or_default());
            let id = self.id_of(node);
            let words = [
                "id", &id, "role", "master", "health", "online", "endpoint", host,
            ];
            let words = words.into_iter().map(text).chain([text("port"), port]);
            let nodes = array(vec![array(words.collect())]);
            array(vec![text("nodes"), nodes])
        });
        array(primaries.collect())
    }

    /// The answer of this node to `CLUSTER SLOTS`.
    fn shown(&self, asked: usize) -> Frame {
        let mut nodes = self.nodes.borrow().clone();
        for slot in self.on_their_way.borrow().keys() {
            if let Some(node) = nodes.get_mut(usize::from(*slot)) {
                *node = self.seen_by(asked, *slot);
            }
        }
        let mut ranges: Vec<(u16, u16, usize)> = Vec::new();
        for (slot, node) in (0..).zip(nodes) {
            match ranges.last_mut() {
                Some((_, last, of)) if *of == node => *last = slot,
                _ => ranges.push((slot, slot, node)),
            }
        }
        let shown = ranges.into_iter().map(|(first, last, node)| {
            let address = self.address_of(node);
            let (host, port) = address.rsplit_once(':').unwrap_or((&address, "6379"));
            let port = port.parse().unwrap_or_default();
            let primary = array(vec![
                blob(host.to_owned()),
                number(port),
                blob(self.id_of(node)),
                array(Vec::new()),
            ]);
            array(vec![number(first.into()), number(last.into()), primary])
        });
        array(shown.collect())
    }
}

/// A server's place in a cluster.
#[derive(Clone, Debug)]
pub(crate) struct Membership {
    slots: Rc<Slots>,
    node: usize,
}

impl Membership {
    /// The number of the node.
    pub(crate) fn node(&self) -> usize {
        self.node
    }

    /// The id of the node.
    pub(crate) fn node_id(&self) -> String {
        self.slots.id_of(self.node)
    }

    /// Where the slot of a key is served, as far as is known here.
    pub(crate) fn served_at(&self, key: &[u8]) -> CommandError {
        let slot = slot_of(key);
        self.moved(slot, self.slots.seen_by(self.node, slot))
    }

    fn moved(&self, slot: u16, node: usize) -> CommandError {
        let address = self.slots.address_of(node);
        CommandError::Moved {
            slot,
            address: address.as_str().into(),
            tls_address: address.into(),
        }
    }

    /// Whether the slot of a key is all here, and is not on its way.
    pub(crate) fn is_settled(&self, key: &[u8]) -> bool {
        matches!(self.slots.state(self.node, slot_of(key)), Slot::Served)
    }

    /// Whether these keys are served here, as a server finds out (`getNodeByQuery`); `has` says
    /// which it has, and `is_asking` whether `ASKING` came before.
    pub(crate) fn route(
        &self,
        keys: &[&[u8]],
        is_asking: bool,
        mut has: impl FnMut(&[u8]) -> bool,
    ) -> Result<(), Misrouted> {
        let Some(slot) = keys.first().map(|key| slot_of(key)) else {
            return Ok(());
        };
        if keys.iter().any(|key| slot_of(key) != slot) {
            return Err(Misrouted::CrossSlot);
        }
        let are_several = keys.iter().any(|key| keys.first() != Some(key));
        let mut missing = || keys.iter().filter(|key| !has(key)).count();
        match self.slots.state(self.node, slot) {
            Slot::Served => Ok(()),
            Slot::Migrating(to) => match missing() {
                0 => Ok(()),
                missing if missing < keys.len() => Err(Misrouted::TryAgain),
                _ => Err(Misrouted::Ask {
                    slot,
                    address: self.slots.address_of(to),
                }),
            },
            Slot::Importing(_) if is_asking && are_several && missing() > 0 => {
                Err(Misrouted::TryAgain)
            }
            Slot::Importing(_) if is_asking => Ok(()),
            Slot::Importing(at) | Slot::Elsewhere(at) => {
                Err(Misrouted::Moved(self.moved(slot, at)))
            }
        }
    }

    /// Why a command that names keys cannot be carried out here, if so. A replica sends all of them
    /// to its primary.
    pub(crate) fn refuses(
        &self,
        args: &[Bytes],
        is_replica: bool,
        is_asking: bool,
        has: impl FnMut(&[u8]) -> bool,
    ) -> Option<Frame> {
        let keys: Vec<&[u8]> = keys_of(args).iter().map(|key| &key[..]).collect();
        let key = *keys.first()?;
        let misrouted = match self.route(&keys, is_asking, has) {
            Err(Misrouted::CrossSlot) => Misrouted::CrossSlot,
            _ if is_replica => Misrouted::Moved(self.served_at(key)),
            routed => routed.err()?,
        };
        Some(misrouted.shown())
    }

    /// The answer to a `CLUSTER` command.
    pub(crate) fn answer(&self, rest: &[Bytes]) -> Frame {
        match rest {
            [what] if what.eq_ignore_ascii_case(b"SLOTS") => self.slots.shown(self.node),
            [what] if what.eq_ignore_ascii_case(b"SHARDS") => self.slots.primaries(),
            [what, key] if what.eq_ignore_ascii_case(b"KEYSLOT") => number(slot_of(key).into()),
            _ => error("ERR unknown subcommand in a server in memory"),
        }
    }
}

/// The keys that a command names.
fn keys_of(args: &[Bytes]) -> &[Bytes] {
    let Some(name) = args.first() else { return &[] };
    let name = String::from_utf8_lossy(name).to_uppercase();
    let several = |count: usize| {
        let number = args
            .get(count)
            .and_then(|arg| std::str::from_utf8(arg).ok());
        let number: Option<usize> = number.and_then(|number| number.parse().ok());
        let keys = args.get(count.saturating_add(1)..).unwrap_or_default();
        keys.get(..number.unwrap_or_default()).unwrap_or_default()
    };
    match &*name {
        "RLOCK.ACQUIRE" | "RLOCK.RELEASE" | "RLOCK.RENEW" | "RLOCK.CANCEL" | "RLOCK.BREAK"
        | "RLOCK.GUARD" => args.get(1..2).unwrap_or_default(),
        "RLOCK.MACQUIRE" | "RLOCK.MRENEW" => several(3),
        "RLOCK.MRELEASE" => several(2),
        _ => &[],
    }
}

/// A cluster in memory. Clones are the same.
#[derive(Clone, Debug)]
pub struct Cluster {
    slots: Rc<Slots>,
    nodes: Rc<RefCell<Vec<Server>>>,
}

impl Cluster {
    /// Of these servers, each at its address, with as many slots each.
    pub(crate) fn of(servers: Vec<(String, Server)>) -> Self {
        let count = servers.len().max(1);
        let each = usize::from(SLOTS).div_ceil(count);
        let nodes = (0..usize::from(SLOTS)).map(|slot| slot.checked_div(each).unwrap_or_default());
        let (addresses, servers): (Vec<_>, Vec<_>) = servers.into_iter().unzip();
        let slots = Rc::new(Slots {
            nodes: RefCell::new(nodes.collect()),
            on_their_way: RefCell::default(),
            addresses: RefCell::new(addresses),
        });
        for (node, server) in servers.iter().enumerate() {
            let slots = Rc::clone(&slots);
            server.inner.join(Membership { slots, node });
        }
        Self {
            slots,
            nodes: Rc::new(RefCell::new(servers)),
        }
    }

    /// The node of this number, from 0 on: the primary there.
    ///
    /// # Panics
    /// If there are fewer.
    #[expect(clippy::expect_used, reason = "a test that asks for it is wrong")]
    pub fn node(&self, number: usize) -> Server {
        let nodes = self.nodes.borrow();
        nodes.get(number).cloned().expect("there are fewer nodes")
    }

    /// The number of the node that serves the lock of this name: until all nodes know that its slot
    /// has moved, the old one.
    pub fn node_of(&self, name: &str) -> usize {
        self.slots.node_of(slot_of(name.as_bytes()))
    }

    /// The owners who hold this lock now, also while its keys are on their way.
    pub fn holders(&self, name: &str) -> Vec<String> {
        let (server, mut keys) = self.keys_of(name);
        let lock = keys.open(0, name.as_bytes(), server.inner.now());
        let holders = lock.holders();
        let holders = holders.iter().map(|of| String::from_utf8_lossy(of).into());
        holders.collect()
    }

    /// How often this owner holds this lock, also while its keys are on their way.
    pub fn count(&self, name: &str, owner: &str) -> u64 {
        let (server, mut keys) = self.keys_of(name);
        let lock = keys.open(0, name.as_bytes(), server.inner.now());
        lock.count(owner.as_bytes())
    }

    /// Whether the node that serves this lock is up; while its slot is on its way, both.
    pub fn is_up(&self, name: &str) -> bool {
        let slot = slot_of(name.as_bytes());
        let to = self.slots.on_its_way(slot).map(|way| way.to);
        let nodes = [Some(self.slots.node_of(slot)), to];
        let mut nodes = nodes.into_iter().flatten();
        nodes.all(|node| self.node(node).is_up())
    }

    /// The node of a slot, and the slot's keys: at both nodes, if it is on its way.
    fn keys_of(&self, name: &str) -> (Server, Keyspace) {
        let slot = slot_of(name.as_bytes());
        let server = self.node(self.slots.node_of(slot));
        let mut keys = Keyspace::default();
        if let Some(way) = self.slots.on_its_way(slot) {
            keys.put(self.node(way.to).inner.engine.borrow().keys().of_slot(slot));
        }
        keys.put(server.inner.engine.borrow().keys().of_slot(slot));
        (server, keys)
    }

    /// Moves the slot of this name to another node in one step, with all keys. The waiters at the
    /// old node are told `MOVED`. It does nothing, and returns false, if one of the two nodes does
    /// not run, or the slot moves key by key.
    pub fn move_slot(&self, name: &str, to: usize) -> bool {
        let slot = slot_of(name.as_bytes());
        let from = self.node(self.slots.node_of(slot));
        let there = self.node(to);
        let moves = self.slots.on_its_way(slot).is_some();
        if moves || !from.is_running() || !there.is_running() {
            return false;
        }
        if self.slots.node_of(slot) == to {
            return true;
        }
        let keys = from.inner.engine.borrow_mut().take_slot(slot);
        if let Some(node) = self.slots.nodes.borrow_mut().get_mut(usize::from(slot)) {
            *node = to;
        }
        there.inner.engine.borrow_mut().put(keys);
        for server in [from, there] {
            server.inner.engine.borrow_mut().slot_has_moved();
            server.turned();
        }
        true
    }

    /// This replica of a node takes its place: it is a primary from now on, and has the node's
    /// slots. The old one goes on as if it were there, until it is made
    /// [a replica](Server::replicate) too.
    pub fn replace(&self, number: usize, address: &str, replica: &Server) {
        replica.promote();
        if let Some(node) = self.nodes.borrow_mut().get_mut(number) {
            *node = replica.clone();
        }
        if let Some(at) = self.slots.addresses.borrow_mut().get_mut(number) {
            address.clone_into(at);
        }
    }

    /// Makes this server the replica of a node.
    pub fn add_replica(&self, number: usize, replica: &Server) {
        let slots = Rc::clone(&self.slots);
        let node = number;
        replica.inner.join(Membership { slots, node });
        replica.replicate(&self.node(number));
    }
}

impl Inner {
    fn join(&self, membership: Membership) {
        let now = self.begins();
        self.engine.borrow_mut().join(membership.clone(), now);
        self.membership.replace(Some(membership));
    }
}
