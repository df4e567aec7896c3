//! A section of the server's INFO.

use super::{guarded, server};
use redis_module::raw;
use std::ffi::c_int;

/// Fills the section.
pub(crate) trait InfoSection {
    fn fill(page: &InfoPage);
}

/// The section while it is being filled.
pub(crate) struct InfoPage(*mut raw::RedisModuleInfoCtx);

impl InfoPage {
    pub(crate) fn number(&self, name: &str, value: u64) {
        raw::add_info_field_unsigned_long_long(self.0, name, value);
    }

    /// The text must not contain a comma or a line break: either would end it.
    pub(crate) fn text(&self, name: &str, value: &str) {
        raw::add_info_field_str(self.0, name, value);
    }

    /// A line of several numbers under one name.
    pub(crate) fn line(&self, name: &str, fill: impl FnOnce(&Self)) {
        raw::add_info_begin_dict_field(self.0, name);
        fill(self);
        raw::add_info_end_dict_field(self.0);
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
        raw::add_info_section(ctx, None);
        I::fill(&InfoPage(ctx));
    });
}
