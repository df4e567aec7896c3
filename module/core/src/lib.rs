//! The lock as pure decisions: what is stored, what is asked and the time go in; an answer and a
//! list of effects come out.
//!
//! The core never touches a key, reads a clock or speaks a protocol. Whoever drives it (the module
//! in a server, or a test with a map) does four things for each command:
//!
//! 1. parse the arguments into a [`request`],
//! 2. read what the keyspace holds at the lock's key, as [`Stored`],
//! 3. call the method of [`Locks`] that is named like the command, with the time as [`Now`],
//! 4. carry out the [`Effect`]s in their order, then give the answer.
//!
//! One decision sees one lock, through one owner's eyes. Where it allows more than that, the driver
//! goes on in the same command with [`Locks::next_due`], which names what is to be read next: the
//! lock for the next in line ([`Locks::settle`]), or all the locks of a wait for several
//! ([`Locks::settle_joint`]). Nobody else may come between.
//!
//! What the core remembers between calls is what the keyspace does not hold: the lines of waiters,
//! their deadlines, sessions and what belongs to them, the tokens of writers, the last token minted
//! and the counters. Everything else is read anew each time, because anybody may write to the
//! keyspace.
//!
//! What happens without a command arrives in three ways. When a key changed under its waiters or
//! under a session's hold, the driver calls [`Locks::touched`]; when a connection is gone,
//! [`Locks::depart`] or [`Locks::client_gone`]; when [`Locks::next_deadline`] has passed,
//! [`Locks::next_timeout`] with [`Locks::time_out`], and [`Locks::passed`]. What needs a write is
//! only marked. At a moment at which the server allows one, the driver walks what is marked:
//! [`Locks::next_ending`] with [`Locks::end`], [`Locks::next_hold_to_check`] with
//! [`Locks::check_hold`], [`Locks::next_to_settle`] with [`Locks::settle`]. What must end at one
//! lock ends before anything is decided there that may be written: [`Locks::next_ending_of`].
#![forbid(unsafe_code)]

mod agenda;
mod arena;
mod deadlock;
mod decision;
mod effect;
mod error;
mod glob;
mod hold;
mod life;
mod lock;
mod metrics;
mod mode;
mod multi;
pub mod names;
mod parse;
mod pending;
mod plain;
mod position;
mod read_write;
pub mod request;
mod session;
mod stored;
mod table;
mod text;
mod time;
mod token;
mod turn;

pub use deadlock::{CHAIN_MAX, Circle};
pub use effect::{Effect, Field, Grant, Holder, TimeoutKey, Value, WaitOutcome, Write};
pub use error::{CommandError, Word};
pub use glob::glob_matches;
pub use lock::Locks;
pub use metrics::{Counters, Histogram};
pub use mode::{Kind, Mode};
pub use multi::MultiId;
pub use session::{Event, EventKind, Listener, LostReason, SessionId, SessionLimits};
pub use stored::{Count, Hash, NEVER, ReadDepth, ReadHold, ReadWrite, Stored};
pub use table::{Gauges, LockKey, LockRef, QueueView, WaiterId, WaiterView};
pub use text::Text;
pub use time::{INTEGER_MAX, Lease, Now, Wait};
pub use token::{Token, TokenMint};
pub use turn::{
    BlockedClient, Command, DECISIONS_MAX, Joined, Keys, Outcome, Purpose, Read, Reading, Subject,
    Task, Turn,
};

/// The field of a lock's hash that holds the fencing token.
pub const FENCE_FIELD: &[u8] = b"fence";
/// The field that marks a hash as a read-write lock.
pub const MODE_FIELD: &[u8] = b"mode";
/// What follows the owner in the field of a writer.
pub const WRITER_SUFFIX: &[u8] = b":write";
/// The most keys that one command can name.
pub const KEYS_MAX: usize = 1024;
/// The longest owner, in bytes.
pub const OWNER_LEN_MAX: usize = 1024;
/// The longest name of a session, in bytes.
pub const SESSION_LEN_MAX: usize = 1024;
/// The largest hold count.
pub const HOLD_COUNT_MAX: i64 = 2_147_483_647;
