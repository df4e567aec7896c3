//! The work that goes on without its caller, and waiting for its end.

use std::future::Future;

use tokio::runtime::Handle;
use tokio_util::sync::CancellationToken;
use tokio_util::task::TaskTracker;

/// Runs tasks, and counts all pending work. Clones share the count.
pub(crate) struct Background {
    pub(crate) runtime: Handle,
    /// The pending work: tasks, and anything else that holds a token of it.
    pub(crate) pending: TaskTracker,
    /// Tells waits to end.
    pub(crate) closing: CancellationToken,
}

impl Background {
    pub(crate) fn new(runtime: Handle) -> Self {
        Self {
            runtime,
            pending: TaskTracker::new(),
            closing: CancellationToken::new(),
        }
    }

    /// Runs a task. May be called outside a runtime; once the client's own has ended, the task is
    /// dropped.
    pub(crate) fn spawn(&self, task: impl Future<Output = ()> + Send + 'static) {
        self.pending.spawn_on(self::task(task), &self.runtime);
    }

    /// Tells waits to end, and ends when nothing is left to do.
    pub(crate) async fn shut_down(&self) {
        self.closing.cancel();
        // It takes more all the same.
        self.pending.close();
        self.pending.wait().await;
    }
}

/// Wraps a task before it is spawned. In a test the task belongs to the process that spawns it, and
/// stands still with it.
pub(crate) fn task<F: Future>(task: F) -> impl Future<Output = F::Output> {
    #[cfg(feature = "test-util")]
    let task = crate::test_util::task(task);
    task
}
