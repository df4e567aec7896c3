//! A lock's hash that is made anew. Replicas and the append-only file get it by one `RESTORE`: two
//! commands would be a transaction, which costs them twice as much.

use crate::ffi::{self, KeyType, OwnedStr, Str};
use crate::reading::open_lock::OpenLock;
use crate::writing::{fields, restore};
use rlock_core::{Text, Write};
use std::ops::ControlFlow;

/// A hash that one decision makes. The decision deletes the former hash, if it exists, and sets two
/// fields and the end of the lease.
pub(crate) struct NewHash<'e> {
    replaces: bool,
    fields: &'e Write,
    ends_at: i64,
}

impl<'e> NewHash<'e> {
    /// The hash that `first` and the writes after it make. If they do, those are taken out of
    /// `rest`. All writes are to the locks' own keys, each with the place of its lock.
    pub(crate) fn begun_by(
        place: usize,
        first: &'e Write,
        rest: &mut (impl Iterator<Item = (usize, &'e Write)> + Clone),
        lock: &OpenLock<'_>,
    ) -> Option<Self> {
        let mut ahead = rest.clone();
        let mut next = || match ahead.next() {
            Some((other, write)) if other == place => Some(write),
            _ => None,
        };
        let replaces = matches!(first, Write::Delete);
        let fields = if replaces { next()? } else { first };
        let (Write::Set(_, Some(_)) | Write::SetPermits(.., true) | Write::SetWriter(.., true)) =
            fields
        else {
            return None;
        };
        let Some(Write::ExpireAt(ends_at)) = next() else {
            return None;
        };
        if !replaces && lock.key.key_type() != KeyType::Missing {
            return None;
        }
        let ends_at = *ends_at;
        *rest = ahead;
        Some(Self {
            replaces,
            fields,
            ends_at,
        })
    }

    /// Writes it into the keyspace and to replicas.
    pub(crate) fn write(self, lock: &mut OpenLock<'_>, caller: Str<'_>) {
        let (ctx, name, words) = (lock.ctx, lock.name, &lock.words);
        if self.replaces {
            lock.key.delete();
        }
        let Some((one, Some(other))) = fields::of_write(self.fields, caller, words) else {
            return;
        };
        let (one, other) = (one.as_field(), other.as_field());
        lock.key.hash_set(one, Some(other));
        lock.key.set_expires_at(self.ends_at);
        let end = Text::number(self.ends_at);
        // A module that listens to new keys may have written other fields.
        let has_others = lock.key.len() != 2;
        if !has_others && self.ends_at > 0 {
            let fields = [one, other].map(|(field, value)| (field.bytes(), value.bytes()));
            let options = [words.replace.as_str(), words.abs_ttl.as_str()];
            if let Some(payload) = restore::payload(fields)
                && ctx.replicate_restore(name, end.bytes(), payload.bytes(), options)
            {
                return;
            }
        }
        if self.replaces || has_others || ffi::deletions_are_lost() {
            ctx.replicate_del(name);
        }
        if has_others {
            // Replicas got those fields before this deletion, so they are told of all fields again.
            lock.key.each_field(|field, value| {
                let (field, value) = (OwnedStr::new(field), OwnedStr::new(value));
                ctx.replicate_hset(name, (field.as_str(), value.as_str()), None);
                ControlFlow::Continue(())
            });
        } else {
            ctx.replicate_hset(name, one, Some(other));
        }
        ctx.replicate_pexpireat(name, end.bytes());
    }
}
