//! Server URLs: where a server is, and how to connect to it.

use std::fmt;
use std::time::Duration;

use redis::io::tcp::TcpSettings;
use redis::io::tcp::socket2::TcpKeepalive;
use redis::{ConnectionAddr, ConnectionInfo, IntoConnectionInfo, ProtocolVersion};

use crate::Error;

/// Where a node listens.
#[derive(Clone, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub(crate) struct Address {
    pub(crate) host: Box<str>,
    pub(crate) port: u16,
}

/// The client's own certificate and its trusted roots for TLS, in PEM.
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
    pub(super) fn client(&self, info: ConnectionInfo) -> Result<redis::Client, Error> {
        #[cfg(feature = "tls")]
        if is_tls(&info) {
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
        // The library accepts a PEM without any certificate: with no roots it trusts no server, and
        // no error says why. A certificate that cannot be read is an error of the library.
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

/// How to connect to `url`, whether it is a server's or a sentinel's; at this port, unless it names
/// another.
pub(super) fn read(url: &str, port: u16) -> Result<ConnectionInfo, Error> {
    let asks_for_tls = url.starts_with("rediss:") || url.starts_with("valkeys:");
    if asks_for_tls && cfg!(not(feature = "tls")) {
        let missing = "the URL asks for TLS, which needs the crate's feature `tls`";
        return Err(Error::refused(missing));
    }
    let unreadable = |error| Error::refused("the URL cannot be read").because(error);
    let mut parsed = redis::parse_redis_url(url);
    if let Some(unnamed) = parsed.as_mut().filter(|url| url.port().is_none()) {
        // A Unix socket has none.
        let _ = unnamed.set_port(Some(port));
    }
    let info = parsed.map_or_else(
        || url.into_connection_info(),
        IntoConnectionInfo::into_connection_info,
    );
    let info = info.map_err(unreadable)?;
    // The server, too, learns by it that a peer has vanished, and ends its session.
    let keepalive = TcpKeepalive::new().with_time(KEEPALIVE);
    let keepalive = keepalive.with_interval(KEEPALIVE);
    let tcp = TcpSettings::default().set_nodelay(true);
    // Only with RESP3 does the library tell when a connection has closed.
    let redis = info.redis_settings().clone();
    let info = info.set_redis_settings(redis.set_protocol(ProtocolVersion::RESP3));
    Ok(info.set_tcp_settings(tcp.set_keepalive(keepalive)))
}

/// The server's address; empty for a Unix socket.
pub(super) fn address(server: &ConnectionInfo) -> Address {
    match server.addr() {
        ConnectionAddr::Tcp(host, port) | ConnectionAddr::TcpTls { host, port, .. } => Address {
            host: host.as_str().into(),
            port: *port,
        },
        _ => Address::default(),
    }
}

/// Whether it is spoken to by TLS.
pub(super) fn is_tls(server: &ConnectionInfo) -> bool {
    matches!(server.addr(), ConnectionAddr::TcpTls { .. })
}

/// Another server, spoken to in the same way.
pub(super) fn at(server: &ConnectionInfo, Address { host, port }: &Address) -> ConnectionInfo {
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

/// A silent connection is probed after this long, and then as often.
const KEEPALIVE: Duration = Duration::from_secs(10);
