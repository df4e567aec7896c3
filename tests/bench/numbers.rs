//! Medians and how they are printed.

/// The value that this part of the values is not above; 0.5 is the median.
pub(crate) fn quantile(values: &[f64], part: f64) -> f64 {
    let mut sorted = values.to_vec();
    sorted.sort_by(f64::total_cmp);
    let last = sorted.len().saturating_sub(1);
    #[allow(
        clippy::cast_possible_truncation,
        clippy::cast_sign_loss,
        reason = "an index"
    )]
    let at = (last as f64 * part).round() as usize;
    sorted.get(at).copied().unwrap_or(f64::NAN)
}

pub(crate) fn median(values: &[f64]) -> f64 {
    quantile(values, 0.5)
}

/// The median of the paired ratios, and the least and the largest of them.
pub(crate) fn ratio(of: &[f64], to: &[f64]) -> String {
    let ratios: Vec<f64> = of.iter().zip(to).map(|(of, to)| of / to).collect();
    let (low, high) = (quantile(&ratios, 0.0), quantile(&ratios, 1.0));
    format!("{:.2} ({low:.2}-{high:.2})", median(&ratios))
}

/// The indexes of contenders in the order of this round: to and fro, so that nobody always runs
/// after the same neighbour.
pub(crate) fn order(contenders: usize, round: usize) -> Vec<usize> {
    let mut order: Vec<usize> = (0..contenders).collect();
    if round % 2 == 1 {
        order.reverse();
    }
    order
}
