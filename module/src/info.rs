//! `INFO rlock`: counters of all past events, and the present numbers of waiters and sessions.

use crate::clock;
use crate::ffi::{self, InfoPage, InfoSection};
use crate::memory::state;
use rlock_core::{Histogram, Locks, Longest, Now, PatternCounters};

/// The section `rlock` of INFO.
pub(crate) struct Section;

impl InfoSection for Section {
    fn fill(page: &InfoPage) {
        let now = clock::now();
        state::with(|state| fill(page, &state.locks, now));
    }
}

fn fill(page: &InfoPage, locks: &Locks, now: Now) {
    let (counters, gauges) = (locks.counters(), locks.gauges());
    let size = |size: usize| u64::try_from(size).unwrap_or(u64::MAX);
    page.number("grants", counters.grants);
    page.number("reentries", counters.reentries);
    page.number("handovers", counters.handovers);
    page.number("grants_taken_back", counters.grants_taken_back);
    page.number("releases", counters.releases);
    page.number("renewals", counters.renewals);
    page.number("renewals_lost", counters.renewals_lost);
    page.number("timeouts", counters.timeouts);
    page.number("cancels", counters.cancels);
    page.number("departures", counters.departures);
    page.number("breaks", counters.breaks);
    page.number("deadlocks_refused", counters.deadlocks_refused);
    page.number("session_releases", counters.session_releases);
    page.number("holds_lost", counters.holds_lost);
    page.number("sessions_overflowed", counters.sessions_overflowed);
    page.number("expiries_noticed", counters.expiries);
    page.number("waiters", size(gauges.waiters));
    page.number("waiters_peak", counters.waiters_peak);
    page.number("locks_waited_for", size(gauges.locks));
    page.number("sessions", size(gauges.sessions));
    page.number("session_holds", size(gauges.session_holds));
    page.number("unacknowledged_events", size(gauges.unacknowledged_events));
    page.number("calls_refused", ffi::calls_refused());
    let delay_ms = locks.grant_delay_left_ms(now);
    page.number("grant_delay_left_ms", u64::try_from(delay_ms).unwrap_or(0));
    longest_now(page, locks.longest(None, now));
    histogram(page, "wait_ms", &counters.wait_ms);
    histogram(page, "hold_ms", &counters.hold_ms);
    for (number, counters) in (1..).zip(locks.pattern_counters()) {
        pattern(page, number, counters, locks.longest(Some(number), now));
    }
}

/// Three lines: the counters of a pattern, and its histograms.
fn pattern(page: &InfoPage, number: usize, counters: &PatternCounters, longest: Longest) {
    page.line(&format!("pattern_{number}"), |page| {
        page.text("pattern", &shown(&counters.pattern));
        page.number("grants", counters.grants);
        page.number("waits", counters.waits);
        page.number("lost", counters.lost);
        longest_now(page, longest);
    });
    histogram(
        page,
        &format!("pattern_{number}_wait_ms"),
        &counters.wait_ms,
    );
    histogram(
        page,
        &format!("pattern_{number}_hold_ms"),
        &counters.hold_ms,
    );
}

fn longest_now(page: &InfoPage, longest: Longest) {
    let ms = |ms: i64| u64::try_from(ms).unwrap_or(0);
    page.number("longest_wait_ms", ms(longest.wait_ms));
    page.number("longest_hold_ms", ms(longest.hold_ms));
}

/// A pattern as a field's value can hold it: a comma would end the value.
fn shown(pattern: &[u8]) -> String {
    let shown = |byte: &u8| match byte {
        b'!'..=b'~' if *byte != b',' => char::from(*byte).to_string(),
        _ => format!("\\x{byte:02x}"),
    };
    pattern.iter().map(shown).collect()
}

/// One line: `le_N`, the number of values not above N; then `count` and `sum`.
fn histogram(page: &InfoPage, name: &str, histogram: &Histogram) {
    page.line(name, |page| {
        for (bound, count) in histogram.buckets() {
            page.number(&format!("le_{bound}"), count);
        }
        page.number("count", histogram.count());
        page.number("sum", histogram.sum());
    });
}
