//! The unlock messages that Redisson's clients wait for.

use crate::clock;
use crate::config::{PUBLISH, PublishMode, WAKE_FAIR_QUEUE};
use crate::ffi::{self, Ctx, Key, KeyType, OwnedStr, Publish};
use crate::memory::state::{self, Message, Words};
use rlock_core::{Mode, names};
use std::rc::Rc;
use std::sync::atomic::{AtomicBool, Ordering};

/// Publishes that a lock was released, for waiters of the mode in which it was held. If it is free
/// now, this also wakes the first in the queue of Redisson's fair lock.
pub(crate) fn unlocked(ctx: Ctx<'_>, name: &[u8], held_as: Mode, is_free: bool, words: &Words) {
    let kinds = kinds(ctx);
    if kinds.is_empty() {
        return;
    }
    let name = names::tagged(name);
    let (channel, is_of_writer) = match held_as {
        Mode::Plain => (name.lock_channel(), false),
        // Of a read-write lock's waiters, `0` wakes one in each process and `1` wakes all.
        Mode::Read => (name.read_write_channel(), false),
        Mode::Write => (name.read_write_channel(), true),
        // Only our own clients use permits.
        Mode::Permits => return,
    };
    publish(ctx, kinds, OwnedStr::concat(&channel), is_of_writer, words);
    if held_as == Mode::Plain
        && is_free
        && WAKE_FAIR_QUEUE.load(Ordering::Relaxed)
        && let Some(first) = first_of_fair_queue(ctx, name)
    {
        let channel = name.fair_channel(first.as_str().bytes());
        publish(ctx, kinds, OwnedStr::new(&channel), false, words);
    }
}

/// The first waiter in the queue of Redisson's fair lock that is alive by Redisson's own rule: its
/// timeout has not passed. When it is woken, it takes the lock and leaves the queue by itself.
fn first_of_fair_queue(ctx: Ctx<'_>, name: names::Tagged<'_>) -> Option<OwnedStr> {
    let queue = OwnedStr::concat(&name.fair_queue());
    let queue = Key::open_to_peek(ctx, queue.as_str());
    if queue.key_type() != KeyType::List {
        return None;
    }
    let timeouts = OwnedStr::concat(&name.fair_timeouts());
    let timeouts = Key::open_to_peek(ctx, timeouts.as_str());
    let has_timeouts = timeouts.key_type() == KeyType::SortedSet;
    let now = clock::now().wall_ms();
    let is_over = |waiter: &OwnedStr| {
        let until = has_timeouts
            .then(|| timeouts.score(waiter.as_str()))
            .flatten();
        until.is_some_and(|until| until <= as_score(now))
    };
    (0..FAIR_QUEUE_LOOKED_AT_MAX)
        .map_while(|place| queue.list_get(place))
        .find(|waiter| !is_over(waiter))
}

/// With more dead waiters in front we wake none: Redisson's own clients remove them.
const FAIR_QUEUE_LOOKED_AT_MAX: i64 = 1000;

/// Milliseconds since 1970 as the score of a sorted set.
#[allow(
    clippy::as_conversions,
    clippy::cast_precision_loss,
    reason = "exact for the next two hundred thousand years"
)]
fn as_score(ms: i64) -> f64 {
    ms as f64
}

/// Asks the server whether it has replicas. Called when that may have changed.
pub(crate) fn look_for_replicas(ctx: Ctx<'_>) {
    let has_replicas = !ctx.in_cluster() && ffi::has_replicas();
    HAS_REPLICAS.store(has_replicas, Ordering::Relaxed);
}

/// Whether replicas have to be told of messages: one is connected, where clients may have
/// subscribed. A replica that is away does not get a message later, and replicating one costs 2,000
/// instructions. Never in a cluster, where its bus brings messages to the replicas.
pub(crate) fn has_replicas() -> bool {
    HAS_REPLICAS.load(Ordering::Relaxed)
}

static HAS_REPLICAS: AtomicBool = AtomicBool::new(false);

/// Tells replicas of the messages of this turn of the event loop.
///
/// Not in the command that released the lock: the server would put `MULTI` and `EXEC` around the
/// change and the message, for the append-only file too, and that costs more than both. Nothing
/// rests on a message.
pub(crate) fn tell_replicas(ctx: Ctx<'_>) {
    // A write that is replicated during a pause stops the server.
    let is_idle = state::with(|state| state.messages.is_empty());
    if is_idle || ffi::writes_are_paused() {
        return;
    }
    let (mut messages, words) = state::with(|state| {
        let words = Rc::clone(&state.words);
        (std::mem::take(&mut state.messages), words)
    });
    for message in messages.drain(..) {
        let text = words.unlock_message(message.is_of_writer);
        ctx.select_db(message.db);
        for kind in message.kinds {
            ctx.replicate_message(*kind, message.channel.as_str(), text);
        }
    }
    if messages.capacity() <= MESSAGES_KEPT {
        state::with(|state| state.messages = messages);
    }
}

/// An emptied list is used for the next turn, unless it grew beyond this.
const MESSAGES_KEPT: usize = 64;

/// The kinds of messages that are published.
fn kinds(ctx: Ctx<'_>) -> &'static [Publish] {
    match PUBLISH.with(|mode| mode.clone()) {
        PublishMode::auto if !ctx.in_cluster() => &[Publish::Classic],
        PublishMode::classic => &[Publish::Classic],
        PublishMode::sharded => &[Publish::Sharded],
        PublishMode::auto | PublishMode::both => &[Publish::Classic, Publish::Sharded],
        PublishMode::off => &[],
    }
}

fn publish(
    ctx: Ctx<'_>,
    kinds: &'static [Publish],
    channel: OwnedStr,
    is_of_writer: bool,
    words: &Words,
) {
    for kind in kinds {
        ctx.publish(*kind, channel.as_str(), words.unlock_message(is_of_writer));
    }
    if has_replicas() {
        let db = ctx.db();
        let message = Message {
            db,
            channel,
            is_of_writer,
            kinds,
        };
        state::with(|state| state.messages.push(message));
    }
}
