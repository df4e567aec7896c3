//! The places of waiters in a long queue, without counting those ahead one by one.
//!
//! Waiters have numbers that grow from the first to the last. Once a place was asked for in a long
//! queue, those with numbers in the same range are counted together, so that a place is the sum of
//! the counts before it and a short walk. Other queues pay nothing.

use std::collections::BTreeMap;

/// How many numbers are in one range, as a power of two.
const RANGE_BITS: u32 = 9;

/// In a shorter queue those ahead are walked.
const LONG: u32 = 1024;

/// How many waiters have numbers in each range; none while nobody has asked.
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

    /// How many stand in the ranges before the one with this number, and the first number that
    /// was not counted. `numbers` are those of all in the queue, which is so long.
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
