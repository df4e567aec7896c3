//! Spans for `tracing`, if the feature is on: `wait`, `hold`, `renew`, `release`. All that knows of
//! the feature is in this file.

#[cfg(feature = "tracing")]
pub(crate) use on::*;

#[cfg(not(feature = "tracing"))]
pub(crate) use off::*;

#[cfg(feature = "tracing")]
mod on {
    use std::future::Future;

    use tracing::field::{Empty, display};
    use tracing::{Instrument, info_span};

    use crate::hold::LostReason;
    use crate::owner::Target;

    #[derive(Clone)]
    pub(crate) struct Span(tracing::Span);

    impl Span {
        pub(crate) fn around<F: Future>(&self, work: F) -> impl Future<Output = F::Output> {
            work.instrument(self.0.clone())
        }
    }

    pub(crate) fn wait(target: &Target) -> Span {
        let (name, owner, mode) = (target, target.owner(), target.mode());
        Span(info_span!("wait", %name, %owner, ?mode))
    }

    pub(crate) fn hold(target: &Target, token: u64) -> Span {
        let (name, owner, mode) = (target, target.owner(), target.mode());
        Span(info_span!("hold", %name, %owner, ?mode, token, lost = Empty))
    }

    pub(crate) fn renew(holds: usize) -> Span {
        Span(info_span!("renew", holds))
    }

    pub(crate) fn release(target: &Target) -> Span {
        let (name, owner, mode) = (target, target.owner(), target.mode());
        Span(info_span!("release", %name, %owner, ?mode))
    }

    pub(crate) fn lost(span: &Span, reason: LostReason) {
        span.0.record("lost", display(reason));
    }
}

#[cfg(not(feature = "tracing"))]
mod off {
    use std::future::Future;

    use crate::hold::LostReason;
    use crate::owner::Target;

    #[derive(Clone)]
    pub(crate) struct Span;

    impl Span {
        #[expect(clippy::unused_self, reason = "as with the feature")]
        pub(crate) fn around<F: Future>(&self, work: F) -> F {
            work
        }
    }

    pub(crate) fn wait(_target: &Target) -> Span {
        Span
    }

    pub(crate) fn hold(_target: &Target, _token: u64) -> Span {
        Span
    }

    pub(crate) fn renew(_holds: usize) -> Span {
        Span
    }

    pub(crate) fn release(_target: &Target) -> Span {
        Span
    }

    pub(crate) fn lost(_span: &Span, _reason: LostReason) {}
}
