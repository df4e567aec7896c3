//! The metrics, if the feature is on: by [OpenTelemetry]'s interface and after its conventions. No
//! other file knows of the feature.
//!
//! [OpenTelemetry]: https://opentelemetry.io
#![cfg_attr(
    not(feature = "metrics"),
    expect(unused_variables, reason = "nothing is measured")
)]

#[cfg(feature = "metrics")]
use opentelemetry::{
    KeyValue, global,
    metrics::{Counter, Histogram},
};
use tokio::time::Instant;

use crate::error::LostReason;

#[cfg(feature = "metrics")]
struct Instruments {
    waits: Histogram<f64>,
    holds: Histogram<f64>,
    lost: Counter<u64>,
    renewals: Counter<u64>,
    reconnects: Counter<u64>,
}

/// Instruments of the meter provider that is the global one at the first measurement.
#[cfg(feature = "metrics")]
static INSTRUMENTS: std::sync::LazyLock<Instruments> = std::sync::LazyLock::new(|| {
    let meter = global::meter("rlock");
    let seconds = |name, what| {
        let histogram = meter.f64_histogram(name).with_unit("s");
        histogram.with_description(what).build()
    };
    let count = |name, unit, what| {
        let counter = meter.u64_counter(name).with_unit(unit);
        counter.with_description(what).build()
    };
    let waits = "How long lock() and its siblings took, with a lock at their end or without.";
    let holds = "From a grant until its last guard has given it back.";
    let lost = "Holds that were lost, by `rlock.reason`.";
    let renewals = "Answers to renewals, by `rlock.outcome`: `held`, `lost` or `error`.";
    let reconnects = "Times at which the session connection was there again.";
    Instruments {
        waits: seconds("rlock.client.wait.duration", waits),
        holds: seconds("rlock.client.hold.duration", holds),
        lost: count("rlock.client.lost", "{hold}", lost),
        renewals: count("rlock.client.renewals", "{renewal}", renewals),
        reconnects: count("rlock.client.reconnects", "{connection}", reconnects),
    }
});

/// A call that waited has ended, with the lock or without.
pub(crate) fn waited(since: Instant) {
    #[cfg(feature = "metrics")]
    INSTRUMENTS.waits.record(since.elapsed().as_secs_f64(), &[]);
}

/// The last guard gives back a hold that was asked for then.
pub(crate) fn held(since: Instant) {
    #[cfg(feature = "metrics")]
    INSTRUMENTS.holds.record(since.elapsed().as_secs_f64(), &[]);
}

pub(crate) fn lost(reason: LostReason) {
    #[cfg(feature = "metrics")]
    {
        let reason = KeyValue::new("rlock.reason", format!("{reason:?}"));
        INSTRUMENTS.lost.add(1, &[reason]);
    }
}

/// A renewal was answered, with whether it is held; or it was not.
pub(crate) fn renewed(held: Option<bool>) {
    #[cfg(feature = "metrics")]
    {
        let outcome = held.map_or("error", |held| if held { "held" } else { "lost" });
        let outcome = KeyValue::new("rlock.outcome", outcome);
        INSTRUMENTS.renewals.add(1, &[outcome]);
    }
}

pub(crate) fn reconnected() {
    #[cfg(feature = "metrics")]
    INSTRUMENTS.reconnects.add(1, &[]);
}
