//! Spans and events for `tracing`, if the feature is on: the spans `wait`, `hold`, `renew` and
//! `release`, at DEBUG, since each lock makes some; events when a hold is lost, the session
//! connection breaks and is there again, and when a call has waited for long. All that knows of the
//! feature is in this file.
#![cfg_attr(
    not(feature = "tracing"),
    expect(clippy::unused_self, unused_variables, reason = "nothing is told")
)]

use std::fmt::{Debug, Display};

use tokio::time::Instant;

use crate::error::LostReason;

/// A span; nothing without the feature.
#[derive(Clone)]
pub(crate) struct Span {
    #[cfg(feature = "tracing")]
    span: tracing::Span,
    /// The lock's name for the events, which are told where the span is not: it is at DEBUG. None
    /// if nobody listens, or if the span is of no single lock.
    #[cfg(feature = "tracing")]
    name: Option<std::sync::Arc<str>>,
}

/// A [`Span`] of this lock, if it is of one, with these fields, as `tracing::debug_span!` takes
/// them.
macro_rules! span {
    ($name:expr; $($told:tt)*) => {
        Span {
            #[cfg(feature = "tracing")]
            span: tracing::debug_span!($($told)*),
            #[cfg(feature = "tracing")]
            name: $name,
        }
    };
}

/// The lock's name, if anybody listens to events.
#[cfg(feature = "tracing")]
fn heard(name: &impl Display) -> Option<std::sync::Arc<str>> {
    tracing::enabled!(tracing::Level::WARN).then(|| name.to_string().into())
}

pub(crate) fn wait(name: impl Display, owner: impl Display, mode: impl Debug) -> Span {
    span!(heard(&name); "wait", %name, %owner, ?mode)
}

pub(crate) fn hold(name: impl Display, owner: impl Display, mode: impl Debug, token: u64) -> Span {
    span!(heard(&name); "hold", %name, %owner, ?mode, token, lost = tracing::field::Empty)
}

pub(crate) fn renew(holds: usize) -> Span {
    span!(None; "renew", holds)
}

pub(crate) fn release(name: impl Display, owner: impl Display, mode: impl Debug) -> Span {
    span!(heard(&name); "release", %name, %owner, ?mode)
}

impl Span {
    pub(crate) fn around<F: Future>(&self, work: F) -> impl Future<Output = F::Output> {
        #[cfg(feature = "tracing")]
        let work = tracing::Instrument::instrument(work, self.span.clone());
        work
    }

    pub(crate) fn lost(&self, reason: LostReason) {
        #[cfg(feature = "tracing")]
        {
            self.span.record("lost", tracing::field::display(reason));
            let name = self.name.as_deref();
            tracing::warn!(parent: &self.span, name, %reason, "the lock is lost");
        }
    }

    /// The wait that began then is over, with the lock or without.
    pub(crate) fn waited(&self, since: Instant) {
        #[cfg(feature = "tracing")]
        if since.elapsed() >= LONG {
            let waited_ms = u64::try_from(since.elapsed().as_millis()).unwrap_or(u64::MAX);
            let name = self.name.as_deref();
            tracing::info!(parent: &self.span, name, waited_ms, "the wait was a long one");
        }
    }
}

/// The session connection has ended, or does not answer.
pub(crate) fn disconnected(session: &str, error: &impl Display) {
    #[cfg(feature = "tracing")]
    tracing::warn!(session, %error, "the session connection is broken");
}

/// It is there again.
pub(crate) fn reconnected(session: &str) {
    #[cfg(feature = "tracing")]
    tracing::info!(session, "the session connection is there again");
}

/// A wait of this length is reported as long, as the server's log does by default.
#[cfg(feature = "tracing")]
const LONG: std::time::Duration = std::time::Duration::from_secs(1);
