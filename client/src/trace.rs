//! Spans for `tracing`, if the feature is on: `wait`, `hold`, `renew`, `release`. All that knows of
//! the feature is in this file.

#[cfg(feature = "tracing")]
pub(crate) use on::*;

#[cfg(not(feature = "tracing"))]
pub(crate) use off::*;

#[cfg(feature = "tracing")]
mod on {
    use std::fmt::{Debug, Display};
    use std::future::Future;

    use tracing::field::{Empty, display};
    use tracing::{Instrument, info_span};

    use crate::lost_reason::LostReason;

    #[derive(Clone)]
    pub(crate) struct Span(tracing::Span);

    impl Span {
        pub(crate) fn around<F: Future>(&self, work: F) -> impl Future<Output = F::Output> {
            work.instrument(self.0.clone())
        }
    }

    pub(crate) fn wait(name: &impl Display, owner: &impl Display, mode: impl Debug) -> Span {
        Span(info_span!("wait", %name, %owner, ?mode))
    }

    pub(crate) fn hold(
        name: &impl Display,
        owner: &impl Display,
        mode: impl Debug,
        token: u64,
    ) -> Span {
        Span(info_span!("hold", %name, %owner, ?mode, token, lost = Empty))
    }

    pub(crate) fn renew(holds: usize) -> Span {
        Span(info_span!("renew", holds))
    }

    pub(crate) fn release(name: &impl Display, owner: &impl Display, mode: impl Debug) -> Span {
        Span(info_span!("release", %name, %owner, ?mode))
    }

    pub(crate) fn lost(span: &Span, reason: LostReason) {
        span.0.record("lost", display(reason));
    }
}

#[cfg(not(feature = "tracing"))]
mod off {
    use std::fmt::{Debug, Display};
    use std::future::Future;

    use crate::lost_reason::LostReason;

    #[derive(Clone)]
    pub(crate) struct Span;

    impl Span {
        #[expect(clippy::unused_self, reason = "as with the feature")]
        pub(crate) fn around<F: Future>(&self, work: F) -> F {
            work
        }
    }

    pub(crate) fn wait(_name: &impl Display, _owner: &impl Display, _mode: impl Debug) -> Span {
        Span
    }

    pub(crate) fn hold(
        _name: &impl Display,
        _owner: &impl Display,
        _mode: impl Debug,
        _token: u64,
    ) -> Span {
        Span
    }

    pub(crate) fn renew(_holds: usize) -> Span {
        Span
    }

    pub(crate) fn release(_name: &impl Display, _owner: &impl Display, _mode: impl Debug) -> Span {
        Span
    }

    pub(crate) fn lost(_span: &Span, _reason: LostReason) {}
}
