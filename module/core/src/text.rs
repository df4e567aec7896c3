//! Numbers and words as they are stored, on the stack: the library's formatting takes half as long
//! again, and this is the path of every command.

/// A short text.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Text {
    buffer: [u8; 24],
    start: usize,
}

impl Text {
    /// A number in decimal.
    pub fn number(number: i64) -> Self {
        let (mut buffer, mut start) = ([0; 24], 0);
        let mut rest = number.unsigned_abs();
        // From the last digit on. There are 19 at most, so there is room before them.
        for (at, place) in buffer.iter_mut().enumerate().rev() {
            let [digit, ..] = (rest % 10).to_le_bytes();
            *place = b'0' | digit;
            rest /= 10;
            if rest == 0 {
                start = at;
                break;
            }
        }
        let text = Self { buffer, start };
        if number < 0 { text.after(b'-') } else { text }
    }

    /// A word of at most 24 letters.
    pub(crate) fn word(word: &[u8]) -> Self {
        let empty = Self {
            buffer: [0; 24],
            start: 24,
        };
        word.iter()
            .rev()
            .fold(empty, |text, letter| text.after(*letter))
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
