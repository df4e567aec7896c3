//! The client of a quorum: several servers, each with an ordinary client.

use std::fmt;
use std::sync::Arc;
use std::time::Duration;

use tokio::runtime::Handle;
use tokio::task::AbortHandle;
use tokio::time::timeout;

use crate::api::Client;
use crate::api::ClientBuilder;
use crate::api::Guard;
use crate::background::Background;
use crate::error::{Error, ErrorKind};
use crate::quorum::error::QuorumError;
use crate::quorum::lock::QuorumLock;
use crate::quorum::majority::{majority, refusal};
use crate::quorum::member::Member;
use crate::quorum::round::Round;
use crate::time::{MILLIS_MAX, within};
use crate::wire::connection::ServerId;

/// A connection to several independent servers, on which a lock is held as long as more than half
/// of them say so (the algorithm known as Redlock). Cheap to clone; clones are the same client.
///
/// It has an ordinary [`Client`] for each server. One that is down or slow costs nothing as long as
/// a majority is left: with three servers one may be, with five two. Servers that cannot be reached
/// are tried again in the background.
///
/// # When to use it
///
/// When a lock must outlive the loss of a server, and a failover, which can lose a grant, is not
/// good enough. It costs a command on every server, is not served first come first served, and its
/// tokens are [one a server](crate::QuorumGuard::tokens). What it promises rests on these:
///
/// - The servers are independent: primaries on machines of their own, none a replica of another.
/// - Their clocks, and this machine's, run at nearly the same speed, a hundredth apart at most.
///   They need not show the same time.
/// - A server that starts without the holds it had (no persistence, or one that lags) grants none
///   for longer than the [grace](crate::ClientBuilder::grace), or with a grace of zero than the
///   longest lease: set its option `rlock.grant-delay-ms` to that and a hundredth more, or keep it
///   away for as long. Otherwise it can make up a second majority with those that were never asked.
#[derive(Clone)]
pub struct QuorumClient {
    core: Arc<Core>,
}

impl QuorumClient {
    /// Connects to the servers at these URLs with the default settings: see [`QuorumBuilder`].
    ///
    /// # Cancel safety
    ///
    /// Dropping the future closes what it has opened.
    ///
    /// # Errors
    ///
    /// As [`QuorumBuilder::connect`].
    ///
    /// # Panics
    ///
    /// Outside a tokio runtime.
    ///
    /// # Examples
    ///
    /// ```no_run
    /// # async fn example() -> Result<(), rlock_client::QuorumError> {
    /// use rlock_client::QuorumClient;
    ///
    /// let servers = ["redis://a:6379", "redis://b:6379", "redis://c:6379"];
    /// let client = QuorumClient::connect(servers).await?;
    /// let guard = client.lock("orders").lock().await?;
    /// # Ok(())
    /// # }
    /// ```
    pub async fn connect<U: AsRef<str>>(
        urls: impl IntoIterator<Item = U>,
    ) -> Result<Self, QuorumError> {
        Self::builder().connect(urls).await
    }

    /// Settings other than the defaults: see [`QuorumBuilder`], which has an example.
    pub fn builder() -> QuorumBuilder {
        QuorumBuilder {
            settings: Client::builder(),
            server_timeout: SERVER_TIMEOUT,
        }
    }

    /// Names a lock. No I/O, and nothing to give back: the lock is taken by [`QuorumLock::lock`]
    /// and its siblings.
    ///
    /// The name is the key under which every one of the servers keeps the lock: any bytes.
    ///
    /// # Examples
    ///
    /// ```no_run
    /// # fn example(client: rlock_client::QuorumClient) {
    /// let orders = client.lock("orders");
    /// let one_of_many = client.lock(format!("order:{}", 4711));
    /// # }
    /// ```
    pub fn lock(&self, name: impl Into<Vec<u8>>) -> QuorumLock {
        QuorumLock::new(Arc::clone(&self.core), name.into().into())
    }

    /// Ends what is pending and waits until the servers know: see [`Client::shutdown`]. A server
    /// that cannot be reached is waited for, if something is to be given back there, for as long as
    /// the lease.
    ///
    /// # Cancel safety
    ///
    /// Dropping the future only gives up the waiting.
    ///
    /// # Examples
    ///
    /// ```no_run
    /// # async fn example(
    /// #     client: rlock_client::QuorumClient,
    /// # ) -> Result<(), rlock_client::QuorumError> {
    /// let guard = client.lock("orders").lock().await?;
    /// drop(guard); // is given back in the background …
    /// client.shutdown().await; // … and now the servers have it
    /// # Ok(())
    /// # }
    /// ```
    pub async fn shutdown(&self) {
        self.core.stop_connecting();
        self.core.background.close();
        self.core.background.idle().await;
        let mut round = Round::new();
        for (server, member) in self.core.members.iter().enumerate() {
            if let Ok(client) = member.reached() {
                round.ask(server, async move { client.shutdown().await });
            }
        }
        while round.next().await.is_some() {}
    }
}

impl fmt::Debug for QuorumClient {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let servers: Vec<_> = self.core.members.iter().map(|one| &one.address).collect();
        f.debug_struct("QuorumClient")
            .field("servers", &servers)
            .finish_non_exhaustive()
    }
}

/// Settings for a [`QuorumClient`]; made by [`QuorumClient::builder`].
///
/// # Examples
///
/// ```no_run
/// # async fn example() -> Result<(), rlock_client::QuorumError> {
/// use std::time::Duration;
///
/// use rlock_client::{Client, QuorumClient};
///
/// let client = QuorumClient::builder()
///     .settings(Client::builder().lease(Duration::from_secs(10)).label("billing"))
///     .server_timeout(Duration::from_millis(50))
///     .connect(["redis://a:6379", "redis://b:6379", "redis://c:6379"])
///     .await?;
/// # Ok(())
/// # }
/// ```
#[derive(Clone, Debug)]
#[must_use = "a builder does nothing until it connects"]
pub struct QuorumBuilder {
    settings: ClientBuilder,
    server_timeout: Duration,
}

impl QuorumBuilder {
    /// The settings of the client of each server: lease, grace, longest hold, certificates for TLS
    /// and the rest mean what they mean there. User and password are in each server's URL.
    ///
    /// Sentinels and acknowledgements by replicas or on disks are refused: they are not for these
    /// servers, none of which is to fail over. A promoted replica that missed a grant could make up
    /// a second majority.
    pub fn settings(mut self, settings: ClientBuilder) -> Self {
        self.settings = settings;
        self
    }

    /// How long a server may take to answer before a try or a renewal goes on without it; 100 ms
    /// unless set, from 1 to 2^53-1 ms. Several times the round trip to the farthest server, and a
    /// small part of the lease.
    ///
    /// A lock is taken as soon as a majority has granted it, so this is only waited for when too
    /// few have. What a server grants after that time is given back there.
    ///
    /// Only [`unlock`](crate::QuorumGuard::unlock) waits longer where a majority does not answer:
    /// for twice the [response timeout](crate::ClientBuilder::response_timeout).
    pub fn server_timeout(mut self, limit: Duration) -> Self {
        self.server_timeout = limit;
        self
    }

    /// Connects to the servers at these URLs: an odd number of them, three or more, no two alike.
    ///
    /// A fourth server would not make it safer: three of four are needed, so one may fail, as with
    /// three. Returns when all are connected, or when a majority is and the others have had the
    /// time that a server has to [answer](Self::server_timeout): these are tried again in the
    /// background, for as long as it takes.
    ///
    /// # Cancel safety
    ///
    /// Dropping the future closes what it has opened.
    ///
    /// # Errors
    ///
    /// - Unavailable: fewer than a majority can be reached; a URL cannot be read; the number is
    ///   even or too small; a server is named twice, by one address or by two that turn out to lead
    ///   to the same server. Where that turns out later one of the two has no vote.
    /// - Module not loaded, refused: the answer of so many that no majority is left.
    /// - Refused too: a setting is out of its bounds, or not for a quorum. Nothing is asked then.
    ///
    /// The error says it of [every server](QuorumError::servers).
    ///
    /// # Panics
    ///
    /// Outside a tokio runtime.
    pub async fn connect<U: AsRef<str>>(
        self,
        urls: impl IntoIterator<Item = U>,
    ) -> Result<QuorumClient, QuorumError> {
        let checked = self.settings.check_for_quorum();
        let checked = checked.and_then(|()| {
            let limit = self.server_timeout;
            within("server_timeout", limit, MILLIS_MAX)
        });
        checked.map_err(|what| QuorumError::new(ErrorKind::Refused, what, Vec::new()))?;
        let members = members(urls)?;
        let runtime = Handle::current();
        let connecting = members.iter().map(|member| {
            let connecting = Arc::clone(member).connect(self.settings.clone());
            runtime.spawn(connecting).abort_handle()
        });
        let core = Core {
            need: majority(members.len()),
            server_timeout: self.server_timeout,
            unasked_max: self.settings.reply_within(),
            max_hold: self.settings.longest_hold(),
            connecting: connecting.collect(),
            background: Background::new(runtime.clone()),
            runtime,
            members,
        };
        core.connected().await?;
        Ok(QuorumClient {
            core: Arc::new(core),
        })
    }
}

/// The servers, if they make a quorum.
fn members<U: AsRef<str>>(
    urls: impl IntoIterator<Item = U>,
) -> Result<Box<[Arc<Member>]>, QuorumError> {
    let mut members: Vec<Arc<Member>> = Vec::new();
    for url in urls {
        let member = Member::new(url.as_ref()).map_err(|error| {
            let what = "a URL cannot be read";
            let place = format!("server {}", members.len().saturating_add(1));
            QuorumError::new(
                ErrorKind::Unavailable,
                what,
                vec![(place.into(), Some(error))],
            )
        })?;
        if members.iter().any(|other| other.address == member.address) {
            let what = format!("{} is named twice", member.address);
            return Err(QuorumError::new(ErrorKind::Unavailable, what, Vec::new()));
        }
        members.push(member);
    }
    let named = members.len();
    if named < SERVERS_MIN || named.is_multiple_of(2) {
        let what =
            format!("a quorum takes an odd number of servers, {SERVERS_MIN} or more: not {named}");
        return Err(QuorumError::new(ErrorKind::Unavailable, what, Vec::new()));
    }
    Ok(members.into())
}

/// What the clones of a client, its locks and its guards share.
pub(crate) struct Core {
    pub(crate) members: Box<[Arc<Member>]>,
    /// So many servers are a majority.
    pub(crate) need: usize,
    pub(crate) server_timeout: Duration,
    /// How long too few servers may be to be asked until a call says so.
    pub(crate) unasked_max: Duration,
    pub(crate) max_hold: Option<Duration>,
    pub(crate) runtime: Handle,
    pub(crate) background: Background,
    connecting: Box<[AbortHandle]>,
}

impl Core {
    /// Waits until a majority is connected, and a little for the rest; or until none can be.
    async fn connected(&self) -> Result<(), QuorumError> {
        let mut round = Round::new();
        for (server, member) in self.members.iter().enumerate() {
            round.ask(server, Arc::clone(member).tried());
        }
        let mut answers = self.unanswered();
        let mut connected: usize = 0;
        while let Some((server, error)) = round.next().await {
            connected = connected.saturating_add(error.is_none().into());
            put(&mut answers, server, error);
            if connected >= self.need {
                let rest = async { while round.next().await.is_some() {} };
                // Those that are later are found when they are there.
                let _ = timeout(self.server_timeout, rest).await;
                return self.all_different();
            }
        }
        let kind = refusal(&answers, self.need);
        Err(self.error(kind, connected, "could be connected to", answers))
    }

    /// Looks for one server behind two addresses. It grants a lock once, so it would refuse us what
    /// it has granted us, and the majority would be of fewer servers than there seem to be; and in
    /// two of its databases it would be two votes that fail together.
    ///
    /// What turns out later is found by [`only_vote`](Self::only_vote).
    fn all_different(&self) -> Result<(), QuorumError> {
        let mut known: Vec<(ServerId, &Arc<str>)> = Vec::new();
        for member in &self.members {
            let Some(server) = member.reached().ok().and_then(|client| client.server()) else {
                continue;
            };
            if let Some((_, other)) = known.iter().find(|(one, _)| *one == server) {
                let what = format!("{other} and {} are the same server", member.address);
                return Err(QuorumError::new(ErrorKind::Unavailable, what, Vec::new()));
            }
            known.push((server, &member.address));
        }
        Ok(())
    }

    /// What a server has granted, unless it has granted one of these by another address. Only the
    /// grant says which server it was: what is behind an address may change, also while the lock is
    /// asked for. A guard that does not count is dropped here, and so given back.
    pub(crate) fn only_vote<'a>(
        &self,
        guard: Guard,
        mut held: impl Iterator<Item = (usize, &'a Guard)>,
    ) -> Result<Guard, Error> {
        let Some(server) = guard.hold().server() else {
            return Ok(guard);
        };
        let twin = held.find(|(_, other)| other.hold().server().as_ref() == Some(&server));
        let twin = twin.and_then(|(other, _)| self.members.get(other));
        twin.map_or(Ok(guard), |twin| Err(Error::same_server(&twin.address)))
    }

    /// What is known of each server before it has answered.
    pub(crate) fn unanswered(&self) -> Vec<Option<Error>> {
        let unanswered = || Some(Error::too_slow(self.server_timeout));
        self.members.iter().map(|_| unanswered()).collect()
    }

    /// An error with each server's answer, `None` for what was wished for: of so many, where more
    /// are needed.
    pub(crate) fn error(
        &self,
        kind: ErrorKind,
        did: usize,
        what: &str,
        answers: Vec<Option<Error>>,
    ) -> QuorumError {
        let (servers, need) = (self.members.len(), self.need);
        let what = format!("{did} of {servers} servers {what}, {need} are needed");
        let addresses = self.members.iter().map(|one| Arc::clone(&one.address));
        QuorumError::new(kind, what, addresses.zip(answers).collect())
    }

    fn stop_connecting(&self) {
        for task in &self.connecting {
            task.abort();
        }
    }
}

impl Drop for Core {
    fn drop(&mut self) {
        self.stop_connecting();
    }
}

/// Notes the answer of one server.
pub(crate) fn put<T>(answers: &mut [T], server: usize, answer: T) {
    if let Some(place) = answers.get_mut(server) {
        *place = answer;
    }
}

const SERVERS_MIN: usize = 3;

/// Some round trips between data centres, and a small part of the lease.
const SERVER_TIMEOUT: Duration = Duration::from_millis(100);

#[cfg(test)]
mod tests {
    use super::*;

    fn refused(urls: &[&str]) -> String {
        let Err(error) = members(urls) else {
            panic!("{urls:?}")
        };
        assert!(error.is_unavailable(), "{error}");
        error.to_string()
    }

    #[test]
    fn servers_that_make_no_quorum_are_refused() {
        assert!(refused(&[]).ends_with("3 or more: not 0"));
        assert!(refused(&["redis://a"]).ends_with("3 or more: not 1"));
        let four = ["redis://a", "redis://b", "redis://c", "redis://d"];
        assert!(refused(&four).ends_with("3 or more: not 4"));
        let twice = [
            "redis://a:7000",
            "redis://b",
            "redis://user:secret@a:7000/1",
        ];
        assert!(refused(&twice).ends_with("a:7000 is named twice"));
        let unreadable = refused(&["redis://a", "http://user:secret@b", "redis://c"]);
        assert!(unreadable.contains("server 2: "), "{unreadable}");
        assert!(!unreadable.contains("secret"), "{unreadable}");
        assert!(members(["redis://a", "redis://b", "redis://c"]).is_ok());
    }
}
