//! `INFO rlock`: counters of all past events, and the present numbers of waiters and sessions.

use crate::clock;
use crate::ffi::{self, InfoPage, InfoSection};
use crate::memory::state;
use rlock_core::{Histogram, Longest, PatternCounters};
use std::ffi::{CStr, CString};
use std::fmt::Write as _;

/// The section `rlock` of INFO.
pub(crate) struct Section;

impl InfoSection for Section {
    fn fill(page: &InfoPage) {
        let now = clock::now();
        let (counters, gauges, delay_ms, longest, patterns) = state::with(|state| {
            let locks = &state.locks;
            let delay_ms = locks.grant_delay_left_ms(now);
            let patterns = locks.pattern_counters().to_vec();
            let patterns = patterns.into_iter().zip(locks.longest_by_pattern(now));
            let patterns: Vec<_> = patterns.collect();
            let longest = locks.longest(now);
            (
                *locks.counters(),
                locks.gauges(),
                delay_ms,
                longest,
                patterns,
            )
        });
        let size = |size: usize| u64::try_from(size).unwrap_or(u64::MAX);
        page.number(c"grants", counters.grants);
        page.number(c"reentries", counters.reentries);
        page.number(c"handovers", counters.handovers);
        page.number(c"grants_taken_back", counters.grants_taken_back);
        page.number(c"releases", counters.releases);
        page.number(c"renewals", counters.renewals);
        page.number(c"renewals_lost", counters.renewals_lost);
        page.number(c"timeouts", counters.timeouts);
        page.number(c"cancels", counters.cancels);
        page.number(c"departures", counters.departures);
        page.number(c"breaks", counters.breaks);
        page.number(c"deadlocks_refused", counters.deadlocks_refused);
        page.number(c"session_releases", counters.session_releases);
        page.number(c"holds_lost", counters.holds_lost);
        page.number(c"sessions_overflowed", counters.sessions_overflowed);
        page.number(c"expiries_noticed", counters.expiries);
        page.number(c"waiters", size(gauges.waiters));
        page.number(c"waiters_peak", counters.waiters_peak);
        page.number(c"locks_waited_for", size(gauges.locks));
        page.number(c"sessions", size(gauges.sessions));
        page.number(c"session_holds", size(gauges.session_holds));
        page.number(c"unacknowledged_events", size(gauges.unacknowledged_events));
        page.number(c"calls_refused", ffi::calls_refused());
        page.number(c"grant_delay_left_ms", u64::try_from(delay_ms).unwrap_or(0));
        longest_now(page, longest);
        histogram(page, c"wait_ms", &counters.wait_ms);
        histogram(page, c"hold_ms", &counters.hold_ms);
        for (number, (counters, longest)) in (1..).zip(&patterns) {
            pattern(page, number, counters, *longest);
        }
    }
}

/// Three lines: the counters of a pattern, and its histograms.
fn pattern(page: &InfoPage, number: u32, counters: &PatternCounters, longest: Longest) {
    let name = |what: &str| CString::new(format!("pattern_{number}{what}")).unwrap_or_default();
    page.line(&name(""), |page| {
        page.text(c"pattern", &shown(&counters.pattern));
        page.number(c"grants", counters.grants);
        page.number(c"waits", counters.waits);
        page.number(c"lost", counters.lost);
        longest_now(page, longest);
    });
    histogram(page, &name("_wait_ms"), &counters.wait_ms);
    histogram(page, &name("_hold_ms"), &counters.hold_ms);
}

fn longest_now(page: &InfoPage, longest: Longest) {
    let ms = |ms: i64| u64::try_from(ms).unwrap_or(0);
    page.number(c"longest_wait_ms", ms(longest.wait_ms));
    page.number(c"longest_hold_ms", ms(longest.hold_ms));
}

/// A pattern as a field's value can hold it: a comma would end the value.
fn shown(pattern: &[u8]) -> CString {
    let mut shown = String::new();
    for byte in pattern {
        match byte {
            b'!'..=b'~' if *byte != b',' => shown.push(char::from(*byte)),
            _ => {
                let _ = write!(shown, "\\x{byte:02x}");
            }
        }
    }
    CString::new(shown).unwrap_or_default()
}

/// One line: `le_N`, the number of values not above N; then `count` and `sum`.
fn histogram(page: &InfoPage, name: &CStr, histogram: &Histogram) {
    page.line(name, |page| {
        for (bound, count) in histogram.buckets() {
            page.number(
                &CString::new(format!("le_{bound}")).unwrap_or_default(),
                count,
            );
        }
        page.number(c"count", histogram.count());
        page.number(c"sum", histogram.sum());
    });
}
