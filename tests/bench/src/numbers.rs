//! Medians, spreads, and ratios of rounds that were neighbours.

use std::fmt;

/// The value that this part of the values is not above; 0.5 is the median. Nothing of nothing: NaN.
pub(crate) fn quantile(values: &[f64], part: f64) -> f64 {
    let mut sorted = values.to_vec();
    sorted.sort_by(f64::total_cmp);
    quantile_of_sorted(&sorted, part)
}

/// [`quantile`] of many that are in order already.
#[allow(
    clippy::cast_possible_truncation,
    clippy::cast_sign_loss,
    reason = "an index"
)]
pub(crate) fn quantile_of_sorted(sorted: &[f64], part: f64) -> f64 {
    let last = sorted.len().saturating_sub(1);
    let at = (last as f64 * part).round() as usize;
    sorted.get(at).copied().unwrap_or(f64::NAN)
}

pub(crate) fn median(values: &[f64]) -> f64 {
    quantile(values, 0.5)
}

/// A median, with the least and the largest of the values.
#[derive(Debug, Clone, Copy, PartialEq)]
pub(crate) struct Spread {
    pub(crate) median: f64,
    pub(crate) least: f64,
    pub(crate) largest: f64,
}

impl Spread {
    pub(crate) fn of(values: &[f64]) -> Self {
        Self {
            median: median(values),
            least: quantile(values, 0.0),
            largest: quantile(values, 1.0),
        }
    }

    /// The ratios of rounds that were neighbours: what slowed both of them down cancels out.
    pub(crate) fn of_ratios(of: &[f64], to: &[f64]) -> Self {
        let ratios: Vec<f64> = of.iter().zip(to).map(|(of, to)| of / to).collect();
        Self::of(&ratios)
    }
}

/// As ratios are printed: `0.55 (0.53-0.57)`.
impl fmt::Display for Spread {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        if self.median.is_nan() {
            return write!(f, "{}", figure(self.median));
        }
        let (least, largest) = (figure(self.least), figure(self.largest));
        write!(f, "{} ({least}-{largest})", figure(self.median))
    }
}

/// Three digits that count, or whole numbers where there are more.
pub(crate) fn figure(value: f64) -> String {
    if value.is_nan() {
        return "-".to_owned();
    }
    match value.abs() {
        size if size >= 100.0 => format!("{value:.0}"),
        size if size >= 10.0 => format!("{value:.1}"),
        _ => format!("{value:.2}"),
    }
}

/// A count with its thousands apart.
pub(crate) fn count(value: u64) -> String {
    let digits = value.to_string();
    let mut text = String::new();
    for (index, digit) in digits.chars().enumerate() {
        if index > 0 && (digits.len() - index).is_multiple_of(3) {
            text.push(',');
        }
        text.push(digit);
    }
    text
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_quantile_is_one_of_the_values_in_whatever_order_they_come() {
        let values = [5.0, 1.0, 4.0, 2.0, 3.0];
        assert_eq!(
            [0.0, 0.25, 0.5, 1.0].map(|part| quantile(&values, part)),
            [1.0, 2.0, 3.0, 5.0]
        );
        assert_eq!(median(&[7.0]), 7.0);
        assert!(median(&[]).is_nan());
    }

    #[test]
    fn p99_of_a_thousand_leaves_ten_above_it() {
        let values: Vec<f64> = (1..=1000).map(f64::from).collect();
        let p99 = quantile(&values, 0.99);
        assert_eq!(values.iter().filter(|value| **value > p99).count(), 10);
    }

    #[test]
    fn ratios_are_paired_so_a_slow_round_of_both_is_none_of_either() {
        let spread = Spread::of_ratios(&[10.0, 1.0, 30.0], &[20.0, 2.0, 50.0]);
        assert_eq!(spread.median, 0.5);
        assert_eq!((spread.least, spread.largest), (0.5, 0.6));
        assert_eq!(spread.to_string(), "0.50 (0.50-0.60)");
        assert_eq!(Spread::of(&[]).to_string(), "-");
    }

    #[test]
    fn figures_keep_what_counts() {
        assert_eq!(
            [0.1234, 12.34, 123.4, 123_456.7, f64::NAN].map(figure),
            ["0.12", "12.3", "123", "123457", "-"]
        );
        assert_eq!(
            [1, 999, 1_000, 1_234_567].map(count),
            ["1", "999", "1,000", "1,234,567"]
        );
    }
}
