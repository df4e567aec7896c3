//! Numbers and words as they are stored, on the stack. Every command does this, and the library's
//! formatting takes half as long again.

/// A short text.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Text<const N: usize = 24> {
    buffer: [u8; N],
    start: usize,
}

/// The numbers from 0 to 99, in two digits each.
#[allow(clippy::indexing_slicing, reason = "the compiler runs it")]
const PAIRS: [[u8; 2]; 100] = {
    let (mut pairs, mut tens, mut at) = ([[b'0'; 2]; 100], b'0', 0);
    while tens <= b'9' {
        let mut ones = b'0';
        while ones <= b'9' {
            pairs[at] = [tens, ones];
            (ones, at) = (ones + 1, at + 1);
        }
        tens += 1;
    }
    pairs
};

impl Text {
    /// A number in decimal.
    pub fn number(number: i64) -> Self {
        let (mut buffer, mut start) = ([0; 24], 0);
        let mut rest = number.unsigned_abs();
        // Two digits at a time, from the last on. There are 19 at most, so there is room before
        // them.
        let (pairs, _) = buffer.as_chunks_mut::<2>();
        for (at, place) in pairs.iter_mut().enumerate().rev() {
            let pair = usize::try_from(rest % 100).ok();
            *place = *pair.and_then(|pair| PAIRS.get(pair)).unwrap_or(b"00");
            rest /= 100;
            if rest == 0 {
                let leading_zero = usize::from(place[0] == b'0');
                start = at.saturating_mul(2).saturating_add(leading_zero);
                break;
            }
        }
        let text = Self { buffer, start };
        if number < 0 { text.after(b'-') } else { text }
    }

    /// A word of at most 24 letters.
    pub(crate) fn word(word: &[u8]) -> Self {
        Self::empty().after_all(word)
    }
}

impl<const N: usize> Text<N> {
    /// No text.
    pub fn empty() -> Self {
        Self {
            buffer: [0; N],
            start: N,
        }
    }

    /// The same with these before it.
    pub(crate) fn after_all(self, word: &[u8]) -> Self {
        word.iter()
            .rev()
            .fold(self, |text, letter| text.after(*letter))
    }

    /// The same with this before it.
    pub(crate) fn after(mut self, char: u8) -> Self {
        self.start = self.start.saturating_sub(1);
        if let Some(place) = self.buffer.get_mut(self.start) {
            *place = char;
        }
        self
    }

    /// The text's bytes.
    pub fn bytes(&self) -> &[u8] {
        self.buffer.get(self.start..).unwrap_or_default()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn texts_are_what_the_library_writes() {
        for number in [
            0,
            1,
            9,
            10,
            99,
            100,
            101,
            1_000,
            -1,
            -10,
            1_795_000_000_000_000,
            i64::MAX,
            i64::MIN,
        ] {
            assert_eq!(Text::number(number).bytes(), number.to_string().as_bytes());
        }
        assert_eq!(Text::number(17).after(b't').bytes(), b"t17");
        assert_eq!(Text::word(b"write").bytes(), b"write");
    }
}
