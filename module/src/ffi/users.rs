//! Users of the server's ACL, and their rights.

use super::reply::CallReply;
use super::{Ctx, OK, OwnedStr, server};
use redis_module::{AclPermissions, RedisString};
use std::ffi::c_int;
use std::{io, ptr};

/// The error "operation not supported", on Linux.
const ENOTSUP: c_int = 95;

impl Ctx<'_> {
    /// The name of the calling user; none if the call has no user, or if the server cannot be asked
    /// for it.
    ///
    /// A connection's user is found by the client's number. In a script or another module's call we
    /// must first know that the call has a user: without one, servers up to Redis 8.0 and Valkey 8
    /// crash when they are asked for its name.
    pub(crate) fn user_name(self) -> Option<OwnedStr> {
        let id = self.client_id();
        let of_client = server!(RedisModule_GetClientUserNameById(self.raw, id));
        OwnedStr::adopt(of_client).or_else(|| {
            // On Valkey 9 a script's client is known, but has no user of its own.
            let ask = || server!(RedisModule_GetCurrentUserName(self.raw));
            OwnedStr::adopt(self.has_user().then(ask)?)
        })
    }

    /// Tells which keys the caller may read. Without a user these are all: another module can make
    /// such a call, and the server lets that module read every key. A user that a module has made
    /// is not in the ACL, so its permissions are not known: it may read none.
    pub(crate) fn may_read(self) -> impl Fn(&[u8]) -> bool {
        let (context, user) = (self.context(), self.user_name());
        let user = user.map(|user| RedisString::new(None, user.as_str().raw));
        move |key| {
            user.as_ref().is_none_or(|user| {
                let key = RedisString::create_from_slice(ptr::null_mut(), key);
                let allowed = context.acl_check_key_permission(user, &key, &AclPermissions::ACCESS);
                allowed.is_ok()
            })
        }
    }

    /// Whether this call has a user. If it has none, servers up to Redis 8.0 and Valkey 8 crash
    /// when they read the user's name.
    ///
    /// A call in the caller's name (`C`) that has no user is refused before anything else is
    /// checked. So the command need not exist; it does not, and nothing is run either way.
    pub(super) fn has_user(self) -> bool {
        let (command, format) = (c"rlock.no-command".as_ptr(), c"CE".as_ptr());
        let reply = server!(RedisModule_Call(self.raw, command, format));
        // The interface reports the reason in errno.
        let no_user = io::Error::last_os_error().raw_os_error() == Some(ENOTSUP);
        CallReply::of(reply);
        !no_user
    }
}

/// Whether the user `default` may run this command: many servers load an append-only file as that
/// user.
pub(crate) fn may_default_run<const LEN: usize>(command: [&[u8]; LEN]) -> bool {
    let name = OwnedStr::new(b"default");
    let user = server!(RedisModule_GetModuleUserFromUserName(name.as_str().raw));
    if user.is_null() {
        return true;
    }
    let words = command.map(OwnedStr::new);
    let mut words = words.each_ref().map(|word| word.as_str().raw);
    let (first, len) = (words.as_mut_ptr(), c_int::try_from(LEN).unwrap_or(0));
    let may_run = server!(RedisModule_ACLCheckCommandPermissions(user, first, len)) == OK;
    server!(RedisModule_FreeModuleUser(user));
    may_run
}
