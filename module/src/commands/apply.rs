//! `RLOCK.APPLY key change [key change ...]`: what a primary with `rlock.replicate` `compact` tells
//! its replicas and its append-only file, in place of plain commands.
//!
//! Replies OK. It is no command for clients: they, scripts and other modules are refused. Whatever
//! bytes arrive, all of them are looked at before anything is changed.
//!
//! Each step does to its key what its plain command would, with the same events. Replicated as it
//! came, for the append-only file of a replica.

use crate::effects::{Pair, Word};
use crate::ffi::{
    self, Args, Argument, ArgumentKind, Command, Ctx, EventClass, Key, KeyType, Keys,
};
use crate::ffi::{OwnedStr, Spec, Str};
use crate::publish;
use crate::state::{self, Words};
use rlock_core::change::{Step, StepValue, Steps};
use rlock_core::{CommandError, Text};
use std::ffi::CStr;
use std::rc::Rc;

pub(super) struct Apply;

impl Command for Apply {
    const SPEC: Spec = Spec {
        name: c"rlock.apply",
        summary: c"Applies a change of locks that the primary or the append-only file tells of.",
        complexity: c"O(N) with N steps of the change",
        since: c"0.1.0",
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
        if !ctx.is_replayed() {
            return Err(CommandError::NotReplayed);
        }
        if !each_change(args, |_, _| ()) {
            state::with(|state| count(&mut state.changes_refused));
            return Err(CommandError::NoChange);
        }
        state::with(|state| count(&mut state.changes_applied));
        // First of all: what others do when they hear of the change comes after it.
        ctx.replicate_verbatim();
        let words = state::with(|state| Rc::clone(&state.words));
        let mut is_wrong_type = false;
        each_change(args, |key, steps| {
            is_wrong_type |= Applied::new(ctx, key, &words).run(steps);
        });
        if is_wrong_type {
            return Err(CommandError::WrongType);
        }
        ctx.reply_ok();
        Ok(())
    }
}

fn count(counter: &mut u64) {
    *counter = counter.saturating_add(1);
}

/// Calls `on_each` with every key and its change. False if one is no change.
fn each_change<'a>(args: Args<'a>, mut on_each: impl FnMut(Str<'a>, Steps<'a>)) -> bool {
    let mut place = 1;
    while let Ok(key) = args.at(place) {
        let change = args.at(place.saturating_add(1)).ok();
        let Some(steps) = change.and_then(|change| Steps::of(key.bytes(), change.bytes())) else {
            return false;
        };
        on_each(key, steps);
        place = place.saturating_add(2);
    }
    true
}

type Event = (EventClass, &'static CStr);

/// A lock's key while a change is applied to it.
struct Applied<'a> {
    ctx: Ctx<'a>,
    name: Str<'a>,
    words: &'a Words,
    /// Closed while others hear of events.
    key: Key<'a>,
    events: Vec<Event>,
}

impl<'a> Applied<'a> {
    fn new(ctx: Ctx<'a>, name: Str<'a>, words: &'a Words) -> Self {
        Self {
            ctx,
            name,
            words,
            key: Key::open_to_write(ctx, name),
            events: Vec::new(),
        }
    }

    /// Applies all steps. Whether the key, or one beside it, was of another type than a step is for.
    fn run(mut self, mut steps: Steps<'_>) -> bool {
        let mut is_wrong_type = false;
        while let Some(step) = steps.next() {
            let is_of_hash = matches!(step, Step::Set { .. } | Step::Remove(_));
            let key_type = self.key.key_type();
            if is_of_hash && !matches!(key_type, KeyType::Missing | KeyType::Hash) {
                is_wrong_type = true;
                continue;
            }
            let is_there = key_type != KeyType::Missing;
            match step {
                Step::Set { field, value, more } => {
                    self.set(&field, &value, more, &mut steps);
                    self.event((EventClass::Hash, c"hset"));
                }
                Step::Remove(field) => self.remove(&field),
                Step::ExpireAt(at) if is_there => {
                    self.key.set_expires_at(at);
                    self.event((EventClass::Generic, c"expire"));
                }
                Step::Delete if is_there => {
                    self.key.delete();
                    self.event((EventClass::Generic, c"del"));
                }
                Step::ExpireAt(_) | Step::Delete => {}
                Step::SetSide { key, value, at } => self.set_side(&key, &value, at),
                Step::DeleteSide(key) => self.delete_side(&key),
                Step::Publish(message) => {
                    self.tell();
                    // The append-only file is no place for messages.
                    if !self.ctx.flags().loading() {
                        publish::replayed(self.ctx, self.name.bytes(), message, self.words);
                    }
                }
            }
        }
        self.tell();
        is_wrong_type
    }

    /// Sets a field, and the others of the same command.
    fn set(&mut self, field: &[u8], value: &StepValue<'_>, more: bool, steps: &mut Steps<'_>) {
        let first = self.pair(field, value);
        let second = more.then(|| steps.next()).flatten();
        let Some(Step::Set { field, value, more }) = second else {
            return self.key.hash_set(first.as_field());
        };
        let second = self.pair(&field, &value);
        self.key.hash_set_both(first.as_field(), second.as_field());
        if more && let Some(Step::Set { field, value, more }) = steps.next() {
            self.set(&field, &value, more, steps);
        }
    }

    fn pair(&self, field: &[u8], value: &StepValue<'_>) -> Pair<'a> {
        let mut buffer = Text::empty();
        let value = Word::of_bytes(value.bytes(&mut buffer), self.words);
        Pair(Word::of_bytes(field, self.words), value)
    }

    /// With its last field the hash goes as well.
    fn remove(&mut self, field: &[u8]) {
        let field = OwnedStr::new(field);
        if self.key.hash_get_one(field.as_str()).is_none() {
            return;
        }
        self.key.hash_delete(field.as_str());
        self.event((EventClass::Hash, c"hdel"));
        if self.key.key_type() == KeyType::Missing {
            self.event((EventClass::Generic, c"del"));
        }
    }

    fn set_side(&mut self, key: &[u8], value: &Text, at: Option<i64>) {
        self.tell();
        let (name, value) = (OwnedStr::new(key), OwnedStr::new(value.bytes()));
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

    fn event(&mut self, event: Event) {
        self.events.push(event);
    }

    /// Tells what was done to the lock's key so far.
    fn tell(&mut self) {
        if !self.events.is_empty() {
            self.key.set_aside();
            let events = std::mem::take(&mut self.events);
            self.tell_of(self.name, events);
        }
    }

    fn tell_of(&self, key: Str<'_>, events: impl IntoIterator<Item = Event>) {
        self.ctx.signal_modified(key);
        for (class, event) in events {
            self.ctx.notify(class, event, key);
        }
    }
}
