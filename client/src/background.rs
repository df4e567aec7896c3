//! The work that goes on without its caller, and waiting for its end.

use std::future::Future;

use tokio::runtime::Handle;
use tokio::sync::watch;

/// Runs tasks and counts them.
pub(crate) struct Background {
    runtime: Handle,
    running: watch::Sender<usize>,
    closing: watch::Sender<bool>,
}

impl Background {
    pub(crate) fn new(runtime: Handle) -> Self {
        let (running, closing) = (watch::Sender::new(0), watch::Sender::new(false));
        Self {
            runtime,
            running,
            closing,
        }
    }

    /// Runs a task. May be called outside a runtime; once the client's own has ended, the task is
    /// dropped.
    pub(crate) fn spawn(&self, task: impl Future<Output = ()> + Send + 'static) {
        let counted = Counted::new(&self.running);
        self.runtime.spawn(async move {
            task.await;
            drop(counted);
        });
    }

    /// Tells waits to end.
    pub(crate) fn close(&self) {
        self.closing.send_replace(true);
    }

    pub(crate) fn is_closed(&self) -> bool {
        *self.closing.borrow()
    }

    /// Ends when [`close`](Self::close) has been called.
    pub(crate) async fn closed(&self) {
        // The sender is `self`: there is no other end to this.
        let _ = self.closing.subscribe().wait_for(|closing| *closing).await;
    }

    /// Ends when nothing runs.
    pub(crate) async fn idle(&self) {
        let _ = self
            .running
            .subscribe()
            .wait_for(|running| *running == 0)
            .await;
    }
}

/// One task in the count, also if it is dropped before it has run.
struct Counted(watch::Sender<usize>);

impl Counted {
    fn new(running: &watch::Sender<usize>) -> Self {
        running.send_modify(|count| *count = count.saturating_add(1));
        Self(running.clone())
    }
}

impl Drop for Counted {
    fn drop(&mut self) {
        self.0.send_modify(|count| *count = count.saturating_sub(1));
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use tokio::sync::oneshot;

    #[tokio::test]
    async fn idle_waits_for_what_has_been_spawned() {
        let background = Background::new(Handle::current());
        let (go, wait) = oneshot::channel::<()>();
        background.spawn(async { wait.await.expect("told to go") });
        let mut idle = Box::pin(background.idle());
        tokio::select! {
            biased;
            () = &mut idle => panic!("idle while a task runs"),
            () = tokio::task::yield_now() => {}
        }
        go.send(()).expect("the task listens");
        idle.await;
    }
}
