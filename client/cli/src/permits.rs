//! Permits as they are typed: `2/5` is two of five; a bare `2` leaves the limit to `rlock limit`.

/// The highest limit, and the most permits that one call may ask for.
const MOST: u32 = 2_147_483_647;

/// The permits that `rlock run` asks for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Asked {
    pub(crate) permits: u32,
    /// None: the one that `rlock limit` has set.
    pub(crate) limit: Option<u32>,
}

/// Reads the value of `--permits`; clap shows the error.
pub(crate) fn parse(text: &str) -> Result<Asked, String> {
    let (permits, limit) = match text.split_once('/') {
        Some((permits, limit)) => (permits, Some(limit)),
        None => (text, None),
    };
    let permits = number(permits, 1).map_err(|bounds| format!("N is a number {bounds}"))?;
    let limit = limit.map(|limit| number(limit, 1)).transpose();
    let limit = limit.map_err(|bounds| format!("LIMIT is a number {bounds}"))?;
    if limit.is_some_and(|limit| permits > limit) {
        return Err("N is at most LIMIT".to_owned());
    }
    Ok(Asked { permits, limit })
}

/// Reads the limit to set, 0 for none.
pub(crate) fn parse_limit(text: &str) -> Result<u32, String> {
    number(text, 0).map_err(|bounds| format!("N is a number {bounds}"))
}

/// A number, or the bounds that it is outside of.
fn number(text: &str, least: u32) -> Result<u32, String> {
    // A sign is not a digit.
    let digits = text.bytes().all(|byte| byte.is_ascii_digit());
    let number = text.parse().ok().filter(|_| digits);
    let within = number.filter(|number| (least..=MOST).contains(number));
    within.ok_or_else(|| format!("from {least} to {MOST}"))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn permits_and_their_limit_are_read() {
        let asked = |permits, limit| Ok(Asked { permits, limit });
        for (text, expected) in [
            ("2/5", asked(2, Some(5))),
            ("2", asked(2, None)),
            ("1/1", asked(1, Some(1))),
            ("2147483647/2147483647", asked(MOST, Some(MOST))),
        ] {
            assert_eq!(parse(text), expected, "{text}");
        }
        assert_eq!((parse_limit("0"), parse_limit("8")), (Ok(0), Ok(8)));
    }

    #[test]
    fn what_is_wrong_is_named_with_its_bounds() {
        let within = "is a number from 1 to 2147483647";
        for (text, wrong) in [
            ("", format!("N {within}")),
            ("0/5", format!("N {within}")),
            ("+1/5", format!("N {within}")),
            ("1.5/5", format!("N {within}")),
            ("2147483648/5", format!("N {within}")),
            ("1/", format!("LIMIT {within}")),
            ("1/0", format!("LIMIT {within}")),
            ("1/5/6", format!("LIMIT {within}")),
            ("6/5", "N is at most LIMIT".to_owned()),
        ] {
            assert_eq!(parse(text), Err(wrong), "{text}");
        }
        for text in ["", "-1", "many", "2147483648", "99999999999999999999"] {
            let wrong = "N is a number from 0 to 2147483647".to_owned();
            assert_eq!(parse_limit(text), Err(wrong), "{text}");
        }
    }
}
