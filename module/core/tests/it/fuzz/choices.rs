//! A fuzzer's bytes as choices.

/// The choices that the bytes decide, one after the other. At their end every choice is the first.
#[derive(Debug)]
pub(super) struct Choices<'a>(&'a [u8]);

impl<'a> Choices<'a> {
    pub(super) fn new(data: &'a [u8]) -> Self {
        Self(data)
    }

    /// The same choices once more. They use up no bytes, so that bytes that found something once go
    /// on saying the same.
    pub(super) fn again(&self) -> Self {
        Self(self.0)
    }

    pub(super) fn are_over(&self) -> bool {
        self.0.is_empty()
    }

    fn byte(&mut self) -> u8 {
        let Some((first, rest)) = self.0.split_first() else {
            return 0;
        };
        self.0 = rest;
        *first
    }

    /// A number below `count`, which is 256 at most.
    pub(super) fn below(&mut self, count: usize) -> usize {
        usize::from(self.byte()) % count
    }

    pub(super) fn one_in(&mut self, count: usize) -> bool {
        self.below(count) == count - 1
    }

    pub(super) fn of<T: Copy>(&mut self, table: &[T]) -> T {
        table[self.below(table.len())]
    }

    /// Any number.
    pub(super) fn number(&mut self) -> i64 {
        i64::from_le_bytes(std::array::from_fn(|_| self.byte()))
    }

    /// Any bytes, `most` of them at most.
    pub(super) fn bytes(&mut self, most: usize) -> Vec<u8> {
        (0..self.below(most + 1)).map(|_| self.byte()).collect()
    }

    pub(super) fn maybe<T>(&mut self, value: impl FnOnce(&mut Self) -> T) -> Option<T> {
        (self.below(2) == 1).then(|| value(self))
    }
}
