//! The settings of clients without async.

use std::sync::Arc;
use std::time::Duration;

use crate::blocking::twin::HasTwin;
use crate::blocking::{Client, QuorumClient, Runtime};
use crate::{Error, ErrorKind, QuorumError};

/// A builder around that of the same name. Its settings are passed on; what connects differs.
macro_rules! builder {
    (
        $(#[$meta:meta])* $name:ident;
        $(
            $(#[cfg($when:meta)])?
            fn $setting:ident $(<$generic:ident: $bound:path>)? ($($arg:ident: $type:ty),*);
        )*
    ) => {
        $(#[$meta])*
        #[derive(Clone, Debug)]
        #[must_use = "a builder does nothing until it connects"]
        pub struct $name(crate::$name);

        impl From<crate::$name> for $name {
            fn from(settings: crate::$name) -> Self {
                Self(settings)
            }
        }

        impl $name {
            $(
                #[doc = concat!(
                    "See [`crate::", stringify!($name), "::", stringify!($setting), "`]."
                )]
                $(#[cfg($when)])?
                pub fn $setting $(<$generic: $bound>)? (self, $($arg: $type),*) -> Self {
                    Self(self.0.$setting($($arg),*))
                }
            )*
        }
    };
}

builder! {
    /// The settings of a [`Client`] that connects without async; those of a
    /// [`crate::ClientBuilder`], from which it can be made as well.
    ///
    /// # Examples
    ///
    /// ```no_run
    /// use std::time::Duration;
    ///
    /// let client = rlock_client::blocking::Client::builder()
    ///     .lease(Duration::from_secs(10))
    ///     .connect("redis://127.0.0.1:6379")?;
    /// # Ok::<(), rlock_client::Error>(())
    /// ```
    ClientBuilder;
    fn lease(lease: Duration);
    fn renew_every(interval: Duration);
    fn max_hold(longest: Duration);
    fn kept_max(most: usize);
    fn grace(grace: Duration);
    fn label(label: impl Into<String>);
    fn response_timeout(timeout: Duration);
    fn acknowledged_by(replicas: u32, within: Duration);
    fn acknowledged_on_disk(replicas: u32, within: Duration);
    fn sentinels<U: Into<String>>(urls: impl IntoIterator<Item = U>);
    #[cfg(feature = "tls")]
    fn root_certificate(pem: impl Into<Vec<u8>>);
    #[cfg(feature = "tls")]
    fn client_certificate(pem: impl Into<Vec<u8>>, key: impl Into<Vec<u8>>);
}

impl ClientBuilder {
    /// Connects to the server at `url`: see [`crate::ClientBuilder::connect`].
    ///
    /// # Errors
    ///
    /// As there; unavailable also if no thread can be started.
    ///
    /// # Panics
    ///
    /// Inside an async task.
    pub fn connect(self, url: &str) -> Result<Client, Error> {
        let runtime = Arc::new(Runtime::start()?);
        let client = runtime.handle.block_on(self.0.connect(url))?;
        Ok(client.twin(&runtime))
    }

    /// Connects to a cluster: see [`crate::ClientBuilder::connect_cluster`].
    ///
    /// # Errors
    ///
    /// As there; unavailable also if no thread can be started.
    ///
    /// # Panics
    ///
    /// Inside an async task.
    pub fn connect_cluster<U: AsRef<str>>(
        self,
        urls: impl IntoIterator<Item = U>,
    ) -> Result<Client, Error> {
        let runtime = Arc::new(Runtime::start()?);
        let client = runtime.handle.block_on(self.0.connect_cluster(urls))?;
        Ok(client.twin(&runtime))
    }
}

builder! {
    /// The settings of a [`QuorumClient`] that connects without async; those of a
    /// [`crate::QuorumBuilder`], from which it can be made as well.
    QuorumBuilder;
    fn settings(settings: crate::ClientBuilder);
    fn server_timeout(limit: Duration);
}

impl QuorumBuilder {
    /// Connects to the servers at these URLs: see [`crate::QuorumBuilder::connect`].
    ///
    /// # Errors
    ///
    /// As there; unavailable also if no thread can be started.
    ///
    /// # Panics
    ///
    /// Inside an async task.
    pub fn connect<U: AsRef<str>>(
        self,
        urls: impl IntoIterator<Item = U>,
    ) -> Result<QuorumClient, QuorumError> {
        let runtime = Runtime::start()
            .map_err(|error| QuorumError::new(ErrorKind::Unavailable, error.to_string()))?;
        let client = runtime.handle.block_on(self.0.connect(urls))?;
        Ok(client.twin(&Arc::new(runtime)))
    }
}
