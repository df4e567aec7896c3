//! The keys of a server in memory, and the states that the core reads of them.
//!
//! It reads as the module does (`module/src/reading/`), from a map.

use std::collections::BTreeMap;

use rlock_core::{
    Count, FENCE_FIELD, Hash, Known, LockKey, MODE_FIELD, NEVER, Now, PERMITS_MODE, PermitsHash,
    PermitsHold, PermitsHolders, PermitsReading, PermitsRequest, ReadDepth, ReadHold, ReadWrite,
    Stored, Task, Token, Value, WRITER_SUFFIX, Write, WriteHold, is_permits_mode, names,
};

use crate::server::slot_of;

type Fields = BTreeMap<Vec<u8>, Vec<u8>>;

/// Readers with the counts in their fields.
pub(crate) type ReaderCounts = Vec<(Box<[u8]>, Count)>;

/// A key of a database.
pub(crate) type Place = (i32, Vec<u8>);

#[derive(Clone, Debug)]
pub(crate) enum Content {
    Hash(Fields),
    Text(Vec<u8>),
}

#[derive(Clone, Debug)]
pub(crate) struct Entry {
    content: Content,
    /// In milliseconds of the wall clock; none if the key never expires.
    ends_at: Option<i64>,
}

/// All keys, in order, so that two runs walk them alike.
#[derive(Clone, Debug, Default)]
pub(crate) struct Keyspace {
    keys: BTreeMap<Place, Entry>,
    /// Keys that were found expired, until the core is told of them.
    expired: Vec<Place>,
    /// How much was written so far.
    written: u64,
}

impl Keyspace {
    pub(crate) fn len(&self) -> usize {
        self.keys.len()
    }

    /// How much was written so far. A replica that has copied all of it has the same number.
    pub(crate) fn written(&self) -> u64 {
        self.written
    }

    fn wrote(&mut self) {
        self.written = self.written.saturating_add(1);
    }

    /// Takes the keys that were found expired since the last call.
    pub(crate) fn take_expired(&mut self) -> Vec<Place> {
        std::mem::take(&mut self.expired)
    }

    /// Deletes all keys whose time is over.
    pub(crate) fn expire(&mut self, now: Now) {
        let over = |entry: &Entry| entry.ends_at.is_some_and(|end| now.wall_ms() > end);
        let expired = self.keys.iter().filter(|(_, entry)| over(entry));
        let expired: Vec<Place> = expired.map(|(place, _)| place.clone()).collect();
        for place in &expired {
            self.keys.remove(place);
        }
        if !expired.is_empty() {
            self.expired.extend(expired);
            self.wrote();
        }
    }

    /// Deletes a key if its time is over: a lookup does that.
    fn expire_one(&mut self, place: &Place, now: Now) {
        let entry = self.keys.get(place);
        let ends_at = entry.and_then(|entry| entry.ends_at);
        if ends_at.is_some_and(|end| now.wall_ms() > end) {
            self.keys.remove(place);
            self.expired.push(place.clone());
            self.wrote();
        }
    }

    /// A lock's hash as it is now, with its expired keys deleted.
    pub(crate) fn open(&mut self, db: i32, name: &[u8], now: Now) -> Lock<'_> {
        let place = (db, name.to_vec());
        self.expire_one(&place, now);
        let fields = match self.keys.get(&place).map(|entry| &entry.content) {
            Some(Content::Hash(fields)) => fields.clone(),
            Some(Content::Text(_)) | None => Fields::new(),
        };
        for (reader, count) in readers(&fields) {
            let Count::Valid(count) = Count::from_field(&count) else {
                continue;
            };
            let timeout = names::timeout_key(name, &reader, count);
            self.expire_one(&(db, timeout), now);
        }
        Lock {
            keys: &self.keys,
            db,
            name: name.to_vec(),
            fields,
            now,
        }
    }

    /// Deletes a key as another client would. Returns whether it was there.
    pub(crate) fn delete(&mut self, db: i32, name: &[u8]) -> bool {
        self.wrote();
        self.keys.remove(&(db, name.to_vec())).is_some()
    }

    pub(crate) fn clear(&mut self) {
        self.wrote();
        self.keys.clear();
    }

    /// Takes all keys of a slot out.
    pub(crate) fn take_slot(&mut self, slot: u16) -> Self {
        self.wrote();
        let places = self.keys.keys().filter(|place| slot_of(&place.1) == slot);
        let places: Vec<Place> = places.cloned().collect();
        let taken = places.into_iter();
        Self {
            keys: taken
                .filter_map(|place| self.keys.remove_entry(&place))
                .collect(),
            ..Self::default()
        }
    }

    /// A copy of all keys of a slot.
    pub(crate) fn of_slot(&self, slot: u16) -> Self {
        let keys = self.keys.iter();
        let keys = keys.filter(|(place, _)| slot_of(&place.1) == slot);
        Self {
            keys: keys
                .map(|(place, of)| (place.clone(), of.clone()))
                .collect(),
            ..Self::default()
        }
    }

    /// The names of all keys of a slot.
    pub(crate) fn names_in(&self, slot: u16) -> impl Iterator<Item = &[u8]> {
        let names = self.keys.keys().map(|place| &place.1[..]);
        names.filter(move |name| slot_of(name) == slot)
    }

    /// Whether a key is there. If its time is over it is deleted.
    pub(crate) fn has(&mut self, db: i32, name: &[u8], now: Now) -> bool {
        let place = (db, name.to_vec());
        self.expire_one(&place, now);
        self.keys.contains_key(&place)
    }

    /// Takes a key out, with the time that it has left in the place of its end.
    pub(crate) fn take(&mut self, name: &[u8], now: Now) -> Option<Entry> {
        let place = (0, name.to_vec());
        self.expire_one(&place, now);
        let mut entry = self.keys.remove(&place)?;
        entry.ends_at = entry.ends_at.map(|end| end.saturating_sub(now.wall_ms()));
        self.wrote();
        Some(entry)
    }

    /// Puts a key in that was taken out elsewhere.
    pub(crate) fn put_one(&mut self, name: &[u8], mut entry: Entry, now: Now) {
        entry.ends_at = entry.ends_at.map(|left| left.saturating_add(now.wall_ms()));
        self.keys.insert((0, name.to_vec()), entry);
        self.wrote();
    }

    /// Puts keys in, in the place of those that are there.
    pub(crate) fn put(&mut self, keys: Self) {
        self.wrote();
        self.keys.extend(keys.keys);
    }

    /// Sets fields of a hash, which comes into being with them.
    fn set(&mut self, place: Place, set: impl FnOnce(&mut Fields)) {
        let fresh = Entry {
            content: Content::Hash(Fields::new()),
            ends_at: None,
        };
        let entry = self.keys.entry(place).or_insert(fresh);
        if let Content::Hash(fields) = &mut entry.content {
            set(fields);
        }
    }

    /// Carries a write of the core out.
    pub(crate) fn write(&mut self, lock: &LockKey, caller: &[u8], write: &Write) {
        self.wrote();
        let place = (lock.db, lock.name.to_vec());
        match write {
            Write::Set(first, second) => self.set(place, |fields| {
                for (field, value) in [Some(first), second.as_ref()].into_iter().flatten() {
                    fields.insert(field.name(caller).into_owned(), text(*value));
                }
            }),
            Write::SetPermits(holder, hold, is_first) => self.set(place, |fields| {
                if *is_first {
                    fields.insert(MODE_FIELD.to_vec(), PERMITS_MODE.to_vec());
                }
                let value = hold.text().bytes().to_vec();
                fields.insert(holder.name(caller).to_vec(), value);
            }),
            Write::SetWriter(holder, count, token, is_first) => self.set(place, |fields| {
                if *is_first {
                    fields.insert(MODE_FIELD.to_vec(), b"write".to_vec());
                }
                let value = WriteHold::text(*count, *token).bytes().to_vec();
                fields.insert(names::writer_field(holder.name(caller)), value);
            }),
            Write::Remove(field) => {
                let is_empty = match self.keys.get_mut(&place).map(|entry| &mut entry.content) {
                    Some(Content::Hash(fields)) => {
                        fields.remove(&*field.name(caller));
                        fields.is_empty()
                    }
                    Some(Content::Text(_)) | None => false,
                };
                if is_empty {
                    self.keys.remove(&place);
                }
            }
            Write::ExpireAt(at) => {
                if let Some(entry) = self.keys.get_mut(&place) {
                    entry.ends_at = Some(*at);
                }
            }
            Write::Delete => {
                self.keys.remove(&place);
            }
            Write::SetTimeout(key, value, at) => {
                let entry = Entry {
                    content: Content::Text(text(*value)),
                    ends_at: Some(*at),
                };
                let place = (lock.db, key.name(&lock.name, caller));
                self.keys.insert(place, entry);
            }
            Write::DeleteTimeout(key) => {
                self.keys.remove(&(lock.db, key.name(&lock.name, caller)));
            }
            Write::SetLimit(value) => {
                let entry = Entry {
                    content: Content::Text(text(*value)),
                    ends_at: None,
                };
                let place = (lock.db, names::limit_key(&lock.name));
                self.keys.insert(place, entry);
            }
            Write::DeleteLimit => {
                self.keys.remove(&(lock.db, names::limit_key(&lock.name)));
            }
        }
    }
}

fn text(value: Value) -> Vec<u8> {
    value.text().bytes().to_vec()
}

/// The fields of readers, if it is a read-write lock's hash.
fn readers(fields: &Fields) -> Vec<(Vec<u8>, Vec<u8>)> {
    let mode = fields.get(MODE_FIELD);
    if mode.is_none_or(|mode| is_permits_mode(mode)) {
        return Vec::new();
    }
    let is_reader = |field: &[u8]| {
        field != FENCE_FIELD && field != MODE_FIELD && !field.ends_with(WRITER_SUFFIX)
    };
    let readers = fields.iter().filter(|(field, _)| is_reader(field));
    readers
        .map(|(field, count)| (field.clone(), count.clone()))
        .collect()
}

/// A lock's key, as it is.
pub(crate) struct Lock<'a> {
    keys: &'a BTreeMap<Place, Entry>,
    db: i32,
    name: Vec<u8>,
    fields: Fields,
    now: Now,
}

impl Lock<'_> {
    fn entry(&self) -> Option<&Entry> {
        self.keys.get(&(self.db, self.name.clone()))
    }

    pub(crate) fn ends_at(&self) -> Option<i64> {
        self.entry().and_then(|entry| entry.ends_at)
    }

    pub(crate) fn is_read_write(&self) -> bool {
        self.fields.contains_key(MODE_FIELD) && !self.is_of_permits()
    }

    fn is_of_permits(&self) -> bool {
        let mode = self.fields.get(MODE_FIELD);
        mode.is_some_and(|mode| is_permits_mode(mode))
    }

    /// The stored state, as this owner sees it.
    pub(crate) fn load(&self, owner: &[u8], task: &Task) -> Stored {
        let stored = self.load_any(owner, task);
        match stored {
            Stored::Free | Stored::NoHolder if task.is_about_permits() => {
                let is_there = stored == Stored::NoHolder;
                let limit = self.limit();
                let reading = PermitsReading::new(owner, task.asked, limit, self.now);
                reading.found(None).with_hash(is_there).stored(true)
            }
            _ => stored,
        }
    }

    fn load_any(&self, owner: &[u8], task: &Task) -> Stored {
        match self.entry().map(|entry| &entry.content) {
            None => Stored::Free,
            Some(Content::Text(_)) => Stored::OtherType,
            Some(Content::Hash(_)) if self.is_read_write() => {
                self.load_read_write(owner, task.depth)
            }
            Some(Content::Hash(_)) if self.is_of_permits() => {
                let is_about_permits = task.is_about_permits();
                self.load_permits(owner, task.depth, task.asked, is_about_permits)
            }
            Some(Content::Hash(_)) => self.load_plain(owner, Some(task)),
        }
    }

    fn load_permits(
        &self,
        owner: &[u8],
        depth: ReadDepth,
        asked: Option<PermitsRequest>,
        is_about_permits: bool,
    ) -> Stored {
        let limit = self.limit().filter(|_| is_about_permits);
        let reading = PermitsReading::new(owner, asked, limit, self.now);
        let (hash, _) = self.read_permits(reading, owner, depth);
        hash.stored(is_about_permits)
    }

    /// The stored state for a queue whose first waiter asks for permits, and the other holders.
    pub(crate) fn load_for_queue(&self, owner: &[u8], task: &Task) -> (Stored, PermitsHolders) {
        if !self.is_of_permits() {
            return (self.load(owner, task), PermitsHolders::default());
        }
        let reading = PermitsReading::new(owner, task.asked, self.limit(), self.now);
        let (hash, others) = self.read_permits(reading.for_queue(), owner, task.depth);
        (hash.stored(true), others)
    }

    fn read_permits(
        &self,
        mut reading: PermitsReading<'_>,
        owner: &[u8],
        depth: ReadDepth,
    ) -> (PermitsHash, PermitsHolders) {
        if let Some(own) = self.fields.get(owner) {
            reading.field(owner, own);
        }
        if reading.needs_others(depth, self.ends_at()) {
            for (field, value) in self.fields.iter().filter(|(field, _)| *field != owner) {
                reading.field(field, value);
            }
        } else if depth != ReadDepth::Own {
            let mut others = self.fields.iter().filter(|(field, _)| *field != owner);
            others.any(|(_, value)| reading.other_in_brief(value));
        }
        let (hash, others) = reading.found_with_others(self.ends_at());
        (hash.with_hash(true), others)
    }

    fn limit(&self) -> Option<&[u8]> {
        let entry = self.keys.get(&(self.db, names::limit_key(&self.name)))?;
        match &entry.content {
            Content::Text(limit) => Some(limit),
            Content::Hash(_) => None,
        }
    }

    /// The holders of permits.
    fn permits(&self) -> impl Iterator<Item = (&[u8], PermitsHold)> {
        let fields = self.fields.iter().filter(|_| self.is_of_permits());
        let holds = fields
            .filter_map(|(owner, value)| Some((owner.as_slice(), PermitsHold::from_field(value)?)));
        holds.filter(|(_, hold)| !hold.is_over(self.now))
    }

    fn load_plain(&self, owner: &[u8], task: Option<&Task>) -> Stored {
        let own = self.fields.get(owner).map(|count| Count::from_field(count));
        let fence = self.fields.get(FENCE_FIELD);
        let others = self.owners().any(|of| of != owner);
        if own.is_none() && !others {
            return Stored::NoHolder;
        }
        let needs_end = task.is_none_or(|task| task.needs_end(own, others));
        let needs_token = task.is_none_or(|task| task.needs_token(own));
        Stored::Plain(Hash {
            own,
            token: Known::read_if(needs_token, || {
                fence.and_then(|fence| Token::from_field(fence))
            }),
            others,
            ends_at: Known::read_if(needs_end, || self.ends_at()),
        })
    }

    fn load_read_write(&self, owner: &[u8], depth: ReadDepth) -> Stored {
        let own_writer = names::writer_field(owner);
        let own_write = self.fields.get(&own_writer);
        let own_write = own_write.map(|value| WriteHold::from_field(value));
        let own_read = self.read_hold(owner);
        let says_read = self
            .fields
            .get(MODE_FIELD)
            .is_some_and(|mode| mode == b"read");
        let key_end = self.ends_at().unwrap_or(NEVER);
        let is_outlived = says_read && own_read.is_some_and(|own| own.ends_at() < key_end);
        let mut others_read = None;
        let (mut others_write, mut others_token) = (false, None);
        if depth != ReadDepth::Own {
            let mut writers = self.writers().filter(|(field, _)| **field != own_writer);
            if let Some((_, value)) = writers.next() {
                (others_write, others_token) = (true, WriteHold::from_field(value).token);
            }
            let others = self.fields.keys().filter(|field| *field != owner);
            let others = others.filter_map(|field| self.read_hold(field));
            others_read = others.map(|hold| hold.ends_at()).max();
            let has_own = own_read.is_some() || own_write.is_some();
            if depth.others_are_brief(has_own, is_outlived) {
                others_read = others_read.map(|_| key_end);
            }
        }
        if own_read.is_none() && own_write.is_none() && !others_write && others_read.is_none() {
            return Stored::NoHolder;
        }
        Stored::ReadWrite(ReadWrite {
            others_write: others_write || !(says_read || own_write.is_some()),
            others_token,
            own_write,
            own_read,
            others_read,
            ends_at: Known::read(self.ends_at()),
            is_partial: false,
        })
    }

    fn writers(&self) -> impl Iterator<Item = (&Vec<u8>, &Vec<u8>)> {
        self.fields
            .iter()
            .filter(|(field, _)| field.ends_with(WRITER_SUFFIX))
    }

    /// A reader's hold, if its timeout key is there. Nobody else's script has written others here.
    fn read_hold(&self, owner: &[u8]) -> Option<ReadHold> {
        let is_reader =
            owner != FENCE_FIELD && owner != MODE_FIELD && !owner.ends_with(WRITER_SUFFIX);
        let count = Count::from_field(self.fields.get(owner).filter(|_| is_reader)?);
        let Count::Valid(number) = count else {
            return Some(ReadHold {
                count,
                token: None,
                ends_at: Known::read(self.ends_at().unwrap_or(NEVER)),
            });
        };
        let name = names::timeout_key(&self.name, owner, number);
        let entry = self.keys.get(&(self.db, name))?;
        let token = match &entry.content {
            Content::Text(value) => Token::from_timeout(value),
            Content::Hash(_) => None,
        };
        Some(ReadHold {
            count,
            token,
            ends_at: Known::read(entry.ends_at.unwrap_or(NEVER)),
        })
    }

    /// The fields of a plain lock's owners.
    fn owners(&self) -> impl Iterator<Item = &[u8]> {
        let fields = self.fields.keys().map(Vec::as_slice);
        fields.filter(|field| *field != FENCE_FIELD && *field != MODE_FIELD)
    }

    /// The holders of the lock, or of its permits.
    pub(crate) fn holders(&self) -> Vec<Box<[u8]>> {
        if self.is_of_permits() {
            return self.permits().map(|(owner, _)| owner.into()).collect();
        }
        if !self.is_read_write() {
            return self.owners().map(Into::into).collect();
        }
        let writers = self
            .writers()
            .filter_map(|(field, _)| field.strip_suffix(WRITER_SUFFIX));
        let readers = readers(&self.fields).into_iter().map(|(reader, _)| reader);
        let readers = readers.filter(|reader| self.read_hold(reader).is_some());
        writers
            .map(Into::into)
            .chain(readers.map(Into::into))
            .collect()
    }

    /// How often this owner has entered the lock, or how many permits it has. Of a reader's entries
    /// some may have ended before the last.
    pub(crate) fn count(&self, owner: &[u8]) -> u64 {
        let mut permits = self.permits().filter(|(of, _)| *of == owner);
        if let Some((_, hold)) = permits.next() {
            return u64::try_from(hold.permits.get()).unwrap_or_default();
        }
        let number = |count: Option<Count>| match count {
            Some(Count::Valid(count)) => u64::try_from(count).unwrap_or_default(),
            _ => 0,
        };
        let own = self.fields.get(owner).map(|value| Count::from_field(value));
        let writes = self.is_read_write().then(|| names::writer_field(owner));
        let writes = writes.and_then(|field| self.fields.get(&field));
        let writes = writes.map(|value| WriteHold::from_field(value).count);
        number(own).saturating_add(number(writes))
    }

    /// For BREAK: the stored state, with the fields of a read-write lock's readers or of the
    /// holders of permits.
    pub(crate) fn load_for_holder(&self) -> (Stored, ReaderCounts) {
        let content = self.entry().map(|entry| &entry.content);
        let readers = readers(&self.fields);
        let readers = readers
            .into_iter()
            .map(|(reader, count)| (reader.into(), Count::from_field(&count)));
        let stored = match content {
            None => Stored::Free,
            Some(Content::Text(_)) => Stored::OtherType,
            Some(Content::Hash(_)) if self.is_read_write() => {
                // No owner is called like the lock's own field.
                let stored = self.load_read_write(FENCE_FIELD, ReadDepth::Brief);
                return (stored, readers.collect());
            }
            Some(Content::Hash(_)) if self.is_of_permits() => {
                let count = |hold: PermitsHold| Count::Valid(hold.permits.get());
                let holders = self.permits();
                let holders = holders.map(|(owner, hold)| (owner.into(), count(hold)));
                let stored = self.load_permits(FENCE_FIELD, ReadDepth::Whole, None, false);
                return (stored, holders.collect());
            }
            Some(Content::Hash(_)) => match self.owners().next() {
                Some(holder) => self.load_plain(holder, None),
                None => Stored::NoHolder,
            },
        };
        (stored, Vec::new())
    }

    /// The readers, or holders of permits, whose leases are over and whose fields are still there.
    pub(crate) fn readers_gone(&self) -> Vec<Box<[u8]>> {
        if self.is_of_permits() {
            let is_over = |value: &[u8]| {
                PermitsHold::from_field(value).is_some_and(|hold| hold.is_over(self.now))
            };
            let over = self.fields.iter().filter(|(_, value)| is_over(value));
            return over.map(|(field, _)| field.clone().into()).collect();
        }
        let readers = readers(&self.fields).into_iter().map(|(reader, _)| reader);
        let gone = readers.filter(|reader| self.read_hold(reader).is_none());
        gone.map(Into::into).collect()
    }
}
