//! The tasks of the loop: what the driver must read, and the readings that it returns.

use crate::interface::depth::ReadDepth;
use crate::interface::error::CommandError;
use crate::interface::request::{
    Acquire, Cancel, Guard, Limit, MultiAcquire, MultiRelease, MultiRenew, NamedKey, Release,
    Renew, WaitMode,
};
use crate::interface::stored::{Count, HeldBy, Stored};
use crate::interface::stored_permits::{PermitsHash, PermitsHolders, PermitsRequest};
use crate::values::ids::MultiId;
use crate::values::lock_key::LockKey;
use crate::values::mode::Mode;
use std::rc::Rc;

/// A command about locks.
#[derive(Clone, Copy, Debug)]
pub enum Command<'a> {
    /// RLOCK.ACQUIRE.
    Acquire(&'a Acquire<'a>),
    /// RLOCK.RELEASE.
    Release(&'a Release<'a>),
    /// RLOCK.RENEW.
    Renew(&'a Renew<'a>),
    /// RLOCK.GUARD.
    Guard(&'a Guard<'a>),
    /// RLOCK.CANCEL.
    Cancel(&'a Cancel<'a>),
    /// RLOCK.BREAK.
    Break(&'a [u8]),
    /// RLOCK.MACQUIRE.
    MultiAcquire(&'a MultiAcquire<'a>),
    /// RLOCK.MRELEASE.
    MultiRelease(&'a MultiRelease<'a>),
    /// RLOCK.MRENEW.
    MultiRenew(&'a MultiRenew<'a>),
    /// RLOCK.LIMIT.
    Limit(&'a Limit<'a>),
}

/// The keys that a command names.
#[derive(Clone, Copy, Debug)]
pub enum Keys<'a> {
    /// One key.
    One(&'a [u8]),
    /// Several keys, each once.
    Several(&'a [NamedKey<'a>]),
}

impl<'a> Command<'a> {
    /// The keys that the command names.
    pub fn keys(&self) -> Keys<'a> {
        self.keys_and_owner().0
    }

    /// The owner that the command names; empty for BREAK and LIMIT.
    pub fn owner(&self) -> &'a [u8] {
        self.keys_and_owner().1
    }

    #[inline]
    fn keys_and_owner(&self) -> (Keys<'a>, &'a [u8]) {
        match self {
            Self::Acquire(request) => (Keys::One(request.key), request.owner),
            Self::Release(request) => (Keys::One(request.key), request.owner),
            Self::Renew(request) => (Keys::One(request.key), request.owner),
            Self::Guard(request) => (Keys::One(request.key), request.owner),
            Self::Cancel(request) => (Keys::One(request.key), request.owner),
            Self::Break(key) => (Keys::One(key), &[]),
            Self::Limit(request) => (Keys::One(request.key), &[]),
            Self::MultiAcquire(request) => (Keys::Several(&request.keys), request.owner),
            Self::MultiRelease(request) => (Keys::Several(&request.keys), request.owner),
            Self::MultiRenew(request) => (Keys::Several(&request.keys), request.owner),
        }
    }

    pub(crate) fn depth(&self) -> ReadDepth {
        match self {
            // A waiter for WRITE must know when the last reader's lease ends.
            Self::Acquire(Acquire {
                mode: Mode::Write,
                wait_mode,
                ..
            }) if *wait_mode != WaitMode::None => ReadDepth::Whole,
            // ONCE may shorten the longest lease, and the key's expiry with it.
            Self::Acquire(request) if !request.once => ReadDepth::Brief,
            Self::Acquire(_) | Self::Release(_) | Self::Renew(_) => ReadDepth::WholeUnlessOutlived,
            _ => ReadDepth::Brief,
        }
    }

    pub(crate) fn verb(&self) -> Verb {
        match self {
            Self::Acquire(_) => Verb::Acquire,
            Self::Release(_) => Verb::Release,
            Self::Renew(_) => Verb::Renew,
            Self::Guard(_) => Verb::Guard,
            Self::Limit(_) => Verb::Limit,
            Self::MultiAcquire(_) => Verb::MultiAcquire,
            _ => Verb::Other,
        }
    }
}

/// The kind of command, for those that need to read less.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Verb {
    Acquire,
    Release,
    Renew,
    Guard,
    Limit,
    MultiAcquire,
    /// Another command, or none.
    Other,
}

/// The next reading of the driver.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Task {
    /// The locks to read, and the owner to read them for.
    pub subject: Subject,
    /// How much of a read-write lock must be read.
    pub depth: ReadDepth,
    /// The purpose of the reading.
    pub purpose: Purpose,
    /// The permits that the owner asks for or waits for. If there are any, all holders' permits
    /// must be read.
    pub asked: Option<PermitsRequest>,
    /// The kind of the turn's command.
    pub(crate) verb: Verb,
    pub(crate) epoch: u64,
}

/// The locks to read, and the owner to read them for.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Subject {
    /// The locks that the command names, for its owner.
    Command,
    /// One lock, for this owner.
    One(LockKey, Rc<[u8]>),
    /// Several locks, for this owner.
    Several(Rc<[LockKey]>, Rc<[u8]>),
}

/// The purpose of a reading.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Purpose {
    /// The command itself.
    Command,
    /// A hold that must end.
    Release(Mode),
    /// The first waiter in a queue, which wants the lock in this mode.
    Reconcile(Mode),
    /// A multi-wait.
    GrantSeveral(MultiId),
    /// A session's hold that may be lost.
    CheckHold(Mode),
    /// Fields in the hash whose holders' leases are over.
    Sweep,
    /// A waiter whose time is over.
    TimeOut,
    /// A waiter whose wait is long: the log names the holder.
    LongWait,
    /// The holders of a lock, for the deadlock search.
    Holders,
}

/// The result of a reading.
#[derive(Clone, Debug)]
pub enum Read<'a> {
    /// The content of one lock.
    One(&'a Stored),
    /// For a queue whose first waiter waits for permits: the hash, and the other holders.
    Permits(&'a PermitsHash, &'a PermitsHolders),
    /// The content of each of several locks, in their order.
    Several(&'a [Stored]),
    /// For BREAK: the content; the holders: the owner of a plain lock, the fields of a read-write
    /// lock's readers, or the holders of permits; and one hold, a writer's before others.
    Holds(Stored, &'a [(Box<[u8]>, Count)], Option<HeldBy>),
    /// The owners that hold the lock.
    Owners(&'a [Box<[u8]>]),
    /// For a long wait: the holder, or one of several; none if the lock is free.
    Holder(Option<HeldBy>),
    /// For a sweep: the holders whose leases are over, among those that were looked at.
    Gone {
        /// Their fields.
        readers: &'a [Box<[u8]>],
        /// Whether the next sweep continues behind these, or begins again at the start.
        more: bool,
    },
    /// Another node serves the key. The clients must go there.
    Elsewhere(CommandError),
    /// Of several locks, this one (by index) is not served here.
    NotHere(usize),
    /// The lock cannot be read now: nobody knows which node serves it, or some of its keys are
    /// elsewhere.
    Unknown,
}

/// The result of a reading, with its task. It is valid for this task only.
#[derive(Debug)]
pub struct Reading<'a> {
    pub(crate) task: &'a Task,
    pub(crate) read: Read<'a>,
}

impl Task {
    /// Whether the task is about permits. Then the limit must be read, even if nobody holds any.
    pub fn is_about_permits(&self) -> bool {
        self.asked.is_some() || self.verb == Verb::Limit
    }

    /// Whether the task is about a queue whose first waiter waits for permits. All waiters that fit
    /// are granted at once, so the names of the holders must be read.
    pub fn is_about_queue_for_permits(&self) -> bool {
        self.purpose == Purpose::Reconcile(Mode::Permits)
    }

    /// Whether the decision needs the end of a plain lock's lease. It does not if the command's
    /// owner is the only holder, has entered once, and gives the lock back, begins its lease anew,
    /// or only checks that it holds the lock. This is the common case, and the end costs a look-up
    /// of its own in the server.
    pub fn needs_end(&self, own: Option<Count>, others: bool) -> bool {
        let is_of_others = matches!(self.verb, Verb::Limit | Verb::MultiAcquire | Verb::Other);
        others || is_of_others || own != Some(Count::Valid(1))
    }

    /// Whether the decision needs the key's expiry and the ends of the readers' leases, for a
    /// read-write lock. It does not if the command's owner is the only holder, has entered once,
    /// and gives the lock back.
    pub fn needs_readers_ends(&self, own: Option<Count>, others: bool) -> bool {
        others || self.verb != Verb::Release || own != Some(Count::Valid(1))
    }

    /// Whether the decision may take the lock. Then a hash without an end must be told from data.
    pub fn may_take(&self) -> bool {
        match self.purpose {
            Purpose::Command => matches!(self.verb, Verb::Acquire | Verb::MultiAcquire),
            Purpose::Reconcile(_) | Purpose::GrantSeveral(_) => true,
            _ => false,
        }
    }

    /// Whether the decision needs the token of a plain lock. Only its holder needs it, and a
    /// guarded command that is refused.
    pub fn needs_token(&self, own: Option<Count>) -> bool {
        own.is_some() || self.verb == Verb::Guard
    }

    /// Whether the command's owner mostly has no field in the hash of a held lock. Then the owner's
    /// field is read alone, and the token only if that field exists.
    pub fn is_newcomers(&self) -> bool {
        self.verb == Verb::Acquire
    }

    /// A result of this task's reading.
    pub fn found<'a>(&'a self, read: Read<'a>) -> Reading<'a> {
        Reading { task: self, read }
    }
}
