//! A named lock and the three ways of taking it.

use std::time::Duration;

use crate::api::{AcquireOptions, Guard, awaited, setters, verbs};
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
#[must_use = "it takes nothing until lock() is called and awaited"]
pub struct Lock {
    pub(crate) options: AcquireOptions,
}

impl Lock {
    /// The name: the key under which the server keeps the lock.
    pub fn name(&self) -> &[u8] {
        self.options.name()
    }

    /// Keeps the lock here after `unlock()`, or when its guard is dropped, for up to `idle`: the
    /// next call of this process for the same lock then gets it without asking the server, in less
    /// than a microsecond. For a process that takes the same lock again and again: of a shard, of a
    /// tenant.
    ///
    /// As soon as anybody else wants the lock it goes to them: at once if nobody uses it here, and
    /// at the end of the present use otherwise. The calls of this process that wait for it line up
    /// in the server then, like all others. Here too they are served first come first served.
    ///
    /// - Guards that follow each other so have the same [token](Guard::token) and
    ///   [owner](Guard::owner), for nobody else had the lock in between. That owner takes no other
    ///   lock: it is refused.
    /// - A lock that was lost meanwhile, as far as this client knows, is never handed on; nor is
    ///   one while the server is not heard. The promise of a guard is unchanged.
    /// - With a [`lease`](Self::lease) of its own or a [`max_hold`](Self::max_hold), which go on
    ///   while it is kept, a kept lock is handed on as long as half of them is left.
    /// - Locks are kept apart by their terms: calls with another lease, `max_hold` or `idle` take
    ///   the lock from each other as strangers do.
    /// - While calls of this process stand in the server's queue it is not kept. Where that never
    ///   ends, because several tasks take it without a pause, each use asks the server from the
    ///   first interruption on; as soon as none of them stands there it is kept again.
    /// - `unlock()` only confirms that the guard has given the lock back here; the next call hears
    ///   of any change at the server. Idle locks go back to the server with
    ///   [`shutdown()`](crate::Client::shutdown): a program that ends without it leaves it held for
    ///   the [grace](crate::ClientBuilder::grace).
    /// - [`Guard::wanted`] ends for callers of this process, too.
    /// - While a lock is kept and idle the server shows it as held, and others wait for it for
    ///   about one round trip. **Their `try_lock()` may be refused, once**.
    ///
    /// At most [`kept_max`](crate::ClientBuilder::kept_max) locks are kept idle. Not with an
    /// [`owner`](Self::owner) or in a [`Scope`](crate::Scope), which `lock()` then refuses; `idle`
    /// is from 1 to 2^53-1 ms. A server whose module is older and knows no
    /// `WANTED` refuses it.
    ///
    /// # Examples
    ///
    /// ```no_run
    /// # async fn example(client: rlock_client::Client) -> Result<(), rlock_client::Error> {
    /// use std::time::Duration;
    ///
    /// let shard = client.lock("shard:7").keep(Duration::from_secs(10));
    /// for _change in 0..1_000_000 {
    ///     let guard = shard.lock().await?; // asks the server once, unless others want it
    ///     // … change it …
    ///     guard.unlock().await?;
    /// }
    /// # Ok(())
    /// # }
    /// ```
    #[must_use = "this gives a lock that is kept, and takes nothing"]
    pub fn keep(mut self, idle: Duration) -> Self {
        self.options.kept_for = Some(idle);
        self
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

awaited! {
    /// Awaiting a lock is calling its [`lock()`](Lock::lock).
    ///
    /// # Examples
    ///
    /// ```no_run
    /// # async fn example(client: rlock_client::Client) -> Result<(), rlock_client::Error> {
    /// let guard = client.lock("orders").await?;
    /// # Ok(())
    /// # }
    /// ```
    Lock by lock: Guard
}
