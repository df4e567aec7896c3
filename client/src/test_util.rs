//! For tests without a network: what stands for sockets, and for chance.
//!
//! `rlock-test` has a server in memory that is reached so. With this feature and none of its
//! functions called the crate is as without it.

use std::cell::RefCell;
use std::fmt;
use std::future::poll_fn;
use std::io;
use std::pin::Pin;
use std::sync::Arc;
use std::task::{Poll, Waker};

use tokio::io::{AsyncRead, AsyncWrite};

pub use crate::chance::seed as seed_chance;

/// A connection that stands for a socket.
pub trait Stream: AsyncRead + AsyncWrite + Send + Unpin {}

impl<S: AsyncRead + AsyncWrite + Send + Unpin> Stream for S {}

/// A connection being opened.
pub type Dialing = Pin<Box<dyn Future<Output = io::Result<Box<dyn Stream>>> + Send>>;

/// Opens connections in place of the network.
pub trait Dial: fmt::Debug + Send + Sync + 'static {
    /// Opens one to the server at this address, `host:port`. It may be dropped at any moment.
    fn dial(&self, address: &str) -> Dialing;
}

/// A process that may stand still for a while, with all its tasks.
pub trait Process: Send + Sync {
    /// Whether its tasks are polled now. If not, the process wakes this task when they are polled
    /// again.
    fn runs(&self, task: &Waker) -> bool;
}

thread_local! {
    /// The process whose task is polled.
    static PRESENT: RefCell<Option<Arc<dyn Process>>> = const { RefCell::new(None) };
}

/// Runs this, and the tasks that clients spawn meanwhile, in a process.
pub async fn within<F: Future>(process: Arc<dyn Process>, task: F) -> F::Output {
    let mut task = Box::pin(task);
    poll_fn(|cx| {
        if !process.runs(cx.waker()) {
            return Poll::Pending;
        }
        let before = PRESENT.replace(Some(Arc::clone(&process)));
        let polled = task.as_mut().poll(cx);
        PRESENT.set(before);
        polled
    })
    .await
}

/// Runs a task in the process that spawns it, if there is one.
pub(crate) fn task<F: Future>(task: F) -> impl Future<Output = F::Output> {
    let process = PRESENT.with_borrow(Clone::clone);
    let task = Box::pin(task);
    async move {
        match process {
            Some(process) => within(process, task).await,
            None => task.await,
        }
    }
}
