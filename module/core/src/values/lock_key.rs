//! The place of a lock in the keyspace.

use std::rc::Rc;

/// A lock's database and key.
#[derive(Clone, Debug, Default, PartialEq, Eq, Hash)]
pub struct LockKey {
    /// The number of the database.
    pub db: i32,
    /// The key.
    pub name: Rc<[u8]>,
}

impl LockKey {
    /// The same place, borrowed.
    pub fn as_ref(&self) -> LockRef<'_> {
        LockRef {
            db: self.db,
            name: &self.name,
        }
    }
}

impl From<LockRef<'_>> for LockKey {
    fn from(lock: LockRef<'_>) -> Self {
        Self {
            db: lock.db,
            name: Rc::from(lock.name),
        }
    }
}

/// A lock's database and key, borrowed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct LockRef<'a> {
    /// The number of the database.
    pub db: i32,
    /// The key.
    pub name: &'a [u8],
}
