//! How long to pause between two tries to get a majority.

use std::time::Duration;

use crate::backoff::{part_of, random};

/// Pauses of a random length, up to a longest that doubles from 20 ms to 200 ms.
///
/// Random, because two clients that took half of the servers each would otherwise do so again and
/// again. Short, because nobody tells a client that the lock is free: for so long it may lie idle.
pub(crate) struct Pauses(Duration);

impl Pauses {
    pub(crate) fn new() -> Self {
        Self(FIRST)
    }

    pub(crate) fn next(&mut self) -> Duration {
        let longest = self.0;
        self.0 = longest.saturating_mul(2).min(LONGEST);
        part_of(longest, random())
    }
}

const FIRST: Duration = Duration::from_millis(20);
const LONGEST: Duration = Duration::from_millis(200);

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn from_nothing_to_the_longest() {
        assert_eq!(part_of(LONGEST, 0), Duration::ZERO);
        assert_eq!(part_of(LONGEST, u32::MAX), LONGEST);
        let half = part_of(LONGEST, u32::MAX / 2);
        assert!(half > Duration::from_millis(99) && half <= Duration::from_millis(100));
    }

    #[test]
    fn the_longest_doubles_up_to_its_end_and_two_clients_differ() {
        let (mut one, mut other) = (Pauses::new(), Pauses::new());
        let mut differ = false;
        for longest in [20, 40, 80, 160, 200, 200] {
            let pauses = (one.next(), other.next());
            assert!(pauses.0.max(pauses.1) <= Duration::from_millis(longest));
            differ |= pauses.0 != pauses.1;
        }
        assert!(differ);
    }
}
