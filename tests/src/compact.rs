//! `rlock.replicate compact`: the same tests in both settings, and `RLOCK.APPLY` as the plain
//! commands that it stands for.

use std::cell::Cell;
use std::env;
use std::fmt::Write as _;

use rlock_core::change::{Message, NameBuffer, Step, Steps};
use rlock_core::{Mode, Text, names};

use crate::reply::Reply;

thread_local! {
    static IS_COMPACT: Cell<bool> = const { Cell::new(false) };
}

/// Runs a test with servers that replicate in the compact form. A replica of theirs that would have
/// no module ([`crate::Pair::with_plain_replica`]) has it, and is set to the plain form.
pub fn in_compact_form(test: impl FnOnce()) {
    let _set = Set::begin();
    test();
}

/// While it lives, the form is the compact one.
struct Set;

impl Set {
    fn begin() -> Self {
        IS_COMPACT.set(true);
        Self
    }
}

impl Drop for Set {
    fn drop(&mut self) {
        IS_COMPACT.set(false);
    }
}

/// Whether servers that are started now, by this thread, replicate in the compact form:
/// [`in_compact_form`], or `RLOCK_REPLICATE=compact`.
pub fn is_compact() -> bool {
    IS_COMPACT.get() || env::var("RLOCK_REPLICATE").is_ok_and(|value| value == "compact")
}

/// A propagated command as plain commands: what `RLOCK.APPLY` stands for, or else itself.
pub(crate) fn plain_commands(command: &Reply) -> Vec<String> {
    let words: Vec<&[u8]> = command.array().iter().map(bytes).collect();
    let Some((_, changes)) = words
        .split_first()
        .filter(|(name, _)| name.eq_ignore_ascii_case(b"RLOCK.APPLY"))
    else {
        let mut words = command.texts();
        words[0] = words[0].to_uppercase();
        return vec![words.join(" ")];
    };
    let (pairs, rest) = changes.as_chunks::<2>();
    assert!(rest.is_empty(), "a key without a change: {command:?}");
    pairs
        .iter()
        .flat_map(|[key, change]| steps_of(key, change))
        .collect()
}

fn bytes(word: &Reply) -> &[u8] {
    match word {
        Reply::Bulk(bytes) => bytes,
        other => panic!("no word of a command: {other:?}"),
    }
}

fn steps_of(key: &[u8], change: &[u8]) -> Vec<String> {
    let name = text(key);
    let steps = Steps::of(change).unwrap_or_else(|| panic!("no change: {change:?}"));
    let (mut commands, mut is_open) = (Vec::<String>::new(), false);
    for step in steps {
        let mut buffer = NameBuffer::default();
        let command = match step {
            Step::Set { field, value, more } => {
                let field = text(&field.bytes(&mut buffer));
                let pair = format!("{field} {}", text(value.bytes(&mut Text::empty())));
                let is_next = std::mem::replace(&mut is_open, more);
                match commands.last_mut() {
                    Some(last) if is_next => {
                        let _ = write!(last, " {pair}");
                        continue;
                    }
                    _ => format!("HSET {name} {pair}"),
                }
            }
            Step::Remove(field) => format!("HDEL {name} {}", text(field.bytes(&mut buffer))),
            Step::ExpireAt(at) => format!("PEXPIREAT {name} {at}"),
            Step::Delete => format!("DEL {name}"),
            Step::SetTimeout {
                reader,
                number,
                value,
                at,
            } => {
                let side = names::timeout_key(key, reader.bytes(&mut buffer), number);
                format!("SET {} {value} PXAT {at}", text(&side))
            }
            Step::DeleteTimeout(reader, number) => {
                let side = names::timeout_key(key, reader.bytes(&mut buffer), number);
                format!("DEL {}", text(&side))
            }
            Step::SetLimit(limit) => format!("SET {} {limit}", text(&names::limit_key(key))),
            Step::DeleteLimit => format!("DEL {}", text(&names::limit_key(key))),
            Step::Publish(message) => {
                commands.extend(published(key, message));
                continue;
            }
        };
        commands.push(command);
    }
    commands
}

fn published(key: &[u8], message: Message) -> impl Iterator<Item = String> {
    let name = names::tagged(key);
    let (channel, text_of_it) = match message.held_as {
        Mode::Write => (name.read_write_channel(), 1),
        Mode::Read => (name.read_write_channel(), 0),
        Mode::Plain | Mode::Permits => (name.lock_channel(), 0),
    };
    let channel = text(&channel.concat());
    let ways = [(message.classic, "PUBLISH"), (message.sharded, "SPUBLISH")];
    let ways = ways.into_iter().filter(|(is, _)| *is);
    ways.map(move |(_, way)| format!("{way} {channel} {text_of_it}"))
}

fn text(bytes: &[u8]) -> String {
    String::from_utf8_lossy(bytes).into_owned()
}
