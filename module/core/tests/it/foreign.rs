//! Changes to the keys by others: by Redisson's scripts, effect by effect, and by hands that know
//! nothing of locks.

use crate::keyspace::{Fields, Keyspace, Place, Value, number, timeout_key, writer_field};
use crate::world::{OWNERS, place};

/// The lease that Redisson gives a lock that its watchdog renews, in a test's scale.
const WATCHDOG_MS: i64 = 30;

/// One thing that others do to a lock's keys.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Change {
    /// Redisson's scripts.
    Read {
        owner: usize,
        lease_ms: i64,
    },
    Unread {
        owner: usize,
    },
    Write {
        owner: usize,
        lease_ms: i64,
    },
    Unwrite {
        owner: usize,
    },
    RenewRead {
        owner: usize,
    },
    RenewWrite {
        owner: usize,
    },
    ForceUnread,
    ForceUnwrite,
    /// A script takes it as a plain lock, whatever was there.
    Take {
        owner: usize,
        lease_ms: Option<i64>,
    },
    Delete,
    /// The key is called like another lock from now on, and a timeout key is not.
    Rename,
    Persist,
    Expire {
        ms: i64,
    },
    SetText,
    DeleteTimeout {
        owner: usize,
        number: i64,
    },
    PersistTimeout {
        owner: usize,
        number: i64,
    },
    /// A timeout key's value and end are overwritten.
    SetTimeout {
        owner: usize,
        number: i64,
        value: &'static str,
        ms: i64,
    },
    SetMode {
        value: &'static str,
    },
    SetFence {
        value: &'static str,
    },
    /// A script of an owner that is none of ours takes it to write, whatever was there.
    TakeToWrite {
        lease_ms: Option<i64>,
    },
    RemoveMode,
    SetCount {
        owner: usize,
        value: &'static str,
    },
    SetWriteCount {
        owner: usize,
        value: &'static str,
    },
    /// One more writer, even if another writes already.
    AddWriter {
        owner: usize,
    },
    RemoveCount {
        owner: usize,
    },
    RemoveWriteCount {
        owner: usize,
    },
}

/// Which locks it changes.
pub(crate) fn changed(lock: usize, change: Change) -> Vec<usize> {
    match change {
        Change::Rename => vec![lock, renamed(lock)],
        _ => vec![lock],
    }
}

/// The name that RENAME gives a lock, in the same database.
fn renamed(lock: usize) -> usize {
    match lock {
        0 => 1,
        1 => 0,
        other => other,
    }
}

/// Does it.
pub(crate) fn make(space: &mut Keyspace, lock: usize, change: Change, wall_ms: i64) {
    let at = &place(lock);
    match change {
        Change::Read { owner, lease_ms } => read(space, at, OWNERS[owner], lease_ms, wall_ms),
        Change::Unread { owner } => unread(space, at, OWNERS[owner]),
        Change::Write { owner, lease_ms } => write(space, at, OWNERS[owner], lease_ms, wall_ms),
        Change::Unwrite { owner } => unwrite(space, at, OWNERS[owner]),
        Change::RenewRead { owner } => renew_read(space, at, OWNERS[owner], wall_ms),
        Change::RenewWrite { owner } => {
            if space.field(at, &writer_field(OWNERS[owner])).is_some() {
                expire_at(space, at, wall_ms + WATCHDOG_MS);
            }
        }
        Change::ForceUnread => {
            if space.mode(at) == Some(b"read") {
                space.delete(at);
            }
        }
        Change::ForceUnwrite => {
            if space.mode(at) == Some(b"write") {
                space.delete(at);
            }
        }
        _ => by_hand(space, lock, change, wall_ms),
    }
}

fn by_hand(space: &mut Keyspace, lock: usize, change: Change, wall_ms: i64) {
    let at = &place(lock);
    match change {
        Change::Take { owner, lease_ms } => {
            let fields = Fields::from([(OWNERS[owner].to_vec(), b"1".to_vec())]);
            space.set(at, Value::Hash(fields), lease_ms.map(|ms| wall_ms + ms));
        }
        Change::Delete => {
            space.delete(at);
        }
        Change::Rename => {
            if let Some(entry) = space.delete(at) {
                space.set(&place(renamed(lock)), entry.value, entry.ends_at);
            }
        }
        Change::Persist => persist(space, at),
        Change::Expire { ms } => expire_at(space, at, wall_ms + ms),
        Change::SetText => space.set(at, Value::Text(b"text".to_vec()), None),
        Change::DeleteTimeout { owner, number } => {
            space.delete(&timeout_key(at, OWNERS[owner], number));
        }
        Change::PersistTimeout { owner, number } => {
            persist(space, &timeout_key(at, OWNERS[owner], number));
        }
        Change::SetTimeout {
            owner,
            number,
            value,
            ms,
        } => {
            let value = Value::Text(value.as_bytes().to_vec());
            let key = timeout_key(at, OWNERS[owner], number);
            space.set(&key, value, Some(wall_ms + ms));
        }
        Change::SetFence { value } => space.set_field(at, b"fence", value),
        Change::TakeToWrite { lease_ms } => {
            let fields = [("mode", "write"), ("W:write", "1")];
            let bytes = |text: &str| text.as_bytes().to_vec();
            let fields = fields.map(|(field, value)| (bytes(field), bytes(value)));
            let ends_at = lease_ms.map(|ms| wall_ms + ms);
            space.set(at, Value::Hash(Fields::from(fields)), ends_at);
        }
        Change::SetMode { value } => space.set_field(at, b"mode", value),
        Change::RemoveMode => {
            space.remove_field(at, b"mode");
        }
        Change::SetCount { owner, value } => space.set_field(at, OWNERS[owner], value),
        Change::SetWriteCount { owner, value } => {
            // One writer is enough for anybody.
            let writers = space.writers(at);
            if writers.iter().any(|of| of != OWNERS[owner]) {
                return;
            }
            space.set_field(at, &writer_field(OWNERS[owner]), value);
        }
        Change::AddWriter { owner } => {
            space.set_field(at, &writer_field(OWNERS[owner]), "1");
        }
        Change::RemoveCount { owner } => {
            space.remove_field(at, OWNERS[owner]);
        }
        Change::RemoveWriteCount { owner } => {
            space.remove_field(at, &writer_field(OWNERS[owner]));
        }
        _ => {}
    }
}

// --- Redisson's scripts --------------------------------------------------------------------------

fn read(space: &mut Keyspace, at: &Place, owner: &[u8], lease_ms: i64, wall_ms: i64) {
    let is_other = space.get(at).is_some() && space.fields(at).is_none();
    let mode = space.mode(at).map(<[u8]>::to_vec);
    let may_read = match mode.as_deref() {
        // Where a plain lock's hash is, it writes into it: it looks for the mode alone.
        None => !is_other,
        Some(b"read") => true,
        Some(b"write") => space.field(at, &writer_field(owner)).is_some(),
        Some(_) => false,
    };
    let Some(count) = count_up(space, at, owner, 1).filter(|_| may_read) else {
        return;
    };
    let end = wall_ms + lease_ms;
    if mode.is_none() {
        space.set_field(at, b"mode", "read");
        space.set_field(at, owner, "1");
        space.set(&timeout_key(at, owner, 1), one(), Some(end));
        return expire_at(space, at, end);
    }
    space.set_field(at, owner, count.to_string());
    space.set(&timeout_key(at, owner, count), one(), Some(end));
    let present = space.get(at).and_then(|entry| entry.ends_at);
    expire_at(space, at, end.max(present.unwrap_or(end)));
}

fn unread(space: &mut Keyspace, at: &Place, owner: &[u8]) {
    if space.mode(at).is_none() || space.field(at, owner).is_none() {
        return;
    }
    let Some(count) = count_up(space, at, owner, -1) else {
        return;
    };
    space.set_field(at, owner, count.to_string());
    if count == 0 {
        space.remove_field(at, owner);
    }
    space.delete(&timeout_key(at, owner, count + 1));
    let fields = space.fields(at).cloned().unwrap_or_default();
    if fields.len() > 1 {
        let longest = fields
            .iter()
            .filter_map(|(field, value)| Some((field, number(value)?)))
            .flat_map(|(field, count)| (1..=count.min(9)).map(|i| timeout_key(at, field, i)))
            .filter_map(|key| space.get(&key)?.ends_at)
            .max();
        if let Some(longest) = longest {
            return expire_at(space, at, longest);
        }
        if space.mode(at) == Some(b"write") {
            return;
        }
    }
    space.delete(at);
}

fn write(space: &mut Keyspace, at: &Place, owner: &[u8], lease_ms: i64, wall_ms: i64) {
    let field = writer_field(owner);
    let is_own = space.field(at, &field).is_some();
    match space.mode(at) {
        None if space.get(at).is_none() || space.fields(at).is_some() => {
            space.set_field(at, b"mode", "write");
            space.set_field(at, &field, "1");
            expire_at(space, at, wall_ms + lease_ms);
        }
        Some(b"write") if is_own => {
            if let Some(count) = count_up(space, at, &field, 1) {
                space.set_field(at, &field, count.to_string());
                let present = space.get(at).and_then(|entry| entry.ends_at);
                expire_at(space, at, present.unwrap_or(wall_ms) + lease_ms);
            }
        }
        _ => {}
    }
}

fn unwrite(space: &mut Keyspace, at: &Place, owner: &[u8]) {
    let field = writer_field(owner);
    if space.mode(at) != Some(b"write") || space.field(at, &field).is_none() {
        return;
    }
    match count_up(space, at, &field, -1) {
        Some(count) if count > 0 => space.set_field(at, &field, count.to_string()),
        Some(_) => {
            space.remove_field(at, &field);
            if space.fields(at).is_some_and(|fields| fields.len() == 1) {
                space.delete(at);
            } else {
                space.set_field(at, b"mode", "read");
            }
        }
        None => {}
    }
}

fn renew_read(space: &mut Keyspace, at: &Place, owner: &[u8], wall_ms: i64) {
    let count = space.field(at, owner).and_then(|value| number(value));
    let Some(count) = count else { return };
    for number in 1..=count.min(9) {
        expire_at(
            space,
            &timeout_key(at, owner, number),
            wall_ms + WATCHDOG_MS,
        );
    }
    expire_at(space, at, wall_ms + WATCHDOG_MS);
}

/// The count that HINCRBY would leave; none where it is an error, and for numbers that no test
/// counts to.
fn count_up(space: &Keyspace, at: &Place, field: &[u8], by: i64) -> Option<i64> {
    match space.field(at, field) {
        None => Some(by),
        Some(value) => Some(number(value).filter(|count| (-9..9).contains(count))? + by),
    }
}

fn one() -> Value {
    Value::Text(b"1".to_vec())
}

fn expire_at(space: &mut Keyspace, key: &Place, end: i64) {
    if let Some(entry) = space.get_mut(key) {
        entry.ends_at = Some(end);
    }
}

fn persist(space: &mut Keyspace, key: &Place) {
    if let Some(entry) = space.get_mut(key) {
        entry.ends_at = None;
    }
}
