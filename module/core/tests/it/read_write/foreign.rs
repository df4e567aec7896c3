//! What others do to the keys: Redisson's scripts, effect by effect, and hands that know nothing of
//! locks.

use super::keyspace::{Fields, Keyspace, Value, number, timeout_key, writer_field};
use super::world::{LOCKS, OWNERS};

/// What Redisson gives a lock that its watchdog renews, in a test's scale.
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
    TakePlain {
        owner: usize,
        lease_ms: Option<i64>,
    },
    Delete,
    /// The key is called like the other lock from now on, and a timeout key is not.
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
    RemoveMode,
    SetCount {
        owner: usize,
        value: &'static str,
    },
    SetWriteCount {
        owner: usize,
        value: &'static str,
    },
    /// One more, whoever writes already.
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
        Change::Rename => (0..LOCKS.len()).collect(),
        _ => vec![lock],
    }
}

/// Does it.
pub(crate) fn make(space: &mut Keyspace, lock: usize, change: Change, wall_ms: i64) {
    let name = LOCKS[lock];
    match change {
        Change::Read { owner, lease_ms } => read(space, name, OWNERS[owner], lease_ms, wall_ms),
        Change::Unread { owner } => unread(space, name, OWNERS[owner]),
        Change::Write { owner, lease_ms } => write(space, name, OWNERS[owner], lease_ms, wall_ms),
        Change::Unwrite { owner } => unwrite(space, name, OWNERS[owner]),
        Change::RenewRead { owner } => renew_read(space, name, OWNERS[owner], wall_ms),
        Change::RenewWrite { owner } => {
            if space.field(name, &writer_field(OWNERS[owner])).is_some() {
                expire_at(space, name, wall_ms + WATCHDOG_MS);
            }
        }
        Change::ForceUnread => {
            if space.mode(name) == Some(b"read") {
                space.delete(name);
            }
        }
        Change::ForceUnwrite => {
            if space.mode(name) == Some(b"write") {
                space.delete(name);
            }
        }
        _ => by_hand(space, lock, change, wall_ms),
    }
}

fn by_hand(space: &mut Keyspace, lock: usize, change: Change, wall_ms: i64) {
    let name = LOCKS[lock];
    match change {
        Change::TakePlain { owner, lease_ms } => {
            let fields = Fields::from([(OWNERS[owner].to_vec(), b"1".to_vec())]);
            space.set(name, Value::Hash(fields), lease_ms.map(|ms| wall_ms + ms));
        }
        Change::Delete => {
            space.delete(name);
        }
        Change::Rename => {
            if let Some(entry) = space.delete(name) {
                space.set(LOCKS[1 - lock], entry.value, entry.ends_at);
            }
        }
        Change::Persist => persist(space, name),
        Change::Expire { ms } => expire_at(space, name, wall_ms + ms),
        Change::SetText => space.set(name, Value::Text(b"text".to_vec()), None),
        Change::DeleteTimeout { owner, number } => {
            space.delete(&timeout_key(name, OWNERS[owner], number));
        }
        Change::PersistTimeout { owner, number } => {
            persist(space, &timeout_key(name, OWNERS[owner], number));
        }
        Change::SetTimeout {
            owner,
            number,
            value,
            ms,
        } => {
            let value = Value::Text(value.as_bytes().to_vec());
            let key = timeout_key(name, OWNERS[owner], number);
            space.set(&key, value, Some(wall_ms + ms));
        }
        Change::SetMode { value } => space.set_field(name, b"mode", value),
        Change::RemoveMode => {
            space.remove_field(name, b"mode");
        }
        Change::SetCount { owner, value } => space.set_field(name, OWNERS[owner], value),
        Change::SetWriteCount { owner, value } => {
            // One writer is enough for anybody.
            let writers = space.writers(name);
            if writers.iter().any(|of| of != OWNERS[owner]) {
                return;
            }
            space.set_field(name, &writer_field(OWNERS[owner]), value);
        }
        Change::AddWriter { owner } => {
            space.set_field(name, &writer_field(OWNERS[owner]), "1");
        }
        Change::RemoveCount { owner } => {
            space.remove_field(name, OWNERS[owner]);
        }
        Change::RemoveWriteCount { owner } => {
            space.remove_field(name, &writer_field(OWNERS[owner]));
        }
        _ => {}
    }
}

// --- Redisson's scripts --------------------------------------------------------------------------

fn read(space: &mut Keyspace, name: &[u8], owner: &[u8], lease_ms: i64, wall_ms: i64) {
    let is_other = space.get(name).is_some() && space.fields(name).is_none();
    let mode = space.mode(name).map(<[u8]>::to_vec);
    let may_read = match mode.as_deref() {
        // Where a plain lock's hash is, it writes into it: it looks for the mode alone.
        None => !is_other,
        Some(b"read") => true,
        Some(b"write") => space.field(name, &writer_field(owner)).is_some(),
        Some(_) => false,
    };
    let Some(count) = count_up(space, name, owner, 1).filter(|_| may_read) else {
        return;
    };
    let end = wall_ms + lease_ms;
    if mode.is_none() {
        space.set_field(name, b"mode", "read");
        space.set_field(name, owner, "1");
        space.set(&timeout_key(name, owner, 1), one(), Some(end));
        return expire_at(space, name, end);
    }
    space.set_field(name, owner, count.to_string());
    space.set(&timeout_key(name, owner, count), one(), Some(end));
    let present = space.get(name).and_then(|entry| entry.ends_at);
    expire_at(space, name, end.max(present.unwrap_or(end)));
}

fn unread(space: &mut Keyspace, name: &[u8], owner: &[u8]) {
    if space.mode(name).is_none() || space.field(name, owner).is_none() {
        return;
    }
    let Some(count) = count_up(space, name, owner, -1) else {
        return;
    };
    space.set_field(name, owner, count.to_string());
    if count == 0 {
        space.remove_field(name, owner);
    }
    space.delete(&timeout_key(name, owner, count + 1));
    let fields = space.fields(name).cloned().unwrap_or_default();
    if fields.len() > 1 {
        let longest = fields
            .iter()
            .filter_map(|(field, value)| Some((field, number(value)?)))
            .flat_map(|(field, count)| (1..=count.min(9)).map(|i| timeout_key(name, field, i)))
            .filter_map(|key| space.get(&key)?.ends_at)
            .max();
        if let Some(longest) = longest {
            return expire_at(space, name, longest);
        }
        if space.mode(name) == Some(b"write") {
            return;
        }
    }
    space.delete(name);
}

fn write(space: &mut Keyspace, name: &[u8], owner: &[u8], lease_ms: i64, wall_ms: i64) {
    let field = writer_field(owner);
    let is_own = space.field(name, &field).is_some();
    match space.mode(name) {
        None if space.get(name).is_none() || space.fields(name).is_some() => {
            space.set_field(name, b"mode", "write");
            space.set_field(name, &field, "1");
            expire_at(space, name, wall_ms + lease_ms);
        }
        Some(b"write") if is_own => {
            if let Some(count) = count_up(space, name, &field, 1) {
                space.set_field(name, &field, count.to_string());
                let present = space.get(name).and_then(|entry| entry.ends_at);
                expire_at(space, name, present.unwrap_or(wall_ms) + lease_ms);
            }
        }
        _ => {}
    }
}

fn unwrite(space: &mut Keyspace, name: &[u8], owner: &[u8]) {
    let field = writer_field(owner);
    if space.mode(name) != Some(b"write") || space.field(name, &field).is_none() {
        return;
    }
    match count_up(space, name, &field, -1) {
        Some(count) if count > 0 => space.set_field(name, &field, count.to_string()),
        Some(_) => {
            space.remove_field(name, &field);
            if space.fields(name).is_some_and(|fields| fields.len() == 1) {
                space.delete(name);
            } else {
                space.set_field(name, b"mode", "read");
            }
        }
        None => {}
    }
}

fn renew_read(space: &mut Keyspace, name: &[u8], owner: &[u8], wall_ms: i64) {
    let count = space.field(name, owner).and_then(|value| number(value));
    let Some(count) = count else { return };
    for number in 1..=count.min(9) {
        expire_at(
            space,
            &timeout_key(name, owner, number),
            wall_ms + WATCHDOG_MS,
        );
    }
    expire_at(space, name, wall_ms + WATCHDOG_MS);
}

/// What HINCRBY would leave; none where it is an error, and for numbers that no test counts to.
fn count_up(space: &Keyspace, name: &[u8], field: &[u8], by: i64) -> Option<i64> {
    match space.field(name, field) {
        None => Some(by),
        Some(value) => Some(number(value).filter(|count| (-9..9).contains(count))? + by),
    }
}

fn one() -> Value {
    Value::Text(b"1".to_vec())
}

fn expire_at(space: &mut Keyspace, key: &[u8], end: i64) {
    if let Some(entry) = space.get_mut(key) {
        entry.ends_at = Some(end);
    }
}

fn persist(space: &mut Keyspace, key: &[u8]) {
    if let Some(entry) = space.get_mut(key) {
        entry.ends_at = None;
    }
}
