//! The locks of one server: holds and queues. No sessions, no connections.

use crate::message::{CONTENDER, Kind};
use crate::setup::Setup;

#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub(crate) struct Hold {
    pub(crate) name: u8,
    pub(crate) owner: u8,
    pub(crate) token: u8,
    /// Ticks until the lease ends.
    pub(crate) left: u8,
    /// The session it belongs to, by its life; 0 = none.
    pub(crate) life: u8,
    pub(crate) call: u8,
}

#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub(crate) struct Wait {
    pub(crate) name: u8,
    pub(crate) owner: u8,
    pub(crate) life: u8,
    pub(crate) call: u8,
}

/// An event for a session, without its number.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(crate) struct Notice {
    pub(crate) life: u8,
    pub(crate) kind: Kind,
    pub(crate) name: u8,
    pub(crate) owner: u8,
    pub(crate) token: u8,
    pub(crate) call: u8,
}

impl Hold {
    pub(crate) fn lost(&self) -> Notice {
        Notice {
            life: self.life,
            kind: Kind::Lost,
            name: self.name,
            owner: self.owner,
            token: self.token,
            call: self.call,
        }
    }
}

impl Wait {
    pub(crate) fn ended(&self, kind: Kind, token: u8) -> Notice {
        Notice {
            life: self.life,
            kind,
            name: self.name,
            owner: self.owner,
            token,
            call: self.call,
        }
    }
}

#[derive(Clone, Debug, PartialEq, Eq, Hash, Default)]
pub(crate) struct Locks {
    pub(crate) holds: Vec<Hold>,
    /// In the order of their arrival: the queue of a lock is those of them that name it.
    pub(crate) waits: Vec<Wait>,
    /// The last token. It survives restarts.
    pub(crate) tokens: u8,
}

impl Locks {
    pub(crate) fn hold(&self, name: u8, owner: u8) -> Option<&Hold> {
        let is_it = |hold: &&Hold| (hold.name, hold.owner) == (name, owner);
        self.holds.iter().find(is_it)
    }

    /// Whether `wait` can be granted, with the first `before` waits ahead of it.
    pub(crate) fn may_enter(&self, wait: &Wait, before: usize) -> bool {
        let is_held = self.holds.iter().any(|hold| hold.name == wait.name);
        let is_queued = self.waits[..before].iter().any(|w| w.name == wait.name);
        !is_held && !is_queued
    }

    /// Makes the lock the waiter's. The new token.
    pub(crate) fn grant(&mut self, wait: &Wait, setup: &Setup) -> u8 {
        self.tokens += 1;
        self.holds.push(Hold {
            name: wait.name,
            owner: wait.owner,
            token: self.tokens,
            left: setup.size.lease,
            life: wait.life,
            call: wait.call,
        });
        self.holds.sort_by_key(|hold| (hold.name, hold.owner));
        self.tokens
    }

    /// Grants every waiter that can be granted now, in order.
    pub(crate) fn pass_on(&mut self, setup: &Setup) -> Vec<Notice> {
        let mut notices = vec![];
        let can =
            |locks: &Self| (0..locks.waits.len()).find(|i| locks.may_enter(&locks.waits[*i], *i));
        while let Some(i) = can(self) {
            let wait = self.waits.remove(i);
            let token = self.grant(&wait, setup);
            notices.push(wait.ended(Kind::Granted, token));
        }
        notices
    }

    /// The contender takes the lock, or queues for it.
    pub(crate) fn contend(&mut self, name: u8, setup: &Setup) {
        let wait = Wait {
            name,
            owner: CONTENDER,
            life: 0,
            call: 0,
        };
        if self.may_enter(&wait, self.waits.len()) {
            self.grant(&wait, setup);
        } else {
            self.waits.push(wait);
        }
    }
}
