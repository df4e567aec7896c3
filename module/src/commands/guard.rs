//! `RLOCK.GUARD key owner [READ | WRITE | PERMITS] [TOKEN token] CALL command [arg ...]`: run a
//! command of the server if the owner holds the lock.
//!
//! Replies with the command's reply. `NOTHELD` if the owner does not hold the lock, or holds it
//! with another token; then the command was not run.
//!
//! Replicated as the command itself.

use super::{END, KEY, MODE, OWNER, TOKEN, check_slot};
use crate::commands::guarded::GuardedCommand;
use crate::driving::pump;
use crate::driving::turn::Named;
use crate::ffi::{Args, Argument, Command, Ctx, Keys, Spec};
use rlock_core::{CommandError, Outcome, request};

pub(super) struct Guard;

const COMMAND: Argument = Argument::text(c"command");
const ARGS: Argument = Argument::text(c"arg").many().optional();

impl Command for Guard {
    const SPEC: Spec = Spec {
        name: c"rlock.guard",
        summary: c"Runs a command if the owner holds the lock.",
        complexity: c"That of the command, and O(1) for the lock",
        arity: -5,
        flags: c"write getkeys-api",
        categories: c"write lock",
        keys: Keys::FirstAndGuarded,
        arguments: &[
            KEY,
            OWNER,
            MODE,
            TOKEN,
            Argument::block(c"call", &[COMMAND, ARGS, END]).after(c"CALL"),
            END,
        ],
    };

    fn run(ctx: Ctx<'_>, args: Args<'_>) -> Result<(), CommandError> {
        let request = request::Guard::parse(args.bytes())?;
        let command = GuardedCommand::check(ctx, args.from(request.place))?;
        check_slot(ctx, request.key, request.mode)?;
        let given = Named::One(args.at(1)?, args.at(2)?);
        let asked = rlock_core::Command::Guard(&request);
        let mut turn = pump::begin(ctx, asked);
        // The command runs before the rest of the turn, which could end the hold.
        pump::run_command(ctx, &mut turn, given, |outcome| {
            if let Ok(Outcome::Guards) = outcome {
                command.run(ctx);
            }
        });
        turn.outcome().map(drop)
    }
}
