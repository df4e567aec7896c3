//! Declares commands to the server, and receives its calls of them.

use super::{Args, Ctx, ERR, OK, guarded, server};
use redis_module::commands::{BeginSearch, FindKeys, KeySpec, KeySpecFlags};
use redis_module::raw;
use rlock_core::guarded::is_own;
use rlock_core::{CommandError, request};
use std::cell::Cell;
use std::ffi::{CStr, CString, c_int};
use std::ptr;

/// A command: its declaration, and its run.
pub(crate) trait Command {
    const SPEC: Spec;

    /// Carries the command out and replies, or returns the reason why not.
    fn run(ctx: Ctx<'_>, args: Args<'_>) -> Result<(), CommandError>;
}

/// The declaration of a command. `COMMAND INFO`, `COMMAND DOCS`, `COMMAND GETKEYS` and the ACL use
/// it.
pub(crate) struct Spec {
    pub(crate) name: &'static CStr,
    pub(crate) summary: &'static CStr,
    pub(crate) complexity: &'static CStr,
    /// The number of words, including the name; a negative number is the least.
    pub(crate) arity: c_int,
    pub(crate) flags: &'static CStr,
    /// The ACL categories, on servers where modules have them.
    pub(crate) categories: &'static CStr,
    pub(crate) keys: Keys,
    pub(crate) arguments: &'static [Argument],
}

/// The version that has all commands: no earlier one was published.
const SINCE: &CStr = c"0.3.0";

/// Which words of a command are keys. A command reads and updates them, unless it says otherwise.
#[derive(Clone, Copy)]
pub(crate) enum Keys {
    None,
    /// The first argument.
    First,
    /// The first argument, and it is only read.
    FirstToRead,
    /// The keys after the argument at this place, which is their number; the command's name has
    /// place 0. Needs the flag `getkeys-api`.
    CountedAt(c_int),
    /// The first argument, and the keys of the command that RLOCK.GUARD runs. Needs the flag
    /// `getkeys-api`.
    FirstAndGuarded,
}

/// How commands use their keys.
const READ: KeySpecFlags = KeySpecFlags::READ_ONLY.union(KeySpecFlags::ACCESS);
const UPDATE: KeySpecFlags =
    (KeySpecFlags::READ_WRITE.union(KeySpecFlags::ACCESS)).union(KeySpecFlags::UPDATE);

/// An argument, as documented. Each list of arguments ends with [`Argument::END`].
#[derive(Clone, Copy)]
#[repr(transparent)]
pub(crate) struct Argument(raw::RedisModuleCommandArg);

impl Argument {
    pub(crate) const END: Self = Self::new(None, 0);

    const fn new(name: Option<&'static CStr>, kind: raw::RedisModuleCommandArgType) -> Self {
        // SAFETY: plain C data, for which all zeros is a value.
        let mut arg: raw::RedisModuleCommandArg = unsafe { std::mem::zeroed() };
        if let Some(name) = name {
            arg.name = name.as_ptr();
        }
        (arg.type_, arg.key_spec_index) = (kind, -1);
        Self(arg)
    }

    pub(crate) const fn key(name: &'static CStr) -> Self {
        let mut key = Self::new(
            Some(name),
            raw::RedisModuleCommandArgType_REDISMODULE_ARG_TYPE_KEY,
        );
        key.0.key_spec_index = 0;
        key
    }

    pub(crate) const fn text(name: &'static CStr) -> Self {
        Self::new(
            Some(name),
            raw::RedisModuleCommandArgType_REDISMODULE_ARG_TYPE_STRING,
        )
    }

    pub(crate) const fn integer(name: &'static CStr) -> Self {
        Self::new(
            Some(name),
            raw::RedisModuleCommandArgType_REDISMODULE_ARG_TYPE_INTEGER,
        )
    }

    pub(crate) const fn pattern(name: &'static CStr) -> Self {
        Self::new(
            Some(name),
            raw::RedisModuleCommandArgType_REDISMODULE_ARG_TYPE_PATTERN,
        )
    }

    /// Only the option's word.
    pub(crate) const fn word(token: &'static CStr, name: &'static CStr) -> Self {
        let kind = raw::RedisModuleCommandArgType_REDISMODULE_ARG_TYPE_PURE_TOKEN;
        Self::new(Some(name), kind).after(token)
    }

    /// One of these.
    pub(crate) const fn one_of(these: &'static [Self]) -> Self {
        let kind = raw::RedisModuleCommandArgType_REDISMODULE_ARG_TYPE_ONEOF;
        Self::new(Some(c"one-of"), kind).with(these)
    }

    /// All of these, one after the other.
    pub(crate) const fn block(name: &'static CStr, these: &'static [Self]) -> Self {
        let kind = raw::RedisModuleCommandArgType_REDISMODULE_ARG_TYPE_BLOCK;
        Self::new(Some(name), kind).with(these)
    }

    const fn with(mut self, these: &'static [Self]) -> Self {
        self.0.subargs = Self::list(these);
        self
    }

    /// The list as the server takes it. Without its end the build fails.
    const fn list(these: &'static [Self]) -> *mut raw::RedisModuleCommandArg {
        assert!(matches!(these, [.., end] if end.0.name.is_null()), "no end");
        these.as_ptr().cast_mut().cast()
    }

    /// The same after a word.
    pub(crate) const fn after(mut self, token: &'static CStr) -> Self {
        self.0.token = token.as_ptr();
        self
    }

    pub(crate) const fn optional(mut self) -> Self {
        self.0.flags |= raw::REDISMODULE_CMD_ARG_OPTIONAL.cast_signed();
        self
    }

    /// One value or more.
    pub(crate) const fn many(mut self) -> Self {
        self.0.flags |= raw::REDISMODULE_CMD_ARG_MULTIPLE.cast_signed();
        self
    }
}

/// Registers the command with the server. Only allowed while the module is loaded.
pub(crate) fn register<C: Command>(ctx: Ctx<'_>) -> Result<(), &'static CStr> {
    let spec = &C::SPEC;
    let name = spec.name.as_ptr();
    let flags = spec.flags.as_ptr();
    // The place of the first key, that of the last one, and the step: all 1, or all 0 for no keys.
    let key = c_int::from(matches!(spec.keys, Keys::First | Keys::FirstToRead));
    let run: raw::RedisModuleCmdFunc = Some(on_command::<C>);
    if server!(RedisModule_CreateCommand(
        ctx.raw, name, run, flags, key, key, key
    )) != OK
    {
        return Err(spec.name);
    }
    let command = server!(RedisModule_GetCommand(ctx.raw, name));
    if command.is_null() || set_info::<C>(command) != OK {
        return Err(spec.name);
    }
    // SAFETY: read as in `check_api`.
    if let Some(set_categories) = unsafe { raw::RedisModule_SetCommandACLCategories } {
        // A server without the category `lock` refuses the whole list: then the command gets the
        // others only.
        // SAFETY: the command is the one just made, and this is still the load.
        let set = |categories: &CStr| unsafe { set_categories(command, categories.as_ptr()) };
        if !has_own_category() || set(spec.categories) != OK {
            let standard = spec.categories.to_bytes().strip_suffix(b" lock");
            set(&CString::new(standard.unwrap_or_default()).unwrap_or_default());
        }
    }
    Ok(())
}

/// Adds the ACL category `lock`, where the server lets modules have their own.
pub(crate) fn add_category(ctx: Ctx<'_>) {
    // SAFETY: read as in `check_api`.
    if let Some(add) = unsafe { raw::RedisModule_AddACLCategory } {
        // It fails if another module has added this name before: then it exists, which is all we
        // need. SAFETY: this is the load, the only time at which categories may be added.
        unsafe { add(ctx.raw, c"lock".as_ptr()) };
    }
}

fn has_own_category() -> bool {
    // SAFETY: read as in `check_api`.
    unsafe { raw::RedisModule_AddACLCategory }.is_some()
}

extern "C" fn on_command<C: Command>(
    ctx: *mut raw::RedisModuleCtx,
    args: *mut *mut raw::RedisModuleString,
    count: c_int,
) -> c_int {
    let (ctx, args) = (Ctx::new(ctx), Args::new(args, count));
    // These are the commands with the flag `getkeys-api`.
    let has_far_keys = matches!(C::SPEC.keys, Keys::CountedAt(_) | Keys::FirstAndGuarded);
    if has_far_keys && server!(RedisModule_IsKeysPositionRequest(ctx.raw)) != 0 {
        guarded((), || match C::SPEC.keys {
            Keys::CountedAt(place) => tell_keys(ctx, args, place),
            _ => tell_guarded_keys(ctx, args),
        });
        return OK;
    }
    match guarded(None, || Some(C::run(ctx, args))) {
        Some(Ok(())) => {}
        Some(Err(CommandError::WrongArity)) => ctx.reply_wrong_arity(),
        Some(Err(refusal)) => ctx.reply_error(&refusal.to_string()),
        None => {
            ctx.reply_error("ERR internal error of rlock, see the server's log");
            return ERR;
        }
    }
    OK
}

/// Answers which words are keys: not every server that routes a command in a cluster uses the
/// specification of its keys. If their number is wrong the answer names no key; the command is
/// refused when it is run.
fn tell_keys(ctx: Ctx<'_>, args: Args<'_>, place: c_int) {
    let keys = usize::try_from(place)
        .ok()
        .and_then(|place| request::key_places(args.bytes(), place));
    for key in keys.into_iter().flatten() {
        tell_key(ctx, key, UPDATE.bits().cast_signed());
    }
}

fn tell_key(ctx: Ctx<'_>, place: usize, flags: c_int) {
    let place = c_int::try_from(place).unwrap_or(c_int::MAX);
    server!(RedisModule_KeyAtPosWithFlags(ctx.raw, place, flags));
}

/// Answers which words of RLOCK.GUARD are keys: the lock, and the keys that the server finds in the
/// command to run. If that command will be refused, the lock only.
///
/// The server says only for a few commands how they use their keys. For the others it gives no
/// flags, and any right to the key satisfies the check here. The call itself is checked in full.
///
/// Our own commands are refused, so the server is not asked about them: it would ask us, and a
/// command within a command within a command … would overflow the stack, and crash the server.
fn tell_guarded_keys(ctx: Ctx<'_>, args: Args<'_>) {
    tell_key(ctx, 1, UPDATE.bits().cast_signed());
    let Ok(request) = request::Guard::parse(args.bytes()) else {
        return;
    };
    if is_own(request.command) || ASKS_FOR_KEYS.replace(true) {
        return;
    }
    let (mut count, mut flags) = (0, ptr::null_mut::<c_int>());
    let (words, len) = args.from(request.place).as_list();
    let len = c_int::try_from(len).unwrap_or(0);
    let places = server!(RedisModule_GetCommandKeysWithFlags(
        ctx.raw,
        words,
        len,
        &raw mut count,
        &raw mut flags
    ));
    ASKS_FOR_KEYS.set(false);
    let count = usize::try_from(count).unwrap_or(0);
    if !places.is_null() && !flags.is_null() {
        // SAFETY: the server has made two lists of this length, which are ours.
        let places = unsafe { std::slice::from_raw_parts(places, count) };
        // SAFETY: the same.
        let flags = unsafe { std::slice::from_raw_parts(flags, count) };
        for (place, flags) in places.iter().zip(flags) {
            let place = usize::try_from(*place).unwrap_or(0);
            tell_key(ctx, request.place.saturating_add(place), *flags);
        }
    }
    server!(RedisModule_Free(places.cast()));
    server!(RedisModule_Free(flags.cast()));
}

thread_local! {
    /// Whether the server is being asked for the keys of a command within a command: a command of
    /// another module may take a command as well, and the server would ask us again.
    ///
    /// Each thread has its own: Valkey with `io-threads` asks for keys on these threads too, beside
    /// the main one. With one flag for all a command would now and then be told without its keys.
    static ASKS_FOR_KEYS: Cell<bool> = const { Cell::new(false) };
}

fn set_info<C: Command>(command: *mut raw::RedisModuleCommand) -> c_int {
    let spec = &C::SPEC;
    let version = raw::RedisModuleCommandInfoVersion {
        version: 1,
        sizeof_historyentry: size_of::<raw::RedisModuleCommandHistoryEntry>(),
        sizeof_keyspec: size_of::<raw::RedisModuleCommandKeySpec>(),
        sizeof_arg: size_of::<raw::RedisModuleCommandArg>(),
    };
    let keys = key_spec(spec.keys);
    // SAFETY: plain C data, for which all zeros is a value.
    let end: raw::RedisModuleCommandKeySpec = unsafe { std::mem::zeroed() };
    let mut list = [keys.as_ref().map_or(end, Into::into), end];
    let info = raw::RedisModuleCommandInfo {
        version: &raw const version,
        summary: spec.summary.as_ptr(),
        complexity: spec.complexity.as_ptr(),
        since: SINCE.as_ptr(),
        history: ptr::null_mut(),
        tips: ptr::null(),
        arity: spec.arity,
        key_specs: keys.map_or(ptr::null_mut(), |_| list.as_mut_ptr()),
        args: const { Argument::list(C::SPEC.arguments) },
    };
    // The server copies all of it.
    server!(RedisModule_SetCommandInfo(command, &raw const info))
}

fn key_spec(keys: Keys) -> Option<KeySpec> {
    let first_alone = || FindKeys::new_range(0, 1, 0);
    let (flags, place, find) = match keys {
        Keys::None => return None,
        Keys::First => (UPDATE, 1, first_alone()),
        Keys::FirstToRead => (READ, 1, first_alone()),
        Keys::CountedAt(place) => (UPDATE, place, FindKeys::new_keys_num(0, 1, 1)),
        // The server has to ask us for the other keys.
        Keys::FirstAndGuarded => (UPDATE | KeySpecFlags::INCOMPLETE, 1, first_alone()),
    };
    Some(KeySpec::new(
        None,
        flags,
        BeginSearch::new_index(place),
        find,
    ))
}
