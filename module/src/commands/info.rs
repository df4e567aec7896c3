//! `RLOCK.INFO key`: who holds a lock, for how long yet, and who waits for it.
//!
//! Replies a map: `owner`, `count`, `token`, `ttl-ms`, `waiters`, and `queue`, an array of maps
//! `owner`, `client-id`, `waited-ms`, `left-ms` (-1 without limit) in order. Of a free lock the
//! owner is null and the count 0; a token that a script's lock does not have is null.

use super::KEY;
use crate::ffi::{Access, Args, Command, Ctx, Spec};
use crate::keys::OpenLock;
use crate::reply::{self, LockReport};
use crate::{clock, state};
use rlock_core::{Count, Hash, Kind, Refusal, Stored, Token, request};

pub(super) struct Info;

impl Command for Info {
    const SPEC: Spec = Spec {
        name: c"rlock.info",
        summary: c"Tells who holds a lock and who waits for it.",
        complexity: c"O(N) with N waiters of this lock",
        since: c"0.1.0",
        arity: 2,
        flags: c"readonly",
        categories: c"read lock",
        key: Some(Access::Read),
        arguments: &[KEY],
    };

    fn run(ctx: Ctx<'_>, args: Args<'_>) -> Result<(), Refusal> {
        request::KeyOnly::parse(args.bytes())?;
        let now = clock::now();
        let lock = OpenLock::to_read(ctx, args.at(1)?);
        let at = lock.at();
        let queue = state::with(|state| state.locks.queue(at, now));
        let (stored, owner) = lock.load_for_holder();
        let report = match stored {
            Stored::OtherType => return Err(Refusal::WrongType),
            Stored::Held(Hash {
                kind: Kind::ReadWrite,
                ..
            }) => return Err(Refusal::WrongKind),
            Stored::Held(hash) => LockReport {
                owner,
                count: hash.own.and_then(|own| match own {
                    Count::Valid(count) => Some(count),
                    Count::Malformed => None,
                }),
                token: hash.token.map(Token::get),
                ttl_ms: stored.ttl_ms(now),
                queue,
            },
            Stored::Free => LockReport {
                owner: None,
                count: Some(0),
                token: None,
                ttl_ms: 0,
                queue,
            },
        };
        reply::lock_report(ctx, &report);
        Ok(())
    }
}
