//! A named lock and the three ways of taking it.

use crate::api::{AcquireOptions, Guard, setters, verbs};
use crate::wire::{Mode, WaitMode};

/// A lock by its name, made by [`Client::lock`](crate::Client::lock). Cheap to clone; nothing is
/// taken until one of its verbs is called.
///
/// Waiters are served first come first served, in the server, and calls of one client get into the
/// queue in the order in which they are first polled, but for those that are made while the
/// connection is broken. A wait costs the server a few hundred bytes
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
/// holds. As long as the owner has a guard of the lock the lease stays as it was first asked for,
/// whatever a later call says. An owner is in a lock's queue once: a second call waits here until
/// the first has ended.
#[derive(Clone, Debug)]
pub struct Lock {
    pub(crate) options: AcquireOptions,
}

impl Lock {
    /// The name: the key under which the server keeps the lock.
    pub fn name(&self) -> &[u8] {
        self.options.name()
    }

    setters! { self, self.options;
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

    verbs! { r#"client.lock("orders")"#: Guard in Mode::Plain;
        /// Takes the lock, waiting in the queue for as long as it takes.
        lock;
        /// Takes the lock if it is free, or held by the same owner; does not wait.
        try_lock;
        /// Takes the lock, waiting in the queue for at most `timeout`.
        lock_timeout;
    }
}
