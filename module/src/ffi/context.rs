//! The context of a call from the server: its client, its flags, the reply to it.

use super::{OK, OwnedStr, server};
use redis_module::raw;
use std::ffi::{CStr, CString, c_int};
use std::marker::PhantomData;
use std::ptr;
use std::sync::OnceLock;

/// A call's context: the database, the client, the way to reply.
#[derive(Clone, Copy)]
pub(crate) struct Ctx<'a> {
    pub(super) raw: *mut raw::RedisModuleCtx,
    call: PhantomData<&'a ()>,
}

/// The flags of a context about the server and the client, read once.
#[derive(Clone, Copy)]
pub(crate) struct Flags(c_int);

impl Flags {
    fn any(self, of: u32) -> bool {
        self.0 & of.cast_signed() != 0
    }

    /// Whether a client can be blocked here. Not in a transaction, a script, another module's call,
    /// or a command from a primary or the AOF: there, `RM_BlockClient` leaves a zombie or stops the
    /// server.
    pub(crate) fn may_block(self) -> bool {
        !self.any(
            raw::REDISMODULE_CTX_FLAGS_MULTI
                | raw::REDISMODULE_CTX_FLAGS_LUA
                | raw::REDISMODULE_CTX_FLAGS_DENY_BLOCKING
                | raw::REDISMODULE_CTX_FLAGS_REPLICATED
                | raw::REDISMODULE_CTX_FLAGS_LOADING,
        )
    }

    /// Whether the client of this call has a connection of its own, rather than being a script or
    /// another module.
    pub(crate) fn has_connection(self) -> bool {
        !self.any(raw::REDISMODULE_CTX_FLAGS_LUA)
            && (self.any(raw::REDISMODULE_CTX_FLAGS_MULTI)
                || !self.any(raw::REDISMODULE_CTX_FLAGS_DENY_BLOCKING))
    }

    /// Whether the server is starting. Servers before 7.2 do not say so.
    pub(crate) fn starting(self) -> bool {
        self.any(raw::REDISMODULE_CTX_FLAGS_SERVER_STARTUP)
    }

    /// Whether `maxmemory` is reached and nothing is evicted: then the server refuses every command
    /// that it knows to need memory. Never on a replica, which leaves that to its primary.
    pub(crate) fn out_of_memory(self) -> bool {
        let is_over = |flag| self.any(flag) && self.any(raw::REDISMODULE_CTX_FLAGS_MAXMEMORY);
        is_over(raw::REDISMODULE_CTX_FLAGS_OOM) && !self.any(raw::REDISMODULE_CTX_FLAGS_EVICT)
    }

    pub(crate) fn replica(self) -> bool {
        self.any(raw::REDISMODULE_CTX_FLAGS_SLAVE)
    }

    pub(crate) fn loading(self) -> bool {
        self.any(raw::REDISMODULE_CTX_FLAGS_LOADING)
    }
}

impl<'a> Ctx<'a> {
    pub(super) fn new(raw: *mut raw::RedisModuleCtx) -> Self {
        Self {
            raw,
            call: PhantomData,
        }
    }

    /// The context that the crate passes when it registers us.
    pub(crate) fn of(context: &'a redis_module::Context) -> Self {
        Self::new(context.ctx)
    }

    /// The crate's own context, for calls that are rare enough for its allocations.
    pub(crate) fn context(self) -> redis_module::Context {
        redis_module::Context::new(self.raw)
    }

    pub(crate) fn flags(self) -> Flags {
        Flags(server!(RedisModule_GetContextFlags(self.raw)))
    }

    /// Whether the server is a node of a cluster. This never changes while it runs.
    pub(crate) fn in_cluster(self) -> bool {
        static IN_CLUSTER: OnceLock<bool> = OnceLock::new();
        *IN_CLUSTER.get_or_init(|| self.flags().any(raw::REDISMODULE_CTX_FLAGS_CLUSTER))
    }

    pub(crate) fn db(self) -> c_int {
        server!(RedisModule_GetSelectedDb(self.raw))
    }

    pub(crate) fn select_db(self, db: c_int) {
        server!(RedisModule_SelectDb(self.raw, db));
    }

    pub(crate) fn client_id(self) -> u64 {
        server!(RedisModule_GetClientId(self.raw))
    }

    /// Whether the client of this call uses TLS on its connection.
    pub(crate) fn is_over_tls(self) -> bool {
        let ssl = u64::from(raw::REDISMODULE_CLIENTINFO_FLAG_SSL);
        client_info(self.client_id()).is_some_and(|info| info.flags & ssl != 0)
    }

    /// Whether the server announces the disconnect of this call's client. It does not for the
    /// client of a script or of another module. Valkey 9 knows those clients as well, but they have
    /// no user.
    pub(crate) fn has_known_client(self) -> bool {
        let id = self.client_id();
        let user = server!(RedisModule_GetClientUserNameById(self.raw, id));
        OwnedStr::adopt(user).is_some()
    }

    // --- Replies ---

    pub(crate) fn reply_array(self, len: usize) {
        let len = len.try_into().unwrap_or(0);
        server!(RedisModule_ReplyWithArray(self.raw, len));
    }

    pub(crate) fn reply_map(self, len: usize) {
        let len = len.try_into().unwrap_or(0);
        server!(RedisModule_ReplyWithMap(self.raw, len));
    }

    pub(crate) fn reply_integer(self, value: i64) {
        server!(RedisModule_ReplyWithLongLong(self.raw, value));
    }

    pub(crate) fn reply_null(self) {
        server!(RedisModule_ReplyWithNull(self.raw));
    }

    pub(crate) fn reply_bytes(self, bytes: &[u8]) {
        let (start, len) = (bytes.as_ptr().cast(), bytes.len());
        server!(RedisModule_ReplyWithStringBuffer(self.raw, start, len));
    }

    pub(crate) fn reply_ok(self) {
        server!(RedisModule_ReplyWithSimpleString(self.raw, c"OK".as_ptr()));
    }

    /// `text` begins with an error code. Our texts contain no NUL.
    pub(crate) fn reply_error(self, text: &str) {
        let text = CString::new(text).unwrap_or_default();
        server!(RedisModule_ReplyWithError(self.raw, text.as_ptr()));
    }

    pub(super) fn reply_wrong_arity(self) {
        server!(RedisModule_WrongArity(self.raw));
    }

    // --- The log ---

    /// A line in the server's log.
    pub(crate) fn log_notice(self, text: &str) {
        log(self.raw, c"notice", text);
    }

    pub(crate) fn log_warning(self, text: &str) {
        log(self.raw, c"warning", text);
    }
}

/// A warning in the server's log, for code that has no context.
pub(crate) fn log_warning(text: &str) {
    log(ptr::null_mut(), c"warning", text);
}

/// Our lines contain no NUL. The text may contain a `%`, so it is not the format.
fn log(ctx: *mut raw::RedisModuleCtx, level: &CStr, text: &str) {
    let text = CString::new(text).unwrap_or_default();
    let (level, format) = (level.as_ptr(), c"%s".as_ptr());
    server!(RedisModule_Log(ctx, level, format, text.as_ptr()));
}

/// The server's data about a client; none if no client has this number.
fn client_info(client_id: u64) -> Option<raw::RedisModuleClientInfo> {
    // SAFETY: plain C data, for which all zeros is a value.
    let mut info: raw::RedisModuleClientInfo = unsafe { std::mem::zeroed() };
    info.version = 1;
    let place = (&raw mut info).cast();
    let found = server!(RedisModule_GetClientInfoById(place, client_id));
    (found == OK).then_some(info)
}

/// The address of a client, as `CLIENT LIST` shows it; none if the client is not connected any
/// more.
pub(crate) fn address_of(client_id: u64) -> Option<String> {
    let info = client_info(client_id)?;
    let host = info.addr.iter().take_while(|char| **char != 0);
    let host: Vec<u8> = host.map(|char| char.to_ne_bytes()[0]).collect();
    let (host, port) = (String::from_utf8_lossy(&host), info.port);
    if host.contains(':') {
        Some(format!("[{host}]:{port}"))
    } else {
        Some(format!("{host}:{port}"))
    }
}
