//! Chance that a seed replays.

/// A small generator of numbers, the same for the same seed (xorshift).
#[derive(Clone, Debug)]
pub struct Random(u64);

impl Random {
    /// The numbers of this seed.
    #[must_use]
    pub fn new(seed: u64) -> Self {
        // From zero nothing but zeros would follow.
        Self(seed.max(1))
    }

    /// A number less than `bound`, which is not zero.
    pub fn below(&mut self, bound: u64) -> u64 {
        self.0 ^= self.0 << 13;
        self.0 ^= self.0 >> 7;
        self.0 ^= self.0 << 17;
        self.0 % bound
    }

    /// A place in something of this length, which is not zero.
    pub fn index(&mut self, length: usize) -> usize {
        let below = self.below(length.try_into().unwrap());
        below.try_into().unwrap()
    }

    /// One of these; there must be at least one.
    pub fn pick<'a, T: ?Sized>(&mut self, of: &[&'a T]) -> &'a T {
        of[self.index(of.len())]
    }
}
