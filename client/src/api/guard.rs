//! A lock that is held.

use std::fmt;
use std::marker::PhantomData;
use std::sync::Arc;
use std::sync::atomic::AtomicU64;
use std::time::Duration;

use futures_util::future::try_join_all;
use redis::{Cmd, FromRedisValue, from_redis_value};
use smallvec::{SmallVec, smallvec};
use tokio::time::Instant;

use crate::Owner;
use crate::api::mode::{Multi, Permits, Plain, Read, Single, Write};
use crate::error::{Error, LostReason};
use crate::locks::Helds;
use crate::locks::acquire::acquire;
use crate::locks::{self, Aim, Context, Held, Hold, Request, guarded, renew};
use crate::topology::slot_of;
use crate::wire::{Mode, WaitMode};

/// A lock that is held; made by [`Lock::lock`](crate::Lock::lock) and its siblings.
///
/// Dropping it gives the lock back in the background. [`unlock`](Self::unlock) does the same and
/// tells how it went.
///
/// A guard is the same thing with the same promise whatever it holds: a plain lock, a [read-write
/// lock](crate::RwLock) as a [reader](ReadGuard) or as a [writer](WriteGuard), [permits of a
/// semaphore](PermitsGuard), or [several locks](MultiGuard) at once. Its [mode](crate::mode) is
/// there for the compiler only.
///
/// # What a guard promises
///
/// It says that the lock is held only while the server cannot have given it away: while the lease
/// runs, and while the server cannot have taken this client for dead. Both are counted on this
/// machine's monotonic clock from the moment in which the last successful command was *sent*, less
/// a drift of a hundredth and 2 ms for clocks that run at different speeds: the lease from the last
/// renewal, the [grace](crate::ClientBuilder::grace) from the last confirmation of the session.
/// When neither comes through, [`is_lost`](Self::is_lost) and [`lost`](Self::lost) say so before
/// anybody else can get the lock. Of a lock that an operator broke or deleted, or whose lease ran
/// out, the server tells them at once.
///
/// With a grace of zero only the lease counts: a guard then hears that the connection broke, and
/// with it the hold, when the client has connected again.
///
/// A guard cannot stop a write that is under way: a process may be paused between a look at the
/// guard and the write that follows, and on most systems the monotonic clock stands still while the
/// machine is suspended. Where that matters, let the resource refuse [tokens](Self::token) smaller
/// than the largest it has seen.
#[must_use = "dropped, as by `let _ =`, it gives the lock back at once: give it a name"]
pub struct Guard<M = Plain> {
    /// One for each name, as they were given.
    helds: Helds,
    /// How often it was wanted, as far as this guard has told.
    heard: AtomicU64,
    mode: PhantomData<fn() -> M>,
}

/// A read-write lock that is held together with other readers; made by
/// [`RwLock::read`](crate::RwLock::read) and its siblings.
pub type ReadGuard = Guard<Read>;

/// A read-write lock that is held alone; made by [`RwLock::write`](crate::RwLock::write) and its
/// siblings.
pub type WriteGuard = Guard<Write>;

/// Several locks that are held at once; made by [`MultiLock::lock`](crate::MultiLock::lock) and its
/// siblings. It is lost as soon as one of them is.
pub type MultiGuard = Guard<Multi>;

/// Permits of a semaphore that are held; made by [`Semaphore::acquire`](crate::Semaphore::acquire)
/// and its siblings. All that it says of a lock it says of them.
pub type PermitsGuard = Guard<Permits>;

impl Guard<Permits> {
    /// How many permits these are.
    pub fn permits(&self) -> u32 {
        match self.hold().target.mode {
            Mode::Permits { permits, .. } => permits,
            Mode::Plain | Mode::Read | Mode::Write => 0,
        }
    }
}

// The bound is each method's own, so that the compiler says what to use for several locks.
impl<M> Guard<M> {
    /// The lock's name: bytes, as in Redis. `String::from_utf8_lossy(guard.name())` can be printed.
    pub fn name(&self) -> &[u8]
    where
        M: Single,
    {
        &self.hold().target.name
    }

    /// Has the server run a Redis command, if this hold is still held there, and gives the reply.
    /// One round trip: the look at the lock and the command are one step, and nothing comes in
    /// between. So whatever is kept in the server of the lock, or in a cluster in its slot, is safe
    /// even from a process that was stopped for longer than its lease.
    ///
    /// Commands that read or write keys can be guarded, and a few more, but neither scripts nor
    /// commands of other modules: `docs/commands.md` says which, and why. It is carried out in the
    /// order of this client's other commands, on their connection.
    ///
    /// # Cancel safety
    ///
    /// If the future is dropped the command may or may not be carried out.
    ///
    /// # Errors
    ///
    /// - Lost: the lock is not held any more, the command was not run, and the guard is lost from
    ///   now on. Without asking the server, if the guard is lost already.
    /// - Refused: the command's own error, in the server's words; or it cannot be guarded.
    /// - Unavailable: it was not run.
    /// - Unknown: it may or may not have been run, and is not sent again.
    /// - Unexpected reply: it was run, and its reply is not of type `T`. A key that may be missing
    ///   needs an `Option`.
    ///
    /// # Examples
    ///
    /// ```no_run
    /// # async fn example(client: rlock_client::Client) -> Result<(), rlock_client::Error> {
    /// use rlock_client::redis::cmd;
    ///
    /// let guard = client.lock("stock:lock").lock().await?;
    /// let left: i64 = guard.call(cmd("GET").arg("stock")).await?;
    /// // … however long this takes: if the lock was lost meanwhile, nothing is written …
    /// guard.call::<()>(cmd("SET").arg("stock").arg(left - 1)).await?;
    /// guard.unlock().await?;
    /// # Ok(())
    /// # }
    /// ```
    pub async fn call<T: FromRedisValue>(&self, command: &Cmd) -> Result<T, Error>
    where
        M: Single,
    {
        self.still_held()?;
        if command.in_scan_mode() {
            return Err(Error::refused(
                "a cursor is to be an argument like others, since nothing goes on with it here",
            ));
        }
        let reply = guarded::call(self.context(), self.hold(), command).await?;
        from_redis_value(reply).map_err(Error::unexpected_reply)
    }
}

impl Guard<Multi> {
    /// The names of the locks, as they were given, each once.
    pub fn names(&self) -> impl ExactSizeIterator<Item = &[u8]> {
        self.helds.iter().map(|held| &*held.hold.target.name)
    }

    /// The fencing token to show where this lock protects something; `None` if it is none of them.
    ///
    /// All locks that were taken in one command have one token, so with one server, or with names
    /// of one slot, it is [`token`](Self::token) for each. In a cluster those of each slot have
    /// their own, and only tokens of the same name can be compared: the largest of the guard's
    /// tokens would say nothing, for another node may have minted it.
    ///
    /// # Examples
    ///
    /// ```no_run
    /// # async fn example(client: rlock_client::Client) -> Result<(), rlock_client::Error> {
    /// let guard = client.multi(["account:1", "account:2"]).lock().await?;
    /// for name in guard.names() {
    ///     println!("{} {:?}", name.escape_ascii(), guard.token_of(name));
    /// }
    /// # Ok(())
    /// # }
    /// ```
    pub fn token_of(&self, name: impl AsRef<[u8]>) -> Option<u64> {
        let name = name.as_ref();
        let of = |hold: &&Arc<Hold>| *hold.target.name == *name;
        self.holds().find(of).map(|hold| hold.token)
    }
}

impl Guard<Write> {
    /// Reads on instead of writing: takes the lock as a reader, and then gives it back as the
    /// writer. There is no moment in which another writer could get in, and readers that wait are
    /// let in at once. Two round trips.
    ///
    /// The reader has the same owner, lease and longest hold, and a token of its own. If the owner
    /// has other guards as a writer, readers stay out until they have gone.
    ///
    /// There is no way back: a reader that would [`write`](crate::RwLock::write) waits for itself,
    /// which the server refuses as a deadlock.
    ///
    /// # Cancel safety
    ///
    /// If the future is dropped, the lock is given back in the background, as the writer and as the
    /// reader.
    ///
    /// # Errors
    ///
    /// With each of them the lock is given back altogether:
    ///
    /// - Lost: it was not held any more as the writer, or may not have been throughout.
    /// - Refused: the server's answer, such as that it is out of memory.
    /// - Unavailable, unknown: no word came on the reading.
    /// - Not acknowledged: [replicas](crate::ClientBuilder::acknowledged_by) were to know of the
    ///   reading, and did not say so in time.
    ///
    /// If only the word on the end of the writing does not come, there is no error: the reader's
    /// guard holds, and the background goes on trying to let the others in, as for
    /// [`unlock`](Self::unlock).
    ///
    /// # Examples
    ///
    /// ```no_run
    /// # async fn example(client: rlock_client::Client) -> Result<(), rlock_client::Error> {
    /// let guard = client.rw_lock("prices").write().await?;
    /// // … change them …
    /// let guard = guard.downgrade().await?;
    /// // … read them as they were left, together with others …
    /// guard.unlock().await?;
    /// # Ok(())
    /// # }
    /// ```
    pub async fn downgrade(self) -> Result<Guard<Read>, Error> {
        let hold = self.hold();
        let request = Request {
            owner: hold.target.owner.clone(),
            names: smallvec![Arc::clone(&hold.target.name)],
            mode: Mode::Read,
            options: hold.options_left(Instant::now()),
            wait_mode: WaitMode::None,
            kept: None,
        };
        let reader = acquire(self.context(), request).await.map(Guard::of);
        // Held until now, and so when the reading began.
        self.still_held()?;
        if reader.as_ref().is_err_and(Error::is_not_acquired) {
            // A writer may always read, so after this refusal another owner is the writer.
            return Err(Error::lost(LostReason::NotHeld));
        }
        let reader = reader?;
        match self.unlock().await {
            Err(error) if !error.is_unanswered() => Err(error),
            _ => Ok(reader),
        }
    }
}

impl<M> Guard<M> {
    pub(crate) fn of(helds: Helds) -> Self {
        Self {
            helds,
            heard: AtomicU64::new(0),
            mode: PhantomData,
        }
    }

    /// Adds a part that was taken in a command of its own; these are all names, in their order.
    pub(crate) fn add(&mut self, part: Helds, names: &[Arc<[u8]>]) {
        self.helds.extend(part);
        let place = |held: &Held| names.iter().position(|name| *name == held.hold.target.name);
        self.helds.sort_by_key(place);
    }

    #[expect(clippy::indexing_slicing, reason = "a guard has something")]
    fn held(&self) -> &Held {
        &self.helds[0]
    }

    pub(crate) fn context(&self) -> &Arc<Context> {
        &self.held().context
    }

    /// The hold, which all of its guards share.
    pub(crate) fn hold(&self) -> &Arc<Hold> {
        &self.held().hold
    }

    /// All holds, also of the parts that were taken in other commands.
    fn holds(&self) -> impl Iterator<Item = &Arc<Hold>> + Clone {
        self.helds.iter().map(|held| &held.hold)
    }

    /// Why it is lost, if it is.
    pub(crate) fn lost_already(&self) -> Option<LostReason> {
        self.holds().find_map(|hold| hold.lost(Instant::now()))
    }

    pub(crate) fn still_held(&self) -> Result<(), Error> {
        let lost = self.lost_already();
        lost.map_or(Ok(()), |reason| Err(Error::lost(reason)))
    }

    /// The owner that holds the lock. To enter the lock again, pass this to
    /// [`Lock::owner`](crate::Lock::owner).
    pub fn owner(&self) -> &Owner {
        &self.hold().target.owner
    }

    /// The fencing token: a later grant of the same lock has a larger one. A lock entered again
    /// keeps its token.
    ///
    /// Locks that are taken at once share a token, except those that their owner held before. This
    /// is the shared one, which is larger than the others; in a cluster it counts only for the slot
    /// of the first name: see [`token_of`](MultiGuard::token_of).
    pub fn token(&self) -> u64 {
        let (first, are_several) = (self.hold(), self.context().router.are_several());
        // In a cluster only those of one slot can be compared.
        let slot = |hold: &Hold| are_several.then(|| slot_of(&hold.target.name));
        let of_first = self.holds().filter(|hold| slot(hold) == slot(first));
        of_first.map(|hold| hold.token).max().unwrap_or_default()
    }

    /// How long the lock may still be called held if nothing more is heard from the server; zero
    /// once lost. With a grace this is never much more than the grace.
    pub fn valid_for(&self) -> Duration {
        let left = self.holds().map(|hold| hold.valid_for(Instant::now()));
        left.min().unwrap_or_default()
    }

    /// Whether the lock is lost, or may be: see [above](Self#what-a-guard-promises). Once true it
    /// stays true.
    pub fn is_lost(&self) -> bool {
        self.lost_already().is_some()
    }

    /// Ends when the lock is lost, and says why. Never ends while it is held.
    ///
    /// # Cancel safety
    ///
    /// Dropping the future changes nothing; it may be awaited again.
    ///
    /// # Examples
    ///
    /// ```no_run
    /// # async fn work() {}
    /// # async fn example(client: rlock_client::Client) -> Result<(), rlock_client::Error> {
    /// let guard = client.lock("orders").lock().await?;
    /// tokio::select! {
    ///     () = work() => guard.unlock().await?,
    ///     reason = guard.lost() => println!("stopped half-way: {reason}"),
    /// }
    /// # Ok(())
    /// # }
    /// ```
    pub async fn lost(&self) -> LostReason {
        locks::lost(self.holds()).await
    }

    /// Ends when a caller waits for the lock because of this hold, so that a long task can give it
    /// back at a good moment. A holder that ignores this keeps the lock.
    ///
    /// A plain lock and a writer block all other callers, a reader blocks writers, and permits
    /// block callers for which too few are left. A caller that was refused because of this hold and
    /// did not wait, by `try_lock()`, counts as well. Of several locks it ends with the first that
    /// somebody wants.
    ///
    /// The first call asks the server for a report, by a renewal: one round trip in the background.
    /// The watchdog's renewals repeat the question until the report comes; with several locks they
    /// cannot, so an extra renewal of each lock does. Called again after a report it asks again,
    /// and ends at once if a caller still waits. All guards of one owner get the report, each once,
    /// also if it came before the call. After a reconnect or a failover the server is asked anew.
    ///
    /// # Cancel safety
    ///
    /// If the future is dropped nothing is forgotten: a report that arrives meanwhile ends the next
    /// call at once. So it can be one arm of a `select!` in a loop, or be looked at between two
    /// steps with a timeout of zero.
    ///
    /// # Errors
    ///
    /// - Lost: the lock is not held any more, and nobody needs to give it back.
    /// - Refused: the server's answer, such as that its module is older than this and knows no
    ///   `WANTED`.
    ///
    /// While the server cannot be asked it goes on trying, as long as the lock may be held.
    ///
    /// # Examples
    ///
    /// ```no_run
    /// # async fn index(_chapter: u32) {}
    /// # async fn example(client: rlock_client::Client) -> Result<(), rlock_client::Error> {
    /// use std::time::Duration;
    /// use tokio::time::timeout;
    ///
    /// let lock = client.lock("reindex");
    /// let mut guard = lock.lock().await?;
    /// for chapter in 0..1000 {
    ///     index(chapter).await;
    ///     // A good moment. Is anybody waiting?
    ///     if let Ok(wanted) = timeout(Duration::ZERO, guard.wanted()).await {
    ///         wanted?; // lost, if that is an error
    ///         guard.unlock().await?;
    ///         guard = lock.lock().await?; // behind those who wait
    ///     }
    /// }
    /// # Ok(())
    /// # }
    /// ```
    pub async fn wanted(&self) -> Result<(), Error> {
        if self.held().is_waited_for_here() {
            return self.still_held();
        }
        locks::wanted(self.context(), self.holds(), &self.heard).await
    }

    /// Starts the lease anew, for all guards of this hold. One round trip. The watchdog does this
    /// by itself for locks that were given no lease. Not past
    /// [`max_hold`](crate::ClientBuilder::max_hold).
    ///
    /// # Cancel safety
    ///
    /// If the future is dropped the lease may or may not have been renewed; the guard then counts
    /// on the old one.
    ///
    /// # Errors
    ///
    /// - Lost: the server says that it is no longer held so, or the confirmation came too late.
    /// - Unavailable, unknown: the guard stays valid for as long as it was.
    /// - Not acknowledged: the same. [Replicas](crate::ClientBuilder::acknowledged_by) were to know
    ///   of the new lease, and did not say so in time. Or no lease may begin any more,
    ///   for the reason that is given there.
    ///
    /// # Examples
    ///
    /// ```no_run
    /// # async fn example(client: rlock_client::Client) -> Result<(), rlock_client::Error> {
    /// use std::time::Duration;
    ///
    /// let lock = client.lock("import").lease(Duration::from_secs(60));
    /// let guard = lock.lock().await?;
    /// for _batch in 0..100 {
    ///     guard.renew().await?;
    ///     // … not longer than a minute …
    /// }
    /// # Ok(())
    /// # }
    /// ```
    pub async fn renew(&self) -> Result<(), Error> {
        self.still_held()?;
        let renewals = self
            .holds()
            .map(|hold| renew::ask(self.context(), hold, Aim::Anew));
        try_join_all(renewals).await?;
        Ok(())
    }

    /// Gives the lock back and waits for the server's word. One round trip. Of several guards of
    /// one hold the last frees the lock.
    ///
    /// # Cancel safety
    ///
    /// The lock is given back in any case, in the background if the future is dropped.
    ///
    /// # Errors
    ///
    /// - Lost: it was not held any more. Somebody else may have had the lock in the meantime; their
    ///   hold is untouched. It is no error if the connection broke, and the server finds nothing
    ///   when it is told again: it may have given the lock back the first time.
    /// - Unavailable, unknown: no answer came within the response timeout. The client goes on in
    ///   the background; it names the grant's token, so no later hold can be released by it.
    ///
    /// # Examples
    ///
    /// ```no_run
    /// # async fn example(client: rlock_client::Client) -> Result<(), rlock_client::Error> {
    /// let guard = client.lock("orders").lock().await?;
    /// if let Err(error) = guard.unlock().await {
    ///     assert!(!error.is_lost(), "what was done under the lock is in doubt");
    /// }
    /// # Ok(())
    /// # }
    /// ```
    pub async fn unlock(self) -> Result<(), Error> {
        let released: SmallVec<[_; 1]> = self.helds.into_iter().map(Held::release).collect();
        let mut outcome = Ok(());
        for one in released {
            outcome = outcome.and(one.await);
        }
        outcome
    }
}

impl<M> fmt::Debug for Guard<M> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let target = &self.hold().target;
        let names = self
            .holds()
            .map(|hold| String::from_utf8_lossy(&hold.target.name));
        let names: Vec<_> = names.collect();
        f.debug_struct("Guard")
            .field("name", &format_args!("{}", names.join(", ")))
            .field("mode", &target.mode)
            .field("owner", &target.owner)
            .field("token", &self.token())
            .field("valid_for", &self.valid_for())
            .finish_non_exhaustive()
    }
}
