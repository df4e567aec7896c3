//! The reply of a command that we called.

use super::server;
use redis_module::raw;
use std::ffi::c_char;
use std::slice;

/// The reply of a command that we called.
pub(super) struct CallReply(pub(super) *mut raw::RedisModuleCallReply);

impl CallReply {
    pub(super) fn of(raw: *mut raw::RedisModuleCallReply) -> Option<Self> {
        (!raw.is_null()).then(|| Self(raw))
    }

    fn has_type(&self, this: isize) -> bool {
        isize::try_from(server!(RedisModule_CallReplyType(self.0))) == Ok(this)
    }

    pub(super) fn is_string(&self) -> bool {
        self.has_type(raw::REDISMODULE_REPLY_STRING)
    }

    pub(super) fn is_error(&self) -> bool {
        self.has_type(raw::REDISMODULE_REPLY_ERROR)
    }

    /// The text of a string or an error; empty for any other reply.
    pub(super) fn text(&self) -> &[u8] {
        let mut len = 0;
        let text = server!(RedisModule_CallReplyStringPtr(self.0, &raw mut len));
        self.bytes(text, len)
    }

    /// The reply as it goes over the wire.
    pub(super) fn wire(&self) -> &[u8] {
        let mut len = 0;
        let text = server!(RedisModule_CallReplyProto(self.0, &raw mut len));
        self.bytes(text, len)
    }

    /// Bytes that the server has told of this reply; it may have told none.
    #[allow(clippy::unused_self, reason = "the bytes live as long as the reply")]
    fn bytes(&self, start: *const c_char, len: usize) -> &[u8] {
        if start.is_null() {
            return &[];
        }
        // SAFETY: the text is `len` bytes and lives as long as the reply.
        unsafe { slice::from_raw_parts(start.cast(), len) }
    }
}

impl Drop for CallReply {
    fn drop(&mut self) {
        server!(RedisModule_FreeCallReply(self.0));
    }
}
