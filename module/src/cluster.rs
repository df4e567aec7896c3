//! Where a key is served that is not served here.

use crate::ffi::Ctx;
use redis_module::RedisValue;
use rlock_core::Refusal;

/// The error that sends a client to the node which serves the key; none while nobody knows it.
///
/// While a slot is on its way this names the node that still owns it: that node sends clients on
/// (`ASK`) for keys that have left.
pub(crate) fn redirection(ctx: Ctx<'_>, key: &[u8]) -> Option<Refusal> {
    let context = ctx.context();
    let RedisValue::Integer(slot) = context.call("CLUSTER", &[&b"KEYSLOT"[..], key]).ok()? else {
        return None;
    };
    let RedisValue::Array(ranges) = context.call("CLUSTER", &["SLOTS"]).ok()? else {
        return None;
    };
    let address = ranges
        .into_iter()
        .find_map(|range| primary_of(range, slot))?;
    Some(Refusal::Moved {
        slot: u16::try_from(slot).ok()?,
        address,
    })
}

/// The primary of a range of `CLUSTER SLOTS`, `[first, last, [host, port, …], …]`, if the slot is
/// in it.
fn primary_of(range: RedisValue, slot: i64) -> Option<String> {
    let RedisValue::Array(range) = range else {
        return None;
    };
    let [
        RedisValue::Integer(first),
        RedisValue::Integer(last),
        RedisValue::Array(node),
        ..,
    ] = range.as_slice()
    else {
        return None;
    };
    let [host, RedisValue::Integer(port), ..] = node.as_slice() else {
        return None;
    };
    (*first..=*last)
        .contains(&slot)
        .then(|| format!("{}:{port}", text(host)))
}

fn text(value: &RedisValue) -> String {
    match value {
        RedisValue::SimpleString(text) | RedisValue::BulkString(text) => text.clone(),
        RedisValue::BulkRedisString(text) => text.to_string_lossy(),
        RedisValue::StringBuffer(bytes) => String::from_utf8_lossy(bytes).into_owned(),
        _ => String::new(),
    }
}
