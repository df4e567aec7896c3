//! The settings of a client, with their defaults and the reasons for them.

use std::sync::Arc;
use std::time::Duration;

use tokio::sync::Mutex;

use crate::api::Client;
use crate::locks::{Context, Handle, Settings};
use crate::topology::Router;
use crate::wire::{Connector, Dialer, Durability, Identity};
use crate::{Error, GRACE_MAX, MILLIS_MAX, TIMEOUT_MAX, chance, part, whole_millis, within};

impl Client {
    /// Connects to the server at `url` with the default settings: see [`ClientBuilder`].
    ///
    /// # Errors
    ///
    /// - Unavailable: nobody answers there.
    /// - Module not loaded, refused: the server's answer. Refused also: the URL cannot be read.
    ///
    /// # Panics
    ///
    /// Outside a tokio runtime.
    ///
    /// # Examples
    ///
    /// ```no_run
    /// # async fn example() -> Result<(), rlock_client::Error> {
    /// let client = rlock_client::Client::connect("redis://127.0.0.1:6379").await?;
    /// # Ok(())
    /// # }
    /// ```
    pub async fn connect(url: &str) -> Result<Self, Error> {
        Self::builder().connect(url).await
    }

    /// Connects to a cluster with the default settings: see
    /// [`ClientBuilder::connect_cluster`].
    ///
    /// # Errors
    ///
    /// As [`ClientBuilder::connect_cluster`].
    ///
    /// # Panics
    ///
    /// Outside a tokio runtime.
    ///
    /// # Examples
    ///
    /// ```no_run
    /// # async fn example() -> Result<(), rlock_client::Error> {
    /// let nodes = ["redis://a.internal:6379", "redis://b.internal:6379"];
    /// let client = rlock_client::Client::connect_cluster(nodes).await?;
    /// # Ok(())
    /// # }
    /// ```
    pub async fn connect_cluster<U: AsRef<str>>(
        urls: impl IntoIterator<Item = U>,
    ) -> Result<Self, Error> {
        Self::builder().connect_cluster(urls).await
    }

    /// Waits until the first try to connect has ended: the error, if it failed.
    pub(crate) async fn tried(self) -> Result<Self, Error> {
        self.context.router.tried().await?;
        Ok(self)
    }

    /// Settings other than the defaults.
    pub fn builder() -> ClientBuilder {
        ClientBuilder::new()
    }
}

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
    pub(crate) locks: Settings,
    grace: Duration,
    durability: Option<Durability>,
    sentinels: Option<Vec<String>>,
    pub(crate) dialer: Dialer,
}

impl ClientBuilder {
    pub(crate) fn new() -> Self {
        Self {
            locks: Settings {
                lease: LEASE,
                renew_every: None,
                max_hold: None,
                kept_max: KEPT_MAX,
            },
            grace: GRACE,
            durability: None,
            sentinels: None,
            dialer: Dialer::within(RESPONSE_TIMEOUT),
        }
    }

    /// The lease of locks that are given none of their own, which the watchdog renews. Whole
    /// milliseconds, from 1 to 2^53-1; 30 s unless set.
    ///
    /// It is how long a lock stays taken if its holder's machine has vanished without a word, so
    /// that the server does not see the connection close. For a process that has died see
    /// [`grace`](Self::grace).
    pub fn lease(mut self, lease: Duration) -> Self {
        self.locks.lease = lease;
        self
    }

    /// How often the watchdog renews; a third of the lease unless set. From 1 ms to half of the
    /// lease, so that one renewal may fail.
    pub fn renew_every(mut self, interval: Duration) -> Self {
        self.locks.renew_every = Some(interval);
        self
    }

    /// How long a lock may be held at most, however often it is renewed; without limit unless set.
    /// Whole milliseconds, from 1 to 2^53-1.
    ///
    /// It caps a holder that is stuck: the last renewal is shortened so that the lease ends with
    /// it, and the guard says [why](crate::LostReason::MaxHold). See also
    /// [`Lock::max_hold`](crate::Lock::max_hold).
    pub fn max_hold(mut self, longest: Duration) -> Self {
        self.locks.max_hold = Some(longest);
        self
    }

    /// How many locks are kept at most while nobody uses them: see [`Lock::keep`]. When one more
    /// comes, that which was not used for longest is given back. 1,000 unless set; with 0 none is
    /// kept.
    ///
    /// A kept lock is some KB here, a hold in the server, and one renewal in
    /// [each interval](Self::renew_every).
    ///
    /// [`Lock::keep`]: crate::Lock::keep
    pub fn kept_max(mut self, most: usize) -> Self {
        self.locks.kept_max = most;
        self
    }

    /// How long the server keeps this client's locks after its connection has closed. Whole
    /// milliseconds; 5 s unless set.
    ///
    /// The server releases the locks of a process that has died this long after its death, and
    /// waits this long for a client that has lost its connection and comes back. In turn a guard
    /// is valid only while the server was heard from within the grace: a pause of the process, the
    /// network or the server that is longer costs the locks held. One that is shorter than nine
    /// tenths of the grace, less 100 ms, costs none, and no renewal; from a quarter of the grace on
    /// the client connects once more meanwhile, in case it is the connection that is silent. A
    /// client asks some 28 times in a grace of 5 s, and 18 times in one of 1 s. Behind sentinels a
    /// network that loses all packets for so long may cost locks all the same.
    ///
    /// It is zero, or from 1 ms to an hour. With zero the server hands a dead process's locks on at
    /// once, and it does so too when only the connection broke: a guard may learn of that
    /// afterwards. Choose it where the resource checks [tokens](crate::Guard::token), or where a
    /// rare double entry costs less than a wait.
    pub fn grace(mut self, grace: Duration) -> Self {
        self.grace = grace;
        self
    }

    /// Opens connections so, and not over sockets.
    #[cfg(feature = "test-util")]
    pub fn dial(mut self, dial: impl crate::test_util::Dial) -> Self {
        self.dialer.instead = Some(Arc::new(dial));
        self
    }

    /// A name by which operators find this client: its connections have it in `CLIENT LIST`, and
    /// its session has it behind its id, in `RLOCK.INFO`, `RLOCK.SESSIONS` and the server's log.
    /// From 1 to 256 characters of printable ASCII, no blanks.
    pub fn label(mut self, label: impl Into<String>) -> Self {
        self.dialer.label = Some(label.into().into());
        self
    }

    /// How long the reply to a command may take before it counts as lost; 2 s unless set, from 1 ms
    /// to 2^30 s. It does not limit how long `lock()` waits in the queue. A connection that gives
    /// no reply for this long is replaced, and the unanswered commands are sent again.
    pub fn response_timeout(mut self, timeout: Duration) -> Self {
        self.dialer.response_timeout = timeout;
        self
    }

    /// Counts a lock as held only when this many replicas have said that they know of the grant
    /// (`WAIT`). If fewer do so `within` this time (whole milliseconds, from 1 to 2^53-1), the lock
    /// is given back and the caller told that it was [not
    /// acknowledged](crate::Error::is_not_acknowledged). With no replicas nothing is waited for.
    ///
    /// It makes the loss of a grant in a failover unlikely, and not impossible: another replica may
    /// be promoted than the one that knows. Sentinels and clusters prefer one that has heard more.
    /// With as many replicas as there are, no failover loses a grant that was acknowledged, and
    /// none is acknowledged while a replica is away. That a lock was given back is not waited for:
    /// a promoted replica may not have heard of it.
    ///
    /// A renewal counts only when it is acknowledged too, be it the watchdog's or
    /// [`renew`](crate::Guard::renew)'s. When replicas no longer answer, a guard is lost at the end
    /// of the last lease that they acknowledged, and says
    /// [why](crate::LostReason::NotAcknowledged), although the server itself goes on renewing it.
    /// After a reconnect a hold is confirmed for the session by the server's own word, which is not
    /// waited for at replicas and extends no lease. So keep the time well below two thirds of the
    /// [lease](Self::lease): the watchdog begins a round when a third of it is over, and a round
    /// may have to wait for the one before.
    ///
    /// It takes a third connection, and one more round trip to the replicas for `lock()` and all
    /// that take locks, entering again included. Locks granted at the same time share it, and so do
    /// all renewals of a round; while one wait lasts the next waits, so it can be twice the time.
    /// Calls of one owner for the same lock are acknowledged in turn: the last waits for all.
    /// The time counts against the lease, and is not part of the timeout of `lock_timeout()`.
    ///
    /// If a lock with a lease of its own is entered again and no answer comes to that, the guard is
    /// lost with that lease: the unanswered command may arrive after a
    /// [renewal](crate::Guard::renew) and give the lease its former end again, so a renewal is
    /// [not acknowledged](crate::Error::is_not_acknowledged) from then on.
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
        self.durability = (replicas > 0).then_some(Durability {
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
        self.durability = Some(Durability {
            replicas,
            on_disk: true,
            within,
        });
        self
    }

    /// Asks these sentinels where the server is, before each connection and again every few
    /// seconds. The host in the URL that is given to [`connect`](Self::connect) is then the name of
    /// the service, and its port counts for nothing.
    ///
    /// A sentinel's URL has its own user, password and TLS, and the port 26379 unless it names
    /// another. The user needs `SENTINEL GET-MASTER-ADDR-BY-NAME`, and may have `SUBSCRIBE` for the
    /// channel `+switch-master`. Name at least one.
    ///
    /// All are asked at once. An address that more than half of the named sentinels give is
    /// believed at once. Without such a majority the answers count that come within an eighth of
    /// the [response timeout](Self::response_timeout) after the first: the client takes the address
    /// that a majority gave before, if one sentinel still gives it, and otherwise the most frequent
    /// one. A single sentinel that is left is believed, even if it is cut off from the others and
    /// does not know of a failover.
    ///
    /// So name all of them, each by an address of its own. One address behind which they all are,
    /// as of a load balancer, counts as one sentinel: whichever of them answers is believed. Twice
    /// in a row that may be one that does not know of a failover, and the client then leaves the
    /// primary for the old one.
    ///
    /// A connected client asks them again 2.5 to 3.75 s after it asked last; with a
    /// [grace](Self::grace) below 5 s, after a half to three quarters of the grace, and not before
    /// 50 ms. If it may, it listens to each of them as well, on the same connection, and asks all
    /// at once when one tells of a new primary. A sentinel that has not answered after 1.25 s (or
    /// a quarter of the grace) counts as silent.
    ///
    /// If more than half of the named sentinels name another server, and again 0.1 s later, the
    /// connections to the old one are given up, even if it still answers, and also if the new one
    /// cannot be reached: the new one may grant the same locks to other clients. So a guard at a
    /// primary that was replaced without hearing of it is confirmed at the new one or lost within
    /// 3.85 s (or three quarters of the grace and 0.1 s) after the sentinels agree, and the time
    /// that the answers take; or, if the new one cannot be reached, once the grace or the lease has
    /// ended. A minority, too few answers, or a server that says that it is a replica still change
    /// nothing.
    ///
    /// After a failover the client connects to the new primary by itself: waits queue again there,
    /// and each hold is confirmed there or lost. A grant that the new primary never heard of is
    /// lost; another client may have the lock by then.
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
        self.sentinels = Some(urls.into_iter().map(Into::into).collect());
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
        self.dialer.certificates.root = Some(pem.into());
        self
    }

    /// Shows this certificate to servers and sentinels that ask for one: its chain and its key, in
    /// PEM. It counts where a URL asks for TLS (`rediss://`).
    #[cfg(feature = "tls")]
    pub fn client_certificate(mut self, pem: impl Into<Vec<u8>>, key: impl Into<Vec<u8>>) -> Self {
        self.dialer.certificates.own = Some((pem.into(), key.into()));
        self
    }

    /// Connects to the server at `url` (`redis://[user:password@]host:port[/db]`, `rediss://…` for
    /// TLS with the feature `tls`, or `redis+unix:///path`); or, with
    /// [`sentinels`](Self::sentinels), to the primary of the service that is named there.
    ///
    /// Call it inside the tokio runtime in which the client is to work. The user needs [these
    /// rights](crate#users-and-their-rights).
    ///
    /// # Errors
    ///
    /// - Unavailable: nobody answers there, or the server is a replica.
    /// - Module not loaded, refused: the server's answer, such as that it does not know the
    ///   password or that the user may not call the commands; or that of all the sentinels.
    /// - Refused too: a setting is out of its bounds, which the error names; a URL or a certificate
    ///   cannot be read. Nothing is asked then.
    ///
    /// # Panics
    ///
    /// Outside a tokio runtime.
    pub async fn connect(self, url: &str) -> Result<Client, Error> {
        self.check().map_err(Error::refused)?;
        self.start(self.connector(url)?, None).tried().await
    }

    /// Connects to the cluster of these nodes, primaries or replicas. One node that answers is
    /// enough, and tells of the others.
    ///
    /// The client takes each lock at the node that serves its slot. To each such node it keeps a
    /// connection for commands and one for events, from when it first needs them. When a slot
    /// moves, its locks do: guards stay valid and are renewed at the new node, and waits queue
    /// again there. All nodes are connected to with the user, the password and the TLS of the first
    /// URL. A cluster needs no [sentinels](Self::sentinels), and they are refused.
    ///
    /// # Errors
    ///
    /// - Unavailable: no URL; none of the nodes answers, or no primary can be reached.
    /// - Module not loaded, refused: a node's answer, such as that it is not part of a cluster.
    /// - Refused too: a setting is out of its bounds, or not for a cluster; a URL cannot be read.
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
        let checked = self.check_without_sentinels("a cluster");
        checked.map_err(Error::refused)?;
        let seeds = urls.into_iter().map(|url| self.connector(url.as_ref()));
        let mut seeds = seeds.collect::<Result<Vec<_>, _>>()?.into_iter();
        let first = seeds.next().ok_or_else(Error::no_cluster)?;
        self.start(first, Some(seeds.collect())).tried().await
    }

    pub(crate) fn connector(&self, url: &str) -> Result<Connector, Error> {
        let sentinels = self.sentinels.as_deref().unwrap_or_default();
        Connector::new(url, sentinels, &self.dialer)
    }

    /// Begins to connect, with settings that are in their bounds.
    pub(crate) fn start(&self, first: Connector, cluster: Option<Vec<Connector>>) -> Client {
        let id = chance::uuid().to_string();
        let label = self.dialer.label.as_ref();
        let session = label.map_or_else(|| id.clone(), |label| format!("{id}/{label}"));
        let context = Context::start(id, self.locks.clone(), |runtime, listener| {
            let identity = Identity {
                name: session.into(),
                grace: whole_millis(self.grace),
                durability: self.durability,
                listener,
                runtime: runtime.clone(),
                gathering: Mutex::default(),
            };
            Router::start(first, cluster, identity)
        });
        let context = Arc::new(Handle(context));
        Client { context }
    }

    /// Refuses a setting that is out of its bounds, and names the bounds.
    fn check(&self) -> Result<(), String> {
        let grace = Some(self.grace).filter(|grace| !grace.is_zero());
        let acknowledged = match self.durability {
            Some(Durability { on_disk: true, .. }) => "acknowledged_on_disk",
            _ => "acknowledged_by",
        };
        let response_timeout = Some(self.dialer.response_timeout);
        let acknowledged_within = self.durability.map(|wanted| wanted.within);
        for (setting, time, longest) in [
            ("lease", Some(self.locks.lease), MILLIS_MAX),
            (
                "renew_every",
                self.locks.renew_every,
                part(self.locks.lease, 2),
            ),
            ("max_hold", self.locks.max_hold, MILLIS_MAX),
            ("grace is zero or", grace, GRACE_MAX),
            ("response_timeout", response_timeout, TIMEOUT_MAX),
            (acknowledged, acknowledged_within, MILLIS_MAX),
        ] {
            time.map_or(Ok(()), |time| within(setting, time, longest))?;
        }
        let label = self.dialer.label.as_deref();
        let is_name = |label: &str| {
            (1..=LABEL_MAX).contains(&label.len())
                && label.bytes().all(|byte| byte.is_ascii_graphic())
        };
        if !label.is_none_or(is_name) {
            return Err(format!(
                "label must have from 1 to {LABEL_MAX} characters of printable ASCII, no blanks"
            ));
        }
        if self.sentinels.as_ref().is_some_and(Vec::is_empty) {
            return Err("sentinels: at least one is to be named".to_owned());
        }
        Ok(())
    }

    /// The same where it is known without them who the primaries are, or none is to fail over.
    fn check_without_sentinels(&self, whom: &str) -> Result<(), String> {
        if self.sentinels.is_some() {
            return Err(format!("sentinels are not for {whom}"));
        }
        self.check()
    }

    /// The same for the servers of a quorum, which must not fail over.
    pub(crate) fn check_for_quorum(&self) -> Result<(), String> {
        if self.durability.is_some() {
            return Err("acknowledgements are not for the servers of a quorum".to_owned());
        }
        self.check_without_sentinels("the servers of a quorum")
    }
}

/// The name of a session has room for it. The server allows no other characters in that of a
/// connection.
const LABEL_MAX: usize = 256;

/// Redisson's, so that a lock behaves alike in both.
const LEASE: Duration = Duration::from_secs(30);

/// More than most programs use in turns, and few for the server.
const KEPT_MAX: usize = 1_000;

/// Short enough that a crash is noticed soon, long enough for a reconnect and for the pauses of a
/// busy machine.
const GRACE: Duration = Duration::from_secs(5);

/// Long enough for a server that is saving or briefly overloaded, and a small part of the lease.
const RESPONSE_TIMEOUT: Duration = Duration::from_secs(2);

#[cfg(test)]
mod tests {
    use super::*;
    use crate::MILLI;

    #[test]
    fn a_third_of_the_lease_unless_set() {
        let builder = ClientBuilder::new();
        assert_eq!(builder.locks.interval(), Duration::from_secs(10));
        let builder = builder.lease(Duration::from_secs(9));
        assert_eq!(builder.locks.interval(), Duration::from_secs(3));
        let builder = builder.renew_every(Duration::from_secs(1));
        assert_eq!(builder.locks.interval(), Duration::from_secs(1));
        let tiny = ClientBuilder::new().lease(MILLI);
        assert_eq!(tiny.locks.interval(), MILLI, "the watchdog does not spin");
    }
}
