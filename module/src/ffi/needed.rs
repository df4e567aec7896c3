//! The commands of the server that we need. `rename-command` in its configuration may have taken
//! their names, and then `RM_Replicate` and `RM_Call` fail: replicas and the append-only file would
//! keep a lock that was released. So the names are looked up at load, and only then: no name
//! changes while the server runs.

use super::{Ctx, OwnedStr, log_warning, server};
use std::ffi::{CStr, c_char, c_int};
use std::io;
use std::ptr;
use std::sync::atomic::{AtomicBool, AtomicPtr, AtomicU64, Ordering};

/// A command, or others that do the same. The first one that the server has is used.
type Names = &'static [&'static CStr];

/// A command that we call by the name which was looked up.
pub(super) struct Needed {
    names: Names,
    chosen: AtomicPtr<c_char>,
}

impl Needed {
    const fn new(names: Names) -> Self {
        let chosen = AtomicPtr::new(ptr::null_mut());
        Self { names, chosen }
    }

    /// The name to call it by, once the module is loaded. Null if the server has none; the load
    /// allows this for messages and `CLIENT`, and for `EXIST` outside of a cluster.
    #[inline]
    pub(super) fn name(&self) -> *const c_char {
        self.chosen.load(Ordering::Relaxed)
    }
}

/// Deletes a key. A hardened server often has no `DEL`.
pub(super) static DELETE: Needed = Needed::new(DELETIONS);
const DELETIONS: Names = &[c"DEL", c"UNLINK"];

/// A write that changes nothing, for any type of key: `… key 0`.
pub(super) static WRITE_NOTHING: Needed = Needed::new(WRITES_OF_NOTHING);
const WRITES_OF_NOTHING: Names = &[c"SPOP", c"LPOP", c"RPOP", c"ZPOPMIN", c"ZPOPMAX"];

/// Counts how many of one or two keys exist.
pub(super) static EXIST: Needed = Needed::new(EXISTENCES);
const EXISTENCES: Names = &[c"EXISTS", c"TOUCH"];

/// Closes a client's connection: `… KILL ID id`.
pub(super) static CLIENT: Needed = Needed::new(&[c"CLIENT"]);

/// Whether [`CLIENT`] can be called.
pub(crate) fn can_close_clients() -> bool {
    !CLIENT.name().is_null()
}

/// Sends a message to the subscribers at replicas.
pub(super) static PUBLISH: Needed = Needed::new(&[c"PUBLISH"]);
pub(super) static SPUBLISH: Needed = Needed::new(&[c"SPUBLISH"]);

/// Without one of each no lock is safe, and no other command does the same. (`HMSET` does the same
/// as `HSET`, but a replica that has only one of them would miss the changes that its primary sends
/// with the other. For `DELETE` that risk is worth it, since many servers have no `DEL`.) The
/// server puts `MULTI` and `EXEC` around writes that are replicated together, and `SELECT` before
/// those of another database.
const REQUIRED: [Names; 10] = [
    DELETIONS,
    WRITES_OF_NOTHING,
    &[c"HSET"],
    &[c"HDEL"],
    &[c"PEXPIREAT"],
    &[c"SET"],
    &[c"GET"],
    &[c"MULTI"],
    &[c"EXEC"],
    &[c"SELECT"],
];

/// Required in a cluster: otherwise waiters for a lock in a slot that moved would not be told the
/// node that serves it.
const REQUIRED_IN_CLUSTER: [Names; 2] = [EXISTENCES, &[c"CLUSTER"]];

/// Commands that locks can do without, each with the effect of its absence, for the log.
const OPTIONAL: [(&CStr, &str); 7] = [
    (
        c"RESTORE",
        "replicas and the append-only file get new locks as HSET and PEXPIREAT, as with \
         rlock.replicate plain",
    ),
    (
        c"CLIENT",
        "RLOCK.BIND refuses every connection, so sessions have no command connection",
    ),
    (
        c"PUBLISH",
        "subscribers at replicas get no unlock messages of PUBLISH",
    ),
    (
        c"SPUBLISH",
        "subscribers at replicas get no unlock messages of SPUBLISH",
    ),
    (c"COMMAND", "RLOCK.GUARD refuses every command"),
    (
        c"DEL",
        "rlock replicates UNLINK instead. The server itself writes DEL when a key expires, and \
         cannot read its append-only file then, unless lazyfree-lazy-expire is yes",
    ),
    (
        c"UNLINK",
        "the server itself writes UNLINK when a key expires, and cannot read its append-only file \
         then, unless lazyfree-lazy-expire is no",
    ),
];

/// Chooses the names of the commands that we call, and logs which optional commands are missing. An
/// error names the required ones that are missing.
pub(crate) fn choose_commands(ctx: Ctx<'_>) -> Result<(), String> {
    let known = |names: Names| names.iter().find(|name| is_known(ctx, name));
    let of_cluster = ctx.in_cluster().then_some(REQUIRED_IN_CLUSTER);
    let required = REQUIRED.into_iter().chain(of_cluster.into_iter().flatten());
    let missing = required.filter(|names| known(names).is_none());
    let text = |names: Names| {
        let names: Vec<_> = names.iter().map(|name| name.to_string_lossy()).collect();
        names.join(" or ")
    };
    let missing: Vec<String> = missing.map(text).collect();
    if !missing.is_empty() {
        return Err(missing.join(", "));
    }
    for needed in [
        &DELETE,
        &WRITE_NOTHING,
        &EXIST,
        &PUBLISH,
        &SPUBLISH,
        &CLIENT,
    ] {
        let name = known(needed.names).map_or(ptr::null(), |name| name.as_ptr());
        needed.chosen.store(name.cast_mut(), Ordering::Relaxed);
    }
    for (name, lack) in OPTIONAL {
        if !is_known(ctx, name) {
            let name = name.to_string_lossy();
            ctx.log_warning(&format!("this server has no {name}: {lack}"));
        }
    }
    let has_both = DELETIONS.iter().all(|name| is_known(ctx, name));
    DELETIONS_ARE_LOST.store(!has_both, Ordering::Relaxed);
    Ok(())
}

/// Whether replicas may lose the server's own message that a key has expired. That is `DEL` or
/// `UNLINK`, depending on `lazyfree-lazy-expire`; one of them is renamed here, and so perhaps
/// there. The rest of an expired lock must not become part of the next one.
#[inline]
pub(crate) fn deletions_are_lost() -> bool {
    DELETIONS_ARE_LOST.load(Ordering::Relaxed)
}

static DELETIONS_ARE_LOST: AtomicBool = AtomicBool::new(false);

/// Whether the server has a command of this name.
///
/// The server is asked for the keys of a command with this name: that runs nothing, and unlike
/// `COMMAND INFO` it needs no command that may be renamed itself. Without arguments the answer is
/// always an error, and only one error says that the name is unknown.
fn is_known(ctx: Ctx<'_>, name: &CStr) -> bool {
    let name = OwnedStr::new(name.to_bytes());
    let (mut words, mut count) = ([name.as_str().raw], c_int::default());
    let places = server!(RedisModule_GetCommandKeysWithFlags(
        ctx.raw,
        words.as_mut_ptr(),
        1,
        &raw mut count,
        ptr::null_mut()
    ));
    let error = io::Error::last_os_error();
    server!(RedisModule_Free(places.cast()));
    !places.is_null() || error.kind() != io::ErrorKind::NotFound
}

/// How many calls were refused that the server can always carry out: replicating a change to
/// replicas and the append-only file, or a question.
pub(crate) fn calls_refused() -> u64 {
    CALLS_REFUSED.load(Ordering::Relaxed)
}

static CALLS_REFUSED: AtomicU64 = AtomicU64::new(0);

/// Counts a refused call. The 1st, 2nd, 4th, 8th and so on are logged, so that the log stays short.
#[cold]
pub(crate) fn call_was_refused(command: &CStr) {
    let count = CALLS_REFUSED
        .fetch_add(1, Ordering::Relaxed)
        .saturating_add(1);
    if count.is_power_of_two() {
        log_warning(&format!(
            "the server has refused rlock the command {}: replicas and the append-only file may \
             lack a change of a lock, please report it ({count} such calls so far)",
            command.to_string_lossy()
        ));
    }
}

/// Checks the result of `RM_Replicate`.
#[inline]
pub(super) fn check_replicated(command: &CStr, result: c_int) {
    if result != super::OK {
        call_was_refused(command);
    }
}
