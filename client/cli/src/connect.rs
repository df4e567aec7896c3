//! Where the server is, and what the user hears if it cannot be used.

use std::ffi::OsString;
use std::path::{Path, PathBuf};
use std::time::Duration;

use clap::Args;
use redis::ConnectionInfo;
use rlock_client::{Client, ClientBuilder, Error};

use crate::exit::Failure;
use crate::reply::{given, shown_names};
use crate::server::{IS_A_REPLICA, IS_IN_A_CLUSTER, address_of, lacks, right_in, user_of};
use crate::url;

/// The authority's, and our own with its key, all in PEM.
type Certificates = (Option<Vec<u8>>, Option<(Vec<u8>, Vec<u8>)>);

/// The options for the server's address and the user.
#[derive(Args, Clone, Debug)]
#[command(next_help_heading = "Server")]
pub(crate) struct Connection {
    /// The server, redis://[user[:password]@]host[:port][/db]; rediss:// for TLS;
    /// `unix:///path?db=N&user=NAME&pass=PASSWORD` for a socket; several, one after the other or
    /// separated by commas, with --cluster and --sentinel
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
    #[arg(
        long,
        global = true,
        env = "RLOCK_USER",
        hide_env_values = true,
        value_name = "NAME"
    )]
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
        let infos = self.infos()?;
        let mut urls = infos.iter().map(url::write);
        let connected = match &self.sentinel {
            Some(service) => {
                let service = url::write(&self.service_info(service)?);
                builder.sentinels(urls).connect(&service).await
            }
            None if self.cluster => builder.connect_cluster(urls).await,
            None => builder.connect(&urls.next().unwrap_or_default()).await,
        };
        connected.map_err(|error| self.failure(&error, &[]))
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
            let urls = self.url.iter().map(|url| url::read(&self.with_tls(url)));
            return urls.collect();
        }
        if self.names_each_node() {
            return Err(Failure::usage(
                "several URLs are for --cluster, --sentinel NAME, or the exporter",
            ));
        }
        self.infos_of_each()
    }

    /// Whether the URLs are of several servers that belong together in no way that is known here.
    pub(crate) fn names_each_node(&self) -> bool {
        self.url.len() > 1 && !self.cluster && self.sentinel.is_none()
    }

    /// The servers by their URLs, also if there are several.
    pub(crate) fn infos_of_each(&self) -> Result<Vec<ConnectionInfo>, Failure> {
        let urls = self.url.iter().map(|url| url::read(&self.with_tls(url)));
        urls.map(|info| info.map(|info| self.as_user(info)))
            .collect()
    }

    /// How to speak to the primary that sentinels name.
    pub(crate) fn service_info(&self, service: &str) -> Result<ConnectionInfo, Failure> {
        let url = self.with_tls(&format!("redis://{}", url::encoded(service)));
        Ok(self.as_user(url::read(&url)?))
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

    /// The connection with the user's name and password. A name from --user or `RLOCK_USER` takes
    /// the place of the URL's, together with `RLOCK_PASSWORD`. Without such a name `RLOCK_PASSWORD`
    /// is for a URL that has no password of its own.
    fn as_user(&self, info: ConnectionInfo) -> ConnectionInfo {
        let settings = info.redis_settings().clone();
        let given = std::env::var("RLOCK_PASSWORD").ok();
        let given = given.filter(|password| !password.is_empty());
        let own = settings.password().map(str::to_owned);
        let user = self.user.clone();
        let (user, password) = match user {
            Some(user) => (Some(user), given.or(own)),
            None => (settings.username().map(str::to_owned), own.or(given)),
        };
        // Without a password nobody is logged in, and the commands would run as the default user. A
        // user that needs no password is let in with any.
        let password = password.or_else(|| user.as_ref().map(|_| "none".to_owned()));
        let settings = match user {
            Some(user) => settings.set_username(user),
            None => settings,
        };
        let settings = match password {
            Some(password) => settings.set_password(password),
            None => settings,
        };
        info.set_redis_settings(settings)
    }

    /// Explains an error of a call for these names, with advice.
    pub(crate) fn failure(&self, error: &Error, names: &[OsString]) -> Failure {
        let (place, text) = (self.shown(), error.to_string());
        let advice = if error.is_module_not_loaded() {
            format!(
                "{place} has no RLOCK module; add `loadmodule /path/to/librlock.so` to its file"
            )
        } else if text.contains("MOVED ") && !self.cluster {
            format!("{place}: {IS_IN_A_CLUSTER}")
        } else if text.contains("READONLY ") {
            format!("{place}: {IS_A_REPLICA}")
        } else if !error.is_refused() {
            format!("cannot use {place} ({error}); --url or RLOCK_URL says where the server is")
        } else if let Some(right) = right_in(&text) {
            let user = match &self.sentinel {
                Some(service) => self.service_info(service).ok(),
                None => self.infos().ok().and_then(|infos| infos.into_iter().next()),
            };
            let names: Vec<_> = names.iter().map(|name| given(name)).collect();
            let user = user.as_ref().map_or("default", user_of);
            format!("{place}: {}", lacks(user, &right, &names))
        } else if text.contains("WRONGTYPE ") && !names.is_empty() {
            let taken = shown_names(names);
            format!("{place} {error}; the lock {taken} needs a name of its own")
        } else {
            format!("{place} {error}")
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
        let read: Result<Vec<_>, _> = self.url.iter().map(|url| url::read(url)).collect();
        match read {
            Ok(infos) => infos.iter().map(address_of).collect(),
            Err(_) => vec!["the server".to_owned()],
        }
    }
}

/// Under which name operators find the session.
pub(crate) fn label() -> String {
    let host = nix::unistd::gethostname().unwrap_or_default();
    format!("rlock:{}:{}", host.display(), std::process::id())
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
}
