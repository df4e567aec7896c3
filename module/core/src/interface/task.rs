//! What the loop asks for, and what was found.

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

/// A command that is about locks.
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
    /// One.
    One(&'a [u8]),
    /// Several, each once.
    Several(&'a [NamedKey<'a>]),
}

impl<'a> Command<'a> {
    /// The keys that it names.
    pub fn keys(&self) -> Keys<'a> {
        match self {
            Self::Acquire(request) => Keys::One(request.key),
            Self::Release(request) => Keys::One(request.key),
            Self::Renew(request) => Keys::One(request.key),
            Self::Guard(request) => Keys::One(request.key),
            Self::Cancel(request) => Keys::One(request.key),
            Self::Break(key) => Keys::One(key),
            Self::Limit(request) => Keys::One(request.key),
            Self::MultiAcquire(request) => Keys::Several(&request.keys),
            Self::MultiRelease(request) => Keys::Several(&request.keys),
            Self::MultiRenew(request) => Keys::Several(&request.keys),
        }
    }

    /// Who sent it; none of BREAK and LIMIT.
    pub fn owner(&self) -> &'a [u8] {
        match self {
            Self::Acquire(request) => request.owner,
            Self::Release(request) => request.owner,
            Self::Renew(request) => request.owner,
            Self::Guard(request) => request.owner,
            Self::Cancel(request) => request.owner,
            Self::Break(_) | Self::Limit(_) => &[],
            Self::MultiAcquire(request) => request.owner,
            Self::MultiRelease(request) => request.owner,
            Self::MultiRenew(request) => request.owner,
        }
    }

    pub(crate) fn depth(&self) -> ReadDepth {
        match self {
            // Who waits to write is to know when the last reader's lease ends; and ONCE may shorten
            // the longest.
            Self::Acquire(request) => {
                let waits_to_write =
                    request.mode == Mode::Write && request.wait_mode != WaitMode::None;
                match waits_to_write {
                    true => ReadDepth::Whole,
                    false if request.once => ReadDepth::WholeUnlessOutlived,
                    false => ReadDepth::Brief,
                }
            }
            Self::Release(_) | Self::Renew(_) => ReadDepth::WholeUnlessOutlived,
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
            _ => Verb::Other,
        }
    }
}

/// Which command it is, as far as less need be read for it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Verb {
    Acquire,
    Release,
    Renew,
    Guard,
    Limit,
    /// Another, or none.
    Other,
}

/// What is to be read next.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Task {
    /// Which locks, and for whom.
    pub subject: Subject,
    /// How much of a read-write lock.
    pub depth: ReadDepth,
    /// What for.
    pub purpose: Purpose,
    /// The permits that the owner asks for or waits for: all the holders' are to be read.
    pub asked: Option<PermitsRequest>,
    /// For which command.
    pub(crate) verb: Verb,
    pub(crate) epoch: u64,
}

/// Which locks are to be read, and as whose eyes see them.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Subject {
    /// Those that the command names, for its owner.
    Command,
    /// One lock, for this owner.
    One(LockKey, Rc<[u8]>),
    /// Several, for this owner.
    Several(Rc<[LockKey]>, Rc<[u8]>),
}

/// What is read for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Purpose {
    /// The command itself.
    Command,
    /// A hold that must end.
    Release(Mode),
    /// The first in a queue, who waits to hold the lock so.
    Reconcile(Mode),
    /// A wait for several locks.
    GrantSeveral(MultiId),
    /// A session's hold that may be lost.
    CheckHold(Mode),
    /// A writer whose token is known, and may be gone.
    CheckWriter,
    /// Readers that are gone, whose fields are still in the hash.
    Sweep,
    /// A waiter whose wait is over.
    TimeOut,
    /// A waiter whose wait is long: who has the lock.
    LongWait,
    /// Who holds a lock, for the search for a deadlock.
    Holders,
}

/// What was found.
#[derive(Clone, Debug)]
pub enum Read<'a> {
    /// What is stored at one lock.
    One(&'a Stored),
    /// For a queue whose first waits for permits: the hash, and who else holds some.
    Permits(&'a PermitsHash, &'a PermitsHolders),
    /// What is stored at each of several, in their order.
    Several(&'a [Stored]),
    /// For BREAK: what is stored, and who has it: the owner of a plain lock, the fields of a
    /// read-write lock's readers, or those who hold permits. If there is one of them, what is
    /// stored was read for it, and has its token.
    Holds(Stored, &'a [(Box<[u8]>, Count)]),
    /// Those who hold it.
    Owners(&'a [Box<[u8]>]),
    /// For a long wait: who has the lock, one of them if there are several; none if it is free.
    Holder(Option<HeldBy>),
    /// For a sweep: the readers that are gone, among those it has looked at.
    Gone {
        /// Their fields.
        readers: &'a [Box<[u8]>],
        /// Whether the next sweep goes on with others, or from the start.
        more: bool,
    },
    /// The key is served by another node, where the clients are to go.
    Elsewhere(CommandError),
    /// Of several, the one at this place is not served here.
    NotHere(usize),
    /// It cannot be looked at now: nobody knows who serves it, or parts of it are elsewhere.
    Unknown,
}

/// What was found for a task. It is of no use for another.
#[derive(Debug)]
pub struct Reading<'a> {
    pub(crate) task: &'a Task,
    pub(crate) read: Read<'a>,
}

impl Task {
    /// Whether it is about permits, also where nobody holds any: then the limit is to be read.
    pub fn is_about_permits(&self) -> bool {
        self.asked.is_some() || self.verb == Verb::Limit
    }

    /// Whether it is about a queue whose first waits for permits: all who fit are granted at once,
    /// so it is to be read who has some.
    pub fn is_about_queue_for_permits(&self) -> bool {
        self.purpose == Purpose::Reconcile(Mode::Permits)
    }

    /// Whether it counts when the lease of a plain lock ends: not if the command's owner alone has
    /// it, entered once, and gives it back, begins its lease anew, or asks only whether it is held.
    /// That is the common case, and the end is a look-up of its own in the server.
    pub fn needs_end(&self, own: Option<Count>, others: bool) -> bool {
        let is_of_others = matches!(self.verb, Verb::Limit | Verb::Other);
        others || is_of_others || own != Some(Count::Valid(1))
    }

    /// Whether it counts when the key of a lock that is read expires, and when its readers' leases
    /// end: not if the command's owner alone is in it, entered once, and gives that back.
    pub fn needs_readers_ends(&self, own: Option<Count>, others: bool) -> bool {
        others || self.verb != Verb::Release || own != Some(Count::Valid(1))
    }

    /// Whether the token of a plain lock counts: of whose hold it is, only the holder asks, or a
    /// guarded command that is refused.
    pub fn needs_token(&self, own: Option<Count>) -> bool {
        own.is_some() || self.verb == Verb::Guard
    }

    /// Whether its owner mostly has no part in a lock that is held: then the owner's field is
    /// looked for alone, and the token if it is there.
    pub fn is_newcomers(&self) -> bool {
        self.verb == Verb::Acquire
    }

    /// What was found for it.
    pub fn found<'a>(&'a self, read: Read<'a>) -> Reading<'a> {
        Reading { task: self, read }
    }
}
