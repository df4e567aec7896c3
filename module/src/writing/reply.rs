//! Replies in the server's protocol. Maps are maps in RESP3 and flat arrays in RESP2: the server
//! converts them.

use crate::ffi::{self, Ctx};
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

/// A map that has begun. Each function adds an entry. `None` as a value becomes null.
#[derive(Clone, Copy)]
struct Map<'a>(Ctx<'a>);

impl<'a> Map<'a> {
    fn new(ctx: Ctx<'a>, len: usize) -> Self {
        ctx.reply_map(len);
        Self(ctx)
    }

    fn number(self, name: &[u8], value: impl Into<Option<i64>>) {
        self.0.reply_bytes(name);
        integer_or_null(self.0, value.into());
    }

    fn bytes<'v>(self, name: &[u8], value: impl Into<Option<&'v [u8]>>) {
        self.0.reply_bytes(name);
        match value.into() {
            Some(value) => self.0.reply_bytes(value),
            None => self.0.reply_null(),
        }
    }

    /// The elements follow.
    fn array(self, name: &[u8], len: usize) {
        self.0.reply_bytes(name);
        self.0.reply_array(len);
    }
}

/// A number that is never negative, as an integer of a reply.
fn number(value: impl TryInto<i64>) -> i64 {
    value.try_into().unwrap_or(i64::MAX)
}

/// The report of RLOCK.INFO about a holder of a lock.
#[derive(Clone)]
pub(crate) struct HolderReport {
    /// None for a lock that has no holder, or no single one.
    pub(crate) owner: Option<Box<[u8]>>,
    pub(crate) mode: Mode,
    /// The hold count, or the number of permits; none if the owner's field has no valid one.
    pub(crate) count: Option<i64>,
    pub(crate) token: Option<Token>,
    pub(crate) ttl_ms: Option<i64>,
    /// The facts about the hold that are not in its key.
    pub(crate) hold: Option<HoldView>,
}

impl HolderReport {
    /// The report of no hold.
    pub(crate) fn nobody(mode: Mode) -> Self {
        Self {
            owner: None,
            mode,
            count: Some(0),
            token: None,
            ttl_ms: Some(0),
            hold: None,
        }
    }
}

/// The report of RLOCK.INFO about a lock.
pub(crate) struct LockReport {
    /// The limit of permits, and how many all holders have.
    pub(crate) limit: Option<i64>,
    pub(crate) permits: i64,
    /// The only holder, or the writer, and the rest of the lock's lease.
    pub(crate) lock: HolderReport,
    /// The holders of a lock that may have several.
    pub(crate) holders: Vec<HolderReport>,
    pub(crate) queue: Vec<WaiterView>,
}

/// The map of RLOCK.INFO.
pub(crate) fn lock_report(ctx: Ctx<'_>, report: &LockReport) {
    let mode = report.lock.mode;
    let (len, holders_len) = match mode {
        Mode::Plain => (9, 0),
        Mode::Read | Mode::Write => (11, 8),
        Mode::Permits => (13, 7),
    };
    let map = Map::new(ctx, len);
    if mode != Mode::Plain {
        map.bytes(b"mode", name_of(mode));
    }
    if mode == Mode::Permits {
        map.number(b"limit", report.limit);
        map.number(b"permits", report.permits);
    }
    map.bytes(b"owner", report.lock.owner.as_deref());
    map.number(b"count", report.lock.count);
    hold(map, &report.lock);
    if mode != Mode::Plain {
        map.array(b"holders", report.holders.len());
    }
    for holder in &report.holders {
        let map = Map::new(ctx, holders_len);
        map.bytes(b"owner", holder.owner.as_deref());
        if mode == Mode::Permits {
            map.number(b"permits", holder.count);
        } else {
            map.bytes(b"mode", name_of(holder.mode));
            map.number(b"count", holder.count);
        }
        hold(map, holder);
    }
    queue(map, &report.queue, mode);
}

fn hold(map: Map<'_>, holder: &HolderReport) {
    let hold = holder.hold.as_ref();
    map.number(b"token", holder.token.map(Token::get));
    map.number(b"ttl-ms", holder.ttl_ms);
    map.number(b"held-ms", hold.and_then(|hold| hold.held_ms));
    map.bytes(b"session", hold.and_then(|hold| hold.session.as_deref()));
    let client_id = hold.and_then(|hold| hold.client_id);
    map.number(b"client-id", client_id.map(number));
}

fn queue(map: Map<'_>, queue: &[WaiterView], mode: Mode) {
    map.number(b"waiters", number(queue.len()));
    map.array(b"queue", queue.len());
    for waiter in queue {
        let map = Map::new(map.0, if mode == Mode::Plain { 5 } else { 6 });
        map.bytes(b"owner", &*waiter.owner);
        match mode {
            Mode::Plain => {}
            Mode::Read | Mode::Write => map.bytes(b"mode", name_of(waiter.mode)),
            Mode::Permits => map.number(b"permits", waiter.permits),
        }
        map.bytes(b"session", waiter.session.as_deref());
        map.number(b"client-id", number(waiter.client_id));
        map.number(b"waited-ms", waiter.waited_ms);
        map.number(b"left-ms", waiter.left_ms);
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

/// The array of RLOCK.SESSIONS.
pub(crate) fn sessions(ctx: Ctx<'_>, sessions: &[SessionView]) {
    ctx.reply_array(sessions.len());
    for session in sessions {
        let address = session.client_id.and_then(ffi::address_of);
        let map = Map::new(ctx, 11);
        map.bytes(b"session", &*session.name);
        map.number(b"client-id", session.client_id.map(number));
        map.bytes(b"address", address.as_deref().map(str::as_bytes));
        map.number(b"holds", number(session.holds));
        map.number(b"waiters", number(session.waiters));
        map.number(b"grace-ms", session.grace_ms);
        map.number(b"age-ms", session.age_ms);
        map.number(b"listening", i64::from(session.client_id.is_some()));
        map.number(b"epoch", session.epoch.map(number));
        map.number(b"bound", session.bound.map(number));
        map.number(b"unacknowledged", number(session.unacknowledged));
    }
}

/// The array of RLOCK.LOG.
pub(crate) fn log(ctx: Ctx<'_>, entries: &[LogView]) {
    ctx.reply_array(entries.len());
    for entry in entries {
        let map = Map::new(ctx, 8);
        map.number(b"id", number(entry.id));
        map.number(b"time-ms", entry.time_ms);
        map.bytes(b"event", entry.event.name().as_bytes());
        map.number(b"db", i64::from(entry.db));
        map.bytes(b"key", entry.key.as_deref());
        map.bytes(b"owner", entry.owner.as_deref());
        map.number(b"token", entry.token.map(Token::get));
        map.bytes(b"text", entry.text.as_bytes());
    }
}
