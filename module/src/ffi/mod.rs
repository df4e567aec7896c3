//! The server's C interface, made safe: the only place with `unsafe` in it.
//!
//! Every `unsafe` block here relies on this: the server calls a module only while it holds its
//! global lock, on one thread at a time, and the pointers it passes are valid until the call
//! returns. [`check_api`] has checked at load that each function named below exists.
//!
//! Nothing outside this folder sees a raw pointer: contexts, keys and strings are wrapped in types
//! that live no longer than the call that made them, or that free their values.

mod blocking;
mod call;
mod command;
mod events;
mod guarded;
mod info;
mod key;
mod needed;
mod version;

pub(crate) use blocking::{Blocking, Handle, abort_block, block, unblock};
pub(crate) use call::{
    Args, Ctx, EventClass, Field, OwnedStr, Presence, Str, address_of, log_warning, may_default_run,
};
pub(crate) use command::{
    Access, Argument, ArgumentKind, Command, Keys, Spec, add_category, register,
};
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
pub(crate) use version::{has_replicas, looks_commands_up_ahead, set_options};

use redis_module::raw;
use std::cell::RefCell;
use std::ffi::c_int;
use std::panic::{AssertUnwindSafe, catch_unwind};

/// Calls a function of the server. A function that is missing in [`check_api`] is tested where it
/// is used.
macro_rules! server {
    ($name:ident($($arg:expr),* $(,)?)) => {
        // SAFETY: see the head of `ffi`; `check_api` has seen the function.
        unsafe { raw::$name.unwrap_unchecked()($($arg),*) }
    };
}
use server;

macro_rules! required {
    ($($name:ident),* $(,)?) => {
        /// Fails with the name of a function that we need and this server does not have.
        pub(crate) fn check_api() -> Result<(), &'static str> {
            $(
                // SAFETY: the statics were filled before our code runs, and nobody writes them
                // again.
                if unsafe { raw::$name }.is_none() {
                    return Err(stringify!($name));
                }
            )*
            Ok(())
        }
    };
}

required!(
    RedisModule_ACLCheckCommandPermissions,
    RedisModule_ACLCheckKeyPermissions,
    RedisModule_AbortBlock,
    RedisModule_AvoidReplicaTraffic,
    RedisModule_BlockClient,
    RedisModule_Call,
    RedisModule_CallReplyArrayElement,
    RedisModule_CallReplyLength,
    RedisModule_CallReplyStringPtr,
    RedisModule_CallReplyProto,
    RedisModule_CallReplyType,
    RedisModule_CloseKey,
    RedisModule_CreateCommand,
    RedisModule_CreateString,
    RedisModule_CreateTimer,
    RedisModule_DeleteKey,
    RedisModule_Free,
    RedisModule_FreeCallReply,
    RedisModule_FreeModuleUser,
    RedisModule_FreeServerInfo,
    RedisModule_FreeString,
    RedisModule_GetAbsExpire,
    RedisModule_GetBlockedClientHandle,
    RedisModule_GetBlockedClientPrivateData,
    RedisModule_GetClientId,
    RedisModule_GetClientInfoById,
    RedisModule_GetClientUserNameById,
    RedisModule_GetCommand,
    RedisModule_GetCommandKeysWithFlags,
    RedisModule_GetContextFlags,
    RedisModule_GetCurrentUserName,
    RedisModule_GetModuleUserFromUserName,
    RedisModule_GetMyClusterID,
    RedisModule_GetSelectedDb,
    RedisModule_GetServerInfo,
    RedisModule_GetServerVersion,
    RedisModule_HashGet,
    RedisModule_HashSet,
    RedisModule_InfoAddFieldCString,
    RedisModule_InfoAddFieldULongLong,
    RedisModule_InfoAddSection,
    RedisModule_InfoBeginDictField,
    RedisModule_InfoEndDictField,
    RedisModule_IsKeysPositionRequest,
    RedisModule_KeyAtPosWithFlags,
    RedisModule_KeyType,
    RedisModule_ListGet,
    RedisModule_Log,
    RedisModule_NotifyKeyspaceEvent,
    RedisModule_OpenKey,
    RedisModule_PublishMessage,
    RedisModule_PublishMessageShard,
    RedisModule_RegisterInfoFunc,
    RedisModule_Replicate,
    RedisModule_ReplyWithArray,
    RedisModule_ReplyWithCallReply,
    RedisModule_ReplyWithError,
    RedisModule_ReplyWithLongLong,
    RedisModule_ReplyWithMap,
    RedisModule_ReplyWithNull,
    RedisModule_ReplyWithSimpleString,
    RedisModule_ReplyWithStringBuffer,
    RedisModule_ScanCursorCreate,
    RedisModule_ScanCursorDestroy,
    RedisModule_ScanKey,
    RedisModule_SelectDb,
    RedisModule_ServerInfoGetFieldC,
    RedisModule_SetAbsExpire,
    RedisModule_SetCommandInfo,
    RedisModule_SetDisconnectCallback,
    RedisModule_SetModuleOptions,
    RedisModule_SignalModifiedKey,
    RedisModule_StopTimer,
    RedisModule_StringDMA,
    RedisModule_StringPtrLen,
    RedisModule_StringSet,
    RedisModule_SubscribeToKeyspaceEvents,
    RedisModule_SubscribeToServerEvent,
    RedisModule_UnblockClient,
    RedisModule_ValueLength,
    RedisModule_WrongArity,
    RedisModule_ZsetScore,
);

/// The interface's constants are unsigned, but its arguments are signed.
#[allow(
    clippy::as_conversions,
    clippy::cast_possible_wrap,
    reason = "constants well below 2^31"
)]
const fn int(constant: u32) -> c_int {
    constant as c_int
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
