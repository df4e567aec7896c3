//! From bytes to checked values. Arguments are whatever a client sends: any bytes, any length.

use crate::error::Word;
use crate::request::SessionRef;
use crate::text::eight_read;
use crate::{
    CommandError, FENCE_FIELD, GRACE_MS_MAX, INTEGER_MAX, KEYS_MAX, Lease, MATCH_LEN_MAX,
    MODE_FIELD, OWNER_LEN_MAX, Permits, SESSION_LEN_MAX, Token, Wait,
};

/// The arguments of a command, read from left to right.
pub(crate) struct Arguments<I>(I);

impl<'a, I: Iterator<Item = &'a [u8]>> Arguments<I> {
    pub(crate) fn new(args: I) -> Self {
        Self(args)
    }

    /// The next required argument.
    pub(crate) fn next(&mut self) -> Result<&'a [u8], CommandError> {
        // Not with `ok_or`: each argument would make a refusal, and drop it.
        match self.0.next() {
            Some(arg) => Ok(arg),
            None => Err(CommandError::WrongArity),
        }
    }

    /// The next option's word, if there is one.
    pub(crate) fn option(&mut self) -> Option<&'a [u8]> {
        self.0.next()
    }

    /// The value that must follow an option's word.
    pub(crate) fn value(&mut self, word: &[u8]) -> Result<&'a [u8], CommandError> {
        self.0
            .next()
            .ok_or_else(|| CommandError::MissingValue(Word::new(word)))
    }

    /// No option may follow.
    pub(crate) fn no_option(mut self) -> Result<(), CommandError> {
        self.0.next().map_or(Ok(()), |word| Err(unknown(word)))
    }

    /// Nothing may be left.
    pub(crate) fn finish(mut self) -> Result<(), CommandError> {
        self.0
            .next()
            .map_or(Ok(()), |_| Err(CommandError::WrongArity))
    }
}

/// An option that may be given once.
pub(crate) struct Once<T>(Option<T>);

impl<T> Once<T> {
    pub(crate) fn new() -> Self {
        Self(None)
    }

    /// Takes the option's value; a second time is an error, whatever the value.
    pub(crate) fn set(
        &mut self,
        word: &[u8],
        value: Result<T, CommandError>,
    ) -> Result<(), CommandError> {
        if self.0.is_some() {
            return Err(repeated(word));
        }
        self.0 = Some(value?);
        Ok(())
    }

    pub(crate) fn get(self) -> Option<T> {
        self.0
    }

    pub(crate) fn is_set(&self) -> bool {
        self.0.is_some()
    }
}

pub(crate) fn unknown(word: &[u8]) -> CommandError {
    CommandError::UnknownOption(Word::new(word))
}

pub(crate) fn repeated(word: &[u8]) -> CommandError {
    CommandError::RepeatedOption(Word::new(word))
}

pub(crate) fn owner(bytes: &[u8]) -> Result<&[u8], CommandError> {
    if bytes.is_empty() || bytes.len() > OWNER_LEN_MAX {
        return Err(CommandError::OwnerLength);
    }
    if bytes == FENCE_FIELD || bytes == MODE_FIELD {
        return Err(CommandError::OwnerReserved);
    }
    Ok(bytes)
}

pub(crate) fn lease(bytes: &[u8]) -> Result<Lease, CommandError> {
    integer(bytes)
        .and_then(Lease::from_ms)
        .ok_or(CommandError::Lease)
}

pub(crate) fn wait(bytes: &[u8]) -> Result<Wait, CommandError> {
    integer(bytes)
        .and_then(Wait::from_ms)
        .ok_or(CommandError::Wait)
}

pub(crate) fn session(bytes: &[u8]) -> Result<SessionRef<'_>, CommandError> {
    let fits = (1..=SESSION_LEN_MAX).contains(&bytes.len());
    if fits {
        Ok(bytes.into())
    } else {
        Err(CommandError::SessionLength)
    }
}

pub(crate) fn grace(bytes: &[u8]) -> Result<i64, CommandError> {
    integer(bytes)
        .filter(|ms| (0..=GRACE_MS_MAX).contains(ms))
        .ok_or(CommandError::Grace)
}

pub(crate) fn token(bytes: &[u8]) -> Result<Token, CommandError> {
    integer(bytes)
        .and_then(Token::new)
        .ok_or(CommandError::Token)
}

pub(crate) fn permits(bytes: &[u8]) -> Result<Permits, CommandError> {
    integer(bytes)
        .and_then(Permits::new)
        .ok_or(CommandError::Permits)
}

pub(crate) fn limit(bytes: &[u8]) -> Result<Permits, CommandError> {
    integer(bytes)
        .and_then(Permits::new)
        .ok_or(CommandError::Limit)
}

/// A limit, or 0 for none.
pub(crate) fn limit_or_none(bytes: &[u8]) -> Result<Option<Permits>, CommandError> {
    match integer(bytes) {
        Some(0) => Ok(None),
        Some(number) => Permits::new(number)
            .map(Some)
            .ok_or(CommandError::LimitToSet),
        None => Err(CommandError::LimitToSet),
    }
}

pub(crate) fn key_count(bytes: &[u8]) -> Result<usize, CommandError> {
    integer(bytes)
        .and_then(|count| usize::try_from(count).ok())
        .filter(|count| (1..=KEYS_MAX).contains(count))
        .ok_or(CommandError::KeyCount)
}

pub(crate) fn list_count(bytes: &[u8]) -> Result<usize, CommandError> {
    integer(bytes)
        .filter(|count| (1..=INTEGER_MAX).contains(count))
        .and_then(|count| usize::try_from(count).ok())
        .ok_or(CommandError::ListCount)
}

/// The bound keeps small what a command costs that holds it against every name.
pub(crate) fn pattern(bytes: &[u8]) -> Result<&[u8], CommandError> {
    if bytes.len() > MATCH_LEN_MAX {
        return Err(CommandError::MatchLength);
    }
    Ok(bytes)
}

/// An integer as the server itself writes and accepts it: no sign but a minus, no leading zeros, no
/// blanks.
pub(crate) fn integer(bytes: &[u8]) -> Option<i64> {
    let (negative, digits) = match bytes {
        [b'-', digits @ ..] => (true, digits),
        digits => (false, digits),
    };
    match digits {
        [b'0'] => return (!negative).then_some(0),
        [] | [b'0', ..] => return None,
        _ => {}
    }
    // Counting downwards, because the smallest i64 has no positive twin. The first digits cannot
    // overflow, and of most numbers those are all.
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

/// A number of so many digits is an i64.
const DIGITS_THAT_FIT: usize = 18;

fn digit(char: u8) -> Option<i64> {
    char.is_ascii_digit().then(|| i64::from(char & 0x0f))
}
