//! The servers as an operator sees them: every primary, and commands that are sent to each or to
//! the one that has a lock.

use std::time::Duration;

use redis::aio::MultiplexedConnection;
use redis::{
    Arg, AsyncConnectionConfig, ClientTlsConfig, Cmd, ConnectionAddr, ConnectionInfo,
    ProtocolVersion, RedisError, TlsCertificates, Value, cmd,
};
use serde_json::Value as Json;
use tokio::task::JoinSet;

use crate::connect::Connection;
use crate::exit::Failure;
use crate::reply::{json, shown, words};

/// One server, and a connection to it.
pub(crate) struct Node {
    /// `host:port`.
    pub(crate) address: String,
    /// The user that is logged in there.
    user: String,
    connection: MultiplexedConnection,
}

impl Node {
    /// Its answer.
    pub(crate) async fn ask(&self, command: &Cmd) -> Result<Json, RedisError> {
        self.ask_raw(command).await.map(|value| json(&value))
    }

    pub(crate) async fn ask_raw(&self, command: &Cmd) -> Result<Value, RedisError> {
        let mut connection = self.connection.clone();
        connection
            .send_packed_command(command)
            .await?
            .extract_error()
    }

    /// The answers to several commands that are sent at once. An error of one may be about its key,
    /// and is an answer; a command that the user may not use at all is an error of all.
    pub(crate) async fn ask_all(
        &self,
        commands: &redis::Pipeline,
    ) -> Result<Vec<Value>, RedisError> {
        let count = commands.cmd_iter().count();
        let mut connection = self.connection.clone();
        let replies = connection.send_packed_commands(commands, 0, count).await?;
        match replies.iter().find_map(refused_command) {
            Some(refusal) => Err(refusal),
            None => Ok(replies),
        }
    }

    /// The reply of RLOCK.INFO for each of these names, or the error of one.
    pub(crate) async fn infos(&self, names: &[Vec<u8>]) -> Result<Vec<Json>, RedisError> {
        let mut infos = Vec::new();
        for some in names.chunks(AT_ONCE) {
            let mut ask = redis::pipe();
            for name in some {
                ask.cmd("RLOCK.INFO").arg(name);
            }
            infos.extend(self.ask_all(&ask).await?.iter().map(json));
        }
        Ok(infos)
    }

    /// The node's reply to a command, or the failure to report.
    pub(crate) async fn must(&self, command: &Cmd) -> Result<Json, Failure> {
        let asked = self.ask(command).await;
        asked.map_err(|error| self.failure_for(command, &error))
    }

    /// The failure to report for an error of this node.
    pub(crate) fn failure(&self, error: &RedisError) -> Failure {
        Failure::unavailable(format!("{}: {}", self.address, self.said(error)))
    }

    /// Its error in its own words, and which right this user lacks.
    pub(crate) fn said(&self, error: &RedisError) -> String {
        said(error, &self.user, None)
    }

    /// The same for a command whose first argument is a key.
    fn failure_for(&self, command: &Cmd, error: &RedisError) -> Failure {
        let key = match command.args_iter().nth(1) {
            Some(Arg::Simple(key)) => Some(key),
            _ => None,
        };
        Failure::unavailable(format!(
            "{}: {}",
            self.address,
            said(error, &self.user, key)
        ))
    }

    /// The reply of RLOCK.LIST: for each lock its name, the number of its waiters, and the longest
    /// wait in milliseconds.
    pub(crate) async fn waited_for(
        &self,
        list: &Cmd,
    ) -> Result<Vec<(Vec<u8>, i64, i64)>, RedisError> {
        Ok(redis::from_redis_value(self.ask_raw(list).await?)?)
    }
}

/// A server's error in its own words, and which right this user lacks for the key.
fn said(error: &RedisError, user: &str, key: Option<&[u8]>) -> String {
    if let Some(right) = missing_right(error) {
        let key: Vec<_> = key.map(words).into_iter().collect();
        return lacks(user, &right, &key);
    }
    match (error.code(), error.detail()) {
        (Some("ERR"), Some(text)) if text.starts_with("unknown command") => {
            "it has no RLOCK module, or an older one: `rlock doctor` says more".to_owned()
        }
        (Some("MOVED"), _) => IS_IN_A_CLUSTER.to_owned(),
        (Some("READONLY"), _) => IS_A_REPLICA.to_owned(),
        (Some("WRONGTYPE"), Some(text)) if let Some(key) = key => {
            format!("WRONGTYPE {}: {text}", shown(&words(key)))
        }
        (Some(code), text) => format!("{code} {}", text.unwrap_or_default()),
        _ => error.to_string(),
    }
}

/// The advice after `MOVED`.
pub(crate) const IS_IN_A_CLUSTER: &str =
    "it is a node of a cluster, and the lock is at another node: add --cluster";

/// The advice after `READONLY`.
pub(crate) const IS_A_REPLICA: &str =
    "READONLY it is a replica: --url has to lead to the primary, or to sentinels with --sentinel";

/// Which right a user lacks. One for a key is named with the keys themselves.
pub(crate) fn lacks(user: &str, right: &str, keys: &[String]) -> String {
    let rights = match (right, keys) {
        ("~NAME", [_, ..]) => {
            let each = keys.iter().map(|key| format!("~{key}"));
            each.collect::<Vec<_>>().join(" ")
        }
        _ => right.to_owned(),
    };
    let (user, rights) = (shown(user), shown(&rights));
    format!("NOPERM the user {user} needs the right {rights}")
}

/// The name under which a connection logs in.
pub(crate) fn user_of(info: &ConnectionInfo) -> &str {
    info.redis_settings().username().unwrap_or("default")
}

fn refused_command(reply: &Value) -> Option<RedisError> {
    let Value::ServerError(error) = reply else {
        return None;
    };
    let error = RedisError::from(error.clone());
    let right = missing_right(&error)?;
    right.starts_with('+').then_some(error)
}

/// The right whose lack is the reason of a refusal, as ACL SETUSER takes it.
pub(crate) fn missing_right(error: &RedisError) -> Option<String> {
    if error.code() != Some("NOPERM") {
        return None;
    }
    right_in(&format!("NOPERM {}", error.detail().unwrap_or_default()))
}

/// The same, from the words of a refusal. They quote the command that may not be used; the others
/// are about a key.
pub(crate) fn right_in(refusal: &str) -> Option<String> {
    let (_, detail) = refusal.split_once("NOPERM")?;
    let quoted = detail.rsplit('\'').nth(1);
    Some(quoted.map_or_else(|| "~NAME".to_owned(), |command| format!("+{command}")))
}

/// The nodes that were found: the server, or a cluster's primaries. One at least, reached or not.
pub(crate) struct Found {
    pub(crate) nodes: Vec<Node>,
    /// The addresses of those that could not be connected to.
    pub(crate) unreachable: Vec<String>,
    /// How many slots of the cluster have no primary.
    unserved: i64,
}

impl Found {
    /// Connects to all of them.
    pub(crate) async fn connect(connection: &Connection) -> Result<Self, Failure> {
        let infos = connection.infos()?;
        let tries = infos
            .iter()
            .map(|info| discover(connection.clone(), info.clone()));
        let (first, slots) = first_of(tries).await?;
        let Some(slots) = slots else {
            return Ok(Self {
                nodes: vec![first],
                unreachable: Vec::new(),
                unserved: 0,
            });
        };
        let like = infos.into_iter().next();
        let like = like.ok_or_else(|| Failure::usage("no URL"))?;
        let infos = slots.primaries.iter();
        let infos = infos.map(|address| at(like.clone(), address));
        Ok(Self {
            unserved: slots.unserved,
            ..Self::open_each(connection, infos.collect::<Result<_, _>>()?).await
        })
    }

    /// Connects to the server of each URL: a primary and its replicas, say.
    pub(crate) async fn each(connection: &Connection) -> Result<Self, Failure> {
        Ok(Self::open_each(connection, connection.infos_of_each()?).await)
    }

    async fn open_each(connection: &Connection, infos: Vec<ConnectionInfo>) -> Self {
        let opened = infos.iter().map(|info| {
            let (connection, info) = (connection.clone(), info.clone());
            async move { open(&connection, info).await }
        });
        let (mut nodes, mut unreachable) = (Vec::new(), Vec::new());
        for (info, opened) in infos.iter().zip(all_of(opened).await) {
            match opened {
                Some(Ok(node)) => nodes.push(node),
                _ => unreachable.push(address_of(info)),
            }
        }
        Self {
            nodes,
            unreachable,
            unserved: 0,
        }
    }
}

/// All primaries: one, or those of a cluster. There is no fleet without a node: with none, every
/// command would report that all is well.
pub(crate) struct Fleet {
    first: Node,
    rest: Vec<Node>,
    /// How many slots of the cluster have no primary.
    pub(crate) unserved: i64,
}

impl Fleet {
    /// Connects to all of them; a list without those of one node would be a wrong one.
    pub(crate) async fn connect(connection: &Connection) -> Result<Self, Failure> {
        let found = Found::connect(connection).await?;
        if let Some(address) = found.unreachable.first() {
            return Err(Failure::unavailable(format!(
                "the node {address} of the cluster cannot be reached"
            )));
        }
        let mut nodes = found.nodes.into_iter();
        let first = nodes.next();
        Ok(Self {
            first: first.ok_or_else(|| Failure::unavailable("no primary"))?,
            rest: nodes.collect(),
            unserved: found.unserved,
        })
    }

    pub(crate) fn nodes(&self) -> impl Iterator<Item = &Node> {
        std::iter::once(&self.first).chain(&self.rest)
    }

    /// The reply of the node that has this lock.
    pub(crate) async fn ask_for(&self, command: &Cmd) -> Result<Json, Failure> {
        let mut node = &self.first;
        // Twice, since the first node may send on to another.
        for _ in 0..2 {
            match node.ask(command).await {
                Err(error) if error.code() == Some("MOVED") => {
                    let place = error.detail().unwrap_or_default().to_owned();
                    let place = place.rsplit(' ').next().unwrap_or_default();
                    let other = self.nodes().find(|node| node.address == place);
                    node = other.ok_or_else(|| node.failure_for(command, &error))?;
                }
                Err(error) => return Err(node.failure_for(command, &error)),
                Ok(reply) => return Ok(reply),
            }
        }
        Err(Failure::unavailable("the slot is moving; try again"))
    }

    /// The replies of all nodes, one after the other.
    pub(crate) async fn ask_each(&self, command: &Cmd) -> Result<Vec<Json>, Failure> {
        let mut all = Vec::new();
        for node in self.nodes() {
            if let Json::Array(replies) = node.must(command).await? {
                all.extend(replies);
            }
        }
        Ok(all)
    }
}

/// The one server, or a node of the cluster with its view of the slots.
async fn discover(
    connection: Connection,
    info: ConnectionInfo,
) -> Result<(Node, Option<Slots>), Failure> {
    let info = match &connection.sentinel {
        Some(service) => primary_of(&connection, info, service).await?,
        None => info,
    };
    let node = open(&connection, info).await?;
    let slots = if connection.cluster {
        Some(Slots::of(&node).await?)
    } else {
        None
    };
    Ok((node, slots))
}

/// The first that succeeds, or a failure of one. They run at once: one that hangs delays no other.
async fn first_of<T: Send + 'static>(
    tries: impl Iterator<Item = impl Future<Output = Result<T, Failure>> + Send + 'static>,
) -> Result<T, Failure> {
    let mut tries: JoinSet<_> = tries.collect();
    let mut failure = Failure::usage("no URL");
    while let Some(tried) = tries.join_next().await {
        match tried {
            Ok(Ok(found)) => return Ok(found),
            Ok(Err(error)) => failure = error,
            Err(_) => {} // one that panicked has said so
        }
    }
    Err(failure)
}

/// The outcomes of all, in their order; none of one that panicked. They run at once.
pub(crate) async fn all_of<T: Send + 'static>(
    tasks: impl Iterator<Item = impl Future<Output = T> + Send + 'static>,
) -> Vec<Option<T>> {
    let tasks: Vec<_> = tasks.map(tokio::spawn).collect();
    let mut outcomes = Vec::new();
    for task in tasks {
        outcomes.push(task.await.ok());
    }
    outcomes
}

/// A server that takes longer for a connection counts as unreachable.
const CONNECTED: Duration = Duration::from_secs(2);

/// A list of all waiters of a busy server takes its time.
const ANSWERED: Duration = Duration::from_secs(10);

/// Where a server is, as it is shown: `host:port`, or the path of a socket; never a password.
pub(crate) fn address_of(info: &ConnectionInfo) -> String {
    match info.addr() {
        ConnectionAddr::Tcp(host, port) | ConnectionAddr::TcpTls { host, port, .. } => {
            format!("{host}:{port}")
        }
        other => other.to_string(),
    }
}

async fn open(connection: &Connection, info: ConnectionInfo) -> Result<Node, Failure> {
    let (address, user) = (address_of(&info), user_of(&info).to_owned());
    let settings = info.redis_settings().clone();
    // With RESP3 the server sends maps as maps.
    let info = info.set_redis_settings(settings.set_protocol(ProtocolVersion::RESP3));
    let connected = match client(connection, info)? {
        Ok(client) => {
            let patience = AsyncConnectionConfig::new()
                .set_connection_timeout(Some(CONNECTED))
                .set_response_timeout(Some(ANSWERED));
            client
                .get_multiplexed_async_connection_with_config(&patience)
                .await
        }
        Err(error) => Err(error),
    };
    let connection = connected.map_err(|error| {
        let text = format!(
            "cannot use {address} ({}); --url or RLOCK_URL says where the server is",
            said(&error, &user, None)
        );
        Failure::unavailable(text)
    })?;
    Ok(Node {
        address,
        user,
        connection,
    })
}

fn client(
    connection: &Connection,
    info: ConnectionInfo,
) -> Result<Result<redis::Client, RedisError>, Failure> {
    if !matches!(info.addr(), ConnectionAddr::TcpTls { .. }) {
        return Ok(redis::Client::open(info));
    }
    // It fails if a provider is installed already, which is as good.
    let _ = rustls::crypto::ring::default_provider().install_default();
    let (root_cert, own) = connection.certificates()?;
    let client_tls = own.map(|(client_cert, client_key)| ClientTlsConfig {
        client_cert,
        client_key,
    });
    let certificates = TlsCertificates {
        client_tls,
        root_cert,
    };
    Ok(redis::Client::build_with_tls(info, certificates))
}

/// Where this sentinel says that the primary is, with the user's name.
async fn primary_of(
    connection: &Connection,
    sentinel: ConnectionInfo,
    service: &str,
) -> Result<ConnectionInfo, Failure> {
    let node = open(connection, sentinel).await?;
    let mut ask = cmd("SENTINEL");
    ask.arg("GET-MASTER-ADDR-BY-NAME").arg(service);
    let Json::Array(told) = node.must(&ask).await? else {
        let text = format!("the sentinel {} knows no primary {service}", node.address);
        return Err(Failure::unavailable(text));
    };
    let part = |index: usize| told.get(index).and_then(Json::as_str).unwrap_or_default();
    let service = connection.service_info(service)?;
    at(service, &format!("{}:{}", part(0), part(1)))
}

/// How many locks are asked for at once: a queue may be long, and the answers are kept in memory.
pub(crate) const AT_ONCE: usize = 100;

/// How many slots a cluster has.
const SLOTS: i64 = 16_384;

/// The primaries that serve the slots of a cluster, as one of its nodes knows them.
struct Slots {
    /// Each once, and one at least.
    primaries: Vec<String>,
    /// How many have no primary.
    unserved: i64,
}

impl Slots {
    /// A node that was not met by the others yet, or has forgotten them, knows of no slots. That is
    /// no answer: another one may know the cluster.
    async fn of(node: &Node) -> Result<Self, Failure> {
        let told = node.must(cmd("CLUSTER").arg("SLOTS")).await?;
        let ranges = told.as_array().map_or(&[][..], Vec::as_slice);
        let (own_host, _) = node.address.rsplit_once(':').unwrap_or_default();
        let (mut primaries, mut unserved) = (Vec::new(), SLOTS);
        for range in ranges {
            let Some(primary) = range.get(2) else {
                continue;
            };
            unserved = unserved.saturating_sub(length(range));
            let host = primary.get(0).and_then(Json::as_str).unwrap_or_default();
            let host = if host.is_empty() { own_host } else { host };
            let port = primary.get(1).and_then(Json::as_i64).unwrap_or_default();
            let address = format!("{host}:{port}");
            if !primaries.contains(&address) {
                primaries.push(address);
            }
        }
        if primaries.is_empty() {
            let text = format!(
                "the node {} knows of no slots of a cluster; --url takes several nodes",
                node.address
            );
            return Err(Failure::unavailable(text));
        }
        Ok(Self {
            primaries,
            unserved,
        })
    }
}

/// How many slots a range has, from its first to its last.
fn length(range: &Json) -> i64 {
    let end = |index: usize| range.get(index).and_then(Json::as_i64).unwrap_or_default();
    end(1).saturating_sub(end(0)).saturating_add(1)
}

/// Another server, spoken to in the same way.
fn at(info: ConnectionInfo, address: &str) -> Result<ConnectionInfo, Failure> {
    let place = address.rsplit_once(':');
    let place = place.and_then(|(host, port)| Some((host.to_owned(), port.parse().ok()?)));
    let Some((host, port)) = place else {
        return Err(Failure::unavailable(format!("{address} is no address")));
    };
    let there = match info.addr() {
        ConnectionAddr::TcpTls { insecure, .. } => ConnectionAddr::TcpTls {
            host,
            port,
            insecure: *insecure,
            tls_params: None,
        },
        _ => ConnectionAddr::Tcp(host, port),
    };
    Ok(info.set_addr(there))
}
