//! Glob-style patterns over bytes, as the server's KEYS and SCAN match them.

/// A compiled pattern, to be matched against any number of names: `*`, `?`, `[abc]`, `[a-z]`,
/// `[^a]`, and `\` before a literal byte.
///
/// The server does nothing else while names are matched, and the caller of a command chooses the
/// pattern, so the time must not depend on the pattern's content. All positions in the pattern that
/// a name can have reached are bits, 64 in a word, and each byte of the name moves all of them at
/// once.
#[derive(Clone, Debug)]
pub struct Glob {
    /// How many words the bits of all positions take.
    words: usize,
    /// How many elements the pattern has besides its stars. The position behind the last element is
    /// the end.
    elements: usize,
    /// For each byte value, the positions whose element accepts it. The name moves one position on
    /// from there.
    takes: Box<[u64]>,
    /// The positions with a star before them: any byte of the name leaves it there.
    stays: Box<[u64]>,
}

/// The bytes that an element of a pattern accepts.
type Bytes = [bool; 256];

impl Glob {
    /// Compiles a pattern. Every text is a valid pattern.
    pub fn new(pattern: &[u8]) -> Self {
        let words = word(pattern.len()).saturating_add(1);
        let mut glob = Self {
            words,
            elements: 0,
            takes: vec![0; words.saturating_mul(256)].into(),
            stays: vec![0; words].into(),
        };
        let mut left = pattern;
        while let [first, rest @ ..] = left {
            if *first == b'*' {
                set(&mut glob.stays, glob.elements);
                left = rest;
            } else {
                let (bytes, rest) = element(left);
                glob.add(&bytes);
                left = rest;
            }
        }
        glob
    }

    fn add(&mut self, bytes: &Bytes) {
        let rows = self.takes.chunks_exact_mut(self.words);
        for (row, _) in rows.zip(bytes).filter(|(_, taken)| **taken) {
            set(row, self.elements);
        }
        self.elements = self.elements.saturating_add(1);
    }

    /// Whether the whole `text` matches. Takes at most one step for each byte of the text and each
    /// word of 64 positions.
    pub fn matches(&self, text: &[u8]) -> bool {
        self.matches_counted(text, || ())
    }

    fn matches_counted(&self, text: &[u8], mut step: impl FnMut()) -> bool {
        let mut places = vec![0; self.words];
        set(&mut places, 0);
        for &byte in text {
            let row = self.takes.chunks_exact(self.words).nth(byte.into());
            let (mut carried, mut any) = (0, 0);
            let rows = row.unwrap_or_default().iter().zip(&self.stays);
            for (at, (takes, stays)) in places.iter_mut().zip(rows) {
                step();
                let moved = *at & takes;
                *at = moved << 1 | carried | *at & stays;
                carried = moved >> 63;
                any |= *at;
            }
            if any == 0 {
                return false;
            }
        }
        let end = places.get(word(self.elements)).copied();
        end.unwrap_or_default() >> (self.elements % 64) & 1 == 1
    }
}

fn word(place: usize) -> usize {
    place / 64
}

fn set(places: &mut [u64], place: usize) {
    if let Some(bits) = places.get_mut(word(place)) {
        *bits |= 1 << (place % 64);
    }
}

/// The bytes that the first element of a pattern accepts, and the rest of the pattern. The pattern
/// must not be empty.
fn element(pattern: &[u8]) -> (Bytes, &[u8]) {
    let mut bytes = [false; 256];
    match pattern {
        [b'?', rest @ ..] => ([true; 256], rest),
        [b'[', b'^', class @ ..] => {
            let rest = class_of(class, &mut bytes);
            (bytes.map(|taken| !taken), rest)
        }
        [b'[', class @ ..] => {
            let rest = class_of(class, &mut bytes);
            (bytes, rest)
        }
        [b'\\', literal, rest @ ..] | [literal, rest @ ..] => {
            take(&mut bytes, *literal, *literal);
            (bytes, rest)
        }
        [] => (bytes, pattern),
    }
}

/// Adds the bytes of a class, behind its opening bracket, and returns the rest of the pattern
/// behind the class. A class without a closing bracket reaches to the end of the pattern.
fn class_of<'a>(mut class: &'a [u8], bytes: &mut Bytes) -> &'a [u8] {
    loop {
        class = match class {
            [] => return class,
            [b']', rest @ ..] => return rest,
            [b'\\', literal, rest @ ..] => {
                take(bytes, *literal, *literal);
                rest
            }
            [low, b'-', high, rest @ ..] => {
                take(bytes, *low.min(high), *low.max(high));
                rest
            }
            [literal, rest @ ..] => {
                take(bytes, *literal, *literal);
                rest
            }
        };
    }
}

fn take(bytes: &mut Bytes, low: u8, high: u8) {
    for byte in low..=high {
        if let Some(taken) = bytes.get_mut(usize::from(byte)) {
            *taken = true;
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::values::limits::MATCH_LEN_MAX;

    /// What once took as many steps as pattern and name have bytes, multiplied.
    #[test]
    fn the_worst_pattern_takes_a_step_for_64_bytes_of_it_and_a_byte_of_the_name() {
        let name = [b'a'; 4096];
        let long = |part: &[u8], end: &[u8]| {
            let mut pattern = part.repeat(MATCH_LEN_MAX);
            pattern.truncate(MATCH_LEN_MAX - end.len());
            [&pattern, end].concat()
        };
        for pattern in [
            long(b"a*", b"b"),
            long(b"*", b"b"),
            long(b"?", b"*b"),
            [&b"*"[..], &long(b"a", b"b")[1..]].concat(),
            long(b"*[a-y]", b"z"),
            [&b"*["[..], &long(b"bcdefghi", b"a]")[2..]].concat(),
        ] {
            let glob = Glob::new(&pattern);
            let mut steps = 0;
            glob.matches_counted(&name, || steps += 1);
            let shown = pattern.escape_ascii();
            assert!(steps <= name.len() * 17, "{steps} steps: {shown}");
        }
    }

    #[test]
    fn a_name_that_begins_otherwise_is_not_read_to_its_end() {
        let mut steps = 0;
        assert!(!Glob::new(b"orders:*").matches_counted(&[b's'; 4096], || steps += 1));
        assert_eq!(steps, 1);
    }
}
