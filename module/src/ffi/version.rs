//! The flavour and version of the server, and its INFO.

use super::{Ctx, server};
use redis_module::raw;
use std::ffi::{CStr, c_char, c_int};
use std::ptr;
use std::sync::OnceLock;

/// Whether it is Valkey, which counts its own versions.
fn is_valkey() -> bool {
    static IS_VALKEY: OnceLock<bool> = OnceLock::new();
    *IS_VALKEY.get_or_init(|| Section::of(c"server").get(c"server_name") == Some(b"valkey"))
}

/// Whether the server is at least that Redis, or at least that Valkey; versions are `0x00MMmmpp`.
/// (Redis 7.2 is the last version that both have in common.)
fn at_least(redis: c_int, valkey: c_int) -> bool {
    server!(RedisModule_GetServerVersion()) >= if is_valkey() { valkey } else { redis }
}

/// Whether the server parses the commands of a pipeline before it runs them, and remembers which
/// command each is. If one of ours stands behind a command that blocks, and we are unloaded
/// meanwhile, the server runs code that does not exist any more: it stops, or does something else.
pub(crate) fn looks_commands_up_ahead() -> bool {
    at_least(0x0008_0400, 0x0009_0000)
}

/// Whether the server can try a module's call without carrying it out.
pub(super) fn knows_dry_runs() -> bool {
    at_least(0x0007_0200, 0)
}

/// Whether the server may have a reason to refuse writes: a snapshot or the append-only file could
/// not be written, or it requires replicas.
pub(super) fn may_deny_writes() -> bool {
    let (files, replicas) = (Section::of(c"persistence"), Section::of(c"replication"));
    let is_well = |field| files.get(field) == Some(b"ok");
    let wants_replicas = replicas.get(c"min_slaves_good_slaves").is_some();
    wants_replicas || !is_well(c"rdb_last_bgsave_status") || !is_well(c"aof_last_write_status")
}

/// Tells the server how we write, and which of its features we support.
///
/// - We signal modified keys ourselves: a command that opens a key and changes nothing must not
///   break another client's WATCH.
/// - Valkey 9 moves slots as a whole only if every module declares that it supports this. We store
///   plain keys only, and before a write outside of a command we ask which node owns the slot.
pub(crate) fn set_options(ctx: Ctx<'_>) {
    let mut options = raw::REDISMODULE_OPTION_NO_IMPLICIT_SIGNAL_MODIFIED.cast_signed();
    if is_valkey() && at_least(0, 0x0009_0000) {
        options |= VALKEYMODULE_OPTIONS_HANDLE_ATOMIC_SLOT_MIGRATION;
    }
    server!(RedisModule_SetModuleOptions(ctx.raw, options));
}

/// Sets the options that were declared, to their defaults or as the configuration says. Without
/// this the server unloads a module that has options, and so it does if a value is refused.
pub(crate) fn load_options(ctx: Ctx<'_>) {
    server!(RedisModule_LoadConfigs(ctx.raw));
}

/// Not in the crate, which knows only Redis. In Redis the bit does not have this meaning.
const VALKEYMODULE_OPTIONS_HANDLE_ATOMIC_SLOT_MIGRATION: c_int = 1 << 5;

/// Whether a replica is connected, online or still in its first sync.
pub(crate) fn has_replicas() -> bool {
    let replication = Section::of(c"replication");
    replication.get(c"connected_slaves") != Some(b"0")
}

/// The server's run id, which is another one after each start.
pub(crate) fn run_id() -> String {
    let server = Section::of(c"server");
    let run_id = server.get(c"run_id").unwrap_or_default();
    String::from_utf8_lossy(run_id).into_owned()
}

/// A section of INFO. Reading it counts as no command.
struct Section(*mut raw::RedisModuleServerInfoData);

impl Section {
    fn of(name: &CStr) -> Self {
        // Without a context: the section is freed by its drop, not with the call.
        Self(server!(RedisModule_GetServerInfo(
            ptr::null_mut(),
            name.as_ptr()
        )))
    }

    /// The value of a field; none if the section does not have it.
    fn get(&self, field: &CStr) -> Option<&[u8]> {
        let value: *const c_char = server!(RedisModule_ServerInfoGetFieldC(self.0, field.as_ptr()));
        // SAFETY: the value is a C string that lives as long as the section.
        (!value.is_null()).then(|| unsafe { CStr::from_ptr(value) }.to_bytes())
    }
}

impl Drop for Section {
    fn drop(&mut self) {
        server!(RedisModule_FreeServerInfo(ptr::null_mut(), self.0));
    }
}
