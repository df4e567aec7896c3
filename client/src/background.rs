//! The work that goes on without its caller, and waiting for its end.

use std::future::Future;

use tokio::runtime::Handle;
use tokio_util::sync::CancellationToken;
use tokio_util::task::TaskTracker;
use tokio_util::task::task_tracker::TaskTrackerToken;

/// Runs tasks, and counts them and what else is not done yet. Clones share the count.
#[derive(Clone)]
pub(crate) struct Background {
    runtime: Handle,
    pending: TaskTracker,
    /// What nobody waits for.
    owed: TaskTracker,
    closing: CancellationToken,
}

/// One in the count; a task also if it is dropped before it has run.
pub(crate) type Counted = TaskTrackerToken;

impl Background {
    pub(crate) fn new(runtime: Handle) -> Self {
        Self {
            runtime,
            pending: TaskTracker::new(),
            owed: TaskTracker::new(),
            closing: CancellationToken::new(),
        }
    }

    /// Counts something that is not done before this is dropped.
    pub(crate) fn counted(&self) -> Counted {
        self.pending.token()
    }

    /// Runs a task. May be called outside a runtime; once the client's own has ended, the task is
    /// dropped.
    pub(crate) fn spawn(&self, task: impl Future<Output = ()> + Send + 'static) {
        self.pending.spawn_on(task, &self.runtime);
    }

    /// Runs a task for whose end nobody waits. It has the client, and is to end by itself when only
    /// such tasks have it still.
    pub(crate) fn owe(&self, task: impl Future<Output = ()> + Send + 'static) {
        self.owed.spawn_on(task, &self.runtime);
    }

    /// How many such tasks there are.
    pub(crate) fn owed(&self) -> usize {
        self.owed.len()
    }

    /// Tells waits to end.
    pub(crate) fn close(&self) {
        self.closing.cancel();
    }

    pub(crate) fn is_closed(&self) -> bool {
        self.closing.is_cancelled()
    }

    /// Ends when [`close`](Self::close) has been called.
    pub(crate) async fn closed(&self) {
        self.closing.cancelled().await;
    }

    /// Ends when nothing is left to do.
    pub(crate) async fn idle(&self) {
        // It takes more all the same.
        self.pending.close();
        self.pending.wait().await;
    }
}
