//! A named read-write lock and the ways of taking it.

use crate::api::{AcquireOptions, ReadGuard, WriteGuard, awaited, setters, verbs};
use crate::wire::{Mode, WaitMode};

/// A read-write lock by its name, made by [`Client::rw_lock`](crate::Client::rw_lock): any number
/// of readers at a time, or one writer. Cheap to clone; nothing is taken until one of its verbs is
/// called.
///
/// # Order
///
/// Waiters are in one queue, in the server. Readers that come after a waiting writer wait behind
/// it, and readers at the head of the queue are let in together: neither readers nor writers
/// starve.
///
/// # Which lock should you use?
///
/// Reading must take much longer than a round trip, and be much more frequent than writing, before
/// this does better than a plain [`Lock`](crate::Lock). A name is one or the other: where somebody
/// holds a plain lock of that name, or waits for one, the server refuses this with `WRONGKIND`, and
/// the other way round.
///
/// # Lease
///
/// As with a plain lock: renewed by the watchdog, unless [`lease`](Self::lease) gives it one of its
/// own. Each reader has a lease of its own.
///
/// # Owner
///
/// Without [`owner`](Self::owner) every call is an owner of its own. With it:
///
/// - a reader reads again and a writer writes again, without waiting;
/// - a writer may read, and keeps its place as a reader when it stops writing; for that alone there
///   is [`downgrade`](crate::WriteGuard::downgrade);
/// - a reader cannot become a writer, for it would wait for itself: [`write`](Self::write) is
///   refused as a [deadlock](crate::Error::is_deadlock), [`try_write`](Self::try_write) does not
///   acquire;
/// - an owner is in the queue once, be it to read or to write: a second call waits here until the
///   first has ended;
/// - of several guards as a reader each has the same lease, and giving one back starts it anew for
///   the others.
///
/// Reading and writing are two holds of the owner, each with a lease and a token of its own.
#[derive(Clone, Debug)]
#[must_use = "it takes nothing until read() or write() is called and awaited"]
pub struct RwLock {
    pub(crate) options: AcquireOptions,
}

impl RwLock {
    /// The name: the key under which the server keeps the lock.
    pub fn name(&self) -> &[u8] {
        self.options.name()
    }

    setters! { self, self.options;
        /// Where unmodified Redisson clients read the same lock, give readers none that is longer
        /// than their watchdog timeout, 30 s unless set: their renewals set the lock's expiry to
        /// that.
        lease;
        max_hold;
        /// Its rights are described [above](Self#owner).
        owner;
    }

    verbs! { r#"client.rw_lock("prices")"#: ReadGuard in Mode::Read;
        /// Takes the lock together with other readers, waiting in the queue for as long as a writer
        /// holds it or waits before.
        read;
        /// Takes the lock together with other readers if nobody writes or waits to; does not wait.
        try_read;
        /// Takes the lock together with other readers, waiting in the queue for at most `timeout`.
        read_timeout;
    }

    verbs! { r#"client.rw_lock("prices")"#: WriteGuard in Mode::Write;
        /// Takes the lock alone, waiting in the queue for as long as it takes.
        ///
        /// If its [owner](Self::owner) reads, it would wait for itself, and is refused as a
        /// deadlock. When a call is given up, readers that it kept out are let in at once.
        write;
        /// Takes the lock alone if it is free, or if the same owner writes; does not wait.
        try_write;
        /// Takes the lock alone, waiting in the queue for at most `timeout`.
        write_timeout;
    }
}

awaited! {
    /// Awaiting a read-write lock is calling its [`write()`](RwLock::write): a caller that does not
    /// say how it takes the lock has it alone, which is right for any use.
    ///
    /// # Examples
    ///
    /// ```no_run
    /// # async fn example(client: rlock_client::Client) -> Result<(), rlock_client::Error> {
    /// let alone = client.rw_lock("prices").await?;
    /// # Ok(())
    /// # }
    /// ```
    RwLock by write: WriteGuard
}
