//! A call from its start to its end: what is sent, waited for and sent again. What is known
//! meanwhile is in the [ledger](crate::ledger), where it is sent says the
//! [topology](crate::topology).

// What the calls of a client share.
mod context;
pub(crate) use context::{Context, Settings};

pub(crate) mod acquire;
mod wait;

mod held;
pub(crate) use held::{Held, lost};

pub(crate) mod release;
pub(crate) mod renew;
pub(crate) mod watchdog;

mod dispatch;
mod orphan;
