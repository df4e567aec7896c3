//! Random numbers that a seed repeats.

/// `SplitMix64`: every seed is a good one, and a stream can be split off for each process.
#[derive(Debug, Clone)]
pub(crate) struct Random(u64);

impl Random {
    pub(crate) fn new(seed: u64) -> Self {
        Self(seed)
    }

    pub(crate) fn next(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mixed = (self.0 ^ (self.0 >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        let mixed = (mixed ^ (mixed >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        mixed ^ (mixed >> 31)
    }

    /// From `low` up to but without `high`.
    pub(crate) fn within(&mut self, low: u64, high: u64) -> u64 {
        low + self.next() % (high - low)
    }

    /// True with this probability, in percent.
    pub(crate) fn percent(&mut self, percent: u64) -> bool {
        self.within(0, 100) < percent
    }

    pub(crate) fn pick<'a, T>(&mut self, from: &'a [T]) -> &'a T {
        let index = self.within(0, from.len() as u64);
        &from[usize::try_from(index).expect("an index")]
    }

    /// Another stream of numbers.
    pub(crate) fn split(&mut self) -> Self {
        Self(self.next())
    }
}

#[test]
fn a_seed_repeats_its_numbers_and_others_differ() {
    let numbers = |seed| {
        let mut random = Random::new(seed);
        [random.next(), random.split().next(), random.next()]
    };
    assert_eq!(numbers(7), numbers(7));
    assert_ne!(numbers(7), numbers(8));
}
