//! The server's C interface, made safe: the only place with `unsafe` in it.
//!
//! Every `unsafe` block here relies on this: the server calls a module only while it holds its
//! global lock, on one thread at a time, and the pointers it passes are valid until the call
//! returns. [`check_api`] has checked at load that the server has each function that we call.
//!
//! Nothing outside this folder sees a raw pointer: contexts, keys and strings are wrapped in types
//! that live no longer than the call that made them, or that free their values.

mod blocking;
mod call;
mod command;
mod context;
mod events;
mod guarded;
mod info;
mod key;
mod needed;
mod reply;
mod string;
mod users;
pub(crate) mod value;
mod version;

pub(crate) use blocking::{Blocking, Handle, abort_block, block, unblock};
pub(crate) use call::{EventClass, Presence, Publish};
pub(crate) use command::{Argument, Command, Keys, Spec, add_category, register};
pub(crate) use context::{Ctx, address_of, log_warning};
pub(crate) use events::{
    KeyEvents, ServerEvent, ServerEvents, Timer, Timers, count_expired_keys, keys_expired,
    subscribe_to_client_events, subscribe_to_key_events, subscribe_to_server_events,
    subscribe_to_turns, writes_are_paused,
};
pub(crate) use info::{InfoPage, InfoSection, register_info};
pub(crate) use key::{Key, KeyType, Scan};
pub(crate) use needed::{
    call_was_refused, calls_refused, can_close_clients, choose_commands, deletions_are_lost,
};
pub(crate) use string::{Args, Field, OwnedStr, Str};
pub(crate) use users::may_default_run;
pub(crate) use version::{has_replicas, load_options, looks_commands_up_ahead, set_options};

use linkme::distributed_slice;
use std::cell::RefCell;
use std::ffi::c_int;
use std::panic::{AssertUnwindSafe, catch_unwind};

/// Calls a function of the server, and adds it to those that [`check_api`] looks for. A function
/// that a server may lack is not called by this, but tested where it is used.
macro_rules! server {
    ($name:ident($($arg:expr),* $(,)?)) => {{
        #[linkme::distributed_slice(crate::ffi::NEEDED_FUNCTIONS)]
        static FUNCTION: crate::ffi::Function = (
            stringify!($name),
            // SAFETY: the statics were filled before our code runs, and nobody writes them again.
            || unsafe { redis_module::raw::$name }.is_some(),
        );
        // SAFETY: see the head of `ffi`; `check_api` has seen the function.
        unsafe { redis_module::raw::$name.unwrap_unchecked()($($arg),*) }
    }};
}
use server;

/// The name of a function, and whether the server has it.
type Function = (&'static str, fn() -> bool);

/// All functions that we call, put together by the linker.
#[distributed_slice]
static NEEDED_FUNCTIONS: [Function];

/// Fails with the name of a function that we need and this server does not have.
pub(crate) fn check_api() -> Result<(), &'static str> {
    let missing = NEEDED_FUNCTIONS.iter().find(|(_, is_there)| !is_there());
    missing.map_or(Ok(()), |(name, _)| Err(name))
}

/// Success: the result of the server's functions, and of our callbacks.
const OK: c_int = 0;

/// The result of a callback that failed.
const ERR: c_int = 1;

/// Runs a callback's body. A panic must not cross into C: it would take the whole server down.
fn guarded<T>(otherwise: T, body: impl FnOnce() -> T) -> T {
    catch_unwind(AssertUnwindSafe(body)).unwrap_or(otherwise)
}

// --- State under the server's lock ---------------------------------------------------------------

/// A value that only code called by the server can reach. It is made when it is first used.
pub(crate) struct ServerLocked<T>(RefCell<Option<T>>);

// SAFETY: everything in this module runs while the server's global lock is held, also when another
// module calls us from a thread of its own (`RM_ThreadSafeContextLock`), so two threads never use
// the value at the same time.
unsafe impl<T> Sync for ServerLocked<T> {}

// SAFETY: the same.
unsafe impl<T> Send for ServerLocked<T> {}

impl<T: Default> ServerLocked<T> {
    pub(crate) const fn new() -> Self {
        Self(RefCell::new(None))
    }

    /// Lends the value for the length of a call. The body must not call the server: the server may
    /// call us back, and would find the value lent.
    pub(crate) fn with<R>(&self, body: impl FnOnce(&mut T) -> R) -> R {
        let mut value = self.0.borrow_mut();
        match &mut *value {
            Some(value) => body(value),
            none => body(none.insert(T::default())),
        }
    }

    /// Drops the value, with all its memory.
    pub(crate) fn clear(&self) {
        self.0.replace(None);
    }
}
