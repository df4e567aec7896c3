//! What a fuzzer asks: each body takes any bytes, and panics where something is wrong.
//!
//! `make fuzz` runs them under libFuzzer (`module/core/fuzz`); here they meet random bytes, in
//! every `cargo test`. What a fuzzer finds stands in [`FOUND`], as the bytes that found it.

#![allow(
    clippy::missing_panics_doc,
    clippy::too_many_lines,
    reason = "a body is there to panic, and a table of what may happen is one table"
)]

// The bodies: arguments; what others left in the keyspace; steps without a server, a keyspace or
// sense; and histories, with the twins beside them.
mod any_state;
mod choices;
mod histories;
mod requests;
mod stored;

pub use any_state::any_state;
pub use histories::{histories, read_write_histories};
pub use requests::{globs, requests};
pub use stored::stored;

use proptest::prelude::*;
use proptest::test_runner::RngSeed;

type Body = fn(&[u8]);

/// A body, what it found wrong once, and with which bytes.
const FOUND: [(Body, &str, &[u8]); 2] = [
    (
        read_write_histories,
        "a writer among readers reads on itself for longer than it writes: the twin did not look",
        b"\x00\x00\x00\x00\x3f\x3d\x00\x00\x00\x00\x00\xae\x00\x00\x59\x00\x00\x00\x00\
      \x0d\x04\x00\x00\x00\x5e\x2a\x00\x0f\x00\x00\x00\x04\x00\x00\x6a\x86\x4f\
      \x00\x00\x00\x00\x00\x00\x00\x00\x14\x11\x00\x00\x68\xe2\x00\x00\x00\x00\
      \x00\x00\x85\x00\x00\x04\x14\x23\x2a\x13\x28\x00\x12\x00\x1c\x00\x00\x86\
      \x71\x00\x00\x00\x00\x50\x00\x99\x00\x00\x00\x12\x00\x00\x00\x00\x12\x00\
      \x00\x00\x00\x9e\x00\x0c\x00\x00\x00\x12\x00\x1d\x00\x00\x5c\x2b\x9a\x00\
      \x18\x5b\x48",
    ),
    (
        stored,
        "a reader of whom one timeout key has no end enters again, and its new lease ends early",
        b"\x00\x00 nnn\xff\xfc\xfc\xb82\x032222((((((\x0e\xbb\
      \x00\x00\x00\x00\x00\x00\x00\x00\x00\x00\x00\x00\x00\x00\x00;;\x20\
      \x00\xf9f\x0a\x07\x00\x00\x04\x00\x00\x00\x00\xff\xf7e",
    ),
];

#[test]
fn what_was_found_once_holds() {
    for (body, what, data) in FOUND {
        eprintln!("{what}");
        body(data);
    }
}

/// Fewer where nothing is optimized.
const CASES: u32 = if cfg!(debug_assertions) {
    1_000
} else {
    10_000
};

proptest! {
    #![proptest_config(ProptestConfig {
        cases: CASES,
        failure_persistence: None,
        // The same bytes in every run, so that a test which fails does so because of a change. To
        // search on is what `make fuzz` does.
        rng_seed: RngSeed::Fixed(20_261_121),
        ..ProptestConfig::default()
    })]

    #[test]
    fn requests_of_any_bytes(data in proptest::collection::vec(any::<u8>(), 0..80)) {
        requests(&data);
    }

    #[test]
    fn globs_of_any_bytes(data in proptest::collection::vec(any::<u8>(), 0..80)) {
        globs(&data);
    }

    #[test]
    fn stored_of_any_bytes(data in proptest::collection::vec(any::<u8>(), 0..200)) {
        stored(&data);
    }

    #[test]
    fn any_state_of_any_bytes(data in proptest::collection::vec(any::<u8>(), 0..600)) {
        any_state(&data);
    }

    #[test]
    fn histories_of_any_bytes(data in proptest::collection::vec(any::<u8>(), 0..300)) {
        histories(&data);
    }

    #[test]
    fn read_write_histories_of_any_bytes(data in proptest::collection::vec(any::<u8>(), 0..300)) {
        read_write_histories(&data);
    }
}
