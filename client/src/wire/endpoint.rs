//! Where the server is: at a URL, or where the sentinels say that the service has its primary.

use std::fmt;
use std::sync::Arc;
use std::time::Duration;

use redis::io::tcp::TcpSettings;
use redis::io::tcp::socket2::TcpKeepalive;
use redis::{ConnectionAddr, ConnectionInfo, IntoConnectionInfo, ProtocolVersion};
use tokio::sync::watch;

use crate::wire::{Connector, Dialer, Sentinel};
use crate::{Error, locked, part};

/// Where a node listens.
#[derive(Clone, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub(crate) struct Address {
    pub(crate) host: Box<str>,
    pub(crate) port: u16,
}

impl Address {
    /// A node at this host, or at the same one if none is named.
    pub(crate) fn or_at(&self, host: Option<Box<str>>, port: u16) -> Self {
        let host = host.unwrap_or_else(|| self.host.clone());
        Self { host, port }
    }
}

impl Connector {
    /// Reads the URLs and the certificates; no I/O.
    pub(crate) fn new(url: &str, sentinels: &[String], dialer: &Dialer) -> Result<Self, Error> {
        let certificates = &dialer.certificates;
        let sentinels = sentinels.iter().map(|url| {
            let info = with_port(read(url)?, url, SENTINEL_PORT);
            certificates.client(info).map(Sentinel::new)
        });
        let connector = Self {
            server: read(url)?,
            sentinels: sentinels.collect::<Result<_, _>>()?,
            agreed: Arc::default(),
            dialer: dialer.clone(),
            latest: watch::Sender::default(),
        };
        // Says now what is wrong with the certificates.
        certificates.client(connector.server.clone())?;
        Ok(connector)
    }

    /// Connects to this very server in the same way, as this user.
    pub(crate) fn other(&self, address: &Address) -> Self {
        Self {
            server: at(&self.server, address),
            latest: watch::Sender::default(),
            ..self.clone()
        }
    }

    /// The address in the URL, as it is shown.
    pub(crate) fn shown(&self) -> String {
        self.server.addr().to_string()
    }

    /// The address in the URL; with sentinels its host is what they call the service.
    pub(crate) fn address(&self) -> Address {
        address(&self.server)
    }

    /// Where the server is now.
    pub(super) async fn find(&self) -> Result<redis::Client, Error> {
        if self.sentinels.is_empty() {
            return self.dialer.certificates.client(self.server.clone());
        }
        let within = self.dialer.response_timeout;
        let (address, _) = self.primary(within, part(within, SOON)).await?;
        self.client_of(&address)
    }

    pub(super) fn client_of(&self, address: &Address) -> Result<redis::Client, Error> {
        self.dialer.certificates.client(at(&self.server, address))
    }

    /// What was found could not be used: nothing speaks for it any more but the sentinels.
    pub(super) fn forget(&self) {
        *locked(&self.agreed) = None;
    }
}

/// What a client shows and trusts when it speaks TLS, in PEM.
#[derive(Clone, Default)]
pub(crate) struct Certificates {
    /// These roots instead of the system's.
    #[cfg(feature = "tls")]
    pub(crate) root: Option<Vec<u8>>,
    /// The certificate for servers that ask for one, and its key.
    #[cfg(feature = "tls")]
    pub(crate) own: Option<(Vec<u8>, Vec<u8>)>,
}

impl Certificates {
    fn client(&self, info: ConnectionInfo) -> Result<redis::Client, Error> {
        #[cfg(feature = "tls")]
        if matches!(info.addr(), ConnectionAddr::TcpTls { .. }) {
            return self.tls_client(info);
        }
        // There are none without the feature.
        #[cfg(not(feature = "tls"))]
        let Self {} = self;
        redis::Client::open(info).map_err(Error::could_not_connect)
    }

    #[cfg(feature = "tls")]
    fn tls_client(&self, info: ConnectionInfo) -> Result<redis::Client, Error> {
        use redis::{ClientTlsConfig, TlsCertificates};
        use rustls::pki_types::CertificateDer;
        use rustls::pki_types::pem::PemObject;

        let unreadable = |source: redis::RedisError| {
            Error::refused("the certificates or the key cannot be read").because(source)
        };
        // The library takes what has no certificate in it for none at all: with no roots nobody is
        // trusted, and nobody is told why. What is one and cannot be read it says itself.
        let own = self.own.as_ref().map(|(certificate, _)| certificate);
        let mut all = self.root.iter().chain(own);
        if all.any(|pem| CertificateDer::pem_slice_iter(pem).next().is_none()) {
            let kind = redis::ErrorKind::InvalidClientConfig;
            return Err(unreadable((kind, "no certificate in PEM").into()));
        }
        // The program's own choice stands, and this fails. Without one rustls panics if several
        // providers are compiled in, by whatever other crate.
        let _ = rustls::crypto::ring::default_provider().install_default();
        let own = self.own.clone();
        let certificates = TlsCertificates {
            client_tls: own.map(|(client_cert, client_key)| ClientTlsConfig {
                client_cert,
                client_key,
            }),
            root_cert: self.root.clone(),
        };
        redis::Client::build_with_tls(info, certificates).map_err(unreadable)
    }
}

impl fmt::Debug for Certificates {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        // A key is among them.
        f.debug_struct("Certificates").finish_non_exhaustive()
    }
}

/// How to connect to `url`, whether it is a server's or a sentinel's.
fn read(url: &str) -> Result<ConnectionInfo, Error> {
    let asks_for_tls = url.starts_with("rediss:") || url.starts_with("valkeys:");
    if asks_for_tls && cfg!(not(feature = "tls")) {
        let missing = "the URL asks for TLS, which needs the crate's feature `tls`";
        return Err(Error::refused(missing));
    }
    let unreadable = |error| Error::refused("the URL cannot be read").because(error);
    let info = url.into_connection_info().map_err(unreadable)?;
    // The server, too, learns by it that a peer has vanished, and ends its session.
    let keepalive = TcpKeepalive::new().with_time(KEEPALIVE);
    let keepalive = keepalive.with_interval(KEEPALIVE);
    let tcp = TcpSettings::default().set_nodelay(true);
    // Only with RESP3 does the library tell when a connection has closed.
    let redis = info.redis_settings().clone();
    let info = info.set_redis_settings(redis.set_protocol(ProtocolVersion::RESP3));
    Ok(info.set_tcp_settings(tcp.set_keepalive(keepalive)))
}

/// The same with this port, if the URL names none.
fn with_port(info: ConnectionInfo, url: &str, port: u16) -> ConnectionInfo {
    let named = redis::parse_redis_url(url).is_some_and(|url| url.port().is_some());
    if named || matches!(info.addr(), ConnectionAddr::Unix(_)) {
        return info;
    }
    let host = address(&info).host;
    at(&info, &Address { host, port })
}

/// That of a Unix socket is empty.
fn address(server: &ConnectionInfo) -> Address {
    match server.addr() {
        ConnectionAddr::Tcp(host, port) | ConnectionAddr::TcpTls { host, port, .. } => Address {
            host: host.as_str().into(),
            port: *port,
        },
        _ => Address::default(),
    }
}

/// Another server, spoken to in the same way.
fn at(server: &ConnectionInfo, Address { host, port }: &Address) -> ConnectionInfo {
    let (host, port) = (String::from(&**host), *port);
    server.clone().set_addr(match server.addr() {
        ConnectionAddr::TcpTls { insecure, .. } => ConnectionAddr::TcpTls {
            host,
            port,
            insecure: *insecure,
            tls_params: None,
        },
        _ => ConnectionAddr::Tcp(host, port),
    })
}

/// The other sentinels may take this part of the time once one has answered.
const SOON: u32 = 8;

/// A silent connection is probed after this long, and then as often.
const KEEPALIVE: Duration = Duration::from_secs(10);

/// Where a sentinel listens unless its URL says otherwise.
const SENTINEL_PORT: u16 = 26379;

#[cfg(test)]
mod tests {
    use super::*;

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

    fn shown(client: &redis::Client) -> String {
        client.get_connection_info().addr().to_string()
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
            .iter()
            .map(|one| shown(&one.client))
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
