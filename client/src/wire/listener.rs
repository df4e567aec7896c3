//! The news that a client gets from its servers, beside the replies to its commands.

use std::sync::Arc;

use tokio::time::Instant;

use crate::error::Error;
use crate::wire::{Request, Session, Told};

/// Receives the events of a client's sessions.
pub(crate) trait Listener: Send + Sync {
    /// The session was answered, with events that it has not heard before; `is_new` if it has begun
    /// anew. None of them happened before `since`: when the last call was sent that was answered in
    /// this life with all that there was to tell.
    fn heard(&self, session: &Arc<Session>, told: &Told, is_new: bool, since: Option<Instant>);

    /// The session's server is not reached, and another may be in its place.
    fn broken(&self, session: &Arc<Session>);

    /// The session's server refuses command connections, or is not reached by them.
    fn refused(&self);

    /// A node has said that this request is for another one, or it cannot be reached and its slots
    /// may be at another.
    fn redirected(&self, session: &Arc<Session>, request: Request, error: Error);

    /// Whether this session's server serves the name, as far as is known.
    fn is_home(&self, session: &Arc<Session>, name: &[u8]) -> bool;
}
