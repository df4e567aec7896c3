//! When two states count as the same.
//!
//! A state is written out as bytes: every number as one byte, every list behind its length, every
//! enum behind its variant. Two states have the same bytes only if they are equal. The search keeps
//! 128 bits of them, from two independent keys of `SipHash`: among a hundred million states the
//! probability that any two different ones share them is below 2^-75.

use std::hash::{DefaultHasher, Hash, Hasher};

pub(crate) fn fingerprint(state: &impl Hash) -> u128 {
    let mut bytes = Bytes::default();
    state.hash(&mut bytes);
    let half = |key: u8| {
        let mut hasher = DefaultHasher::new();
        hasher.write_u8(key);
        hasher.write(&bytes.0);
        u128::from(hasher.finish())
    };
    half(0) << 64 | half(1)
}

/// Collects what a derived `Hash` writes, and shortens lengths and variants to a byte.
#[derive(Default)]
struct Bytes(Vec<u8>);

impl Hasher for Bytes {
    fn write(&mut self, bytes: &[u8]) {
        self.0.extend_from_slice(bytes);
    }

    fn write_usize(&mut self, n: usize) {
        self.0
            .push(u8::try_from(n).expect("a number of the model fits a byte"));
    }

    fn write_isize(&mut self, n: isize) {
        self.0
            .push(u8::try_from(n).expect("an enum has few variants"));
    }

    fn finish(&self) -> u64 {
        0
    }
}
