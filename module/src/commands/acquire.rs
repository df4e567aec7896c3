//! `RLOCK.ACQUIRE key owner lease-ms [READ | WRITE | PERMITS n [OF limit]]
//! [BLOCK wait-ms | QUEUE wait-ms] [SESSION session] [WANTED] [ONCE]`: take the lock, or wait for
//! it.
//!
//! Replies `[count, token]` when held, `[0, ttl-ms]` when not, `[-1, position, seq, life]` when
//! queued. A free lock is taken with count 1 and a new token. If the owner holds it already, the
//! owner re-enters, and its lease starts anew. `BLOCK` waits in the queue, first come first served;
//! where the server cannot block the client, the reply is the same as without it. `QUEUE` waits in
//! the same queue for a session, which gets the result from RLOCK.EVENTS. With `SESSION` the hold
//! ends with the session. With `WANTED` the session is told once that the hold keeps another owner
//! out. `ONCE` makes ACQUIRE idempotent: a hold is not counted again, and a waiter keeps its place
//! in the queue. A wait that could never end is refused.
//!
//! `READ` and `WRITE` make it a read-write lock: any number of readers, or one writer, which may
//! also read. Readers that come after a waiting writer queue behind it.
//!
//! `PERMITS` makes it a counting semaphore: owners are granted permits as long as the sum of all
//! granted permits is within the limit. The reply is `[permits, token]`, and an owner has one hold.
//!
//! A new lock is replicated as `RESTORE`, other holds as `HSET` and `PEXPIREAT` with final values,
//! a reader's timeout key as `SET`.
//! A refused ACQUIRE is not replicated.

use super::wait::{acquire, confirm, wait_if_allowed};
use super::{
    END, KEY, LEASE_MS, ONCE, OWNER, PERMITS_N, READ, SESSION, WAIT, WANTED, WRITE,
    check_limit_slot, check_slot, name_user, user_naming,
};
use crate::driving::turn::Named;
use crate::ffi::{Args, Argument, Command, Ctx, Keys, Spec};
use rlock_core::{CommandError, request};

pub(super) struct Acquire;

impl Command for Acquire {
    const SPEC: Spec = Spec {
        name: c"rlock.acquire",
        summary: c"Takes a lock or enters it once more, and waits in its queue if asked to.",
        complexity: c"O(1), for permits O(N) with N holders; a wait O(N) with N owners that wait \
            for each other in turn, and a writer's with N readers",
        arity: -4,
        flags: c"write deny-oom fast",
        categories: c"write fast lock",
        keys: Keys::First,
        arguments: &[
            KEY,
            OWNER,
            LEASE_MS,
            Argument::one_of(&[
                READ,
                WRITE,
                Argument::block(
                    c"permits",
                    &[
                        PERMITS_N,
                        Argument::integer(c"limit").after(c"OF").optional(),
                        END,
                    ],
                ),
                END,
            ])
            .optional(),
            WAIT,
            SESSION,
            WANTED,
            ONCE,
            END,
        ],
    };

    fn run(ctx: Ctx<'_>, args: Args<'_>) -> Result<(), CommandError> {
        let mut request = request::Acquire::parse(args.bytes())?;
        let user = user_naming(ctx, request.session);
        name_user(&mut request.session, user.as_ref());
        wait_if_allowed(ctx, &mut request.wait_mode);
        match request.asked {
            Some(asked) => check_limit_slot(ctx, request.key, asked.limit.is_some())?,
            None => check_slot(ctx, request.key, request.mode)?,
        }
        let given = Named::One(args.at(1)?, args.at(2)?);
        let command = rlock_core::Command::Acquire(&request);
        let is_held = acquire(ctx, command, request.wait_mode, given)?;
        if is_held && request.once {
            confirm(ctx, [request.key], request.owner, request.mode, true);
        }
        Ok(())
    }
}
