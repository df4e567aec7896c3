//! Tables, as they are printed and as they stand in `tables.md`, and the targets.

use crate::numbers::Spread;

/// A part's report on its results.
#[derive(Debug, Default)]
pub(crate) struct Report {
    pub(crate) text: String,
    pub(crate) targets: Vec<Target>,
    /// The most important gain and the most important cost, a sentence each.
    pub(crate) gain: Option<String>,
    pub(crate) cost: Option<String>,
}

/// A figure that was to be reached.
#[derive(Debug)]
pub(crate) struct Target {
    what: &'static str,
    wanted: String,
    measured: String,
    outcome: &'static str,
}

impl Report {
    pub(crate) fn titled(title: &str) -> Self {
        Self {
            text: format!("## {title}\n\n"),
            ..Self::default()
        }
    }

    pub(crate) fn says(&mut self, words: &str) {
        self.text.push_str(words);
        self.text.push_str("\n\n");
    }

    pub(crate) fn table(&mut self, head: &[&str], rows: &[Vec<String>]) {
        self.text += &table(head, rows);
        self.text.push('\n');
    }

    pub(crate) fn at_least(&mut self, what: &'static str, wanted: f64, measured: Spread) {
        self.target(what, format!("at least {wanted}"), measured, |value| {
            value >= wanted
        });
    }

    pub(crate) fn at_most(&mut self, what: &'static str, wanted: f64, measured: Spread) {
        self.target(what, format!("at most {wanted}"), measured, |value| {
            value <= wanted
        });
    }

    fn target(
        &mut self,
        what: &'static str,
        wanted: String,
        measured: Spread,
        reached: impl Fn(f64) -> bool,
    ) {
        self.targets.push(Target {
            what,
            wanted,
            measured: measured.to_string(),
            outcome: match measured.median {
                nothing if nothing.is_nan() => "not measured",
                value if reached(value) => "reached",
                _ => "missed",
            },
        });
    }
}

/// All targets in one table.
pub(crate) fn targets(reports: &[Report]) -> String {
    let all = reports.iter().flat_map(|report| &report.targets);
    let rows: Vec<_> = all
        .map(|target| {
            vec![
                target.what.to_owned(),
                target.wanted.clone(),
                target.measured.clone(),
                target.outcome.to_owned(),
            ]
        })
        .collect();
    format!(
        "## Targets\n\n{}\n",
        table(&["", "target", "measured", ""], &rows)
    )
}

/// A table in Markdown whose columns are straight in a terminal as well.
pub(crate) fn table(head: &[&str], rows: &[Vec<String>]) -> String {
    let head: Vec<String> = head.iter().copied().map(str::to_owned).collect();
    let widths: Vec<usize> = (0..head.len())
        .map(|column| {
            let cells = rows.iter().chain([&head]).map(|row| &row[column]);
            cells.map(|cell| cell.chars().count()).max().unwrap_or(0)
        })
        .collect();
    let line = |cells: &[String]| -> String {
        let cells = cells.iter().zip(&widths).enumerate();
        let cells = cells.map(|(column, (cell, width))| {
            // Words to the left, figures to the right.
            if column == 0 {
                format!(" {cell:<width$} |")
            } else {
                format!(" {cell:>width$} |")
            }
        });
        format!("|{}\n", cells.collect::<String>())
    };
    let rule = widths.iter().enumerate().map(|(column, width)| {
        let dashes = "-".repeat(width + 1);
        if column == 0 {
            format!("{dashes}-|")
        } else {
            format!("{dashes}:|")
        }
    });
    let rule = format!("|{}\n", rule.collect::<String>());
    let rows: String = rows.iter().map(|row| line(row)).collect();
    line(&head) + &rule + &rows
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_table_is_markdown_and_straight() {
        let rows = [
            vec!["one".to_owned(), "1".to_owned()],
            vec!["é".to_owned(), "22".to_owned()],
        ];
        let expected = "|     | µs |\n|-----|---:|\n| one |  1 |\n| é   | 22 |\n";
        assert_eq!(table(&["", "µs"], &rows), expected);
    }

    #[test]
    fn a_target_is_reached_or_missed_by_its_median() {
        let mut report = Report::titled("Some");
        let measured = Spread::of(&[0.4, 0.5, 0.9]);
        report.at_least("speed", 0.53, measured);
        report.at_most("cost", 0.53, measured);
        report.at_least("nothing", 0.1, Spread::of(&[]));
        let words: Vec<_> = report.targets.iter().map(|target| target.outcome).collect();
        assert_eq!(words, ["missed", "reached", "not measured"]);
        assert!(targets(&[report]).contains("0.50 (0.40-0.90)"));
    }
}
