//! The work that goes on without its caller, and waiting for its end.

use std::future::Future;
use std::pin::pin;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};

use tokio::runtime::Handle;
use tokio::sync::{Notify, watch};

/// Runs tasks, and counts them and what else is not done yet. Clones share the count.
#[derive(Clone)]
pub(crate) struct Background {
    runtime: Handle,
    pending: Arc<Pending>,
    /// What nobody waits for.
    owed: Arc<Pending>,
    closing: watch::Sender<bool>,
}

#[derive(Default)]
struct Pending {
    count: AtomicUsize,
    none: Notify,
}

impl Background {
    pub(crate) fn new(runtime: Handle) -> Self {
        Self {
            runtime,
            pending: Arc::default(),
            owed: Arc::default(),
            closing: watch::Sender::new(false),
        }
    }

    /// Counts something that is not done before this is dropped.
    pub(crate) fn counted(&self) -> Counted {
        self.pending.count.fetch_add(1, Ordering::Relaxed);
        Counted(Arc::clone(&self.pending))
    }

    /// Runs a task. May be called outside a runtime; once the client's own has ended, the task is
    /// dropped.
    pub(crate) fn spawn(&self, task: impl Future<Output = ()> + Send + 'static) {
        let counted = self.counted();
        self.runtime.spawn(async move {
            task.await;
            drop(counted);
        });
    }

    /// Runs a task for whose end nobody waits. It has the client, and is to end by itself when only
    /// such tasks have it still.
    pub(crate) fn owe(&self, task: impl Future<Output = ()> + Send + 'static) {
        self.owed.count.fetch_add(1, Ordering::Relaxed);
        let owed = Counted(Arc::clone(&self.owed));
        self.runtime.spawn(async move {
            task.await;
            drop(owed);
        });
    }

    /// How many such tasks there are.
    pub(crate) fn owed(&self) -> usize {
        self.owed.count.load(Ordering::Relaxed)
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

    /// Ends when nothing is left to do.
    pub(crate) async fn idle(&self) {
        loop {
            // Listens before it looks: what ends in between is heard.
            let mut none = pin!(self.pending.none.notified());
            none.as_mut().enable();
            // With what the last to end has done.
            if self.pending.count.load(Ordering::Acquire) == 0 {
                return;
            }
            none.await;
        }
    }
}

/// One in the count; a task also if it is dropped before it has run.
pub(crate) struct Counted(Arc<Pending>);

impl Drop for Counted {
    fn drop(&mut self) {
        if self.0.count.fetch_sub(1, Ordering::Release) == 1 {
            self.0.none.notify_waiters();
        }
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
