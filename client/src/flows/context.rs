//! What the clones of a client and its guards share.

use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Weak};
use std::time::Duration;

use tokio::runtime::Handle;
use tokio::task::AbortHandle;

use crate::background::Background;
use crate::error::Error;
use crate::flows::watchdog::{self, Watchdog};
use crate::ledger::{Ledger, Owner};
use crate::topology::{Listener, Router};

/// A client's locks, its servers, and the tasks between them.
pub(crate) struct Context {
    pub(crate) id: String,
    numbers: AtomicU64,
    pub(crate) lease: Duration,
    pub(crate) max_hold: Option<Duration>,
    pub(crate) router: Router,
    pub(crate) ledger: Arc<Ledger>,
    pub(crate) watchdog: Arc<Watchdog>,
    watching: AbortHandle,
    pub(crate) background: Background,
    pub(crate) runtime: Handle,
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
    /// Begins to connect, and waits until the first try has ended: the error, if it failed.
    pub(crate) async fn start(
        settings: Settings,
        router: impl FnOnce(&Handle, Weak<dyn Listener>) -> Router,
    ) -> Result<Arc<Self>, Error> {
        let runtime = Handle::current();
        let context = Arc::new_cyclic(|context: &Weak<Self>| {
            let watchdog = Arc::new(Watchdog::new(settings.interval));
            let watching = watchdog::run(Arc::clone(&watchdog), Weak::clone(context));
            Self {
                id: settings.id,
                numbers: AtomicU64::new(1),
                lease: settings.lease,
                max_hold: settings.max_hold,
                router: router(&runtime, Weak::<Self>::clone(context)),
                ledger: Arc::default(),
                watchdog,
                watching: runtime.spawn(watching).abort_handle(),
                background: Background::new(runtime.clone()),
                runtime,
            }
        });
        context.router.tried().await?;
        Ok(context)
    }

    /// A new owner, unlike any other.
    pub(crate) fn owner(&self) -> Owner {
        Owner::new(&self.id, self.numbers.fetch_add(1, Ordering::Relaxed))
    }
}

impl Drop for Context {
    fn drop(&mut self) {
        self.watching.abort();
    }
}
