//! Replies as values of the crate, for calls that are rare enough for its copies.

use redis_module::RedisValue;

/// The elements of an array; none of any other value.
pub(crate) fn elements(value: &RedisValue) -> &[RedisValue] {
    match value {
        RedisValue::Array(elements) => elements,
        _ => &[],
    }
}

/// A string in UTF-8, which is all that the server's own replies have.
pub(crate) fn text(value: &RedisValue) -> Option<&str> {
    match value {
        RedisValue::SimpleString(text) => Some(text),
        _ => None,
    }
}
