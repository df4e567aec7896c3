//! The positions of waiters in a long queue, without counting the waiters ahead one by one.
//!
//! Waiters have numbers that grow from the first to the last. Once a position was asked for in a
//! long queue, the waiters with numbers in the same range are counted together. A position is then
//! the sum of the counts before it and a short walk. Other queues cost nothing extra.

use std::collections::BTreeMap;

/// How many numbers are in one range, as a power of two.
const RANGE_BITS: u32 = 9;

/// In a shorter queue the waiters ahead are counted one by one.
const LONG: u32 = 1024;

/// How many waiters have numbers in each range; none until somebody asks for a position.
#[derive(Debug, Default)]
#[allow(clippy::box_collection, reason = "a record is small where nobody asks")]
pub(crate) struct Positions(Option<Box<BTreeMap<u64, i64>>>);

impl Positions {
    pub(crate) fn joined(&mut self, number: u64) {
        if let Some(ranges) = &mut self.0 {
            add(ranges, number);
        }
    }

    pub(crate) fn left(&mut self, number: u64) {
        let Some(ranges) = &mut self.0 else { return };
        let range = number >> RANGE_BITS;
        if let Some(count) = ranges.get_mut(&range) {
            *count = count.saturating_sub(1);
            if *count == 0 {
                ranges.remove(&range);
            }
        }
    }

    /// The number of waiters in the ranges before the range of this number, and the first number
    /// that was not counted. `numbers` are the numbers of all waiters in the queue, which has this
    /// `length`.
    pub(crate) fn before(
        &mut self,
        number: u64,
        length: u32,
        numbers: impl Iterator<Item = u64>,
    ) -> (i64, u64) {
        if length < LONG {
            self.0 = None;
            return (0, 0);
        }
        let ranges = self.0.get_or_insert_with(|| {
            let mut ranges = Box::default();
            numbers.for_each(|number| add(&mut ranges, number));
            ranges
        });
        let range = number >> RANGE_BITS;
        let counted = ranges.range(..range).map(|(_, count)| *count).sum();
        (counted, range << RANGE_BITS)
    }
}

fn add(ranges: &mut BTreeMap<u64, i64>, number: u64) {
    let count = ranges.entry(number >> RANGE_BITS).or_default();
    *count = count.saturating_add(1);
}
