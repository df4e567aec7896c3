//! A map that mostly has one entry.

use std::borrow::Borrow;
use std::collections::BTreeMap;

/// A map that mostly has one entry. One entry needs no allocation, and no search.
#[derive(Debug, Default)]
pub(crate) enum Few<K, V> {
    #[default]
    None,
    One(K, V),
    #[allow(clippy::box_collection, reason = "the map is as small as one entry")]
    Many(Box<BTreeMap<K, V>>),
}

impl<K: Ord, V> Few<K, V> {
    pub(crate) fn is_empty(&self) -> bool {
        matches!(self, Self::None)
    }

    pub(crate) fn get<Q: Ord + ?Sized>(&self, key: &Q) -> Option<&V>
    where
        K: Borrow<Q>,
    {
        match self {
            Self::One(only, value) if only.borrow() == key => Some(value),
            Self::Many(many) => many.get(key),
            _ => None,
        }
    }

    pub(crate) fn get_mut<Q: Ord + ?Sized>(&mut self, key: &Q) -> Option<&mut V>
    where
        K: Borrow<Q>,
    {
        match self {
            Self::One(only, value) if (*only).borrow() == key => Some(value),
            Self::Many(many) => many.get_mut(key),
            _ => None,
        }
    }

    /// Adds an entry. It takes the place of another one with the same key.
    pub(crate) fn insert(&mut self, key: K, value: V) {
        *self = match std::mem::take(self) {
            Self::None => Self::One(key, value),
            Self::One(only, of_only) => {
                Self::Many(Box::new(BTreeMap::from([(only, of_only), (key, value)])))
            }
            Self::Many(mut many) => {
                many.insert(key, value);
                Self::Many(many)
            }
        };
    }

    /// Removes the entry with this key, if it exists.
    pub(crate) fn remove<Q: Ord + ?Sized>(&mut self, key: &Q)
    where
        K: Borrow<Q>,
    {
        let is_last = match self {
            Self::None => false,
            Self::One(only, _) => (*only).borrow() == key,
            Self::Many(many) => {
                many.remove(key);
                many.is_empty()
            }
        };
        if is_last {
            *self = Self::None;
        }
    }

    /// The entries, sorted by their keys.
    pub(crate) fn iter(&self) -> impl Iterator<Item = (&K, &V)> {
        let (one, many) = match self {
            Self::None => (None, None),
            Self::One(only, value) => (Some((only, value)), None),
            Self::Many(many) => (None, Some(many.iter())),
        };
        one.into_iter().chain(many.into_iter().flatten())
    }

    /// The entry, if there is no other.
    pub(crate) fn only(&self) -> Option<(&K, &V)> {
        let mut entries = self.iter();
        entries.next().filter(|_| entries.next().is_none())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn it_is_a_map_with_any_number_of_entries() {
        let (mut few, mut map) = (Few::None, BTreeMap::new());
        // Each number is inserted twice and removed twice, in an order that mixes both.
        for step in 0..64_u32 {
            let (key, removes) = (step.wrapping_mul(7) % 4, step % 3 > 0);
            if removes {
                few.remove(&key);
                map.remove(&key);
            } else {
                few.insert(key, step);
                map.insert(key, step);
            }
            assert!(few.iter().eq(map.iter()), "{few:?} {map:?}");
            assert_eq!(few.is_empty(), map.is_empty());
            assert_eq!(few.get(&key), map.get(&key));
            assert_eq!(few.get_mut(&key), map.get_mut(&key));
            assert_eq!(few.only(), map.iter().next().filter(|_| map.len() == 1));
        }
    }
}
