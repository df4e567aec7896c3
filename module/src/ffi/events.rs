//! The events that the server sends on its own: timers, changed keys, and its own changes of state.

use super::{Ctx, OK, Str, guarded, server};
use redis_module::raw;
use std::ffi::{c_char, c_int, c_void};
use std::ptr;
use std::sync::atomic::{AtomicU64, Ordering};

// --- Timers --------------------------------------------------------------------------------------

/// A timer that has not fired yet.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(crate) struct Timer(raw::RedisModuleTimerID);

/// The callback of a timer.
pub(crate) trait Timers {
    fn fire(ctx: Ctx<'_>);
}

impl Timer {
    /// Fires once, in the event loop, `after_ms` from now.
    pub(crate) fn start<T: Timers>(ctx: Ctx<'_>, after_ms: i64) -> Self {
        Self(server!(RedisModule_CreateTimer(
            ctx.raw,
            after_ms,
            Some(on_timer::<T>),
            ptr::null_mut()
        )))
    }

    pub(crate) fn stop(self, ctx: Ctx<'_>) {
        server!(RedisModule_StopTimer(ctx.raw, self.0, ptr::null_mut()));
    }
}

extern "C" fn on_timer<T: Timers>(ctx: *mut raw::RedisModuleCtx, _data: *mut c_void) {
    guarded((), || T::fire(Ctx::new(ctx)));
}

// --- Keys that change ----------------------------------------------------------------------------

/// Receives the keys that others changed.
pub(crate) trait KeyEvents {
    /// The key was changed, or when it expires.
    fn changed(ctx: Ctx<'_>, key: Str<'_>);
}

/// Listens to generic, expired and evicted events from now on. Every write with such an event pays
/// for it, so this is called when a client waits for the first time, not before.
pub(crate) fn subscribe_to_key_events<K: KeyEvents>(ctx: Ctx<'_>) {
    let others = raw::REDISMODULE_NOTIFY_GENERIC | raw::REDISMODULE_NOTIFY_EVICTED;
    subscribe_to_keys::<K>(ctx, others | raw::REDISMODULE_NOTIFY_EXPIRED);
}

/// Counts the keys that expire, from now on: see [`keys_expired`].
pub(crate) fn count_expired_keys(ctx: Ctx<'_>) {
    subscribe_to_keys::<Expired>(ctx, raw::REDISMODULE_NOTIFY_EXPIRED);
}

fn subscribe_to_keys<K: KeyEvents>(ctx: Ctx<'_>, classes: c_int) {
    let heard: raw::RedisModuleNotificationFunc = Some(on_key_event::<K>);
    server!(RedisModule_SubscribeToKeyspaceEvents(
        ctx.raw, classes, heard
    ));
}

extern "C" fn on_key_event<K: KeyEvents>(
    ctx: *mut raw::RedisModuleCtx,
    _class: c_int,
    _event: *const c_char,
    key: *mut raw::RedisModuleString,
) -> c_int {
    guarded((), || K::changed(Ctx::new(ctx), Str::borrow(key)));
    OK
}

struct Expired;

impl KeyEvents for Expired {
    fn changed(_ctx: Ctx<'_>, _key: Str<'_>) {
        EXPIRED.fetch_add(1, Ordering::Relaxed);
    }
}

/// How many keys have expired. Opening an expired key may delete it. Another module that listens to
/// that may write it anew at once, and our handle would still say that it is empty.
pub(crate) fn keys_expired() -> u64 {
    EXPIRED.load(Ordering::Relaxed)
}

static EXPIRED: AtomicU64 = AtomicU64::new(0);

// --- The server itself ---------------------------------------------------------------------------

/// A change of the server as a whole.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum ServerEvent {
    /// It is a primary now, or has loaded a data set.
    HasNewData,
    /// It is a replica now.
    Demoted,
    /// A replica went online or was lost.
    ReplicasChanged,
    /// A database was emptied, or all of them.
    Flushed(Option<c_int>),
    /// Two databases changed places.
    Swapped(c_int, c_int),
    /// The connection of the client with this number closed.
    ClientGone(u64),
    /// CONFIG SET has changed an option, ours or another.
    Configured,
    /// The server shuts down. Valkey 9 unloads its modules then.
    Shutdown,
    /// The server's tick: several times a second, by a monotonic clock.
    Tick,
    /// A turn of the event loop is nearly over: no command runs now, and replies are not sent yet.
    TurnEnds,
}

/// Receives the changes.
pub(crate) trait ServerEvents {
    fn happened(ctx: Ctx<'_>, event: ServerEvent);
}

/// Listens to the server's changes from now on, except those of its clients and of its event
/// loop.
pub(crate) fn subscribe_to_server_events<S: ServerEvents>(ctx: Ctx<'_>) {
    for id in [
        raw::REDISMODULE_EVENT_REPLICATION_ROLE_CHANGED,
        raw::REDISMODULE_EVENT_REPLICA_CHANGE,
        raw::REDISMODULE_EVENT_LOADING,
        raw::REDISMODULE_EVENT_FLUSHDB,
        raw::REDISMODULE_EVENT_SWAPDB,
        raw::REDISMODULE_EVENT_CONFIG,
        raw::REDISMODULE_EVENT_SHUTDOWN,
        raw::REDISMODULE_EVENT_CRON_LOOP,
    ] {
        subscribe::<S>(ctx, id);
    }
}

/// Listens to clients that disconnect, from now on. Each connection of the server pays for it, so
/// this is called only when a session begins.
pub(crate) fn subscribe_to_client_events<S: ServerEvents>(ctx: Ctx<'_>) {
    subscribe::<S>(ctx, raw::REDISMODULE_EVENT_CLIENT_CHANGE);
}

/// Listens to the ends of the event loop's turns, from now on. Each turn pays for it, so this is
/// called when the first replica is there.
pub(crate) fn subscribe_to_turns<S: ServerEvents>(ctx: Ctx<'_>) {
    subscribe::<S>(ctx, raw::REDISMODULE_EVENT_EVENTLOOP);
}

fn subscribe<S: ServerEvents>(ctx: Ctx<'_>, id: u64) {
    let event = raw::RedisModuleEvent { id, dataver: 1 };
    server!(RedisModule_SubscribeToServerEvent(
        ctx.raw,
        event,
        Some(on_server_event::<S>)
    ));
}

extern "C" fn on_server_event<S: ServerEvents>(
    ctx: *mut raw::RedisModuleCtx,
    event: raw::RedisModuleEvent,
    subevent: u64,
    data: *mut c_void,
) {
    guarded((), || {
        if let Some(event) = read_server_event(event.id, subevent, data) {
            S::happened(Ctx::new(ctx), event);
        }
    });
}

fn read_server_event(id: u64, subevent: u64, data: *mut c_void) -> Option<ServerEvent> {
    let is_promoted = subevent == raw::REDISMODULE_EVENT_REPLROLECHANGED_NOW_MASTER;
    let is_loaded = subevent == raw::REDISMODULE_SUBEVENT_LOADING_ENDED;
    let is_flushed = subevent == raw::REDISMODULE_SUBEVENT_FLUSHDB_END;
    let is_gone = subevent == raw::REDISMODULE_SUBEVENT_CLIENT_CHANGE_DISCONNECTED;
    let turn_ends = subevent == raw::REDISMODULE_SUBEVENT_EVENTLOOP_BEFORE_SLEEP;
    Some(match id {
        raw::REDISMODULE_EVENT_REPLICATION_ROLE_CHANGED if is_promoted => ServerEvent::HasNewData,
        raw::REDISMODULE_EVENT_REPLICATION_ROLE_CHANGED => ServerEvent::Demoted,
        raw::REDISMODULE_EVENT_REPLICA_CHANGE => ServerEvent::ReplicasChanged,
        raw::REDISMODULE_EVENT_LOADING if is_loaded => ServerEvent::HasNewData,
        raw::REDISMODULE_EVENT_FLUSHDB if is_flushed => {
            // SAFETY: with this event the server passes this structure, valid for the call.
            let info = unsafe { data.cast::<raw::RedisModuleFlushInfo>().as_ref() }?;
            ServerEvent::Flushed((info.dbnum >= 0).then_some(info.dbnum))
        }
        raw::REDISMODULE_EVENT_SWAPDB => {
            // SAFETY: with this event the server passes this structure, valid for the call.
            let info = unsafe { data.cast::<raw::RedisModuleSwapDbInfo>().as_ref() }?;
            ServerEvent::Swapped(info.dbnum_first, info.dbnum_second)
        }
        raw::REDISMODULE_EVENT_CLIENT_CHANGE if is_gone => {
            // SAFETY: with this event the server passes this structure, valid for the call.
            let info = unsafe { data.cast::<raw::RedisModuleClientInfo>().as_ref() }?;
            ServerEvent::ClientGone(info.id)
        }
        raw::REDISMODULE_EVENT_CONFIG => ServerEvent::Configured,
        raw::REDISMODULE_EVENT_SHUTDOWN => ServerEvent::Shutdown,
        raw::REDISMODULE_EVENT_CRON_LOOP => ServerEvent::Tick,
        raw::REDISMODULE_EVENT_EVENTLOOP if turn_ends => ServerEvent::TurnEnds,
        _ => return None,
    })
}

/// Whether the server asks that nothing be written now, because of CLIENT PAUSE or a failover. A
/// write that a timer replicates meanwhile stops the server.
pub(crate) fn writes_are_paused() -> bool {
    server!(RedisModule_AvoidReplicaTraffic()) != 0
}
