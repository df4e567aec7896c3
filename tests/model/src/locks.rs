//! The locks of one server: holds and queues. No sessions, no connections.

use crate::message::{Kind, Mode, Subject};
use crate::setup::Setup;

#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub(crate) struct Hold {
    pub(crate) subject: Subject,
    pub(crate) token: u8,
    /// Ticks until the lease ends.
    pub(crate) left: u8,
    /// The session it belongs to, by its life; 0 = none.
    pub(crate) life: u8,
    pub(crate) call: u8,
}

#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub(crate) struct Wait {
    pub(crate) subject: Subject,
    pub(crate) life: u8,
    pub(crate) call: u8,
}

/// An event for a session, without its number.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(crate) struct Notice {
    pub(crate) life: u8,
    pub(crate) kind: Kind,
    pub(crate) subject: Subject,
    pub(crate) token: u8,
    pub(crate) call: u8,
}

impl Hold {
    /// Any number of readers, or one owner.
    pub(crate) fn keeps_out(&self, subject: Subject) -> bool {
        let are_readers = self.subject.mode == Mode::Read && subject.mode == Mode::Read;
        let is_its_own = self.subject.meets(subject);
        self.subject.names.meets(subject.names) && !are_readers && !is_its_own
    }

    pub(crate) fn lost(&self) -> Notice {
        Notice {
            life: self.life,
            kind: Kind::Lost,
            subject: self.subject,
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
            subject: self.subject.first(),
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
    /// For the checks: a grant that was not in order.
    pub(crate) violation: Option<&'static str>,
}

impl Locks {
    pub(crate) fn hold(&self, subject: Subject) -> Option<&Hold> {
        self.holds.iter().find(|hold| hold.subject == subject)
    }

    /// Whether `wait` can be granted, with the first `ahead` waits before it.
    pub(crate) fn may_enter(&self, wait: &Wait, ahead: usize, setup: &Setup) -> bool {
        wait.subject.each().all(|one| {
            // A writer reads past the queue: those in it wait for its WRITE as well.
            let is_writer = self.is_writer(one);
            let is_kept_out = self.holds.iter().any(|hold| hold.keeps_out(one));
            let is_queued = setup.rules.fifo && self.is_behind(one, ahead);
            is_writer || !is_kept_out && !is_queued
        })
    }

    /// Whether this is READ of an owner who holds WRITE.
    fn is_writer(&self, subject: Subject) -> bool {
        let write = Subject {
            mode: Mode::Write,
            ..subject
        };
        subject.mode == Mode::Read && self.hold(write).is_some()
    }

    /// Whether one of the first `ahead` waits is for this lock, which the owner does not hold yet.
    pub(crate) fn is_behind(&self, one: Subject, ahead: usize) -> bool {
        let mut waits = self.waits[..ahead].iter();
        self.hold(one).is_none() && waits.any(|other| other.subject.names.meets(one.names))
    }

    /// Makes the locks the waiter's, past the first `ahead` waits. The new token.
    pub(crate) fn grant(&mut self, wait: &Wait, ahead: usize, setup: &Setup) -> u8 {
        let overtakes = |one| self.is_behind(one, ahead) && !self.is_writer(one);
        if wait.subject.each().any(overtakes) {
            self.violation = Some("a grant overtakes an earlier waiter");
        }
        self.tokens += 1;
        for one in wait.subject.each() {
            let new = Hold {
                subject: one,
                token: self.tokens,
                left: setup.size.lease,
                life: wait.life,
                call: wait.call,
            };
            match self.holds.iter_mut().find(|hold| hold.subject == one) {
                Some(hold) if setup.rules.joint_token => *hold = new,
                Some(hold) => (hold.left, hold.life) = (new.left, new.life),
                None => self.holds.push(new),
            }
        }
        self.holds.sort_by_key(|hold| hold.subject);
        self.tokens
    }

    /// Grants every waiter that can be granted now, in order.
    pub(crate) fn pass_on(&mut self, setup: &Setup) -> Vec<Notice> {
        let mut notices = vec![];
        let next = |locks: &Self| {
            let mut waits = locks.waits.iter().enumerate();
            waits.position(|(i, wait)| locks.may_enter(wait, i, setup))
        };
        while let Some(i) = next(self) {
            let wait = self.waits.remove(i);
            let token = self.grant(&wait, i, setup);
            notices.push(wait.ended(Kind::Granted, token));
        }
        notices
    }

    /// The contender takes the lock, or queues for it.
    pub(crate) fn contend(&mut self, name: u8, setup: &Setup) {
        let subject = setup.contender(name);
        let wait = Wait {
            subject,
            life: 0,
            call: 0,
        };
        let ahead = self.waits.len();
        if self.may_enter(&wait, ahead, setup) {
            self.grant(&wait, ahead, setup);
        } else {
            self.waits.push(wait);
        }
    }
}
