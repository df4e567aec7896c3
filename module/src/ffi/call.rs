//! Our calls to the server: changes for replicas, messages, events, questions.

use super::needed::{
    CLIENT, DELETE, EXIST, PUBLISH, SPUBLISH, WRITE_NOTHING, call_was_refused, check_replicated,
};
use super::reply::CallReply;
use super::value::{elements, text};
use super::version::{knows_dry_runs, may_deny_writes, run_id};
use super::{Ctx, Field, OK, OwnedStr, Str, server};
use redis_module::raw;
use std::ffi::{CStr, c_longlong};
use std::io::{self, ErrorKind};
use std::slice;

/// Replicates a command, by the name that it has on this server if that may be another one. The
/// format has a letter for each argument; a pointer and a length are one.
macro_rules! replicate {
    ($ctx:expr, $command:literal, $($rest:expr),+) => {
        replicate!($ctx, $command as $command.as_ptr(), $($rest),+)
    };
    ($ctx:expr, $command:literal as $name:expr, $format:expr, $($argument:expr),+) => {{
        let (name, format) = ($name, $format.as_ptr());
        let result = server!(RedisModule_Replicate($ctx.raw, name, format, $($argument),+));
        check_replicated($command, result);
    }};
}

impl Ctx<'_> {
    // --- Changes, for replicas and the append-only file ---

    /// `HSET key field value [field value]`. Not as a vector ("v"): for that the server allocates
    /// once more. It reads no arguments beyond those of the format.
    pub(crate) fn replicate_hset(self, key: Str<'_>, one: Field<'_>, other: Option<Field<'_>>) {
        let format = if other.is_some() { c"sssss" } else { c"sss" };
        let ((field, value), (next, its_value)) = (one, other.unwrap_or(one));
        let (field, value, next, its_value) = (field.raw, value.raw, next.raw, its_value.raw);
        replicate!(
            self, c"HSET", format, key.raw, field, value, next, its_value
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

    /// `SET key value [PXAT at]`.
    pub(crate) fn replicate_set(self, key: Str<'_>, value: &[u8], at: Option<&[u8]>) {
        let (format, at) = (
            if at.is_some() { c"sbcb" } else { c"sb" },
            at.unwrap_or_default(),
        );
        let (key, word) = (key.raw, c"PXAT".as_ptr());
        replicate!(
            self,
            c"SET",
            format,
            key,
            value.as_ptr(),
            value.len(),
            word,
            at.as_ptr(),
            at.len()
        );
    }

    /// Replicates a message, to replicas only: it is not data, so the AOF does not need it. If the
    /// server has no such command, the message is not replicated, and nothing depends on it.
    pub(crate) fn replicate_message(self, by: Publish, channel: Str<'_>, message: Str<'_>) {
        let command = match by {
            Publish::Classic => PUBLISH.name(),
            Publish::Sharded => SPUBLISH.name(),
        };
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

    pub(crate) fn publish(self, by: Publish, channel: Str<'_>, message: Str<'_>) {
        let (ctx, channel, message) = (self.raw, channel.raw, message.raw);
        match by {
            Publish::Classic => server!(RedisModule_PublishMessage(ctx, channel, message)),
            Publish::Sharded => server!(RedisModule_PublishMessageShard(ctx, channel, message)),
        };
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
        let (event, key) = (event.as_ptr(), key.raw);
        server!(RedisModule_NotifyKeyspaceEvent(self.raw, class, event, key));
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
    pub(crate) fn option(self, name: &str) -> Option<usize> {
        let reply = self.context().call("CONFIG", &["GET", name]).ok()?;
        text(elements(&reply).get(1)?)?.parse().ok()
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
}

/// The length of a node's id in a cluster.
const NODE_ID_LEN: usize = 40;

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

/// The two kinds of messages: to all nodes of a cluster, and to those of the channel's shard.
#[derive(Clone, Copy)]
pub(crate) enum Publish {
    Classic,
    Sharded,
}
