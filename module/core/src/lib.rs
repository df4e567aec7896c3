//! The lock as pure decisions. The driver gives the core the stored values, the request and the
//! time. The core returns an answer and a list of effects, and says which task comes next.
//!
//! The core never touches a key, reads a clock or speaks a protocol. Its driver (the module in a
//! server, or a test with a map) parses a command's arguments into a [`request`], begins a [`Turn`]
//! with it, and repeats these steps until no task is left:
//!
//! 1. ask for the next [`Task`] ([`Locks::next_task`]), which names the locks to read, for which
//!    owner and how deep,
//! 2. read them, as [`Stored`],
//! 3. hand in the result ([`Task::found`], [`Locks::decide`]), with the time as [`Now`],
//! 4. carry out the [`Effect`]s in their order.
//!
//! Then [`Turn::outcome`] is the answer. A caller that must wait joins the queue with
//! [`Locks::enqueue`]. The timer's turns are [`Turn::of_deadlines`] and [`Turn::of_timer`].
//!
//! Between turns the core remembers only state that the keyspace does not hold: the queues and
//! their deadlines, sessions with their waiters, holds and events, the last token minted and the
//! counters. Everything else is read anew each time, because any client may write to the keyspace.
//!
//! Changes outside of a command arrive in three ways. When a key changed, the driver calls
//! [`Locks::changed`]; when a connection closed, [`Locks::client_gone`]; when
//! [`Locks::next_deadline`] has passed, it runs the timer's turns. A change that needs a write is
//! only marked, until a turn in which the server allows writes.
//!
//! The folders are floors, and each file imports only from its own floor and from those below it:
//! `turn`, `decisions`, `memory`, `interface`, `values`.
#![forbid(unsafe_code)]

mod decisions;
mod interface;
mod memory;
mod turn;
mod values;

pub use interface::depth::ReadDepth;
pub use interface::effect::{Effect, Field, Grant, Holder, TimeoutKey, Value, WaitOutcome, Write};
pub use interface::error::{CommandError, NotGuarded};
pub use interface::event::{Event, EventKind, LostReason, Moment, Told};
pub use interface::guarded;
pub use interface::outcome::Outcome;
pub use interface::request;
pub use interface::stored::{
    Count, Hash, HeldBy, ReadHold, ReadWrite, Stored, WriteHold, is_value_of_lock,
};
pub use interface::stored_permits::{
    Permits, PermitsHash, PermitsHold, PermitsHolders, PermitsReading, PermitsRequest, Room,
    is_permits_mode,
};
pub use interface::task::{Command, Keys, Purpose, Read, Reading, Subject, Task};
pub use memory::log::event_log::{LogEntry, LogEvent, LogOptions, LogView};
pub use memory::log::metrics::{Counters, Histogram};
pub use memory::log::pattern::{PATTERN_LEN_MAX, PATTERNS_MAX, PatternCounters, are_patterns};
pub use memory::session::{Attached, SessionLimits, SessionView};
pub use memory::state::{HoldView, Locks};
pub use memory::table::{Gauges, Longest, QueueView, WaiterView};
pub use turn::turn::{DECISIONS_MAX, Turn};
pub use turn::waiting::{BlockedClient, Joined};
pub use values::circle::Circle;
pub use values::glob::Glob;
pub use values::ids::{Listener, MultiId, SessionId, SessionRef, WaiterId};
pub use values::known::Known;
pub use values::limits::{
    CHAIN_MAX, EVENTS_TOLD_BYTES, EVENTS_TOLD_MAX, GRACE_MS_MAX, HOLD_COUNT_MAX, INTEGER_MAX,
    KEYS_MAX, LOGGED_NAME_MAX, LOOKS_MAX, MATCH_LEN_MAX, OWNER_LEN_MAX, PERMITS_MAX, ROOM_KEPT,
    SESSION_LEN_MAX,
};
pub use values::lock_key::{LockKey, LockRef};
pub use values::mode::{Kind, Mode};
pub use values::names::{self, FENCE_FIELD, MODE_FIELD, OWN_PREFIX, PERMITS_MODE, WRITER_SUFFIX};
pub use values::number::{Text, integer};
pub use values::time::{Lease, NEVER, Now, Wait};
pub use values::token::{Token, TokenMint};
pub use values::word::Word;
