//! The slots of a cluster: which one a name is in, and which node serves it.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;

use crate::wire::SLOTS;

/// Which node serves each slot, as far as somebody has told.
#[derive(Debug, Default)]
pub(super) struct Slots(BTreeMap<u16, Arc<str>>);

impl Slots {
    pub(super) fn get(&self, slot: u16) -> Option<&Arc<str>> {
        self.0.get(&slot)
    }

    /// Whether another node has served it before.
    pub(super) fn set(&mut self, slot: u16, id: &Arc<str>) -> bool {
        let before = self.0.insert(slot, Arc::clone(id));
        before.is_some_and(|before| before != *id)
    }

    /// All nodes that serve any.
    pub(super) fn ids(&self) -> BTreeSet<Arc<str>> {
        // One slot of each run is enough: runs are thousands of slots long.
        let mut runs: Vec<_> = self.0.values().collect();
        runs.dedup();
        runs.into_iter().cloned().collect()
    }

    pub(super) fn of(&self, id: &str) -> impl Iterator<Item = u16> {
        let served = self.0.iter().filter(move |(_, by)| ***by == *id);
        served.map(|(slot, _)| *slot)
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
    use super::*;

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

    #[test]
    fn what_was_told_stands_and_a_change_is_noticed() {
        let mut slots = Slots::default();
        let (one, other) = (Arc::from("one"), Arc::from("other"));
        assert!(!slots.set(7, &one), "nobody had it");
        assert!(!slots.set(7, &one));
        assert!(slots.set(7, &other));
        assert!(!slots.set(8, &one));
        assert_eq!(slots.get(7), Some(&other));
        assert_eq!(slots.get(9), None);
        assert_eq!(slots.ids(), BTreeSet::from([one, other]));
        assert_eq!(slots.of("other").collect::<Vec<_>>(), [7]);
    }
}
