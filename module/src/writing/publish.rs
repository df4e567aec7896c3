//! The unlock messages that Redisson's clients wait for.

use crate::clock;
use crate::config::{PUBLISH, PublishMode, WAKE_FAIR_QUEUE};
use crate::ffi::{self, Ctx, Key, KeyType, OwnedStr};
use crate::memory::state::Words;
use rlock_core::{Mode, names};
use std::sync::atomic::{AtomicBool, Ordering};

/// Publishes that a lock was released, for waiters of the mode in which it was held. If it is free
/// now, this also wakes the first in the queue of Redisson's fair lock.
pub(crate) fn unlocked(ctx: Ctx<'_>, name: &[u8], held_as: Mode, is_free: bool, words: &Words) {
    let Some(to) = Channels::new(ctx) else { return };
    let name = names::tagged(name);
    let (channel, message) = match held_as {
        Mode::Plain => (name.lock_channel(), &words.unlocked),
        // Of a read-write lock's waiters, `0` wakes one in each process and `1` wakes all.
        Mode::Read => (name.read_write_channel(), &words.unlocked),
        Mode::Write => (name.read_write_channel(), &words.write_unlocked),
        // Only our own clients use permits.
        Mode::Permits => return,
    };
    to.publish(ctx, &OwnedStr::concat(&channel), message);
    if held_as == Mode::Plain
        && is_free
        && WAKE_FAIR_QUEUE.load(Ordering::Relaxed)
        && let Some(first) = first_of_fair_queue(ctx, name)
    {
        let channel = name.fair_channel(first.as_str().bytes());
        to.publish(ctx, &OwnedStr::new(&channel), &words.unlocked);
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
pub(crate) fn look_for_replicas() {
    HAS_REPLICAS.store(ffi::has_replicas(), Ordering::Relaxed);
}

/// Whether a replica is connected, where clients may have subscribed. A replica that is away does
/// not get a message later, and replicating one costs 2,000 instructions.
static HAS_REPLICAS: AtomicBool = AtomicBool::new(false);

/// The channels to which messages go.
struct Channels {
    classic: bool,
    sharded: bool,
    /// Whether messages are replicated. Not in a cluster, where its bus brings them to the
    /// replicas.
    replicas: bool,
}

impl Channels {
    /// None if no messages are published.
    fn new(ctx: Ctx<'_>) -> Option<Self> {
        let mode = PUBLISH.mode();
        if mode == PublishMode::off {
            return None;
        }
        let cluster = ctx.in_cluster();
        let (classic, sharded) = match mode {
            PublishMode::auto => (true, cluster),
            PublishMode::classic => (true, false),
            PublishMode::sharded => (false, true),
            PublishMode::both => (true, true),
            PublishMode::off => (false, false),
        };
        Some(Self {
            classic,
            sharded,
            replicas: !cluster && HAS_REPLICAS.load(Ordering::Relaxed),
        })
    }

    fn publish(&self, ctx: Ctx<'_>, channel: &OwnedStr, message: &OwnedStr) {
        let (channel, message) = (channel.as_str(), message.as_str());
        if self.classic {
            ctx.publish(channel, message);
        }
        if self.sharded {
            ctx.publish_sharded(channel, message);
        }
        if self.classic && self.replicas {
            ctx.replicate_publish(channel, message);
        }
        if self.sharded && self.replicas {
            ctx.replicate_spublish(channel, message);
        }
    }
}
