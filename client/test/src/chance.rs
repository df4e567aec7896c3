//! The one source of random numbers of a network: the same seed gives the same numbers.

use std::cell::RefCell;
use std::rc::Rc;
use std::time::Duration;

/// Clones draw from the same source.
#[derive(Clone, Debug)]
pub(crate) struct Chance(Rc<RefCell<fastrand::Rng>>);

impl Chance {
    pub(crate) fn of(seed: u64) -> Self {
        Self(Rc::new(RefCell::new(fastrand::Rng::with_seed(seed))))
    }

    /// A number below this limit; 0 if the limit is 0.
    pub(crate) fn below(&self, limit: u64) -> u64 {
        match limit {
            0 => 0,
            _ => self.0.borrow_mut().u64(0..limit),
        }
    }

    /// A time of at most this.
    pub(crate) fn up_to(&self, longest: Duration) -> Duration {
        let longest = u64::try_from(longest.as_micros()).unwrap_or(u64::MAX);
        Duration::from_micros(self.below(longest.saturating_add(1)))
    }

    /// A seed for another source.
    pub(crate) fn seed(&self) -> u64 {
        self.0.borrow_mut().u64(..)
    }
}
