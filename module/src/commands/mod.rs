//! One file for each command: its declaration, and its run. Each parses its arguments into a
//! request, reads the stored state, lets the core decide, and replies.

mod acquire;
mod bind;
mod break_hold;
mod cancel;
mod events;
mod guard;
mod guarded;
mod info;
mod limit;
mod list;
mod log;
mod macquire;
mod mrelease;
mod mrenew;
mod release;
mod renew;
mod sessions;
mod wait;

use crate::driving::pump;
use crate::driving::turn::Named;
use crate::ffi::{Args, Argument, Ctx, OwnedStr, Str, register};
use crate::memory::state;
use crate::reading::read_write::slot_is_settled;
use rlock_core::request::NamedKey;
use rlock_core::{CommandError, Glob, Mode, Outcome, SessionRef};

/// Registers all commands with the server. The error is the name of a command that it refused.
pub(crate) fn register_all(ctx: Ctx<'_>) -> Result<(), &'static std::ffi::CStr> {
    register::<acquire::Acquire>(ctx)?;
    register::<release::Release>(ctx)?;
    register::<renew::Renew>(ctx)?;
    register::<guard::Guard>(ctx)?;
    register::<cancel::Cancel>(ctx)?;
    register::<break_hold::Break>(ctx)?;
    register::<events::Events>(ctx)?;
    register::<bind::Bind>(ctx)?;
    register::<info::Info>(ctx)?;
    register::<list::List>(ctx)?;
    register::<sessions::Sessions>(ctx)?;
    register::<log::Log>(ctx)?;
    register::<limit::Limit>(ctx)?;
    register::<macquire::Macquire>(ctx)?;
    register::<mrelease::Mrelease>(ctx)?;
    register::<mrenew::Mrenew>(ctx)
}

/// Runs the turn of a command, and returns its outcome.
fn decide(
    ctx: Ctx<'_>,
    command: rlock_core::Command<'_>,
    given: Named<'_>,
) -> Result<Outcome, CommandError> {
    let mut turn = pump::begin(ctx, command);
    pump::run_command(ctx, &mut turn, given, |_| ());
    turn.outcome()
}

/// Runs the turn of a command whose outcome is a number, and replies it.
fn reply_number(
    ctx: Ctx<'_>,
    command: rlock_core::Command<'_>,
    given: Named<'_>,
) -> Result<i64, CommandError> {
    let Outcome::Number(number) = decide(ctx, command, given)? else {
        return Err(CommandError::Unsettled);
    };
    ctx.reply_integer(number);
    Ok(number)
}

/// The client that gives a hold back, if a session needs to know: mostly none has any hold. In a
/// script this is the script's own client: the module interface does not name the one that runs it.
fn releasing_client(ctx: Ctx<'_>) -> Option<u64> {
    let matters = state::with(|state| state.locks.any_hold_of_session());
    matters.then(|| ctx.client_id())
}

/// The keys that a command names, as the server's own strings.
fn names<'a>(args: Args<'a>, keys: &[NamedKey<'_>]) -> Result<Vec<Str<'a>>, CommandError> {
    keys.iter().map(|key| args.at(key.place)).collect()
}

/// In a cluster, refuses READ and WRITE unless this node has all keys of the read-write lock.
fn check_slot(ctx: Ctx<'_>, name: &[u8], mode: Mode) -> Result<(), CommandError> {
    if !matches!(mode, Mode::Read | Mode::Write) {
        return Ok(());
    }
    let in_other_slot = (mode == Mode::Read).then_some(CommandError::TimeoutsInOtherSlot);
    check_side_keys(ctx, name, in_other_slot, CommandError::SlotOnItsWay)
}

/// In a cluster, refuses permits if the limit for all callers cannot be read. If the limit's key
/// would be in another slot, no such limit can be set, and the caller's own counts, if it has one.
fn check_limit_slot(ctx: Ctx<'_>, name: &[u8], has_own: bool) -> Result<(), CommandError> {
    let in_other_slot = (!has_own).then_some(CommandError::LimitInOtherSlot);
    check_side_keys(ctx, name, in_other_slot, CommandError::LimitOnItsWay)
}

fn check_side_keys(
    ctx: Ctx<'_>,
    name: &[u8],
    in_other_slot: Option<CommandError>,
    on_its_way: CommandError,
) -> Result<(), CommandError> {
    if !ctx.in_cluster() {
        return Ok(());
    }
    match in_other_slot {
        Some(error) if !rlock_core::names::side_keys_share_slot(name) => Err(error),
        _ if slot_is_settled(ctx, name) => Ok(()),
        _ => Err(on_its_way),
    }
}

/// Tells which names match a pattern; without one all do.
fn matching(pattern: Option<&[u8]>) -> impl Fn(&[u8]) -> bool {
    let pattern = pattern.map(Glob::new);
    move |name| pattern.as_ref().is_none_or(|pattern| pattern.matches(name))
}

/// The name of the calling user, if the command names a session. Otherwise the server is not asked.
fn user_naming(ctx: Ctx<'_>, session: Option<SessionRef<'_>>) -> Option<OwnedStr> {
    session.and_then(|_| ctx.user_name())
}

/// Adds the calling user to a session's name.
fn name_user<'a>(session: &mut Option<SessionRef<'a>>, user: Option<&'a OwnedStr>) {
    if let Some(session) = session {
        session.user = user_of(user);
    }
}

/// The name of a user. Without a user it is empty. No user has an empty name, so a caller without a
/// user has no session.
fn user_of(user: Option<&OwnedStr>) -> &[u8] {
    user.map_or(&[], |user| user.as_str().bytes())
}

const END: Argument = Argument::END;
const KEY: Argument = Argument::key(c"key");
const OWNER: Argument = Argument::text(c"owner");
const READ: Argument = Argument::word(c"READ", c"read");
const WRITE: Argument = Argument::word(c"WRITE", c"write");
const PERMITS: Argument = Argument::word(c"PERMITS", c"permits");
const MODE: Argument = Argument::one_of(&[READ, WRITE, PERMITS, END]).optional();
const LEASE_MS: Argument = Argument::integer(c"lease-ms");
const TOKEN: Argument = Argument::integer(c"token").after(c"TOKEN").optional();
const SESSION: Argument = Argument::text(c"session").after(c"SESSION").optional();
const NUMKEYS: Argument = Argument::integer(c"numkeys");
const SOME_KEYS: Argument = Argument::key(c"key").many();
const PERMITS_N: Argument = Argument::integer(c"n").after(c"PERMITS");
const WAIT_MS: Argument = Argument::integer(c"wait-ms");
const WAIT: Argument =
    Argument::one_of(&[WAIT_MS.after(c"BLOCK"), WAIT_MS.after(c"QUEUE"), END]).optional();
const EPOCH: Argument = Argument::integer(c"n").after(c"EPOCH").optional();
const WANTED: Argument = Argument::word(c"WANTED", c"wanted").optional();
const MATCH: Argument = Argument::pattern(c"pattern").after(c"MATCH").optional();
const COUNT: Argument = Argument::integer(c"n").after(c"COUNT").optional();
const ONCE: Argument = Argument::word(c"ONCE", c"once").optional();
