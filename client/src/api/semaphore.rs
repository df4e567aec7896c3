//! A named semaphore and the ways of taking its permits.

use std::time::Duration;

use crate::api::{AcquireOptions, PermitsGuard, awaited, setters};
use crate::error::Error;
use crate::wire::{Mode, WaitMode};

/// A counting semaphore by its name, made by [`Client::semaphore`](crate::Client::semaphore): it
/// lets owners in as long as no more permits are out than its limit. Cheap to clone; nothing is
/// taken until one of its verbs is called.
///
/// Permits have owners, as locks have: each call is a separate owner. Its permits are given back
/// when its guard is dropped, and by the server when this process dies.
///
/// # Order
///
/// Strictly first come, first served, in the server: a caller that asks for many permits waits
/// until they are free, and no later caller passes it.
///
/// # Limit
///
/// Each caller is measured by the limit that it names itself, and by the one that
/// [`set_limit`](crate::Client::set_limit) has set instead, if one is: that one counts for all.
///
/// # Lease
///
/// As with a plain lock: renewed by the watchdog, unless [`lease`](Self::lease) gives it one of its
/// own. Each owner has a lease of its own.
///
/// # Examples
///
/// ```no_run
/// # async fn example(client: rlock_client::Client) -> Result<(), rlock_client::Error> {
/// let exports = client.semaphore("exports", 5); // five at a time, in all processes together
/// let permit = exports.acquire().await?;
/// // … export …
/// permit.unlock().await?;
/// # Ok(())
/// # }
/// ```
#[derive(Clone, Debug)]
#[must_use = "it takes nothing until acquire() is called and awaited"]
pub struct Semaphore {
    pub(crate) options: AcquireOptions,
    pub(crate) limit: Option<u32>,
}

impl Semaphore {
    /// The name: the key under which the server keeps the permits.
    pub fn name(&self) -> &[u8] {
        self.options.name()
    }

    setters! { self, self.options; lease; max_hold; }

    /// Takes a permit, waiting in the queue for as long as it takes.
    ///
    /// # Cancel safety
    ///
    /// As for [`Lock::lock`](crate::Lock::lock): dropping the future leaves neither a permit nor a
    /// place in the queue behind.
    ///
    /// # Errors
    ///
    /// As for [`Lock::lock`](crate::Lock::lock), without deadlocks; and refused if no limit counts
    /// (`NOLIMIT`): this names none, and none is set, or the one that was set has been deleted.
    ///
    /// # Examples
    ///
    /// ```no_run
    /// # async fn example(client: rlock_client::Client) -> Result<(), rlock_client::Error> {
    /// let permit = client.semaphore("exports", 5).acquire().await?;
    /// permit.unlock().await?;
    /// # Ok(())
    /// # }
    /// ```
    pub async fn acquire(&self) -> Result<PermitsGuard, Error> {
        self.acquire_many(1).await
    }

    /// Takes this many permits at once, waiting in the queue for as long as it takes. They are
    /// held, renewed and given back together.
    ///
    /// # Cancel safety
    ///
    /// As for [`acquire`](Self::acquire).
    ///
    /// # Errors
    ///
    /// As for [`acquire`](Self::acquire); and refused for more than the limit that counts, and for
    /// none.
    ///
    /// # Examples
    ///
    /// ```no_run
    /// # async fn example(client: rlock_client::Client) -> Result<(), rlock_client::Error> {
    /// let gigabytes = client.semaphore("memory", 64).acquire_many(16).await?;
    /// assert_eq!(gigabytes.permits(), 16);
    /// # Ok(())
    /// # }
    /// ```
    pub async fn acquire_many(&self, permits: u32) -> Result<PermitsGuard, Error> {
        self.take(permits, WaitMode::Forever).await
    }

    /// Takes a permit if one is free and nobody waits before; does not wait.
    ///
    /// # Cancel safety
    ///
    /// If the future is dropped, a grant that came meanwhile is released in the background.
    ///
    /// # Errors
    ///
    /// - Not acquired: none is free, or others wait before;
    ///   [`Error::lease_left`](crate::Error::lease_left) says after which time it would be, if
    ///   nobody renewed.
    /// - The others are those of [`acquire`](Self::acquire).
    ///
    /// # Examples
    ///
    /// ```no_run
    /// # async fn example(client: rlock_client::Client) -> Result<(), rlock_client::Error> {
    /// match client.semaphore("exports", 5).try_acquire().await {
    ///     Ok(permit) => permit.unlock().await?,
    ///     Err(error) if error.is_not_acquired() => println!("five are at it"),
    ///     Err(error) => return Err(error),
    /// }
    /// # Ok(())
    /// # }
    /// ```
    pub async fn try_acquire(&self) -> Result<PermitsGuard, Error> {
        self.try_acquire_many(1).await
    }

    /// Takes this many permits if they are free and nobody waits before; does not wait.
    ///
    /// # Cancel safety
    ///
    /// As for [`try_acquire`](Self::try_acquire).
    ///
    /// # Errors
    ///
    /// As for [`try_acquire`](Self::try_acquire) and [`acquire_many`](Self::acquire_many).
    pub async fn try_acquire_many(&self, permits: u32) -> Result<PermitsGuard, Error> {
        self.take(permits, WaitMode::None).await
    }

    /// Takes a permit, waiting in the queue for at most `timeout`. With a timeout of zero it does
    /// not wait.
    ///
    /// # Cancel safety
    ///
    /// As for [`acquire`](Self::acquire).
    ///
    /// # Errors
    ///
    /// - Not acquired: none has become free; see [`try_acquire`](Self::try_acquire).
    /// - The others are those of [`acquire`](Self::acquire).
    ///
    /// # Examples
    ///
    /// ```no_run
    /// # async fn example(client: rlock_client::Client) -> Result<(), rlock_client::Error> {
    /// use std::time::Duration;
    ///
    /// let timeout = Duration::from_secs(5);
    /// let permit = client.semaphore("exports", 5).acquire_timeout(timeout).await?;
    /// # Ok(())
    /// # }
    /// ```
    pub async fn acquire_timeout(&self, timeout: Duration) -> Result<PermitsGuard, Error> {
        self.acquire_many_timeout(1, timeout).await
    }

    /// Takes this many permits at once, waiting in the queue for at most `timeout`.
    ///
    /// # Cancel safety
    ///
    /// As for [`acquire`](Self::acquire).
    ///
    /// # Errors
    ///
    /// As for [`acquire_timeout`](Self::acquire_timeout) and [`acquire_many`](Self::acquire_many).
    pub async fn acquire_many_timeout(
        &self,
        permits: u32,
        timeout: Duration,
    ) -> Result<PermitsGuard, Error> {
        self.take(permits, WaitMode::of(timeout)).await
    }

    async fn take(&self, permits: u32, wait_mode: WaitMode) -> Result<PermitsGuard, Error> {
        let limit = self.limit;
        let mode = Mode::Permits { permits, limit };
        self.options.take(mode, wait_mode).await
    }
}

awaited! {
    /// Awaiting a semaphore is calling its [`acquire()`](Semaphore::acquire).
    ///
    /// # Examples
    ///
    /// ```no_run
    /// # async fn example(client: rlock_client::Client) -> Result<(), rlock_client::Error> {
    /// let permit = client.semaphore("exports", 5).await?;
    /// # Ok(())
    /// # }
    /// ```
    Semaphore by acquire: PermitsGuard
}
