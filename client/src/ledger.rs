//! Who holds and who waits here, as far as this client knows: one state behind one lock.
//!
//! It does no I/O, starts no task and never asks what time it is: what is sent, heard and waited
//! for is the business of the [flows](crate::flows), which tell it here and are told what follows.
//! So whatever concerns one owner at one lock is decided in one place and in one order, and can be
//! tested with time as an argument.

mod owner;
pub use owner::Owner;

mod entries;
pub(crate) use entries::Ledger;
use entries::{Entry, EntryId, EntryKey, Side, State};

mod usage;
use usage::Permit;
pub(crate) use usage::{HoldOptions, Reserved, Target, UnnamedRelease, Usage};

mod events;
use events::Wait;
pub(crate) use events::{Delivered, Mailbox, Notification};

mod hold;
#[cfg(test)]
pub(crate) use hold::tests::hold as a_hold;
pub(crate) use hold::{Grant, Hold, Renewal};

mod wanted;
pub(crate) use wanted::Next;
use wanted::Wanted;

#[cfg(test)]
mod model;
