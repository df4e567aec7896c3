//! Finds the node that serves a key, if this node does not.

use crate::ffi::value::{elements, text};
use crate::ffi::{self, Ctx, ServerLocked};
use crate::memory::state;
use redis_module::RedisValue;
use rlock_core::CommandError;
use std::collections::HashMap;
use std::ops::RangeInclusive;
use std::rc::Rc;

/// The error that sends a client to the node that serves the key, as the server itself would reply;
/// none while that node is unknown.
///
/// While a slot is on its way, the error names the node that still owns it: that node redirects
/// clients (`ASK`) for keys that have left.
pub(crate) fn redirection(ctx: Ctx<'_>, key: &[u8]) -> Option<CommandError> {
    let slot = u16::try_from(integer(&ask(ctx, &[b"KEYSLOT", key])?)?).ok()?;
    let addresses = owners(ctx)?.of(slot)?;
    Some(CommandError::Moved {
        slot,
        address: addresses.plain,
        tls_address: addresses.tls,
    })
}

/// Forgets which node owns which slots. That is remembered only for one run of the timer's work.
pub(crate) fn forget_owners() {
    OWNERS.with(|owners| *owners = None);
}

/// The owners of the slots, as the timer's present work has found them.
static OWNERS: ServerLocked<Option<Rc<Owners>>> = ServerLocked::new();

/// The owners of the slots. Asked once for all of the timer's work: a slot that moved can have
/// thousands of locks, and in a large cluster the answer is long.
fn owners(ctx: Ctx<'_>) -> Option<Rc<Owners>> {
    let is_at_work = state::with(|state| state.pumping);
    if is_at_work && let Some(owners) = OWNERS.with(|owners| owners.clone()) {
        return Some(owners);
    }
    let owners = Rc::new(Owners::ask(ctx)?);
    if is_at_work {
        OWNERS.with(|known| *known = Some(Rc::clone(&owners)));
    }
    Some(owners)
}

/// The reply of `CLUSTER` to these arguments.
fn ask(ctx: Ctx<'_>, words: &[&[u8]]) -> Option<RedisValue> {
    let answer = ctx.context().call("CLUSTER", words);
    if answer.is_err() {
        ffi::call_was_refused(c"CLUSTER");
    }
    answer.ok()
}

/// The addresses of each slot's owner.
struct Owners(Vec<(RangeInclusive<u16>, Addresses)>);

/// The addresses of a node as clients know them, `host:port`: for those with TLS and those without.
#[derive(Clone)]
struct Addresses {
    plain: Rc<str>,
    tls: Rc<str>,
}

impl Owners {
    /// `CLUSTER NODES` says which node owns which slots, and `CLUSTER SHARDS` which names and ports
    /// clients use. (`CLUSTER SLOTS` would say both, but called from a timer it stops Valkey 8.0.
    /// And if a shard has two primaries, one of them failed, `CLUSTER SHARDS` does not say which
    /// one owns the slots.)
    fn ask(ctx: Ctx<'_>) -> Option<Self> {
        let addresses = addresses(&ask(ctx, &[b"SHARDS"])?);
        let nodes = ask(ctx, &[b"NODES"])?;
        let owner = |node| {
            let (id, slots) = slots_of(node);
            let addresses = addresses.get(id)?.clone();
            Some(slots.map(move |slots| (slots, addresses.clone())))
        };
        Some(Self(
            text(&nodes)?.lines().filter_map(owner).flatten().collect(),
        ))
    }

    fn of(&self, slot: u16) -> Option<Addresses> {
        let owner = self.0.iter().find(|(slots, _)| slots.contains(&slot));
        owner.map(|(_, addresses)| addresses.clone())
    }
}

/// The id of a node and its slots, from a line of `CLUSTER NODES`: the first word, and those from
/// the ninth on.
fn slots_of(node: &str) -> (&str, impl Iterator<Item = RangeInclusive<u16>>) {
    let mut words = node.split(' ');
    let id = words.next().unwrap_or_default();
    (id, words.skip(7).filter_map(range))
}

/// `first-last`, or one number. None for a slot on its way, `[…]`.
fn range(slots: &str) -> Option<RangeInclusive<u16>> {
    let (first, last) = slots.split_once('-').unwrap_or((slots, slots));
    Some(first.parse().ok()?..=last.parse().ok()?)
}

/// The nodes of `CLUSTER SHARDS` by their ids.
fn addresses(shards: &RedisValue) -> HashMap<String, Addresses> {
    let nodes = elements(shards)
        .iter()
        .filter_map(|shard| field(shard, "nodes"));
    let node = |node| Some((text(field(node, "id")?)?.to_owned(), addresses_of(node)?));
    nodes.flat_map(elements).filter_map(node).collect()
}

/// A client is sent to the port of its own kind if the node has one.
fn addresses_of(node: &RedisValue) -> Option<Addresses> {
    let host = text(field(node, "endpoint")?)?;
    let [plain, tls] = ["port", "tls-port"].map(|name| field(node, name).and_then(integer));
    let at = |port: i64| Rc::from(format!("{host}:{port}"));
    Some(Addresses {
        plain: at(plain.or(tls)?),
        tls: at(tls.or(plain)?),
    })
}

/// The value of a field of a map, which has the form of an array of names and values in turn.
fn field<'v>(map: &'v RedisValue, name: &str) -> Option<&'v RedisValue> {
    let mut pairs = elements(map).chunks_exact(2);
    pairs.find_map(|pair| match pair {
        [key, value] if text(key) == Some(name) => Some(value),
        _ => None,
    })
}

fn integer(value: &RedisValue) -> Option<i64> {
    match value {
        RedisValue::Integer(number) => Some(*number),
        _ => None,
    }
}
