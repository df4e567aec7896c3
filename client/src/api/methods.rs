//! The methods that locks of every kind have in common, written once: the settings of a call, and
//! the three verbs.

/// The settings of a lock, which are fields of the place that is named first. Each may add its own
/// documentation to the common one. Locks of a quorum and semaphores have no owner.
macro_rules! setters {
    (
        $this:ident, $kept:expr;
        $(#[$lease_doc:meta])* lease;
        $(#[$max_hold_doc:meta])* max_hold;
        $($(#[$owner_doc:meta])* $owner:ident;)?
    ) => {
        /// Sets a lease of this length, which the watchdog does not renew. Whole milliseconds; a
        /// part of one is cut off.
        ///
        /// In a cluster, where the slot may move, the client repeats the rest of the lease to the
        /// server now and then. There the server may keep the lock for longer, by the time that
        /// such a command is on its way. The guard ends with the lease that was asked for.
        ///
        $(#[$lease_doc])*
        #[must_use = "this gives one with the lease, and takes nothing"]
        pub fn lease(mut $this, lease: std::time::Duration) -> Self {
            $kept.lease = Some(lease);
            $this
        }

        /// Limits how long it is held: see
        /// [`ClientBuilder::max_hold`](crate::ClientBuilder::max_hold), which this overrides.
        ///
        $(#[$max_hold_doc])*
        #[must_use = "this gives one with the limit, and takes nothing"]
        pub fn max_hold(mut $this, longest: std::time::Duration) -> Self {
            $kept.max_hold = Some(longest);
            $this
        }

        $(
            /// Sets the owner, which enters again the locks that it holds already: see
            /// [`Owner`](crate::Owner). A [`Scope`](crate::Scope) sets it for all of its locks.
            ///
            $(#[$owner_doc])*
            #[must_use = "this gives one with the owner, and takes nothing"]
            pub fn $owner(mut $this, owner: &crate::Owner) -> Self {
                $kept.owner = Some(owner.clone());
                $this
            }
        )?
    };
}

/// The three ways of taking a lock, each with its first words: one waits, one does not, and one
/// waits for some time. Before them how an example names the lock, the guard, and its mode; behind
/// them errors that only this lock has.
macro_rules! verbs {
    (
        $example:literal: $guard:ident in $mode:expr;
        $(#[$wait_doc:meta])* $wait:ident;
        $(#[$try_doc:meta])* $try_once:ident;
        $(#[$timeout_doc:meta])* $timeout:ident;
        $(#[$error:meta])*
    ) => {
        $(#[$wait_doc])*
        ///
        /// One round trip if nobody is in the way. Once in the queue, the wait survives a lost
        /// connection or a restart of the server: it connects again and queues again, at the end if
        /// the server has forgotten it. A call that meets an outage at its beginning does not wait
        /// for its end: it is [unavailable](crate::Error::is_unavailable). A caller that wants to
        /// wait in both cases, as in a leader election, calls again in a loop.
        ///
        /// # Cancel safety
        ///
        /// Dropping the future at any await gives up the place in the queue and releases a grant
        /// that came meanwhile; neither a hold nor a waiter stays behind. The client does so in the
        /// background: [`Client::shutdown`](crate::Client::shutdown) waits until it is done.
        ///
        /// # Errors
        ///
        /// - Deadlock: the wait would close a circle of owners who wait for each other. Calls
        ///   without a [`Scope`](crate::Scope) or an [`Owner`](crate::Owner) are owners of their
        ///   own, and their deadlocks are not seen.
        /// - Refused, module not loaded: the server's answer.
        /// - Unavailable: the server could not be reached when this was called, or the client has
        ///   been shut down.
        /// - Unknown: no reply came; see [`Error`](crate::Error) for what then happens to a grant.
        /// - Not acknowledged, lost: only where
        ///   [replicas](crate::ClientBuilder::acknowledged_by) have to acknowledge the grant.
        /// - Not acquired: only if somebody else took this owner out of the queue with
        ///   `RLOCK.CANCEL`.
        $(#[$error])*
        ///
        /// # Examples
        ///
        /// ```no_run
        /// # async fn example(client: rlock_client::Client) -> Result<(), rlock_client::Error> {
        #[doc = concat!("let guard = ", $example, ".", stringify!($wait), "().await?;")]
        /// // … work while it is held …
        /// guard.unlock().await?;
        /// # Ok(())
        /// # }
        /// ```
        pub async fn $wait(&self) -> Result<$guard, crate::Error> {
            self.options.take($mode, WaitMode::Forever).await
        }

        $(#[$try_doc])*
        ///
        /// One round trip.
        ///
        /// # Cancel safety
        ///
        /// If the future is dropped, a grant that came meanwhile is released in the background.
        ///
        /// # Errors
        ///
        /// - Not acquired: somebody else has it, or waits for it;
        ///   [`Error::lease_left`](crate::Error::lease_left) says what is left of the longest
        ///   lease.
        /// - Refused, module not loaded: the server's answer.
        /// - Unavailable: the server could not be reached, or the client has been shut down.
        /// - Unknown: no reply came; see [`Error`](crate::Error) for what then happens to a grant.
        /// - Not acknowledged, lost: only where
        ///   [replicas](crate::ClientBuilder::acknowledged_by) have to acknowledge the grant.
        $(#[$error])*
        ///
        /// # Examples
        ///
        /// ```no_run
        /// # async fn example(client: rlock_client::Client) -> Result<(), rlock_client::Error> {
        #[doc = concat!("match ", $example, ".", stringify!($try_once), "().await {")]
        ///     Ok(guard) => guard.unlock().await?,
        ///     Err(error) if error.is_not_acquired() => println!("somebody else is at it"),
        ///     Err(error) => return Err(error),
        /// }
        /// # Ok(())
        /// # }
        /// ```
        pub async fn $try_once(&self) -> Result<$guard, crate::Error> {
            self.options.take($mode, WaitMode::None).await
        }

        $(#[$timeout_doc])*
        ///
        /// With a timeout of zero it does not wait. Without an answer from the server this returns
        /// at the latest one [response timeout](crate::ClientBuilder::response_timeout) after
        /// `timeout`.
        ///
        /// # Cancel safety
        ///
        /// Dropping the future leaves neither a hold nor a waiter behind.
        ///
        /// # Errors
        ///
        /// - Not acquired: somebody else still has it;
        ///   [`Error::lease_left`](crate::Error::lease_left) says what is left of the longest
        ///   lease.
        #[doc = concat!("- The others are those of [`Self::", stringify!($wait), "`].")]
        ///
        /// # Examples
        ///
        /// ```no_run
        /// # async fn example(client: rlock_client::Client) -> Result<(), rlock_client::Error> {
        /// use std::time::Duration;
        ///
        /// let timeout = Duration::from_secs(5);
        #[doc = concat!("let guard = ", $example, ".", stringify!($timeout), "(timeout).await?;")]
        /// # Ok(())
        /// # }
        /// ```
        pub async fn $timeout(&self, timeout: std::time::Duration) -> Result<$guard, crate::Error> {
            self.options.take($mode, WaitMode::of(timeout)).await
        }
    };
}

/// Awaiting a lock is calling one of its verbs.
macro_rules! awaited {
    ($(#[$doc:meta])* $lock:ident by $verb:ident: $guard:ident) => {
        $(#[$doc])*
        impl IntoFuture for $lock {
            type Output = Result<$guard, crate::Error>;
            type IntoFuture = std::pin::Pin<Box<dyn Future<Output = Self::Output> + Send>>;

            fn into_future(self) -> Self::IntoFuture {
                Box::pin(async move { self.$verb().await })
            }
        }
    };
}

pub(crate) use {awaited, setters, verbs};
