//! Glob-style patterns over bytes, as the server's KEYS and SCAN match them.

/// Whether `text` matches `pattern`: `*`, `?`, `[abc]`, `[a-z]`, `[^a]`, and `\` before a literal
/// byte.
///
/// Takes at most `pattern.len() * text.len()` steps: after a mismatch only the latest `*` is
/// widened, since whatever an earlier one could take over, the latest can too.
pub fn glob_matches(pattern: &[u8], text: &[u8]) -> bool {
    let (mut pattern_at, mut text_at) = (pattern, text);
    let mut star: Option<(&[u8], &[u8])> = None;
    loop {
        if let [b'*', rest @ ..] = pattern_at {
            pattern_at = rest;
            star = Some((rest, text_at));
            continue;
        }
        match (text_at, one(pattern_at, text_at.first().copied())) {
            ([], _) if pattern_at.is_empty() => return true,
            ([_, text_rest @ ..], Some(pattern_rest)) => {
                (pattern_at, text_at) = (pattern_rest, text_rest);
            }
            _ => match star {
                Some((after_star, [_, widened @ ..])) => {
                    star = Some((after_star, widened));
                    (pattern_at, text_at) = (after_star, widened);
                }
                _ => return false,
            },
        }
    }
}

/// What is left of the pattern if its first element matches this byte.
fn one(pattern: &[u8], byte: Option<u8>) -> Option<&[u8]> {
    let byte = byte?;
    match pattern {
        [b'?', rest @ ..] => Some(rest),
        [b'[', class @ ..] => one_of(class, byte),
        [b'\\', literal, rest @ ..] | [literal, rest @ ..] => (*literal == byte).then_some(rest),
        [] => None,
    }
}

/// The same for a class, whose opening bracket is gone. One that is never closed reaches to the
/// end.
fn one_of(class: &[u8], byte: u8) -> Option<&[u8]> {
    let (negated, mut class) = match class {
        [b'^', rest @ ..] => (true, rest),
        _ => (false, class),
    };
    let mut found = false;
    let rest = loop {
        class = match class {
            [] => break class,
            [b']', rest @ ..] => break rest,
            [b'\\', literal, rest @ ..] => {
                found |= *literal == byte;
                rest
            }
            [low, b'-', high, rest @ ..] => {
                found |= (*low.min(high)..=*low.max(high)).contains(&byte);
                rest
            }
            [literal, rest @ ..] => {
                found |= *literal == byte;
                rest
            }
        };
    };
    (found != negated).then_some(rest)
}
