//! The locks that are held while the command runs.

use std::ffi::{OsStr, OsString};
use std::future::Future;
use std::os::unix::ffi::{OsStrExt as _, OsStringExt as _};
use std::pin::Pin;
use std::time::Duration;

use futures_util::future::{select_all, try_join_all};
use rlock_client::{Client, Error, Guard, LostReason};
use tokio::time::Instant;

use crate::permits::Asked;

/// How a name is locked.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Kind {
    /// A plain lock, which has one holder.
    Plain,
    /// A read-write lock, together with other readers.
    Read,
    /// A read-write lock, alone.
    Write,
    /// Permits of a semaphore.
    Permits(Asked),
}

/// How long `rlock` waits for it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Wait {
    Forever,
    /// Zero: not at all.
    AtMost(Duration),
}

impl Wait {
    /// The time of the wait that is left since this start.
    fn since(self, start: Instant) -> Self {
        match self {
            Self::Forever => Self::Forever,
            Self::AtMost(time) => Self::AtMost(time.saturating_sub(start.elapsed())),
        }
    }
}

type Later<'a, T> = Pin<Box<dyn Future<Output = T> + 'a>>;

/// A guard, whatever it holds.
trait AnyGuard {
    fn valid_for(&self) -> Duration;
    fn lost(&self) -> Later<'_, LostReason>;
    fn renew(&self) -> Later<'_, Result<(), Error>>;
    fn unlock(self: Box<Self>) -> Later<'static, Result<(), Error>>;
    fn owner(&self) -> &str;
}

impl<M: 'static> AnyGuard for Guard<M> {
    fn valid_for(&self) -> Duration {
        Self::valid_for(self)
    }

    fn lost(&self) -> Later<'_, LostReason> {
        Box::pin(Self::lost(self))
    }

    fn renew(&self) -> Later<'_, Result<(), Error>> {
        Box::pin(Self::renew(self))
    }

    fn unlock(self: Box<Self>) -> Later<'static, Result<(), Error>> {
        Box::pin(Self::unlock(*self))
    }

    fn owner(&self) -> &str {
        Self::owner(self).as_str()
    }
}

/// All locks that were asked for: one guard, but for several read-write locks, since each of those
/// is taken by itself.
pub(crate) struct Held {
    guards: Vec<Box<dyn AnyGuard>>,
    /// The names as they were given, each with its token.
    tokens: Vec<(OsString, u64)>,
}

impl Held {
    /// Takes them all. Several plain locks are taken at once; read-write locks one after the other,
    /// in the order of their names, so that two commands cannot wait for each other.
    pub(crate) async fn take(
        client: &Client,
        names: &[OsString],
        kind: Kind,
        wait: Wait,
    ) -> Result<Self, Error> {
        match (names, kind) {
            ([name], Kind::Plain) => Self::take_one(client, name, wait).await,
            (_, Kind::Plain) => Self::take_several(client, names, wait).await,
            // There is one name: the plan has refused more.
            ([name, ..], Kind::Permits(asked)) => {
                Self::take_permits(client, name, asked, wait).await
            }
            _ => Self::take_each(client, names, kind, wait).await,
        }
    }

    async fn take_one(client: &Client, name: &OsStr, wait: Wait) -> Result<Self, Error> {
        let lock = client.lock(name.as_bytes());
        let guard = match wait {
            Wait::Forever => lock.lock().await,
            Wait::AtMost(time) => lock.lock_timeout(time).await,
        }?;
        let tokens = vec![(name.to_owned(), guard.token())];
        let guards: Vec<Box<dyn AnyGuard>> = vec![Box::new(guard)];
        Ok(Self { guards, tokens })
    }

    async fn take_permits(
        client: &Client,
        name: &OsStr,
        Asked { permits, limit }: Asked,
        wait: Wait,
    ) -> Result<Self, Error> {
        let semaphore = client.semaphore(name.as_bytes(), limit);
        let (guard, token) = boxed(match wait {
            Wait::Forever => semaphore.acquire_many(permits).await,
            Wait::AtMost(time) => semaphore.acquire_many_timeout(permits, time).await,
        }?);
        Ok(Self {
            guards: vec![guard],
            tokens: vec![(name.to_owned(), token)],
        })
    }

    async fn take_several(client: &Client, names: &[OsString], wait: Wait) -> Result<Self, Error> {
        let lock = client.multi(names.iter().map(|name| name.as_bytes()));
        let guard = match wait {
            Wait::Forever => lock.lock().await,
            Wait::AtMost(time) => lock.lock_timeout(time).await,
        }?;
        let each = guard.names().map(|name| {
            let token = guard.token_of(name).unwrap_or_default();
            (OsString::from_vec(name.to_vec()), token)
        });
        let tokens = each.collect();
        let guards: Vec<Box<dyn AnyGuard>> = vec![Box::new(guard)];
        Ok(Self { guards, tokens })
    }

    async fn take_each(
        client: &Client,
        names: &[OsString],
        kind: Kind,
        wait: Wait,
    ) -> Result<Self, Error> {
        let start = Instant::now();
        let scope = client.scope();
        let mut names = names.to_vec();
        names.sort_unstable();
        names.dedup();
        let (mut guards, mut tokens) = (Vec::new(), Vec::new());
        for name in names {
            let lock = scope.rw_lock(name.as_bytes());
            let (guard, token): (Box<dyn AnyGuard>, _) = match (kind, wait.since(start)) {
                (Kind::Read, Wait::Forever) => boxed(lock.read().await?),
                (Kind::Read, Wait::AtMost(time)) => boxed(lock.read_timeout(time).await?),
                (_, Wait::Forever) => boxed(lock.write().await?),
                (_, Wait::AtMost(time)) => boxed(lock.write_timeout(time).await?),
            };
            guards.push(guard);
            tokens.push((name, token));
        }
        Ok(Self { guards, tokens })
    }

    /// How long all of them are held for certain, as [`Guard::valid_for`].
    pub(crate) fn valid_for(&self) -> Duration {
        let each = self.guards.iter().map(|guard| guard.valid_for());
        each.min().unwrap_or_default()
    }

    /// Ends when one of them is lost.
    pub(crate) async fn lost(&self) -> LostReason {
        select_all(self.guards.iter().map(|guard| guard.lost()))
            .await
            .0
    }

    /// Renews them all at once, in the time of one renewal.
    pub(crate) async fn renew(&self) -> Result<(), Error> {
        try_join_all(self.guards.iter().map(|guard| guard.renew())).await?;
        Ok(())
    }

    /// Gives all back, and returns the first error.
    pub(crate) async fn unlock(self) -> Result<(), Error> {
        let mut outcome = Ok(());
        for guard in self.guards {
            outcome = outcome.and(guard.unlock().await);
        }
        outcome
    }

    /// The variables for the command's environment: a line for each name, in the same order.
    pub(crate) fn variables(&self) -> Vec<(OsString, OsString)> {
        let names: Vec<&OsStr> = self.tokens.iter().map(|(name, _)| &**name).collect();
        let tokens: Vec<_> = self.tokens.iter().map(|(_, t)| t.to_string()).collect();
        let owner = self.guards.first().map_or("", |guard| guard.owner());
        vec![
            ("RLOCK_NAME".into(), names.join(OsStr::new("\n"))),
            ("RLOCK_TOKEN".into(), tokens.join("\n").into()),
            ("RLOCK_OWNER".into(), owner.into()),
        ]
    }
}

fn boxed<M: 'static>(guard: Guard<M>) -> (Box<dyn AnyGuard>, u64) {
    let token = guard.token();
    (Box::new(guard), token)
}
