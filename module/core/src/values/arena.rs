//! Storage for values that are named by small ids. An id is never mistaken for that of a later
//! value.

use std::num::NonZeroU32;

/// The id of a value in an [`Arena`]. It stays invalid after the value was removed, also when the
/// slot is used again.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub(crate) struct Id {
    index: u32,
    /// A number that each new value gets. It repeats after four billion values, and by then no old
    /// id of the same slot is in use any more.
    born: NonZeroU32,
}

impl Id {
    /// Smaller than any other id or equal to it: the start of a range of ids.
    pub(crate) const FIRST: Self = Self {
        index: 0,
        born: NonZeroU32::MIN,
    };
}

/// Values in slots that are reused. The slots come in pages, so that an arena that grows neither
/// moves its values nor allocates twice their memory.
#[derive(Debug)]
pub(crate) struct Arena<T> {
    pages: Vec<Vec<Option<(NonZeroU32, T)>>>,
    vacant: Vec<u32>,
    slots: u32,
    last_born: NonZeroU32,
}

const PAGE: u32 = 256;

/// An arena that has become empty keeps its slots if there are at most this many.
const KEPT_MAX: u32 = 1024;

impl<T> Default for Arena<T> {
    fn default() -> Self {
        Self {
            pages: Vec::new(),
            vacant: Vec::new(),
            slots: 0,
            last_born: NonZeroU32::MAX,
        }
    }
}

impl<T> Arena<T> {
    /// Stores a value. None if all four billion slots are taken.
    pub(crate) fn insert(&mut self, value: T) -> Option<Id> {
        let index = self.vacant.pop().or_else(|| self.new_slot())?;
        self.last_born = self.last_born.checked_add(1).unwrap_or(NonZeroU32::MIN);
        let id = Id {
            index,
            born: self.last_born,
        };
        *self.slot_mut(id)? = Some((id.born, value));
        Some(id)
    }

    pub(crate) fn remove(&mut self, id: Id) -> Option<T> {
        let (_, value) = self.slot_mut(id)?.take_if(|(born, _)| *born == id.born)?;
        self.vacant.push(id.index);
        if self.len() == 0 && self.slots > KEPT_MAX {
            // Many values have left: give their memory back.
            (self.pages, self.vacant, self.slots) = (Vec::new(), Vec::new(), 0);
        }
        Some(value)
    }

    pub(crate) fn get(&self, id: Id) -> Option<&T> {
        let (page, slot) = place(id.index);
        let (born, value) = self.pages.get(page)?.get(slot)?.as_ref()?;
        (*born == id.born).then_some(value)
    }

    pub(crate) fn get_mut(&mut self, id: Id) -> Option<&mut T> {
        let (born, value) = self.slot_mut(id)?.as_mut()?;
        (*born == id.born).then_some(value)
    }

    pub(crate) fn len(&self) -> usize {
        usize::try_from(self.slots)
            .unwrap_or(usize::MAX)
            .saturating_sub(self.vacant.len())
    }

    /// The values with their ids, in the order of their slots.
    pub(crate) fn iter(&self) -> impl Iterator<Item = (Id, &T)> {
        self.pages
            .iter()
            .flatten()
            .zip(0u32..)
            .filter_map(|(slot, index)| {
                let (born, value) = slot.as_ref()?;
                Some((Id { index, born: *born }, value))
            })
    }

    fn new_slot(&mut self) -> Option<u32> {
        let index = self.slots;
        self.slots = index.checked_add(1)?;
        let (page, slot) = place(index);
        if slot == 0 {
            self.pages.push(Vec::with_capacity(PAGE.try_into().ok()?));
        }
        self.pages.get_mut(page)?.push(None);
        Some(index)
    }

    fn slot_mut(&mut self, id: Id) -> Option<&mut Option<(NonZeroU32, T)>> {
        let (page, slot) = place(id.index);
        self.pages.get_mut(page)?.get_mut(slot)
    }
}

/// The page of a slot, and the slot's index in it.
fn place(index: u32) -> (usize, usize) {
    let part = |part: u32| usize::try_from(part).unwrap_or(usize::MAX);
    (part(index.div_euclid(PAGE)), part(index.rem_euclid(PAGE)))
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The pages that are left when this many values have come and gone.
    fn pages_after(values: u32) -> usize {
        let mut arena = Arena::default();
        let ids: Vec<_> = (0..values).map(|value| arena.insert(value)).collect();
        for id in ids.into_iter().flatten() {
            assert!(arena.remove(id).is_some());
        }
        assert_eq!(arena.len(), 0);
        arena.pages.len()
    }

    #[test]
    fn the_memory_of_many_values_is_given_back_when_the_last_has_gone() {
        assert_ne!(pages_after(KEPT_MAX), 0);
        for many in [KEPT_MAX + 1, 5 * KEPT_MAX] {
            assert_eq!(pages_after(many), 0);
        }
    }
}
