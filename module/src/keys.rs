//! A lock's key: opening it, and reading what is stored there as plain values.

use crate::ffi::{Ctx, Key, KeyType, OwnedStr, Str};
use crate::state::{self, Words};
use rlock_core::{Count, FENCE_FIELD, Hash, Kind, LockRef, MODE_FIELD, Now, Stored, Token};
use std::rc::Rc;

/// A lock whose key is open.
pub(crate) struct OpenLock<'a> {
    pub(crate) ctx: Ctx<'a>,
    pub(crate) name: Str<'a>,
    pub(crate) key: Key<'a>,
    pub(crate) words: Rc<Words>,
    db: i32,
}

impl<'a> OpenLock<'a> {
    /// Opens the key to change it.
    pub(crate) fn to_write(ctx: Ctx<'a>, name: Str<'a>) -> Self {
        Self::new(ctx, name, Key::open_to_write(ctx, name))
    }

    /// Opens the key to look at it.
    pub(crate) fn to_read(ctx: Ctx<'a>, name: Str<'a>) -> Self {
        Self::new(ctx, name, Key::open_to_read(ctx, name))
    }

    fn new(ctx: Ctx<'a>, name: Str<'a>, key: Key<'a>) -> Self {
        let words = state::with(|state| Rc::clone(&state.words));
        Self {
            ctx,
            name,
            key,
            words,
            db: ctx.db(),
        }
    }

    pub(crate) fn at(&self) -> LockRef<'a> {
        LockRef {
            db: self.db,
            name: self.name.bytes(),
        }
    }

    /// What is stored, as this owner sees it.
    pub(crate) fn load(&self, owner: Str<'_>) -> Stored {
        match self.key.key_type() {
            KeyType::Missing => Stored::Free,
            KeyType::Other => Stored::OtherType,
            KeyType::Hash => self.load_hash(owner),
        }
    }

    fn load_hash(&self, owner: Str<'_>) -> Stored {
        let fields = [owner, self.words.fence.as_str(), self.words.mode.as_str()];
        let [own, fence, mode] = self.key.hash_get(fields);
        let known = [own.is_some(), fence.is_some(), mode.is_some()]
            .into_iter()
            .filter(|is| *is);
        let others = self.key.len() > known.count();
        // Fields can have a TTL of their own on newer servers, and are counted after it until the
        // server removes them: that there are others is no proof that one of them is alive.
        if own.is_none() && !(others && self.holder().is_some()) {
            return Stored::Free;
        }
        Stored::Held(Hash {
            kind: if mode.is_some() {
                Kind::ReadWrite
            } else {
                Kind::Plain
            },
            own: own.map(|count| Count::from_field(count.as_str().bytes())),
            token: fence.and_then(|fence| Token::from_field(fence.as_str().bytes())),
            others,
            ends_at: self.key.expires_at(),
        })
    }

    /// What is stored, as its holder sees it, and who that is.
    pub(crate) fn load_for_holder(&self) -> (Stored, Option<Box<[u8]>>) {
        match self.key.key_type() {
            KeyType::Missing => (Stored::Free, None),
            KeyType::Other => (Stored::OtherType, None),
            KeyType::Hash => match self.holder() {
                None => (Stored::Free, None),
                Some(holder) => (
                    self.load_hash(OwnedStr::new(&holder).as_str()),
                    Some(holder),
                ),
            },
        }
    }

    /// What is left of the present lease, as in [`Stored::ttl_ms`].
    pub(crate) fn ttl_ms(&self, now: Now) -> i64 {
        self.load_for_holder().0.ttl_ms(now)
    }

    /// The first live owner in a hash.
    fn holder(&self) -> Option<Box<[u8]>> {
        self.owners(1).pop()
    }

    /// The live owners of the lock: one, unless somebody else wrote more into its hash.
    pub(crate) fn holders(&self) -> Vec<Box<[u8]>> {
        match self.key.key_type() {
            KeyType::Hash => self.owners(HOLDERS_MAX),
            KeyType::Missing | KeyType::Other => Vec::new(),
        }
    }

    fn owners(&self, max: usize) -> Vec<Box<[u8]>> {
        self.key
            .find_fields(max, &|field| field != FENCE_FIELD && field != MODE_FIELD)
    }
}

/// Of a hash with more owners than this, which we never write, the rest is not looked at.
const HOLDERS_MAX: usize = 1000;
