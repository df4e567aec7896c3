//! Where the server is: at a URL, or where the sentinels say that the service has its primary.

use std::fmt;
use std::sync::{Arc, Mutex};
use std::time::Duration;

use redis::io::tcp::TcpSettings;
use redis::io::tcp::socket2::TcpKeepalive;
use redis::{ConnectionAddr, ConnectionInfo, IntoConnectionInfo, ProtocolVersion};

use crate::error::Error;
use crate::locked;
use crate::wire::sentinel;

/// Where a node listens.
#[derive(Clone, Debug, Default, PartialEq, Eq, Hash)]
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

/// Where a server is, to be looked up before each connection.
#[derive(Clone)]
pub(crate) struct Endpoint {
    /// How to connect; with sentinels its host is the name of the service.
    server: ConnectionInfo,
    sentinels: Arc<[redis::Client]>,
    /// What a majority of the sentinels named last, as long as that can be used.
    agreed: Arc<Mutex<Option<sentinel::Address>>>,
    certificates: Certificates,
}

impl Endpoint {
    /// Reads the URLs and the certificates; no I/O.
    pub(crate) fn new(
        url: &str,
        sentinels: &[String],
        certificates: &Certificates,
    ) -> Result<Self, Error> {
        let sentinels = sentinels.iter().map(|url| {
            let info = with_port(read(url)?, url, SENTINEL_PORT);
            certificates.client(info)
        });
        let place = Self {
            server: read(url)?,
            sentinels: sentinels.collect::<Result<_, _>>()?,
            agreed: Arc::default(),
            certificates: certificates.clone(),
        };
        // Says now what is wrong with the certificates.
        place.certificates.client(place.server.clone())?;
        #[cfg(feature = "tls")]
        if place.uses_tls() {
            place.certificates.check()?;
        }
        Ok(place)
    }

    #[cfg(feature = "tls")]
    fn uses_tls(&self) -> bool {
        let sentinels = self
            .sentinels
            .iter()
            .map(redis::Client::get_connection_info);
        let mut all = sentinels.chain([&self.server]).map(ConnectionInfo::addr);
        all.any(|address| matches!(address, ConnectionAddr::TcpTls { .. }))
    }

    /// The address in the URL.
    pub(crate) fn address(&self) -> Address {
        let (ConnectionAddr::Tcp(_, port) | ConnectionAddr::TcpTls { port, .. }) =
            self.server.addr()
        else {
            return Address::default();
        };
        Address {
            host: host(self.server.addr()).into(),
            port: *port,
        }
    }

    /// Another server, to which this user connects in the same way.
    pub(crate) fn other(&self, address: &Address) -> Self {
        let other = at(self.server.addr(), (*address.host).to_owned(), address.port);
        Self {
            server: self.server.clone().set_addr(other),
            sentinels: Arc::default(),
            agreed: Arc::default(),
            certificates: self.certificates.clone(),
        }
    }

    /// Where the server is now.
    pub(crate) async fn find(&self, within: Duration) -> Result<redis::Client, Error> {
        if self.sentinels.is_empty() {
            return self.certificates.client(self.server.clone());
        }
        let before = locked(&self.agreed).clone();
        let named = sentinel::primary(&self.sentinels, self.service(), within, before.as_ref());
        let named = named.await?;
        if named.by_most {
            *locked(&self.agreed) = Some(named.address.clone());
        }
        self.client(named.address)
    }

    /// Where a majority of the sentinels says that the server is now.
    pub(crate) async fn find_agreed(&self, within: Duration) -> Option<redis::Client> {
        let agreed = sentinel::majority(&self.sentinels, self.service(), within).await?;
        *locked(&self.agreed) = Some(agreed.clone());
        self.client(agreed).ok()
    }

    /// What was found could not be used: nothing speaks for it any more but the sentinels.
    pub(crate) fn forget(&self) {
        *locked(&self.agreed) = None;
    }

    /// Those that are asked where the server is.
    pub(crate) fn sentinels(&self) -> &[redis::Client] {
        &self.sentinels
    }

    /// What they call it.
    pub(crate) fn service(&self) -> &str {
        host(self.server.addr())
    }

    /// How the server is called that they say is there.
    pub(crate) fn named(&self, host: &str, port: u16) -> String {
        at(self.server.addr(), host.to_owned(), port).to_string()
    }

    fn client(&self, (host, port): sentinel::Address) -> Result<redis::Client, Error> {
        let address = at(self.server.addr(), host, port);
        self.certificates
            .client(self.server.clone().set_addr(address))
    }
}

impl fmt::Debug for Endpoint {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Endpoint")
            .field("server", self.server.addr())
            .finish_non_exhaustive()
    }
}

/// What a client shows and trusts when it speaks TLS.
#[derive(Clone, Default)]
pub(crate) struct Certificates {
    #[cfg(feature = "tls")]
    root: Option<Vec<u8>>,
    /// The certificate and its key.
    #[cfg(feature = "tls")]
    own: Option<(Vec<u8>, Vec<u8>)>,
}

impl Certificates {
    /// Trusts these roots instead of the system's.
    #[cfg(feature = "tls")]
    pub(crate) fn trust(&mut self, root: Vec<u8>) {
        self.root = Some(root);
    }

    /// Shows this certificate to servers that ask for one.
    #[cfg(feature = "tls")]
    pub(crate) fn show(&mut self, certificate: Vec<u8>, key: Vec<u8>) {
        self.own = Some((certificate, key));
    }

    /// The library takes what has no certificate in it for none at all: with no roots nobody is
    /// trusted, and nobody is told why. What is one and cannot be read it says itself.
    #[cfg(feature = "tls")]
    fn check(&self) -> Result<(), Error> {
        use rustls::pki_types::CertificateDer;
        use rustls::pki_types::pem::PemObject;

        let own = self.own.as_ref().map(|(certificate, _)| certificate);
        for pem in self.root.iter().chain(own) {
            if CertificateDer::pem_slice_iter(pem).next().is_none() {
                let (kind, what) = (
                    redis::ErrorKind::InvalidClientConfig,
                    "no certificate in PEM",
                );
                return Err(Error::bad_certificates((kind, what).into()));
            }
        }
        Ok(())
    }

    #[cfg(not(feature = "tls"))]
    #[expect(clippy::unused_self, reason = "there are none without the feature")]
    fn client(&self, info: ConnectionInfo) -> Result<redis::Client, Error> {
        redis::Client::open(info).map_err(Error::could_not_connect)
    }

    /// Connects with them if the address asks for TLS.
    #[cfg(feature = "tls")]
    fn client(&self, info: ConnectionInfo) -> Result<redis::Client, Error> {
        use redis::{ClientTlsConfig, TlsCertificates};

        if !matches!(info.addr(), ConnectionAddr::TcpTls { .. }) {
            return redis::Client::open(info).map_err(Error::could_not_connect);
        }
        settle_on_a_provider();
        let own = self.own.clone();
        let certificates = TlsCertificates {
            client_tls: own.map(|(client_cert, client_key)| ClientTlsConfig {
                client_cert,
                client_key,
            }),
            root_cert: self.root.clone(),
        };
        redis::Client::build_with_tls(info, certificates).map_err(Error::bad_certificates)
    }
}

impl fmt::Debug for Certificates {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        // A key is among them.
        f.debug_struct("Certificates").finish_non_exhaustive()
    }
}

/// The program's own choice stands. Without one rustls panics if several providers are compiled in,
/// by whatever other crate.
#[cfg(feature = "tls")]
fn settle_on_a_provider() {
    use rustls::crypto::{CryptoProvider, ring};

    if CryptoProvider::get_default().is_none() {
        // Another thread may have been quicker: then that one is there.
        let _ = ring::default_provider().install_default();
    }
}

/// How to connect to `url`, whether it is a server's or a sentinel's.
fn read(url: &str) -> Result<ConnectionInfo, Error> {
    if cfg!(not(feature = "tls"))
        && ["rediss:", "valkeys:"]
            .iter()
            .any(|tls| url.starts_with(tls))
    {
        return Err(Error::no_tls());
    }
    let info = url.into_connection_info().map_err(Error::bad_url)?;
    // The server, too, learns by it that a peer has vanished, and ends its session.
    let keepalive = TcpKeepalive::new()
        .with_time(KEEPALIVE)
        .with_interval(KEEPALIVE);
    let settings = TcpSettings::default()
        .set_nodelay(true)
        .set_keepalive(keepalive);
    // Only with RESP3 does the library tell when a connection has closed.
    let redis = info
        .redis_settings()
        .clone()
        .set_protocol(ProtocolVersion::RESP3);
    Ok(info.set_redis_settings(redis).set_tcp_settings(settings))
}

/// The same with this port, if the URL names none.
fn with_port(info: ConnectionInfo, url: &str, port: u16) -> ConnectionInfo {
    let named = redis::parse_redis_url(url).is_some_and(|url| url.port().is_some());
    if named || matches!(info.addr(), ConnectionAddr::Unix(_)) {
        return info;
    }
    let address = at(info.addr(), host(info.addr()).to_owned(), port);
    info.set_addr(address)
}

fn host(address: &ConnectionAddr) -> &str {
    match address {
        ConnectionAddr::Tcp(host, _) | ConnectionAddr::TcpTls { host, .. } => host,
        _ => "",
    }
}

/// Another server, spoken to in the same way.
fn at(address: &ConnectionAddr, host: String, port: u16) -> ConnectionAddr {
    match address {
        ConnectionAddr::TcpTls { insecure, .. } => ConnectionAddr::TcpTls {
            host,
            port,
            insecure: *insecure,
            tls_params: None,
        },
        _ => ConnectionAddr::Tcp(host, port),
    }
}

/// A silent connection is probed after this long, and then as often.
const KEEPALIVE: Duration = Duration::from_secs(10);

/// Where a sentinel listens unless its URL says otherwise.
const SENTINEL_PORT: u16 = 26379;

#[cfg(test)]
mod tests {
    use super::*;

    fn place(url: &str, sentinels: &[&str]) -> Result<Endpoint, Error> {
        let sentinels: Vec<_> = sentinels.iter().map(|url| (*url).to_owned()).collect();
        Endpoint::new(url, &sentinels, &Certificates::default())
    }

    fn address(client: &redis::Client) -> String {
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
        assert_eq!(host(place.server.addr()), "my_Service");
        let addresses: Vec<_> = place.sentinels.iter().map(address).collect();
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
            let mut certificates = Certificates::default();
            certificates.trust(root.clone().into());
            let error = Endpoint::new("rediss://x", &[], &certificates).expect_err(&root);
            assert!(error.to_string().contains("certificate"), "{error}");
            let sentinels = ["rediss://y".to_owned()];
            assert!(Endpoint::new("redis://x", &sentinels, &certificates).is_err());
            assert!(Endpoint::new("redis://x", &[], &certificates).is_ok());
        }
    }

    #[cfg(feature = "tls")]
    #[test]
    fn certificates_that_cannot_be_read_are_told_before_anything_is_asked() {
        let mut certificates = Certificates::default();
        certificates.show(b"no certificate".to_vec(), b"no key".to_vec());
        let error = Endpoint::new("rediss://x", &[], &certificates).expect_err("no key");
        assert!(Endpoint::new("redis://x", &["rediss://y".to_owned()], &certificates).is_err());
        assert!(error.to_string().contains("certificate"), "{error}");
        assert!(Endpoint::new("redis://x", &[], &certificates).is_ok());
    }
}
