//! The state that the clones of a client and its guards share.

use std::ops::Deref;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Weak};
use std::time::Duration;

use tokio::sync::Notify;
use tokio::task::JoinSet;

use crate::background::Background;
use crate::locks::{Owner, Table};
use crate::topology::Router;

/// A client's locks, its servers, and the tasks between them.
pub(crate) struct Context {
    pub(super) this: Weak<Self>,
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

/// The settings of a client.
pub(crate) struct Settings {
    pub(crate) id: String,
    pub(crate) lease: Duration,
    pub(crate) max_hold: Option<Duration>,
    /// How often the watchdog renews.
    pub(crate) interval: Duration,
    /// How many locks are kept idle at most.
    pub(crate) kept_max: usize,
}

impl Context {
    /// A new owner, unlike any other.
    pub(crate) fn owner(&self) -> Owner {
        let number = self.numbers.fetch_add(1, Ordering::Relaxed);
        Owner::new(&self.settings.id, number)
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
