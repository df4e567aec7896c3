//! The unlock message that Redisson's clients wait for.

use crate::config::{PUBLISH, PublishMode};
use crate::ffi::{Ctx, OwnedStr, Str};
use crate::state::Words;

/// Tells whoever listens that the lock was released: `0` on `redisson_lock__channel:TAG(name)`.
pub(crate) fn unlocked(ctx: Ctx<'_>, name: Str<'_>, words: &Words) {
    let mode = PUBLISH.mode();
    if mode == PublishMode::off {
        return;
    }
    let cluster = ctx.flags().cluster();
    let (classic, sharded) = match mode {
        PublishMode::auto => (true, cluster),
        PublishMode::classic => (true, false),
        PublishMode::sharded => (false, true),
        PublishMode::both => (true, true),
        PublishMode::off => (false, false),
    };
    let channel = channel(name.bytes());
    let (channel, message) = (channel.as_str(), words.unlocked.as_str());
    if classic {
        ctx.publish(channel, message);
    }
    if sharded {
        ctx.publish_sharded(channel, message);
    }
    // In a cluster the bus has brought the message to the replicas already.
    if classic && !cluster {
        ctx.replicate_message(c"PUBLISH", channel, message);
    }
    if sharded && !cluster {
        ctx.replicate_message(c"SPUBLISH", channel, message);
    }
}

/// The channel of a lock. The braces keep channel and lock in one slot; a name that has a brace
/// already is taken as it is, which is Redisson's rule, with its trap: `a{b` has a brace but no
/// tag.
fn channel(name: &[u8]) -> OwnedStr {
    let mut channel = Vec::with_capacity(PREFIX.len().saturating_add(name.len()).saturating_add(2));
    channel.extend_from_slice(PREFIX);
    if name.contains(&b'{') {
        channel.extend_from_slice(name);
    } else {
        channel.push(b'{');
        channel.extend_from_slice(name);
        channel.push(b'}');
    }
    OwnedStr::new(&channel)
}

const PREFIX: &[u8] = b"redisson_lock__channel:";
