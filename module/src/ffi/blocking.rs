//! Clients that the server keeps blocked for us.

use super::{Ctx, OK, guarded, server};
use redis_module::raw;
use std::ffi::{c_int, c_void};
use std::ptr;

/// A client that the server keeps blocked, until [`unblock`].
///
/// It is the address of the server's record. No other client has it while this one is blocked.
pub(crate) type Handle = usize;

/// The callbacks at the end of a block.
pub(crate) trait Blocking {
    /// We have unblocked the client: reply to it. Or CLIENT UNBLOCK … TIMEOUT: reply to it, and
    /// unblock it.
    fn reply(ctx: Ctx<'_>, handle: Handle);
    /// The client was killed, closed its connection, was unblocked with an error, or the server
    /// became a replica. Unless it was unblocked before, it must be unblocked now, or its record
    /// leaks.
    fn disconnected(ctx: Ctx<'_>, handle: Handle);
    /// The server is about to free the record of the client.
    fn forget(handle: Handle);
}

/// Blocks the client of this call. No timeout is given to the server: that would come up to 100 ms
/// late, and in the tick of a grant it would lose the reply (7.0) or stop the server (7.2).
pub(crate) fn block<B: Blocking>(ctx: Ctx<'_>) -> Option<Handle> {
    // Older servers get no such callback, and there CLIENT UNBLOCK answers 0.
    let on_reply: raw::RedisModuleCmdFunc = Some(on_reply::<B>);
    let on_timeout = on_reply.filter(|_| safe_to_unblock());
    let client = server!(RedisModule_BlockClient(
        ctx.raw,
        on_reply,
        on_timeout,
        Some(on_forget::<B>),
        0
    ));
    if client.is_null() {
        return None;
    }
    server!(RedisModule_SetDisconnectCallback(
        client,
        Some(on_disconnect::<B>)
    ));
    Some(client.expose_provenance())
}

/// Unblocks the client: it gets its reply in this turn of the event loop.
pub(crate) fn unblock(handle: Handle) {
    let client = ptr::with_exposed_provenance_mut::<raw::RedisModuleBlockedClient>(handle);
    server!(RedisModule_UnblockClient(client, client.cast()));
}

/// Undoes a block at once: the call replies after all.
pub(crate) fn abort_block(handle: Handle) {
    let client = ptr::with_exposed_provenance_mut::<raw::RedisModuleBlockedClient>(handle);
    server!(RedisModule_AbortBlock(client));
}

/// Since Redis 7.4 and Valkey 8, CLIENT UNBLOCK may come in the turn in which we unblock the
/// client.
fn safe_to_unblock() -> bool {
    server!(RedisModule_GetServerVersion()) >= 0x0007_0400
}

extern "C" fn on_reply<B: Blocking>(
    ctx: *mut raw::RedisModuleCtx,
    _args: *mut *mut raw::RedisModuleString,
    _count: c_int,
) -> c_int {
    guarded((), || {
        let handle = server!(RedisModule_GetBlockedClientHandle(ctx)).addr();
        B::reply(Ctx::new(ctx), handle);
    });
    OK
}

extern "C" fn on_disconnect<B: Blocking>(
    ctx: *mut raw::RedisModuleCtx,
    client: *mut raw::RedisModuleBlockedClient,
) {
    guarded((), || B::disconnected(Ctx::new(ctx), client.addr()));
}

extern "C" fn on_forget<B: Blocking>(_ctx: *mut raw::RedisModuleCtx, handle: *mut c_void) {
    guarded((), || B::forget(handle.addr()));
}
