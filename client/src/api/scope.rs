//! Locks that are taken for one owner.

use crate::Owner;
use crate::api::{Client, Lock, MultiLock, RwLock};

/// One unit of work that takes several locks, made by [`Client::scope`](crate::Client::scope). It
/// names locks as a [`Client`] does, and all that is taken through it is taken for
/// one [`Owner`]. Cheap to clone; clones are the same scope. It takes nothing itself, and dropping
/// it gives nothing back: guards do that.
///
/// # Deadlocks
///
/// A call of `client.lock("q").lock()` is an owner of its own. The server cannot know that its
/// caller already holds `p`, so a task that holds `p` and waits for `q`, and another that holds `q`
/// and waits for `p`, wait for each other until a timeout ends one of the waits. If each of them
/// takes its locks through a scope of its own, the server sees the circle when the second wait
/// begins, and refuses that wait at once: [`Error::is_deadlock`](crate::Error::is_deadlock). The
/// caller then drops the guards that it has and begins again; the other gets its lock.
///
/// Give one scope to each task, request or job. Where all locks are known from the start,
/// [`multi`](Self::multi) takes them at once, and no circle can arise.
///
/// The server does not see circles that lead through several nodes of a cluster, nor tasks that
/// wait for each other by other means than its locks.
///
/// # Re-entrance
///
/// One owner enters a lock again that it already holds. So a scope never waits for itself: a second
/// `lock()` of the same name gives a second guard at once, and the lock is free when both are gone.
/// Only a reader that would write cannot, and is refused as a deadlock.
///
/// **Locks do not exclude two tasks that use the same scope.** Both would hold the lock. Share a
/// scope, or a clone of it, only among tasks that mean to share the locks.
///
/// # Examples
///
/// ```no_run
/// # async fn example(client: rlock_client::Client) -> Result<(), rlock_client::Error> {
/// loop {
///     let scope = client.scope();
///     let _order = scope.lock("order:7").lock().await?;
///     // … it tells which customer …
///     let _customer = match scope.lock("customer:3").lock().await {
///         Ok(guard) => guard,
///         // Somebody holds the customer and waits for our order: let go of it, and begin again.
///         Err(error) if error.is_deadlock() => continue,
///         Err(error) => return Err(error),
///     };
///     // … both are ours …
///     break Ok(());
/// }
/// # }
/// ```
#[derive(Clone, Debug)]
pub struct Scope {
    pub(crate) client: Client,
    pub(crate) owner: Owner,
}

impl Client {
    /// One unit of work that takes several locks, for one owner: the server then refuses waits that
    /// would end in a deadlock, and a lock can be entered again. See [`Scope`]. No I/O; each call
    /// gives a new scope.
    ///
    /// # Examples
    ///
    /// ```no_run
    /// # async fn example(client: rlock_client::Client) -> Result<(), rlock_client::Error> {
    /// let scope = client.scope();
    /// let order = scope.lock("order:7").lock().await?;
    /// let customer = scope.lock("customer:3").lock().await?; // or `is_deadlock`
    /// # Ok(())
    /// # }
    /// ```
    pub fn scope(&self) -> Scope {
        let (client, owner) = (self.clone(), self.owner());
        Scope { client, owner }
    }
}

impl Scope {
    /// Names a lock that is taken for this scope: see [`Client::lock`](crate::Client::lock). No
    /// I/O.
    pub fn lock(&self, name: impl AsRef<[u8]>) -> Lock {
        self.client.lock(name).owner(&self.owner)
    }

    /// Names a read-write lock that is taken for this scope: see
    /// [`Client::rw_lock`](crate::Client::rw_lock). No I/O.
    pub fn rw_lock(&self, name: impl AsRef<[u8]>) -> RwLock {
        self.client.rw_lock(name).owner(&self.owner)
    }

    /// Names several locks that are taken at once, for this scope: see
    /// [`Client::multi`](crate::Client::multi). No I/O.
    ///
    /// Those that the scope holds already are entered again, and it waits for the others only.
    pub fn multi<N: AsRef<[u8]>>(&self, names: impl IntoIterator<Item = N>) -> MultiLock {
        self.client.multi(names).owner(&self.owner)
    }

    /// The owner of every lock and guard of this scope, as the server shows it.
    pub fn owner(&self) -> &Owner {
        &self.owner
    }
}
