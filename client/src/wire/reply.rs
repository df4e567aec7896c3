//! Parses the servers' replies by their shape.

use std::collections::HashMap;
use std::sync::Arc;
use std::time::Duration;

use redis::{FromRedisValue, RedisError, Value, from_redis_value_ref};

use crate::error::{Error, LostReason};
use crate::wire::{Address, Kind, Mode};

/// Parses a reply. A reply of another shape comes from another program than the module, so the
/// outcome of the command is unknown.
pub(crate) fn read_by<T>(
    reply: Result<Value, Error>,
    read: impl FnOnce(&Value) -> Option<T>,
) -> Result<T, Error> {
    let reply = reply?;
    if let Value::ServerError(refusal) = &reply {
        return Err(Error::from_server(refusal.code(), refusal.details()));
    }
    read(&reply).ok_or_else(|| {
        let text = "the reply is not one of an RLOCK command";
        let error = (redis::ErrorKind::UnexpectedReturnType, text);
        Error::no_reply(Some(RedisError::from(error)))
    })
}

/// Whether the answer to HELLO is that of a replica.
pub(super) fn is_replica(hello: &Value) -> bool {
    let hello = read::<HashMap<String, Value>>(hello).unwrap_or_default();
    let role = hello.get("role").and_then(read::<String>);
    role.is_some_and(|role| role != "master")
}

pub(crate) fn read<T: FromRedisValue>(value: &Value) -> Option<T> {
    from_redis_value_ref(value).ok()
}

/// The answer to an ACQUIRE.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Acquired {
    /// With this token.
    Granted(u64),
    /// An event of this life, with a larger number, tells of the end of the wait.
    Queued { seq: u64, life: i64 },
    /// It is taken, for the rest of this lease; `None` if the lease has no end. Zero if the lock is
    /// free but promised to a waiter.
    NotHeld(Option<Duration>),
}

/// The answer to EVENTS.
#[derive(Debug)]
pub(crate) struct Told {
    pub(crate) life: i64,
    pub(crate) events: Vec<Event>,
    /// Whether nothing that has happened is still to be told.
    pub(crate) is_all: bool,
}

/// The server ends a reply with this many events, or when their names and owners have this many
/// bytes. The rest comes with the next.
const EVENTS_MAX: usize = 1000;
const EVENTS_BYTES: usize = 256 * 1024;

/// The kind of an event.
#[derive(Clone, Debug)]
pub(crate) struct Event {
    pub(crate) seq: u64,
    pub(crate) name: Vec<u8>,
    pub(crate) owner: Vec<u8>,
    pub(crate) kind: Kind,
    /// The token of the hold; 0 without one.
    pub(crate) token: u64,
    pub(crate) what: What,
}

#[derive(Clone, Debug)]
pub(crate) enum What {
    /// The wait has ended with a hold.
    Granted,
    /// The lock is not held: as in [`Acquired::NotHeld`].
    TimedOut(Option<Duration>),
    /// The wait left the queue when the session connection closed.
    Left,
    Lost(LostReason),
    /// A wait failed; or the slot of a hold has moved.
    Failed(Error),
    Wanted,
}

/// Whether the server's disk has it, and how many replicas do.
pub(super) fn read_copied(reply: &Value) -> Option<(bool, u64)> {
    read(reply).or_else(|| Some((false, read(reply)?)))
}

pub(crate) fn read_acquired(reply: &Value) -> Option<Acquired> {
    match reply.as_sequence()? {
        [Value::Int(1..), token] => Some(Acquired::Granted(read(token)?)),
        [Value::Int(0), Value::Int(ttl_ms)] => Some(Acquired::NotHeld(time_left(*ttl_ms))),
        [Value::Int(-1), Value::Int(1..), seq, Value::Int(life)] => Some(Acquired::Queued {
            seq: read(seq)?,
            life: *life,
        }),
        _ => None,
    }
}

/// A TTL; `None` if there is no expiry.
fn time_left(ttl_ms: i64) -> Option<Duration> {
    u64::try_from(ttl_ms).ok().map(Duration::from_millis)
}

type Bytes = Vec<u8>;
type Parts = (u64, Bytes, Bytes, Bytes, Value, u64, Bytes, i64);

pub(super) fn read_told(reply: &Value) -> Option<Told> {
    let (life, told) = read::<(i64, Vec<Value>)>(reply)?;
    let (mut events, mut length) = (Vec::new(), 0_usize);
    for event in &told {
        let (seq, what, name, owner, value, token, mode, _db) = read::<Parts>(event)?;
        let bytes = name.len().saturating_add(owner.len());
        length = length.saturating_add(bytes);
        let what = match &*what {
            b"granted" => What::Granted,
            b"timeout" => What::TimedOut(time_left(read(&value)?)),
            b"left" => What::Left,
            b"lost" => What::Lost(LostReason::from_server(&read::<Bytes>(&value)?)),
            b"wanted" => What::Wanted,
            b"error" => What::Failed(Error::from_text(&String::from_utf8_lossy(&read::<Bytes>(
                &value,
            )?))),
            // A kind that a later server may add is nothing to us.
            _ => continue,
        };
        let kind = Mode::named(&mode).kind();
        events.push(Event {
            seq,
            name,
            owner,
            kind,
            token,
            what,
        });
    }
    Some(Told {
        life,
        events,
        is_all: told.len() < EVENTS_MAX && length < EVENTS_BYTES,
    })
}

/// Whether there was a hold to be released: Null says that there was none.
pub(crate) fn read_released(reply: &Value) -> Option<bool> {
    Some(read::<Option<u64>>(reply)?.is_some())
}

/// Whether it is held.
pub(crate) fn read_renewed(reply: &Value) -> Option<bool> {
    Some(read::<u64>(reply)? > 0)
}

/// The answer of the node at this address to `CLUSTER SLOTS`.
pub(crate) fn read_slots(reply: &Value, asked: &Address) -> Option<Vec<Range>> {
    let ranges = reply.as_sequence()?.iter();
    ranges.map(|range| read_range(range, asked)).collect()
}

fn read_range(range: &Value, asked: &Address) -> Option<Range> {
    let [first, last, nodes @ ..] = range.as_sequence()? else {
        return None;
    };
    let nodes = nodes.iter().map(|node| read_node(node, asked));
    let mut nodes: Vec<_> = nodes.collect::<Option<_>>()?;
    let is_known = |(_, addresses): &Member| !addresses.is_empty();
    // Without its primary nothing can be said of the range.
    let is_of_use = nodes.first().is_some_and(is_known);
    nodes.retain(|node| is_of_use && is_known(node));
    let (first, last) = (read(first)?, read(last)?);
    Some(Range { first, last, nodes })
}

/// Reads a node. Without a host it is at the host of the node that answered. A node that should be
/// called by its name and has none is [`NAMELESS`], and known only by what else is told of it.
fn read_node(node: &Value, asked: &Address) -> Option<Member> {
    let [host, port, id, more @ ..] = node.as_sequence()? else {
        return None;
    };
    let text = |text: &Value| read::<String>(text).filter(|text| !text.is_empty());
    // Names and values, as a map or behind one another.
    let details = more.first().and_then(read::<HashMap<String, Value>>);
    let detail = |name| details.as_ref()?.get(name).and_then(text);
    let host = text(host).unwrap_or_else(|| asked.host.to_string());
    let preferred = Some(host).filter(|host| *host != NAMELESS);
    let hosts = [preferred, detail("ip"), detail("hostname")];
    let port = read(port)?;
    let addresses = hosts.into_iter().flatten().map(|host| Address {
        host: host.into(),
        port,
    });
    Some((text(id)?.into(), addresses.collect()))
}

/// Where a node says that a command has to go, by `MOVED slot host:port` or `ASK slot host:port`.
/// Such a command has not been carried out.
///
/// Whether it is for this command only: the slot is on its way, and the key has gone ahead. Then
/// the host; none: the one that was asked; [`NAMELESS`]: nobody has said. And the port.
pub(crate) fn read_redirect(text: &str) -> Option<(bool, Option<&str>, u16)> {
    let mut words = text.split(' ');
    let only_this = match words.next()? {
        "MOVED" => false,
        "ASK" => true,
        _ => return None,
    };
    let (host, port) = words.nth(1)?.rsplit_once(':')?;
    let host = Some(host).filter(|host| !host.is_empty());
    Some((only_this, host, port.parse().ok()?))
}

/// A run of slots and its nodes, as a node of the cluster tells it.
pub(crate) struct Range {
    pub(crate) first: u16,
    pub(crate) last: u16,
    /// The primary, and then its replicas.
    pub(crate) nodes: Vec<Member>,
}

/// A node's id: the same whatever the node is called, and after a restart too.
pub(crate) type Id = Arc<str>;

/// A node of a cluster, and its addresses: first the one that it prefers. Another node may call it
/// by one of the others.
type Member = (Id, Vec<Address>);

/// The host of a node that should be called by its name, and has none.
pub(crate) const NAMELESS: &str = "?";

/// The number of slots in a cluster.
pub(crate) const SLOTS: u16 = 16_384;

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn replies_are_read_by_shape() {
        let pair = |a, b| Value::Array(vec![Value::Int(a), Value::Int(b)]);
        let held = |token| Some(Acquired::Granted(token));
        let not_held = |lease_left| Some(Acquired::NotHeld(lease_left));
        assert_eq!(read_acquired(&pair(1, 9)), held(9));
        assert_eq!(read_acquired(&pair(2, 9)), held(9));
        assert_eq!(read_acquired(&pair(0, -1)), not_held(None));
        assert_eq!(
            read_acquired(&pair(0, 5)),
            not_held(Some(Duration::from_millis(5)))
        );
        let queued = |position| {
            let numbers = [-1, position, 3, 7].map(Value::Int);
            read_acquired(&Value::Array(numbers.into()))
        };
        assert_eq!(queued(1), Some(Acquired::Queued { seq: 3, life: 7 }));
        assert_eq!(queued(0), None);
        assert_eq!(read_acquired(&pair(-1, 1)), None);
        assert_eq!(read_acquired(&Value::Okay), None);
        assert_eq!(read_released(&Value::Nil), Some(false));
        assert_eq!(read_released(&Value::Int(0)), Some(true));
    }

    fn asked() -> Address {
        let (host, port) = ("asked".into(), 7);
        Address { host, port }
    }

    #[test]
    fn a_node_without_a_name_is_at_its_address_and_not_at_that_of_the_one_asked() {
        let text = |text: &str| Value::BulkString(text.into());
        let node = |host, details| Value::Array(vec![host, Value::Int(7), text("id"), details]);
        let range = |nodes: Vec<Value>| {
            let parts = [Value::Int(0), Value::Int(9)].into_iter().chain(nodes);
            let reply = Value::Array(vec![Value::Array(parts.collect())]);
            let ranges = read_slots(&reply, &asked());
            ranges.expect("well formed").remove(0).nodes
        };
        let map = Value::Map(vec![(text("ip"), text("10.0.0.1"))]);
        let flat = Value::Array(vec![text("ip"), text("10.0.0.2")]);
        let nothing = Value::Array(vec![]);
        let hosts = |nodes: Vec<Member>| {
            let host = |(id, mut addresses): Member| {
                assert_eq!((&*id, addresses[0].port), ("id", 7));
                addresses.remove(0).host
            };
            nodes.into_iter().map(host).collect::<Vec<_>>()
        };
        let nodes = vec![
            node(text("?"), map),
            node(text("?"), flat),
            node(text("?"), nothing.clone()),
            node(text("a"), nothing.clone()),
            node(Value::Nil, nothing.clone()),
            node(text(""), nothing.clone()),
        ];
        let known = ["10.0.0.1", "10.0.0.2", "a", "asked", "asked"].map(Box::from);
        assert_eq!(hosts(range(nodes)), known);
        let replica = node(text("a"), nothing.clone());
        assert_eq!(range(vec![node(text("?"), nothing), replica]), []);
    }

    #[test]
    fn a_node_may_have_other_names() {
        let text = |text: &str| Value::BulkString(text.into());
        let details = Value::Map(vec![
            (text("hostname"), text("name")),
            (text("ip"), text("10.0.0.1")),
        ]);
        let node = Value::Array(vec![text("name"), Value::Int(7), text("id"), details]);
        let (_, addresses) = read_node(&node, &asked()).expect("a node");
        let hosts: Vec<_> = addresses.iter().map(|one| &*one.host).collect();
        assert_eq!(hosts, ["name", "10.0.0.1", "name"]);
    }

    #[test]
    fn events_are_read_in_order_and_kinds_of_the_future_are_passed_over() {
        let text = |text: &str| Value::BulkString(text.into());
        let about = |kind: &str, value, token| {
            let (seq, db) = (Value::Int(1), Value::Int(0));
            let (kind, mode) = (text(kind), text("read"));
            let token = Value::Int(token);
            Value::Array(vec![
                seq,
                kind,
                text("n"),
                text("o"),
                value,
                token,
                mode,
                db,
            ])
        };
        let event = |kind: &str, value| about(kind, value, 0);
        let reply = |events| read_told(&Value::Array(vec![Value::Int(9), Value::Array(events)]));
        let told = reply(vec![
            about("granted", Value::Int(7), 7),
            event("invented", Value::Nil),
            event("left", Value::Int(0)),
            event("timeout", Value::Int(-1)),
            about("lost", text("broken"), 7),
            about("lost", text("released"), 7),
            event("wanted", Value::Int(0)),
            about("error", text("MOVED 1 a:1"), 7),
            event("error", text("WRONGTYPE not a lock")),
        ]);
        let Told {
            life,
            events,
            is_all,
        } = told.expect("well formed");
        assert!(life == 9 && is_all);
        assert!(
            events
                .iter()
                .all(|event| event.name == b"n" && event.owner == b"o" && event.seq == 1)
        );
        assert!(events.iter().all(|event| event.kind == Mode::Read.kind()));
        let news: Vec<_> = events
            .into_iter()
            .map(|event| (event.what, event.token))
            .collect();
        let [
            (What::Granted, 7),
            (What::Left, 0),
            (What::TimedOut(None), 0),
            (What::Lost(LostReason::Broken), 7),
            (What::Lost(LostReason::NotHeld), 7),
            (What::Wanted, 0),
            (What::Failed(_), 7),
            (What::Failed(error), 0),
        ] = news.as_slice()
        else {
            panic!("{news:?}")
        };
        assert!(error.is_refused(), "{error}");
        assert!(reply(vec![event("timeout", Value::Nil)]).is_none());
        assert!(reply(vec![Value::Nil]).is_none());
        assert!(reply(vec![]).is_some_and(|told| told.events.is_empty()));
        assert!(read_told(&Value::Array(vec![])).is_none());
    }

    #[test]
    fn a_reply_that_is_full_may_not_be_all() {
        let text = |text: &str| Value::BulkString(text.into());
        let left = |name: &str| {
            let [seq, value, token, db] = [1, 0, 0, 0].map(Value::Int);
            let (what, owner, mode) = (text("left"), text("o"), text("plain"));
            Value::Array(vec![seq, what, text(name), owner, value, token, mode, db])
        };
        let is_all = |events| {
            let told = read_told(&Value::Array(vec![Value::Int(9), Value::Array(events)]));
            told.expect("well formed").is_all
        };
        assert!(is_all(vec![left("n"); EVENTS_MAX - 1]));
        assert!(!is_all(vec![left("n"); EVENTS_MAX]));
        let long = "n".repeat(EVENTS_BYTES - 1);
        assert!(is_all(vec![left(&long[1..])]));
        assert!(!is_all(vec![left(&long)]));
    }

    #[test]
    fn a_redirect_names_a_node_or_a_port_of_the_same_host() {
        for (text, redirect) in [
            (
                "MOVED 3999 127.0.0.1:6381",
                (false, Some("127.0.0.1"), 6_381),
            ),
            ("ASK 0 ::1:6381", (true, Some("::1"), 6_381)),
            ("MOVED 0 :6381", (false, None, 6_381)),
            ("MOVED 0 ?:6381", (false, Some(NAMELESS), 6_381)),
        ] {
            assert_eq!(read_redirect(text), Some(redirect), "{text}");
        }
        for text in ["MOVED", "MOVED 1", "ASK 1 a", "ASK 1 a:x", "ERR 1 a:1"] {
            assert_eq!(read_redirect(text), None, "{text}");
        }
    }
}
