//! A call from its start to its end: what is sent, waited for and sent again. What is known
//! meanwhile is in the [ledger](crate::ledger), where it is sent says the
//! [topology](crate::topology).

// What the calls of a client share.
mod context;
pub(crate) use context::{Context, Settings};

pub(crate) mod acquire;
pub(crate) use acquire::Request;
use acquire::{Asked, Permits, QueuePermit, Reply, Waited};

mod call;
use call::{Call, Recall, State};

mod withdraw;

mod keep;
pub(crate) use keep::{Keeper, Kept, KeptKey};

mod held;
pub(crate) use held::{Held, lost};

mod release;
use release::Report;

pub(crate) mod renew;
pub(crate) use renew::Aim;

pub(crate) mod once;

mod wanted;
pub(crate) use wanted::wanted;

mod watchdog;
use watchdog::Watchdog;

mod dispatch;
