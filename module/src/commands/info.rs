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
use crate::reading::open_lock::{Access, OpenLock};
use crate::reading::read_write::{ReadWriteHash, ReadWriteHold, begin_looks};
use crate::writing::reply::{self, HolderReport, LockReport};
use rlock_core::{
    CommandError, Count, LockRef, Mode, NEVER, Now, Permits, PermitsHold, Stored, request,
};

pub(super) struct Info;

impl Command for Info {
    const SPEC: Spec = Spec {
        name: c"rlock.info",
        summary: c"Tells who holds a lock and who waits for it.",
        complexity: c"O(N) with N waiters and holders of this lock",
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
        let lock = OpenLock::open(ctx, name, Access::Read);
        let (db, name) = (ctx.db(), name.bytes());
        let at = LockRef { db, name };
        let queue = state::with(|state| state.locks.queue(at, now));
        begin_looks();
        let mut report = if lock.is_of_permits() || is_wanted_as_permits(&lock, at) {
            permits(&lock, now)
        } else {
            held(&lock, now)?
        };
        for holder in std::iter::once(&mut report.lock).chain(&mut report.holders) {
            let (mode, token) = (holder.mode, holder.token);
            let view = |owner: &[u8]| {
                state::with(|state| state.locks.hold_view(at, owner, mode, token, now))
            };
            holder.hold = holder.owner.as_deref().map(view);
        }
        report.queue = queue;
        reply::lock_report(ctx, &report);
        Ok(())
    }
}

/// Whether the key is missing, and the name has waiters for permits or a limit.
fn is_wanted_as_permits(lock: &OpenLock<'_>, at: LockRef<'_>) -> bool {
    let is_free = lock.key.key_type() == KeyType::Missing;
    is_free && (state::with(|state| state.locks.queue_is_for_permits(at)) || lock.limit().is_some())
}

/// The report about a lock without permits.
fn held(lock: &OpenLock<'_>, now: Now) -> Result<LockReport, CommandError> {
    let (stored, owner) = lock.read(|lock| lock.load_for_holder(now));
    let (report, holders) = match stored {
        Stored::OtherType | Stored::Data => return Err(CommandError::WrongType),
        Stored::ReadWrite(_) => {
            let holders = readers_and_writer(lock, now);
            // The owner of a read-write lock is the writer. A writer that also reads is in the list
            // twice.
            let writer = holders.iter().find(|holder| holder.mode == Mode::Write);
            let none = || HolderReport::nobody(Mode::Read);
            (writer.cloned().unwrap_or_else(none), holders)
        }
        Stored::Plain(hash) => {
            let (count, token) = (hash.own.and_then(valid), hash.token());
            let plain = HolderReport {
                owner,
                count,
                token,
                ..HolderReport::nobody(Mode::Plain)
            };
            (plain, Vec::new())
        }
        Stored::Free | Stored::NoHolder | Stored::Permits(_) => {
            (HolderReport::nobody(Mode::Plain), Vec::new())
        }
    };
    let lock = HolderReport {
        ttl_ms: Some(stored.ttl_ms(now)),
        ..report
    };
    Ok(LockReport {
        limit: None,
        permits: 0,
        lock,
        holders,
        queue: Vec::new(),
    })
}

fn valid(count: Count) -> Option<i64> {
    match count {
        Count::Valid(count) => Some(count),
        Count::Malformed => None,
    }
}

fn readers_and_writer(lock: &OpenLock<'_>, now: Now) -> Vec<HolderReport> {
    let holds = lock.read(|lock| {
        let hash = lock.mode().map(|mode| ReadWriteHash::new(lock, &mode));
        hash.map_or_else(Vec::new, |hash| hash.holds(true))
    });
    let report = |ReadWriteHold { held_by, count }| HolderReport {
        owner: Some(held_by.owner),
        mode: held_by.mode,
        count: valid(count),
        token: held_by.token,
        ttl_ms: Some(ttl_ms(held_by.ends_at, now)),
        hold: None,
    };
    holds.into_iter().map(report).collect()
}

/// The report about permits, which have no single owner.
fn permits(lock: &OpenLock<'_>, now: Now) -> LockReport {
    let (limit, key_end, fields) = lock.read(|lock| {
        let limit = lock.limit();
        (limit, lock.key.expires_at(), lock.permits_fields(now))
    });
    let report = |(owner, hold): (_, Option<PermitsHold>)| HolderReport {
        owner: Some(owner),
        mode: Mode::Permits,
        count: hold.map(|hold| hold.permits.get()),
        token: hold.map(|hold| hold.token),
        ttl_ms: hold.map(|hold| ttl_ms(hold.ends_at, now)),
        hold: None,
    };
    let holders: Vec<_> = fields.into_iter().map(report).collect();
    let counts = holders.iter().filter_map(|holder| holder.count);
    let permits = counts.fold(0, i64::saturating_add);
    let mut lock = HolderReport::nobody(Mode::Permits);
    if permits != 0 {
        // The key expires with the last lease.
        lock.ttl_ms = Some(ttl_ms(key_end.unwrap_or(NEVER), now));
    }
    let limit = limit.map(Permits::get);
    LockReport {
        limit,
        permits,
        lock,
        holders,
        queue: Vec::new(),
    }
}

fn ttl_ms(ends_at: i64, now: Now) -> i64 {
    if ends_at == NEVER {
        return -1;
    }
    ends_at.saturating_sub(now.wall_ms()).max(0)
}
