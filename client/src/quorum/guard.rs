//! A lock that is held on a majority, and its keeper task. The task adds grants that arrive late,
//! takes the lock again on servers that lost it, and releases the rest when the majority is lost.
//!
//! It does not renew: each server's hold is renewed by the watchdog of that server's client.

use std::fmt;
use std::sync::{Arc, Mutex};
use std::time::Duration;

use futures_util::future::join_all;
use futures_util::stream::{FuturesUnordered, StreamExt};
use tokio::task::JoinSet;
use tokio::time::sleep;

use crate::api::Guard;
use crate::locks::{Aim, Context, Hold, lost, renew};
use crate::quorum::{Parts, QuorumError, QuorumLock, Round};
use crate::{ErrorKind, locked, task};

/// A lock that is held on a majority of servers; made by
/// [`QuorumLock::lock`](crate::QuorumLock::lock) and its siblings.
///
/// Dropping it gives the lock back on all servers, in the background. [`unlock`](Self::unlock) does
/// the same and tells how it went.
///
/// # What it promises
///
/// It says that the lock is held only while a majority of the servers cannot have given it away,
/// each counted as a [`Guard`](crate::Guard#what-a-guard-promises) counts: on the monotonic clock,
/// from the moment in which the last successful command to that server was sent, less the drift.
/// When fewer than a majority are left, the lock is lost: [`lost`](Self::lost) ends with every
/// server's reason, the remaining holds are released at once, and the guard stays lost.
///
/// A lock that was given no lease is renewed on each server by itself. Where it is not held (the
/// server was down or slow, has restarted, was out of touch) it is taken again within a second or
/// so, as long as a majority is held all the while; but not where an operator broke or deleted it,
/// unless word of that came late or was lost.
///
/// Like any guard it cannot stop a write that is under way: see [`tokens`](Self::tokens).
#[must_use = "dropped, as by `let _ =`, it gives the lock back at once: give it a name"]
pub struct QuorumGuard {
    lock: QuorumLock,
    parts: Arc<Mutex<Parts>>,
    /// The keeper task.
    tasks: JoinSet<()>,
}

impl QuorumGuard {
    /// `round` has the servers that have not answered yet.
    pub(crate) fn new(parts: Parts, round: Round) -> Self {
        let lock = parts.lock.clone();
        let parts = Arc::new(Mutex::new(parts));
        let keeping = keep(Arc::clone(&parts), lock.lease.is_none(), round);
        let mut tasks = JoinSet::new();
        tasks.spawn_on(task(keeping), &lock.core.background.runtime);
        Self { lock, parts, tasks }
    }

    /// The lock's name.
    pub fn name(&self) -> &[u8] {
        &self.lock.name
    }

    /// The fencing tokens: each server that granted the lock, by its address, with the token of its
    /// first grant to this guard. At least a majority of the servers, also when the lock is lost.
    ///
    /// There is no single token: each server counts for itself, and the numbers of two servers
    /// cannot be compared. But of any two successive holders, at least one server has granted the
    /// lock to both, and the later holder has the larger token there. So a resource that remembers
    /// the largest token *of each server*, and refuses a write in which any token is smaller than
    /// the one it remembers for that server, refuses the late write of a former holder once the
    /// later one has written. It must refuse a list that is shorter than a majority.
    ///
    /// # Examples
    ///
    /// ```no_run
    /// # async fn example(
    /// #     client: rlock_client::QuorumClient,
    /// # ) -> Result<(), rlock_client::QuorumError> {
    /// let guard = client.lock("orders").lock().await?;
    /// for (server, token) in guard.tokens() {
    ///     println!("{server}: {token}");
    /// }
    /// # Ok(())
    /// # }
    /// ```
    pub fn tokens(&self) -> Vec<(String, u64)> {
        locked(&self.parts).tokens()
    }

    /// How long the lock may still be called held if nothing more is heard from any server; zero
    /// once lost. With a [grace](crate::ClientBuilder::grace) this is never much more than that.
    pub fn valid_for(&self) -> Duration {
        locked(&self.parts).valid_for()
    }

    /// Whether the lock is lost, or may be: see [above](Self#what-it-promises). Once true it stays
    /// true.
    pub fn is_lost(&self) -> bool {
        locked(&self.parts).still_held().is_err()
    }

    /// Ends when the lock is lost, with every server's reason. Never ends while it is held.
    ///
    /// # Cancel safety
    ///
    /// Dropping the future changes nothing; it may be awaited again.
    ///
    /// # Examples
    ///
    /// ```no_run
    /// # async fn work() {}
    /// # async fn example(
    /// #     client: rlock_client::QuorumClient,
    /// # ) -> Result<(), rlock_client::QuorumError> {
    /// let guard = client.lock("orders").lock().await?;
    /// tokio::select! {
    ///     () = work() => guard.unlock().await?,
    ///     reasons = guard.lost() => println!("stopped half-way: {reasons}"),
    /// }
    /// # Ok(())
    /// # }
    /// ```
    pub async fn lost(&self) -> QuorumError {
        until_lost(&self.parts).await
    }

    /// Ends when a server reports that another client tries to get the lock, so that a long task
    /// can give it back at a good moment. A holder that ignores this keeps the lock.
    ///
    /// Others do not wait in a queue but try [again and again](crate::QuorumLock), at all servers.
    /// So this ends at the report of the first server that refused one of them; a majority is not
    /// needed. The other servers report the same try a little later, so the next call may end at
    /// once.
    ///
    /// The first call asks each server for reports, by a renewal in the background. A later call
    /// asks the servers that have reported since.
    ///
    /// # Cancel safety
    ///
    /// If the future is dropped nothing is forgotten: a report that arrives meanwhile ends the next
    /// call at once. So it can be one arm of a `select!` in a loop, or be looked at between two
    /// steps with a timeout of zero.
    ///
    /// # Errors
    ///
    /// - Lost: fewer than a majority still hold it, and nobody needs to give it back.
    /// - Refused: none of the servers that hold the lock can report, for example because their
    ///   modules are older than `WANTED`. The error has each server's answer.
    ///
    /// # Examples
    ///
    /// ```no_run
    /// # async fn index(_chapter: u32) {}
    /// # async fn example(
    /// #     client: rlock_client::QuorumClient,
    /// # ) -> Result<(), rlock_client::QuorumError> {
    /// use std::time::Duration;
    /// use tokio::time::{sleep, timeout};
    ///
    /// let lock = client.lock("reindex");
    /// let mut guard = lock.lock().await?;
    /// for chapter in 0..1000 {
    ///     index(chapter).await;
    ///     // A good moment. Does anybody else try?
    ///     if let Ok(wanted) = timeout(Duration::ZERO, guard.wanted()).await {
    ///         wanted?; // lost, if that is an error
    ///         guard.unlock().await?;
    ///         // Longer than the pause between two tries of the others.
    ///         sleep(Duration::from_millis(300)).await;
    ///         guard = lock.lock().await?;
    ///     }
    /// }
    /// # Ok(())
    /// # }
    /// ```
    pub async fn wanted(&self) -> Result<(), QuorumError> {
        let mut refused = vec![None; self.lock.core.members.len()];
        loop {
            let mut listening = {
                let mut parts = locked(&self.parts);
                parts.still_held()?;
                parts.listen(&refused)
            };
            let Some((server, told)) = listening.next().await else {
                // The last of them may have ended just before it was to be asked.
                locked(&self.parts).still_held()?;
                let (core, what) = (&self.lock.core, "could be asked to tell");
                return Err(core.error(ErrorKind::Refused, what, refused));
            };
            match told {
                Ok(()) => return Ok(()),
                // It may be held there again, and where it was not before.
                Err(error) if error.is_lost() => {}
                Err(error) => {
                    if let Some(answer) = refused.get_mut(server) {
                        *answer = Some(error);
                    }
                }
            }
        }
    }

    /// Starts the lease anew on every server. A lock that was given a lease is also taken again
    /// where it is not held; one that was not is renewed and taken again by itself.
    ///
    /// Returns when all servers have answered, or their
    /// [time](crate::QuorumBuilder::server_timeout) is up.
    ///
    /// # Cancel safety
    ///
    /// If the future is dropped, the lease may or may not have been renewed on each server; the
    /// guard counts only renewals whose replies it has.
    ///
    /// # Errors
    ///
    /// - Lost: fewer than a majority still hold it.
    /// - Unavailable, unknown: fewer than a majority have confirmed it, or granted it meanwhile;
    ///   the guard stays valid for as long as it was.
    ///
    /// # Examples
    ///
    /// ```no_run
    /// # async fn example(
    /// #     client: rlock_client::QuorumClient,
    /// # ) -> Result<(), rlock_client::QuorumError> {
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
    pub async fn renew(&self) -> Result<(), QuorumError> {
        let (core, parts) = (&self.lock.core, &self.parts);
        let mut round = Round::new();
        // One that was given no lease is taken again by itself.
        if self.lock.lease.is_some() {
            locked(parts).take_again(&mut round);
        }
        let renew = async |held: Option<(Arc<Context>, Arc<Hold>)>| {
            let (context, hold) = held?;
            let renewed = core.in_time(renew::ask(&context, &hold, Aim::Anew)).await;
            Some((hold, renewed.err()?))
        };
        let renewing = join_all(locked(parts).holds().map(renew));
        let joining = async {
            while let Some((server, answer)) = round.next().await {
                locked(parts).join_late(server, answer);
            }
        };
        let (failed, ()) = tokio::join!(renewing, joining);
        let answers = locked(parts).renewed(failed);
        locked(parts).still_held()?;
        core.confirmed("have confirmed the renewal", answers)
    }

    /// Gives the lock back on all servers and waits until a majority has confirmed it.
    ///
    /// # Cancel safety
    ///
    /// The lock is given back in any case, in the background if the future is dropped.
    ///
    /// # Errors
    ///
    /// - Lost: fewer than a majority still held it. Somebody else may have had the lock in the
    ///   meantime; their holds are untouched.
    /// - Unavailable, unknown: fewer than a majority have confirmed it. The background goes on
    ///   trying until the leases have ended.
    ///
    /// # Examples
    ///
    /// ```no_run
    /// # async fn example(
    /// #     client: rlock_client::QuorumClient,
    /// # ) -> Result<(), rlock_client::QuorumError> {
    /// let guard = client.lock("orders").lock().await?;
    /// if let Err(error) = guard.unlock().await {
    ///     assert!(!error.is_lost(), "what was done under the lock is in doubt");
    /// }
    /// # Ok(())
    /// # }
    /// ```
    pub async fn unlock(self) -> Result<(), QuorumError> {
        let mut answers = locked(&self.parts).troubles();
        let guards = locked(&self.parts).take()?;
        let release = async |(server, guard): (usize, Guard)| (server, guard.unlock().await);
        let mut releases: FuturesUnordered<_> = guards.into_iter().map(release).collect();
        let mut confirmed: usize = 0;
        while let Some((server, answer)) = releases.next().await {
            confirmed = confirmed.saturating_add(answer.is_ok().into());
            // The others have been told too; their answers change nothing.
            if confirmed >= self.lock.core.need {
                return Ok(());
            }
            if let Some(place) = answers.get_mut(server) {
                *place = answer.err();
            }
        }
        let core = &self.lock.core;
        core.confirmed("have confirmed the release", answers)
    }
}

impl Drop for QuorumGuard {
    fn drop(&mut self) {
        // Dropping the guards releases them, unless unlock() has taken them out already.
        let left = locked(&self.parts).take();
        drop(left);
        let mut tasks = std::mem::take(&mut self.tasks);
        tasks.abort_all();
        // The task's requests in flight are released when it has ended, and shutdown() waits for
        // that.
        let ended = async move { tasks.shutdown().await };
        self.lock.core.background.spawn(ended);
    }
}

impl fmt::Debug for QuorumGuard {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("QuorumGuard")
            .field("name", &String::from_utf8_lossy(self.name()))
            .field("tokens", &self.tokens())
            .field("valid_for", &self.valid_for())
            .finish_non_exhaustive()
    }
}

/// Ends when it is lost, at the latest with its validity.
///
/// Guards that join meanwhile need no listener: the guards at the start are a majority until one of
/// them is lost.
async fn until_lost(parts: &Mutex<Parts>) -> QuorumError {
    loop {
        let holds: Vec<_> = {
            let mut parts = locked(parts);
            if let Err(lost) = parts.still_held() {
                return lost;
            }
            parts.holds().flatten().map(|(_, hold)| hold).collect()
        };
        // All of them may have ended between these two looks.
        if !holds.is_empty() {
            lost(holds.iter()).await;
        }
    }
}

/// Keeps the lock until it is lost, or until the guard aborts this task.
async fn keep(parts: Arc<Mutex<Parts>>, is_renewed: bool, mut round: Round) {
    let lost = until_lost(&parts);
    tokio::pin!(lost);
    loop {
        tokio::select! {
            _ = &mut lost => return,
            Some((server, answer)) = round.next() => locked(&parts).join_late(server, answer),
            () = sleep(RETAKE_EVERY), if is_renewed => locked(&parts).take_again(&mut round),
        }
    }
}

/// Servers that come back are found within this time: fewer may then fail before it comes to a
/// loss. Where a server is known to be down, nothing is sent.
const RETAKE_EVERY: Duration = Duration::from_secs(1);
