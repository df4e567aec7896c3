//! One file a command: what it declares, and how it is carried out. Each reads its arguments into a
//! request, loads what is stored, lets the core decide, and replies.

mod acquire;
mod break_hold;
mod cancel;
mod events;
mod info;
mod list;
mod release;
mod renew;

use crate::ffi::{Argument, ArgumentKind, Ctx, register};

/// Makes all commands known to the server. The name of one that it refused, if any.
pub(crate) fn register_all(ctx: Ctx<'_>) -> Result<(), &'static std::ffi::CStr> {
    register::<acquire::Acquire>(ctx)?;
    register::<release::Release>(ctx)?;
    register::<renew::Renew>(ctx)?;
    register::<cancel::Cancel>(ctx)?;
    register::<break_hold::Break>(ctx)?;
    register::<events::Events>(ctx)?;
    register::<info::Info>(ctx)?;
    register::<list::List>(ctx)
}

const KEY: Argument = Argument::new(c"key", ArgumentKind::Key);
const OWNER: Argument = Argument::new(c"owner", ArgumentKind::Text);
const LEASE_MS: Argument = Argument::new(c"lease-ms", ArgumentKind::Integer);
const TOKEN: Argument = Argument::option(c"TOKEN", c"token", ArgumentKind::Integer);
const SESSION: Argument = Argument::option(c"SESSION", c"session", ArgumentKind::Text);
