//! Keys, as this module uses them: mostly hashes.

use super::{Ctx, Field, OK, OwnedStr, Str, guarded, server};
use redis_module::raw;
use std::cell::Cell;
use std::ffi::c_void;
use std::ops::ControlFlow;
use std::ptr;

/// An open key.
pub(crate) struct Key<'a> {
    ctx: Ctx<'a>,
    name: Str<'a>,
    mode: u32,
    /// Null if the key does not exist and is open for reading only, or if it is set aside.
    handle: Cell<*mut raw::RedisModuleKey>,
    is_aside: Cell<bool>,
}

/// The type of a key.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(crate) enum KeyType {
    Missing,
    Hash,
    String,
    List,
    SortedSet,
    Other,
}

impl<'a> Key<'a> {
    /// Opens a key to write. If it has expired, this deletes it, and the deletion is replicated.
    pub(crate) fn open_to_write(ctx: Ctx<'a>, name: Str<'a>) -> Self {
        Self::open(ctx, name, raw::REDISMODULE_READ | raw::REDISMODULE_WRITE)
    }

    /// Opens a key to look at it.
    pub(crate) fn open_to_read(ctx: Ctx<'a>, name: Str<'a>) -> Self {
        Self::open(ctx, name, raw::REDISMODULE_READ)
    }

    /// Opens a key that belongs to a lock, to look at it. This does not count as a use of the key.
    pub(crate) fn open_to_peek(ctx: Ctx<'a>, name: Str<'a>) -> Self {
        // Servers before 7.2 do not know the last three flags, and ignore them.
        let unseen = raw::REDISMODULE_OPEN_KEY_NOTOUCH
            | raw::REDISMODULE_OPEN_KEY_NONOTIFY
            | raw::REDISMODULE_OPEN_KEY_NOSTATS
            | raw::REDISMODULE_OPEN_KEY_NOEXPIRE;
        Self::open(ctx, name, raw::REDISMODULE_READ | unseen)
    }

    /// Whether a peek at an expired key deletes it, and other modules hear of that at once: on
    /// servers before 7.2.
    pub(crate) fn peek_may_expire() -> bool {
        server!(RedisModule_GetServerVersion()) < 0x0007_0200
    }

    fn open(ctx: Ctx<'a>, name: Str<'a>, mode: u32) -> Self {
        let handle = server!(RedisModule_OpenKey(ctx.raw, name.raw, mode.cast_signed()));
        Self {
            ctx,
            name,
            mode,
            handle: Cell::new(handle),
            is_aside: Cell::new(false),
        }
    }

    /// Closes the key until it is used again. While it is closed, others may do anything to it;
    /// while it is open, they must not: the server keeps a plain pointer to its value.
    pub(crate) fn set_aside(&self) {
        if !self.is_aside.replace(true) {
            self.close();
        }
    }

    /// Opens it again, if it is set aside.
    #[inline]
    pub(crate) fn take_up(&self) {
        if self.is_aside.get() {
            self.open_again();
        }
    }

    #[cold]
    fn open_again(&self) {
        let (ctx, name) = (self.ctx.raw, self.name.raw);
        let handle = server!(RedisModule_OpenKey(ctx, name, self.mode.cast_signed()));
        self.handle.set(handle);
        self.is_aside.set(false);
    }

    fn close(&self) {
        let handle = self.handle.replace(ptr::null_mut());
        server!(RedisModule_CloseKey(handle));
    }

    #[inline]
    fn raw(&self) -> *mut raw::RedisModuleKey {
        self.take_up();
        self.handle.get()
    }

    /// Whether it was opened for writing.
    pub(crate) fn is_writable(&self) -> bool {
        self.mode & raw::REDISMODULE_WRITE != 0
    }

    pub(crate) fn key_type(&self) -> KeyType {
        // A missing key that is open for reading only has no handle; the server takes that as
        // "empty".
        match isize::try_from(server!(RedisModule_KeyType(self.raw()))) {
            Ok(raw::REDISMODULE_KEYTYPE_EMPTY) => KeyType::Missing,
            Ok(raw::REDISMODULE_KEYTYPE_HASH) => KeyType::Hash,
            Ok(raw::REDISMODULE_KEYTYPE_STRING) => KeyType::String,
            Ok(raw::REDISMODULE_KEYTYPE_LIST) => KeyType::List,
            Ok(raw::REDISMODULE_KEYTYPE_ZSET) => KeyType::SortedSet,
            _ => KeyType::Other,
        }
    }

    /// Whether a field of the hash may have a TTL of its own: since Redis 7.4 and Valkey 9. Redis 8
    /// tells; elsewhere it is supposed, also on Valkey 8, which has no such TTLs but a larger
    /// version number.
    pub(crate) fn fields_may_expire(&self) -> bool {
        if server!(RedisModule_GetServerVersion()) < 0x0007_0400 {
            return false;
        }
        // SAFETY: see the head of `ffi`.
        let of_fields = unsafe { raw::RedisModule_HashFieldMinExpire };
        // SAFETY: the same; the key is open.
        of_fields.is_none_or(|end| unsafe { end(self.raw()) } != NO_EXPIRE)
    }

    /// The number of fields.
    pub(crate) fn len(&self) -> usize {
        server!(RedisModule_ValueLength(self.raw()))
    }

    /// The values of one or two fields of a hash, in one call.
    pub(crate) fn hash_get(&self, one: Str<'_>, other: Option<Str<'_>>) -> [Option<OwnedStr>; 2] {
        let key = self.raw();
        if key.is_null() {
            return [None, None];
        }
        // The list of fields ends with a null.
        let (end, other) = (
            ptr::null_mut::<c_void>(),
            other.map_or(ptr::null_mut(), |of| of.raw),
        );
        let mut values = [ptr::null_mut::<raw::RedisModuleString>(); 2];
        let [value, its_value] = values.each_mut().map(ptr::from_mut);
        server!(RedisModule_HashGet(
            key, 0, one.raw, value, other, its_value, end
        ));
        values.map(OwnedStr::adopt)
    }

    /// The value of one field of a hash.
    pub(crate) fn hash_get_one(&self, field: Str<'_>) -> Option<OwnedStr> {
        let [value, _] = self.hash_get(field, None);
        value
    }

    /// Writes one or two fields of a hash, and makes the hash if it does not exist.
    pub(crate) fn hash_set(&mut self, (field, value): Field<'_>, other: Option<Field<'_>>) {
        let (key, field, value, end) =
            (self.raw(), field.raw, value.raw, ptr::null_mut::<c_void>());
        let (next, its_value) = other
            .map_or((ptr::null_mut(), ptr::null_mut()), |(next, value)| {
                (next.raw, value.raw)
            });
        server!(RedisModule_HashSet(
            key, 0, field, value, next, its_value, end
        ));
    }

    /// Removes one field of a hash.
    pub(crate) fn hash_delete(&mut self, field: Str<'_>) {
        let end = ptr::null_mut::<c_void>();
        // The interface's REDISMODULE_HASH_DELETE: the number 1 in place of a string.
        let delete = ptr::without_provenance_mut::<raw::RedisModuleString>(1);
        server!(RedisModule_HashSet(self.raw(), 0, field.raw, delete, end));
    }

    /// When the key expires, in milliseconds since 1970.
    pub(crate) fn expires_at(&self) -> Option<i64> {
        if self.raw().is_null() {
            return None;
        }
        let at = server!(RedisModule_GetAbsExpire(self.raw()));
        (at >= 0).then_some(at)
    }

    pub(crate) fn set_expires_at(&mut self, at: i64) {
        server!(RedisModule_SetAbsExpire(self.raw(), at));
    }

    pub(crate) fn delete(&mut self) {
        server!(RedisModule_DeleteKey(self.raw()));
    }

    /// Walks the live fields of a hash with their values, a few at a time, until `visit` breaks
    /// off. `visit` is not called while the server reads the hash, so it may open other keys.
    pub(crate) fn each_field(&self, visit: impl FnMut(&[u8], &[u8]) -> ControlFlow<()>) {
        self.each_field_from(&Scan::begin(), visit);
    }

    /// The same, from where an earlier walk stopped. True if there are more fields.
    pub(crate) fn each_field_from(
        &self,
        scan: &Scan,
        mut visit: impl FnMut(&[u8], &[u8]) -> ControlFlow<()>,
    ) -> bool {
        let mut fields = Fields::new();
        loop {
            // Made anew for each call: using the list in between ends the pointer's right to it.
            let data: *mut c_void = (&raw mut fields).cast();
            let more = server!(RedisModule_ScanKey(
                self.raw(),
                scan.0,
                Some(on_field),
                data
            ));
            let enough = fields
                .drain(..)
                .any(|(field, value)| visit(&field, &value).is_break());
            if more == 0 || enough {
                return more != 0;
            }
        }
    }

    /// Whether the hash has a live field of another name than these. Unlike the walk above it
    /// copies nothing.
    pub(crate) fn has_field_beside(&self, known: [&'static [u8]; 2]) -> bool {
        let scan = Scan::begin();
        let mut search = Search {
            known,
            is_found: false,
        };
        loop {
            let data: *mut c_void = (&raw mut search).cast();
            let more = server!(RedisModule_ScanKey(
                self.raw(),
                scan.0,
                Some(on_searched_field),
                data
            ));
            if more == 0 || search.is_found {
                return search.is_found;
            }
        }
    }

    // --- Strings, lists and sorted sets ---

    /// Reads the value of a string, for a command that writes: the server gives it out as plain
    /// bytes only, and keeps it in that form from now on (`OBJECT ENCODING` is `raw`). [`Ctx::get`]
    /// changes nothing. `read` must not call the server.
    pub(crate) fn string<R>(&self, read: impl FnOnce(&[u8]) -> R) -> R {
        let mut len = 0;
        let mode = raw::REDISMODULE_READ.cast_signed();
        let start = server!(RedisModule_StringDMA(self.raw(), &raw mut len, mode));
        if start.is_null() {
            return read(&[]);
        }
        // SAFETY: the server's value is `len` bytes from `start` until the key is written to.
        read(unsafe { std::slice::from_raw_parts(start.cast::<u8>(), len) })
    }

    /// Makes the key a string with this value, whatever its type was.
    ///
    /// The server stores the string itself, and may free it in another thread, which counts its
    /// users without a lock. So one is made that has no other users.
    pub(crate) fn set_string(&mut self, value: &[u8]) {
        let value = OwnedStr::new(value);
        server!(RedisModule_StringSet(self.raw(), value.as_str().raw));
    }

    /// The element of a list at this place, counted from 0.
    pub(crate) fn list_get(&self, place: i64) -> Option<OwnedStr> {
        OwnedStr::adopt(server!(RedisModule_ListGet(self.raw(), place)))
    }

    /// The score of a member of a sorted set.
    pub(crate) fn score(&self, member: Str<'_>) -> Option<f64> {
        if self.raw().is_null() {
            return None;
        }
        let mut score = 0.0;
        let found = server!(RedisModule_ZsetScore(
            self.raw(),
            member.raw,
            &raw mut score
        ));
        (found == OK).then_some(score)
    }
}

impl Drop for Key<'_> {
    fn drop(&mut self) {
        self.close();
    }
}

/// The position of a walk through a hash. Fields that come or go meanwhile do not change whether
/// the others are visited, even if the name has another hash by then.
pub(crate) struct Scan(*mut raw::RedisModuleScanCursor);

impl Scan {
    pub(crate) fn begin() -> Self {
        Self(server!(RedisModule_ScanCursorCreate()))
    }
}

impl Drop for Scan {
    fn drop(&mut self) {
        server!(RedisModule_ScanCursorDestroy(self.0));
    }
}

/// Fields with their values, copied: the caller may open other keys while it looks at them, and the
/// server must not be reading this key then.
type Fields = Vec<(Box<[u8]>, Box<[u8]>)>;

extern "C" fn on_field(
    _key: *mut raw::RedisModuleKey,
    field: *mut raw::RedisModuleString,
    value: *mut raw::RedisModuleString,
    data: *mut c_void,
) {
    guarded((), || {
        // SAFETY: `each_field` passes its list, which lives until the scan is over.
        let fields = unsafe { &mut *data.cast::<Fields>() };
        let bytes = |string| Box::from(Str::borrow(string).bytes());
        fields.push((bytes(field), bytes(value)));
    });
}

/// A search for a field of another name than these.
struct Search {
    known: [&'static [u8]; 2],
    is_found: bool,
}

extern "C" fn on_searched_field(
    _key: *mut raw::RedisModuleKey,
    field: *mut raw::RedisModuleString,
    _value: *mut raw::RedisModuleString,
    data: *mut c_void,
) {
    guarded((), || {
        // SAFETY: `has_field_beside` passes its search, which lives until the scan is over.
        let search = unsafe { &mut *data.cast::<Search>() };
        search.is_found |= !search.known.contains(&Str::borrow(field).bytes());
    });
}

/// The server's answer for a hash without a field that has a TTL.
const NO_EXPIRE: raw::mstime_t = -1;
