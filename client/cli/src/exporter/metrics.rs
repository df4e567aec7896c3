//! The fields of `INFO rlock` as metrics, in the text format of Prometheus.

use std::collections::BTreeMap;
use std::fmt::Write as _;

/// How a field becomes a metric.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Kind {
    /// `NAME_total`.
    Counter,
    /// As it is.
    Gauge,
    /// Milliseconds, as a gauge in seconds: `NAME` ends in `_ms` and the metric in `_seconds`.
    Time,
}

use Kind::{Counter, Gauge, Time};

/// The fields with one number, each with its kind and its help text.
const FIELDS: &[(&str, Kind, &str)] = &[
    (
        "rlock_grants",
        Counter,
        "Locks given to an owner who did not hold them.",
    ),
    (
        "rlock_reentries",
        Counter,
        "Holds entered once more by their owner.",
    ),
    ("rlock_handovers", Counter, "Grants to a waiter in a queue."),
    (
        "rlock_grants_taken_back",
        Counter,
        "Grants whose waiter left before they were delivered.",
    ),
    ("rlock_releases", Counter, "Holds given back."),
    ("rlock_renewals", Counter, "Renewals that found the hold."),
    (
        "rlock_renewals_lost",
        Counter,
        "Renewals that did not find the hold.",
    ),
    (
        "rlock_timeouts",
        Counter,
        "Waits that ended without the lock.",
    ),
    (
        "rlock_cancels",
        Counter,
        "Waiters taken out of a queue, or taken over.",
    ),
    (
        "rlock_departures",
        Counter,
        "Waiters that left with their connection, or were unblocked.",
    ),
    ("rlock_breaks", Counter, "Locks broken by an operator."),
    (
        "rlock_deadlocks_refused",
        Counter,
        "Waits refused because they could never have ended.",
    ),
    (
        "rlock_session_releases",
        Counter,
        "Holds released because their session ended.",
    ),
    (
        "rlock_holds_lost",
        Counter,
        "Holds that sessions were told they had lost.",
    ),
    (
        "rlock_sessions_overflowed",
        Counter,
        "Sessions that left too many events unacknowledged.",
    ),
    (
        "rlock_expiries_noticed",
        Counter,
        "Leases whose end was noticed while somebody waited.",
    ),
    ("rlock_waiters", Gauge, "Waiters now."),
    (
        "rlock_waiters_peak",
        Gauge,
        "The most waiters there were at once.",
    ),
    (
        "rlock_locks_waited_for",
        Gauge,
        "Locks that somebody waits for now.",
    ),
    ("rlock_sessions", Gauge, "Sessions now."),
    (
        "rlock_session_holds",
        Gauge,
        "Holds that belong to sessions now.",
    ),
    (
        "rlock_unacknowledged_events",
        Gauge,
        "Events that their sessions have not fetched yet.",
    ),
    (
        "rlock_grant_delay_left_ms",
        Time,
        "Time until the server grants locks after its start.",
    ),
    ("rlock_longest_wait_ms", Time, LONGEST_WAIT),
    ("rlock_longest_hold_ms", Time, LONGEST_HOLD),
    (
        "rlock_calls_refused",
        Counter,
        "Calls of the module that the server refused; 0 unless something is wrong.",
    ),
];

/// The parts of a pattern's line.
const PARTS: &[(&str, Kind, &str)] = &[
    (
        "grants",
        Counter,
        "Grants of the locks that match the pattern.",
    ),
    (
        "waits",
        Counter,
        "Waits that began for the locks that match the pattern.",
    ),
    (
        "lost",
        Counter,
        "Holds that were lost of the locks that match the pattern.",
    ),
    ("longest_wait_ms", Time, LONGEST_WAIT),
    ("longest_hold_ms", Time, LONGEST_HOLD),
];

const LONGEST_WAIT: &str = "How long the longest of the present waits has lasted; 0 with none.";
const LONGEST_HOLD: &str =
    "How long the longest of the present holds of sessions has lasted; 0 with none.";

const WAIT: &str = "How long granted waiters had waited.";
const HOLD: &str = "How long locks were held.";

/// The reply of one node.
pub(crate) struct Scrape {
    node: String,
    /// None if it did not answer.
    info: Option<Vec<(String, String)>>,
}

impl Scrape {
    pub(crate) fn of(node: String, info: &str) -> Self {
        let lines = info.lines().filter_map(|line| line.split_once(':'));
        let fields = lines.map(|(field, value)| (field.to_owned(), value.trim().to_owned()));
        let info = Some(fields.collect());
        Self { node, info }
    }

    pub(crate) fn down(node: String) -> Self {
        Self { node, info: None }
    }

    fn fields(&self) -> &[(String, String)] {
        self.info.as_deref().unwrap_or_default()
    }

    fn field(&self, name: &str) -> Option<&str> {
        let mut fields = self.fields().iter();
        fields.find_map(|(field, value)| (field == name).then_some(value.as_str()))
    }

    fn label(&self) -> String {
        label("node", &self.node)
    }
}

/// Metrics by their names: of each its kind, its help, and its lines. All lines of a metric have to
/// stand together.
#[derive(Default)]
struct Page(BTreeMap<String, (&'static str, &'static str, String)>);

impl Page {
    fn add(&mut self, metric: &str, kind: &'static str, help: &'static str, line: &str) {
        let empty = || (kind, help, String::new());
        let (.., lines) = self.0.entry(metric.to_owned()).or_insert_with(empty);
        lines.push_str(line);
        lines.push('\n');
    }

    /// One number.
    fn number(&mut self, metric: &str, kind: Kind, help: &'static str, labels: &str, value: &str) {
        let (metric, kind, value) = match kind {
            Counter => (format!("{metric}_total"), "counter", value.to_owned()),
            Gauge => (metric.to_owned(), "gauge", value.to_owned()),
            Time => (in_seconds(metric), "gauge", seconds(value)),
        };
        self.add(
            &metric,
            kind,
            help,
            &format!("{metric}{{{labels}}} {value}"),
        );
    }

    /// A field `le_1=2,…,count=3,sum=4`, in milliseconds.
    fn histogram(&mut self, field: &str, help: &'static str, labels: &str, value: &str) {
        let metric = in_seconds(field);
        for (part, number) in parts(value) {
            let line = match part {
                "count" => format!(
                    "{metric}_bucket{{{labels},le=\"+Inf\"}} {number}\n\
                     {metric}_count{{{labels}}} {number}"
                ),
                "sum" => format!("{metric}_sum{{{labels}}} {}", seconds(number)),
                _ => {
                    let bound = seconds(part.trim_start_matches("le_"));
                    format!("{metric}_bucket{{{labels},le=\"{bound}\"}} {number}")
                }
            };
            self.add(&metric, "histogram", help, &line);
        }
    }

    fn text(self) -> String {
        let mut text = String::new();
        for (metric, (kind, help, lines)) in self.0 {
            // A string takes it in any case.
            let _ = write!(
                text,
                "# HELP {metric} {help}\n# TYPE {metric} {kind}\n{lines}"
            );
        }
        text
    }
}

/// The whole answer.
pub(crate) fn page(scrapes: &[Scrape]) -> String {
    let mut page = Page::default();
    for scrape in scrapes {
        // A node without the module answers with nothing.
        let up = u8::from(!scrape.fields().is_empty()).to_string();
        let help = "Whether the node answered, with the module loaded.";
        page.number("rlock_up", Gauge, help, &scrape.label(), &up);
        for (field, kind, help) in FIELDS {
            if let Some(value) = scrape.field(field) {
                page.number(field, *kind, help, &scrape.label(), value);
            }
        }
        for (field, help) in [("rlock_wait_ms", WAIT), ("rlock_hold_ms", HOLD)] {
            if let Some(value) = scrape.field(field) {
                page.histogram(field, help, &scrape.label(), value);
            }
        }
        patterns(&mut page, scrape);
    }
    page.text()
}

/// The counts that are kept by pattern of names.
fn patterns(page: &mut Page, scrape: &Scrape) {
    for number in 1.. {
        let field = format!("rlock_pattern_{number}");
        let Some(line) = scrape.field(&field) else {
            return;
        };
        let parts: BTreeMap<_, _> = parts(line).collect();
        let pattern = parts.get("pattern").copied().unwrap_or_default();
        let labels = format!("{},{}", scrape.label(), label("pattern", pattern));
        for (part, kind, help) in PARTS {
            if let Some(value) = parts.get(part) {
                page.number(
                    &format!("rlock_pattern_{part}"),
                    *kind,
                    help,
                    &labels,
                    value,
                );
            }
        }
        for (what, help) in [("wait_ms", WAIT), ("hold_ms", HOLD)] {
            if let Some(value) = scrape.field(&format!("{field}_{what}")) {
                page.histogram(&format!("rlock_pattern_{what}"), help, &labels, value);
            }
        }
    }
}

/// `a=1,b=2`. A value has no comma in it, and may have an equals sign.
fn parts(line: &str) -> impl Iterator<Item = (&str, &str)> {
    line.split(',').filter_map(|part| part.split_once('='))
}

fn in_seconds(field: &str) -> String {
    format!("{}_seconds", field.trim_end_matches("_ms"))
}

/// Milliseconds in seconds, without rounding.
fn seconds(ms: &str) -> String {
    let ms: u64 = ms.parse().unwrap_or_default();
    let text = format!("{}.{:03}", ms / 1_000, ms % 1_000);
    text.trim_end_matches('0').trim_end_matches('.').to_owned()
}

fn label(name: &str, value: &str) -> String {
    let value = value
        .replace('\\', "\\\\")
        .replace('"', "\\\"")
        .replace('\n', "\\n");
    format!("{name}=\"{value}\"")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn lines_of_one_metric_stand_together_and_labels_are_quoted() {
        let info = "# rlock\r\nrlock_grants:7\r\n\
                    rlock_wait_ms:le_1=1,le_1024=2,count=3,sum=2500\r\n\
                    rlock_pattern_1:pattern=a\\x2c=\"b,grants=4,waits=5,lost=6\r\n";
        let nodes = [Scrape::of("a:1".into(), info), Scrape::down("b:2".into())];
        let text = page(&nodes);
        assert!(
            text.contains("rlock_up{node=\"a:1\"} 1\nrlock_up{node=\"b:2\"} 0\n"),
            "{text}"
        );
        assert!(
            text.contains("rlock_grants_total{node=\"a:1\"} 7\n"),
            "{text}"
        );
        assert!(
            text.contains("_bucket{node=\"a:1\",le=\"1.024\"} 2\n"),
            "{text}"
        );
        assert!(
            text.contains("_bucket{node=\"a:1\",le=\"+Inf\"} 3\n"),
            "{text}"
        );
        assert!(
            text.contains("rlock_wait_seconds_sum{node=\"a:1\"} 2.5\n"),
            "{text}"
        );
        let pattern = "rlock_pattern_lost_total{node=\"a:1\",pattern=\"a\\\\x2c=\\\"b\"} 6\n";
        assert!(text.contains(pattern), "{text}");
    }
}
