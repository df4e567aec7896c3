//! Replies in the server's protocol. Maps are maps in RESP3 and flat arrays in RESP2: the server
//! converts them.

use crate::ffi::Ctx;
use rlock_core::{
    CommandError, Event, EventKind, HoldView, Joined, LogView, LostReason, Mode, QueueView,
    SessionView, Token, Told, WaitOutcome, WaiterView,
};

/// `[count, token]`: held.
pub(crate) fn acquired(ctx: Ctx<'_>, count: i64, token: Token) {
    pair(ctx, count, token.get());
}

/// `[0, ttl-ms]`: not held.
pub(crate) fn not_acquired(ctx: Ctx<'_>, ttl_ms: i64) {
    pair(ctx, 0, ttl_ms);
}

/// `[-1, position, seq, life]`: in the queue for the session.
pub(crate) fn queued(ctx: Ctx<'_>, joined: &Joined) {
    let (seq, life) = joined
        .moment
        .map_or((0, 0), |moment| (moment.seq, moment.life));
    ctx.reply_array(4);
    ctx.reply_integer(-1);
    ctx.reply_integer(joined.position);
    ctx.reply_integer(number(seq));
    ctx.reply_integer(life);
}

/// `[life, server]`: the connection is bound to the session.
pub(crate) fn bound(ctx: Ctx<'_>, life: i64, server: &str) {
    ctx.reply_array(2);
    ctx.reply_integer(life);
    ctx.reply_bytes(server.as_bytes());
}

/// The reply of RLOCK.EVENTS: the life, and `[seq, kind, key, owner, value, token, mode, db]` of
/// each event.
pub(crate) fn events(ctx: Ctx<'_>, told: &Told) {
    ctx.reply_array(2);
    ctx.reply_integer(told.after.life);
    ctx.reply_array(told.events.len());
    for (seq, event) in (told.after.seq.saturating_add(1)..).zip(&told.events) {
        ctx.reply_array(8);
        ctx.reply_integer(number(seq));
        event_kind_of(ctx, event);
        ctx.reply_integer(token_of(event));
        ctx.reply_bytes(name_of(event.mode));
        ctx.reply_integer(event.lock.db.into());
    }
}

/// The kind, the key, the owner and the value of an event.
fn event_kind_of(ctx: Ctx<'_>, event: &Event) {
    let kind: &[u8] = match event.kind {
        EventKind::Granted => b"granted",
        EventKind::Timeout { .. } => b"timeout",
        EventKind::Left => b"left",
        EventKind::Lost(_) => b"lost",
        EventKind::Error(_) => b"error",
        EventKind::Wanted { .. } => b"wanted",
    };
    ctx.reply_bytes(kind);
    ctx.reply_bytes(&event.lock.name);
    ctx.reply_bytes(&event.owner);
    match &event.kind {
        EventKind::Granted => ctx.reply_integer(token_of(event)),
        EventKind::Timeout { ttl_ms } => ctx.reply_integer(*ttl_ms),
        EventKind::Left => ctx.reply_integer(0),
        EventKind::Lost(LostReason::Expired) => ctx.reply_bytes(b"expired"),
        EventKind::Lost(LostReason::Broken) => ctx.reply_bytes(b"broken"),
        EventKind::Lost(LostReason::Deleted) => ctx.reply_bytes(b"deleted"),
        EventKind::Lost(LostReason::Released) => ctx.reply_bytes(b"released"),
        EventKind::Lost(LostReason::Taken) => ctx.reply_bytes(b"taken"),
        EventKind::Error(refusal) => ctx.reply_bytes(text_of(ctx, refusal).as_bytes()),
        EventKind::Wanted { waiters } => ctx.reply_integer((*waiters).into()),
    }
}

/// 0 if the event is about no hold.
fn token_of(event: &Event) -> i64 {
    event.token.map_or(0, Token::get)
}

/// The reply to a waiter that does not get the lock.
pub(crate) fn left(ctx: Ctx<'_>, why: &WaitOutcome) {
    match why {
        WaitOutcome::NotAcquired { ttl_ms } => not_acquired(ctx, *ttl_ms),
        WaitOutcome::Refused(refusal) => ctx.reply_error(&text_of(ctx, refusal)),
    }
}

/// The text of an error, with the node's TLS address if the client of this call uses TLS.
fn text_of(ctx: Ctx<'_>, refusal: &CommandError) -> String {
    if ctx.is_over_tls() {
        refusal.over_tls()
    } else {
        refusal.to_string()
    }
}

fn pair(ctx: Ctx<'_>, first: i64, second: i64) {
    ctx.reply_array(2);
    ctx.reply_integer(first);
    ctx.reply_integer(second);
}

/// A number, or null.
pub(crate) fn integer_or_null(ctx: Ctx<'_>, value: Option<i64>) {
    match value {
        Some(value) => ctx.reply_integer(value),
        None => ctx.reply_null(),
    }
}

/// Bytes, or null.
fn bytes_or_null(ctx: Ctx<'_>, value: Option<&[u8]>) {
    match value {
        Some(value) => ctx.reply_bytes(value),
        None => ctx.reply_null(),
    }
}

/// A number that is never negative, as an integer of a reply.
fn number(value: impl TryInto<i64>) -> i64 {
    value.try_into().unwrap_or(i64::MAX)
}

/// The report of RLOCK.INFO about a lock.
pub(crate) struct LockReport {
    pub(crate) owner: Option<Box<[u8]>>,
    /// None if the owner's field has no valid count.
    pub(crate) count: Option<i64>,
    pub(crate) token: Option<i64>,
    pub(crate) ttl_ms: i64,
    /// The facts about the hold that are not in its key; none for a free lock.
    pub(crate) hold: Option<HoldView>,
    pub(crate) queue: Vec<WaiterView>,
}

/// A holder of a read-write lock.
pub(crate) struct HolderReport {
    pub(crate) owner: Box<[u8]>,
    pub(crate) mode: Mode,
    pub(crate) count: Option<i64>,
    pub(crate) token: Option<i64>,
    pub(crate) ttl_ms: i64,
    pub(crate) hold: HoldView,
}

/// A holder of permits, or a field that is no valid hold.
pub(crate) struct PermitsReport {
    pub(crate) owner: Box<[u8]>,
    pub(crate) permits: Option<i64>,
    pub(crate) token: Option<i64>,
    pub(crate) ttl_ms: Option<i64>,
    pub(crate) hold: HoldView,
}

/// The map of RLOCK.INFO for a plain lock.
pub(crate) fn lock_report(ctx: Ctx<'_>, report: &LockReport) {
    ctx.reply_map(9);
    held(ctx, report);
    queue(ctx, &report.queue, Queue::Plain);
}

/// The same for a read-write lock.
pub(crate) fn read_write_report(
    ctx: Ctx<'_>,
    report: &LockReport,
    mode: Mode,
    holders: &[HolderReport],
) {
    ctx.reply_map(11);
    ctx.reply_bytes(b"mode");
    ctx.reply_bytes(name_of(mode));
    held(ctx, report);
    ctx.reply_bytes(b"holders");
    ctx.reply_array(holders.len());
    for holder in holders {
        ctx.reply_map(8);
        ctx.reply_bytes(b"owner");
        ctx.reply_bytes(&holder.owner);
        ctx.reply_bytes(b"mode");
        ctx.reply_bytes(name_of(holder.mode));
        ctx.reply_bytes(b"count");
        integer_or_null(ctx, holder.count);
        ctx.reply_bytes(b"token");
        integer_or_null(ctx, holder.token);
        ctx.reply_bytes(b"ttl-ms");
        ctx.reply_integer(holder.ttl_ms);
        hold(ctx, Some(&holder.hold));
    }
    queue(ctx, &report.queue, Queue::WithMode);
}

/// The same for permits.
pub(crate) fn permits_report(
    ctx: Ctx<'_>,
    report: &LockReport,
    limit: Option<i64>,
    out: i64,
    holders: &[PermitsReport],
) {
    ctx.reply_map(13);
    ctx.reply_bytes(b"mode");
    ctx.reply_bytes(name_of(Mode::Permits));
    ctx.reply_bytes(b"limit");
    integer_or_null(ctx, limit);
    ctx.reply_bytes(b"permits");
    ctx.reply_integer(out);
    held(ctx, report);
    ctx.reply_bytes(b"holders");
    ctx.reply_array(holders.len());
    for holder in holders {
        ctx.reply_map(7);
        ctx.reply_bytes(b"owner");
        ctx.reply_bytes(&holder.owner);
        ctx.reply_bytes(b"permits");
        integer_or_null(ctx, holder.permits);
        ctx.reply_bytes(b"token");
        integer_or_null(ctx, holder.token);
        ctx.reply_bytes(b"ttl-ms");
        integer_or_null(ctx, holder.ttl_ms);
        hold(ctx, Some(&holder.hold));
    }
    queue(ctx, &report.queue, Queue::WithPermits);
}

fn held(ctx: Ctx<'_>, report: &LockReport) {
    ctx.reply_bytes(b"owner");
    bytes_or_null(ctx, report.owner.as_deref());
    ctx.reply_bytes(b"count");
    integer_or_null(ctx, report.count);
    ctx.reply_bytes(b"token");
    integer_or_null(ctx, report.token);
    ctx.reply_bytes(b"ttl-ms");
    ctx.reply_integer(report.ttl_ms);
    hold(ctx, report.hold.as_ref());
}

/// The facts about a hold that are not in its key.
fn hold(ctx: Ctx<'_>, hold: Option<&HoldView>) {
    ctx.reply_bytes(b"held-ms");
    integer_or_null(ctx, hold.and_then(|hold| hold.held_ms));
    ctx.reply_bytes(b"session");
    bytes_or_null(ctx, hold.and_then(|hold| hold.session.as_deref()));
    ctx.reply_bytes(b"client-id");
    integer_or_null(ctx, hold.and_then(|hold| hold.client_id).map(number));
}

/// Which entry the map of each waiter has in addition.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Queue {
    Plain,
    WithMode,
    WithPermits,
}

fn queue(ctx: Ctx<'_>, queue: &[WaiterView], with: Queue) {
    ctx.reply_bytes(b"waiters");
    ctx.reply_integer(queue.len().try_into().unwrap_or(i64::MAX));
    ctx.reply_bytes(b"queue");
    ctx.reply_array(queue.len());
    for waiter in queue {
        ctx.reply_map(if with == Queue::Plain { 5 } else { 6 });
        ctx.reply_bytes(b"owner");
        ctx.reply_bytes(&waiter.owner);
        match with {
            Queue::Plain => {}
            Queue::WithMode => {
                ctx.reply_bytes(b"mode");
                ctx.reply_bytes(name_of(waiter.mode));
            }
            Queue::WithPermits => {
                ctx.reply_bytes(b"permits");
                integer_or_null(ctx, waiter.permits);
            }
        }
        ctx.reply_bytes(b"session");
        bytes_or_null(ctx, waiter.session.as_deref());
        ctx.reply_bytes(b"client-id");
        ctx.reply_integer(number(waiter.client_id));
        ctx.reply_bytes(b"waited-ms");
        ctx.reply_integer(waiter.waited_ms);
        ctx.reply_bytes(b"left-ms");
        ctx.reply_integer(waiter.left_ms);
    }
}

fn name_of(mode: Mode) -> &'static [u8] {
    match mode {
        Mode::Plain => b"plain",
        Mode::Read => b"read",
        Mode::Write => b"write",
        Mode::Permits => b"permits",
    }
}

/// The array of RLOCK.LIST.
pub(crate) fn queues(ctx: Ctx<'_>, queues: &[QueueView]) {
    ctx.reply_array(queues.len());
    for queue in queues {
        ctx.reply_array(3);
        ctx.reply_bytes(&queue.name);
        ctx.reply_integer(queue.waiters.into());
        ctx.reply_integer(queue.longest_wait_ms);
    }
}

/// The array of RLOCK.SESSIONS: each session, and the address of its connection.
pub(crate) fn sessions(ctx: Ctx<'_>, sessions: &[(SessionView, Option<String>)]) {
    ctx.reply_array(sessions.len());
    for (session, address) in sessions {
        ctx.reply_map(11);
        ctx.reply_bytes(b"session");
        ctx.reply_bytes(&session.name);
        ctx.reply_bytes(b"client-id");
        integer_or_null(ctx, session.client_id.map(number));
        ctx.reply_bytes(b"address");
        bytes_or_null(ctx, address.as_deref().map(str::as_bytes));
        ctx.reply_bytes(b"holds");
        ctx.reply_integer(number(session.holds));
        ctx.reply_bytes(b"waiters");
        ctx.reply_integer(number(session.waiters));
        ctx.reply_bytes(b"grace-ms");
        ctx.reply_integer(session.grace_ms);
        ctx.reply_bytes(b"age-ms");
        ctx.reply_integer(session.age_ms);
        ctx.reply_bytes(b"listening");
        ctx.reply_integer(session.client_id.is_some().into());
        ctx.reply_bytes(b"epoch");
        integer_or_null(ctx, session.epoch.map(number));
        ctx.reply_bytes(b"bound");
        integer_or_null(ctx, session.bound.map(number));
        ctx.reply_bytes(b"unacknowledged");
        ctx.reply_integer(number(session.unacknowledged));
    }
}

/// The array of RLOCK.LOG.
pub(crate) fn log(ctx: Ctx<'_>, entries: &[LogView]) {
    ctx.reply_array(entries.len());
    for entry in entries {
        ctx.reply_map(8);
        ctx.reply_bytes(b"id");
        ctx.reply_integer(number(entry.id));
        ctx.reply_bytes(b"time-ms");
        ctx.reply_integer(entry.time_ms);
        ctx.reply_bytes(b"event");
        ctx.reply_bytes(entry.event.name().as_bytes());
        ctx.reply_bytes(b"db");
        ctx.reply_integer(entry.db.into());
        ctx.reply_bytes(b"key");
        bytes_or_null(ctx, entry.key.as_deref());
        ctx.reply_bytes(b"owner");
        bytes_or_null(ctx, entry.owner.as_deref());
        ctx.reply_bytes(b"token");
        integer_or_null(ctx, entry.token.map(Token::get));
        ctx.reply_bytes(b"text");
        ctx.reply_bytes(entry.text.as_bytes());
    }
}
