//! The log that an operator reads with RLOCK.LOG: locks that were lost or broken, long waits and
//! long holds, and waits that were refused.
//!
//! The latest entries are kept in memory. Their number and their size are bounded. While the log is
//! off, nothing is allocated or looked up for it: the callers ask first whether it is on.

use crate::values::circle::Circle;
use crate::values::limits::{LOGGED_NAME_MAX, OWNER_LEN_MAX};
use crate::values::lock_key::{LockKey, LockRef};
use crate::values::time::Now;
use crate::values::token::Token;
use crate::values::word::Word;
use std::collections::VecDeque;
use std::fmt::Write as _;
use std::rc::Rc;

/// Which events are logged, and how many entries are kept. All of it is off by default.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct LogOptions {
    /// The maximum number of entries; 0 turns the log off.
    pub max_len: usize,
    /// Holds that lasted at least this long are logged, in milliseconds; 0 is never.
    pub holds_ms: i64,
    /// Waits that last at least this long are logged, in milliseconds; 0 is never.
    pub waits_ms: i64,
}

/// The kind of a logged event.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum LogEvent {
    /// A session's hold ended, and its owner had not given it back.
    Lost,
    /// BREAK ended a hold.
    Broken,
    /// A wait was refused because it could never have ended.
    Deadlock,
    /// A wait is long.
    LongWait,
    /// A hold that was given back was long.
    LongHold,
    /// A session ended that still had holds.
    SessionEnded,
    /// A wait was refused because there was no room for it.
    QueueFull,
}

impl LogEvent {
    /// Its name in a reply.
    pub fn name(self) -> &'static str {
        match self {
            Self::Lost => "lost",
            Self::Broken => "broken",
            Self::Deadlock => "deadlock",
            Self::LongWait => "long-wait",
            Self::LongHold => "long-hold",
            Self::SessionEnded => "session-ended",
            Self::QueueFull => "queue-full",
        }
    }
}

/// When a session ends with holds, at most this many of their locks are named.
const LOCKS_NAMED_MAX: usize = 8;

/// An owner that another client wrote can have any length. At most this many bytes of it are kept.
const OWNER_KEPT_MAX: usize = OWNER_LEN_MAX;

/// The names and texts of all entries take at most this many bytes. The oldest entries go first.
const BYTES_MAX: usize = 8 << 20;

/// An entry of the log.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct LogEntry {
    /// The entry as a reader sees it who may read all locks, without the names in the details.
    view: LogView,
    details: Details,
    /// How often the same event has happened again while this was the newest entry.
    repeated: u64,
}

/// Names of locks in the text of an entry. They are stored apart from it, because not every reader
/// may see them.
#[derive(Clone, Debug, PartialEq, Eq)]
enum Details {
    None,
    Circle(Circle),
    /// The locks that are named after the text.
    Locks(Vec<Rc<[u8]>>),
}

/// An entry as one reader may see it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct LogView {
    /// The entry's number, which is larger than the number of every earlier entry.
    pub id: u64,
    /// When it happened, in milliseconds of the wall clock.
    pub time_ms: i64,
    /// The kind of event.
    pub event: LogEvent,
    /// The number of the database.
    pub db: i32,
    /// The lock; none if the entry is about several.
    pub key: Option<Rc<[u8]>>,
    /// The owner of the hold or of the wait, if known.
    pub owner: Option<Rc<[u8]>>,
    /// The token of the hold, if there was one and it is known.
    pub token: Option<Token>,
    /// Details, in words.
    pub text: String,
}

impl LogView {
    fn new(event: LogEvent, db: i32, text: String, now: Now) -> Self {
        Self {
            id: 0,
            time_ms: now.wall_ms(),
            event,
            db,
            key: None,
            owner: None,
            token: None,
            text,
        }
    }
}

impl LogEntry {
    /// Whether the entry is about a lock whose name `matches`.
    pub fn is_about(&self, mut matches: impl FnMut(&[u8]) -> bool) -> bool {
        match (&self.view.key, &self.details) {
            (Some(key), _) => matches(key),
            (None, Details::Locks(locks)) => locks.iter().any(|lock| matches(lock)),
            (None, _) => false,
        }
    }

    /// The entry for a reader who may read these locks. None if the reader may not read the lock
    /// that it is about, or none of several.
    pub fn seen_by(&self, mut may_read: impl FnMut(&[u8]) -> bool) -> Option<LogView> {
        if self.view.key.as_ref().is_some_and(|key| !may_read(key)) {
            return None;
        }
        let mut view = self.view.clone();
        match &self.details {
            Details::None => {}
            Details::Circle(circle) => {
                let mut circle = circle.clone();
                circle.keep_readable(may_read);
                view.text = circle.to_string();
            }
            Details::Locks(locks) => {
                let readable = locks.iter().filter(|lock| may_read(lock));
                let names = readable.map(|lock| format!("'{}'", Word::new(lock)));
                let names: Vec<_> = names.collect();
                if names.is_empty() {
                    return None;
                }
                let _ = write!(view.text, ", among them {}", names.join(", "));
            }
        }
        if self.repeated > 0 {
            let _ = write!(view.text, "; and {} more after it", self.repeated);
        }
        Some(view)
    }

    /// How many bytes its names and its text take.
    fn size(&self) -> usize {
        let len = |bytes: &Option<Rc<[u8]>>| bytes.as_ref().map_or(0, |bytes| bytes.len());
        let details = match &self.details {
            Details::None => 0,
            Details::Circle(circle) => circle.size(),
            Details::Locks(locks) => locks.iter().map(|lock| lock.len()).sum(),
        };
        len(&self.view.key)
            .saturating_add(len(&self.view.owner))
            .saturating_add(self.view.text.len())
            .saturating_add(details)
    }
}

/// The latest entries.
#[derive(Debug, Default)]
pub(crate) struct EventLog {
    pub(crate) options: LogOptions,
    /// The newest entry is the last.
    entries: VecDeque<Rc<LogEntry>>,
    /// How many bytes all entries take.
    bytes: usize,
    last_id: u64,
}

impl EventLog {
    /// Whether entries are kept.
    pub(crate) fn is_on(&self) -> bool {
        self.options.max_len > 0
    }

    pub(crate) fn set_options(&mut self, options: LogOptions) {
        self.options = options;
        self.trim();
    }

    /// Forgets all entries. The numbers of later entries still grow.
    pub(crate) fn reset(&mut self) {
        self.entries = VecDeque::new();
        self.bytes = 0;
    }

    /// All entries, the newest first.
    pub(crate) fn entries(&self) -> impl Iterator<Item = &Rc<LogEntry>> {
        self.entries.iter().rev()
    }

    /// Logs an event at one lock.
    pub(crate) fn add(
        &mut self,
        event: LogEvent,
        lock: LockRef<'_>,
        owner: Option<&[u8]>,
        token: Option<Token>,
        text: String,
        now: Now,
    ) {
        let view = LogView {
            token,
            ..LogView::new(event, lock.db, text, now)
        };
        self.push(view, lock, owner, Details::None);
    }

    pub(crate) fn add_circle(
        &mut self,
        lock: LockRef<'_>,
        owner: &[u8],
        circle: &Circle,
        now: Now,
    ) {
        let event = LogEvent::Deadlock;
        let details = Details::Circle(circle.as_kept(LOGGED_NAME_MAX));
        if !self.repeat(event, lock, |newest| newest.details == details) {
            let view = LogView::new(event, lock.db, String::new(), now);
            self.push(view, lock, Some(owner), details);
        }
    }

    /// Logs a wait that is refused because there is no room for it.
    pub(crate) fn add_full(
        &mut self,
        lock: LockRef<'_>,
        owner: &[u8],
        text: impl FnOnce() -> String,
        now: Now,
    ) {
        if self.is_on() && !self.repeat(LogEvent::QueueFull, lock, |_| true) {
            self.add(LogEvent::QueueFull, lock, Some(owner), None, text(), now);
        }
    }

    /// Counts an event in the newest entry, if that is about the same lock and the same event.
    /// Returns whether it is. Without this, callers that are refused again and again would push all
    /// other entries out.
    fn repeat(
        &mut self,
        event: LogEvent,
        lock: LockRef<'_>,
        is_same: impl FnOnce(&LogEntry) -> bool,
    ) -> bool {
        let Some(newest) = self.entries.back_mut().and_then(Rc::get_mut) else {
            return false;
        };
        let view = &newest.view;
        let is_lock = view.key.as_deref() == Some(lock.name) && view.db == lock.db;
        let is_repeated = is_lock && view.event == event && is_same(newest);
        newest.repeated = newest.repeated.saturating_add(is_repeated.into());
        is_repeated
    }

    /// Logs an event about several locks. Does nothing if all their names are too long to be kept.
    pub(crate) fn add_of_several<'a>(
        &mut self,
        event: LogEvent,
        locks: impl Iterator<Item = &'a LockKey>,
        text: String,
        now: Now,
    ) {
        let mut db = None;
        let kept = locks.filter(|lock| lock.name.len() <= LOGGED_NAME_MAX);
        let kept = kept.take(LOCKS_NAMED_MAX).map(|lock| {
            db.get_or_insert(lock.db);
            Rc::clone(&lock.name)
        });
        let locks: Vec<_> = kept.collect();
        let Some(db) = db else { return };
        let view = LogView::new(event, db, text, now);
        self.insert(view, Details::Locks(locks));
    }

    fn push(&mut self, view: LogView, lock: LockRef<'_>, owner: Option<&[u8]>, details: Details) {
        if lock.name.len() <= LOGGED_NAME_MAX {
            let owner = owner.map(|owner| owner.get(..OWNER_KEPT_MAX).unwrap_or(owner));
            let view = LogView {
                key: Some(Rc::from(lock.name)),
                owner: owner.map(Rc::from),
                ..view
            };
            self.insert(view, details);
        }
    }

    fn insert(&mut self, mut view: LogView, details: Details) {
        if !self.is_on() {
            return;
        }
        self.last_id = self.last_id.saturating_add(1);
        view.id = self.last_id;
        let entry = LogEntry {
            view,
            details,
            repeated: 0,
        };
        self.bytes = self.bytes.saturating_add(entry.size());
        self.entries.push_back(Rc::new(entry));
        self.trim();
    }

    fn trim(&mut self) {
        while self.entries.len() > self.options.max_len || self.bytes > BYTES_MAX {
            let Some(oldest) = self.entries.pop_front() else {
                return;
            };
            self.bytes = self.bytes.saturating_sub(oldest.size());
        }
        // Give back memory for many more entries than there are.
        if self.entries.capacity() > self.entries.len().saturating_mul(4).max(64) {
            self.entries.shrink_to_fit();
        }
    }
}

/// At most this many lines about long waits go into the server's log in one second.
const LINES_PER_SECOND: usize = 10;

const SECOND_MS: i64 = 1000;

/// Limits the lines in the server's log, and counts those that were left out.
#[derive(Debug, Default)]
pub(crate) struct LogLines {
    /// When each of the latest lines was written, monotonic, in milliseconds.
    written: VecDeque<i64>,
    left_out: u64,
}

impl LogLines {
    /// Whether another line may be written now. If not, it is counted as left out.
    pub(crate) fn take(&mut self, now: Now) -> bool {
        let is_full = self.written.len() >= LINES_PER_SECOND;
        if is_full && self.free_at().is_some_and(|free_at| free_at > now.mono_ms) {
            self.left_out = self.left_out.saturating_add(1);
            return false;
        }
        if is_full {
            self.written.pop_front();
        }
        self.written.push_back(now.mono_ms);
        true
    }

    /// When the next line may be written once the limit is reached.
    fn free_at(&self) -> Option<i64> {
        let first = self.written.front()?;
        Some(first.saturating_add(SECOND_MS))
    }

    /// Whether no line was left out.
    pub(crate) fn are_whole(&self) -> bool {
        self.left_out == 0
    }

    /// When the number of lines left out must be logged, monotonic, in milliseconds.
    pub(crate) fn deadline(&self) -> Option<i64> {
        self.free_at().filter(|_| self.left_out > 0)
    }

    /// The number of lines left out, if it must be logged now.
    pub(crate) fn take_left_out(&mut self, now: Now) -> Option<u64> {
        self.deadline().filter(|at| *at <= now.mono_ms)?;
        Some(std::mem::take(&mut self.left_out))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const NOW: Now = Now {
        wall_us: 5_000_000,
        mono_ms: 70,
    };

    fn lock(name: &[u8]) -> LockRef<'_> {
        LockRef { db: 0, name }
    }

    fn log(max_len: usize) -> EventLog {
        let mut log = EventLog::default();
        log.set_options(LogOptions {
            max_len,
            ..LogOptions::default()
        });
        log
    }

    fn add(log: &mut EventLog, name: &[u8], text: &str) {
        let text = text.to_owned();
        log.add(LogEvent::Lost, lock(name), Some(b"o"), None, text, NOW);
    }

    fn seen(log: &EventLog) -> Vec<LogView> {
        let seen = log.entries().filter_map(|entry| entry.seen_by(|_| true));
        seen.collect()
    }

    fn ids(log: &EventLog) -> Vec<u64> {
        seen(log).iter().map(|entry| entry.id).collect()
    }

    #[test]
    fn the_latest_are_kept_and_numbers_go_on_after_a_reset() {
        let mut log = log(2);
        for _ in 0..5 {
            add(&mut log, b"k", "");
        }
        assert_eq!(ids(&log), [5, 4]);
        log.reset();
        assert_eq!((ids(&log), log.bytes), (vec![], 0));
        add(&mut log, b"k", "");
        assert_eq!(ids(&log), [6]);
        log.set_options(LogOptions::default());
        add(&mut log, b"k", "");
        assert_eq!((ids(&log), log.bytes), (vec![], 0));
    }

    #[test]
    fn a_log_that_was_longer_gives_its_memory_back() {
        let mut log = log(10_000);
        for _ in 0..5000 {
            add(&mut log, b"k", "");
        }
        let options = LogOptions {
            max_len: 10,
            ..log.options
        };
        log.set_options(options);
        let capacity = log.entries.capacity();
        assert!((10..=64).contains(&capacity), "{capacity}");
        // For a few entries it is not moved again.
        log.entries.reserve_exact(30);
        let capacity = log.entries.capacity();
        add(&mut log, b"k", "");
        assert_eq!(log.entries.capacity(), capacity);
    }

    #[test]
    fn names_and_texts_take_no_more_than_their_bytes() {
        let mut log = log(100_000);
        let text = "t".repeat(1 << 20);
        for _ in 0..20 {
            add(&mut log, b"k", &text);
        }
        assert_eq!(log.entries.len(), 7);
        assert!(log.bytes <= BYTES_MAX);
        add(&mut log, &[b'n'; LOGGED_NAME_MAX + 1], "");
        assert_eq!(ids(&log)[0], 20, "a longer name is not kept");
        let owner = [b'o'; OWNER_KEPT_MAX + 1];
        log.add(LogEvent::Broken, lock(b"k"), Some(&owner), None, text, NOW);
        let kept = seen(&log).swap_remove(0).owner;
        assert_eq!(kept.map(|owner| owner.len()), Some(OWNER_KEPT_MAX));
    }

    #[test]
    fn the_same_refusal_is_counted_until_something_else_happens() {
        let mut log = log(10);
        let text = || "full".to_owned();
        for name in [b"a", b"a", b"a", b"b", b"a"] {
            log.add_full(lock(name), b"o", text, NOW);
        }
        let circle = Circle::of_reader(b"o", b"a");
        for _ in 0..2 {
            log.add_circle(lock(b"a"), b"o", &circle, NOW);
        }
        log.add_circle(lock(b"a"), b"p", &Circle::of_reader(b"p", b"a"), NOW);
        let texts: Vec<_> = seen(&log).into_iter().map(|entry| entry.text).collect();
        assert!(texts[1].ends_with("; and 1 more after it"), "{texts:?}");
        assert_eq!(texts[2..], ["full", "full", "full; and 2 more after it"]);
    }

    #[test]
    fn of_several_locks_those_are_named_that_the_reader_may_read() {
        let mut log = log(10);
        let key = |name: &[u8]| LockKey::from(lock(name));
        let locks = [key(b"mine"), key(b"yours"), key(&[b'n'; 5000])];
        let text = "ended".to_owned();
        log.add_of_several(LogEvent::SessionEnded, locks.iter(), text, NOW);
        let entry = log.entries().next().unwrap();
        let seen = entry.seen_by(|name| name == b"mine").unwrap();
        assert_eq!(seen.text, "ended, among them 'mine'");
        assert_eq!(entry.seen_by(|_| false), None);
        assert!(entry.is_about(|name| name == b"yours"));
        assert!(!entry.is_about(|name| name.len() > 10));
        // One whose locks have no names that could be kept is not logged at all.
        let text = "ended".to_owned();
        log.add_of_several(LogEvent::SessionEnded, locks[2..].iter(), text, NOW);
        assert_eq!(ids(&log), [1]);
    }

    #[test]
    fn ten_lines_are_written_in_any_second_and_the_rest_is_counted() {
        let mut lines = LogLines::default();
        let at = |ms: i64| NOW.after(ms);
        // Two before the others: the window slides.
        assert!(lines.take(at(0)) && lines.take(at(1)));
        let written = (0..20).filter(|_| lines.take(at(900))).count();
        assert_eq!(written, 8);
        assert_eq!(lines.deadline(), Some(NOW.mono_ms + 1000));
        assert_eq!(lines.take_left_out(at(999)), None);
        assert_eq!(lines.take_left_out(at(1000)), Some(12));
        assert_eq!(lines.deadline(), None);
        let written = (0..20).filter(|_| lines.take(at(1001))).count();
        assert_eq!(written, 2);
    }
}
