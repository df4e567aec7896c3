//! The parts that ACQUIRE and MACQUIRE share: taking locks, waiting for them, and the reply.

use crate::clock;
use crate::driving::turn::Named;
use crate::driving::{blocking, changes, pump};
use crate::ffi::Ctx;
use crate::memory::state;
use crate::writing::reply;
use rlock_core::request::WaitMode;
use rlock_core::{Command, CommandError, LockRef, Mode, Now, Outcome, Turn};

/// Ignores BLOCK where the client cannot be blocked.
pub(super) fn wait_if_allowed(ctx: Ctx<'_>, wait_mode: &mut WaitMode) {
    if matches!(wait_mode, WaitMode::Block(_)) && !ctx.flags().may_block() {
        *wait_mode = WaitMode::None;
    }
}

/// Takes the locks, or waits for them, or is refused; and replies. True if the caller holds them.
pub(super) fn acquire(
    ctx: Ctx<'_>,
    command: Command<'_>,
    wait_mode: WaitMode,
    given: Named<'_>,
) -> Result<bool, CommandError> {
    let mut turn = pump::begin(ctx, command);
    let decided_at = pump::run_command(ctx, &mut turn, given, |_| ());
    match turn
        .outcome()
        .map_err(|error| as_far_as_readable(ctx, error))?
    {
        Outcome::Held { count, token } => {
            reply::acquired(ctx, count, token);
            return Ok(true);
        }
        Outcome::MustWait { ttl_ms } => {
            changes::listen(ctx);
            // The wait counts from the decision, so the clocks need not be read again.
            let now = decided_at.unwrap_or_else(clock::now);
            if !wait(ctx, &mut turn, wait_mode, now) {
                pump::without_keys_at(ctx, now, |locks, _, effects| {
                    locks.turn_away(&mut turn, effects);
                });
                reply::not_acquired(ctx, ttl_ms);
            }
        }
        Outcome::NotHeld { ttl_ms } => reply::not_acquired(ctx, ttl_ms),
        Outcome::Left(_) | Outcome::Number(_) | Outcome::Guards => {
            return Err(CommandError::Unsettled);
        }
    }
    Ok(false)
}

/// Puts the caller in the queue. A `QUEUE` wait is told its position at once. False if it cannot
/// wait.
fn wait(ctx: Ctx<'_>, turn: &mut Turn<'_>, wait_mode: WaitMode, now: Now) -> bool {
    let mut join = |client| {
        pump::without_keys_at(ctx, now, |locks, now, effects| {
            locks.enqueue(turn, client, now, effects)
        })
    };
    if let WaitMode::Block(_) = wait_mode {
        return blocking::wait(ctx, |client| join(Some(client)));
    }
    let joined = join(None);
    if let Some(joined) = &joined {
        reply::queued(ctx, joined);
    }
    joined.is_some()
}

/// Removes the names that the caller may not read from a deadlock's circle.
fn as_far_as_readable(ctx: Ctx<'_>, mut error: CommandError) -> CommandError {
    if let CommandError::Deadlock(circle) = &mut error {
        circle.keep_readable(ctx.may_read());
    }
    error
}

/// Notes that the owner is told that it holds these locks, and with `knows_count` also how often. A
/// grant of them that is not delivered yet is then not taken back.
pub(super) fn confirm<'n>(
    ctx: Ctx<'_>,
    names: impl IntoIterator<Item = &'n [u8]>,
    owner: &[u8],
    mode: Mode,
    knows_count: bool,
) {
    let db = ctx.db();
    state::with(|state| {
        for name in names {
            state.confirm(LockRef { db, name }, owner, mode, knows_count);
        }
    });
}
