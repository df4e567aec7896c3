//! From bytes to checked values. A client can send any bytes of any length as arguments.

use crate::interface::error::CommandError;
use crate::interface::event::Moment;
use crate::interface::stored_permits::Permits;
use crate::values::ids::SessionRef;
use crate::values::limits::GRACE_MS_MAX;
use crate::values::limits::{INTEGER_MAX, KEYS_MAX, MATCH_LEN_MAX, OWNER_LEN_MAX, SESSION_LEN_MAX};
use crate::values::names::{FENCE_FIELD, MODE_FIELD};
use crate::values::number::integer;
use crate::values::time::{Lease, Wait};
use crate::values::token::Token;
use crate::values::word::Word;

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
    checked(bytes, Lease::from_ms, CommandError::Lease)
}

pub(crate) fn wait(bytes: &[u8]) -> Result<Wait, CommandError> {
    checked(bytes, Wait::from_ms, CommandError::Wait)
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
    let within = |ms| (0..=GRACE_MS_MAX).contains(&ms).then_some(ms);
    checked(bytes, within, CommandError::Grace)
}

pub(crate) fn epoch(bytes: &[u8]) -> Result<u64, CommandError> {
    number(bytes).ok_or(CommandError::Epoch)
}

/// An integer, if a value of this type can be made of it.
#[inline]
fn checked<T>(
    bytes: &[u8],
    make: impl FnOnce(i64) -> Option<T>,
    error: CommandError,
) -> Result<T, CommandError> {
    // Not with `ok_or`: it would drop the error of each argument that is right.
    match integer(bytes).and_then(make) {
        Some(value) => Ok(value),
        None => Err(error),
    }
}

/// A life and the number of an event.
pub(crate) fn moment(life: &[u8], seq: &[u8]) -> Result<Moment, CommandError> {
    let life = number(life).and_then(|life| i64::try_from(life).ok());
    let (life, seq) = life.zip(number(seq)).ok_or(CommandError::After)?;
    Ok(Moment { life, seq })
}

fn number(bytes: &[u8]) -> Option<u64> {
    let number = integer(bytes).filter(|number| *number <= INTEGER_MAX)?;
    u64::try_from(number).ok()
}

pub(crate) fn token(bytes: &[u8]) -> Result<Token, CommandError> {
    checked(bytes, Token::new, CommandError::Token)
}

pub(crate) fn permits(bytes: &[u8]) -> Result<Permits, CommandError> {
    checked(bytes, Permits::new, CommandError::Permits)
}

pub(crate) fn limit(bytes: &[u8]) -> Result<Permits, CommandError> {
    checked(bytes, Permits::new, CommandError::Limit)
}

/// A limit, or 0 for none.
pub(crate) fn limit_or_none(bytes: &[u8]) -> Result<Option<Permits>, CommandError> {
    let limit = |number| match number {
        0 => Some(None),
        _ => Permits::new(number).map(Some),
    };
    checked(bytes, limit, CommandError::LimitToSet)
}

pub(crate) fn key_count(bytes: &[u8]) -> Result<usize, CommandError> {
    let within = |count: &usize| (1..=KEYS_MAX).contains(count);
    let count = |number| usize::try_from(number).ok().filter(within);
    checked(bytes, count, CommandError::KeyCount)
}

pub(crate) fn list_count(bytes: &[u8]) -> Result<usize, CommandError> {
    let within = |number: &i64| (1..=INTEGER_MAX).contains(number);
    let count = |number| Some(number).filter(within)?.try_into().ok();
    checked(bytes, count, CommandError::ListCount)
}

/// A command matches the pattern with every name, so its length is bounded.
pub(crate) fn pattern(bytes: &[u8]) -> Result<&[u8], CommandError> {
    if bytes.len() > MATCH_LEN_MAX {
        return Err(CommandError::MatchLength);
    }
    Ok(bytes)
}
