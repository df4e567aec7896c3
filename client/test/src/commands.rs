//! The commands that the client crate sends, read and answered as the server does.

use std::cell::RefCell;
use std::collections::BTreeMap;

use bytes::Bytes;
use redis_protocol::resp3::types::BytesFrame as Frame;
use rlock_core::guarded;
use rlock_core::request::{self, WaitMode};
use rlock_core::{
    Command, CommandError, Event, EventKind, LostReason, Mode, NotGuarded, Now, Token, Told,
};
use tokio_util::sync::CancellationToken;

use crate::engine::{Acquired, Engine, Listened, Listener, USER, named_by_user};
use crate::server::Membership;

/// A client's connection, as the server knows it.
#[derive(Debug)]
pub(crate) struct Client {
    pub(crate) id: u64,
    pub(crate) db: i32,
    /// How much was written in all when it wrote last.
    pub(crate) written: u64,
    /// Whether its last command was `ASKING`.
    pub(crate) is_asking: bool,
}

/// The reply to a command.
pub(crate) enum Reply {
    Now(Frame),
    /// When the listener is woken.
    Later(Listener),
    /// When enough replicas have this client's writes, or the time is over.
    Copied(Copied),
}

/// The arguments of WAIT and WAITAOF.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Copied {
    pub(crate) replicas: i64,
    /// 0 for no limit.
    pub(crate) within_ms: u64,
    /// Whether on disks.
    pub(crate) on_disk: bool,
}

impl Copied {
    /// The reply, if this number of replicas has the writes. A write is on the disk at once, at
    /// replicas too.
    pub(crate) fn answer(&self, replicas: i64) -> Frame {
        if self.on_disk {
            array(vec![number(1), number(replicas)])
        } else {
            number(replicas)
        }
    }
}

/// The connections of a server, by the number of the client. Cancelled, one is closed.
#[derive(Debug, Default)]
pub(crate) struct Connections(RefCell<BTreeMap<u64, CancellationToken>>);

impl Connections {
    /// A connection, which lives no longer than `all`.
    pub(crate) fn open(&self, client: u64, all: &CancellationToken) -> CancellationToken {
        let open = all.child_token();
        self.0.borrow_mut().insert(client, open.clone());
        open
    }

    /// Closes the connection of a client. Returns false if it was closed already.
    pub(crate) fn close(&self, client: u64) -> bool {
        let open = self.0.borrow_mut().remove(&client);
        open.is_some_and(|open| {
            open.cancel();
            true
        })
    }
}

/// How the server speaks of itself.
pub(crate) struct Identity<'a> {
    /// The number of the server, and of its life.
    pub(crate) run_id: (u64, u64),
    pub(crate) is_replica: bool,
    pub(crate) connections: &'a Connections,
    /// In a cluster.
    pub(crate) membership: Option<&'a Membership>,
}

/// The id of one life of a server, from a start to the next.
pub(crate) fn run_id((id, life): (u64, u64)) -> String {
    format!("{id:016x}{life:024x}")
}

impl Identity<'_> {
    fn run_id(&self) -> String {
        run_id(self.run_id)
    }

    /// The id by which a client recognises this server: in a cluster the node's id.
    fn server_id(&self) -> String {
        let membership = self.membership;
        membership.map_or_else(|| self.run_id(), Membership::node_id)
    }
}

/// Carries a command out.
pub(crate) fn carry_out(
    engine: &mut Engine,
    client: &mut Client,
    who: &Identity<'_>,
    args: &[Bytes],
    now: Now,
) -> Reply {
    let Some((name, rest)) = args.split_first() else {
        return Reply::Now(error("ERR empty command"));
    };
    let name = String::from_utf8_lossy(name).to_uppercase();
    let is_asking = std::mem::replace(&mut client.is_asking, name == "ASKING");
    engine.set_asking(is_asking);
    let refusal = who.membership.and_then(|membership| {
        let has = |key: &[u8]| engine.has(client.db, key, now);
        membership.refuses(args, who.is_replica, is_asking, has)
    });
    if let Some(refusal) = refusal {
        return Reply::Now(refusal);
    }
    if who.is_replica && WRITES.contains(&&*name) {
        return Reply::Now(error(
            "READONLY You can't write against a read only replica.",
        ));
    }
    if name.starts_with("RLOCK.") {
        let refused = |refusal| match refusal {
            // The server's own words.
            CommandError::WrongArity => {
                let name = name.to_lowercase();
                error(&format!(
                    "ERR wrong number of arguments for '{name}' command"
                ))
            }
            refusal => error(&refusal.to_string()),
        };
        let reply = rlock(engine, client, who, (&name, rest), now);
        return reply.unwrap_or_else(|refusal| Reply::Now(refused(refusal)));
    }
    if matches!(&*name, "WAIT" | "WAITAOF") {
        return wait(who, &name, rest);
    }
    Reply::Now(server_command(client, who, &name, rest))
}

/// `WAIT replicas ms`, or `WAITAOF local replicas ms`.
fn wait(who: &Identity<'_>, name: &str, rest: &[Bytes]) -> Reply {
    if who.is_replica {
        return Reply::Now(error(&format!(
            "ERR {name} cannot be used with replica instances. Please also note that since Redis \
             4.0 if a replica is configured to be writable (which is not the default) writes to \
             replicas are just local and are not propagated."
        )));
    }
    let number = |arg: &Bytes| std::str::from_utf8(arg).ok()?.parse().ok();
    let numbers: Option<Vec<i64>> = rest.iter().map(number).collect();
    let on_disk = name == "WAITAOF";
    let (replicas, ms) = match (on_disk, numbers.as_deref()) {
        (false, Some([replicas, ms])) | (true, Some([_, replicas, ms])) => (*replicas, *ms),
        _ => {
            return Reply::Now(error("ERR value is not an integer or out of range"));
        }
    };
    match u64::try_from(ms) {
        Ok(within_ms) => Reply::Copied(Copied {
            replicas,
            within_ms,
            on_disk,
        }),
        Err(_) => Reply::Now(error("ERR timeout is negative")),
    }
}

/// The commands that only a primary carries out.
const WRITES: [&str; 10] = [
    "RLOCK.ACQUIRE",
    "RLOCK.MACQUIRE",
    "RLOCK.RELEASE",
    "RLOCK.MRELEASE",
    "RLOCK.RENEW",
    "RLOCK.MRENEW",
    "RLOCK.CANCEL",
    "RLOCK.BREAK",
    "RLOCK.LIMIT",
    "RLOCK.GUARD",
];

fn server_command(client: &mut Client, who: &Identity<'_>, name: &str, rest: &[Bytes]) -> Frame {
    match name {
        "HELLO" => hello(client, who),
        "INFO" => info(who, rest),
        "PING" => simple("PONG"),
        "CLIENT"
            if rest
                .first()
                .is_some_and(|of| of.eq_ignore_ascii_case(b"KILL")) =>
        {
            kill(who, rest)
        }
        "CLIENT" | "ASKING" => simple("OK"),
        "CLUSTER" if who.membership.is_some() => {
            let answer = who.membership.map(|of| of.answer(rest));
            answer.unwrap_or(Frame::Null)
        }
        "CLUSTER" => error("ERR This instance has cluster support disabled"),
        "SELECT" => {
            let text = rest.first().and_then(|db| std::str::from_utf8(db).ok());
            match text.and_then(|db| db.parse().ok()) {
                Some(db) => {
                    client.db = db;
                    simple("OK")
                }
                None => error("ERR invalid DB index"),
            }
        }
        _ => error(&format!(
            "ERR unknown command '{name}' in a server in memory"
        )),
    }
}

/// `CLIENT KILL ID client`. Nothing that comes on that connection is read any more.
fn kill(who: &Identity<'_>, rest: &[Bytes]) -> Frame {
    let id = match rest {
        [_, by, id] if by.eq_ignore_ascii_case(b"ID") => std::str::from_utf8(id).ok(),
        _ => None,
    };
    match id.and_then(|id| id.parse().ok()) {
        Some(id) => number(who.connections.close(id).into()),
        None => error("ERR syntax error"),
    }
}

fn info(who: &Identity<'_>, rest: &[Bytes]) -> Frame {
    let asks_for = |section: &str| {
        let is_it = |arg: &Bytes| arg.eq_ignore_ascii_case(section.as_bytes());
        rest.is_empty() || rest.iter().any(is_it)
    };
    let role = if who.is_replica { "slave" } else { "master" };
    let run_id = who.run_id();
    let sections = [
        ("server", format!("# Server\r\nrun_id:{run_id}\r\n")),
        ("replication", format!("# Replication\r\nrole:{role}\r\n")),
    ];
    let asked = sections
        .into_iter()
        .filter(|(section, _)| asks_for(section));
    let text: String = asked.map(|(_, text)| text).collect();
    blob(text)
}

fn hello(client: &Client, who: &Identity<'_>) -> Frame {
    let role = if who.is_replica { "replica" } else { "master" };
    let mode = if who.membership.is_some() {
        "cluster"
    } else {
        "standalone"
    };
    let pairs = [
        ("server", blob("redis")),
        ("version", blob("7.0.15")),
        ("proto", number(3)),
        ("id", number(i64::try_from(client.id).unwrap_or(i64::MAX))),
        ("mode", blob(mode)),
        ("role", blob(role)),
        ("modules", array(Vec::new())),
    ];
    Frame::Map {
        data: pairs.map(|(key, value)| (blob(key), value)).into(),
        attributes: None,
    }
}

fn rlock(
    engine: &mut Engine,
    client: &Client,
    who: &Identity<'_>,
    (name, rest): (&str, &[Bytes]),
    now: Now,
) -> Result<Reply, CommandError> {
    let (args, db) = (|| rest.iter().map(|arg| &arg[..]), client.db);
    let frame = match name {
        "RLOCK.ACQUIRE" => {
            let mut request = request::Acquire::parse(args())?;
            request.session = named_by_user(request.session);
            match request.asked {
                Some(asked) => engine.check_limit_slot(request.key, asked.limit.is_some())?,
                None => engine.check_slot(request.key, request.mode)?,
            }
            let command = Command::Acquire(&request);
            acquire(engine, command, request.wait_mode, db, now)?
        }
        "RLOCK.MACQUIRE" => {
            let mut request = request::MultiAcquire::parse(args())?;
            request.session = named_by_user(request.session);
            let command = Command::MultiAcquire(&request);
            acquire(engine, command, request.wait_mode, db, now)?
        }
        "RLOCK.RELEASE" => {
            let mut request = request::Release::parse(args())?;
            request.by = Some(client.id);
            engine.check_slot(request.key, request.mode)?;
            let left = engine.decide(Command::Release(&request), db, now)?;
            left.map_or(Frame::Null, number)
        }
        "RLOCK.GUARD" => guard(engine, rest, db, now)?,
        "RLOCK.EVENTS" => {
            let mut request = request::Events::parse(args())?;
            request.session.user = USER;
            match engine.listen(&request, client.id, now)? {
                Listened::Events(told) => events(&told),
                Listened::Waits(listener) => return Ok(Reply::Later(listener)),
            }
        }
        "RLOCK.BIND" => {
            let mut request = request::Bind::parse(args())?;
            request.session.user = USER;
            // Its commands that were not read yet are never carried out.
            if let Some(former) = engine.bind(&request, client.id)? {
                who.connections.close(former);
            }
            let life = engine.life_of(request.session)?;
            array(vec![number(life), blob(who.server_id())])
        }
        "RLOCK.MRELEASE" => {
            let mut request = request::MultiRelease::parse(args())?;
            request.by = Some(client.id);
            let released = engine.decide(Command::MultiRelease(&request), db, now)?;
            number(released.ok_or(CommandError::Unsettled)?)
        }
        _ => number(decide_number(engine, name, rest, db, now)?),
    };
    Ok(Reply::Now(frame))
}

/// Only commands of the server that name no keys, since all keys here are locks.
fn guard(engine: &mut Engine, rest: &[Bytes], db: i32, now: Now) -> Result<Frame, CommandError> {
    let request = request::Guard::parse(rest.iter().map(|arg| &arg[..]))?;
    // Among `rest` there is no name before it.
    let words = rest.get(request.place..).unwrap_or_default();
    let unknown = || guarded::refusal(request.command, NotGuarded::Unknown);
    let reply = match (&*request.command.to_ascii_lowercase(), words) {
        (b"ping", []) => simple("PONG"),
        (b"ping" | b"echo", [text]) => blob(text.clone()),
        _ => return Err(unknown()),
    };
    engine.check_slot(request.key, request.mode)?;
    engine.decide(Command::Guard(&request), db, now)?;
    engine.runs_guarded(&request, words, db, now);
    Ok(reply)
}

fn decide_number(
    engine: &mut Engine,
    name: &str,
    rest: &[Bytes],
    db: i32,
    now: Now,
) -> Result<i64, CommandError> {
    let args = || rest.iter().map(|arg| &arg[..]);
    let number = match name {
        "RLOCK.RENEW" => {
            let mut request = request::Renew::parse(args())?;
            request.session = named_by_user(request.session);
            engine.check_slot(request.key, request.mode)?;
            engine.decide(Command::Renew(&request), db, now)?
        }
        "RLOCK.MRENEW" => {
            let mut request = request::MultiRenew::parse(args())?;
            request.session = named_by_user(request.session);
            engine.decide(Command::MultiRenew(&request), db, now)?
        }
        "RLOCK.CANCEL" => {
            let request = request::Cancel::parse(args())?;
            engine.decide(Command::Cancel(&request), db, now)?
        }
        "RLOCK.LIMIT" => {
            let request = request::Limit::parse(args())?;
            engine.check_limit_slot(request.key, false)?;
            engine.decide(Command::Limit(&request), db, now)?
        }
        "RLOCK.BREAK" => {
            let request = request::KeyOnly::parse(args())?;
            engine.check_slot_of_any(db, request.key, now)?;
            engine.decide(Command::Break(request.key), db, now)?
        }
        _ => return Err(CommandError::WrongArity),
    };
    number.ok_or(CommandError::Unsettled)
}

fn acquire(
    engine: &mut Engine,
    command: Command<'_>,
    wait_mode: WaitMode,
    db: i32,
    now: Now,
) -> Result<Frame, CommandError> {
    let numbers = match engine.acquire(command, wait_mode, db, now)? {
        Acquired::Held { count, token } => vec![count, token],
        Acquired::NotHeld { ttl_ms } => vec![0, ttl_ms],
        Acquired::Queued(joined) => {
            let (seq, life) = joined.moment.map_or((0, 0), |of| (seq(of.seq), of.life));
            vec![-1, joined.position, seq, life]
        }
    };
    Ok(array(numbers.into_iter().map(number).collect()))
}

fn seq(seq: u64) -> i64 {
    i64::try_from(seq).unwrap_or(i64::MAX)
}

/// The answer to RLOCK.EVENTS.
pub(crate) fn events(told: &Told) -> Frame {
    let numbers = told.after.seq.saturating_add(1)..;
    let events = numbers.zip(&told.events);
    let events = events.map(|(number, of)| event(number, of)).collect();
    array(vec![number(told.after.life), array(events)])
}

fn event(number_of_it: u64, event: &Event) -> Frame {
    let (kind, value) = match &event.kind {
        EventKind::Granted => ("granted", number(token(event))),
        EventKind::Timeout { ttl_ms } => ("timeout", number(*ttl_ms)),
        EventKind::Left => ("left", number(0)),
        EventKind::Lost(reason) => {
            let reason = match reason {
                LostReason::Expired => "expired",
                LostReason::Broken => "broken",
                LostReason::Deleted => "deleted",
                LostReason::Released => "released",
                LostReason::Taken => "taken",
            };
            ("lost", blob(reason))
        }
        EventKind::Error(refusal) => ("error", blob(refusal.to_string())),
        EventKind::Wanted { waiters } => ("wanted", number((*waiters).into())),
    };
    let mode = match event.mode {
        Mode::Plain => "plain",
        Mode::Read => "read",
        Mode::Write => "write",
        Mode::Permits => "permits",
    };
    array(vec![
        number(seq(number_of_it)),
        blob(kind),
        blob(event.lock.name.to_vec()),
        blob(event.owner.to_vec()),
        value,
        number(token(event)),
        blob(mode),
        number(event.lock.db.into()),
    ])
}

fn token(event: &Event) -> i64 {
    event.token.map_or(0, Token::get)
}

/// An answer in a line of a log.
pub(crate) fn shown(frame: &Frame) -> String {
    match frame {
        Frame::Array { data, .. } => {
            let all: Vec<_> = data.iter().map(shown).collect();
            format!("[{}]", all.join(" "))
        }
        Frame::Number { data, .. } => data.to_string(),
        Frame::BlobString { data, .. } | Frame::SimpleString { data, .. } => {
            data.escape_ascii().to_string()
        }
        Frame::SimpleError { data, .. } => data.to_string(),
        Frame::Null => "null".to_owned(),
        _ => "a map".to_owned(),
    }
}

pub(crate) fn error(text: &str) -> Frame {
    Frame::SimpleError {
        data: text.into(),
        attributes: None,
    }
}

pub(crate) fn simple(text: &'static str) -> Frame {
    Frame::SimpleString {
        data: text.into(),
        attributes: None,
    }
}

pub(crate) fn blob(bytes: impl Into<Bytes>) -> Frame {
    Frame::BlobString {
        data: bytes.into(),
        attributes: None,
    }
}

pub(crate) fn number(data: i64) -> Frame {
    Frame::Number {
        data,
        attributes: None,
    }
}

pub(crate) fn array(data: Vec<Frame>) -> Frame {
    Frame::Array {
        data,
        attributes: None,
    }
}
