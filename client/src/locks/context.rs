//! The state that the clones of a client and its guards share; its start, and its watchdog.

use std::ops::Deref;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Weak};
use std::time::Duration;

use tokio::runtime;
use tokio::sync::Notify;
use tokio::task::{JoinSet, coop::consume_budget};
use tokio::time::{Instant, sleep, sleep_until};

use crate::Owner;
use crate::background::{Background, task};
use crate::error::Error;
use crate::locks::{Aim, Table, renew};
use crate::topology::{Node, Router};
use crate::wire::Listener;
use crate::{MILLI, TIMEOUT_MAX, part, trace};

/// A client's locks, its servers, and the tasks between them.
pub(crate) struct Context {
    pub(super) this: Weak<Self>,
    /// The client's id, with which the names of its owners begin.
    pub(crate) id: String,
    pub(crate) settings: Settings,
    pub(super) numbers: AtomicU64,
    pub(crate) router: Arc<Router>,
    pub(crate) table: Table,
    /// Tells the watchdog that a renewal was refused.
    pub(super) renewal_failed: Arc<Notify>,
    /// The watchdog's, and in a cluster what asks who serves what. They end with it.
    pub(super) _tasks: JoinSet<()>,
    pub(crate) background: Background,
}

/// The settings of a client's locks.
#[derive(Clone, Debug)]
pub(crate) struct Settings {
    pub(crate) lease: Duration,
    pub(crate) max_hold: Option<Duration>,
    pub(crate) renew_every: Option<Duration>,
    /// How many locks are kept idle at most.
    pub(crate) kept_max: usize,
}

impl Settings {
    pub(crate) fn interval(&self) -> Duration {
        let third = part(self.lease, 3).max(MILLI);
        self.renew_every.unwrap_or(third)
    }
}

impl Context {
    /// Begins to connect.
    pub(crate) fn start(
        id: String,
        settings: Settings,
        router: impl FnOnce(&runtime::Handle, Weak<dyn Listener>) -> Router,
    ) -> Arc<Self> {
        let runtime = runtime::Handle::current();
        Arc::new_cyclic(|context: &Weak<Self>| {
            let renewal_failed = Arc::new(Notify::new());
            let router = Arc::new(router(&runtime, Weak::<Self>::clone(context)));
            let mut tasks = JoinSet::new();
            let (failed, interval) = (Arc::clone(&renewal_failed), settings.interval());
            let background = Background::new(runtime.clone());
            // The watchdog ends with the runtime, if that ends first: then nobody answers a call.
            let ends = background.closing.clone().drop_guard();
            let renewing = run(Weak::clone(context), interval, failed);
            let renewing = async move {
                let _ends = ends;
                renewing.await;
            };
            tasks.spawn_on(task(renewing), &runtime);
            if router.are_several() {
                let router = Arc::clone(&router);
                let reading = async move { router.keep_fresh().await };
                tasks.spawn_on(task(reading), &runtime);
            }
            Self {
                this: Weak::clone(context),
                table: Table::new(settings.kept_max),
                id,
                settings,
                numbers: AtomicU64::new(1),
                router,
                renewal_failed,
                _tasks: tasks,
                background,
            }
        })
    }

    /// A new owner, unlike any other.
    pub(crate) fn owner(&self) -> Owner {
        let number = self.numbers.fetch_add(1, Ordering::Relaxed);
        Owner::new(&self.id, number)
    }

    /// Does something after a pause, if the client is still there.
    pub(super) fn later(&self, pause: Duration, work: impl FnOnce(&Arc<Self>) + Send + 'static) {
        let context = self.this.clone();
        self.background.runtime.spawn(task(async move {
            sleep(pause).await;
            context.upgrade().as_ref().map(work);
        }));
    }

    /// Why nobody answers: the server's trouble, if it is known.
    pub(super) fn trouble_or(&self, otherwise: &'static str) -> Error {
        let trouble = self.router.trouble();
        trouble.unwrap_or_else(|| Error::unavailable(otherwise))
    }

    /// Ends pending calls, and waits for all that is under way. The calls are ended here: their
    /// callers may not be polled meanwhile.
    pub(crate) async fn shut_down(self: &Arc<Self>) {
        // In one step: each call has begun before, and is ended, or begins no more.
        let (calls, kept) = self.table.with(|state| {
            self.background.closing.cancel();
            (state.end_calls(|_| true), state.keep_none())
        });
        for call in calls {
            let _ = self.undo(call).send(Err(Error::shut_down()));
        }
        self.release_all(kept);
        self.background.shut_down().await;
    }

    /// The node that serves the name, unless too many commands wait there.
    pub(super) fn node_with_room(&self, name: &[u8]) -> Result<Arc<Node>, Error> {
        let node = self.router.home(name);
        if node.link.is_full() {
            return Err(Error::unavailable("too many commands wait for an answer"));
        }
        Ok(node)
    }
}

/// The client, a clone of it, or a lock named by it share this. With the last of them nobody can
/// take a lock that is kept idle, and guards may live on.
pub(crate) struct Handle(pub(crate) Arc<Context>);

impl Deref for Handle {
    type Target = Arc<Context>;

    fn deref(&self) -> &Arc<Context> {
        &self.0
    }
}

impl Drop for Handle {
    fn drop(&mut self) {
        self.0.keep_none();
    }
}

/// Renews the holds that were given no lease, all behind one another, at each interval and soon
/// after a failure, until it is aborted with the client.
async fn run(context: Weak<Context>, interval: Duration, failed: Arc<Notify>) {
    let after = |pause: Duration| {
        let now = Instant::now();
        now.checked_add(pause.min(TIMEOUT_MAX)).unwrap_or(now)
    };
    let mut next = after(interval);
    loop {
        tokio::select! {
            () = sleep_until(next) => {}
            () = failed.notified() => {
                // The lease runs.
                next = next.min(after(part(interval, RETRY_PARTS)));
                continue;
            }
        }
        next = after(interval);
        let Some(context) = context.upgrade() else {
            return;
        };
        let holds = context.table.holds(|hold| hold.options.renewed);
        let span = trace::renew(holds.len());
        let _gathering = context.router.identity.gathering.lock().await;
        span.around(async {
            for hold in &holds {
                renew::one(&context, hold, Aim::Lease);
                // Other tasks run in between.
                consume_budget().await;
            }
        })
        .await;
    }
}

/// A renewal that was refused is repeated after this part of the interval.
const RETRY_PARTS: u32 = 10;
