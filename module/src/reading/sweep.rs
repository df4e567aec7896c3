//! Finds the fields of readers, and of holders of permits, whose leases are over.

use crate::ffi::{OwnedStr, Scan};
use crate::memory::state;
use crate::reading::open_lock::{OpenLock, go_on_if};
use crate::reading::read_write::{ReadWriteHash, has_looks};
use rlock_core::{LockKey, Now, PermitsHold, is_permits_mode};
use std::rc::Rc;

/// How many fields one part of a sweep looks at, each reader by its timeout keys.
const SWEPT_AT_ONCE: usize = 1000;

/// Such fields in the next part of this lock's hash. True if the hash has more parts.
pub(crate) fn next_part(lock: &OpenLock<'_>, now: Now) -> (Vec<Box<[u8]>>, bool) {
    let (db, name) = (lock.ctx.db(), Rc::from(lock.name.bytes()));
    let key = LockKey { db, name };
    let last = state::with(|state| state.sweep.take());
    let last = last.filter(|(swept, _)| *swept == key);
    let scan = last.map_or_else(Scan::begin, |(_, scan)| scan);
    let mut over = Vec::new();
    let more = walk(lock, &scan, now, &mut over);
    if more {
        state::with(|state| state.sweep = Some((key, scan)));
    }
    if !lock.is_up_to_date() {
        // A key expired during the walk. The walk cannot be repeated, so its results are checked
        // again.
        over = lock.read(|lock| still_over(lock, &over, now));
    }
    (over, more)
}

/// Continues a walk through the fields. True if there are more.
fn walk(lock: &OpenLock<'_>, scan: &Scan, now: Now, over: &mut Vec<Box<[u8]>>) -> bool {
    let Some(is_over) = is_over(lock, now) else {
        return false;
    };
    let mut looked_at = 0_usize;
    lock.key.each_field_from(scan, |field, value| {
        looked_at = looked_at.saturating_add(1);
        if is_over(field, value) {
            over.push(field.into());
        }
        go_on_if(looked_at < SWEPT_AT_ONCE && has_looks())
    })
}

/// Those of the given fields that still exist, with leases that are over.
fn still_over(lock: &OpenLock<'_>, fields: &[Box<[u8]>], now: Now) -> Vec<Box<[u8]>> {
    let Some(is_over) = is_over(lock, now) else {
        return Vec::new();
    };
    let value = |field: &[u8]| lock.key.hash_get_one(OwnedStr::new(field).as_str());
    let over = fields
        .iter()
        .filter(|field| value(field).is_some_and(|value| is_over(field, value.as_str().bytes())));
    over.cloned().collect()
}

/// Tells from a field and its value whether it is a hold whose lease is over. None for a key that
/// is neither a read-write lock nor permits.
fn is_over<'l>(
    lock: &'l OpenLock<'_>,
    now: Now,
) -> Option<impl Fn(&[u8], &[u8]) -> bool + use<'l>> {
    let mode = lock.mode()?;
    let is_of_permits = is_permits_mode(mode.as_str().bytes());
    let hash = ReadWriteHash::new(lock, &mode);
    Some(move |field: &[u8], value: &[u8]| {
        if is_of_permits {
            PermitsHold::from_field(value).is_some_and(|hold| hold.is_over(now))
        } else {
            hash.is_reader_over(field, value)
        }
    })
}
