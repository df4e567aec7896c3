//! The fencing token: a number that grows with every grant.

use crate::values::number;
use std::num::NonZeroI64;

/// A fencing token: a positive 63-bit integer.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct Token(NonZeroI64);

impl Token {
    /// The token with this number, if it is positive.
    pub fn new(number: i64) -> Option<Self> {
        NonZeroI64::new(number.max(0)).map(Self)
    }

    /// The token as a number.
    pub fn get(self) -> i64 {
        self.0.get()
    }

    /// Parses the value of a lock's `fence` field: a `t`, then the number in plain decimal.
    ///
    /// The `t` is there because Redisson's read-unlock script, run on a plain lock by mistake,
    /// counts down from every field that is a bare number. Another client wrote any other value: it
    /// is no token.
    pub fn from_field(value: &[u8]) -> Option<Self> {
        let digits = value.strip_prefix(b"t")?;
        number::integer(digits).and_then(Self::new)
    }

    /// Parses the value of a reader's timeout key: the number in plain decimal. Redisson writes
    /// `1`, which is no token.
    pub fn from_timeout(value: &[u8]) -> Option<Self> {
        number::integer(value)
            .filter(|number| *number > 1)
            .and_then(Self::new)
    }
}

/// Mints tokens that never repeat and never go back, although the clock may.
///
/// Each is `max(last + 1, wall clock in microseconds)`. At the start `last` is set ahead of the
/// clock by a guard, so tokens grow across restarts and failovers as long as the clocks involved
/// differ by less than the guard.
#[derive(Clone, Copy, Debug, Default)]
pub struct TokenMint {
    last: i64,
    /// The highest token that was minted well ahead of the clock; see [`TokenMint::minted_at`].
    ahead_of_clock: i64,
    /// When the last one was minted, by the wall clock in microseconds.
    last_at: i64,
}

/// A token that is ahead of the clock by no more than this still tells when it was minted: several
/// grants of the same microsecond run ahead a little.
const CLOCK_SLACK_US: i64 = 1000;

impl TokenMint {
    /// Raises `last` to `guard_ms` ahead of the clock: at the start, after loading, at a promotion.
    pub fn start(&mut self, wall_us: i64, guard_ms: i64) {
        let mark = wall_us.saturating_add(guard_ms.saturating_mul(1000));
        self.last = self.last.max(mark);
    }

    /// The next token.
    pub fn mint(&mut self, wall_us: i64) -> Token {
        let next = self.last.saturating_add(1).max(wall_us).max(1);
        (self.last, self.last_at) = (next, wall_us);
        if next > wall_us.saturating_add(CLOCK_SLACK_US) {
            self.ahead_of_clock = next;
        }
        Token(NonZeroI64::new(next).unwrap_or(NonZeroI64::MIN))
    }

    /// The wall-clock moment at which this token was minted, if the token tells it. A token taken
    /// from the clock does; one minted while `last` was ahead of the clock does not.
    pub fn minted_at(&self, token: Token) -> Option<i64> {
        (token.get() > self.ahead_of_clock).then(|| token.get())
    }

    /// The same, but for the latest token its moment is always known.
    pub(crate) fn granted_at(&self, token: Token) -> Option<i64> {
        let is_last = token.get() == self.last;
        is_last
            .then_some(self.last_at)
            .or_else(|| self.minted_at(token))
    }
}
