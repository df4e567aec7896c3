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

#[cfg(test)]
mod tests {
    use super::*;
    use std::collections::BTreeSet;

    #[test]
    fn a_position_in_a_long_queue_is_that_of_a_short_walk() {
        let (mut positions, mut numbers) = (Positions::default(), BTreeSet::new());
        let length = |numbers: &BTreeSet<u64>| u32::try_from(numbers.len()).expect("few");
        for step in 0..4 * u64::from(LONG) {
            positions.joined(step);
            numbers.insert(step);
            // Whole ranges are left empty, and others nearly.
            if step % 3 != 0 && step > 2_000 {
                let left = (step * 7) % 2_000;
                if numbers.remove(&left) {
                    positions.left(left);
                }
            }
            for number in [step, step / 2, 0] {
                let all = numbers.iter().copied();
                let (counted, from) = positions.before(number, length(&numbers), all);
                let walked = numbers.range(from..number).count();
                let before = i64::try_from(numbers.range(..number).count()).expect("few");
                assert_eq!(counted + i64::try_from(walked).expect("few"), before);
                let is_long = numbers.len() >= usize::try_from(LONG).expect("few");
                assert_eq!(from > 0, is_long && number >> RANGE_BITS > 0, "{step}");
                assert!(!is_long || number - from < 1 << RANGE_BITS);
            }
        }
        assert_eq!(positions.before(9_000, LONG - 1, [].into_iter()), (0, 0));
        // While a queue is short, nobody in it is counted.
        numbers.clear();
        let all = (9_000..9_000 + u64::from(LONG)).collect::<Vec<_>>();
        let (counted, from) = positions.before(9_800, LONG, all.iter().copied());
        assert_eq!((counted, from), (9_728 - 9_000, 9_728));
    }
}
