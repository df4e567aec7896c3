//! What the keyspace holds of permits: the hash with a field for each holder, and the limit beside
//! it.
//!
//! The lease of a holder is in its field, so one key is all there is, and it moves, is renamed and
//! is copied with its holders. A field that does not parse was written by somebody else, and holds
//! nothing.

use crate::interface::depth::ReadDepth;
use crate::interface::stored::Stored;
use crate::values::limits::{INTEGER_MAX, PERMITS_MAX};
use crate::values::names::{FENCE_FIELD, MODE_FIELD, PERMITS_MODE};
use crate::values::number::{self, Text};
use crate::values::time::{Lease, NEVER, Now, ttl_ms};
use crate::values::token::Token;
use std::num::NonZeroU32;

/// A number of permits, or a limit of them: 1 to 2^31 - 1.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Permits(NonZeroU32);

impl Permits {
    /// So many permits, if that is within the bounds.
    pub fn new(number: i64) -> Option<Self> {
        let number = (1..=PERMITS_MAX).contains(&number).then_some(number)?;
        NonZeroU32::new(u32::try_from(number).ok()?).map(Self)
    }

    /// The number.
    pub fn get(self) -> i64 {
        self.0.get().into()
    }

    /// Reads the value of a limit's key. Anything that is no limit was written by somebody else,
    /// and is as if there were none.
    pub fn from_limit(value: &[u8]) -> Option<Self> {
        number::integer(value).and_then(Self::new)
    }
}

/// What a caller asks for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct PermitsRequest {
    /// How many permits.
    pub permits: Permits,
    /// The limit that it names, which counts where none is set.
    pub limit: Option<Permits>,
}

/// An owner's hold of permits, as its field has it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct PermitsHold {
    /// How many.
    pub permits: Permits,
    /// When its lease ends, in milliseconds of the wall clock.
    pub ends_at: i64,
    /// Its token.
    pub token: Token,
}

/// No lease that we write ends later than this.
const END_MAX: i64 = 2 * INTEGER_MAX;

impl PermitsHold {
    /// Reads the value of an owner's field: `<permits>:<end of the lease>:t<token>`.
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

    /// The value as it is stored: at most two separators, a `t`, and three numbers.
    pub fn text(&self) -> Text<52> {
        Text::empty()
            .after_all(Text::number(self.token.get()).bytes())
            .after_all(b":t")
            .after_all(Text::number(self.ends_at).bytes())
            .after(b':')
            .after_all(Text::number(self.permits.get()).bytes())
    }

    /// Whether its lease is over. A key is expired when the clock is past its end, not when it is
    /// there, and so is a hold.
    pub fn is_over(&self, now: Now) -> bool {
        self.ends_at < now.wall_ms()
    }

    pub(crate) fn begun_anew(self, lease: Lease, now: Now) -> Self {
        Self {
            ends_at: lease.end(now),
            ..self
        }
    }
}

/// Whether what was asked for can be had.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Room {
    /// Nothing was asked for, or not all that is held was read.
    Unknown,
    /// No limit is set, and the caller named none.
    NoLimit,
    /// There are permits enough.
    Now,
    /// There will be at this moment, in milliseconds of the wall clock, if nobody renews.
    At(i64),
    /// There never will be.
    Never,
}

impl Room {
    /// When there will be permits enough; none if never, or now.
    pub(crate) fn at(self) -> Option<i64> {
        match self {
            Self::At(end) => Some(end),
            _ => None,
        }
    }
}

/// A hash of permits, as far as a decision about one owner needs it: also one that is not there.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct PermitsHash {
    /// The owner's own hold, if its lease is not over.
    pub own: Option<PermitsHold>,
    /// When the last of the others' leases ends, in milliseconds of the wall clock; of others who
    /// were not read, when the key does, or [`crate::NEVER`]. None if nobody else holds any.
    pub others_end: Option<i64>,
    /// Whether what was asked for can be had.
    pub room: Room,
    /// How many fields there are of holders whose leases are over.
    pub over: usize,
    /// The limit that is set for all.
    pub limit: Option<Permits>,
    /// When the key expires, in milliseconds of the wall clock; none if never.
    pub ends_at: Option<i64>,
    /// Whether there is a hash at all.
    pub is_there: bool,
}

impl PermitsHash {
    /// Whether nobody holds any.
    pub fn is_free(&self) -> bool {
        self.own.is_none() && self.others_end.is_none()
    }

    /// The same, where there is a hash or not, whatever is in it.
    #[must_use]
    pub fn with_hash(self, is_there: bool) -> Self {
        Self { is_there, ..self }
    }

    /// What is stored, for a task that [is about permits](crate::Task::is_about_permits) or not.
    pub fn stored(self, is_about_permits: bool) -> Stored {
        if self.is_free() && !is_about_permits {
            return Stored::NoHolder;
        }
        Stored::Permits(self)
    }

    /// The same once somebody holds some in it until then who held none.
    pub(crate) fn granted(self, ends_at: i64) -> Self {
        Self {
            own: None,
            others_end: self.others_end.max(Some(ends_at)),
            room: Room::Unknown,
            over: if self.is_free() { 0 } else { self.over },
            limit: self.limit,
            ends_at: self.key_end(Some(ends_at)).or(self.ends_at),
            is_there: true,
        }
    }

    /// One in which nobody holds any.
    pub(crate) fn free(is_there: bool) -> Self {
        let mut reading = PermitsReading::new(b"", None, None, Now::default());
        reading.is_there = is_there;
        reading.found(None)
    }

    /// What is left until what was asked for can be had, as in [`crate::Stored::ttl_ms`].
    pub(crate) fn ttl_ms(&self, now: Now) -> i64 {
        match self.room {
            Room::Unknown | Room::Now => 0,
            Room::At(_) => ttl_ms(self.room_at(), now),
            Room::NoLimit | Room::Never => -1,
        }
    }

    /// When what was asked for can be had; none if never, or now.
    pub(crate) fn room_at(&self) -> Option<i64> {
        self.room.at()
    }

    /// When the key must expire if the owner's own hold ends then, or is over; none if that is when
    /// it expires now. One that somebody has made endless stays so if the others were not read:
    /// theirs may last for longer.
    pub(crate) fn key_end(&self, own_end: Option<i64>) -> Option<i64> {
        if self.others_end == Some(NEVER) {
            return None;
        }
        let end = own_end.max(self.others_end);
        end.filter(|_| end != self.ends_at)
    }

    /// When the owner's own hold ends: with the key at the latest, which somebody else may have
    /// given an earlier end.
    pub(crate) fn own_end(&self) -> Option<i64> {
        let end = self.own?.ends_at;
        Some(self.ends_at.map_or(end, |key_end| key_end.min(end)))
    }
}

/// Those who hold permits beside the owner that they were read for. With them one reading serves
/// many waiters: if each grant took one, the time would grow with the square of their number.
#[derive(Clone, Debug, Default)]
pub struct PermitsHolders {
    owners: Vec<Box<[u8]>>,
    /// Until when they hold how many.
    holds: Vec<(i64, Permits)>,
    out: i64,
}

impl PermitsHolders {
    pub(crate) fn owners(&self) -> impl Iterator<Item = &[u8]> {
        self.owners.iter().map(|owner| &**owner)
    }

    /// The same without their names.
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

    /// Whether this can be had beside them, of a key that expires then.
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
                // All of it ends with the key, which somebody else may have given an earlier end.
                return Room::At(key_end.map_or(end, |key_end| key_end.min(end)));
            }
        }
        Room::Now
    }
}

/// A reading of permits in progress: the driver shows it the fields of the hash.
#[derive(Debug)]
pub struct PermitsReading<'a> {
    owner: &'a [u8],
    asked: Option<PermitsRequest>,
    limit: Option<Permits>,
    now: Now,
    is_there: bool,
    own: Option<PermitsHold>,
    others: Others,
    keeps_owners: bool,
    over: usize,
}

#[derive(Debug)]
enum Others {
    /// These.
    Read(PermitsHolders),
    /// There is one of them, and more were not looked at.
    Some,
}

impl<'a> PermitsReading<'a> {
    /// Begins to read for this owner, who may ask for permits; with the value of the limit's key.
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
            others: Others::Read(PermitsHolders::default()),
            keeps_owners: false,
            over: 0,
        }
    }

    /// The same for a queue, of which more than the first may be granted by it.
    #[must_use]
    pub fn for_queue(self) -> Self {
        Self {
            keeps_owners: true,
            ..self
        }
    }

    /// The hash is there, and has this field.
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
        } else if let Others::Read(others) = &mut self.others {
            others.add(hold.ends_at, hold.permits);
            if self.keeps_owners {
                others.owners.push(field.into());
            }
        }
    }

    /// A brief look at others: the hash has this field. True if that is somebody's hold, which is
    /// enough.
    pub fn other_in_brief(&mut self, value: &[u8]) -> bool {
        self.is_there = true;
        let hold = PermitsHold::from_field(value);
        let is_held = hold.is_some_and(|hold| !hold.is_over(self.now));
        if is_held {
            self.others = Others::Some;
        }
        is_held
    }

    /// Whether the others' fields are to be shown as well, when the owner's own was, of a key that
    /// expires then: where permits are asked for, or where the key must end with the last of them.
    pub fn needs_others(&self, depth: ReadDepth, key_end: Option<i64>) -> bool {
        let own_end = self.own.map(|own| own.ends_at);
        // Then it ends with the lease of somebody else, and stays as it is.
        let outlives = own_end.is_some_and(|own| key_end.is_none_or(|key_end| own < key_end));
        self.asked.is_some() || !depth.others_are_brief(self.own.is_some(), outlives)
    }

    /// The end of the reading, of a key that expires then.
    pub fn found(self, ends_at: Option<i64>) -> PermitsHash {
        self.found_with_others(ends_at).0
    }

    /// The same, with the others who hold some.
    pub fn found_with_others(self, ends_at: Option<i64>) -> (PermitsHash, PermitsHolders) {
        let others_end = match &self.others {
            Others::Read(others) => others.holds.iter().map(|(end, _)| *end).max(),
            Others::Some => Some(ends_at.unwrap_or(NEVER)),
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
        match self.others {
            Others::Read(others) => (hash, others),
            Others::Some => (hash, PermitsHolders::default()),
        }
    }

    fn room(&self, key_end: Option<i64>) -> Room {
        let (Some(asked), Others::Read(others)) = (self.asked, &self.others) else {
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
