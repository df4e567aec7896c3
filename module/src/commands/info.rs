//! `RLOCK.INFO key`: the holder of a lock, the rest of its lease, and its waiters.
//!
//! Replies a map: `owner`, `count`, `token`, `ttl-ms`, `held-ms`, `session`, `client-id`,
//! `waiters`, and `queue`, an array of maps `owner`, `session`, `client-id`, `waited-ms`, `left-ms`
//! (-1 without limit) in order. For a free lock the owner is null and the count 0. A lock that a
//! script took has no token, and then it is null; so is everything that this server does not know
//! of a hold.
//!
//! Permits have no single owner, so the owner is null. The map also has `mode`, `limit` (as set by
//! RLOCK.LIMIT, or null), `permits` (the number that all holders have), `holders` (maps `owner`,
//! `permits`, `token`, `ttl-ms`, `held-ms`, `session`, `client-id`), and `permits` in each entry of
//! the queue.
//!
//! The owner of a read-write lock is the writer. The map also has `mode`, `holders` (maps `owner`,
//! `mode`, `count`, `token`, `ttl-ms`, `held-ms`, `session`, `client-id`), and `mode` in each entry
//! of the queue.

use super::{END, KEY};
use crate::clock;
use crate::ffi::{Args, Command, Ctx, KeyType, Keys, Spec};
use crate::memory::state;
use crate::reading::open_lock::{self, OpenLock};
use crate::reading::read_write::{ReadWriteHash, ReadWriteHold, begin_looks};
use crate::writing::reply::{self, HolderReport, LockReport, PermitsReport};
use rlock_core::{
    CommandError, Count, LockRef, Mode, NEVER, Now, Permits, Stored, Token, WaiterView, request,
};

pub(super) struct Info;

impl Command for Info {
    const SPEC: Spec = Spec {
        name: c"rlock.info",
        summary: c"Tells who holds a lock and who waits for it.",
        complexity: c"O(N) with N waiters and holders of this lock",
        since: c"0.1.0",
        arity: 2,
        flags: c"readonly",
        categories: c"read lock",
        keys: Keys::FirstToRead,
        arguments: &[KEY, END],
    };

    fn run(ctx: Ctx<'_>, args: Args<'_>) -> Result<(), CommandError> {
        request::KeyOnly::parse(args.bytes())?;
        let now = clock::now();
        let name = args.at(1)?;
        let lock = OpenLock::open(ctx, name, open_lock::Access::Read);
        let at = LockRef {
            db: ctx.db(),
            name: name.bytes(),
        };
        let queue = state::with(|state| state.locks.queue(at, now));
        begin_looks();
        if lock.is_of_permits() || is_wanted_as_permits(&lock, at) {
            permits(ctx, &lock, at, queue, now);
            return Ok(());
        }
        let (stored, owner) = lock.read(|lock| lock.load_for_holder(now));
        let report = match stored {
            Stored::OtherType | Stored::Data => return Err(CommandError::WrongType),
            Stored::ReadWrite(_) => {
                read_write(ctx, &lock, at, &stored, queue, now);
                return Ok(());
            }
            Stored::Plain(hash) => LockReport {
                hold: owner.as_deref().map(|owner| {
                    let (mode, token) = (Mode::Plain, hash.token());
                    state::with(|state| state.locks.hold_view(at, owner, mode, token, now))
                }),
                owner,
                count: hash.own.and_then(valid),
                token: hash.token().map(Token::get),
                ttl_ms: stored.ttl_ms(now),
                queue,
            },
            Stored::Free | Stored::NoHolder | Stored::Permits(_) => LockReport {
                owner: None,
                count: Some(0),
                token: None,
                ttl_ms: 0,
                hold: None,
                queue,
            },
        };
        reply::lock_report(ctx, &report);
        Ok(())
    }
}

fn valid(count: Count) -> Option<i64> {
    match count {
        Count::Valid(count) => Some(count),
        Count::Malformed => None,
    }
}

/// Whether the key is missing, and the name has waiters for permits or a limit.
fn is_wanted_as_permits(lock: &OpenLock<'_>, at: LockRef<'_>) -> bool {
    let is_free = lock.key.key_type() == KeyType::Missing;
    is_free && (state::with(|state| state.locks.queue_is_for_permits(at)) || lock.limit().is_some())
}

/// Replies for permits, which have no single owner.
fn permits(ctx: Ctx<'_>, lock: &OpenLock<'_>, at: LockRef<'_>, queue: Vec<WaiterView>, now: Now) {
    let (limit, key_end, fields) = lock.read(|lock| {
        let limit = lock.limit();
        (limit, lock.key.expires_at(), lock.permits_fields(now))
    });
    let mut out: i64 = 0;
    let holders: Vec<PermitsReport> = fields
        .into_iter()
        .map(|(owner, hold)| {
            let permits = hold.map(|hold| hold.permits.get());
            out = out.saturating_add(permits.unwrap_or(0));
            let token = hold.map(|hold| hold.token);
            let view = state::with(|state| {
                let locks = &state.locks;
                locks.hold_view(at, &owner, Mode::Permits, token, now)
            });
            PermitsReport {
                owner,
                permits,
                token: token.map(Token::get),
                ttl_ms: hold.map(|hold| ttl_ms(hold.ends_at, now)),
                hold: view,
            }
        })
        .collect();
    let report = LockReport {
        owner: None,
        count: Some(0),
        token: None,
        // The key expires with the last lease.
        ttl_ms: match (out, key_end) {
            (0, _) => 0,
            (_, None) => -1,
            (_, Some(end)) => ttl_ms(end, now),
        },
        hold: None,
        queue,
    };
    reply::permits_report(ctx, &report, limit.map(Permits::get), out, &holders);
}

/// Replies for a read-write lock. Its owner is the writer.
fn read_write(
    ctx: Ctx<'_>,
    lock: &OpenLock<'_>,
    at: LockRef<'_>,
    stored: &Stored,
    queue: Vec<WaiterView>,
    now: Now,
) {
    let holds = lock.read(|lock| {
        let hash = lock.mode().map(|mode| ReadWriteHash::new(lock, &mode));
        hash.map_or_else(Vec::new, |hash| hash.holds(true))
    });
    let holders: Vec<HolderReport> = holds
        .into_iter()
        .map(|ReadWriteHold { held_by, count }| HolderReport {
            mode: held_by.mode,
            count: valid(count),
            token: held_by.token.map(Token::get),
            ttl_ms: ttl_ms(held_by.ends_at, now),
            hold: state::with(|state| {
                let (owner, mode) = (&held_by.owner, held_by.mode);
                state.locks.hold_view(at, owner, mode, held_by.token, now)
            }),
            owner: held_by.owner,
        })
        .collect();
    let writer = holders.iter().find(|holder| holder.mode == Mode::Write);
    let report = LockReport {
        owner: writer.map(|writer| writer.owner.clone()),
        count: writer.map_or(Some(0), |writer| writer.count),
        token: writer.and_then(|writer| writer.token),
        ttl_ms: stored.ttl_ms(now),
        hold: writer.map(|writer| writer.hold.clone()),
        queue,
    };
    // If there is a writer, its mode is the lock's. A writer that also reads is in the list twice.
    let mode = writer.map_or(Mode::Read, |writer| writer.mode);
    reply::read_write_report(ctx, &report, mode, &holders);
}

fn ttl_ms(ends_at: i64, now: Now) -> i64 {
    if ends_at == NEVER {
        return -1;
    }
    ends_at.saturating_sub(now.wall_ms()).max(0)
}
