//! A named lock and the three ways of taking it.

use std::fmt;
use std::slice;
use std::sync::Arc;

use crate::api::acquire_options::AcquireOptions;
use crate::api::guard::Guard;
use crate::api::methods::{setters, verbs};
use crate::error::Error;
use crate::flows::acquire::WaitMode;
use crate::wire::request::Mode;

/// A lock by its name, made by [`Client::lock`](crate::Client::lock). Cheap to clone; nothing is
/// taken until one of its verbs is called.
///
/// Waiters are served first come first served, in the server, and calls of one client get into the
/// queue in the order in which they are first polled. A wait costs the server a few hundred bytes
/// and no connection.
///
/// # Lease
///
/// Without [`lease`](Self::lease) the watchdog renews the lock for as long as its guard lives: 30 s
/// every 10 s, unless the [client](crate::ClientBuilder) says otherwise. With it the lock is taken
/// for that long and never renewed but by [`Guard::renew`].
///
/// # Owner
///
/// Without [`owner`](Self::owner) every call is an owner of its own, so a second `lock()` waits for
/// the first, also in the same task. With it a call enters a lock again that the owner already
/// holds. As long as the owner has a guard of the lock, or one that is still being given back,
/// the lease stays as it was first asked for, whatever a later call says. An owner is in a lock's
/// queue once: a second call waits here until the first has ended.
#[derive(Clone)]
pub struct Lock {
    pub(crate) options: AcquireOptions,
    name: Arc<[u8]>,
}

impl Lock {
    pub(crate) fn new(options: AcquireOptions, name: Arc<[u8]>) -> Self {
        Self { options, name }
    }

    /// The name: the key under which the server keeps the lock.
    pub fn name(&self) -> &[u8] {
        &self.name
    }

    setters! { self.options;
        /// # Examples
        ///
        /// ```no_run
        /// # async fn example(client: rlock_client::Client) -> Result<(), rlock_client::Error> {
        /// use std::time::Duration;
        ///
        /// let guard = client.lock("nightly").lease(Duration::from_secs(600)).lock().await?;
        /// # Ok(())
        /// # }
        /// ```
        lease;
        max_hold;
        owner;
    }

    verbs! { r#"client.lock("orders")"#: Guard by take;
        /// Takes the lock, waiting in the queue for as long as it takes.
        lock;
        /// Takes the lock if it is free, or held by the same owner; does not wait.
        try_lock;
        /// Takes the lock, waiting in the queue for at most `timeout`.
        lock_timeout;
    }

    async fn take(&self, wait_mode: WaitMode) -> Result<Guard, Error> {
        let names = slice::from_ref(&self.name);
        self.options.take(Mode::Plain, names, wait_mode).await
    }
}

impl fmt::Debug for Lock {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Lock")
            .field("name", &String::from_utf8_lossy(&self.name))
            .field("lease", &self.options.lease)
            .field("owner", &self.options.owner)
            .finish_non_exhaustive()
    }
}
