//! `RLOCK.APPLY key change [key change ...]`: a change as a primary with `rlock.replicate`
//! `compact` sends it to its replicas and its append-only file, in place of plain commands.
//!
//! Clients, scripts and other modules are refused. All bytes are checked before anything is
//! changed.
//!
//! Each step changes its key as its plain command would, with the same events. Replicated
//! unchanged, for the append-only file of a replica.

use crate::ffi::{
    self, Args, Argument, ArgumentKind, Command, Ctx, EventClass, Key, KeyType, Keys, OwnedStr,
    ReplayedFrom, Spec, Str,
};
use crate::memory::state::{self, Words};
use crate::writing::effects::{Pair, Word};
use crate::writing::publish;
use rlock_core::change::{FieldName, FieldValue, Message, Name, NameBuffer, Step, Steps};
use rlock_core::{CommandError, Value, names};
use std::ffi::CStr;
use std::rc::Rc;

pub(super) struct Apply;

impl Command for Apply {
    const SPEC: Spec = Spec {
        name: c"rlock.apply",
        summary: c"Applies a change of locks that the primary or the append-only file tells of.",
        complexity: c"O(N) with N steps of the change",
        since: c"0.2.0",
        arity: -3,
        flags: c"write fast",
        categories: c"write fast dangerous lock",
        keys: Keys::EveryOther(ffi::Access::Update),
        arguments: &[Argument::many(
            c"key-and-change",
            ArgumentKind::Block(&[super::KEY, Argument::new(c"change", ArgumentKind::Text)]),
        )],
    };

    fn run(ctx: Ctx<'_>, args: Args<'_>) -> Result<(), CommandError> {
        let from = ctx.replayed_from().ok_or(CommandError::NotReplayed)?;
        if !each_change(args, |_, _| ()) {
            state::with(|state| count(&mut state.changes_refused));
            return Err(CommandError::NoChange);
        }
        let words = state::with(|state| {
            count(&mut state.changes_applied);
            Rc::clone(&state.words)
        });
        // Replicated before the first change: other modules hear of the change and may write in
        // response, and their writes must be replicated after it.
        ctx.replicate_verbatim();
        let mut is_wrong_type = false;
        each_change(args, |name, mut steps| {
            let mut applied = Applied {
                ctx,
                from,
                name,
                words: &words,
                key: Key::open_to_write(ctx, name),
                events: Events::default(),
            };
            is_wrong_type |= applied.run(&mut steps);
        });
        if is_wrong_type {
            return Err(CommandError::WrongType);
        }
        // No reply: neither the primary nor the append-only file reads one.
        Ok(())
    }
}

fn count(counter: &mut u64) {
    *counter = counter.saturating_add(1);
}

/// Calls `on_each` with every key and its change. False if a change cannot be understood.
fn each_change<'a>(args: Args<'a>, mut on_each: impl FnMut(Str<'a>, Steps<'a>)) -> bool {
    let mut place = 1;
    while let Ok(key) = args.at(place) {
        let change = args.at(place.saturating_add(1)).ok();
        let Some(steps) = change.and_then(|change| Steps::of(change.bytes())) else {
            return false;
        };
        on_each(key, steps);
        place = place.saturating_add(2);
    }
    true
}

type Event = (EventClass, &'static CStr);

/// Events of the lock's key that were not emitted yet.
#[derive(Default)]
struct Events {
    list: [Option<Event>; 4],
    len: usize,
}

/// A lock's key while a change is applied to it.
struct Applied<'a> {
    ctx: Ctx<'a>,
    from: ReplayedFrom,
    name: Str<'a>,
    words: &'a Words,
    /// Closed while events are emitted, since listeners may change the key.
    key: Key<'a>,
    events: Events,
}

impl<'a> Applied<'a> {
    /// Applies all steps. True if a step met a key of another type.
    fn run(&mut self, steps: &mut Steps<'_>) -> bool {
        let mut is_wrong_type = false;
        while let Some(step) = steps.next() {
            match step {
                Step::Set { field, value, more } => {
                    if self.is_of_other_type() {
                        is_wrong_type = true;
                        continue;
                    }
                    self.set(field, value, more, steps);
                    self.event((EventClass::Hash, c"hset"));
                }
                Step::Remove(_) if self.is_of_other_type() => is_wrong_type = true,
                Step::Remove(field) => self.remove(field.bytes(&mut NameBuffer::default())),
                Step::ExpireAt(at) if self.is_there() => {
                    self.key.set_expires_at(at);
                    self.event((EventClass::Generic, c"expire"));
                }
                Step::Delete if self.is_there() => {
                    self.key.delete();
                    self.event((EventClass::Generic, c"del"));
                }
                Step::ExpireAt(_) | Step::Delete => {}
                Step::SetTimeout {
                    reader,
                    number,
                    value,
                    at,
                } => self.set_side(&self.timeout_key(reader, number), value, Some(at)),
                Step::DeleteTimeout(reader, number) => {
                    self.delete_side(&self.timeout_key(reader, number));
                }
                Step::SetLimit(limit) => self.set_side(&self.limit_key(), limit, None),
                Step::DeleteLimit => self.delete_side(&self.limit_key()),
                Step::Publish(message) => self.publish(message),
            }
        }
        self.tell();
        is_wrong_type
    }

    fn is_of_other_type(&self) -> bool {
        !matches!(self.key.key_type(), KeyType::Missing | KeyType::Hash)
    }

    fn is_there(&self) -> bool {
        self.key.key_type() != KeyType::Missing
    }

    /// Sets a field, and the other fields of the same `HSET`.
    fn set(
        &mut self,
        field: FieldName<'_>,
        value: FieldValue<'_>,
        more: bool,
        steps: &mut Steps<'_>,
    ) {
        let first = self.pair(field, value);
        let second = more.then(|| steps.next()).flatten();
        let Some(Step::Set { field, value, more }) = second else {
            return self.key.hash_set(first.as_field());
        };
        let second = self.pair(field, value);
        self.key.hash_set_both(first.as_field(), second.as_field());
        let mut more = more;
        while more
            && let Some(Step::Set {
                field,
                value,
                more: another,
            }) = steps.next()
        {
            let next = self.pair(field, value);
            self.key.hash_set(next.as_field());
            more = another;
        }
    }

    fn pair(&self, field: FieldName<'_>, value: FieldValue<'_>) -> Pair<'a> {
        let field = match field {
            FieldName::Fence => Word::Known(self.words.fence.as_str()),
            FieldName::Mode => Word::Known(self.words.mode.as_str()),
            FieldName::Named(_) | FieldName::Writer(_) => {
                Word::Made(OwnedStr::new(&field.bytes(&mut NameBuffer::default())))
            }
        };
        let value = match value {
            FieldValue::Short(value) => Word::of_value(value, self.words),
            FieldValue::Permits(hold) => Word::Made(OwnedStr::new(hold.text().bytes())),
            FieldValue::Plain(bytes) => Word::Made(OwnedStr::new(bytes)),
        };
        Pair(field, value)
    }

    /// Removes a field. Without its last field the hash does not exist any more, so `del` is
    /// emitted too.
    fn remove(&mut self, field: &[u8]) {
        let field = OwnedStr::new(field);
        if self.key.hash_get_one(field.as_str()).is_none() {
            return;
        }
        self.key.hash_delete(field.as_str());
        self.event((EventClass::Hash, c"hdel"));
        if !self.is_there() {
            self.event((EventClass::Generic, c"del"));
        }
    }

    fn timeout_key(&self, reader: Name<'_>, number: i64) -> Vec<u8> {
        let reader = reader.bytes(&mut NameBuffer::default()).to_vec();
        names::timeout_key(self.name.bytes(), &reader, number)
    }

    fn limit_key(&self) -> Vec<u8> {
        names::limit_key(self.name.bytes())
    }

    fn set_side(&mut self, key: &[u8], value: i64, at: Option<i64>) {
        self.tell();
        let value = Word::of_value(Value::Number(value), self.words);
        let name = OwnedStr::new(key);
        let mut key = Key::open_to_write(self.ctx, name.as_str());
        key.set_string(value.as_str());
        if let Some(at) = at {
            key.set_expires_at(at);
        }
        drop(key);
        let expire = at.map(|_| (EventClass::Generic, c"expire"));
        let set = [(EventClass::String, c"set")].into_iter();
        self.tell_of(name.as_str(), set.chain(expire));
    }

    fn delete_side(&mut self, key: &[u8]) {
        self.tell();
        let name = OwnedStr::new(key);
        let mut key = Key::open_to_write(self.ctx, name.as_str());
        if key.key_type() != KeyType::Missing {
            key.delete();
            drop(key);
            self.tell_of(name.as_str(), [(EventClass::Generic, c"del")]);
        }
    }

    /// Not from the append-only file: the messages in it are of the past.
    fn publish(&mut self, message: Message) {
        self.tell();
        if self.from == ReplayedFrom::Primary {
            publish::replayed(self.ctx, self.name.bytes(), message, self.words);
        }
    }

    fn event(&mut self, event: Event) {
        if self.events.len >= self.events.list.len() {
            self.tell();
        }
        if let Some(place) = self.events.list.get_mut(self.events.len) {
            *place = Some(event);
            self.events.len = self.events.len.saturating_add(1);
        }
    }

    /// Emits the events of the lock's key that were noted so far.
    fn tell(&mut self) {
        if self.events.len > 0 {
            self.key.set_aside();
            let events = std::mem::take(&mut self.events);
            self.tell_of(self.name, events.list.into_iter().flatten());
        }
    }

    fn tell_of(&self, key: Str<'_>, events: impl IntoIterator<Item = Event>) {
        self.ctx.signal_modified(key);
        for (class, event) in events {
            self.ctx.notify(class, event, key);
        }
    }
}
