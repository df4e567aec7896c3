//! A new hash in the form in which `RESTORE` takes it and `DUMP` tells it: one command makes the
//! hash and sets its end. Every Redis from 7.0 and every Valkey from 8 reads this form.

use crate::ffi::{self, Ctx};
use crc::{CRC_64_REDIS, Crc, Table};
use rlock_core::integer;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};

/// The longest field or value that a payload has room for.
const TEXT_LEN_MAX: usize = 64;

/// A hash with a longer field or value is told by other commands: here it is no listpack, but has
/// another form.
static RESTORED_LEN_MAX: AtomicUsize = AtomicUsize::new(TEXT_LEN_MAX);

/// Asks the server which hashes are listpacks. Called at the load, and when an option was set.
pub(crate) fn look_for_limits(ctx: Ctx<'_>) {
    let longest = match ctx.option("hash-max-listpack-entries") {
        Some(0 | 1) => 0,
        _ => ctx
            .option("hash-max-listpack-value")
            .unwrap_or(TEXT_LEN_MAX),
    };
    RESTORED_LEN_MAX.store(longest.min(TEXT_LEN_MAX), Ordering::Relaxed);
}

/// Whether the user `default` may run `RESTORE`. Many servers load an append-only file as that
/// user, and of each transaction in it they skip the commands that the user may not run. Beside a
/// `RESTORE` that was skipped, the other commands of its transaction would make half a lock.
static MAY_RESTORE: AtomicBool = AtomicBool::new(false);

/// Asks the server for the rights of the user `default`. Called at the load and at each tick: no
/// event tells of a changed right.
pub(crate) fn look_for_rights() {
    let may_run = ffi::may_default_run([
        b"RESTORE", b"rlock", b"1", b"payload", b"REPLACE", b"ABSTTL",
    ]);
    MAY_RESTORE.store(may_run, Ordering::Relaxed);
}

/// A type of the RDB format: a hash whose fields and values are one list, a listpack.
const HASH_AS_LISTPACK: u8 = 16;

/// The version of the RDB format of Redis 7.0. Later servers write a larger one, and read this.
const RDB_VERSION: [u8; 2] = [10, 0];

/// Looks sixteen bytes up at a time.
static CHECKSUM: Crc<u64, Table<16>> = Crc::<u64, Table<16>>::new(&CRC_64_REDIS);

/// The hash of these two fields, with its checksum. None if a field or a value is too long, or if
/// the user `default` may not run `RESTORE`.
pub(crate) fn payload(fields: [(&[u8], &[u8]); 2]) -> Option<Payload> {
    let [(field, value), (other, its_value)] = fields;
    let texts = [field, value, other, its_value];
    if !MAY_RESTORE.load(Ordering::Relaxed) {
        return None;
    }
    let len_max = RESTORED_LEN_MAX.load(Ordering::Relaxed);
    if texts.iter().any(|text| text.len() > len_max) {
        return None;
    }
    let mut payload = Payload::new();
    for text in texts {
        payload.push_element(text);
    }
    payload.finish();
    Some(payload)
}

/// The bytes, on the stack.
pub(crate) struct Payload {
    bytes: [u8; LEN_MAX],
    start: usize,
    end: usize,
}

/// The type, the length of the listpack and its head come before the elements.
const TYPE_AT: usize = 0;
const LISTPACK_AT: usize = 3;
const ELEMENTS_AT: usize = LISTPACK_AT + 6;

/// An element has up to two bytes before the text, and its length behind it. The end of the
/// listpack, the version and the checksum follow.
const LEN_MAX: usize = ELEMENTS_AT + ELEMENTS * (2 + TEXT_LEN_MAX + 1) + 1 + 2 + 8;
const ELEMENTS: usize = 4;

impl Payload {
    fn new() -> Self {
        Self {
            bytes: [0; LEN_MAX],
            start: TYPE_AT,
            end: ELEMENTS_AT,
        }
    }

    pub(crate) fn bytes(&self) -> &[u8] {
        self.bytes.get(self.start..self.end).unwrap_or_default()
    }

    /// Adds a field or a value: a number as such, in the shortest form, as the server does it.
    fn push_element(&mut self, text: &[u8]) {
        let before = self.end;
        match integer(text) {
            Some(number) => self.push_number(number),
            None => self.push_text(text),
        }
        let len = self.end.saturating_sub(before);
        self.push(&[low_byte(len)]);
    }

    fn push_text(&mut self, text: &[u8]) {
        let len = low_byte(text.len());
        if len < 64 {
            self.push(&[0x80 | len]);
        } else {
            self.push(&[0xe0, len]);
        }
        self.push(text);
    }

    fn push_number(&mut self, number: i64) {
        let [a, b, c, d, ..] = number.to_le_bytes();
        match number {
            0..=0x7f => self.push(&[a]),
            -0x1000..=0xfff => self.push(&[0xc0 | (b & 0x1f), a]),
            -0x8000..=0x7fff => self.push(&[0xf1, a, b]),
            -0x80_0000..=0x7f_ffff => self.push(&[0xf2, a, b, c]),
            -0x8000_0000..=0x7fff_ffff => self.push(&[0xf3, a, b, c, d]),
            _ => {
                self.push(&[0xf4]);
                self.push(&number.to_le_bytes());
            }
        }
    }

    /// Adds the end of the listpack, its head, the version and the checksum.
    fn finish(&mut self) {
        self.push(&[0xff]);
        let len = self.end.saturating_sub(LISTPACK_AT);
        let [low, high, ..] = len.to_le_bytes();
        self.put(LISTPACK_AT, &[low, high, 0, 0, low_byte(ELEMENTS), 0]);
        // The length of the listpack takes one byte if it is below 64, else two.
        if len < 64 {
            self.start = LISTPACK_AT - 2;
            self.put(self.start, &[HASH_AS_LISTPACK, low]);
        } else {
            self.put(self.start, &[HASH_AS_LISTPACK, 0x40 | high, low]);
        }
        self.push(&RDB_VERSION);
        let checksum = CHECKSUM.checksum(self.bytes());
        self.push(&checksum.to_le_bytes());
    }

    fn push(&mut self, bytes: &[u8]) {
        self.put(self.end, bytes);
        self.end = self.end.saturating_add(bytes.len());
    }

    /// There is room for all: [`LEN_MAX`].
    fn put(&mut self, at: usize, bytes: &[u8]) {
        if let Some(place) = self
            .bytes
            .get_mut(at..)
            .and_then(|rest| rest.get_mut(..bytes.len()))
        {
            place.copy_from_slice(bytes);
        }
    }
}

fn low_byte(len: usize) -> u8 {
    let [low, ..] = len.to_le_bytes();
    low
}
