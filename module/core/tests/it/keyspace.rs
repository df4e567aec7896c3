//! A keyspace in memory: keys with an expiry, hashes and one other type, read and written as the
//! module reads and writes the server's. It has no timeout keys: whoever a read-write lock's hash
//! names as a reader holds nothing.

use rlock_core::{
    Count, FENCE_FIELD, Field, Hash, MODE_FIELD, ReadWrite, Stored, Token, WRITER_SUFFIX, Write,
};
use std::collections::BTreeMap;

/// A key's place: the database and the name.
pub(crate) type Place = (i32, Vec<u8>);

/// The fields of a hash.
pub(crate) type Fields = BTreeMap<Vec<u8>, Vec<u8>>;

#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub(crate) enum Value {
    Hash(Fields),
    Text,
}

#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub(crate) struct Entry {
    pub(crate) value: Value,
    /// In milliseconds of the wall clock; none if the key never expires.
    pub(crate) ends_at: Option<i64>,
}

#[derive(Clone, Debug, Default, PartialEq, Eq, Hash)]
pub(crate) struct Keyspace {
    entries: BTreeMap<Place, Entry>,
}

impl Keyspace {
    pub(crate) fn get(&self, place: &Place) -> Option<&Entry> {
        self.entries.get(place)
    }

    /// Who holds a lock.
    pub(crate) fn holders(&self, place: &Place) -> Vec<Box<[u8]>> {
        match self.get(place).map(|entry| &entry.value) {
            Some(Value::Hash(fields)) => owners(fields).map(Box::from).collect(),
            _ => Vec::new(),
        }
    }

    pub(crate) fn entries(&self) -> impl Iterator<Item = (&Place, &Entry)> {
        self.entries.iter()
    }

    pub(crate) fn get_mut(&mut self, place: &Place) -> Option<&mut Entry> {
        self.entries.get_mut(place)
    }

    pub(crate) fn set(&mut self, place: &Place, entry: Entry) {
        self.entries.insert(place.clone(), entry);
    }

    pub(crate) fn delete(&mut self, place: &Place) -> bool {
        self.entries.remove(place).is_some()
    }

    pub(crate) fn flush(&mut self, db: Option<i32>) {
        self.entries
            .retain(|(of, _), _| db.is_some_and(|db| *of != db));
    }

    pub(crate) fn swap(&mut self, one: i32, other: i32) {
        let entries = std::mem::take(&mut self.entries);
        let swapped = entries.into_iter().map(|((db, name), entry)| {
            let db = match db {
                _ if db == one => other,
                _ if db == other => one,
                _ => db,
            };
            ((db, name), entry)
        });
        self.entries = swapped.collect();
    }

    /// Drops what has expired. A key lives through the millisecond that is its end.
    pub(crate) fn expire(&mut self, wall_ms: i64) {
        self.entries
            .retain(|_, entry| entry.ends_at.is_none_or(|end| wall_ms <= end));
    }

    /// A hash as the driver shows it to the core.
    pub(crate) fn read(&self, place: &Place, owner: &[u8]) -> Stored {
        let Some(entry) = self.entries.get(place) else {
            return Stored::Free;
        };
        let Value::Hash(fields) = &entry.value else {
            return Stored::OtherType;
        };
        if owners(fields).next().is_none() {
            return Stored::NoHolder;
        }
        let others = owners(fields).any(|of| of != owner);
        if fields.contains_key(MODE_FIELD) {
            let own_writer = [owner, WRITER_SUFFIX].concat();
            let own_write = fields.get(&own_writer);
            return Stored::ReadWrite(ReadWrite {
                own_write: own_write.map(|value| Count::from_field(value)),
                own_read: None,
                others_write: others,
                others_read: None,
                ends_at: entry.ends_at,
                is_partial: false,
            });
        }
        let own = fields.get(owner).map(|value| Count::from_field(value));
        Stored::Plain(Hash {
            own,
            token: fields
                .get(FENCE_FIELD)
                .and_then(|value| Token::from_field(value)),
            others,
            ends_at: entry.ends_at,
        })
    }

    /// Writes to a lock's key.
    ///
    /// # Errors
    /// What the core must never ask for: a second holder, a write over another type, a new hold
    /// without a token, a deletion of nothing.
    pub(crate) fn carry_out(
        &mut self,
        place: &Place,
        caller: &[u8],
        write: &Write,
    ) -> Result<(), String> {
        match write {
            Write::Set(first, second) => {
                for (field, value) in [Some(first), second.as_ref()].into_iter().flatten() {
                    self.set_field(place, caller, field, *value, second.is_some())?;
                }
                Ok(())
            }
            Write::Remove(field) => {
                let left = match self.get_mut(place).map(|entry| &mut entry.value) {
                    Some(Value::Hash(fields)) => fields.remove(&*field.name(caller)),
                    _ => None,
                };
                left.map(|_| ())
                    .ok_or_else(|| "an owner leaves a hash in which it is not".into())
            }
            Write::ExpireAt(at) => {
                let entry = self
                    .get_mut(place)
                    .ok_or("what is not there is to expire")?;
                entry.ends_at = Some(*at);
                Ok(())
            }
            Write::Delete if self.delete(place) => Ok(()),
            Write::Delete => Err("a key is deleted that is not there".into()),
            // A lock that somebody else made a read-write one is broken, with all its readers.
            Write::DeleteTimeout(_) => Ok(()),
            Write::SetPermits(..) | Write::SetLimit(_) | Write::DeleteLimit => {
                Err("nobody asks for permits".into())
            }
            Write::SetTimeout(..) => {
                Err("a read-write lock is written, and none was asked for".into())
            }
        }
    }

    fn set_field(
        &mut self,
        place: &Place,
        caller: &[u8],
        field: &Field,
        value: rlock_core::Value,
        with_token: bool,
    ) -> Result<(), String> {
        let fresh = Entry {
            value: Value::Hash(Fields::new()),
            ends_at: None,
        };
        let entry = self.entries.entry(place.clone()).or_insert(fresh);
        let Value::Hash(fields) = &mut entry.value else {
            return Err("a hold is written over another type".into());
        };
        if fields.contains_key(MODE_FIELD) {
            return Err("a plain hold is written into a read-write lock".into());
        }
        match field {
            Field::Owner(_) if !fields.contains_key(&*field.name(caller)) => {
                if owners(fields).next().is_some() {
                    return Err("a second owner is written into a lock that is held".into());
                }
                if !with_token {
                    return Err("a new hold is written without a token".into());
                }
            }
            Field::Owner(_) | Field::Fence => {}
            Field::Writer(_) | Field::Mode | Field::Named(_) => {
                return Err("a read-write lock is written, and none was asked for".into());
            }
        }
        fields.insert(field.name(caller).to_vec(), value.text().bytes().to_vec());
        Ok(())
    }

    /// Whether a hold is there that could stay for ever, though nobody else wrote it.
    pub(crate) fn is_endless(&self, place: &Place) -> bool {
        self.get(place).is_some_and(|entry| entry.ends_at.is_none())
    }
}

/// Those who hold a lock: whom a plain lock's hash names, or the writer of a read-write lock.
pub(crate) fn owners(fields: &Fields) -> impl Iterator<Item = &[u8]> {
    let is_read_write = fields.contains_key(MODE_FIELD);
    let names = fields.keys().map(Vec::as_slice);
    names.filter_map(move |field| match field {
        _ if is_read_write => field.strip_suffix(WRITER_SUFFIX),
        _ if field == FENCE_FIELD => None,
        _ => Some(field),
    })
}
