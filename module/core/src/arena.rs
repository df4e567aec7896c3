//! Places for values that are named by small ids, which are never mistaken for later ones.

/// The name of a value in an [`Arena`]. It stays invalid after the value is gone, whoever moves in.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub(crate) struct Id {
    index: u32,
    /// How many values came before this one. No two values share it, so an id needs no generation.
    born: u64,
}

impl Id {
    /// Not above any id: where a range of them begins.
    pub(crate) const FIRST: Self = Self { index: 0, born: 0 };
}

/// Values in slots that are used again.
#[derive(Debug)]
pub(crate) struct Arena<T> {
    slots: Vec<Option<(u64, T)>>,
    vacant: Vec<u32>,
    births: u64,
}

impl<T> Default for Arena<T> {
    fn default() -> Self {
        Self {
            slots: Vec::new(),
            vacant: Vec::new(),
            births: 0,
        }
    }
}

impl<T> Arena<T> {
    /// Takes a value in. None if four billion places are taken.
    pub(crate) fn insert(&mut self, value: T) -> Option<Id> {
        let index = if let Some(index) = self.vacant.pop() {
            index
        } else {
            let index = u32::try_from(self.slots.len()).ok()?;
            self.slots.push(None);
            index
        };
        let id = Id {
            index,
            born: self.births,
        };
        self.births = self.births.wrapping_add(1);
        *self.slot_mut(id)? = Some((id.born, value));
        Some(id)
    }

    pub(crate) fn remove(&mut self, id: Id) -> Option<T> {
        let (_, value) = self.slot_mut(id)?.take_if(|(born, _)| *born == id.born)?;
        self.vacant.push(id.index);
        if self.vacant.len() == self.slots.len() && self.slots.len() > KEPT_MAX {
            // A crowd has left: its places must not stay behind.
            self.slots = Vec::new();
            self.vacant = Vec::new();
        }
        Some(value)
    }

    pub(crate) fn get(&self, id: Id) -> Option<&T> {
        let (born, value) = self.slots.get(usize::try_from(id.index).ok()?)?.as_ref()?;
        (*born == id.born).then_some(value)
    }

    pub(crate) fn get_mut(&mut self, id: Id) -> Option<&mut T> {
        let (born, value) = self.slot_mut(id)?.as_mut()?;
        (*born == id.born).then_some(value)
    }

    pub(crate) fn len(&self) -> usize {
        self.slots.len().saturating_sub(self.vacant.len())
    }

    /// The values with their ids, in the order of their slots.
    pub(crate) fn iter(&self) -> impl Iterator<Item = (Id, &T)> {
        self.slots.iter().zip(0u32..).filter_map(|(slot, index)| {
            let (born, value) = slot.as_ref()?;
            Some((Id { index, born: *born }, value))
        })
    }

    fn slot_mut(&mut self, id: Id) -> Option<&mut Option<(u64, T)>> {
        self.slots.get_mut(usize::try_from(id.index).ok()?)
    }
}

/// An empty arena keeps up to this many slots for those who come next.
const KEPT_MAX: usize = 1024;
