//! The news that a client gets from its servers, beside the replies to its commands.

use std::sync::Arc;

use tokio::time::Instant;

use crate::error::Error;
use crate::wire::{Event, Request, Session};

/// Receives the events of a client's sessions.
pub(crate) trait Listener: Send + Sync {
    /// The session was answered.
    fn heard(&self, session: &Arc<Session>, news: News);

    /// The session's server is not reached, and another may be in its place.
    fn broken(&self, session: &Arc<Session>);

    /// A node has said that this request is for another one, or it cannot be reached and its slots
    /// may be at another.
    fn redirected(&self, session: &Arc<Session>, request: Request, error: Error);

    /// Whether this session's server serves the name, as far as is known.
    fn is_home(&self, session: &Arc<Session>, name: &[u8]) -> bool;
}

/// An answer to EVENTS.
pub(crate) struct News {
    pub(crate) life: i64,
    /// Whether the session has begun anew.
    pub(crate) is_new: bool,
    /// Those that have not been heard before, in order.
    pub(crate) events: Vec<Event>,
    /// None of it happened before this: when the last call was sent that was answered in this life
    /// with all that there was to tell.
    pub(crate) since: Option<Instant>,
}
