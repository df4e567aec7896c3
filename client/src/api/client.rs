//! The client: one server, shared by everything that locks there.

use std::collections::HashSet;
use std::fmt;
use std::sync::Arc;

use crate::Owner;
use crate::api::{AcquireOptions, Lock, MultiLock, RwLock, Semaphore};
use crate::error::Error;
use crate::locks::{Handle, guarded};

/// A connection to one server on which locks are taken. Cheap to clone; clones are the same
/// client.
///
/// However many locks it holds and waits for, it has two connections: one for commands, in order,
/// and one on which the server tells of grants and losses and learns that this client lives. A task
/// each owns them and connects again when one breaks; a third, the watchdog, renews the leases.
/// All end when the last clone, the last [`Guard`](crate::Guard) and the last lock named by it have
/// gone. Where [replicas](crate::ClientBuilder::acknowledged_by) have to acknowledge locks, another
/// connection waits for them.
#[derive(Clone)]
pub struct Client {
    pub(crate) context: Arc<Handle>,
}

impl Client {
    /// Names a lock. No I/O, and nothing to give back: the lock is taken by
    /// [`Lock::lock`] and its siblings.
    ///
    /// Each of these calls is a separate owner. A task that takes one lock while it holds another
    /// takes both through a [`scope`](Self::scope): only then does the server see deadlocks.
    ///
    /// The name is the key under which the server keeps the lock: any bytes.
    pub fn lock(&self, name: impl AsRef<[u8]>) -> Lock {
        let options = self.options([name.as_ref().into()]);
        Lock { options }
    }

    /// Names a read-write lock: see [`RwLock`]. No I/O.
    ///
    /// # Examples
    ///
    /// ```no_run
    /// # async fn example(client: rlock_client::Client) -> Result<(), rlock_client::Error> {
    /// let prices = client.rw_lock("prices");
    /// let (one, other) = (prices.read().await?, prices.read().await?); // together
    /// drop((one, other));
    /// let alone = prices.write().await?;
    /// # Ok(())
    /// # }
    /// ```
    pub fn rw_lock(&self, name: impl AsRef<[u8]>) -> RwLock {
        let options = self.options([name.as_ref().into()]);
        RwLock { options }
    }

    /// Names a counting semaphore: see [`Semaphore`]. No I/O. Of its permits no more than `limit`
    /// are out at a time; with `None` as many as [`set_limit`](Self::set_limit) says.
    ///
    /// # Examples
    ///
    /// ```no_run
    /// # async fn example(client: rlock_client::Client) -> Result<(), rlock_client::Error> {
    /// let permit = client.semaphore("exports", 5).acquire().await?;
    /// let as_set = client.semaphore("imports", None).try_acquire().await?;
    /// # Ok(())
    /// # }
    /// ```
    pub fn semaphore(&self, name: impl AsRef<[u8]>, limit: impl Into<Option<u32>>) -> Semaphore {
        let options = self.options([name.as_ref().into()]);
        let limit = limit.into();
        Semaphore { options, limit }
    }

    /// Sets how many permits of a [semaphore](Self::semaphore) may be out, for all who ask for
    /// them, whatever limit they name: the limit before, if one was set. A raised one lets in at
    /// once all waiters that fit; a lowered one takes nothing from anybody. `None` takes it away:
    /// then each caller's own counts, and waiters without one are refused.
    ///
    /// The user needs the right to `RLOCK.LIMIT`, of the ACL category `admin`.
    ///
    /// If the connection breaks before the answer is there, nobody knows whether it was set: it is
    /// not sent again, since the answer would tell this limit as the one before.
    ///
    /// # Cancel safety
    ///
    /// If the future is dropped the limit may or may not have been set.
    ///
    /// # Errors
    ///
    /// - Refused: a limit of zero.
    /// - Refused, module not loaded: the server's answer.
    /// - Unavailable, unknown: no answer came; setting it again does no harm.
    ///
    /// # Examples
    ///
    /// ```no_run
    /// # async fn example(client: rlock_client::Client) -> Result<(), rlock_client::Error> {
    /// let before = client.set_limit("exports", 8).await?;
    /// # Ok(())
    /// # }
    /// ```
    pub async fn set_limit(
        &self,
        name: impl AsRef<[u8]>,
        limit: impl Into<Option<u32>>,
    ) -> Result<Option<u32>, Error> {
        let (name, limit) = (Arc::from(name.as_ref()), limit.into());
        if limit == Some(0) {
            return Err(Error::refused(
                "a limit is at least 1; `None` takes it away",
            ));
        }
        guarded::set_limit(&self.context, &name, limit.unwrap_or(0)).await
    }

    /// Names several locks that are taken at once: see [`MultiLock`]. No I/O. A name that is given
    /// twice counts once.
    ///
    /// # Examples
    ///
    /// ```no_run
    /// # async fn example(client: rlock_client::Client) -> Result<(), rlock_client::Error> {
    /// // From one account to another: all or none, in whatever order they are named.
    /// let both = client.multi(["account:1", "account:2"]).lock().await?;
    /// # Ok(())
    /// # }
    /// ```
    pub fn multi<N: AsRef<[u8]>>(&self, names: impl IntoIterator<Item = N>) -> MultiLock {
        let names = names.into_iter().map(|name| Arc::from(name.as_ref()));
        let mut seen = HashSet::new();
        let options = self.options(names.filter(|name| seen.insert(Arc::clone(name))));
        MultiLock { options }
    }

    fn options(&self, names: impl IntoIterator<Item = Arc<[u8]>>) -> AcquireOptions {
        AcquireOptions {
            context: Arc::clone(&self.context),
            names: names.into_iter().collect(),
            lease: None,
            max_hold: None,
            owner: None,
            kept_for: None,
        }
    }

    /// A new owner, to be passed to single locks: see [`Owner`]. A [`scope`](Self::scope) has one
    /// and passes it to all of its locks.
    pub fn owner(&self) -> Owner {
        self.context.owner()
    }

    /// Ends pending calls and waits until the server knows: all calls for a lock that still wait,
    /// polled or not, end as "unavailable", and the holds of dropped guards are given back.
    ///
    /// Guards that are still alive stay valid and are renewed until they are dropped. Later calls
    /// for a lock fail as "unavailable". This waits for a server that does not answer no longer
    /// than a reply may take. A grant that came to a cancelled wait is released only after the
    /// cancellation, so this may take two response timeouts.
    ///
    /// # Cancel safety
    ///
    /// Dropping the future only gives up the waiting.
    ///
    /// # Examples
    ///
    /// ```no_run
    /// # async fn example(client: rlock_client::Client) -> Result<(), rlock_client::Error> {
    /// let guard = client.lock("orders").lock().await?;
    /// drop(guard); // is given back in the background …
    /// client.shutdown().await; // … and now the server has it
    /// # Ok(())
    /// # }
    /// ```
    pub async fn shutdown(&self) {
        self.context.shut_down().await;
    }
}

impl fmt::Debug for Client {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Client")
            .field("id", &self.context.id)
            .finish_non_exhaustive()
    }
}
