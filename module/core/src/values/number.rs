//! Numbers and words as they are stored: formatted on the stack, and parsed. Every command does
//! this, and the library's formatting takes half as long again.

/// A short text on the stack.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Text<const N: usize = 24> {
    buffer: [u8; N],
    start: usize,
}

/// Numbers are formatted and parsed eight digits at a time: a token has sixteen, and nearly every
/// command formats or parses one.
const EIGHT_DIGITS: u64 = 100_000_000;

/// The eight digits of a number below [`EIGHT_DIGITS`], each in a byte of its own, the first digit
/// in the lowest byte. The number is split into two of four digits, these into four of two digits,
/// and these into eight digits.
fn eight_digits(number: u64) -> u64 {
    let (high, low) = (number / 10_000, number % 10_000);
    let fours = high | (low << 32);
    let hundreds = (fours.wrapping_mul(10_486) >> 20) & 0x0000_007f_0000_007f;
    let twos = hundreds | (fours.wrapping_sub(hundreds.wrapping_mul(100)) << 16);
    let tens = (twos.wrapping_mul(103) >> 10) & 0x000f_000f_000f_000f;
    tens | (twos.wrapping_sub(tens.wrapping_mul(10)) << 8)
}

/// Parses eight characters, if all of them are digits.
fn eight_read(digits: [u8; 8]) -> Option<u32> {
    let text = u64::from_le_bytes(digits);
    let above = text.wrapping_add(0x0606_0606_0606_0606);
    let is_digits = text & HIGH_HALVES == ZEROS && above & HIGH_HALVES == ZEROS;
    let ones = text & 0x0f0f_0f0f_0f0f_0f0f;
    let twos = (ones.wrapping_mul(0x0a01) >> 8) & 0x00ff_00ff_00ff_00ff;
    let fours = (twos.wrapping_mul(0x0064_0001) >> 16) & 0x0000_ffff_0000_ffff;
    let number = fours.wrapping_mul(0x2710_0000_0001) >> 32;
    u32::try_from(number).ok().filter(|_| is_digits)
}

/// Eight characters `0`.
const ZEROS: u64 = 0x3030_3030_3030_3030;
const HIGH_HALVES: u64 = 0xf0f0_f0f0_f0f0_f0f0;

impl Text {
    /// A number in decimal.
    pub fn number(number: i64) -> Self {
        let number_abs = number.unsigned_abs();
        // Eight digits at a time. There are 19 at most, so 24 bytes leave room for a sign.
        let (above, last) = (number_abs / EIGHT_DIGITS, number_abs % EIGHT_DIGITS);
        let (first, middle) = (above / EIGHT_DIGITS, above % EIGHT_DIGITS);
        let (digits, leading, at) = if above == 0 {
            ([0, 0, eight_digits(last)], eight_digits(last), 16)
        } else if first == 0 {
            let middle = eight_digits(middle);
            ([0, middle, eight_digits(last)], middle, 8)
        } else {
            let first = eight_digits(first);
            ([first, eight_digits(middle), eight_digits(last)], first, 0)
        };
        let mut buffer = [0; 24];
        let (eights, _) = buffer.as_chunks_mut::<8>();
        for (place, digits) in eights.iter_mut().zip(digits) {
            *place = (digits | ZEROS).to_le_bytes();
        }
        // The last digit is kept even if it is a zero.
        let leading_zeros = usize::try_from(leading.trailing_zeros() / 8).unwrap_or(7);
        let start = leading_zeros.min(7).saturating_add(at);
        let text = Self { buffer, start };
        if number < 0 { text.after(b'-') } else { text }
    }

    /// A word of at most 24 letters.
    pub(crate) fn word(word: &[u8]) -> Self {
        Self::empty().after_all(word)
    }
}

impl<const N: usize> Text<N> {
    /// The empty text.
    pub(crate) fn empty() -> Self {
        Self {
            buffer: [0; N],
            start: N,
        }
    }

    /// The text with this word before it.
    pub(crate) fn after_all(self, word: &[u8]) -> Self {
        word.iter()
            .rev()
            .fold(self, |text, letter| text.after(*letter))
    }

    /// The text with this character before it.
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

/// Parses an integer in the form that the server itself writes and accepts: no plus sign, no
/// leading zeros, no blanks.
pub fn integer(bytes: &[u8]) -> Option<i64> {
    let (negative, digits) = match bytes {
        [b'-', digits @ ..] => (true, digits),
        digits => (false, digits),
    };
    match digits {
        [b'0'] => return (!negative).then_some(0),
        [] | [b'0', ..] => return None,
        _ => {}
    }
    // Count downwards: the smallest i64 has no positive counterpart. The first 18 digits cannot
    // overflow, and most numbers have no more.
    let (first, rest) = digits.split_at(digits.len().min(DIGITS_THAT_FIT));
    let (eights, others) = first.as_chunks::<8>();
    let mut value: i64 = 0;
    for eight in eights {
        let eight = eight_read(*eight)?;
        value = value.wrapping_mul(100_000_000).wrapping_sub(eight.into());
    }
    for &char in others {
        value = value.wrapping_mul(10).wrapping_sub(digit(char)?);
    }
    for &char in rest {
        value = value.checked_mul(10)?.checked_sub(digit(char)?)?;
    }
    if negative {
        Some(value)
    } else {
        value.checked_neg()
    }
}

/// Any number with this many digits fits into an i64.
const DIGITS_THAT_FIT: usize = 18;

fn digit(char: u8) -> Option<i64> {
    char.is_ascii_digit().then(|| i64::from(char & 0x0f))
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
        for number in (0..EIGHT_DIGITS).step_by(9_973).chain([EIGHT_DIGITS - 1]) {
            let text = format!("{number:08}");
            assert_eq!(
                (eight_digits(number) | ZEROS).to_le_bytes(),
                *text.as_bytes()
            );
            let read = eight_read(*text.as_bytes().first_chunk().unwrap());
            assert_eq!(read.map(u64::from), Some(number));
        }
        for byte in (0..=u8::MAX).filter(|byte| !byte.is_ascii_digit()) {
            for at in 0..8 {
                let mut text = *b"12345678";
                text[at] = byte;
                assert_eq!(eight_read(text), None, "{}", text.escape_ascii());
            }
        }
        assert_eq!(Text::number(17).after(b't').bytes(), b"t17");
        assert_eq!(Text::word(b"write").bytes(), b"write");
    }
}
