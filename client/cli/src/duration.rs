//! Times as they are typed: `500ms`, `30s`, `5m`; a bare number is seconds.

use std::time::Duration;

/// Reads one; clap shows the error.
pub(crate) fn parse(text: &str) -> Result<Duration, String> {
    let digits = text.trim_end_matches(|c: char| c.is_ascii_alphabetic());
    let unit = text.strip_prefix(digits).unwrap_or_default();
    let seconds = match unit {
        "ms" => 0.001,
        "" | "s" => 1.0,
        "m" => 60.0,
        "h" => 3_600.0,
        "d" => 86_400.0,
        _ => return Err(format!("unknown unit {unit:?}: use ms, s, m, h or d")),
    };
    let number: f64 = digits
        .parse()
        .map_err(|_| "write it as 500ms, 30s, 5m or 1.5 (seconds)".to_owned())?;
    Duration::try_from_secs_f64(number * seconds)
        .ok()
        .filter(|time| *time <= LONGEST)
        .ok_or_else(|| "from 0 to 10 years".to_owned())
}

/// The same, of what takes some time.
pub(crate) fn parse_some(text: &str) -> Result<Duration, String> {
    let time = parse(text)?;
    let some = (!time.is_zero()).then_some(time);
    some.ok_or_else(|| "longer than 0, up to 10 years".to_owned())
}

/// As it is typed, for messages.
pub(crate) fn shown(time: Duration) -> String {
    match time.as_millis() {
        ms if ms < 10_000 && ms % 1_000 != 0 => format!("{ms}ms"),
        _ => format!("{}s", time.as_secs_f64()),
    }
}

/// Far below what the server takes as milliseconds, so that sums of times do not overflow.
const LONGEST: Duration = Duration::from_secs(10 * 366 * 86_400);

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn units_and_fractions_are_read() {
        for (text, ms) in [
            ("500ms", 500),
            ("30s", 30_000),
            ("5m", 300_000),
            ("1.5", 1_500),
            ("2h", 7_200_000),
            ("0", 0),
        ] {
            assert_eq!(parse(text), Ok(Duration::from_millis(ms)), "{text}");
        }
    }

    #[test]
    fn what_is_no_time_is_refused() {
        for text in ["", "s", "-1", "5 m", "5w", "nan", "inf", "1e300"] {
            assert!(parse(text).is_err(), "{text}");
        }
        assert!(parse_some("0").is_err());
        assert!(parse_some("1ms").is_ok());
    }
}
