//! A call from the server: its context, its arguments, its strings.

use super::needed::{
    CLIENT, DELETE, EXIST, Needed, PUBLISH, SPUBLISH, WRITE_NOTHING, call_was_refused,
    check_replicated,
};
use super::version::{knows_dry_runs, may_deny_writes, run_id};
use super::{OK, int, server};
use redis_module::raw;
use rlock_core::CommandError;
use std::ffi::{CStr, CString, c_char, c_int, c_longlong};
use std::io::{self, ErrorKind, Write as _};
use std::marker::PhantomData;
use std::mem::ManuallyDrop;
use std::ops::Deref;
use std::sync::OnceLock;
use std::{ptr, slice};

/// Replicates a command, by the name that it has on this server if that may be another one. The
/// format has a letter for each argument; a pointer and a length are one.
macro_rules! replicate {
    ($ctx:expr, $command:literal, $($rest:expr),+) => {
        replicate!($ctx, $command as $command.as_ptr(), $($rest),+)
    };
    ($ctx:expr, $command:literal as $name:expr, $format:literal, $($argument:expr),+) => {{
        let (name, format) = ($name, $format.as_ptr());
        let result = server!(RedisModule_Replicate($ctx.raw, name, format, $($argument),+));
        check_replicated($command, result);
    }};
}

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
        self.0 & int(of) != 0
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
        server!(RedisModule_ReplyWithArray(
            self.raw,
            len.try_into().unwrap_or(0)
        ));
    }

    pub(crate) fn reply_map(self, len: usize) {
        server!(RedisModule_ReplyWithMap(
            self.raw,
            len.try_into().unwrap_or(0)
        ));
    }

    pub(crate) fn reply_integer(self, value: i64) {
        server!(RedisModule_ReplyWithLongLong(self.raw, value));
    }

    pub(crate) fn reply_null(self) {
        server!(RedisModule_ReplyWithNull(self.raw));
    }

    pub(crate) fn reply_bytes(self, bytes: &[u8]) {
        server!(RedisModule_ReplyWithStringBuffer(
            self.raw,
            bytes.as_ptr().cast(),
            bytes.len()
        ));
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

    // --- Changes, for replicas and the append-only file ---

    /// `HSET key field value`.
    pub(crate) fn replicate_hset(self, key: Str<'_>, (field, value): Field<'_>) {
        replicate!(self, c"HSET", c"sss", key.raw, field.raw, value.raw);
    }

    /// `HSET key field value field value`. Not as a vector ("v"): for that the server allocates
    /// once more.
    pub(crate) fn replicate_hset_both(self, key: Str<'_>, one: Field<'_>, other: Field<'_>) {
        let ((field, value), (next, its_value)) = (one, other);
        let (field, value, next, its_value) = (field.raw, value.raw, next.raw, its_value.raw);
        replicate!(
            self, c"HSET", c"sssss", key.raw, field, value, next, its_value
        );
    }

    /// `RESTORE key at payload REPLACE ABSTTL`, with the last two words given. False if the server
    /// has no such command; then nothing is replicated.
    pub(crate) fn replicate_restore(
        self,
        key: Str<'_>,
        at: &[u8],
        payload: &[u8],
        [replace, abs_ttl]: [Str<'_>; 2],
    ) -> bool {
        let result = server!(RedisModule_Replicate(
            self.raw,
            c"RESTORE".as_ptr(),
            c"sbbss".as_ptr(),
            key.raw,
            at.as_ptr(),
            at.len(),
            payload.as_ptr(),
            payload.len(),
            replace.raw,
            abs_ttl.raw
        ));
        result == OK
    }

    pub(crate) fn replicate_hdel(self, key: Str<'_>, field: Str<'_>) {
        replicate!(self, c"HDEL", c"ss", key.raw, field.raw);
    }

    pub(crate) fn replicate_pexpireat(self, key: Str<'_>, at: &[u8]) {
        replicate!(self, c"PEXPIREAT", c"sb", key.raw, at.as_ptr(), at.len());
    }

    /// `DEL key`, or `UNLINK key`.
    pub(crate) fn replicate_del(self, key: Str<'_>) {
        replicate!(self, c"DEL" as DELETE.name(), c"s", key.raw);
    }

    /// `SET key value PXAT at`.
    pub(crate) fn replicate_set(self, key: Str<'_>, value: Str<'_>, at: &[u8]) {
        let (value, word) = (value.raw, c"PXAT".as_ptr());
        replicate!(
            self,
            c"SET",
            c"sscb",
            key.raw,
            value,
            word,
            at.as_ptr(),
            at.len()
        );
    }

    /// `SET key value`, without an expiry.
    pub(crate) fn replicate_set_forever(self, key: Str<'_>, value: Str<'_>) {
        replicate!(self, c"SET", c"ss", key.raw, value.raw);
    }

    /// `PUBLISH channel message`, to replicas only: a message is not data, so the AOF does not need
    /// it. If the server has no such command, the message is not replicated, and nothing depends on
    /// it.
    pub(crate) fn replicate_publish(self, channel: Str<'_>, message: Str<'_>) {
        self.replicate_message(&PUBLISH, channel, message);
    }

    /// The same with `SPUBLISH`.
    pub(crate) fn replicate_spublish(self, channel: Str<'_>, message: Str<'_>) {
        self.replicate_message(&SPUBLISH, channel, message);
    }

    fn replicate_message(self, command: &Needed, channel: Str<'_>, message: Str<'_>) {
        let command = command.name();
        if !command.is_null() {
            replicate!(
                self,
                c"PUBLISH" as command,
                c"Ass",
                channel.raw,
                message.raw
            );
        }
    }

    pub(crate) fn publish(self, channel: Str<'_>, message: Str<'_>) {
        server!(RedisModule_PublishMessage(
            self.raw,
            channel.raw,
            message.raw
        ));
    }

    pub(crate) fn publish_sharded(self, channel: Str<'_>, message: Str<'_>) {
        server!(RedisModule_PublishMessageShard(
            self.raw,
            channel.raw,
            message.raw
        ));
    }

    pub(crate) fn signal_modified(self, key: Str<'_>) {
        server!(RedisModule_SignalModifiedKey(self.raw, key.raw));
    }

    pub(crate) fn notify(self, class: EventClass, event: &CStr, key: Str<'_>) {
        let class = match class {
            EventClass::Generic => raw::REDISMODULE_NOTIFY_GENERIC,
            EventClass::Hash => raw::REDISMODULE_NOTIFY_HASH,
            EventClass::String => raw::REDISMODULE_NOTIFY_STRING,
        };
        server!(RedisModule_NotifyKeyspaceEvent(
            self.raw,
            class,
            event.as_ptr(),
            key.raw
        ));
    }

    // --- Clients ---

    /// Closes a client's connection at once. Commands that were read and not carried out are
    /// dropped. Nothing happens if it has closed already. `RM_DeauthenticateAndCloseClient` is not
    /// enough: with I/O threads Valkey 9 still runs a command that such a thread has parsed.
    pub(crate) fn close_client(self, client_id: u64) {
        let (command, format) = (CLIENT.name(), c"ccl".as_ptr());
        let (kill, by_id) = (c"KILL".as_ptr(), c"ID".as_ptr());
        let id = c_longlong::try_from(client_id).unwrap_or_default();
        let reply = server!(RedisModule_Call(self.raw, command, format, kill, by_id, id));
        if CallReply::of(reply).is_none() {
            call_was_refused(c"CLIENT");
        }
    }

    /// The name of this server: the node's id in a cluster, else its run id.
    pub(crate) fn server_id(self) -> String {
        if !self.in_cluster() {
            return run_id();
        }
        let id = server!(RedisModule_GetMyClusterID());
        // SAFETY: the id has this length and no end of its own, and lives as long as the server.
        let id = unsafe { slice::from_raw_parts(id.cast::<u8>(), NODE_ID_LEN) };
        String::from_utf8_lossy(id).into_owned()
    }

    // --- Reads ---

    /// The value of a string; none if this node has no such key, or the key is no string. Unlike
    /// [`super::Key::string`] this does not change the value's encoding, but it runs a command of
    /// the server and is slower: for commands that write nothing.
    pub(crate) fn get(self, key: Str<'_>) -> Option<Vec<u8>> {
        let (command, format) = (c"GET".as_ptr(), c"sE".as_ptr());
        let reply = CallReply::of(server!(RedisModule_Call(
            self.raw, command, format, key.raw
        )))?;
        // If the key is no string, or another node's, the error has a code of its own.
        if reply.text().starts_with(b"ERR ") && !reply.is_string() {
            call_was_refused(c"GET");
        }
        reply.is_string().then(|| reply.text().to_vec())
    }

    /// An option of the server that is a number; none if the server has no such option, or no
    /// `CONFIG`.
    pub(crate) fn option(self, name: &CStr) -> Option<i64> {
        let (command, format, get) = (c"CONFIG".as_ptr(), c"cc".as_ptr(), c"GET".as_ptr());
        let reply = CallReply::of(server!(RedisModule_Call(
            self.raw,
            command,
            format,
            get,
            name.as_ptr()
        )))?;
        let value = reply.element(1)?;
        rlock_core::integer(value.text())
    }

    // --- Whether a write is allowed ---

    /// Whether the server would accept a write to this key from one of its clients now.
    ///
    /// Only a write can tell. A node whose cluster is down may still answer reads
    /// (`cluster-allow-reads-when-down`), and opening a key checks nothing: a slot that moved away
    /// looks empty, and a lock in it free. So a write is begun and not carried out (`D`): it
    /// appears in no statistics and no MONITOR. Redis 7.0 carries every write out, so the command
    /// is one that changes nothing: it takes none of the members out of a set.
    ///
    /// `S` makes the server refuse the write for every reason for which it refuses a client's: a
    /// full disk (MISCONF), too few replicas (NOREPLICAS), a replica (READONLY), a cluster that is
    /// down. A refusal for a reason that is not known here means that the write is not allowed.
    pub(crate) fn presence(self, key: Str<'_>) -> Presence {
        let dry = knows_dry_runs();
        let format = if dry { c"SDsc" } else { c"Ssc" };
        let (command, format, none) = (WRITE_NOTHING.name(), format.as_ptr(), c"0".as_ptr());
        let reply = server!(RedisModule_Call(self.raw, command, format, key.raw, none));
        // The interface reports the reason in errno, which the next call may change.
        let reason = io::Error::last_os_error().kind();
        // A dry run answers with an error if it was refused, and else with nothing, or on Valkey 9
        // with a reply of no type. Any other run has no reply if it was refused. If it was carried
        // out, its reply may be an error too, that of the command itself: a lock is no set.
        let is_refused = match CallReply::of(reply) {
            Some(reply) => dry && reply.is_error(),
            None => !dry,
        };
        match (is_refused, reason) {
            (false, _) => Presence::Here,
            (true, ErrorKind::PermissionDenied) => Presence::Elsewhere,
            (true, ErrorKind::NotFound) => {
                call_was_refused(c"SPOP");
                Presence::Unknown
            }
            (true, _) => Presence::Unknown,
        }
    }

    /// Whether the slot of two keys, which do not exist, is at this node and not on its way.
    pub(crate) fn presence_of_both(self, one: Str<'_>, other: Str<'_>) -> bool {
        let (command, format) = (EXIST.name(), c"ss".as_ptr());
        let reply = server!(RedisModule_Call(
            self.raw, command, format, one.raw, other.raw
        ));
        let is_refused = reply.is_null();
        if is_refused && io::Error::last_os_error().kind() == ErrorKind::NotFound {
            call_was_refused(c"EXISTS");
        }
        CallReply::of(reply).is_some()
    }

    /// Whether the server refuses writes to all its clients now.
    ///
    /// In a cluster the key may belong to another node, which is no reason to refuse writes to
    /// other keys: each lock is checked by itself. Redis 7.0 would carry the write out, so outside
    /// of a cluster it is only asked if INFO shows a reason.
    pub(crate) fn writes_are_denied(self) -> bool {
        if !knows_dry_runs() && !self.in_cluster() && !may_deny_writes() {
            return false;
        }
        let set = OwnedStr::new(b"rlock:no-set");
        self.presence(set.as_str()) == Presence::Unknown
    }

    // --- The log ---

    /// A line in the server's log.
    pub(crate) fn log_notice(self, text: &str) {
        log(self.raw, c"notice", text);
    }

    // --- Permissions ---

    /// The name of the calling user; none if the call has no user, or if the server cannot be asked
    /// for it.
    ///
    /// A connection's user is found by the client's number. In a script or another module's call we
    /// must first know that the call has a user: without one, servers up to Redis 8.0 and Valkey 8
    /// crash when they are asked for its name.
    pub(crate) fn user_name(self) -> Option<OwnedStr> {
        let id = self.client_id();
        let of_client = server!(RedisModule_GetClientUserNameById(self.raw, id));
        OwnedStr::adopt(of_client).or_else(|| {
            // On Valkey 9 a script's client is known, but has no user of its own.
            let ask = || server!(RedisModule_GetCurrentUserName(self.raw));
            OwnedStr::adopt(self.has_user().then(ask)?)
        })
    }

    /// The keys that the caller may read.
    pub(crate) fn reader(self) -> Reader {
        if !self.has_user() {
            return Reader::Unrestricted;
        }
        let name = server!(RedisModule_GetCurrentUserName(self.raw));
        let Some(name) = OwnedStr::adopt(name) else {
            return Reader::Unrestricted;
        };
        let user = server!(RedisModule_GetModuleUserFromUserName(name.as_str().raw));
        if user.is_null() {
            Reader::Unknown
        } else {
            Reader::User(User(user))
        }
    }

    /// Whether this call has a user. If it has none, servers up to Redis 8.0 and Valkey 8 crash
    /// when they read the user's name.
    ///
    /// A call in the caller's name (`C`) that has no user is refused before anything else is
    /// checked. So the command need not exist; it does not, and nothing is run either way.
    pub(super) fn has_user(self) -> bool {
        let (command, format) = (c"rlock.no-command".as_ptr(), c"CE".as_ptr());
        let reply = server!(RedisModule_Call(self.raw, command, format));
        // The interface reports the reason in errno.
        let no_user = io::Error::last_os_error().raw_os_error() == Some(ENOTSUP);
        CallReply::of(reply);
        !no_user
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

/// The length of a node's id in a cluster.
const NODE_ID_LEN: usize = 40;

/// The error "operation not supported", on Linux.
const ENOTSUP: c_int = 95;

/// Whether this server accepts writes to a key.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Presence {
    Here,
    /// Another node of the cluster serves the key, or will soon.
    Elsewhere,
    /// Not now: the server refuses all writes, or the cluster is down and the key's node is not
    /// known.
    Unknown,
}

/// The classes of the keyspace events that we emit.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(crate) enum EventClass {
    Generic,
    Hash,
    String,
}

/// The type of a reply that is a string.
const STRING: c_int = 0;

/// The type of a reply that is an error.
const ERROR: c_int = 1;
const _: () = assert!(raw::REDISMODULE_REPLY_STRING == 0 && raw::REDISMODULE_REPLY_ERROR == 1);

/// The reply of a command that we called.
pub(super) struct CallReply(pub(super) *mut raw::RedisModuleCallReply);

impl CallReply {
    pub(super) fn of(raw: *mut raw::RedisModuleCallReply) -> Option<Self> {
        (!raw.is_null()).then(|| Self(raw))
    }

    fn is_string(&self) -> bool {
        server!(RedisModule_CallReplyType(self.0)) == STRING
    }

    fn is_error(&self) -> bool {
        server!(RedisModule_CallReplyType(self.0)) == ERROR
    }

    /// The text of a string or an error; empty for any other reply.
    pub(super) fn text(&self) -> &[u8] {
        let mut len = 0;
        let text = server!(RedisModule_CallReplyStringPtr(self.0, &raw mut len));
        Self::bytes(self, text, len)
    }

    /// The reply as it goes over the wire.
    pub(super) fn wire(&self) -> &[u8] {
        let mut len = 0;
        let text = server!(RedisModule_CallReplyProto(self.0, &raw mut len));
        Self::bytes(self, text, len)
    }

    /// Bytes that the server has told of this reply; it may have told none.
    fn bytes(_of: &Self, start: *const c_char, len: usize) -> &[u8] {
        if start.is_null() {
            return &[];
        }
        // SAFETY: the text is `len` bytes and lives as long as the reply.
        unsafe { slice::from_raw_parts(start.cast(), len) }
    }

    /// The element of an array at this place; none beyond its end, or if the reply is no array.
    pub(super) fn element(&self, place: usize) -> Option<Element<'_>> {
        let element = server!(RedisModule_CallReplyArrayElement(self.0, place));
        let reply = Self::of(element).map(ManuallyDrop::new)?;
        let of = PhantomData;
        Some(Element { reply, of })
    }

    /// The number of elements of an array, or of bytes of a string.
    pub(super) fn len(&self) -> usize {
        server!(RedisModule_CallReplyLength(self.0))
    }
}

/// An element of an array. It is freed with the array.
pub(super) struct Element<'r> {
    reply: ManuallyDrop<CallReply>,
    of: PhantomData<&'r CallReply>,
}

impl Deref for Element<'_> {
    type Target = CallReply;

    fn deref(&self) -> &CallReply {
        &self.reply
    }
}

impl Drop for CallReply {
    fn drop(&mut self) {
        server!(RedisModule_FreeCallReply(self.0));
    }
}

/// The keys that a caller may read.
pub(crate) enum Reader {
    /// All keys, because the call has no user. Another module can make such a call, and the server
    /// lets that module read every key.
    Unrestricted,
    /// The keys that the ACL lets this user read.
    User(User),
    /// No key: the user is not in the ACL, since a module has made it, so its permissions are not
    /// known.
    Unknown,
}

impl Reader {
    pub(crate) fn may_read(&self, key: &[u8]) -> bool {
        match self {
            Self::Unrestricted => true,
            Self::User(user) => user.may_read(key),
            Self::Unknown => false,
        }
    }
}

/// A user of the server's ACL.
pub(crate) struct User(*mut raw::RedisModuleUser);

impl User {
    fn may_read(&self, key: &[u8]) -> bool {
        let key = OwnedStr::new(key);
        let access = int(raw::REDISMODULE_CMD_KEY_ACCESS);
        let key = key.as_str().raw;
        server!(RedisModule_ACLCheckKeyPermissions(self.0, key, access)) == OK
    }

    fn may_run(&self, command: &[&[u8]]) -> bool {
        let words: Vec<_> = command.iter().map(|word| OwnedStr::new(word)).collect();
        let mut words: Vec<_> = words.iter().map(|word| word.as_str().raw).collect();
        let (first, count) = (words.as_mut_ptr(), words.len());
        let Ok(count) = c_int::try_from(count) else {
            return false;
        };
        server!(RedisModule_ACLCheckCommandPermissions(self.0, first, count)) == OK
    }
}

/// Whether the user `default` may run this command: many servers load an append-only file as that
/// user.
pub(crate) fn may_default_run(command: &[&[u8]]) -> bool {
    let name = OwnedStr::new(b"default");
    let user = server!(RedisModule_GetModuleUserFromUserName(name.as_str().raw));
    user.is_null() || User(user).may_run(command)
}

impl Drop for User {
    fn drop(&mut self) {
        server!(RedisModule_FreeModuleUser(self.0));
    }
}

/// A string of the server, borrowed from its keeper.
#[derive(Clone, Copy)]
#[repr(transparent)]
pub(crate) struct Str<'a> {
    pub(super) raw: *mut raw::RedisModuleString,
    keeper: PhantomData<&'a ()>,
}

impl<'a> Str<'a> {
    pub(super) fn borrow(raw: *mut raw::RedisModuleString) -> Self {
        Self {
            raw,
            keeper: PhantomData,
        }
    }

    /// The address of the string. It identifies this very string while the string lives.
    pub(crate) fn address(self) -> usize {
        self.raw.addr()
    }

    pub(crate) fn bytes(self) -> &'a [u8] {
        let mut len = 0;
        let start = server!(RedisModule_StringPtrLen(self.raw, &raw mut len));
        // SAFETY: the server's string is `len` bytes from `start`, and its keeper outlives 'a.
        unsafe { slice::from_raw_parts(start.cast(), len) }
    }
}

/// A field of a hash, with its value.
pub(crate) type Field<'a> = (Str<'a>, Str<'a>);

/// A string of the server that is ours to free.
pub(crate) struct OwnedStr(*mut raw::RedisModuleString);

impl OwnedStr {
    pub(crate) fn new(bytes: &[u8]) -> Self {
        // Without a context: the string is freed by its drop, not with the call.
        Self(server!(RedisModule_CreateString(
            ptr::null_mut(),
            bytes.as_ptr().cast(),
            bytes.len()
        )))
    }

    /// One string of several parts. A short one is put together on the stack.
    pub(crate) fn concat(parts: &[&[u8]]) -> Self {
        let mut buffer = [0; 256];
        let mut rest = &mut buffer[..];
        let mut add = |part: &[u8]| match part {
            // Half of the parts are this short, and a call to copy one takes longer than this.
            [] => true,
            [byte] => match std::mem::take(&mut rest) {
                [place, others @ ..] => {
                    *place = *byte;
                    rest = others;
                    true
                }
                [] => false,
            },
            _ => rest.write_all(part).is_ok(),
        };
        let fits = parts.iter().all(|part| add(part));
        let left = rest.len();
        match buffer.get(..buffer.len().saturating_sub(left)) {
            Some(whole) if fits => Self::new(whole),
            _ => Self::new(&parts.concat()),
        }
    }

    /// The string as the value of an option. It stays ours: the server copies the value, and the
    /// crate forgets it.
    pub(crate) fn as_option(&self) -> redis_module::RedisString {
        redis_module::RedisString::from_redis_module_string(ptr::null_mut(), self.0)
    }

    pub(super) fn adopt(raw: *mut raw::RedisModuleString) -> Option<Self> {
        (!raw.is_null()).then(|| Self(raw))
    }

    pub(crate) fn as_str(&self) -> Str<'_> {
        Str::borrow(self.0)
    }
}

impl Drop for OwnedStr {
    fn drop(&mut self) {
        server!(RedisModule_FreeString(ptr::null_mut(), self.0));
    }
}

/// The arguments of a command, its name first.
#[derive(Clone, Copy)]
pub(crate) struct Args<'a>(&'a [Str<'a>]);

impl<'a> Args<'a> {
    pub(super) fn new(args: *mut *mut raw::RedisModuleString, count: c_int) -> Self {
        let len = usize::try_from(count).unwrap_or(0);
        // SAFETY: `args` are `count` strings that live as long as the call, and `Str` is
        // transparent.
        Self(unsafe { slice::from_raw_parts(args.cast(), len) })
    }

    /// The argument at this place. The command's name has place 0.
    pub(crate) fn at(self, place: usize) -> Result<Str<'a>, CommandError> {
        // Not with `ok_or`: each argument would make an error, and drop it.
        match self.0.get(place) {
            Some(arg) => Ok(*arg),
            None => Err(CommandError::WrongArity),
        }
    }

    pub(crate) fn len(self) -> usize {
        self.0.len()
    }

    /// The arguments from this place on.
    pub(crate) fn from(self, place: usize) -> Self {
        Self(self.0.get(place..).unwrap_or_default())
    }

    /// The arguments as the interface takes them. It only counts references to these strings.
    pub(super) fn as_list(self) -> (*mut *mut raw::RedisModuleString, usize) {
        (self.0.as_ptr().cast_mut().cast(), self.0.len())
    }

    /// The arguments after the name, as bytes.
    pub(crate) fn bytes(self) -> impl Iterator<Item = &'a [u8]> {
        self.0.iter().skip(1).map(|arg| arg.bytes())
    }
}
