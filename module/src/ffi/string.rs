//! Strings of the server, and the arguments of a command.

use super::server;
use redis_module::raw;
use rlock_core::CommandError;
use std::ffi::c_int;
use std::io::Write as _;
use std::marker::PhantomData;
use std::{ptr, slice};

/// A string of the server, borrowed from its keeper.
#[derive(Clone, Copy)]
#[repr(transparent)]
pub(crate) struct Str<'a> {
    pub(super) raw: *mut raw::RedisModuleString,
    keeper: PhantomData<&'a ()>,
}

impl<'a> Str<'a> {
    pub(super) fn borrow(raw: *mut raw::RedisModuleString) -> Self {
        Self {
            raw,
            keeper: PhantomData,
        }
    }

    /// The address of the string. It identifies this very string while the string lives.
    pub(crate) fn address(self) -> usize {
        self.raw.addr()
    }

    pub(crate) fn bytes(self) -> &'a [u8] {
        let mut len = 0;
        let start = server!(RedisModule_StringPtrLen(self.raw, &raw mut len));
        // SAFETY: the server's string is `len` bytes from `start`, and its keeper outlives 'a.
        unsafe { slice::from_raw_parts(start.cast(), len) }
    }
}

/// A field of a hash, with its value.
pub(crate) type Field<'a> = (Str<'a>, Str<'a>);

/// A string of the server that is ours to free.
pub(crate) struct OwnedStr(*mut raw::RedisModuleString);

impl OwnedStr {
    pub(crate) fn new(bytes: &[u8]) -> Self {
        // Without a context: the string is freed by its drop, not with the call.
        Self(server!(RedisModule_CreateString(
            ptr::null_mut(),
            bytes.as_ptr().cast(),
            bytes.len()
        )))
    }

    /// One string of several parts. A short one is put together on the stack.
    pub(crate) fn concat(parts: &[&[u8]]) -> Self {
        let mut buffer = [0; 256];
        let mut rest = &mut buffer[..];
        let mut add = |part: &[u8]| match part {
            // Half of the parts are this short, and a call to copy one takes longer than this.
            [] => true,
            [byte] => match std::mem::take(&mut rest) {
                [place, others @ ..] => {
                    *place = *byte;
                    rest = others;
                    true
                }
                [] => false,
            },
            _ => rest.write_all(part).is_ok(),
        };
        let fits = parts.iter().all(|part| add(part));
        let left = rest.len();
        match buffer.get(..buffer.len().saturating_sub(left)) {
            Some(whole) if fits => Self::new(whole),
            _ => Self::new(&parts.concat()),
        }
    }

    /// The string as the value of an option. It stays ours: the server copies the value, and the
    /// crate forgets it.
    pub(crate) fn as_option(&self) -> redis_module::RedisString {
        redis_module::RedisString::from_redis_module_string(ptr::null_mut(), self.0)
    }

    pub(super) fn adopt(raw: *mut raw::RedisModuleString) -> Option<Self> {
        (!raw.is_null()).then(|| Self(raw))
    }

    pub(crate) fn as_str(&self) -> Str<'_> {
        Str::borrow(self.0)
    }
}

impl Default for OwnedStr {
    fn default() -> Self {
        Self::new(b"")
    }
}

impl Drop for OwnedStr {
    fn drop(&mut self) {
        server!(RedisModule_FreeString(ptr::null_mut(), self.0));
    }
}

/// The arguments of a command, its name first.
#[derive(Clone, Copy)]
pub(crate) struct Args<'a>(&'a [Str<'a>]);

impl<'a> Args<'a> {
    pub(super) fn new(args: *mut *mut raw::RedisModuleString, count: c_int) -> Self {
        let len = usize::try_from(count).unwrap_or(0);
        // SAFETY: `args` are `count` strings that live as long as the call, and `Str` is
        // transparent.
        Self(unsafe { slice::from_raw_parts(args.cast(), len) })
    }

    /// The argument at this place. The command's name has place 0.
    pub(crate) fn at(self, place: usize) -> Result<Str<'a>, CommandError> {
        // Not with `ok_or`: each argument would make an error, and drop it.
        match self.0.get(place) {
            Some(arg) => Ok(*arg),
            None => Err(CommandError::WrongArity),
        }
    }

    pub(crate) fn len(self) -> usize {
        self.0.len()
    }

    /// The arguments from this place on.
    pub(crate) fn from(self, place: usize) -> Self {
        Self(self.0.get(place..).unwrap_or_default())
    }

    /// The arguments as the interface takes them. It only counts references to these strings.
    pub(super) fn as_list(self) -> (*mut *mut raw::RedisModuleString, usize) {
        (self.0.as_ptr().cast_mut().cast(), self.0.len())
    }

    /// The arguments after the name, as bytes.
    pub(crate) fn bytes(self) -> impl Iterator<Item = &'a [u8]> {
        self.0.iter().skip(1).map(|arg| arg.bytes())
    }
}
