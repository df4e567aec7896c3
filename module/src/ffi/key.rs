//! Keys, as this module uses them: a hash, or not.

use super::{Ctx, OwnedStr, Str, guarded, int, server};
use redis_module::raw;
use std::ffi::{c_int, c_void};
use std::marker::PhantomData;
use std::ptr;

/// The types of a key that we tell apart.
const EMPTY: c_int = 0;
const HASH: c_int = 3;
const _: () = assert!(raw::REDISMODULE_KEYTYPE_EMPTY == 0 && raw::REDISMODULE_KEYTYPE_HASH == 3);

/// An open key.
pub(crate) struct Key<'a> {
    raw: *mut raw::RedisModuleKey,
    call: PhantomData<&'a ()>,
}

/// What a key is.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(crate) enum KeyType {
    Missing,
    Hash,
    Other,
}

impl<'a> Key<'a> {
    /// Opens a key to write. One that has expired is deleted by this, and that is replicated.
    pub(crate) fn open_to_write(ctx: Ctx<'a>, name: Str<'a>) -> Self {
        Self::open(ctx, name, raw::REDISMODULE_READ | raw::REDISMODULE_WRITE)
    }

    /// Opens a key to look at it.
    pub(crate) fn open_to_read(ctx: Ctx<'a>, name: Str<'a>) -> Self {
        Self::open(ctx, name, raw::REDISMODULE_READ)
    }

    fn open(ctx: Ctx<'a>, name: Str<'a>, mode: u32) -> Self {
        let raw = server!(RedisModule_OpenKey(ctx.raw, name.raw, int(mode)));
        Self {
            raw,
            call: PhantomData,
        }
    }

    pub(crate) fn key_type(&self) -> KeyType {
        // A key that is only read and is not there has no handle; the server takes that as "empty".
        match server!(RedisModule_KeyType(self.raw)) {
            EMPTY => KeyType::Missing,
            HASH => KeyType::Hash,
            _ => KeyType::Other,
        }
    }

    /// The number of fields.
    pub(crate) fn len(&self) -> usize {
        server!(RedisModule_ValueLength(self.raw))
    }

    /// The values of three fields of a hash, in one call.
    pub(crate) fn hash_get(&self, fields: [Str<'_>; 3]) -> [Option<OwnedStr>; 3] {
        let [a, b, c] = fields;
        let mut values = [ptr::null_mut::<raw::RedisModuleString>(); 3];
        let [va, vb, vc] = values.each_mut().map(ptr::from_mut);
        let end = ptr::null_mut::<c_void>();
        server!(RedisModule_HashGet(
            self.raw, 0, a.raw, va, b.raw, vb, c.raw, vc, end
        ));
        values.map(OwnedStr::adopt)
    }

    /// Writes one field of a hash, which comes into being with it.
    pub(crate) fn hash_set(&mut self, field: Str<'_>, value: Str<'_>) {
        let end = ptr::null_mut::<c_void>();
        server!(RedisModule_HashSet(self.raw, 0, field.raw, value.raw, end));
    }

    /// Removes one field of a hash.
    pub(crate) fn hash_delete(&mut self, field: Str<'_>) {
        let end = ptr::null_mut::<c_void>();
        // The interface's REDISMODULE_HASH_DELETE: the number 1 in place of a string.
        let delete = ptr::without_provenance_mut::<raw::RedisModuleString>(1);
        server!(RedisModule_HashSet(self.raw, 0, field.raw, delete, end));
    }

    /// When the key expires, in milliseconds since 1970.
    pub(crate) fn expires_at(&self) -> Option<i64> {
        let at = server!(RedisModule_GetAbsExpire(self.raw));
        (at >= 0).then_some(at)
    }

    pub(crate) fn set_expires_at(&mut self, at: i64) {
        server!(RedisModule_SetAbsExpire(self.raw, at));
    }

    pub(crate) fn delete(&mut self) {
        server!(RedisModule_DeleteKey(self.raw));
    }

    /// The live fields of a hash that `wanted` accepts, the first `max` of them.
    pub(crate) fn find_fields(&self, max: usize, wanted: &dyn Fn(&[u8]) -> bool) -> Vec<Box<[u8]>> {
        let mut search = FieldSearch {
            wanted,
            max,
            found: Vec::new(),
        };
        let cursor = server!(RedisModule_ScanCursorCreate());
        let data: *mut c_void = (&raw mut search).cast();
        loop {
            let more = server!(RedisModule_ScanKey(self.raw, cursor, Some(on_field), data));
            if more == 0 || search.found.len() >= max {
                break;
            }
        }
        server!(RedisModule_ScanCursorDestroy(cursor));
        search.found
    }
}

impl Drop for Key<'_> {
    fn drop(&mut self) {
        server!(RedisModule_CloseKey(self.raw));
    }
}

struct FieldSearch<'a> {
    wanted: &'a dyn Fn(&[u8]) -> bool,
    max: usize,
    found: Vec<Box<[u8]>>,
}

extern "C" fn on_field(
    _key: *mut raw::RedisModuleKey,
    field: *mut raw::RedisModuleString,
    _value: *mut raw::RedisModuleString,
    data: *mut c_void,
) {
    guarded((), || {
        // SAFETY: `find_field` passes its search, which lives until the scan is over.
        let search = unsafe { &mut *data.cast::<FieldSearch<'_>>() };
        let field = Str::borrow(field).bytes();
        if search.found.len() < search.max && (search.wanted)(field) {
            search.found.push(field.into());
        }
    });
}
