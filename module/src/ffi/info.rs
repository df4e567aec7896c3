//! A section of the server's INFO.

use super::{guarded, server};
use redis_module::raw;
use std::ffi::{CStr, c_int};

/// Fills the section.
pub(crate) trait InfoSection {
    fn fill(page: &InfoPage);
}

/// The section while it is being filled.
pub(crate) struct InfoPage(*mut raw::RedisModuleInfoCtx);

impl InfoPage {
    pub(crate) fn number(&self, name: &CStr, value: u64) {
        server!(RedisModule_InfoAddFieldULongLong(
            self.0,
            name.as_ptr(),
            value
        ));
    }

    /// The text must not contain a comma or a line break: either would end it.
    pub(crate) fn text(&self, name: &CStr, value: &CStr) {
        server!(RedisModule_InfoAddFieldCString(
            self.0,
            name.as_ptr(),
            value.as_ptr()
        ));
    }

    /// A line of several numbers under one name.
    pub(crate) fn line(&self, name: &CStr, fill: impl FnOnce(&Self)) {
        server!(RedisModule_InfoBeginDictField(self.0, name.as_ptr()));
        fill(self);
        server!(RedisModule_InfoEndDictField(self.0));
    }
}

/// Adds the section. It has the module's name.
pub(crate) fn register_info<I: InfoSection>(ctx: super::Ctx<'_>) {
    server!(RedisModule_RegisterInfoFunc(ctx.raw, Some(on_info::<I>)));
}

extern "C" fn on_info<I: InfoSection>(ctx: *mut raw::RedisModuleInfoCtx, for_crash_report: c_int) {
    if for_crash_report != 0 {
        // Nothing in a crash report: the server may have stopped anywhere, also while our state was
        // lent.
        return;
    }
    guarded((), || {
        server!(RedisModule_InfoAddSection(ctx, std::ptr::null()));
        I::fill(&InfoPage(ctx));
    });
}
