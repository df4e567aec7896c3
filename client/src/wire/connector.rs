//! Finding a server and connecting to it.

use std::sync::atomic::Ordering;
use std::sync::{Arc, Mutex};
use std::time::Duration;

use futures_util::FutureExt;
use redis::ConnectionInfo;
use tokio::time::{Instant, sleep, sleep_until};
use tokio_util::sync::CancellationToken;

use crate::backoff::part_of;
use crate::chance::random;
use crate::error::{Code, Error};
use crate::time::part_of_grace;
use crate::wire::endpoint::{address, at, is_tls, read};
use crate::wire::reply::{is_replica, read_by, read_shards, read_slots};
use crate::wire::{Address, Cluster, Dialer, Sentinels, Socket, request};
use crate::{locked, part};

/// Opens connections to the server, wherever that is at the moment: it is looked up before each.
/// Clones open connections of the same client.
#[derive(Clone, Debug)]
pub(crate) struct Connector {
    /// How to connect; with sentinels its host is the name of the service.
    server: ConnectionInfo,
    /// The sentinels that know where the server is; empty without any.
    pub(crate) sentinels: Arc<Sentinels>,
    pub(crate) dialer: Dialer,
    /// The server that is the one to use.
    used: Arc<Mutex<Used>>,
}

/// The server's address, as the newest successful question found it. `None` if that server cannot
/// be reached.
#[derive(Debug, Default)]
struct Used {
    found: Option<String>,
    asked: Option<Instant>,
    /// Cancelled when another server is the one to use.
    replaced: CancellationToken,
}

/// A connection to a primary. Dropping it closes the socket.
pub(crate) struct Connection {
    pub(super) socket: Socket,
    /// Its number, larger than those of the connections before.
    pub(super) epoch: u64,
    closed: CancellationToken,
    replaced: CancellationToken,
}

impl Connection {
    /// Ends when the peer is known to have closed it, or another server has been found, by another
    /// connection or by the word of the sentinels.
    pub(crate) fn over(&self) -> impl Future<Output = ()> + use<> {
        let replaced = self.replaced.clone().cancelled_owned();
        let over = self.closed.clone().run_until_cancelled_owned(replaced);
        over.map(drop)
    }

    /// Whether [`over`](Self::over) has happened.
    pub(super) fn is_over(&self) -> bool {
        self.closed.is_cancelled() || self.replaced.is_cancelled()
    }
}

impl Connector {
    /// Reads the URLs and the certificates; no I/O.
    pub(crate) fn new(url: &str, sentinels: &[String], dialer: &Dialer) -> Result<Self, Error> {
        let sentinels = sentinels.iter().map(|url| read(url, SENTINEL_PORT));
        let sentinels = sentinels.collect::<Result<Vec<_>, _>>()?;
        let server = read(url, SERVER_PORT)?;
        // Reports unreadable certificates now, not at the first connection.
        for one in sentinels.iter().chain([&server]) {
            dialer.certificates.client(one.clone())?;
        }
        let sentinels = Sentinels::new(sentinels, &address(&server).host, dialer);
        Ok(Self {
            server,
            sentinels: Arc::new(sentinels),
            dialer: dialer.clone(),
            used: Arc::default(),
        })
    }

    /// Connects to this very server in the same way, as this user.
    pub(crate) fn other(&self, address: &Address) -> Self {
        Self {
            server: at(&self.server, address),
            used: Arc::default(),
            ..self.clone()
        }
    }

    /// The address in the URL, as it is shown.
    pub(crate) fn shown(&self) -> String {
        self.server.addr().to_string()
    }

    /// The address in the URL; with sentinels its host is the name of the service.
    pub(crate) fn address(&self) -> Address {
        address(&self.server)
    }

    /// The cluster as this node tells it, which may be a replica, on a connection of its own.
    pub(crate) async fn cluster(&self) -> Result<Cluster, Error> {
        let socket = self.dialer.open(&self.server, drop).await?;
        let ask = |cmd| socket.clone().ask(cmd, self.dialer.response_timeout);
        let (asked, is_tls) = (self.address(), is_tls(&self.server));
        let shards = ask(request::cluster("SHARDS")).await;
        let primaries = read_by(shards, |shards| read_shards(shards, &asked, is_tls))?;
        let slots = ask(request::cluster("SLOTS")).await;
        read_by(slots, |slots| read_slots(slots, &asked, primaries))
    }

    /// Looks up where the server is and connects to it, if it is a primary.
    pub(crate) async fn open(&self) -> Result<Connection, Error> {
        let asked = Instant::now();
        if self.sentinels.is_empty() {
            return self.reach(&self.server, asked).await;
        }
        let within = self.dialer.response_timeout;
        let (address, _) = self.sentinels.primary(within, part(within, SOON)).await?;
        let reached = self.reach(&at(&self.server, &address), asked).await;
        reached.inspect_err(|_| self.sentinels.forget())
    }

    /// Connects to this server, if it is a primary, and tells the other connections that it is the
    /// one to use.
    async fn reach(&self, server: &ConnectionInfo, asked: Instant) -> Result<Connection, Error> {
        // Both together have the time of one answer.
        let (limit, began) = (self.dialer.response_timeout, Instant::now());
        let closed = CancellationToken::new();
        // Nothing is pushed to us, but what would hear of it is dropped with the connection.
        let ends = closed.clone().drop_guard();
        let socket = self.dialer.open(server, move |_| _ = &ends).await?;
        let hello = request::hello(self.dialer.label.as_deref());
        let left = limit.saturating_sub(began.elapsed());
        let answer = socket.clone().ask(hello, left).await?;
        let address = server.addr().to_string();
        if is_replica(&answer) {
            let replica = format!("READONLY the server at {address} is a replica");
            return Err(Error::from_text(&replica));
        }
        let replaced = self.has_found(Some(&address), asked);
        Ok(Connection {
            socket,
            epoch: self.dialer.epochs.fetch_add(1, Ordering::Relaxed),
            closed,
            replaced: replaced.ok_or_else(Error::elsewhere)?,
        })
    }

    /// Records the address that a question asked at this time has found, and so ends connections to
    /// other addresses. If a newer question has found an address meanwhile, while the server was
    /// slow to answer, this result is ignored. The end of connections to this address, if it is the
    /// one to use.
    fn has_found(&self, found: Option<&str>, asked: Instant) -> Option<CancellationToken> {
        let mut used = locked(&self.used);
        if used.asked <= Some(asked) {
            used.asked = Some(asked);
            if used.found.as_deref() != found {
                used.found = found.map(str::to_owned);
                std::mem::take(&mut used.replaced).cancel();
            }
        }
        (used.found.as_deref() == found).then(|| used.replaced.clone())
    }

    /// Asks the sentinels again and again whether the server in use is still the primary, until it
    /// is aborted, with the node. The promises rest on this asking alone; that sentinels tell of a
    /// new primary only makes it quicker.
    ///
    /// A primary that is cut off from sentinels and replicas, but not from us, does not know that
    /// it has been replaced. It goes on renewing locks that other clients may hold at the new
    /// primary by then.
    pub(crate) async fn watch_sentinels(self, grace: Duration) {
        let (every, mut asked) = (interval(grace), Instant::now());
        loop {
            // Counted from the start of the last question: silent sentinels do not put off the
            // next.
            let next = asked.checked_add(pause(every));
            // Without this pause, a sentinel that reports switches without end would make us ask
            // without end.
            sleep(PAUSE_MIN).await;
            tokio::select! {
                () = sleep_until(next.unwrap_or_else(Instant::now)) => {}
                () = self.sentinels.switched.notified() => {}
            }
            asked = Instant::now();
            self.ask_sentinels(part(every, ANSWER_PART)).await;
        }
    }

    /// Asks the sentinels whether the server that was reached last is still the primary. If a
    /// majority names another twice in a row, and that one is a primary or cannot be reached, the
    /// connections to the old one are given up: the new one may grant the same locks to other
    /// clients. If the named server is still a replica, nothing changes until the next question.
    /// While no server is in use nobody is asked: the next connection asks by itself.
    ///
    /// Sentinels that do not answer `within` this time count as silent. While the others do not
    /// agree yet, a silent one would otherwise delay the next question.
    async fn ask_sentinels(&self, within: Duration) {
        let (within, asked) = (self.dialer.response_timeout.min(within), Instant::now());
        let Some(other) = self.named_otherwise(within).await else {
            return;
        };
        match self.reach(&at(&self.server, &other), asked).await {
            Err(error) if error.code == Code::ReadOnly => self.sentinels.forget(),
            Err(_) => drop(self.has_found(None, asked)),
            Ok(_) => {}
        }
    }

    /// The server that a majority names twice in a row, if it is not the one in use.
    async fn named_otherwise(&self, within: Duration) -> Option<Address> {
        let other = async || {
            let used = locked(&self.used).found.clone()?;
            // However late each of them answers within this time.
            let (named, by_most) = self.sentinels.primary(within, within).await.ok()?;
            (by_most && used != self.other(&named).shown()).then_some(named)
        };
        let first = other().await?;
        sleep(AGAIN_AFTER).await;
        other().await.filter(|again| *again == first)
    }
}

/// Within which time to ask at least once.
fn interval(grace: Duration) -> Duration {
    part_of_grace(grace, 1).clamp(INTERVAL_MIN, INTERVAL_MAX)
}

/// From one question to the next: from a half to three quarters of the interval, by chance, so that
/// clients do not ask all at once. The rest is for the answers, and to confirm the holds or lose
/// them.
fn pause(interval: Duration) -> Duration {
    part(interval, 2).saturating_add(part_of(part(interval, 4), random()))
}

/// The longest interval, for any grace and for none: it bounds how long a client stays with a
/// primary that was replaced.
const INTERVAL_MAX: Duration = Duration::from_secs(5);

const INTERVAL_MIN: Duration = Duration::from_millis(100);

/// A sentinel may take this part of the interval to answer: two questions and what lies between
/// them are over before the next is due.
const ANSWER_PART: u32 = 4;

/// From the end of one question to the next, whatever a sentinel tells.
const PAUSE_MIN: Duration = Duration::from_millis(50);

/// Sentinels that do not agree yet are given this time to say something else: connections must not
/// go to and fro between two servers.
const AGAIN_AFTER: Duration = Duration::from_millis(100);

/// The other sentinels may take this part of the time once one has answered.
const SOON: u32 = 8;

/// Where servers and sentinels listen unless their URLs say otherwise.
const SERVER_PORT: u16 = 6379;
const SENTINEL_PORT: u16 = 26379;

#[cfg(test)]
mod tests {
    use super::*;
    use crate::wire::Certificates;

    fn new(
        url: &str,
        sentinels: &[String],
        certificates: &Certificates,
    ) -> Result<Connector, Error> {
        let dialer = Dialer {
            certificates: certificates.clone(),
            ..Dialer::within(Duration::from_secs(1))
        };
        Connector::new(url, sentinels, &dialer)
    }

    fn place(url: &str, sentinels: &[&str]) -> Result<Connector, Error> {
        let sentinels: Vec<_> = sentinels.iter().map(|url| (*url).to_owned()).collect();
        new(url, &sentinels, &Certificates::default())
    }

    #[test]
    fn it_is_asked_once_in_three_quarters_of_the_grace_and_at_most_twice_in_it() {
        for ms in [100, 500, 1_000, 5_000] {
            let grace = Duration::from_millis(ms);
            for _ in 0..100 {
                let pause = pause(interval(grace));
                assert!(pause <= part(grace.saturating_mul(3), 4), "{grace:?}");
                assert!(pause >= part(grace, 2), "{grace:?}");
            }
        }
        assert_eq!(interval(Duration::ZERO), INTERVAL_MAX);
        assert_eq!(interval(Duration::from_secs(3_600)), INTERVAL_MAX);
        assert_eq!(interval(Duration::from_millis(1)), INTERVAL_MIN);
    }

    #[test]
    fn a_sentinel_has_a_port_of_its_own_unless_its_url_says_otherwise() {
        let sentinels = [
            "redis://one",
            "redis://user:secret@two:1234",
            "redis://[::1]",
        ];
        let place = place("redis://my_Service/3", &sentinels).expect("it can be read");
        assert_eq!(&*place.address().host, "my_Service");
        let addresses: Vec<_> = place
            .sentinels
            .all
            .iter()
            .map(|one| one.server.addr().to_string())
            .collect();
        assert_eq!(addresses, ["one:26379", "two:1234", "::1:26379"]);
    }

    #[test]
    fn what_cannot_be_read_is_told_before_anything_is_asked() {
        for (url, sentinels) in [("redis//x", &[][..]), ("redis://x", &["", "redis://y"])] {
            let error = place(url, sentinels).expect_err("no URL");
            assert!(error.to_string().contains("URL"), "{error}");
        }
    }

    #[cfg(not(feature = "tls"))]
    #[test]
    fn without_the_feature_an_address_that_asks_for_tls_is_an_error_that_names_it() {
        for (url, sentinels) in [("rediss://x", &[][..]), ("redis://x", &["valkeys://y"])] {
            let error = place(url, sentinels).expect_err("no TLS");
            assert!(error.to_string().contains("feature `tls`"), "{error}");
        }
    }

    #[cfg(feature = "tls")]
    #[test]
    fn root_certificates_that_are_none_are_told_before_anything_is_asked() {
        let wrapped = |label: &str, base64: &str| {
            format!("-----BEGIN {label}-----\n{base64}\n-----END {label}-----\n")
        };
        let roots = [
            String::new(),
            "garbage".to_owned(),
            wrapped("PRIVATE KEY", "AAAA"),
            wrapped("CERTIFICATE", "AAAA"),
            wrapped("CERTIFICATE", "?"),
        ];
        for root in roots {
            let certificates = Certificates {
                root: Some(root.clone().into()),
                own: None,
            };
            let error = new("rediss://x", &[], &certificates).expect_err(&root);
            assert!(error.to_string().contains("certificate"), "{error}");
            let sentinels = ["rediss://y".to_owned()];
            assert!(new("redis://x", &sentinels, &certificates).is_err());
            assert!(new("redis://x", &[], &certificates).is_ok());
        }
    }

    #[cfg(feature = "tls")]
    #[test]
    fn certificates_that_cannot_be_read_are_told_before_anything_is_asked() {
        let certificates = Certificates {
            root: None,
            own: Some((b"no certificate".to_vec(), b"no key".to_vec())),
        };
        let error = new("rediss://x", &[], &certificates).expect_err("no key");
        assert!(new("redis://x", &["rediss://y".to_owned()], &certificates).is_err());
        assert!(error.to_string().contains("certificate"), "{error}");
        assert!(new("redis://x", &[], &certificates).is_ok());
    }
}
