//! The slots of a cluster: which one a name is in, and which node serves it.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;

use crate::topology::{Name, name_of};
use crate::wire::{Address, Range, SLOTS};

/// Who serves which slot, as far as is known.
#[derive(Debug, Default)]
pub(crate) struct Table(BTreeMap<u16, Arc<Name>>);

impl Table {
    pub(crate) fn get(&self, slot: u16) -> Option<&Arc<Name>> {
        self.0.get(&slot)
    }

    /// Notes that this node serves the slot: whether another one did before.
    pub(crate) fn set(&mut self, slot: u16, name: &Arc<Name>) -> bool {
        let before = self.0.insert(slot, Arc::clone(name));
        before.is_some_and(|before| before != *name)
    }

    /// Takes over what the node at `asked` says: the slots that were at another node before.
    /// What nobody serves at the moment stays where it was.
    pub(crate) fn update(&mut self, ranges: &[Range], asked: &Address) -> BTreeSet<u16> {
        let mut moved = BTreeSet::new();
        for range in ranges {
            if let Some(primary) = range.nodes.first() {
                let name = Arc::new(name_of(primary, asked));
                moved.extend((range.first..=range.last).filter(|slot| self.set(*slot, &name)));
            }
        }
        moved
    }

    /// All who serve slots.
    pub(crate) fn primaries(&self) -> BTreeSet<Arc<Name>> {
        // Of thousands of slots in a row one names the node.
        let mut runs: Vec<_> = self.0.values().collect();
        runs.dedup();
        runs.into_iter().cloned().collect()
    }

    /// The slots that this node serves.
    pub(crate) fn slots_of(&self, name: &Name) -> impl Iterator<Item = u16> {
        let served = self.0.iter().filter(move |(_, by)| ***by == *name);
        served.map(|(slot, _)| *slot)
    }
}

/// The slot of a name: that of what is between its first `{` and the next `}`, if there is
/// something, so that names can be kept together.
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
    use super::*;
    use crate::wire::{Member, named};

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
        let mut table = Table::default();
        let ranges = [range(0, 1, "a"), range(2, 3, "")];
        assert!(table.update(&ranges, &asked).is_empty());
        let at = |host: &str| Arc::new(Name::At(address(host, 1)));
        assert_eq!(table.get(3), Some(&at("asked")));
        assert_eq!(table.get(4), None);
        let moved = table.update(&[range(1, 2, "a")], &asked);
        assert_eq!(moved, BTreeSet::from([2]));
        assert_eq!(table.get(3), Some(&at("asked")));
        assert!(table.slots_of(&at("a")).eq(0..3));
        assert!(table.set(3, &at("a")));
        assert!(!table.set(3, &at("a")));
        assert_eq!(table.primaries().len(), 1);
    }
}
