//! A lock whose key is open, and what all kinds of locks have in common there.

use crate::ffi::{self, Ctx, Key, KeyType, OwnedStr, Str};
use crate::memory::state::{self, Words};
use rlock_core::is_permits_mode;
use std::cell::Cell;
use std::ops::ControlFlow;
use std::rc::Rc;

/// A lock whose key is open.
pub(crate) struct OpenLock<'a> {
    pub(crate) ctx: Ctx<'a>,
    pub(crate) name: Str<'a>,
    pub(crate) key: Key<'a>,
    /// How many keys had expired when it was opened.
    expired: Cell<u64>,
    pub(crate) words: Rc<Words>,
    /// Whether the key was written since it was opened.
    pub(crate) is_written: bool,
    /// Whether the last emitted event of the key says that it is deleted.
    pub(crate) is_deleted: bool,
}

/// The access for which a key is opened.
#[derive(Clone, Copy)]
pub(crate) enum Access {
    Read,
    Write,
}

impl<'a> OpenLock<'a> {
    pub(crate) fn open(ctx: Ctx<'a>, name: Str<'a>, access: Access) -> Self {
        let (key, expired) = open_as_it_is(ctx, name, access);
        Self {
            ctx,
            name,
            key,
            expired: Cell::new(expired),
            words: state::with(|state| Rc::clone(&state.words)),
            is_written: false,
            is_deleted: false,
        }
    }

    /// Reads it. Looking at a timeout key may delete it because it has expired, and a module that
    /// listens to that may write this key. Then the result is out of date, and the key is read
    /// again.
    pub(crate) fn read<R>(&self, read: impl Fn(&Self) -> R) -> R {
        let mut found = read(self);
        for _ in 0..READ_ANEW_MAX {
            if self.is_up_to_date() {
                break;
            }
            self.expired.set(ffi::keys_expired());
            self.key.set_aside();
            found = read(self);
        }
        found
    }

    /// Whether no key has expired since it was opened. Opens it again if it is set aside.
    pub(crate) fn is_up_to_date(&self) -> bool {
        // Opening it again may also make it expire.
        self.key.take_up();
        self.expired.get() == ffi::keys_expired()
    }

    /// The `mode` field, which read-write locks and permits have.
    pub(crate) fn mode(&self) -> Option<OwnedStr> {
        self.key.hash_get_one(self.words.mode.as_str())
    }

    /// Whether it holds permits. Only the `mode` field counts, not the other fields.
    pub(crate) fn is_of_permits(&self) -> bool {
        self.key.key_type() == KeyType::Hash
            && self
                .mode()
                .is_some_and(|mode| is_permits_mode(mode.as_str().bytes()))
    }

    /// Whether it is a read-write lock.
    pub(crate) fn is_read_write(&self) -> bool {
        self.mode()
            .is_some_and(|mode| !is_permits_mode(mode.as_str().bytes()))
    }
}

/// Opens a key. If that made a key expire, a module that listens may have written this key, and the
/// handle does not show it. So the key is opened once more.
fn open_as_it_is<'a>(ctx: Ctx<'a>, name: Str<'a>, access: Access) -> (Key<'a>, u64) {
    read_anew(|| match access {
        Access::Read => Key::open_to_read(ctx, name),
        Access::Write => Key::open_to_write(ctx, name),
    })
}

/// Opens keys, or reads them, until no key expires meanwhile. Returns also how many keys had
/// expired by then. Handles of a former try are closed before the next one.
pub(crate) fn read_anew<R>(read: impl Fn() -> R) -> (R, u64) {
    let mut left = READ_ANEW_MAX;
    loop {
        let expired = ffi::keys_expired();
        let found = read();
        left = left.saturating_sub(1);
        if ffi::keys_expired() == expired || left == 0 {
            return (found, expired);
        }
    }
}

/// How often a key is opened and read again. Without this bound, a module that writes an expired
/// key whenever a key expires would keep the server here forever.
const READ_ANEW_MAX: usize = 1000;

pub(crate) fn count_true(of: &[bool]) -> usize {
    of.iter().filter(|is| **is).count()
}

/// The answer of a visitor to [`Key::each_field`].
pub(crate) fn go_on_if(more: bool) -> ControlFlow<()> {
    if more {
        ControlFlow::Continue(())
    } else {
        ControlFlow::Break(())
    }
}
