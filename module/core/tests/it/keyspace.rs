//! A keyspace in memory: keys with an expiry, hashes and one other type, read and written as the
//! module reads and writes the server's. A reader's lease is kept in keys of its own.

use rlock_core::{
    Count, Field, Hash, HeldBy, Known, Mode, NEVER, ReadDepth, ReadHold, ReadWrite, Stored, Token,
    Write, WriteHold,
};
use std::collections::BTreeMap;
use std::fmt;

/// A key's place: the database and the name.
pub(crate) type Place = (i32, Vec<u8>);

/// The fields of a hash.
pub(crate) type Fields = BTreeMap<Vec<u8>, Vec<u8>>;

#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub(crate) enum Value {
    Hash(Fields),
    Text(Vec<u8>),
}

#[derive(Clone, PartialEq, Eq, Hash)]
pub(crate) struct Entry {
    pub(crate) value: Value,
    /// In milliseconds of the wall clock; none if the key never expires.
    pub(crate) ends_at: Option<i64>,
}

/// How readers' leases are read.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
pub(crate) enum Reading {
    /// Every timeout key of everybody.
    #[default]
    All,
    /// As the module does, which asks nobody else where the end of the key answers for all.
    Short,
}

/// A live reader's hold.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Reader {
    /// None of a field that is no count.
    pub(crate) count: Option<i64>,
    pub(crate) token: Option<i64>,
    /// The end of its longest timeout key, or [`NEVER`].
    pub(crate) ends_at: i64,
}

#[derive(Clone, Default, PartialEq, Eq, Hash)]
pub(crate) struct Keyspace {
    keys: BTreeMap<Place, Entry>,
}

impl fmt::Debug for Entry {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match &self.value {
            Value::Text(value) => write!(f, "{}", value.escape_ascii())?,
            Value::Hash(fields) => {
                let shown = |bytes: &[u8]| bytes.escape_ascii().to_string();
                let fields = fields.iter();
                let mut map = f.debug_map();
                map.entries(fields.map(|(field, value)| (shown(field), shown(value))));
                map.finish()?;
            }
        }
        write!(f, " until {:?}", self.ends_at)
    }
}

impl fmt::Debug for Keyspace {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        for ((db, name), entry) in &self.keys {
            write!(f, "\n  {db}/{}: {entry:?}", name.escape_ascii())?;
        }
        Ok(())
    }
}

/// The key of a reader's entry with this number.
pub(crate) fn timeout_key((db, name): &Place, owner: &[u8], number: i64) -> Place {
    let tag = if name.contains(&b'{') {
        name.clone()
    } else {
        [b"{", name.as_slice(), b"}"].concat()
    };
    let number = number.to_string();
    let key = [&tag, owner, b"rwlock_timeout", number.as_bytes()].join(&b':');
    (*db, key)
}

pub(crate) fn writer_field(owner: &[u8]) -> Vec<u8> {
    [owner, b":write"].concat()
}

/// A number as a computer writes it.
pub(crate) fn number(value: &[u8]) -> Option<i64> {
    let text = str::from_utf8(value).ok()?;
    let number: i64 = text.parse().ok()?;
    (number.to_string() == text).then_some(number)
}

/// The count of a writer's field, and its token if we wrote it; none for any other value.
pub(crate) fn write_hold(value: &[u8]) -> Option<(i64, Option<i64>)> {
    let text = str::from_utf8(value).ok()?;
    let (count, token) = match text.split_once(":t") {
        None => (text, None),
        Some((count, token)) => (count, Some(number(token.as_bytes()).filter(|of| *of > 0)?)),
    };
    let count = number(count.as_bytes()).filter(|count| *count > 0)?;
    Some((count, token))
}

/// The token that a timeout key has, if it is ours.
fn token_of(key: &Entry) -> Option<i64> {
    match &key.value {
        Value::Text(value) => number(value).filter(|token| *token > 1),
        Value::Hash(_) => None,
    }
}

impl Keyspace {
    pub(crate) fn get(&self, key: &Place) -> Option<&Entry> {
        self.keys.get(key)
    }

    pub(crate) fn entries(&self) -> impl Iterator<Item = (&Place, &Entry)> {
        self.keys.iter()
    }

    pub(crate) fn get_mut(&mut self, key: &Place) -> Option<&mut Entry> {
        self.keys.get_mut(key)
    }

    pub(crate) fn set(&mut self, key: &Place, value: Value, ends_at: Option<i64>) {
        self.keys.insert(key.clone(), Entry { value, ends_at });
    }

    pub(crate) fn delete(&mut self, key: &Place) -> Option<Entry> {
        self.keys.remove(key)
    }

    pub(crate) fn flush(&mut self, db: Option<i32>) {
        self.keys
            .retain(|(of, _), _| db.is_some_and(|db| *of != db));
    }

    pub(crate) fn swap(&mut self, one: i32, other: i32) {
        let keys = std::mem::take(&mut self.keys);
        let swapped = keys.into_iter().map(|((db, name), entry)| {
            let db = match db {
                _ if db == one => other,
                _ if db == other => one,
                _ => db,
            };
            ((db, name), entry)
        });
        self.keys = swapped.collect();
    }

    /// Drops expired keys. A key lives through the millisecond that is its end.
    pub(crate) fn expire(&mut self, wall_ms: i64) {
        self.keys
            .retain(|_, entry| entry.ends_at.is_none_or(|end| wall_ms <= end));
    }

    pub(crate) fn fields(&self, at: &Place) -> Option<&Fields> {
        match &self.keys.get(at)?.value {
            Value::Hash(fields) => Some(fields),
            Value::Text(_) => None,
        }
    }

    pub(crate) fn field(&self, at: &Place, field: &[u8]) -> Option<&Vec<u8>> {
        self.fields(at)?.get(field)
    }

    /// `HSET`, which makes a missing hash and does nothing to another type.
    pub(crate) fn set_field(&mut self, at: &Place, field: &[u8], value: impl Into<Vec<u8>>) {
        let fresh = Entry {
            value: Value::Hash(Fields::new()),
            ends_at: None,
        };
        let entry = self.keys.entry(at.clone()).or_insert(fresh);
        if let Value::Hash(fields) = &mut entry.value {
            fields.insert(field.to_vec(), value.into());
        }
    }

    /// `HDEL`, which takes an empty hash away. Whether the field was there.
    pub(crate) fn remove_field(&mut self, at: &Place, field: &[u8]) -> bool {
        let Some(Value::Hash(fields)) = self.keys.get_mut(at).map(|entry| &mut entry.value) else {
            return false;
        };
        let was_there = fields.remove(field).is_some();
        if fields.is_empty() {
            self.keys.remove(at);
        }
        was_there
    }

    /// Whether a mode says that this is a read-write lock's hash.
    pub(crate) fn mode(&self, at: &Place) -> Option<&[u8]> {
        self.field(at, b"mode").map(Vec::as_slice)
    }

    /// The owners that hold it as a plain lock.
    pub(crate) fn plain_owners(&self, at: &Place) -> Vec<Vec<u8>> {
        let fields = self.fields(at).filter(|_| self.mode(at).is_none());
        let owners = fields.into_iter().flat_map(|fields| fields.keys());
        owners.filter(|field| *field != b"fence").cloned().collect()
    }

    pub(crate) fn writers(&self, at: &Place) -> Vec<Vec<u8>> {
        let fields = self.fields(at).filter(|_| self.mode(at).is_some());
        let fields = fields.into_iter().flat_map(|fields| fields.keys());
        fields
            .filter_map(|field| field.strip_suffix(b":write").map(<[u8]>::to_vec))
            .collect()
    }

    /// The token of a writer.
    pub(crate) fn write_token(&self, at: &Place, owner: &[u8]) -> Option<i64> {
        write_hold(self.field(at, &writer_field(owner))?)?.1
    }

    /// One hold of a lock, that of a writer before others.
    pub(crate) fn first_hold(&self, at: &Place) -> Option<HeldBy> {
        let writer = self.writers(at).into_iter().next();
        let token = writer.as_ref().and_then(|of| self.write_token(at, of));
        let owner = writer.map(Vec::into_boxed_slice);
        Some(HeldBy {
            mode: owner.as_ref().map_or(Mode::Plain, |_| Mode::Write),
            owner: owner.or_else(|| self.holders(at).into_iter().next())?,
            token: token.and_then(Token::new),
            ends_at: self.get(at)?.ends_at.unwrap_or(NEVER),
        })
    }

    /// The owners that have a field as readers, whether or not a lease of theirs is left.
    pub(crate) fn reader_fields(&self, at: &Place) -> Vec<Vec<u8>> {
        let fields = self.fields(at).filter(|_| self.mode(at).is_some());
        let fields = fields.into_iter().flat_map(|fields| fields.keys());
        let is_reader = |field: &&Vec<u8>| {
            *field != b"fence" && *field != b"mode" && !field.ends_with(b":write")
        };
        fields.filter(is_reader).cloned().collect()
    }

    /// The timeout keys that are there of those an owner's field counts, with their numbers.
    pub(crate) fn timeouts(&self, at: &Place, owner: &[u8]) -> Vec<(i64, &Entry)> {
        let count = self.field(at, owner).and_then(|value| number(value));
        let mut prefix = timeout_key(at, owner, 0);
        prefix.1.pop();
        let keys = self.keys.range(prefix.clone()..);
        let of = |(db, name): &Place| *db == prefix.0 && name.starts_with(&prefix.1);
        let keys = keys.take_while(|(key, _)| of(key));
        let mut found: Vec<(i64, &Entry)> = keys
            .filter_map(|(key, entry)| Some((number(&key.1[prefix.1.len()..])?, entry)))
            .filter(|(number, _)| *number >= 1 && count.is_some_and(|count| *number <= count))
            .collect();
        found.sort_by_key(|(number, _)| *number);
        found
    }

    /// A reader whose lease is not over. One whose field is no count has the lease of the hash.
    pub(crate) fn reader(&self, at: &Place, owner: &[u8]) -> Option<Reader> {
        if !self.reader_fields(at).contains(&owner.to_vec()) {
            return None;
        }
        let count = number(self.field(at, owner)?).filter(|count| *count >= 1);
        if count.is_none() {
            let ends_at = self.get(at)?.ends_at.unwrap_or(NEVER);
            let token = None;
            return Some(Reader {
                count,
                token,
                ends_at,
            });
        }
        // Ours has what the reader had when it was written; others' scripts may have entered since.
        let timeouts = self.timeouts(at, owner);
        let ours = timeouts
            .iter()
            .rposition(|(_, key)| token_of(key).is_some());
        let that_count = &timeouts[ours.unwrap_or(0)..];
        let ends = that_count.iter();
        let ends_at = ends.map(|(_, key)| key.ends_at.unwrap_or(NEVER)).max()?;
        Some(Reader {
            count,
            token: ours.and_then(|at| token_of(timeouts[at].1)),
            ends_at,
        })
    }

    pub(crate) fn readers(&self, at: &Place) -> Vec<(Vec<u8>, Reader)> {
        let fields = self.reader_fields(at).into_iter();
        let live = |owner: Vec<u8>| Some((owner.clone(), self.reader(at, &owner)?));
        fields.filter_map(live).collect()
    }

    /// The holders of a lock, in any mode.
    pub(crate) fn holders(&self, at: &Place) -> Vec<Box<[u8]>> {
        let readers = self.readers(at).into_iter().map(|(owner, _)| owner);
        let all = self.plain_owners(at).into_iter();
        let mut all: Vec<Vec<u8>> = all.chain(self.writers(at)).chain(readers).collect();
        all.sort();
        all.dedup();
        all.into_iter().map(Vec::into_boxed_slice).collect()
    }

    // --- What the core is shown ------------------------------------------------------------------

    /// The content of a lock's key, as the driver shows it to the core.
    pub(crate) fn read(&self, at: &Place, owner: &[u8], look: ReadDepth, how: Reading) -> Stored {
        let Some(Entry { value, ends_at }) = self.get(at) else {
            return Stored::Free;
        };
        let Value::Hash(fields) = value else {
            return Stored::OtherType;
        };
        if self.holders(at).is_empty() {
            return Stored::NoHolder;
        }
        if self.mode(at).is_none() {
            let owners = self.plain_owners(at);
            return Stored::Plain(Hash {
                own: fields.get(owner).map(|value| Count::from_field(value)),
                token: Known::read(fields.get(&b"fence"[..]).and_then(|t| Token::from_field(t))),
                others: owners.iter().any(|of| of != owner),
                ends_at: Known::read(*ends_at),
            });
        }
        let own_write = fields.get(&writer_field(owner));
        let own_write = own_write.map(|value| WriteHold::from_field(value));
        let writers = self.writers(at);
        let is_read = self.mode(at) == Some(b"read");
        let own_read = self.own_read(at, owner);
        if look == ReadDepth::Own && own_write.is_none() && own_read.is_none() {
            return Stored::NoHolder;
        }
        Stored::ReadWrite(ReadWrite {
            own_write,
            own_read,
            others_write: writers.iter().any(|of| of != owner) || (!is_read && own_write.is_none()),
            others_token: writers
                .iter()
                .filter(|of| *of != owner && look != ReadDepth::Own)
                .find_map(|of| self.write_token(at, of))
                .and_then(Token::new),
            others_read: self.others_read(at, owner, look, how),
            ends_at: Known::read(*ends_at),
            is_partial: false,
        })
    }

    fn own_read(&self, at: &Place, owner: &[u8]) -> Option<ReadHold> {
        let own = self.reader(at, owner)?;
        Some(ReadHold {
            count: own.count.map_or(Count::Malformed, Count::Valid),
            token: own.token.and_then(Token::new),
            ends_at: Known::read(own.ends_at),
        })
    }

    fn others_read(&self, at: &Place, owner: &[u8], look: ReadDepth, how: Reading) -> Option<i64> {
        let key_end = self.get(at)?.ends_at.unwrap_or(NEVER);
        let others = self.readers(at).into_iter();
        let longest = others
            .filter(|(of, _)| of != owner)
            .map(|(_, reader)| reader.ends_at)
            .max();
        let is_short = how == Reading::Short && self.mode(at) == Some(b"read");
        let own = self.reader(at, owner);
        let has_own = own.is_some() || self.writers(at).iter().any(|of| of == owner);
        let is_outlived = is_short && own.is_some_and(|own| own.ends_at < key_end);
        match look {
            ReadDepth::Own => return None,
            ReadDepth::Brief => return longest.map(|_| key_end),
            ReadDepth::WholeUnlessOutlived if is_outlived || !has_own => {
                return longest.map(|_| key_end);
            }
            ReadDepth::WholeUnlessOutlived | ReadDepth::Whole => {}
        }
        let mut others = self.readers(at).into_iter().filter(|(of, _)| of != owner);
        if is_short && others.any(|(_, reader)| reader.ends_at == key_end) {
            return Some(key_end);
        }
        longest
    }

    // --- What the core wants done ----------------------------------------------------------------

    /// Writes to a lock's keys.
    ///
    /// # Errors
    /// A write that the core must never ask for: a second holder, a write over another type, a
    /// deletion of nothing.
    pub(crate) fn carry_out(
        &mut self,
        at: &Place,
        caller: &[u8],
        write: &Write,
    ) -> Result<(), String> {
        if matches!(self.get(at), Some(entry) if matches!(entry.value, Value::Text(_))) {
            return Err("another type is written to".into());
        }
        match write {
            Write::Set(first, second) => {
                for (field, value) in [Some(first), second.as_ref()].into_iter().flatten() {
                    self.write_field(at, caller, field, *value, second.is_some())?;
                }
            }
            Write::Remove(field) => {
                if !self.remove_field(at, &field.name(caller)) {
                    return Err("a field is taken out that is not there".into());
                }
            }
            Write::ExpireAt(end) => {
                let entry = self.get_mut(at).ok_or("what is not there is to expire")?;
                entry.ends_at = Some(*end);
            }
            Write::Delete => {
                self.delete(at)
                    .ok_or("a key is deleted that is not there")?;
            }
            Write::SetTimeout(key, value, end) => {
                let owner = key.reader.name(caller);
                assert_eq!(
                    key.name(&at.1, caller),
                    timeout_key(at, owner, key.number).1
                );
                let value = Value::Text(value.text().bytes().to_vec());
                self.set(&timeout_key(at, owner, key.number), value, Some(*end));
            }
            Write::SetWriter(holder, count, token, is_first) => {
                let (owner, token) = (holder.name(caller), *token);
                match is_first {
                    true if self.get(at).is_none() => self.set_field(at, b"mode", "write"),
                    false if self.writers(at).contains(&owner.to_vec()) => {}
                    _ => return Err(format!("a second holder is let in: {owner:?}, to write")),
                }
                let value = format!("{count}:t{}", token.get());
                assert_eq!(WriteHold::text(*count, token).bytes(), value.as_bytes());
                self.set_field(at, &writer_field(owner), value);
            }
            Write::SetPermits(..) | Write::SetLimit(_) | Write::DeleteLimit => {
                return Err("nobody asks for permits".into());
            }
            Write::DeleteTimeout(key) => {
                self.delete(&timeout_key(at, key.reader.name(caller), key.number));
            }
        }
        Ok(())
    }

    fn write_field(
        &mut self,
        at: &Place,
        caller: &[u8],
        field: &Field,
        value: rlock_core::Value,
        with_token: bool,
    ) -> Result<(), String> {
        let is_read_write = self.mode(at).is_some();
        let text = value.text().bytes().to_vec();
        match field {
            Field::Fence if is_read_write => {
                return Err("a plain hold is written into a read-write lock".into());
            }
            Field::Mode | Field::Fence => {}
            Field::Owner(holder) if is_read_write => {
                let owner = holder.name(caller);
                // One of several entries that is given back may have been the last with a lease.
                let is_there = self.reader(at, owner).is_some()
                    || self.field(at, owner).and_then(|held| number(held)) > number(&text);
                // Where somebody else wrote several writers, each of them may read.
                let writers = self.writers(at);
                let is_in_the_way = !writers.is_empty() && !writers.contains(&owner.to_vec());
                if !is_there && is_in_the_way {
                    return Err(format!("a second holder is let in: {owner:?}, to read"));
                }
            }
            Field::Owner(holder) => {
                let owner = holder.name(caller);
                if self.field(at, owner).is_none() {
                    if !self.plain_owners(at).is_empty() {
                        return Err("a second owner is written into a lock that is held".into());
                    }
                    if !with_token {
                        return Err("a new hold is written without a token".into());
                    }
                }
            }
            Field::Writer(holder) => {
                let owner = holder.name(caller);
                let is_there = self.writers(at).contains(&owner.to_vec());
                if !is_read_write {
                    return Err("a writer is written into what is no read-write lock".into());
                }
                if !is_there && !self.holders(at).is_empty() {
                    return Err(format!("a second holder is let in: {owner:?}, to write"));
                }
            }
            Field::Named(_) => return Err("somebody else's field is written".into()),
        }
        self.set_field(at, &field.name(caller), text);
        Ok(())
    }

    /// Whether a hold is there that could stay for ever, though nobody else wrote it.
    pub(crate) fn is_endless(&self, at: &Place) -> bool {
        self.get(at).is_some_and(|entry| entry.ends_at.is_none())
    }

    /// The fields of readers with their counts, and of those whose leases are over.
    pub(crate) fn reader_counts(&self, at: &Place) -> Vec<(Box<[u8]>, Count)> {
        let fields = self.reader_fields(at).into_iter();
        let counted = fields.map(|field| {
            let count = Count::from_field(self.field(at, &field).unwrap());
            (field.into(), count)
        });
        counted.collect()
    }

    pub(crate) fn readers_gone(&self, at: &Place) -> Vec<Box<[u8]>> {
        let fields = self.reader_fields(at).into_iter();
        let gone = fields.filter(|field| self.reader(at, field).is_none());
        gone.map(Vec::into_boxed_slice).collect()
    }

    pub(crate) fn delete_latest_timeouts(&mut self, at: &Place) {
        for owner in self.reader_fields(at) {
            self.delete_latest_timeout(at, &owner);
        }
    }

    /// That of a reader's latest entry.
    pub(crate) fn delete_latest_timeout(&mut self, at: &Place, owner: &[u8]) {
        // A script can make a count that is none, and write a timeout key for it.
        let count = self.field(at, owner).and_then(|value| number(value));
        if let Some(count) = count.filter(|count| *count >= 1) {
            self.delete(&timeout_key(at, owner, count));
        }
    }

    /// Takes the fields out of those whose leases are over.
    pub(crate) fn sweep_readers(&mut self, at: &Place) {
        for owner in self.reader_fields(at) {
            if self.reader(at, &owner).is_none() {
                self.remove_field(at, &owner);
            }
        }
    }
}
