//! The start of a client, and its watchdog: it renews all holds behind one another.

use std::sync::atomic::AtomicU64;
use std::sync::{Arc, Weak};
use std::time::Duration;

use tokio::runtime::Handle;
use tokio::sync::Notify;
use tokio::task::{JoinSet, yield_now};
use tokio::time::{Instant, sleep_until};

use crate::background::{Background, task};
use crate::locks::{Aim, Context, Settings, Table, renew};
use crate::topology::Router;
use crate::wire::Listener;
use crate::{TIMEOUT_MAX, part, trace};

impl Context {
    /// Begins to connect.
    pub(crate) fn start(
        settings: Settings,
        router: impl FnOnce(&Handle, Weak<dyn Listener>) -> Router,
    ) -> Arc<Self> {
        let runtime = Handle::current();
        Arc::new_cyclic(|context: &Weak<Self>| {
            let renewal_failed = Arc::new(Notify::new());
            let router = Arc::new(router(&runtime, Weak::<Self>::clone(context)));
            let mut tasks = JoinSet::new();
            let (failed, interval) = (Arc::clone(&renewal_failed), settings.interval);
            let renewing = run(Weak::clone(context), interval, failed);
            tasks.spawn_on(task(renewing), &runtime);
            if router.are_several() {
                let (router, moves) = (Arc::clone(&router), Weak::<Self>::clone(context));
                let reading = async move { router.keep_fresh(moves).await };
                tasks.spawn_on(task(reading), &runtime);
            }
            Self {
                this: Weak::clone(context),
                table: Table::new(settings.kept_max),
                settings,
                numbers: AtomicU64::new(1),
                router,
                renewal_failed,
                _tasks: tasks,
                background: Background::new(runtime),
            }
        })
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
        let _gathering = context.router.gathering().await;
        span.around(async {
            for some in holds.chunks(AT_ONCE) {
                for hold in some {
                    renew::one(&context, hold, Aim::Lease);
                }
                yield_now().await;
            }
        })
        .await;
    }
}

/// The number of holds that are renewed before other tasks run.
const AT_ONCE: usize = 512;

/// A renewal that was refused is repeated after this part of the interval.
const RETRY_PARTS: u32 = 10;
