//! Where a key is served that is not served here.

use crate::ffi::Ctx;
use redis_module::RedisValue;
use rlock_core::CommandError;

/// The error that sends a client to the node which serves the key; none while nobody knows it.
///
/// While a slot is on its way this names the node that still owns it: that node sends clients on
/// (`ASK`) for keys that have left.
///
/// Asked of `CLUSTER NODES`, because `CLUSTER SLOTS` from a timer stops Valkey 8.0.
pub(crate) fn redirection(ctx: Ctx<'_>, key: &[u8]) -> Option<CommandError> {
    let context = ctx.context();
    let RedisValue::Integer(slot) = context.call("CLUSTER", &[&b"KEYSLOT"[..], key]).ok()? else {
        return None;
    };
    let slot = u16::try_from(slot).ok()?;
    let nodes = text(&context.call("CLUSTER", &["NODES"]).ok()?)?;
    let address = nodes
        .lines()
        .find_map(|node| address_of_owner(node, slot))?
        .to_owned();
    Some(CommandError::Moved { slot, address })
}

/// The `host:port` of a line of `CLUSTER NODES`, if that node owns the slot: the second word up to
/// the `@`, where the words from the ninth on are the slots.
fn address_of_owner(node: &str, slot: u16) -> Option<&str> {
    let owns = node
        .split(' ')
        .skip(8)
        .any(|slots| in_range(slots, slot).unwrap_or(false));
    let address = node.split(' ').nth(1).filter(|_| owns)?;
    address.split('@').next()
}

/// Whether `first-last`, or one number, contains the slot. None for a slot on its way, `[…]`.
fn in_range(slots: &str, slot: u16) -> Option<bool> {
    let (first, last) = slots.split_once('-').unwrap_or((slots, slots));
    Some((first.parse().ok()?..=last.parse().ok()?).contains(&slot))
}

fn text(value: &RedisValue) -> Option<String> {
    match value {
        RedisValue::SimpleString(text) | RedisValue::BulkString(text) => Some(text.clone()),
        RedisValue::BulkRedisString(text) => Some(text.to_string_lossy()),
        RedisValue::StringBuffer(bytes) => Some(String::from_utf8_lossy(bytes).into_owned()),
        _ => None,
    }
}
