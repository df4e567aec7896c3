//! Parses the servers' replies by their shape.

use std::collections::{BTreeMap, HashMap};
use std::ops::RangeInclusive;
use std::sync::Arc;
use std::time::Duration;

use redis::{FromRedisValue, Value, from_redis_value_ref};

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
        Error::no_reply().because(error)
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

/// The answer of the node at this address to `CLUSTER SHARDS`: the primaries, also those without a
/// slot. It does not say for sure who serves what.
pub(super) fn read_shards(reply: &Value, asked: &Address, is_tls: bool) -> Option<Primaries> {
    let mut primaries = Primaries::new();
    for shard in reply.as_sequence()? {
        for node in read::<Details>(shard)?.get("nodes")?.as_sequence()? {
            let node = read::<Details>(node)?;
            let text = |name| read_text(node.get(name)?);
            let is = |name, word| text(name).as_deref() == Some(word);
            let port = node.get(if is_tls { "tls-port" } else { "port" });
            // Of a node that has failed nothing is expected any more.
            if let Some(port) = port.filter(|_| is("role", "master") && is("health", "online")) {
                let addresses = addresses(text("endpoint"), read(port)?, &node, asked);
                if !addresses.is_empty() {
                    primaries.insert(text("id")?.into(), addresses);
                }
            }
        }
    }
    Some(primaries)
}

/// The answer of the node at this address to `CLUSTER SLOTS`, beside the primaries that it knows.
pub(super) fn read_slots(reply: &Value, asked: &Address, primaries: Primaries) -> Option<Cluster> {
    let ranges = Vec::new();
    let mut cluster = Cluster { ranges, primaries };
    for range in reply.as_sequence()? {
        let [first, last, primary, ..] = range.as_sequence()? else {
            return None;
        };
        let [host, port, id, more @ ..] = primary.as_sequence()? else {
            return None;
        };
        // Names and values, as a map or behind one another.
        let details = more.first().and_then(read::<Details>).unwrap_or_default();
        let addresses = addresses(read_text(host), read(port)?, &details, asked);
        // Without its primary's address nothing can be said of the range.
        if !addresses.is_empty() {
            let id = Id::from(read_text(id)?);
            let slots = read(first)?..=read(last)?;
            cluster.ranges.push((slots, Arc::clone(&id)));
            cluster.primaries.insert(id, addresses);
        }
    }
    Some(cluster)
}

type Details = HashMap<String, Value>;

fn read_text(text: &Value) -> Option<String> {
    read::<String>(text).filter(|text| !text.is_empty())
}

/// Where a node is: first at the host that it prefers. Without one it is at the host of the node
/// that answered. One that should be called by its name and has none is [`NAMELESS`], and known
/// only by what else is told of it.
fn addresses(host: Option<String>, port: u16, details: &Details, asked: &Address) -> Vec<Address> {
    let host = host.unwrap_or_else(|| asked.host.to_string());
    let preferred = Some(host).filter(|host| *host != NAMELESS);
    let detail = |name| read_text(details.get(name)?);
    let hosts = [preferred, detail("ip"), detail("hostname")];
    let hosts = hosts.into_iter().flatten().map(String::into_boxed_str);
    hosts.map(|host| Address { host, port }).collect()
}

/// A cluster, as one of its nodes tells it.
#[derive(Debug)]
pub(crate) struct Cluster {
    /// Which primary serves which slots.
    pub(crate) ranges: Vec<(RangeInclusive<u16>, Id)>,
    pub(crate) primaries: Primaries,
}

/// The primaries that serve something, or have not failed, and their addresses: first the one that
/// it prefers. Another node may call it by one of the others.
pub(crate) type Primaries = BTreeMap<Id, Vec<Address>>;

/// A node's id: the same whatever the node is called, and after a restart too.
pub(crate) type Id = Arc<str>;

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
        let hosts = |host, details| {
            let node = Value::Array(vec![host, Value::Int(7), text("id"), details]);
            let range = Value::Array(vec![Value::Int(0), Value::Int(9), node]);
            let reply = Value::Array(vec![range]);
            let cluster = read_slots(&reply, &asked(), Primaries::new()).expect("well formed");
            let known = cluster.primaries.get("id").cloned().unwrap_or_default();
            let is_known = !cluster.ranges.is_empty();
            assert_eq!(is_known, !known.is_empty());
            known.into_iter().map(|one| one.host).collect::<Vec<_>>()
        };
        let nothing = || Value::Array(vec![]);
        let map = Value::Map(vec![(text("ip"), text("10.0.0.1"))]);
        let flat = Value::Array(vec![text("ip"), text("10.0.0.2")]);
        let both = Value::Map(vec![
            (text("hostname"), text("name")),
            (text("ip"), text("10.0.0.1")),
        ]);
        let of = |hosts: &[&str]| {
            hosts
                .iter()
                .map(|host| Box::from(*host))
                .collect::<Vec<_>>()
        };
        assert_eq!(hosts(text("?"), map), of(&["10.0.0.1"]));
        assert_eq!(hosts(text("?"), flat), of(&["10.0.0.2"]));
        assert_eq!(hosts(text("?"), nothing()), of(&[]));
        assert_eq!(hosts(text("a"), nothing()), of(&["a"]));
        assert_eq!(hosts(Value::Nil, nothing()), of(&["asked"]));
        assert_eq!(hosts(text(""), nothing()), of(&["asked"]));
        assert_eq!(hosts(text("name"), both), of(&["name", "10.0.0.1", "name"]));
    }

    #[test]
    fn primaries_without_a_slot_are_known_and_failed_ones_are_not() {
        let text = |text: &str| Value::BulkString(text.into());
        let node = |id, role, health| {
            let words = ["id", id, "role", role, "health", health, "endpoint", "a"];
            let words = words.map(text);
            let ports = [text("port"), Value::Int(7), text("tls-port"), Value::Int(8)];
            Value::Array(words.into_iter().chain(ports).collect())
        };
        let shard = |nodes| {
            let nothing = Value::Array(vec![]);
            Value::Array(vec![
                text("slots"),
                nothing,
                text("nodes"),
                Value::Array(nodes),
            ])
        };
        let failed = node("z", "master", "fail");
        let shards = Value::Array(vec![
            shard(vec![
                node("x", "master", "online"),
                node("y", "replica", "online"),
            ]),
            shard(vec![failed, node("w", "master", "online")]),
        ]);
        for (is_tls, port) in [(false, 7), (true, 8)] {
            let primaries = read_shards(&shards, &asked(), is_tls).expect("well formed");
            let known = primaries.into_iter().map(|(id, known)| (id, known[0].port));
            let expected = ["w", "x"].map(|id| (Id::from(id), port));
            assert_eq!(known.collect::<Vec<_>>(), expected);
        }
        assert!(read_shards(&Value::Array(vec![text("shard")]), &asked(), false).is_none());
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
}
