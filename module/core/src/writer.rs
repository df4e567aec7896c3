//! The tokens of writers.
//!
//! A read-write lock's hash has no room for its writer's token, so it is known only to the server
//! that granted it, and only here.

use crate::arena::ROOM_KEPT;
use crate::{LockRef, Now, Token};
use std::collections::{BTreeMap, BTreeSet, HashMap};
use std::rc::Rc;

/// The token of each lock's latest writer.
#[derive(Debug, Default)]
pub(crate) struct WriterTokens {
    databases: BTreeMap<i32, HashMap<Rc<[u8]>, Writer>>,
    /// By the end of the lease, so that those are found whose locks were never given back.
    ends: BTreeSet<(i64, i32, Rc<[u8]>)>,
}

#[derive(Debug)]
struct Writer {
    owner: Rc<[u8]>,
    token: Token,
    /// When the lease ends, as far as was heard of it, in milliseconds of the wall clock.
    ends_at: i64,
}

impl WriterTokens {
    /// The token of the owner's hold, where the owner is known to be the lock's writer.
    pub(crate) fn of(&self, lock: LockRef<'_>, owner: &[u8]) -> Option<Token> {
        let writer = self.databases.get(&lock.db)?.get(lock.name)?;
        (*writer.owner == *owner).then_some(writer.token)
    }

    /// The owner has the lock with this token until then.
    pub(crate) fn keep(&mut self, lock: LockRef<'_>, owner: &[u8], token: Token, ends_at: i64) {
        self.forget(lock);
        let name: Rc<[u8]> = Rc::from(lock.name);
        self.ends.insert((ends_at, lock.db, Rc::clone(&name)));
        let writer = Writer {
            owner: Rc::from(owner),
            token,
            ends_at,
        };
        self.databases
            .entry(lock.db)
            .or_default()
            .insert(name, writer);
    }

    /// The lock's lease ends then, whatever prolonged it.
    pub(crate) fn lasts_until(&mut self, lock: LockRef<'_>, ends_at: i64) {
        let names = self.databases.get_mut(&lock.db);
        let Some(writer) = names.and_then(|names| names.get_mut(lock.name)) else {
            return;
        };
        let former = std::mem::replace(&mut writer.ends_at, ends_at);
        let name: Rc<[u8]> = Rc::from(lock.name);
        self.ends.remove(&(former, lock.db, Rc::clone(&name)));
        self.ends.insert((ends_at, lock.db, name));
    }

    /// The owner writes no more. Where somebody else wrote two writers into the hash, the other's
    /// token stays.
    pub(crate) fn forget_of(&mut self, lock: LockRef<'_>, owner: &[u8]) {
        if self.of(lock, owner).is_some() {
            self.forget(lock);
        }
    }

    /// The lock has no writer any more, or another one.
    pub(crate) fn forget(&mut self, lock: LockRef<'_>) {
        let Some(names) = self.databases.get_mut(&lock.db) else {
            return;
        };
        if let Some((name, writer)) = names.remove_entry(lock.name) {
            self.ends.remove(&(writer.ends_at, lock.db, name));
        }
        if names.is_empty() {
            names.shrink_to(ROOM_KEPT);
        }
    }

    /// Forgets writers whose lease is over: two at a time, which is more than come in, so what is
    /// kept stays in proportion to the locks that are held.
    pub(crate) fn forget_overdue(&mut self, now: Now) {
        for _ in 0..2 {
            let overdue = self.ends.first().filter(|(end, ..)| *end < now.wall_ms());
            let Some((_, db, name)) = overdue.cloned() else {
                return;
            };
            self.forget(LockRef { db, name: &name });
        }
    }

    pub(crate) fn forget_all(&mut self) {
        *self = Self::default();
    }
}
