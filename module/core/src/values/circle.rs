//! A circle of owners: each would wait for the next, and the last for the first.

use crate::values::word::Word;
use std::fmt;
use std::rc::Rc;

/// Owners that would wait for each other, each for the next and the last for the first.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Circle {
    /// The owners that the text shows, and perhaps more.
    steps: Vec<CircleStep>,
    /// How many owners there are.
    length: usize,
}

#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct CircleStep {
    pub(crate) owner: Rc<[u8]>,
    pub(crate) waits_for: Rc<[u8]>,
    /// None where the caller may not read the lock.
    pub(crate) lock: Option<Rc<[u8]>>,
}

impl Circle {
    /// A circle of one: a reader that asks to write.
    pub(crate) fn of_reader(owner: &[u8], lock: &[u8]) -> Self {
        let owner: Rc<[u8]> = Rc::from(owner);
        Self::of(vec![CircleStep {
            owner: Rc::clone(&owner),
            waits_for: owner,
            lock: Some(Rc::from(lock)),
        }])
    }

    pub(crate) fn of(steps: Vec<CircleStep>) -> Self {
        let length = steps.len();
        Self { steps, length }
    }

    /// A copy for the log: only the owners that the text shows, and no lock name longer than
    /// `name_max`.
    pub(crate) fn as_kept(&self, name_max: usize) -> Self {
        let mut kept = Self {
            steps: self.steps.iter().take(SHOWN_MAX).cloned().collect(),
            length: self.length,
        };
        kept.keep_readable(|name| name.len() <= name_max);
        kept
    }

    /// How many bytes the names in it take.
    pub(crate) fn size(&self) -> usize {
        let names = self.steps.iter().map(|step| {
            let lock = step.lock.as_ref().map_or(0, |lock| lock.len());
            let owners = step.owner.len().saturating_add(step.waits_for.len());
            lock.saturating_add(owners)
        });
        names.sum()
    }

    /// Removes the names of locks that the caller may not read.
    pub fn keep_readable(&mut self, mut may_read: impl FnMut(&[u8]) -> bool) {
        for step in &mut self.steps {
            step.lock = step.lock.take().filter(|lock| may_read(lock));
        }
    }
}

/// The text of a longer circle is cut.
const SHOWN_MAX: usize = 16;

impl fmt::Display for Circle {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self.length {
            1 => f.write_str("a reader cannot become the writer: ")?,
            length => write!(f, "{length} owners would wait for each other: ")?,
        }
        for (number, step) in self.steps.iter().take(SHOWN_MAX).enumerate() {
            let comma = if number > 0 { ", " } else { "" };
            let (owner, waits_for) = (Word::new(&step.owner), Word::new(&step.waits_for));
            write!(f, "{comma}'{owner}' waits for '{waits_for}'")?;
            if let Some(lock) = &step.lock {
                write!(f, " at '{}'", Word::new(lock))?;
            }
        }
        if self.length > SHOWN_MAX {
            f.write_str(", and so on")?;
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Each owner has a name of one byte, and so has each lock.
    fn circle(length: u8) -> Circle {
        let name = |number: u8| Rc::from([number.checked_rem(length).unwrap_or(0)]);
        let step = |number: u8| CircleStep {
            owner: name(number),
            waits_for: name(number.saturating_add(1)),
            lock: Some(name(number)),
        };
        Circle::of((0..length).map(step).collect())
    }

    #[test]
    fn a_circle_shows_sixteen_owners_and_says_whether_there_are_more() {
        for length in [2, 16, 17] {
            let text = circle(length).to_string();
            assert_eq!(text.matches(" waits for ").count(), length.min(16).into());
            assert_eq!(text.ends_with(", and so on"), length > 16, "{text}");
        }
    }

    #[test]
    fn what_is_kept_of_a_circle_is_counted() {
        assert_eq!(circle(16).as_kept(10).size(), 16 * 3);
        assert_eq!(circle(20).as_kept(10).size(), 16 * 3);
        // A longer name of a lock is not kept.
        assert_eq!(circle(16).as_kept(0).size(), 16 * 2);
    }
}
