//! The slots of a cluster: which one a name is in, and which node serves it.

use std::collections::{BTreeMap, HashSet};
use std::sync::Arc;

use crate::topology::names::{Name, name_of};
use crate::wire::endpoint::Address;
use crate::wire::reply::{Range, SLOTS};

/// Who serves which slot, as far as is known.
#[derive(Debug)]
pub(crate) struct Table(Box<[Option<Arc<Name>>]>);

impl Table {
    pub(crate) fn new() -> Self {
        Self(vec![None; SLOTS.into()].into())
    }

    pub(crate) fn get(&self, slot: u16) -> Option<&Arc<Name>> {
        self.0.get(usize::from(slot)).and_then(Option::as_ref)
    }

    /// Notes that this node serves the slot: whether another one did before.
    pub(crate) fn set(&mut self, slot: u16, name: &Arc<Name>) -> bool {
        let Some(entry) = self.0.get_mut(usize::from(slot)) else {
            return false;
        };
        let before = entry.replace(Arc::clone(name));
        before.is_some_and(|before| before != *name)
    }

    /// Takes over what the node at `asked` says: the slots that were at another node before.
    /// What nobody serves at the moment stays where it was.
    pub(crate) fn update(&mut self, ranges: &[Range], asked: &Address) -> HashSet<u16> {
        let mut moved = HashSet::new();
        for range in ranges {
            let Some(primary) = range.nodes.first() else {
                continue;
            };
            let name = Arc::new(name_of(primary, asked));
            for slot in range.first..=range.last {
                if self.set(slot, &name) {
                    moved.insert(slot);
                }
            }
        }
        moved
    }

    /// All who serve slots.
    pub(crate) fn primaries(&self) -> HashSet<Arc<Name>> {
        self.0.iter().flatten().cloned().collect()
    }

    /// The slots that this node serves.
    pub(crate) fn slots_of(&self, name: &Name) -> impl Iterator<Item = u16> {
        let slots = (0..SLOTS).zip(&self.0);
        let served = slots.filter(|(_, by)| by.as_deref() == Some(name));
        served.map(|(slot, _)| slot)
    }
}

/// The slot of a name: that of what is between its first `{` and the next `}`, if there is
/// something, so that names can be kept together.
pub(crate) fn slot_of(name: &[u8]) -> u16 {
    let tag = || {
        let (_, from) = split_at_byte(name, b'{')?;
        let (tag, _) = split_at_byte(from, b'}')?;
        Some(tag).filter(|tag| !tag.is_empty())
    };
    crc16(tag().unwrap_or(name)) % SLOTS
}

/// Names that are in one slot each, in the order of the slots: whoever takes several parts takes
/// them in the same order as everybody else.
pub(crate) fn parts(names: &[Arc<[u8]>]) -> Vec<Arc<[Arc<[u8]>]>> {
    let mut parts: BTreeMap<u16, Vec<Arc<[u8]>>> = BTreeMap::new();
    for name in names {
        let part = parts.entry(slot_of(name)).or_default();
        part.push(Arc::clone(name));
    }
    parts.into_values().map(Arc::from).collect()
}

fn split_at_byte(bytes: &[u8], byte: u8) -> Option<(&[u8], &[u8])> {
    let at = bytes.iter().position(|one| *one == byte)?;
    let (before, from) = bytes.split_at_checked(at)?;
    Some((before, from.get(1..)?))
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
    use super::*;
    use crate::wire::reply::{Member, named};

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

    fn address(host: &str, port: u16) -> Address {
        let host = host.into();
        Address { host, port }
    }

    fn member(host: &str) -> Member {
        Member {
            id: None,
            host: named(host),
            port: 1,
            other_hosts: Vec::new(),
        }
    }

    #[test]
    fn the_table_says_which_slots_have_moved_and_forgets_none() {
        let range = |first, last, host: &str| Range {
            first,
            last,
            nodes: vec![member(host), member("replica")],
        };
        let asked = address("asked", 9);
        let mut table = Table::new();
        let ranges = [range(0, 1, "a"), range(2, 3, "")];
        assert!(table.update(&ranges, &asked).is_empty());
        let at = |host: &str| Arc::new(Name::At(address(host, 1)));
        assert_eq!(table.get(3), Some(&at("asked")));
        assert_eq!(table.get(4), None);
        let moved = table.update(&[range(1, 2, "a")], &asked);
        assert_eq!(moved, HashSet::from([2]));
        assert_eq!(table.get(3), Some(&at("asked")));
        assert!(table.slots_of(&at("a")).eq(0..3));
        assert!(table.set(3, &at("a")));
        assert!(!table.set(3, &at("a")));
        assert_eq!(table.primaries().len(), 1);
    }
}
