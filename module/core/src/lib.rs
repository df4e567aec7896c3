//! The lock as pure decisions: what is stored, what is asked and the time go in; an answer and a
//! list of effects come out. The core also says what comes next.
//!
//! It never touches a key, reads a clock or speaks a protocol. Whoever drives it (the module in a
//! server, or a test with a map) parses a command's arguments into a [`request`], begins a
//! [`Turn`] with it, and then repeats until there is no more to do:
//!
//! 1. ask for the next [`Task`] ([`Locks::next_task`]): which locks are to be read, for which
//!    owner, and how deep,
//! 2. read them, as [`Stored`],
//! 3. hand in what was found ([`Task::found`], [`Locks::decide`]), with the time as [`Now`],
//! 4. carry out the [`Effect`]s in their order.
//!
//! Then [`Turn::outcome`] is the answer; one that must wait joins the queue with
//! [`Locks::enqueue`]. The timer's turns are [`Turn::of_deadlines`] and [`Turn::of_timer`].
//!
//! What the core remembers between turns is what the keyspace does not hold: the queues and their
//! deadlines, sessions and what belongs to them, the tokens of writers, the last token minted and
//! the counters. Everything else is read anew each time, because anybody may write to the keyspace.
//!
//! What happens without a command arrives in three ways. When a key changed, the driver calls
//! [`Locks::changed`]; when a connection is gone, [`Locks::client_gone`]; when
//! [`Locks::next_deadline`] has passed, it runs the timer's turns. What needs a write is only
//! marked until a turn in which the server allows one.
#![forbid(unsafe_code)]

mod agenda;
mod arena;
pub mod change;
mod deadlock;
mod decision;
mod effect;
mod error;
mod event_log;
mod glob;
mod grant_delay;
pub mod guarded;
mod hold;
mod life;
mod lock;
mod long_wait;
mod metrics;
mod mode;
mod multi;
pub mod names;
mod parse;
mod pattern;
mod pending;
mod permits;
mod plain;
mod position;
mod read_write;
pub mod request;
mod session;
mod stored;
mod stored_permits;
mod table;
mod task;
mod text;
mod time;
mod token;
mod turn;
mod wait;
mod wanted;

pub use arena::ROOM_KEPT;
pub use deadlock::{CHAIN_MAX, Circle, LOOKS_MAX};
pub use effect::{Effect, Field, Grant, Holder, TimeoutKey, Value, WaitOutcome, Write};
pub use error::{CommandError, Word};
pub use event_log::{LOGGED_NAME_MAX, LogEntry, LogEvent, LogOptions, LogView};
pub use glob::Glob;
pub use lock::{HoldView, Locks};
pub use metrics::{Counters, Histogram};
pub use mode::{Kind, Mode};
pub use multi::MultiId;
pub use pattern::{PATTERN_LEN_MAX, PATTERNS_MAX, PatternCounters, are_patterns};
pub use session::{Event, EventKind, Listener, LostReason, SessionId, SessionLimits, SessionView};
pub use stored::{Count, Hash, HeldBy, NEVER, ReadDepth, ReadHold, ReadWrite, Stored};
pub use stored_permits::{
    Asked, Permits, PermitsHash, PermitsHold, PermitsHolders, PermitsReading, Room, is_permits_mode,
};
pub use table::{Gauges, LockKey, LockRef, QueueView, WaiterId, WaiterView};
pub use task::{Command, Keys, Purpose, Read, Reading, Subject, Task};
pub use text::Text;
pub use time::{GRACE_MS_MAX, INTEGER_MAX, Lease, Now, Wait};
pub use token::{Token, TokenMint};
pub use turn::{DECISIONS_MAX, Outcome, Turn};
pub use wait::{BlockedClient, Joined};

/// What the names of all our commands begin with.
pub const OWN_PREFIX: &[u8] = b"rlock.";
/// The field of a lock's hash that holds the fencing token.
pub const FENCE_FIELD: &[u8] = b"fence";
/// The field that marks a hash as a read-write lock, or as permits.
pub const MODE_FIELD: &[u8] = b"mode";
/// What follows the owner in the field of a writer.
pub const WRITER_SUFFIX: &[u8] = b":write";
/// The value of that field of permits.
pub const PERMITS_MODE: &[u8] = b"permits";
/// The most permits, and the largest limit of them.
pub const PERMITS_MAX: i64 = 2_147_483_647;
/// The most keys that one command can name.
pub const KEYS_MAX: usize = 1024;
/// The longest owner, in bytes.
pub const OWNER_LEN_MAX: usize = 1024;
/// The longest name of a session, in bytes.
pub const SESSION_LEN_MAX: usize = 1024;
/// The longest pattern of a command's MATCH, in bytes.
pub const MATCH_LEN_MAX: usize = 1024;
/// The largest hold count.
pub const HOLD_COUNT_MAX: i64 = 2_147_483_647;
