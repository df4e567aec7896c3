//! The settings of a client, with their defaults and the reasons for them.

use std::time::Duration;

use crate::acknowledge::Copies;
use crate::client::Client;
use crate::error::Error;
use crate::hold::whole_millis;
use crate::part;
use crate::place::{Certificates, Place};

/// Settings for a [`Client`]; made by [`Client::builder`].
///
/// # Examples
///
/// ```no_run
/// # async fn example() -> Result<(), rlock_client::Error> {
/// use std::time::Duration;
///
/// let client = rlock_client::Client::builder()
///     .lease(Duration::from_secs(10))
///     .renew_every(Duration::from_secs(2))
///     .connect("redis://127.0.0.1:6379")
///     .await?;
/// # Ok(())
/// # }
/// ```
#[derive(Clone, Debug)]
#[must_use = "a builder does nothing until it connects"]
pub struct ClientBuilder {
    lease: Duration,
    renew_every: Option<Duration>,
    max_hold: Option<Duration>,
    grace: Duration,
    label: Option<String>,
    response_timeout: Duration,
    copies: Option<Copies>,
    sentinels: Vec<String>,
    certificates: Certificates,
}

impl ClientBuilder {
    pub(crate) fn new() -> Self {
        Self {
            lease: LEASE,
            renew_every: None,
            max_hold: None,
            grace: GRACE,
            label: None,
            response_timeout: RESPONSE_TIMEOUT,
            copies: None,
            sentinels: Vec::new(),
            certificates: Certificates::default(),
        }
    }

    /// The lease of locks that are given none of their own, which the watchdog renews. Whole
    /// milliseconds; 30 s unless set.
    ///
    /// It is how long a lock stays taken if its holder's machine has vanished without a word, so
    /// that the server does not see the connection close. For a process that has died see
    /// [`grace`](Self::grace).
    pub fn lease(mut self, lease: Duration) -> Self {
        self.lease = lease;
        self
    }

    /// How often the watchdog renews; a third of the lease unless set, and never more than half of
    /// it, so that one renewal may fail.
    pub fn renew_every(mut self, interval: Duration) -> Self {
        self.renew_every = Some(interval);
        self
    }

    /// How long a lock may be held at most, however often it is renewed; without limit unless set.
    ///
    /// It caps a holder that is stuck: the last renewal is shortened so that the lease ends with
    /// it, and the guard says [why](crate::LostReason::MaxHold). See also
    /// [`Lock::max_hold`](crate::Lock::max_hold).
    pub fn max_hold(mut self, longest: Duration) -> Self {
        self.max_hold = Some(longest);
        self
    }

    /// How long the server keeps this client's locks after its connection has closed. Whole
    /// milliseconds; 5 s unless set.
    ///
    /// The server releases the locks of a process that has died this long after its death, and
    /// waits this long for a client that has lost its connection and comes back. In turn a guard
    /// is valid only while the server was heard from within the grace: a pause of the process, the
    /// network or the server that is longer costs the locks held. One that is shorter than nine
    /// tenths of the grace, less 100 ms, costs none, and no command more than usual. For that a
    /// client asks some 28 times in a grace of 5 s, and 18 times in one of 1 s.
    ///
    /// With zero the server hands a dead process's locks on at once, and it does so too when only
    /// the connection broke: a guard may learn of that afterwards. Choose it where the resource
    /// checks [tokens](crate::Guard::token), or where a rare double entry costs less than a wait.
    pub fn grace(mut self, grace: Duration) -> Self {
        self.grace = grace;
        self
    }

    /// A name under which operators find this client's session in the server, behind its id.
    pub fn label(mut self, label: impl Into<String>) -> Self {
        self.label = Some(label.into());
        self
    }

    /// How long the reply to a command may take before it counts as lost; 2 s unless set. It does
    /// not limit how long `lock()` waits in line.
    pub fn response_timeout(mut self, timeout: Duration) -> Self {
        self.response_timeout = timeout;
        self
    }

    /// Counts a lock as held only when this many replicas have said that they know of the grant
    /// (`WAIT`). If fewer do so `within` this time (whole milliseconds, at least one), the lock is
    /// given back and the caller told that it was [not
    /// acknowledged](crate::Error::is_not_acknowledged). With no replicas this does nothing.
    ///
    /// It makes the loss of a grant in a failover unlikely, and not impossible: another replica may
    /// be promoted than the one that knows. Sentinels and clusters prefer one that has heard more.
    /// With as many replicas as there are, no failover loses a grant that was acknowledged, and
    /// none is acknowledged while a replica is away. What happens to a hold later is not waited
    /// for: a promoted replica may not have heard of its last renewal, or that it was given back.
    ///
    /// It takes a third connection, and one more round trip to the replicas for `lock()` and all
    /// that take locks, entering again included. Locks granted at the same time share it; while one
    /// wait lasts the next waits, so it can be twice the time. The time counts against the lease,
    /// and is not part of the timeout of `lock_timeout()`.
    ///
    /// # Examples
    ///
    /// ```no_run
    /// # async fn example() -> Result<(), rlock_client::Error> {
    /// use std::time::Duration;
    ///
    /// let client = rlock_client::Client::builder()
    ///     .acknowledged_by(1, Duration::from_millis(200))
    ///     .connect("redis://127.0.0.1:6379")
    ///     .await?;
    /// match client.lock("orders").lock().await {
    ///     Ok(guard) => guard.unlock().await?,
    ///     Err(error) if error.is_not_acknowledged() => println!("no replica answers: {error}"),
    ///     Err(error) => return Err(error),
    /// }
    /// # Ok(())
    /// # }
    /// ```
    pub fn acknowledged_by(mut self, replicas: u32, within: Duration) -> Self {
        self.copies = (replicas > 0).then_some(Copies {
            replicas,
            on_disk: false,
            within,
        });
        self
    }

    /// Counts a lock as held only when the server and this many replicas have the grant on their
    /// disks (`WAITAOF`): with none, the server alone, so that its restart loses no grant. Else as
    /// [`acknowledged_by`](Self::acknowledged_by), which it takes the place of.
    ///
    /// It needs Redis 7.2 or newer, or Valkey, and `appendonly yes`; without these all that take
    /// locks are refused. With `appendfsync everysec` it takes up to a second or two.
    pub fn acknowledged_on_disk(mut self, replicas: u32, within: Duration) -> Self {
        self.copies = Some(Copies {
            replicas,
            on_disk: true,
            within,
        });
        self
    }

    /// Asks these sentinels where the server is, before each connection. The host in the URL that
    /// is given to [`connect`](Self::connect) is then the name of the service, and its port counts
    /// for nothing.
    ///
    /// A sentinel's URL has its own user, password and TLS, and the port 26379 unless it names
    /// another. The user needs `SENTINEL GET-MASTER-ADDR-BY-NAME`. All are asked at once, and what
    /// more than half of them say is believed, so name all of them, or one address behind which
    /// they all are.
    ///
    /// After a failover the client connects to the new primary by itself: waits line up there, and
    /// each hold is confirmed there or lost. What the old primary granted and the new one never
    /// heard of is lost; it may have been granted to somebody else by then.
    ///
    /// # Examples
    ///
    /// ```no_run
    /// # async fn example() -> Result<(), rlock_client::Error> {
    /// let client = rlock_client::Client::builder()
    ///     .sentinels(["redis://a.internal", "redis://b.internal", "redis://c.internal"])
    ///     .connect("redis://user:password@orders/0") // the service `orders`
    ///     .await?;
    /// # Ok(())
    /// # }
    /// ```
    pub fn sentinels<U: Into<String>>(mut self, urls: impl IntoIterator<Item = U>) -> Self {
        self.sentinels = urls.into_iter().map(Into::into).collect();
        self
    }

    /// Trusts servers and sentinels by these root certificates, in PEM, instead of the system's.
    /// They count where a URL asks for TLS (`rediss://`).
    ///
    /// # Examples
    ///
    /// ```no_run
    /// # async fn example() -> Result<(), Box<dyn std::error::Error>> {
    /// let client = rlock_client::Client::builder()
    ///     .root_certificate(std::fs::read("ca.pem")?)
    ///     .client_certificate(std::fs::read("us.pem")?, std::fs::read("us.key")?)
    ///     .connect("rediss://cache.internal:6380")
    ///     .await?;
    /// # Ok(())
    /// # }
    /// ```
    #[cfg(feature = "tls")]
    pub fn root_certificate(mut self, pem: impl Into<Vec<u8>>) -> Self {
        self.certificates.trust(pem.into());
        self
    }

    /// Shows this certificate to servers and sentinels that ask for one: its chain and its key, in
    /// PEM. It counts where a URL asks for TLS (`rediss://`).
    #[cfg(feature = "tls")]
    pub fn client_certificate(
        mut self,
        pem: impl Into<Vec<u8>>,
        key_pem: impl Into<Vec<u8>>,
    ) -> Self {
        self.certificates.show(pem.into(), key_pem.into());
        self
    }

    /// Connects to the server at `url` (`redis://[user:password@]host:port[/db]`, `rediss://…` for
    /// TLS with the feature `tls`, or `redis+unix:///path`); or, with
    /// [`sentinels`](Self::sentinels), to the primary of the service that is named there.
    ///
    /// Call it inside the tokio runtime in which the client is to work. What the user needs to be
    /// allowed [is listed](crate#users-and-their-rights).
    ///
    /// # Errors
    ///
    /// - Could not ask: a URL or a certificate cannot be read, nobody answers there, or the server
    ///   is a replica.
    /// - Module not loaded, refused: the server's answer, such as that it does not know the
    ///   password or that the user may not call the commands; or that of all the sentinels.
    ///
    /// # Panics
    ///
    /// Outside a tokio runtime.
    pub async fn connect(self, url: &str) -> Result<Client, Error> {
        Client::open(url, &self).await
    }

    /// Connects to the cluster of which these are nodes, primaries or replicas; any one that
    /// answers is enough, and tells of the others.
    ///
    /// Each lock is asked for at the node that serves its slot, and of each such node's session the
    /// client keeps a connection for commands and one for events, from when it first needs it. When
    /// a slot moves, its locks do: guards stay valid and are renewed at the new node, and waits
    /// line up there. All nodes are connected to with the user, the password and the TLS of the
    /// first URL; sentinels count for nothing.
    ///
    /// # Errors
    ///
    /// - Could not ask: no URL, or one cannot be read; none of the nodes answers, or no primary can
    ///   be reached.
    /// - Module not loaded, refused: a node's answer, such as that it is not part of a cluster.
    ///
    /// # Panics
    ///
    /// Outside a tokio runtime.
    ///
    /// # Examples
    ///
    /// ```no_run
    /// # async fn example() -> Result<(), rlock_client::Error> {
    /// use std::time::Duration;
    ///
    /// let client = rlock_client::Client::builder()
    ///     .grace(Duration::from_secs(20)) // so that guards outlive a failover
    ///     .connect_cluster(["redis://a.internal", "redis://b.internal", "redis://c.internal"])
    ///     .await?;
    /// # Ok(())
    /// # }
    /// ```
    pub async fn connect_cluster<U: AsRef<str>>(
        self,
        urls: impl IntoIterator<Item = U>,
    ) -> Result<Client, Error> {
        Client::open_cluster(urls, &self).await
    }

    /// The place of a node of a cluster.
    pub(crate) fn node_at(&self, url: &str) -> Result<Place, Error> {
        Place::new(url, &[], &self.certificates)
    }

    /// Where the server at `url` is to be looked for.
    pub(crate) fn place(&self, url: &str) -> Result<Place, Error> {
        Place::new(url, &self.sentinels, &self.certificates)
    }

    pub(crate) fn copies(&self) -> Option<Copies> {
        self.copies
    }

    pub(crate) fn default_lease(&self) -> Duration {
        self.lease
    }

    pub(crate) fn longest_hold(&self) -> Option<Duration> {
        self.max_hold
    }

    pub(crate) fn grace_to_ask(&self) -> Duration {
        whole_millis(self.grace)
    }

    /// The session of the client with this id.
    pub(crate) fn session_of(&self, id: &str) -> String {
        match &self.label {
            None => id.to_owned(),
            Some(label) => format!("{id}/{label}"),
        }
    }

    pub(crate) fn reply_within(&self) -> Duration {
        self.response_timeout
    }

    pub(crate) fn interval(&self) -> Duration {
        let interval = self.renew_every.unwrap_or(part(self.lease, 3));
        interval.min(part(self.lease, 2)).max(INTERVAL_MIN)
    }
}

/// Redisson's, so that a lock behaves alike in both.
const LEASE: Duration = Duration::from_secs(30);

/// Short enough that a crash is noticed soon, long enough for a reconnect and for the pauses of a
/// busy machine.
const GRACE: Duration = Duration::from_secs(5);

/// Long enough for a server that is saving or briefly overloaded, and a small part of the lease.
const RESPONSE_TIMEOUT: Duration = Duration::from_secs(2);

/// Keeps a watchdog with a tiny lease from spinning.
const INTERVAL_MIN: Duration = Duration::from_millis(1);

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_third_of_the_lease_unless_set_and_never_more_than_half() {
        let builder = ClientBuilder::new();
        assert_eq!(builder.interval(), Duration::from_secs(10));
        let builder = builder.lease(Duration::from_secs(9));
        assert_eq!(builder.interval(), Duration::from_secs(3));
        let builder = builder.renew_every(Duration::from_secs(1));
        assert_eq!(builder.interval(), Duration::from_secs(1));
        let builder = builder.renew_every(Duration::from_secs(60));
        assert_eq!(builder.interval(), Duration::from_millis(4_500));
        assert_eq!(builder.lease(Duration::ZERO).interval(), INTERVAL_MIN);
    }
}
