//! Counters by patterns of lock names: `rlock.metrics-patterns`.

use crate::memory::log::metrics::Histogram;
use crate::values::glob::Glob;
use crate::values::limits::LOGGED_NAME_MAX;

/// The largest number of patterns.
pub const PATTERNS_MAX: usize = 16;

/// The longest pattern, in bytes.
pub const PATTERN_LEN_MAX: usize = 256;

/// The counters of the locks whose names match a pattern and none of the patterns before it.
#[derive(Clone, Debug, Default)]
pub struct PatternCounters {
    /// The pattern.
    pub pattern: Box<[u8]>,
    /// Grants of locks to owners that did not hold them, hand-overs included.
    pub grants: u64,
    /// Waits that began. A wait for several locks counts at each of them.
    pub waits: u64,
    /// Holds whose session was told that they were lost.
    pub lost: u64,
    /// How long granted waiters had waited, in milliseconds.
    pub wait_ms: Histogram,
    /// How long locks were held from grant to last release, in milliseconds.
    pub hold_ms: Histogram,
}

/// The patterns by which locks are counted, in their order.
#[derive(Debug, Default)]
pub(crate) struct Patterns {
    /// The patterns as they were set.
    text: Box<[u8]>,
    /// One glob for each pattern, in the same order.
    globs: Vec<Glob>,
    counters: Vec<PatternCounters>,
}

/// Whether a text is a valid list of patterns, separated by spaces.
pub fn are_patterns(text: &[u8]) -> bool {
    let fits = |pattern: &[u8]| pattern.len() <= PATTERN_LEN_MAX;
    each_of(text).all(fits) && each_of(text).count() <= PATTERNS_MAX
}

fn each_of(text: &[u8]) -> impl Iterator<Item = &[u8]> {
    let parts = text.split(|byte| *byte == b' ');
    parts.filter(|pattern| !pattern.is_empty())
}

impl Patterns {
    /// Counts by these patterns from now on, and from zero. If they are set already, the counters
    /// go on. Returns whether these are others.
    pub(crate) fn set(&mut self, text: &[u8]) -> bool {
        if *text == *self.text {
            return false;
        }
        let patterns = each_of(text).filter(|pattern| pattern.len() <= PATTERN_LEN_MAX);
        let counters = patterns.take(PATTERNS_MAX).map(|pattern| PatternCounters {
            pattern: pattern.into(),
            ..PatternCounters::default()
        });
        self.counters = counters.collect();
        let patterns = self.counters.iter().map(|of| &of.pattern);
        self.globs = patterns.map(|pattern| Glob::new(pattern)).collect();
        self.text = text.into();
        true
    }

    /// The counters of the first pattern that a name matches. A name that is too long for the log
    /// is not matched, because matching takes longer the longer the name is.
    #[inline]
    pub(crate) fn of(&mut self, name: &[u8]) -> Option<&mut PatternCounters> {
        if self.counters.is_empty() {
            return None;
        }
        self.first_match(name)
    }

    fn first_match(&mut self, name: &[u8]) -> Option<&mut PatternCounters> {
        let number = self.number(name);
        self.counters.get_mut(number.checked_sub(1)?)
    }

    /// The number of the first pattern that a name matches, from 1; 0 if it matches none.
    #[inline]
    pub(crate) fn number(&self, name: &[u8]) -> usize {
        let is_short = name.len() <= LOGGED_NAME_MAX;
        let mut each = (1..).zip(&self.globs);
        let first = each.find(|(_, glob)| is_short && glob.matches(name));
        first.map_or(0, |(number, _)| number)
    }

    pub(crate) fn counters(&self) -> &[PatternCounters] {
        &self.counters
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_first_pattern_that_matches_counts() {
        let mut patterns = Patterns::default();
        assert!(patterns.of(b"orders:1").is_none());
        patterns.set(b" orders:* *:1  * ");
        for (name, expected) in [(&b"orders:1"[..], 0), (b"stock:1", 1), (b"x", 2)] {
            patterns.of(name).unwrap().grants += 1;
            let counted: Vec<u64> = patterns.counters().iter().map(|of| of.grants).collect();
            assert_eq!(counted[expected], 1, "{name:?}");
        }
        assert!(patterns.of(&[b'n'; LOGGED_NAME_MAX + 1]).is_none());
        patterns.set(b" orders:* *:1  * ");
        assert_eq!(patterns.counters()[0].grants, 1, "the same: goes on");
        patterns.set(b"orders:*");
        assert_eq!(patterns.counters()[0].grants, 0, "others: from zero");
        patterns.set(b"");
        assert!(patterns.of(b"orders:1").is_none());
    }

    #[test]
    fn no_more_and_no_longer_patterns_are_taken() {
        let many = |count: usize| vec![&b"*"[..]; count].join(&b' ');
        assert!(are_patterns(b"") && are_patterns(&many(16)));
        assert!(!are_patterns(&many(17)));
        assert!(are_patterns(&[b'p'; 256]) && !are_patterns(&[b'p'; 257]));
    }
}
