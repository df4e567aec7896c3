//! What the clones of a client and its guards share.

use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Weak};
use std::time::Duration;

use tokio::runtime::Handle;
use tokio::task::{JoinSet, yield_now};

use crate::background::{Background, task};
use crate::flows::{Watchdog, watchdog};
use crate::ledger::{Hold, HoldOptions, Ledger, Owner};
use crate::topology::Router;
use crate::wire::Listener;

/// A client's locks, its servers, and the tasks between them.
pub(crate) struct Context {
    pub(crate) settings: Settings,
    numbers: AtomicU64,
    pub(crate) router: Arc<Router>,
    pub(crate) ledger: Arc<Ledger>,
    pub(crate) watchdog: Arc<Watchdog>,
    /// The watchdog's, and in a cluster what asks who serves what. They end with it.
    _tasks: JoinSet<()>,
    pub(crate) background: Background,
}

/// What a client is told once.
pub(crate) struct Settings {
    pub(crate) id: String,
    pub(crate) lease: Duration,
    pub(crate) max_hold: Option<Duration>,
    /// How often the watchdog renews.
    pub(crate) interval: Duration,
}

impl Context {
    /// Begins to connect.
    pub(crate) fn start(
        settings: Settings,
        router: impl FnOnce(&Handle, Weak<dyn Listener>) -> Arc<Router>,
    ) -> Arc<Self> {
        let runtime = Handle::current();
        Arc::new_cyclic(|context: &Weak<Self>| {
            let watchdog = Arc::new(Watchdog::new(settings.interval));
            let router = router(&runtime, Weak::<Self>::clone(context));
            let mut tasks = JoinSet::new();
            let watching = watchdog::run(Arc::clone(&watchdog), Weak::clone(context));
            tasks.spawn_on(task(watching), &runtime);
            if router.are_several() {
                tasks.spawn_on(task(Arc::clone(&router).keep_fresh()), &runtime);
            }
            Self {
                settings,
                numbers: AtomicU64::new(1),
                router,
                ledger: Arc::default(),
                watchdog,
                _tasks: tasks,
                background: Background::new(runtime),
            }
        })
    }

    /// Whether the watchdog asks about such a hold: to renew its lease; or, in a cluster, to have
    /// it belong to the session. A node forgets to whom a hold belongs when the slot goes to
    /// another, and nobody here hears of a slot that is back soon.
    pub(crate) fn is_looked_after(&self, options: &HoldOptions) -> bool {
        options.renewed || self.router.are_several()
    }

    /// Holds of which this is so. Other tasks run in between.
    pub(super) async fn holds(&self, is: impl Fn(&Hold) -> bool) -> Vec<Arc<Hold>> {
        let mut holds = Vec::new();
        for some in self.ledger.holds() {
            holds.extend(some.into_iter().filter(|hold| is(hold)));
            yield_now().await;
        }
        holds
    }

    /// A new owner, unlike any other.
    pub(crate) fn owner(&self) -> Owner {
        let number = self.numbers.fetch_add(1, Ordering::Relaxed);
        Owner::new(&self.settings.id, number)
    }
}
