//! Where the server is, and what the user hears if it cannot be used.

use std::path::{Path, PathBuf};
use std::time::Duration;

use clap::Args;
use redis::ConnectionInfo;
use rlock_client::{Client, ClientBuilder, Error};

use crate::exit::Failure;
use crate::server::{address_of, read_url, right_in};

/// The authority's, and our own with its key, all in PEM.
type Certificates = (Option<Vec<u8>>, Option<(Vec<u8>, Vec<u8>)>);

/// The options for the server's address and the user.
#[derive(Args, Clone, Debug)]
#[command(next_help_heading = "Server")]
pub(crate) struct Connection {
    /// The server, redis://[user[:password]@]host[:port][/db]; rediss:// for TLS; several, one
    /// after the other or separated by commas, with --cluster and --sentinel
    #[arg(
        long,
        global = true,
        env = "RLOCK_URL",
        hide_env_values = true,
        value_delimiter = ',',
        value_name = "URL",
        default_value = "redis://127.0.0.1:6379"
    )]
    url: Vec<String>,

    /// The URLs are nodes of a cluster
    #[arg(long, global = true, conflicts_with = "sentinel")]
    pub(crate) cluster: bool,

    /// The URLs are sentinels, which know the primary by this name
    #[arg(long, global = true, value_name = "NAME")]
    pub(crate) sentinel: Option<String>,

    /// Log in as this user; the password is taken from the environment, `RLOCK_PASSWORD`
    #[arg(long, global = true, value_name = "NAME")]
    user: Option<String>,

    /// Encrypt the connections, as rediss:// does
    #[arg(long, global = true)]
    tls: bool,

    /// Trust this authority's certificate (PEM) and not the system's
    #[arg(long, global = true, value_name = "FILE")]
    tls_ca: Option<PathBuf>,

    /// Show this certificate (PEM) to servers that ask for one
    #[arg(long, global = true, value_name = "FILE", requires = "tls_key")]
    tls_cert: Option<PathBuf>,

    /// The key of that certificate (PEM)
    #[arg(long, global = true, value_name = "FILE", requires = "tls_cert")]
    tls_key: Option<PathBuf>,
}

impl Connection {
    /// Connects for taking locks.
    pub(crate) async fn client(&self, lease: Duration, grace: Duration) -> Result<Client, Failure> {
        let builder = Client::builder().lease(lease).grace(grace).label(label());
        let builder = self.certified(builder)?;
        let connected = match &self.sentinel {
            Some(service) => {
                let sentinels = builder.sentinels(self.url.iter().map(|url| self.with_tls(url)));
                sentinels
                    .connect(&self.as_user(&self.service_url(service)))
                    .await
            }
            None if self.cluster => {
                let nodes = self.url.iter().map(|url| self.as_user(&self.with_tls(url)));
                builder.connect_cluster(nodes).await
            }
            None => {
                builder
                    .connect(&self.as_user(&self.with_tls(self.only_url()?)))
                    .await
            }
        };
        connected.map_err(|error| self.failure(&error))
    }

    fn only_url(&self) -> Result<&str, Failure> {
        match &self.url[..] {
            [url] => Ok(url),
            _ => Err(Failure::usage(
                "several URLs are for --cluster, or for --sentinel NAME",
            )),
        }
    }

    fn certified(&self, mut builder: ClientBuilder) -> Result<ClientBuilder, Failure> {
        let (authority, own) = self.certificates()?;
        if let Some(authority) = authority {
            builder = builder.root_certificate(authority);
        }
        if let Some((certificate, key)) = own {
            builder = builder.client_certificate(certificate, key);
        }
        Ok(builder)
    }

    /// The authority's certificate, and our own with its key.
    pub(crate) fn certificates(&self) -> Result<Certificates, Failure> {
        let authority = self.tls_ca.as_deref().map(read).transpose()?;
        let own = match (&self.tls_cert, &self.tls_key) {
            (Some(certificate), Some(key)) => Some((read(certificate)?, read(key)?)),
            _ => None,
        };
        Ok((authority, own))
    }

    /// The servers, or the sentinels, by their URLs.
    pub(crate) fn infos(&self) -> Result<Vec<ConnectionInfo>, Failure> {
        if self.sentinel.is_some() {
            let urls = self.url.iter().map(|url| read_url(&self.with_tls(url)));
            return urls.collect();
        }
        if !self.cluster {
            self.only_url()?;
        }
        let urls = self.url.iter();
        urls.map(|url| read_url(&self.as_user(&self.with_tls(url))))
            .collect()
    }

    /// How to speak to the primary that sentinels name.
    pub(crate) fn service_info(&self, service: &str) -> Result<ConnectionInfo, Failure> {
        read_url(&self.as_user(&self.service_url(service)))
    }

    fn uses_tls(&self) -> bool {
        self.tls || self.tls_ca.is_some() || self.tls_cert.is_some()
    }

    fn with_tls(&self, url: &str) -> String {
        match url.strip_prefix("redis://") {
            Some(rest) if self.uses_tls() => format!("rediss://{rest}"),
            _ => url.to_owned(),
        }
    }

    /// The service whose primary the sentinels know.
    fn service_url(&self, service: &str) -> String {
        self.with_tls(&format!("redis://{}", encoded(service)))
    }

    /// The URL with the user's name and password in it.
    fn as_user(&self, url: &str) -> String {
        let password = std::env::var("RLOCK_PASSWORD").unwrap_or_default();
        let Some((scheme, rest)) = url.split_once("://") else {
            return url.to_owned();
        };
        if self.user.is_none() && (password.is_empty() || rest.contains('@')) {
            return url.to_owned();
        }
        // A URL without a password logs nobody in: the commands would run as the default user. A
        // user that needs no password is let in with any.
        let password = if password.is_empty() {
            "none"
        } else {
            &password
        };
        let user = encoded(self.user.as_deref().unwrap_or_default());
        let (_, place) = rest.rsplit_once('@').unwrap_or(("", rest));
        format!("{scheme}://{user}:{}@{place}", encoded(password))
    }

    /// Explains an error, with advice.
    pub(crate) fn failure(&self, error: &Error) -> Failure {
        let place = self.shown();
        let advice = if error.is_module_not_loaded() {
            format!(
                "{place} has no RLOCK module; add `loadmodule /path/to/librlock.so` to its file"
            )
        } else if error.is_refused() {
            match right_in(&error.to_string()) {
                Some(right) => format!("{place} refused: this user needs the right {right}"),
                None => format!("{place} {error}"),
            }
        } else {
            format!("cannot use {place} ({error}); --url or RLOCK_URL says where the server is")
        };
        Failure::unavailable(advice)
    }

    /// The servers' addresses.
    pub(crate) fn shown(&self) -> String {
        self.places().join(", ")
    }

    /// The same, one by one, and nothing of the URLs that could be secret. If one cannot be read,
    /// none is shown: a password with a comma in it makes two of one URL, and the first of them may
    /// be read as a host and a port.
    pub(crate) fn places(&self) -> Vec<String> {
        let read: Result<Vec<_>, _> = self.url.iter().map(|url| read_url(url)).collect();
        match read {
            Ok(infos) => infos.iter().map(address_of).collect(),
            Err(_) => vec!["the server".to_owned()],
        }
    }
}

/// Under which name operators find the session.
fn label() -> String {
    let host = nix::unistd::gethostname().unwrap_or_default();
    format!("rlock:{}:{}", host.display(), std::process::id())
}

/// As a URL has it.
fn encoded(text: &str) -> String {
    let plain = |byte: u8| byte.is_ascii_alphanumeric() || b"-._~".contains(&byte);
    let each = text.bytes().map(|byte| match byte {
        byte if plain(byte) => char::from(byte).to_string(),
        byte => format!("%{byte:02X}"),
    });
    each.collect()
}

fn read(path: &Path) -> Result<Vec<u8>, Failure> {
    std::fs::read(path)
        .map_err(|error| Failure::usage(format!("cannot read {}: {error}", path.display())))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[derive(clap::Parser)]
    struct Options {
        #[command(flatten)]
        connection: Connection,
    }

    #[test]
    fn only_addresses_are_shown() {
        for (url, shown) in [
            ("redis://me:p%40ss@h:1/2", "h:1"),
            ("redis://h", "h:6379"),
            ("rediss://:pass@[::1]:7", "::1:7"),
            ("unix:///tmp/s?db=1&user=me&pass=secret", "/tmp/s"),
            ("redis://me:se,cret@h:1", "the server"),
            ("redis://me:12,cret@h:1", "the server"),
            ("redis://a:1,redis://me:x@b:2", "a:1, b:2"),
        ] {
            let options = <Options as clap::Parser>::parse_from(["rlock", "--url", url]);
            assert_eq!(options.connection.shown(), shown, "{url}");
        }
    }

    #[test]
    fn what_a_url_cannot_have_is_written_otherwise() {
        assert_eq!(encoded("a:b@c/é~"), "a%3Ab%40c%2F%C3%A9~");
    }
}
