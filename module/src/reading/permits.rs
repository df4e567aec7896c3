//! Reading permits: their hash, and the key of their limit. The core interprets the values.

use crate::ffi::{Key, KeyType, OwnedStr, Str};
use crate::reading::open_lock::{OpenLock, go_on_if};
use rlock_core::{
    FENCE_FIELD, HeldBy, MODE_FIELD, Mode, Now, Permits, PermitsHash, PermitsHold, PermitsHolders,
    PermitsReading, PermitsRequest, ReadDepth, Stored, Task, names,
};
use std::ops::ControlFlow;

/// No limit is longer than this, in decimal digits.
const LIMIT_LEN_MAX: usize = 20;

/// An owner's field, and its hold if the value is a valid one.
pub(crate) type HolderField = (Box<[u8]>, Option<PermitsHold>);

impl OpenLock<'_> {
    /// The stored state where nobody holds permits, or the hash does not exist.
    pub(crate) fn load_no_permits(&self, asked: Option<PermitsRequest>, now: Now) -> Stored {
        let limit = self.limit_value();
        let reading = PermitsReading::new(&[], asked, limit.as_deref(), now);
        let is_there = self.key.key_type() != KeyType::Missing;
        reading.found(None).with_hash(is_there).stored(true)
    }

    /// The hash of permits, as this owner sees it. `own` is the value of its field. The limit is
    /// read only where permits are asked for or waited for.
    pub(crate) fn load_permits(
        &self,
        owner: Str<'_>,
        own: Option<&OwnedStr>,
        depth: ReadDepth,
        asked: Option<PermitsRequest>,
        is_about_permits: bool,
        now: Now,
    ) -> Stored {
        let limit = is_about_permits.then(|| self.limit_value()).flatten();
        let reading = PermitsReading::new(owner.bytes(), asked, limit.as_deref(), now);
        let (hash, _) = self.read_permits(reading, owner, own, depth);
        hash.stored(is_about_permits)
    }

    /// The same for a queue whose first waiter waits for permits, with the other holders.
    pub(crate) fn load_permits_for_queue(
        &self,
        owner: Str<'_>,
        task: &Task,
        now: Now,
    ) -> (Stored, PermitsHolders) {
        let limit = self.limit_value();
        let reading = PermitsReading::new(owner.bytes(), task.asked, limit.as_deref(), now);
        let own = self.key.hash_get_one(owner);
        let (hash, others) =
            self.read_permits(reading.for_queue(), owner, own.as_ref(), task.depth);
        (hash.stored(true), others)
    }

    fn read_permits(
        &self,
        mut reading: PermitsReading<'_>,
        owner: Str<'_>,
        own: Option<&OwnedStr>,
        depth: ReadDepth,
    ) -> (PermitsHash, PermitsHolders) {
        let owner = owner.bytes();
        let ends_at = self.key.expires_at();
        if let Some(own) = own {
            reading.field(owner, own.as_str().bytes());
        }
        // Besides the owner's field the hash has the `mode` field.
        let has_others = self.key.len() > usize::from(own.is_some()).saturating_add(1);
        if has_others && reading.needs_others(depth, ends_at) {
            self.key.each_field(|field, value| {
                if field != owner || own.is_none() {
                    reading.field(field, value);
                }
                ControlFlow::Continue(())
            });
        } else if has_others && depth != ReadDepth::Own {
            self.key.each_field(|field, value| {
                let is_hold = field != owner && field != FENCE_FIELD;
                go_on_if(!is_hold || !reading.other_in_brief(value))
            });
        }
        let (hash, others) = reading.found_with_others(ends_at);
        (hash.with_hash(true), others)
    }

    /// The limit that RLOCK.LIMIT set, if the value is a valid one.
    pub(crate) fn limit(&self) -> Option<Permits> {
        let value = self.limit_value();
        value.as_deref().and_then(Permits::from_limit)
    }

    /// The value of the limit's key. In a cluster, no limit can be set for a name that puts this
    /// key into another slot.
    fn limit_value(&self) -> Option<Vec<u8>> {
        let (ctx, name) = (self.ctx, self.name.bytes());
        if ctx.in_cluster() && !names::side_keys_share_slot(name) {
            return None;
        }
        let name = OwnedStr::new(&names::limit_key(name));
        if Key::peek_may_expire() {
            self.key.set_aside();
        }
        let key = Key::open_to_peek(ctx, name.as_str());
        match key.key_type() {
            // A longer string is another program's. Reading a large one at each look would stop the
            // server.
            KeyType::String if key.len() > LIMIT_LEN_MAX => None,
            KeyType::String if self.key.is_writable() => Some(key.string(<[u8]>::to_vec)),
            KeyType::String => {
                drop(key);
                self.key.set_aside();
                ctx.get(name.as_str())
            }
            _ => None,
        }
    }

    /// The fields of holders of permits, and fields that are no valid hold; without holders whose
    /// leases are over.
    pub(crate) fn permits_fields(&self, now: Now) -> Vec<HolderField> {
        let mut holders = Vec::new();
        self.key.each_field(|field, value| {
            let hold = PermitsHold::from_field(value);
            let is_hold = field != MODE_FIELD && field != FENCE_FIELD;
            if is_hold && !hold.is_some_and(|hold| hold.is_over(now)) {
                holders.push((field.into(), hold));
            }
            ControlFlow::Continue(())
        });
        holders
    }

    /// One live holder of permits.
    pub(crate) fn first_permits_holder(&self, now: Now) -> Option<HeldBy> {
        let mut first = None;
        self.key.each_field(|field, value| {
            let hold = PermitsHold::from_field(value).filter(|hold| !hold.is_over(now));
            first = hold.filter(|_| field != FENCE_FIELD).map(|hold| HeldBy {
                owner: field.into(),
                mode: Mode::Permits,
                token: Some(hold.token),
                ends_at: hold.ends_at,
            });
            go_on_if(first.is_none())
        });
        first
    }
}
