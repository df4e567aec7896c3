//! Permits in the keyspace: the hash with a field for each holder, and the key of the limit.
//!
//! The lease of a holder is in its field. So the hash is the only key of the holders, and moves, is
//! renamed and is copied with them. A field that does not parse was written by another client, and
//! is no hold.

use crate::interface::depth::ReadDepth;
use crate::values::limits::{INTEGER_MAX, PERMITS_MAX};
use crate::values::names::{FENCE_FIELD, MODE_FIELD, PERMITS_MODE};
use crate::values::number::{self, Text};
use crate::values::time::{NEVER, Now, ttl_ms};
use crate::values::token::Token;
use std::num::NonZeroU32;

/// A number of permits, or a limit of them: 1 to 2^31 - 1.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Permits(NonZeroU32);

impl Permits {
    /// This number of permits, if it is within the bounds.
    pub fn new(number: i64) -> Option<Self> {
        let number = (1..=PERMITS_MAX).contains(&number).then_some(number)?;
        NonZeroU32::new(u32::try_from(number).ok()?).map(Self)
    }

    /// The number.
    pub fn get(self) -> i64 {
        self.0.get().into()
    }

    /// Parses the value of a limit's key. Another client wrote any value that is not a limit: then
    /// no limit is set.
    pub fn from_limit(value: &[u8]) -> Option<Self> {
        number::integer(value).and_then(Self::new)
    }
}

/// A caller's request for permits.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct PermitsRequest {
    /// The number of permits.
    pub permits: Permits,
    /// The limit that the caller names. It counts if no limit is set.
    pub limit: Option<Permits>,
}

/// An owner's hold of permits, as it is stored in the owner's field.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct PermitsHold {
    /// The number of permits.
    pub permits: Permits,
    /// When its lease ends, in milliseconds of the wall clock.
    pub ends_at: i64,
    /// Its token.
    pub token: Token,
}

/// No lease that we write ends later than this.
const END_MAX: i64 = 2 * INTEGER_MAX;

impl PermitsHold {
    /// Parses the value of an owner's field: `<permits>:<end of the lease>:t<token>`.
    pub fn from_field(value: &[u8]) -> Option<Self> {
        let mut parts = value.splitn(3, |byte| *byte == b':');
        let permits = number::integer(parts.next()?).and_then(Permits::new)?;
        let ends_at = number::integer(parts.next()?)?;
        let token = Token::from_field(parts.next()?)?;
        (1..=END_MAX).contains(&ends_at).then_some(Self {
            permits,
            ends_at,
            token,
        })
    }

    /// The value as it is stored: three numbers, two separators, and a `t`.
    pub fn text(&self) -> Text<52> {
        Text::empty()
            .after_all(Text::number(self.token.get()).bytes())
            .after_all(b":t")
            .after_all(Text::number(self.ends_at).bytes())
            .after(b':')
            .after_all(Text::number(self.permits.get()).bytes())
    }

    /// Whether its lease is over. It is over when the clock is past its end, not when the clock has
    /// reached it, as a key expires.
    pub fn is_over(&self, now: Now) -> bool {
        self.ends_at < now.wall_ms()
    }

    /// The same hold with this end of its lease.
    pub(crate) fn ending(self, ends_at: i64) -> Self {
        Self { ends_at, ..self }
    }
}

/// Whether there is room for the permits that were asked for.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Room {
    /// No permits were asked for, or not all holds were read.
    #[default]
    Unknown,
    /// No limit is set, and the caller named none.
    NoLimit,
    /// Enough permits are free.
    Now,
    /// Enough permits will be free at this moment, in milliseconds of the wall clock, if no holder
    /// renews.
    At(i64),
    /// There never will be enough.
    Never,
}

impl Room {
    /// When enough permits will be free; none if never, or if they are now.
    pub(crate) fn at(self) -> Option<i64> {
        match self {
            Self::At(end) => Some(end),
            _ => None,
        }
    }
}

/// The hash of permits, as far as a decision about one owner needs it. It may not exist.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct PermitsHash {
    /// The owner's own hold, if its lease is not over.
    pub own: Option<PermitsHold>,
    /// When the last of the other leases ends, in milliseconds of the wall clock. If the other
    /// holds were not all read, when the key expires, or [`crate::NEVER`]. None if no other owner
    /// holds any.
    pub others_end: Option<i64>,
    /// Whether there is room for the permits that were asked for.
    pub room: Room,
    /// How many fields have a lease that is over.
    pub over: usize,
    /// The limit that is set for all callers.
    pub limit: Option<Permits>,
    /// When the key expires, in milliseconds of the wall clock; none if never.
    pub ends_at: Option<i64>,
    /// Whether the hash exists.
    pub is_there: bool,
}

impl PermitsHash {
    /// Whether nobody holds permits.
    pub fn is_free(&self) -> bool {
        self.own.is_none() && self.others_end.is_none()
    }

    /// The same, with this value of `is_there`.
    #[must_use]
    pub fn with_hash(self, is_there: bool) -> Self {
        Self { is_there, ..self }
    }

    /// The hash after a grant until `ends_at` to an owner that held none.
    pub(crate) fn granted(self, ends_at: i64) -> Self {
        Self {
            own: None,
            others_end: self.others_end.max(Some(ends_at)),
            room: Room::Unknown,
            over: if self.is_free() { 0 } else { self.over },
            ends_at: self.key_end(Some(ends_at)).or(self.ends_at),
            is_there: true,
            ..self
        }
    }

    /// A hash without holders.
    pub(crate) fn free(is_there: bool) -> Self {
        Self {
            is_there,
            ..Self::default()
        }
    }

    /// The time until there is room for the request, as in [`crate::Stored::ttl_ms`].
    pub(crate) fn ttl_ms(&self, now: Now) -> i64 {
        match self.room {
            Room::Unknown | Room::Now => 0,
            Room::At(end) => ttl_ms(Some(end), now),
            Room::NoLimit | Room::Never => -1,
        }
    }

    /// When the key must expire if the owner's own hold ends at `own_end`, or is over; none if its
    /// expiry need not change. If another client has removed the key's expiry, and the other holds
    /// were not read, the key stays without an expiry: their leases may be longer.
    pub(crate) fn key_end(&self, own_end: Option<i64>) -> Option<i64> {
        if self.others_end == Some(NEVER) {
            return None;
        }
        let end = own_end.max(self.others_end);
        end.filter(|_| end != self.ends_at)
    }

    /// When the owner's own hold ends: with the key at the latest, because another client may have
    /// set an earlier expiry.
    pub(crate) fn own_end(&self) -> Option<i64> {
        let end = self.own?.ends_at;
        Some(self.ends_at.map_or(end, |key_end| key_end.min(end)))
    }
}

/// The holders of permits other than the owner that they were read for. With them one reading
/// serves many waiters. If each grant needed a reading, the time would grow with the square of the
/// number of waiters.
#[derive(Clone, Debug, Default)]
pub struct PermitsHolders {
    /// The owners, sorted.
    owners: Vec<Box<[u8]>>,
    /// The end of each hold, and its number of permits.
    holds: Vec<(i64, Permits)>,
    out: i64,
}

impl PermitsHolders {
    /// Whether this owner is one of them.
    pub(crate) fn is_among(&self, owner: &[u8]) -> bool {
        let found = self.owners.binary_search_by(|of| (**of).cmp(owner));
        found.is_ok()
    }

    /// The same without the owners' names.
    pub(crate) fn holds(&self) -> Self {
        Self {
            owners: Vec::new(),
            holds: self.holds.clone(),
            out: self.out,
        }
    }

    pub(crate) fn add(&mut self, ends_at: i64, permits: Permits) {
        self.holds.push((ends_at, permits));
        self.out = self.out.saturating_add(permits.get());
    }

    /// Whether there is room for a request beside these holds, if the key expires at `key_end`.
    pub(crate) fn room(
        &self,
        asked: PermitsRequest,
        limit: Option<Permits>,
        key_end: Option<i64>,
    ) -> Room {
        let Some(limit) = limit.or(asked.limit) else {
            return Room::NoLimit;
        };
        let free_for = limit.get().saturating_sub(asked.permits.get());
        if free_for < 0 {
            return Room::Never;
        }
        let mut out = self.out;
        if out <= free_for {
            return Room::Now;
        }
        let mut holds = self.holds.clone();
        holds.sort_unstable();
        for (end, permits) in holds {
            out = out.saturating_sub(permits.get());
            if out <= free_for {
                // All holds end with the key, and another client may have set an earlier expiry.
                return Room::At(key_end.map_or(end, |key_end| key_end.min(end)));
            }
        }
        Room::Now
    }
}

/// A reading of permits in progress. The driver passes it the fields of the hash.
#[derive(Debug)]
pub struct PermitsReading<'a> {
    owner: &'a [u8],
    asked: Option<PermitsRequest>,
    limit: Option<Permits>,
    now: Now,
    is_there: bool,
    own: Option<PermitsHold>,
    /// None if at least one hold of another owner was found, and the rest was not read.
    others: Option<PermitsHolders>,
    keeps_owners: bool,
    over: usize,
}

impl<'a> PermitsReading<'a> {
    /// Begins to read for this owner, which may ask for permits. `limit` is the value of the
    /// limit's key.
    pub fn new(
        owner: &'a [u8],
        asked: Option<PermitsRequest>,
        limit: Option<&[u8]>,
        now: Now,
    ) -> Self {
        Self {
            owner,
            asked,
            limit: limit.and_then(Permits::from_limit),
            now,
            is_there: false,
            own: None,
            others: Some(PermitsHolders::default()),
            keeps_owners: false,
            over: 0,
        }
    }

    /// The same for a queue. One reading may grant several of its waiters, so the names of the
    /// holders are kept.
    #[must_use]
    pub fn for_queue(self) -> Self {
        Self {
            keeps_owners: true,
            ..self
        }
    }

    /// The hash exists, and has this field.
    pub fn field(&mut self, field: &[u8], value: &[u8]) {
        self.is_there = true;
        if field == MODE_FIELD || field == FENCE_FIELD {
            return;
        }
        let Some(hold) = PermitsHold::from_field(value) else {
            return;
        };
        if hold.is_over(self.now) {
            self.over = self.over.saturating_add(1);
        } else if field == self.owner {
            self.own = Some(hold);
        } else if let Some(others) = &mut self.others {
            others.add(hold.ends_at, hold.permits);
            if self.keeps_owners {
                others.owners.push(field.into());
            }
        }
    }

    /// A brief look at the others: the hash has this field. True if it is a hold; then no more
    /// fields are needed.
    pub fn other_in_brief(&mut self, value: &[u8]) -> bool {
        self.is_there = true;
        let hold = PermitsHold::from_field(value);
        let is_held = hold.is_some_and(|hold| !hold.is_over(self.now));
        if is_held {
            self.others = None;
        }
        is_held
    }

    /// Whether the other fields must be read too, after the owner's own, when the key expires at
    /// `key_end`. They must if permits are asked for, or if the key must end with the last of the
    /// holds.
    pub fn needs_others(&self, depth: ReadDepth, key_end: Option<i64>) -> bool {
        let own_end = self.own.map(|own| own.ends_at);
        // The key outlives the owner's own hold: it ends with another owner's lease, and its expiry
        // stays.
        let outlives = own_end.is_some_and(|own| key_end.is_none_or(|key_end| own < key_end));
        self.asked.is_some() || !depth.others_are_brief(self.own.is_some(), outlives)
    }

    /// Ends the reading. The key expires at `ends_at`.
    pub fn found(self, ends_at: Option<i64>) -> PermitsHash {
        self.found_with_others(ends_at).0
    }

    /// The same, with the other holders.
    pub fn found_with_others(self, ends_at: Option<i64>) -> (PermitsHash, PermitsHolders) {
        let others_end = match &self.others {
            Some(others) => others.holds.iter().map(|(end, _)| *end).max(),
            None => Some(ends_at.unwrap_or(NEVER)),
        };
        let hash = PermitsHash {
            own: self.own,
            others_end,
            over: self.over,
            limit: self.limit,
            ends_at,
            is_there: self.is_there,
            room: self.room(ends_at),
        };
        let mut others = self.others.unwrap_or_default();
        others.owners.sort_unstable();
        (hash, others)
    }

    fn room(&self, key_end: Option<i64>) -> Room {
        let (Some(asked), Some(others)) = (self.asked, &self.others) else {
            return Room::Unknown;
        };
        let Some(own) = self.own else {
            return others.room(asked, self.limit, key_end);
        };
        let mut all = others.holds();
        all.add(own.ends_at, own.permits);
        all.room(asked, self.limit, key_end)
    }
}

/// Whether this is the value of the `mode` field of permits.
pub fn is_permits_mode(value: &[u8]) -> bool {
    value == PERMITS_MODE
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_field_is_written_as_it_is_read() {
        for (permits, ends_at, token) in [(1, 1, 1), (PERMITS_MAX, END_MAX, i64::MAX), (3, 70, 9)] {
            let hold = PermitsHold {
                permits: Permits::new(permits).unwrap(),
                ends_at,
                token: Token::new(token).unwrap(),
            };
            let text = format!("{permits}:{ends_at}:t{token}");
            assert_eq!(hold.text().bytes(), text.as_bytes());
            assert_eq!(PermitsHold::from_field(text.as_bytes()), Some(hold));
        }
    }

    #[test]
    fn a_field_that_we_do_not_write_is_no_hold() {
        for text in [
            "",
            "1",
            "1:2",
            "1:2:3",
            "0:2:t3",
            "1:0:t3",
            "-1:2:t3",
            "1:2:t0",
            "1:2:t3:",
            "01:2:t3",
            "2147483648:2:t3",
            "1:2:t3 ",
            "1:99999999999999999:t3",
            "::",
            "1::t3",
        ] {
            assert_eq!(PermitsHold::from_field(text.as_bytes()), None, "{text}");
        }
    }
}
