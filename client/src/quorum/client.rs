//! The client of a quorum: several servers, each with an ordinary client.

use std::fmt;
use std::sync::Arc;
use std::time::Duration;

use futures_util::future::join_all;
use tokio::runtime::Handle;

use crate::api::{Client, ClientBuilder};
use crate::quorum::{Core, QuorumError, QuorumLock, majority};
use crate::wire::Connector;
use crate::{Background, ErrorKind, MILLIS_MAX, within};

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
/// good enough. It costs a command on every server, callers are not served in order, and there is
/// [one token a server](crate::QuorumGuard::tokens). Its promises rest on these conditions:
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
    pub fn lock(&self, name: impl AsRef<[u8]>) -> QuorumLock {
        QuorumLock {
            core: Arc::clone(&self.core),
            name: name.as_ref().into(),
            lease: None,
            max_hold: None,
        }
    }

    /// Ends pending calls and waits until the servers have confirmed all releases: see
    /// [`Client::shutdown`]. If a release is due on a server that cannot be reached, this waits for
    /// at most the lease.
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
        self.core.background.shut_down().await;
        join_all(self.core.members.iter().map(Client::shutdown)).await;
    }
}

impl fmt::Debug for QuorumClient {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let servers = self
            .core
            .members
            .iter()
            .map(|one| one.context.router.address());
        f.debug_list().entries(servers).finish()
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
    pub(crate) settings: ClientBuilder,
    pub(crate) server_timeout: Duration,
}

impl QuorumBuilder {
    /// The settings of the client of each server: lease, grace, longest hold, certificates for TLS
    /// and the rest mean what they mean there. User and password are in each server's URL.
    ///
    /// Sentinels and acknowledgements by replicas or on disks are refused, because these servers
    /// must not fail over: a promoted replica that missed a grant could complete a second majority.
    pub fn settings(mut self, settings: ClientBuilder) -> Self {
        self.settings = settings;
        self
    }

    /// How long a server may take to answer before a try or a renewal goes on without it; 100 ms
    /// unless set, from 1 to 2^53-1 ms. Several times the round trip to the farthest server, and a
    /// small part of the lease.
    ///
    /// A call returns as soon as a majority has granted the lock, so it waits this long only when
    /// too few servers have. A grant that arrives later is released.
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
    /// - Unavailable: fewer than a majority can be reached; or two addresses turn out to lead to
    ///   the same server. Where that turns out later one of the two has no vote.
    /// - Module not loaded, refused: too many servers answered this to leave a majority.
    /// - Refused too: a setting is out of its bounds, or not for a quorum; a URL cannot be read;
    ///   the number is even or too small; a server is named twice. Nothing is asked then.
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
        let refused = |what| QuorumError::new(ErrorKind::Refused, what);
        self.settings.check_for_quorum().map_err(refused)?;
        within("server_timeout", self.server_timeout, MILLIS_MAX).map_err(refused)?;
        let connectors = connectors(&self.settings, urls)?.into_iter();
        let members = connectors.map(|one| self.settings.start(one, None));
        let members: Box<[_]> = members.collect();
        let core = Core {
            need: majority(members.len()),
            members,
            background: Background::new(Handle::current()),
            server_timeout: self.server_timeout,
            response_timeout: self.settings.dialer.response_timeout,
            max_hold: self.settings.locks.max_hold,
        };
        core.connected().await?;
        let core = Arc::new(core);
        Ok(QuorumClient { core })
    }
}

/// A connector for each server. Fails if the servers cannot make a quorum.
fn connectors<U: AsRef<str>>(
    settings: &ClientBuilder,
    urls: impl IntoIterator<Item = U>,
) -> Result<Vec<Connector>, QuorumError> {
    let no_quorum = |what| QuorumError::new(ErrorKind::Refused, what);
    let mut connectors: Vec<Connector> = Vec::new();
    for (url, number) in urls.into_iter().zip(1..) {
        let connector = settings.connector(url.as_ref());
        let connector = connector.map_err(|error| QuorumError {
            servers: vec![(format!("server {number}"), Some(error))],
            ..no_quorum("a URL cannot be read".to_owned())
        })?;
        let address = connector.shown();
        if connectors.iter().any(|other| other.shown() == address) {
            return Err(no_quorum(format!("{address} is named twice")));
        }
        connectors.push(connector);
    }
    let named = connectors.len();
    if named < SERVERS_MIN || named.is_multiple_of(2) {
        let what = "a quorum takes an odd number of servers";
        let what = format!("{what}, {SERVERS_MIN} or more: not {named}");
        return Err(no_quorum(what));
    }
    Ok(connectors)
}

const SERVERS_MIN: usize = 3;

/// Some round trips between data centres, and a small part of the lease.
const SERVER_TIMEOUT: Duration = Duration::from_millis(100);

#[cfg(test)]
mod tests {
    use super::*;

    fn refused(urls: &[&str]) -> String {
        let Err(error) = connectors(&Client::builder(), urls) else {
            panic!("{urls:?}")
        };
        assert!(error.kind() == ErrorKind::Refused, "{error}");
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
        let three = ["redis://a", "redis://b", "redis://c"];
        assert!(connectors(&Client::builder(), three).is_ok());
    }
}
