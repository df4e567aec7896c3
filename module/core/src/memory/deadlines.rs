//! Ids by the moments at which they are due.

use std::collections::BTreeSet;

/// Ids by the moments at which they are due, the nearest first. The value of an id stores its
/// moment as well, in a field that is passed here: the two change together.
#[derive(Debug)]
pub(crate) struct Deadlines<I>(BTreeSet<(i64, I)>);

impl<I> Default for Deadlines<I> {
    fn default() -> Self {
        Self(BTreeSet::new())
    }
}

impl<I: Copy + Ord> Deadlines<I> {
    /// Sets the moment at which a value is due; none is never.
    pub(crate) fn set(&mut self, id: I, field: &mut Option<i64>, at: Option<i64>) {
        if let Some(former) = std::mem::replace(field, at) {
            self.0.remove(&(former, id));
        }
        self.0.extend(at.map(|at| (at, id)));
    }

    /// The same, but an earlier moment stays.
    pub(crate) fn bring_forward(&mut self, id: I, field: &mut Option<i64>, at: i64) {
        if field.is_none_or(|earlier| earlier > at) {
            self.set(id, field, Some(at));
        }
    }

    /// The nearest moment.
    pub(crate) fn next(&self) -> Option<i64> {
        self.0.first().map(|(at, _)| *at)
    }

    /// The first value that is due.
    pub(crate) fn due(&self, now: i64) -> Option<I> {
        let (at, id) = self.0.first()?;
        (*at <= now).then_some(*id)
    }
}

#[cfg(debug_assertions)]
impl<I: Copy + Ord + std::fmt::Debug> Deadlines<I> {
    /// Asserts that these are the fields of all values.
    pub(crate) fn check(&self, fields: impl Iterator<Item = (Option<i64>, I)>) {
        let fields = fields.filter_map(|(at, id)| Some((at?, id)));
        assert_eq!(self.0, fields.collect());
    }
}
