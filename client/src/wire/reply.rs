//! What the server answers, read by its shape.

use std::time::Duration;

use redis::{RedisError, Value};

use crate::error::Error;
use crate::lost_reason::LostReason;

/// How to read the reply to a command.
#[derive(Clone)]
pub(crate) enum Reader<T> {
    /// By its shape.
    Any(fn(&Value) -> Option<T>),
    /// As a number of all the locks that were named.
    Count {
        locks: u64,
        read: fn(u64, u64) -> Option<T>,
    },
}

impl<T> Reader<T> {
    /// What the server's reply says.
    pub(crate) fn read(&self, reply: &Value) -> Result<T, Error> {
        if let Value::ServerError(refusal) = reply {
            return Err(Error::from_server(refusal));
        }
        // A reply of another shape comes from something that is not the module: what it has done
        // nobody can say.
        let read = match self {
            Self::Any(read) => read(reply),
            Self::Count { locks, read } => read_count(reply).and_then(|count| read(count, *locks)),
        };
        read.ok_or_else(|| {
            let text = "the reply is not one of an RLOCK command";
            Error::no_reply(Some(RedisError::from((
                redis::ErrorKind::UnexpectedReturnType,
                text,
            ))))
        })
    }
}

/// What a server says of itself, as far as it does to this user.
pub(crate) struct Handshake {
    pub(crate) is_replica: bool,
    /// Another one in each life.
    pub(crate) run_id: Option<String>,
}

impl Handshake {
    /// Reads the answers to [`handshake`](crate::wire::request::handshake).
    pub(crate) fn read(answers: &[Value]) -> Self {
        let [hello, info] = answers else {
            return Self {
                is_replica: false,
                run_id: None,
            };
        };
        Self {
            is_replica: read_role(hello).is_some_and(|role| role != b"master"),
            run_id: read_run_id(info),
        }
    }
}

fn read_role(hello: &Value) -> Option<&[u8]> {
    let Value::Map(fields) = hello else {
        return None;
    };
    let role = fields.iter().find(|(key, _)| bytes(key) == Some(b"role"));
    role.and_then(|(_, role)| bytes(role))
}

fn read_run_id(info: &Value) -> Option<String> {
    let text = match info {
        Value::VerbatimString { text, .. } => text.as_str(),
        other => std::str::from_utf8(bytes(other)?).ok()?,
    };
    let mut lines = text.lines();
    let run_id = lines.find_map(|line| line.strip_prefix("run_id:"));
    run_id.map(str::to_owned)
}

/// What an ACQUIRE came to.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Acquired {
    /// Held, with this fencing token.
    Granted {
        token: u64,
        /// Whether the owner held none of it before.
        fresh: bool,
    },
    /// In line; what comes of it is told by an event.
    Queued,
    /// Not held; what is left of the present lease, `None` if the key has no expiry.
    NotHeld { lease_left: Option<Duration> },
}

/// What a RELEASE came to.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Released {
    /// One hold less.
    Done,
    /// It was not held by this owner, or not with this token; of several not all.
    NotHeld,
}

/// What has happened to one owner at one lock.
#[derive(Clone, Debug)]
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
}

/// Who has what a connection has written.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Copied {
    /// Whether the server has it on its disk, as far as that was asked.
    pub(crate) local: bool,
    pub(crate) replicas: u64,
}

pub(super) fn read_copied(reply: &Value) -> Option<Copied> {
    let (local, replicas) = match reply {
        Value::Array(counts) => match counts.as_slice() {
            [local, replicas] => (read_count(local)? > 0, replicas),
            _ => return None,
        },
        replicas => (false, replicas),
    };
    let replicas = read_count(replicas)?;
    Some(Copied { local, replicas })
}

pub(super) fn read_slots(reply: &Value) -> Option<Vec<Range>> {
    let Value::Array(ranges) = reply else {
        return None;
    };
    ranges.iter().map(read_range).collect()
}

fn read_range(range: &Value) -> Option<Range> {
    let Value::Array(parts) = range else {
        return None;
    };
    let [Value::Int(first), Value::Int(last), nodes @ ..] = parts.as_slice() else {
        return None;
    };
    let nodes: Vec<_> = nodes.iter().map(read_node).collect::<Option<_>>()?;
    // Without its primary nothing can be said of the range.
    let is_known = nodes.first().is_some_and(Option::is_some);
    let nodes = nodes.into_iter().filter(|_| is_known);
    Some(Range {
        first: u16::try_from(*first).ok()?,
        last: u16::try_from(*last).ok()?,
        nodes: nodes.flatten().collect(),
    })
}

/// A node, if it can be said where it is. With no host it is where the one that was asked is. One
/// that should be called by its name and has none is `?`, and has its address beside it.
#[expect(clippy::option_option, reason = "no node, and a node that is nowhere")]
fn read_node(node: &Value) -> Option<Option<Member>> {
    let Value::Array(parts) = node else {
        return None;
    };
    let [host, Value::Int(port), more @ ..] = parts.as_slice() else {
        return None;
    };
    let port = u16::try_from(*port).ok()?;
    let details = more.get(1);
    let [ip, hostname] = ["ip", "hostname"].map(|name| details.and_then(|all| detail(all, name)));
    let host = match text(host) {
        Some(NAMELESS) if ip.is_none() => return Some(None),
        Some(NAMELESS) => ip.clone(),
        host => host.and_then(named),
    };
    let id = more.first().and_then(text).and_then(named);
    let other_hosts = [ip, hostname].into_iter().flatten().collect();
    Some(Some(Member {
        id,
        host,
        port,
        other_hosts,
    }))
}

/// A host in what else is said of a node: names and values, as a map or behind one another.
fn detail(details: &Value, name: &str) -> Option<Box<str>> {
    let is_it = |one: &Value| text(one) == Some(name);
    let value = match details {
        Value::Map(pairs) => pairs.iter().find(|(one, _)| is_it(one)).map(|(_, ip)| ip),
        Value::Array(words) => words
            .chunks_exact(2)
            .find_map(|pair| is_it(pair.first()?).then(|| pair.get(1))?),
        _ => None,
    };
    value.and_then(text).and_then(named)
}

fn text(value: &Value) -> Option<&str> {
    std::str::from_utf8(bytes(value)?).ok()
}

pub(super) fn read_acquired(reply: &Value) -> Option<Acquired> {
    let Value::Array(values) = reply else {
        return None;
    };
    match values.as_slice() {
        [Value::Int(count), Value::Int(token)] if *count >= 1 => Some(Acquired::Granted {
            token: u64::try_from(*token).ok()?,
            fresh: *count == 1,
        }),
        [Value::Int(0), Value::Int(ttl_ms)] => {
            let lease_left = time_left(*ttl_ms);
            Some(Acquired::NotHeld { lease_left })
        }
        [Value::Int(-1), Value::Int(1..)] => Some(Acquired::Queued),
        _ => None,
    }
}

fn time_left(ttl_ms: i64) -> Option<Duration> {
    u64::try_from(ttl_ms).ok().map(Duration::from_millis)
}

pub(super) fn read_events(reply: &Value) -> Option<Vec<Event>> {
    let Value::Array(events) = reply else {
        return None;
    };
    let mut read = Vec::with_capacity(events.len());
    for event in events {
        let Value::Array(parts) = event else {
            return None;
        };
        let [kind, name, owner, value] = parts.as_slice() else {
            return None;
        };
        let (name, owner) = (bytes(name)?.to_vec(), bytes(owner)?.to_vec());
        // A kind that a later server may add is nothing to us.
        if let Some(read_kind) = reader_of(bytes(kind)?) {
            let kind = read_kind(value)?;
            read.push(Event { name, owner, kind });
        }
    }
    Some(read)
}

fn reader_of(kind: &[u8]) -> Option<fn(&Value) -> Option<EventKind>> {
    match kind {
        b"granted" => Some(read_granted),
        b"timeout" => Some(read_timeout),
        b"lost" => Some(read_lost),
        b"error" => Some(read_error),
        _ => None,
    }
}

fn read_granted(value: &Value) -> Option<EventKind> {
    let token = read_count(value)?;
    Some(EventKind::Granted { token })
}

fn read_timeout(value: &Value) -> Option<EventKind> {
    let Value::Int(ttl_ms) = value else {
        return None;
    };
    let lease_left = time_left(*ttl_ms);
    Some(EventKind::TimedOut { lease_left })
}

fn read_lost(value: &Value) -> Option<EventKind> {
    bytes(value).map(|reason| EventKind::Lost(LostReason::from_server(reason)))
}

fn read_error(value: &Value) -> Option<EventKind> {
    let text = String::from_utf8_lossy(bytes(value)?);
    Some(EventKind::Failed(Error::from_text(&text)))
}

fn bytes(value: &Value) -> Option<&[u8]> {
    match value {
        Value::BulkString(bytes) => Some(bytes),
        Value::SimpleString(text) => Some(text.as_bytes()),
        _ => None,
    }
}

pub(super) fn read_released(reply: &Value) -> Option<Released> {
    match reply {
        Value::Nil => Some(Released::NotHeld),
        Value::Int(0..) => Some(Released::Done),
        _ => None,
    }
}

pub(super) fn read_all_released(released: u64, locks: u64) -> Option<Released> {
    let all = read_all_renewed(released, locks)?;
    Some(if all {
        Released::Done
    } else {
        Released::NotHeld
    })
}

pub(super) fn read_all_renewed(renewed: u64, locks: u64) -> Option<bool> {
    (renewed <= locks).then_some(renewed == locks)
}

pub(super) fn read_count(reply: &Value) -> Option<u64> {
    match reply {
        Value::Int(count) => u64::try_from(*count).ok(),
        _ => None,
    }
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
    /// Where a command has to go instead, if that is what the server said.
    pub(crate) fn of(error: &Error) -> Option<Self> {
        error.refusal().and_then(Self::read)
    }

    /// Reads `MOVED slot host:port` or `ASK slot host:port`.
    fn read(text: &str) -> Option<Self> {
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
#[derive(Clone, Debug, PartialEq, Eq)]
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
        let held = |token, fresh| Some(Acquired::Granted { token, fresh });
        let not_held = |lease_left| Some(Acquired::NotHeld { lease_left });
        assert_eq!(read_acquired(&pair(1, 9)), held(9, true));
        assert_eq!(read_acquired(&pair(2, 9)), held(9, false));
        assert_eq!(read_acquired(&pair(0, -1)), not_held(None));
        assert_eq!(
            read_acquired(&pair(0, 5)),
            not_held(Some(Duration::from_millis(5)))
        );
        assert_eq!(read_acquired(&pair(-1, 1)), Some(Acquired::Queued));
        assert_eq!(read_acquired(&pair(-1, 0)), None);
        assert_eq!(read_acquired(&Value::Okay), None);
        assert_eq!(read_released(&Value::Nil), Some(Released::NotHeld));
        assert_eq!(read_released(&Value::Int(0)), Some(Released::Done));
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
        let node = read_node(&node).flatten().expect("a node");
        assert_eq!(node.other_hosts, ["10.0.0.1", "name"].map(Box::from));
        let old = Value::Array(vec![text("10.0.0.1"), Value::Int(7)]);
        let old = read_node(&old).flatten().expect("a node");
        assert_eq!((old.id, old.other_hosts), (None, vec![]));
    }

    #[test]
    fn events_are_read_in_order_and_kinds_of_the_future_are_passed_over() {
        let text = |text: &str| Value::BulkString(text.into());
        let event = |kind: &str, value| Value::Array(vec![text(kind), text("n"), text("o"), value]);
        let reply = Value::Array(vec![
            event("granted", Value::Int(7)),
            event("invented", Value::Nil),
            event("timeout", Value::Int(-1)),
            event("lost", text("broken")),
            event("error", text("WRONGTYPE not a lock")),
        ]);
        let events = read_events(&reply).expect("well formed");
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
            EventKind::Failed(error),
        ] = news.as_slice()
        else {
            panic!("{news:?}")
        };
        assert!(error.is_refused(), "{error}");
        assert!(read_events(&Value::Array(vec![event("granted", Value::Nil)])).is_none());
        assert!(read_events(&Value::Array(vec![Value::Nil])).is_none());
        assert!(read_events(&Value::Array(vec![])).is_some_and(|events| events.is_empty()));
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
