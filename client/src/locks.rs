//! The holds and waits of a client's owners: one state behind one mutex. Replies and events change
//! it in the order in which they arrive.
//!
//! Five rules make this all there is:
//!
//! 1. An owner has one hold of a lock at the server. Entered again, it is counted here.
//! 2. Each command names its subject, and may be sent twice.
//! 3. One command at a time is under way for an owner, a name and a mode.
//! 4. The [link](crate::wire::link) sends unanswered commands again.
//! 5. In another life of the session, or at another node, holds are renewed by their tokens and
//!    waits asked for again. There is no other way back.

mod wanted;
use wanted::Wanted;

pub(crate) mod hold;
pub(crate) use hold::{Hold, HoldOptions};

// These three name each other: a client has pending calls, a call has guards, a guard its client.
mod table;
use table::{Call, CallId, Phase, SlotId, State, Table};

mod context;
pub(crate) use context::{Context, Handle, Settings};

mod held;

pub(crate) use held::{Held, Helds, lost};

pub(crate) mod renew;
pub(crate) use renew::Aim;

mod caller;
pub(crate) use caller::{LINK_FIRST, Request};

pub(crate) mod acquire;

mod heard;

pub(crate) mod guarded;

mod listen;
pub(crate) use listen::wanted;

mod keep;
pub(crate) use keep::KeptKey;
