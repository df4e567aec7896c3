//! Several locks that are taken at once.

use crate::api::{AcquireOptions, MultiGuard, awaited, setters, verbs};
use crate::wire::{Mode, WaitMode};

/// Several locks by their names, made by [`Client::multi`](crate::Client::multi), which are taken
/// at once: all or none. Cheap to clone; nothing is taken until one of its verbs is called.
///
/// The locks are plain ones; a [`Lock`](crate::Lock) of one of the names excludes this and the
/// other way round. While a call waits it holds none of them, so it blocks no other caller, and
/// callers that name the same locks in different orders do not get in each other's way. It waits in
/// the queue of each, and is granted when it is the first in all.
///
/// # In a cluster
///
/// Names of one slot (`{order:7}:items` and `{order:7}:bill`) are taken as above. Names of several
/// slots may lie at several nodes, and no command reaches more than one slot: they are taken slot
/// by slot, in an order that is the same for all callers. The differences:
///
/// - While it waits for one part it holds those before. Callers that only take several locks in
///   this way never wait for each other in a circle. A caller that holds a lock and then asks for
///   others can, and no node sees a circle that leads through another node. Prefer names of one
///   slot, or a timeout.
/// - If a part cannot be had, those before are given back before the call returns, and others can
///   get them at once. `timeout` is for all parts together.
/// - Each part has a token of its own: see [`MultiGuard::token_of`](crate::MultiGuard::token_of).
/// - The guard is lost with any part.
///
/// # Lease
///
/// One for all: renewed by the watchdog in one command, unless [`lease`](Self::lease) gives them
/// one of their own.
///
/// # Owner
///
/// Without [`owner`](Self::owner) every call is an owner of its own. With it the locks that the
/// owner holds already are entered again, and the others taken. Each lock is a hold of its own,
/// which this guard shares with the owner's other guards of it: the last of them gives it back. An
/// owner is in a lock's queue once: a second call waits here until the first has ended.
#[derive(Clone, Debug)]
#[must_use = "it takes nothing until lock() is called and awaited"]
pub struct MultiLock {
    pub(crate) options: AcquireOptions,
}

impl MultiLock {
    /// The names: the keys under which the server keeps the locks, as they were given, each once.
    pub fn names(&self) -> impl ExactSizeIterator<Item = &[u8]> {
        self.options.names.iter().map(|name| &**name)
    }

    setters! { self, self.options; lease; max_hold; owner; }

    verbs! { r#"client.multi(["account:1", "account:2"])"#: MultiGuard in Mode::Plain;
        /// Takes all the locks, waiting in their queues for as long as it takes.
        lock;
        /// Takes all the locks if each is free, or held by the same owner; does not wait.
        try_lock;
        /// Takes all the locks, waiting in their queues for at most `timeout`.
        lock_timeout;
        /// - Refused also: no name, more than 1,024 of them, or one that is no plain lock.
        /// - Lost also: in a cluster, a part was lost while the others were waited for.
    }
}

awaited! {
    /// Awaiting several locks is calling their [`lock()`](MultiLock::lock).
    ///
    /// # Examples
    ///
    /// ```no_run
    /// # async fn example(client: rlock_client::Client) -> Result<(), rlock_client::Error> {
    /// let guard = client.multi(["account:1", "account:2"]).await?;
    /// # Ok(())
    /// # }
    /// ```
    MultiLock by lock: MultiGuard
}
