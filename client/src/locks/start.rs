//! The start of a client, and its watchdog: it renews all holds behind one another.

use std::sync::atomic::AtomicU64;
use std::sync::{Arc, Weak};

use tokio::runtime::Handle;
use tokio::task::{JoinSet, yield_now};
use tokio::time::{Instant, sleep_until};

use crate::background::{Background, task};
use crate::locks::{Aim, Context, Hold, Settings, Table, Watchdog, renew};
use crate::topology::Router;
use crate::trace;
use crate::wire::Listener;

impl Context {
    /// Begins to connect.
    pub(crate) fn start(
        settings: Settings,
        router: impl FnOnce(&Handle, Weak<dyn Listener>) -> Router,
    ) -> Arc<Self> {
        let runtime = Handle::current();
        Arc::new_cyclic(|context: &Weak<Self>| {
            let watchdog = Arc::new(Watchdog::new(settings.interval));
            let router = Arc::new(router(&runtime, Weak::<Self>::clone(context)));
            let mut tasks = JoinSet::new();
            let watching = run(Arc::clone(&watchdog), Weak::clone(context));
            tasks.spawn_on(task(watching), &runtime);
            if router.are_several() {
                let (router, moves) = (Arc::clone(&router), Weak::<Self>::clone(context));
                let reading = async move { router.keep_fresh(moves).await };
                tasks.spawn_on(task(reading), &runtime);
            }
            Self {
                this: Weak::clone(context),
                settings,
                numbers: AtomicU64::new(1),
                router,
                table: Table::default(),
                watchdog,
                _tasks: tasks,
                background: Background::new(runtime),
            }
        })
    }
}

/// Renews until it is aborted, with the client.
pub(crate) async fn run(watchdog: Arc<Watchdog>, context: Weak<Context>) {
    let mut next = watchdog.next.subscribe();
    loop {
        // The sender is there: this is never the end.
        let due = next.wait_for(Option::is_some).await.map(|due| *due);
        let Ok(Some(round)) = due else { return };
        tokio::select! {
            () = sleep_until(round) => {}
            // It may be due earlier.
            _ = next.changed() => continue,
        }
        let Some(context) = context.upgrade() else {
            return;
        };
        let is_renewed = |hold: &Arc<Hold>| hold.options.renewed;
        let mut holds = Vec::new();
        watchdog.starts(Instant::now(), || {
            holds = context.table.holds(is_renewed);
            !holds.is_empty()
        });
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
