//! Limits that clients can meet.

/// The largest lease and the longest wait in milliseconds: 2^53 - 1. Clients in every language can
/// represent this number.
pub const INTEGER_MAX: i64 = 9_007_199_254_740_991;

/// The longest owner, in bytes.
pub const OWNER_LEN_MAX: usize = 1024;

/// The longest name of a session, in bytes.
pub const SESSION_LEN_MAX: usize = 1024;

/// The most keys that one command can name.
pub const KEYS_MAX: usize = 1024;

/// The longest pattern of a command's MATCH, in bytes.
pub const MATCH_LEN_MAX: usize = 1024;

/// The largest hold count.
pub const HOLD_COUNT_MAX: i64 = 2_147_483_647;

/// The most permits, and the largest limit of them.
pub const PERMITS_MAX: i64 = 2_147_483_647;

/// A deadlock search that has reached more owners than this is given up, and the wait is refused.
pub const CHAIN_MAX: usize = 10_000;

/// A deadlock search that has looked at more waits and holds than this is given up too: each owner
/// can wait for many locks.
pub const LOOKS_MAX: usize = 100_000;

/// A lock with a longer name is neither logged nor counted by pattern. The log cannot keep a
/// shortened name: when somebody reads the log, the ACL is asked about the whole name.
pub const LOGGED_NAME_MAX: usize = 4096;

/// One reply of EVENTS has at most this many events. The server does nothing else while it makes a
/// reply, and keeps each reply until its client has read it: 100,000 events of long names took half
/// a second, and ten replies of that size that were not read took a gigabyte.
pub const EVENTS_TOLD_MAX: usize = 1000;

/// A reply of EVENTS ends with the event by which its keys and owners have this many bytes
/// together. A key can be as long as half a gigabyte, so the number of events is no bound alone.
pub const EVENTS_TOLD_BYTES: usize = 256 * 1024;

/// The longest grace that a session may ask for: an hour, in milliseconds. No command ends a
/// session, so an abandoned session must end by itself before long.
pub const GRACE_MS_MAX: i64 = 3_600_000;

/// An empty map keeps room for this many entries. More than that is given back, so that thousands
/// of waiters leave no memory behind. This little is kept, so that a map that becomes empty after
/// each hand-over is not allocated again each time.
pub const ROOM_KEPT: usize = 16;
