//! Declares commands to the server, and receives its calls of them.

use super::{Args, Ctx, ERR, OK, guarded, int, server};
use redis_module::raw;
use rlock_core::guarded::is_own;
use rlock_core::{CommandError, request};
use std::cell::Cell;
use std::ffi::{CStr, c_int};
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
    pub(crate) since: &'static CStr,
    /// The number of words, including the name; a negative number is the least.
    pub(crate) arity: c_int,
    pub(crate) flags: &'static CStr,
    /// The ACL categories, on servers where modules have them.
    pub(crate) categories: &'static CStr,
    pub(crate) keys: Keys,
    pub(crate) arguments: &'static [Argument],
}

/// Which words of a command are keys, and how it uses them.
#[derive(Clone, Copy)]
pub(crate) enum Keys {
    None,
    /// The first argument.
    First(Access),
    /// The keys after the argument at this place, which is their number; the command's name has
    /// place 0. Needs the flag `getkeys-api`.
    CountedAt(c_int, Access),
    /// The first argument, and the keys of the command that RLOCK.GUARD runs. Needs the flag
    /// `getkeys-api`.
    FirstAndGuarded(Access),
}

impl Keys {
    fn access(self) -> Option<Access> {
        match self {
            Self::None => None,
            Self::First(access) | Self::CountedAt(_, access) | Self::FirstAndGuarded(access) => {
                Some(access)
            }
        }
    }
}

/// How a command uses a key.
#[derive(Clone, Copy)]
pub(crate) enum Access {
    Read,
    Update,
}

impl Access {
    fn flags(self) -> u32 {
        match self {
            Self::Read => raw::REDISMODULE_CMD_KEY_RO | raw::REDISMODULE_CMD_KEY_ACCESS,
            Self::Update => {
                raw::REDISMODULE_CMD_KEY_RW
                    | raw::REDISMODULE_CMD_KEY_ACCESS
                    | raw::REDISMODULE_CMD_KEY_UPDATE
            }
        }
    }
}

/// An argument, as documented.
#[derive(Clone, Copy)]
pub(crate) struct Argument {
    pub(crate) name: &'static CStr,
    pub(crate) kind: ArgumentKind,
    /// The word before it, if it has such a word.
    pub(crate) token: Option<&'static CStr>,
    pub(crate) optional: bool,
    /// Whether there may be more than one.
    pub(crate) many: bool,
}

/// The type of an argument.
#[derive(Clone, Copy)]
pub(crate) enum ArgumentKind {
    Key,
    Text,
    Integer,
    Pattern,
    /// Only the option's word.
    Word,
    /// One of these.
    Either(&'static [Argument]),
    /// All of these, one after the other.
    Block(&'static [Argument]),
}

impl Argument {
    pub(crate) const fn new(name: &'static CStr, kind: ArgumentKind) -> Self {
        Self {
            name,
            kind,
            token: None,
            optional: false,
            many: false,
        }
    }

    /// One value or more.
    pub(crate) const fn many(name: &'static CStr, kind: ArgumentKind) -> Self {
        Self {
            many: true,
            ..Self::new(name, kind)
        }
    }

    /// A value after a word.
    pub(crate) const fn with_token(
        token: &'static CStr,
        name: &'static CStr,
        kind: ArgumentKind,
    ) -> Self {
        Self {
            token: Some(token),
            ..Self::new(name, kind)
        }
    }

    /// Only a word, as one of several.
    pub(crate) const fn word(token: &'static CStr, name: &'static CStr) -> Self {
        Self::with_token(token, name, ArgumentKind::Word)
    }

    /// A value after a word, or nothing.
    pub(crate) const fn option(
        token: &'static CStr,
        name: &'static CStr,
        kind: ArgumentKind,
    ) -> Self {
        Self {
            optional: true,
            ..Self::with_token(token, name, kind)
        }
    }

    /// One of several, or none.
    pub(crate) const fn either(of: &'static [Self]) -> Self {
        Self {
            optional: true,
            ..Self::one_of(of)
        }
    }

    /// One of several.
    pub(crate) const fn one_of(of: &'static [Self]) -> Self {
        Self::new(c"one-of", ArgumentKind::Either(of))
    }
}

/// Registers the command with the server. Only allowed while the module is loaded.
pub(crate) fn register<C: Command>(ctx: Ctx<'_>) -> Result<(), &'static CStr> {
    let spec = &C::SPEC;
    let name = spec.name.as_ptr();
    let flags = spec.flags.as_ptr();
    // The place of the first key, that of the last one, and the step: all 1, or all 0 for no keys.
    let key = c_int::from(matches!(spec.keys, Keys::First(_)));
    if server!(RedisModule_CreateCommand(
        ctx.raw,
        name,
        Some(on_command::<C>),
        flags,
        key,
        key,
        key
    )) != OK
    {
        return Err(spec.name);
    }
    let command = server!(RedisModule_GetCommand(ctx.raw, name));
    if command.is_null() || set_info(command, spec) != OK {
        return Err(spec.name);
    }
    // SAFETY: read as in `check_api`.
    if let Some(set_categories) = unsafe { raw::RedisModule_SetCommandACLCategories } {
        // A server without the category `lock` refuses the whole list: then the command gets the
        // others only.
        // SAFETY: the command is the one just made, and this is still the load.
        let set = |categories: &CStr| unsafe { set_categories(command, categories.as_ptr()) };
        if !has_own_category() || set(spec.categories) != OK {
            let standard = spec
                .categories
                .to_bytes()
                .strip_suffix(b" lock")
                .unwrap_or_default();
            set(&std::ffi::CString::new(standard).unwrap_or_default());
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
    let has_far_keys = matches!(C::SPEC.keys, Keys::CountedAt(..) | Keys::FirstAndGuarded(_));
    if has_far_keys && server!(RedisModule_IsKeysPositionRequest(ctx.raw)) != 0 {
        guarded((), || match C::SPEC.keys {
            Keys::CountedAt(place, access) => tell_keys(ctx, args, place, access),
            Keys::FirstAndGuarded(access) => tell_guarded_keys(ctx, args, access),
            Keys::None | Keys::First(_) => {}
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
fn tell_keys(ctx: Ctx<'_>, args: Args<'_>, place: c_int, access: Access) {
    let keys = usize::try_from(place)
        .ok()
        .and_then(|place| request::key_places(args.bytes(), place));
    for key in keys.into_iter().flatten() {
        tell_key(ctx, key, int(access.flags()));
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
fn tell_guarded_keys(ctx: Ctx<'_>, args: Args<'_>, access: Access) {
    tell_key(ctx, 1, int(access.flags()));
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
    static ASKS_FOR_KEYS: Cell<bool> = const { Cell::new(false) };
}

fn set_info(command: *mut raw::RedisModuleCommand, spec: &Spec) -> c_int {
    let version = info_version();
    // Both lists end with an element of zeros.
    let mut keys = [key_spec(spec.keys), zeroed_key_spec()];
    let mut kept = Vec::new();
    let mut arguments = argument_list(spec.arguments, &mut kept);
    let info = raw::RedisModuleCommandInfo {
        version: &raw const version,
        summary: spec.summary.as_ptr(),
        complexity: spec.complexity.as_ptr(),
        since: spec.since.as_ptr(),
        history: ptr::null_mut(),
        tips: ptr::null(),
        arity: spec.arity,
        key_specs: if spec.keys.access().is_some() {
            keys.as_mut_ptr()
        } else {
            ptr::null_mut()
        },
        args: arguments.as_mut_ptr(),
    };
    // The server copies all of it.
    server!(RedisModule_SetCommandInfo(command, &raw const info))
}

fn info_version() -> raw::RedisModuleCommandInfoVersion {
    raw::RedisModuleCommandInfoVersion {
        version: 1,
        sizeof_historyentry: size_of::<raw::RedisModuleCommandHistoryEntry>(),
        sizeof_keyspec: size_of::<raw::RedisModuleCommandKeySpec>(),
        sizeof_arg: size_of::<raw::RedisModuleCommandArg>(),
    }
}

fn key_spec(keys: Keys) -> raw::RedisModuleCommandKeySpec {
    let mut spec = zeroed_key_spec();
    let Some(access) = keys.access() else {
        return spec;
    };
    spec.flags = u64::from(access.flags());
    if let Keys::FirstAndGuarded(_) = keys {
        // The server has to ask us for the other keys.
        spec.flags |= u64::from(raw::REDISMODULE_CMD_KEY_INCOMPLETE);
    }
    spec.begin_search_type = raw::RedisModuleKeySpecBeginSearchType_REDISMODULE_KSPEC_BS_INDEX;
    spec.bs.index.pos = 1;
    if let Keys::CountedAt(place, _) = keys {
        spec.bs.index.pos = place;
        spec.find_keys_type = raw::RedisModuleKeySpecFindKeysType_REDISMODULE_KSPEC_FK_KEYNUM;
        spec.fk.keynum = raw::RedisModuleCommandKeySpec__bindgen_ty_2__bindgen_ty_2 {
            keynumidx: 0,
            firstkey: 1,
            keystep: 1,
        };
        return spec;
    }
    spec.find_keys_type = raw::RedisModuleKeySpecFindKeysType_REDISMODULE_KSPEC_FK_RANGE;
    spec.fk.range = raw::RedisModuleCommandKeySpec__bindgen_ty_2__bindgen_ty_1 {
        lastkey: 0,
        keystep: 1,
        limit: 0,
    };
    spec
}

fn zeroed_key_spec() -> raw::RedisModuleCommandKeySpec {
    // SAFETY: plain C data, for which all zeros is a value.
    unsafe { std::mem::zeroed() }
}

/// The arguments as the server takes them. `kept` gets the lists that they point to.
fn argument_list(
    arguments: &[Argument],
    kept: &mut Vec<Vec<raw::RedisModuleCommandArg>>,
) -> Vec<raw::RedisModuleCommandArg> {
    let mut list: Vec<_> = arguments.iter().map(|of| argument(of, kept)).collect();
    list.push(zeroed_argument());
    list
}

fn argument(
    argument: &Argument,
    kept: &mut Vec<Vec<raw::RedisModuleCommandArg>>,
) -> raw::RedisModuleCommandArg {
    let mut arg = zeroed_argument();
    arg.name = argument.name.as_ptr();
    arg.key_spec_index = -1;
    arg.type_ = match argument.kind {
        ArgumentKind::Key => {
            arg.key_spec_index = 0;
            raw::RedisModuleCommandArgType_REDISMODULE_ARG_TYPE_KEY
        }
        ArgumentKind::Text => raw::RedisModuleCommandArgType_REDISMODULE_ARG_TYPE_STRING,
        ArgumentKind::Integer => raw::RedisModuleCommandArgType_REDISMODULE_ARG_TYPE_INTEGER,
        ArgumentKind::Pattern => raw::RedisModuleCommandArgType_REDISMODULE_ARG_TYPE_PATTERN,
        ArgumentKind::Word => raw::RedisModuleCommandArgType_REDISMODULE_ARG_TYPE_PURE_TOKEN,
        ArgumentKind::Either(_) => raw::RedisModuleCommandArgType_REDISMODULE_ARG_TYPE_ONEOF,
        ArgumentKind::Block(_) => raw::RedisModuleCommandArgType_REDISMODULE_ARG_TYPE_BLOCK,
    };
    if let ArgumentKind::Either(of) | ArgumentKind::Block(of) = argument.kind {
        // Put into `kept` first: moving the list later would make the pointer invalid.
        let list = argument_list(of, kept);
        kept.push(list);
        arg.subargs = kept.last_mut().map_or(ptr::null_mut(), Vec::as_mut_ptr);
    }
    if let Some(token) = argument.token {
        arg.token = token.as_ptr();
    }
    if argument.optional {
        arg.flags |= int(raw::REDISMODULE_CMD_ARG_OPTIONAL);
    }
    if argument.many {
        arg.flags |= int(raw::REDISMODULE_CMD_ARG_MULTIPLE);
    }
    arg
}

fn zeroed_argument() -> raw::RedisModuleCommandArg {
    // SAFETY: plain C data, for which all zeros is a value.
    unsafe { std::mem::zeroed() }
}
