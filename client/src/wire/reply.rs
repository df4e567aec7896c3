//! What the server answers, read by its shape.

use std::collections::HashMap;
use std::time::Duration;

use redis::{FromRedisValue, InfoDict, RedisError, Value, from_redis_value_ref};

use crate::error::{Error, LostReason};

/// How to read the reply to a command that names so many locks.
#[derive(Clone)]
pub(crate) struct Reader<T> {
    pub(super) locks: usize,
    pub(super) read: fn(&Value, usize) -> Option<T>,
}

impl<T> Reader<T> {
    /// What the server's reply says.
    pub(crate) fn read(&self, reply: &Value) -> Result<T, Error> {
        if let Value::ServerError(refusal) = reply {
            return Err(Error::from_server(refusal.code(), refusal.details()));
        }
        // A reply of another shape comes from something that is not the module: what it has done
        // nobody can say.
        (self.read)(reply, self.locks).ok_or_else(|| {
            let text = "the reply is not one of an RLOCK command";
            let error = (redis::ErrorKind::UnexpectedReturnType, text);
            Error::no_reply(Some(RedisError::from(error)))
        })
    }
}

/// Reads the answers to [`handshake`](crate::wire::request::handshake), as far as the server gives
/// them to this user: whether it is a replica, which client this is there, and its run id, which is
/// another one in each life.
pub(super) fn read_handshake(answers: &[Value]) -> (bool, Option<u64>, Option<String>) {
    let [hello, info] = answers else {
        return (false, None, None);
    };
    let hello = read::<HashMap<String, Value>>(hello).unwrap_or_default();
    let role = hello.get("role").and_then(read::<String>);
    let is_replica = role.is_some_and(|role| role != "master");
    let run_id = read::<InfoDict>(info).and_then(|info| info.get("run_id"));
    (is_replica, hello.get("id").and_then(read), run_id)
}

/// What is told by a library's type.
fn read<T: FromRedisValue>(value: &Value) -> Option<T> {
    from_redis_value_ref(value).ok()
}

/// What an ACQUIRE came to.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Acquired {
    /// Held, with this fencing token, and so often by its owner by now.
    Granted { token: u64, count: u64 },
    /// In line; what comes of it is told by an event.
    Queued,
    /// Not held; what is left of the present lease, `None` if the key has no expiry.
    NotHeld { lease_left: Option<Duration> },
}

/// What a RELEASE came to.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Released {
    /// The last of the owner's holds has gone.
    Freed,
    /// One of its holds has gone, and so many are left.
    Left(u32),
    /// Of several locks: one hold of each has gone.
    Done,
    /// It was not held by this owner, or not with this token; of several not all.
    NotHeld,
}

/// The answer to RLOCK.EVENTS.
pub(crate) struct Told {
    /// Another one than before says that the session has begun anew.
    pub(crate) life: i64,
    /// The events, in order.
    pub(crate) events: Vec<Event>,
    /// Whether nothing that has happened is still to be told.
    pub(crate) is_all: bool,
}

/// The server ends a reply with this many events, or when their names and owners have this many
/// bytes. The rest comes with the next.
const EVENTS_MAX: usize = 1000;
const EVENTS_BYTES: usize = 256 * 1024;

/// What has happened to one owner at one lock.
pub(crate) struct Event {
    pub(crate) name: Vec<u8>,
    pub(crate) owner: Vec<u8>,
    pub(crate) kind: EventKind,
}

/// The kinds of events.
#[derive(Clone, Debug)]
pub(crate) enum EventKind {
    /// The wait is over: held, with this fencing token.
    Granted { token: u64 },
    /// The wait is over: not held; what is left of the present lease, `None` without an expiry.
    TimedOut { lease_left: Option<Duration> },
    /// The hold is over.
    Lost(LostReason),
    /// The wait is over, with an error.
    Failed(Error),
    /// Somebody wants the lock that is held.
    Wanted,
}

/// Who has what a connection has written: whether the server has it on its disk, as far as that was
/// asked, and how many replicas.
pub(super) fn read_copied(reply: &Value) -> Option<(bool, u64)> {
    match reply.as_sequence() {
        Some([local, replicas]) => Some((read_count(local)? > 0, read_count(replicas)?)),
        _ => Some((false, read_count(reply)?)),
    }
}

pub(super) fn read_slots(reply: &Value) -> Option<Vec<Range>> {
    reply.as_sequence()?.iter().map(read_range).collect()
}

fn read_range(range: &Value) -> Option<Range> {
    let [Value::Int(first), Value::Int(last), nodes @ ..] = range.as_sequence()? else {
        return None;
    };
    let mut nodes: Vec<_> = nodes.iter().map(read_node).collect::<Option<_>>()?;
    let is_known = |node: &Member| node.host.as_deref() != Some(NAMELESS);
    // Without its primary nothing can be said of the range.
    let is_of_use = nodes.first().is_some_and(is_known);
    nodes.retain(|node| is_of_use && is_known(node));
    let (first, last) = (u16::try_from(*first).ok()?, u16::try_from(*last).ok()?);
    Some(Range { first, last, nodes })
}

/// A node. With no host it is where the one that was asked is. One that should be called by its
/// name and has none is [`NAMELESS`], unless its address is beside it.
fn read_node(node: &Value) -> Option<Member> {
    let [host, Value::Int(port), more @ ..] = node.as_sequence()? else {
        return None;
    };
    let text = |text: &Value| read::<String>(text).and_then(|text| named(&text));
    // Names and values, as a map or behind one another.
    let details = more.get(1).and_then(read::<HashMap<String, Value>>);
    let detail = |name| details.as_ref()?.get(name).and_then(text);
    let (ip, hostname) = (detail("ip"), detail("hostname"));
    let host = match text(host) {
        Some(nameless) if *nameless == *NAMELESS => ip.clone().or(Some(nameless)),
        host => host,
    };
    Some(Member {
        id: more.first().and_then(text),
        host,
        port: u16::try_from(*port).ok()?,
        other_hosts: ip.into_iter().chain(hostname).collect(),
    })
}

pub(super) fn read_acquired(reply: &Value) -> Option<Acquired> {
    match reply.as_sequence()? {
        [Value::Int(count), Value::Int(token)] if *count >= 1 => Some(Acquired::Granted {
            token: u64::try_from(*token).ok()?,
            count: u64::try_from(*count).ok()?,
        }),
        [Value::Int(0), Value::Int(ttl_ms)] => Some(Acquired::NotHeld {
            lease_left: time_left(*ttl_ms),
        }),
        [
            Value::Int(-1),
            Value::Int(1..),
            Value::Int(_seq),
            Value::Int(_life),
        ] => Some(Acquired::Queued),
        _ => None,
    }
}

fn time_left(ttl_ms: i64) -> Option<Duration> {
    u64::try_from(ttl_ms).ok().map(Duration::from_millis)
}

pub(super) fn read_told(reply: &Value) -> Option<Told> {
    let [Value::Int(life), told] = reply.as_sequence()? else {
        return None;
    };
    let (mut events, mut length) = (Vec::new(), 0_usize);
    let told = told.as_sequence()?;
    for event in told {
        let [_seq, kind, name, owner, value, token, _mode, _db] = event.as_sequence()? else {
            return None;
        };
        let bytes = read::<Vec<u8>>;
        let (kind, name, owner) = (bytes(kind)?, bytes(name)?, bytes(owner)?);
        length = length
            .saturating_add(name.len())
            .saturating_add(owner.len());
        let kind = match &*kind {
            b"granted" => EventKind::Granted {
                token: read_count(value)?,
            },
            b"timeout" => EventKind::TimedOut {
                lease_left: time_left(read(value)?),
            },
            b"lost" => match &*bytes(value)? {
                // By us: our command connection is not bound to the session.
                b"released" => continue,
                reason => EventKind::Lost(LostReason::from_server(reason)),
            },
            b"wanted" => EventKind::Wanted,
            // It is about a hold, and not about a wait: the slot has moved, which is found out
            // anyway.
            b"error" if read_count(token)? != 0 => continue,
            b"error" => {
                EventKind::Failed(Error::from_text(&String::from_utf8_lossy(&bytes(value)?)))
            }
            // A wait that has left is asked for again when the session is attached anew. And a kind
            // that a later server may add is nothing to us.
            _ => continue,
        };
        events.push(Event { name, owner, kind });
    }
    let life = *life;
    Some(Told {
        life,
        events,
        is_all: told.len() < EVENTS_MAX && length < EVENTS_BYTES,
    })
}

/// The same of permits, which are one hold however many they are.
pub(super) fn read_acquired_permits(reply: &Value) -> Option<Acquired> {
    Some(match read_acquired(reply)? {
        Acquired::Granted { token, .. } => Acquired::Granted { token, count: 1 },
        other => other,
    })
}

pub(super) fn read_released(reply: &Value) -> Option<Released> {
    match reply {
        Value::Nil => Some(Released::NotHeld),
        Value::Int(0) => Some(Released::Freed),
        Value::Int(left @ 1..) => Some(Released::Left(u32::try_from(*left).unwrap_or(u32::MAX))),
        _ => None,
    }
}

pub(super) fn read_all_released(reply: &Value, locks: usize) -> Option<Released> {
    let done = read_all_renewed(reply, locks)?.then_some(Released::Done);
    Some(done.unwrap_or(Released::NotHeld))
}

pub(super) fn read_all_renewed(reply: &Value, locks: usize) -> Option<bool> {
    let renewed = usize::try_from(read_count(reply)?).ok()?;
    (renewed <= locks).then_some(renewed == locks)
}

pub(super) fn read_count(reply: &Value) -> Option<u64> {
    let Value::Int(count) = reply else {
        return None;
    };
    u64::try_from(*count).ok()
}

/// Where a node says that a command has to go. Such a command has not been carried out.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Redirect {
    /// Only this command: the slot is on its way, and the key has gone ahead.
    pub(crate) only_this: bool,
    pub(crate) slot: u16,
    /// No host: the one that was asked. [`NAMELESS`]: nobody has said.
    pub(crate) host: Option<Box<str>>,
    pub(crate) port: u16,
}

impl Redirect {
    /// Reads `MOVED slot host:port` or `ASK slot host:port`.
    pub(crate) fn read(text: &str) -> Option<Self> {
        let mut words = text.split(' ');
        let only_this = match words.next()? {
            "MOVED" => false,
            "ASK" => true,
            _ => return None,
        };
        let slot = words.next()?.parse().ok().filter(|slot| *slot < SLOTS)?;
        let (host, port) = words.next()?.rsplit_once(':')?;
        Some(Self {
            only_this,
            slot,
            host: named(host),
            port: port.parse().ok()?,
        })
    }
}

/// A run of slots and who serves it, as a node of the cluster tells it.
pub(crate) struct Range {
    pub(crate) first: u16,
    pub(crate) last: u16,
    /// The primary, and then its replicas.
    pub(crate) nodes: Vec<Member>,
}

/// A node of a cluster, as one of them tells of it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Member {
    /// The same whatever it is called, and after a restart too.
    pub(crate) id: Option<Box<str>>,
    /// No host: the one that was asked.
    pub(crate) host: Option<Box<str>>,
    pub(crate) port: u16,
    /// By what else it is known. Another node may call it by one of these.
    pub(crate) other_hosts: Vec<Box<str>>,
}

/// A host, unless the node does not know what it is called.
pub(crate) fn named(host: &str) -> Option<Box<str>> {
    (!host.is_empty()).then(|| host.into())
}

/// The host of a node that should be called by its name, and has none.
pub(crate) const NAMELESS: &str = "?";

/// So many slots has a cluster.
pub(crate) const SLOTS: u16 = 16_384;

#[cfg(test)]
mod tests {
    use super::*;
    use crate::wire::endpoint::Address;

    #[test]
    fn replies_are_read_by_shape() {
        let pair = |a, b| Value::Array(vec![Value::Int(a), Value::Int(b)]);
        let held = |token, count| Some(Acquired::Granted { token, count });
        let not_held = |lease_left| Some(Acquired::NotHeld { lease_left });
        assert_eq!(read_acquired(&pair(1, 9)), held(9, 1));
        assert_eq!(read_acquired(&pair(2, 9)), held(9, 2));
        assert_eq!(read_acquired(&pair(0, -1)), not_held(None));
        assert_eq!(
            read_acquired(&pair(0, 5)),
            not_held(Some(Duration::from_millis(5)))
        );
        let queued = |position| {
            let numbers = [-1, position, 0, 7].map(Value::Int);
            read_acquired(&Value::Array(numbers.into()))
        };
        assert_eq!(queued(1), Some(Acquired::Queued));
        assert_eq!(queued(0), None);
        assert_eq!(read_acquired(&pair(-1, 1)), None);
        assert_eq!(read_acquired(&Value::Okay), None);
        assert_eq!(read_released(&Value::Nil), Some(Released::NotHeld));
        assert_eq!(read_released(&Value::Int(0)), Some(Released::Freed));
    }

    #[test]
    fn a_node_without_a_name_is_at_its_address_and_not_at_that_of_the_one_asked() {
        let text = |text: &str| Value::BulkString(text.into());
        let node = |host, details| Value::Array(vec![host, Value::Int(7), text("id"), details]);
        let range = |nodes: Vec<Value>| {
            let parts = [Value::Int(0), Value::Int(9)].into_iter().chain(nodes);
            let ranges = read_slots(&Value::Array(vec![Value::Array(parts.collect())]));
            ranges.expect("well formed").remove(0).nodes
        };
        let map = Value::Map(vec![(text("ip"), text("10.0.0.1"))]);
        let flat = Value::Array(vec![text("ip"), text("10.0.0.2")]);
        let nothing = Value::Array(vec![]);
        let hosts = |nodes: Vec<Member>| {
            let host = |node: Member| {
                assert_eq!((node.id.as_deref(), node.port), (Some("id"), 7));
                node.host.unwrap_or_default()
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
        let known = ["10.0.0.1", "10.0.0.2", "a", "", ""].map(Box::from);
        assert_eq!(hosts(range(nodes)), known);
        let replica = node(text("a"), nothing.clone());
        assert_eq!(range(vec![node(text("?"), nothing), replica]), []);
    }

    #[test]
    fn a_node_may_have_other_names_and_with_an_old_reply_none_and_no_id() {
        let text = |text: &str| Value::BulkString(text.into());
        let details = Value::Map(vec![
            (text("hostname"), text("name")),
            (text("ip"), text("10.0.0.1")),
        ]);
        let node = Value::Array(vec![text("name"), Value::Int(7), text("id"), details]);
        let node = read_node(&node).expect("a node");
        assert_eq!(node.other_hosts, ["10.0.0.1", "name"].map(Box::from));
        let old = Value::Array(vec![text("10.0.0.1"), Value::Int(7)]);
        let old = read_node(&old).expect("a node");
        assert_eq!((old.id, old.other_hosts), (None, vec![]));
    }

    #[test]
    fn events_are_read_in_order_and_kinds_of_the_future_are_passed_over() {
        let text = |text: &str| Value::BulkString(text.into());
        let about = |kind: &str, value, token| {
            let (seq, db) = (Value::Int(1), Value::Int(0));
            let (kind, mode) = (text(kind), text("plain"));
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
            event("granted", Value::Int(7)),
            event("invented", Value::Nil),
            event("left", Value::Int(0)),
            event("timeout", Value::Int(-1)),
            event("lost", text("broken")),
            event("lost", text("released")),
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
                .all(|event| event.name == b"n" && event.owner == b"o")
        );
        let news: Vec<_> = events.into_iter().map(|event| event.kind).collect();
        let [
            EventKind::Granted { token: 7 },
            EventKind::TimedOut { lease_left: None },
            EventKind::Lost(LostReason::Broken),
            EventKind::Wanted,
            EventKind::Failed(error),
        ] = news.as_slice()
        else {
            panic!("{news:?}")
        };
        assert!(error.is_refused(), "{error}");
        assert!(reply(vec![event("granted", Value::Nil)]).is_none());
        assert!(reply(vec![Value::Nil]).is_none());
        assert!(reply(vec![]).is_some_and(|told| told.events.is_empty()));
        assert!(read_told(&Value::Array(vec![])).is_none());
        // One that is full may not be all.
        for (number, is_all) in [(EVENTS_MAX - 1, true), (EVENTS_MAX, false)] {
            let events = vec![event("left", Value::Int(0)); number];
            assert_eq!(reply(events).expect("well formed").is_all, is_all);
        }
        let long = "n".repeat(EVENTS_BYTES - 1);
        for (name, is_all) in [(&long[1..], true), (&long[..], false)] {
            let mut event = event("left", Value::Int(0));
            if let Value::Array(event) = &mut event {
                event[2] = text(name);
            }
            assert_eq!(reply(vec![event]).expect("well formed").is_all, is_all);
        }
    }

    #[test]
    fn a_redirect_names_a_node_or_a_port_of_the_same_host() {
        let redirect = Redirect::read("MOVED 3999 127.0.0.1:6381").expect("a redirect");
        assert_eq!((redirect.only_this, redirect.slot), (false, 3_999));
        let address = |host: &str, port| Address {
            host: host.into(),
            port,
        };
        let asked = address("asked", 1);
        let to = |redirect: Redirect| asked.or_at(redirect.host, redirect.port);
        assert_eq!(to(redirect), address("127.0.0.1", 6_381));
        let redirect = Redirect::read("ASK 0 ::1:6381").expect("a redirect");
        assert!(redirect.only_this);
        assert_eq!(to(redirect), address("::1", 6_381));
        let redirect = Redirect::read("MOVED 0 :6381").expect("a redirect");
        assert_eq!(to(redirect), address("asked", 6_381));
        let redirect = Redirect::read("MOVED 0 ?:6381").expect("a redirect");
        assert_eq!(redirect.host.as_deref(), Some(NAMELESS));
        for text in [
            "MOVED",
            "MOVED 16384 a:1",
            "ASK 1 a",
            "ASK 1 a:x",
            "ERR 1 a:1",
        ] {
            assert_eq!(Redirect::read(text), None, "{text}");
        }
    }
}
