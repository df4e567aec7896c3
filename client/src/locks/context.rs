//! The state that the clones of a client and its guards share.

use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Weak};
use std::time::Duration;

use tokio::task::JoinSet;

use crate::background::Background;
use crate::locks::{Hold, Owner, Table, Target, Watchdog};
use crate::topology::Router;

/// A client's locks, its servers, and the tasks between them.
pub(crate) struct Context {
    pub(super) this: Weak<Self>,
    pub(crate) settings: Settings,
    pub(super) numbers: AtomicU64,
    pub(crate) router: Arc<Router>,
    pub(crate) table: Table,
    pub(crate) watchdog: Arc<Watchdog>,
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
}

impl Context {
    /// How far the owner of a kept lock has come; `None` while its call has no answer.
    pub(super) fn state_of(&self, target: &Target) -> Option<Asks> {
        self.table.with(|state| {
            let slot = state.slot(target);
            let hold = state.hold(slot).cloned();
            let is_queued = state.call_at(slot).is_some_and(|(_, call)| call.was_queued);
            state.tidy(slot);
            hold.map(Asks::Holds)
                .or(is_queued.then_some(Asks::IsQueued))
        })
    }

    /// A new owner, unlike any other.
    pub(crate) fn owner(&self) -> Owner {
        let number = self.numbers.fetch_add(1, Ordering::Relaxed);
        Owner::new(&self.settings.id, number)
    }
}

/// See [`Context::state_of`].
pub(super) enum Asks {
    IsQueued,
    Holds(Arc<Hold>),
}
