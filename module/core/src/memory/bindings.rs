//! Command connections: of each session the one that was bound last, for as long as it exists.
//!
//! They are remembered also after the session's end: what such a connection has sent may be carried
//! out later, so it is closed before another one is bound.

use crate::interface::error::CommandError;
use crate::values::ids::SessionRef;
use crate::values::limits::ROOM_KEPT;
use std::collections::HashMap;
use std::rc::Rc;

/// A session's user and name.
type Named = (Rc<[u8]>, Rc<[u8]>);

#[derive(Clone, Copy, Debug)]
struct Binding {
    client_id: u64,
    epoch: u64,
}

/// All command connections.
#[derive(Debug, Default)]
pub(crate) struct Bindings {
    sessions: HashMap<Named, Binding>,
    clients: HashMap<u64, Named>,
}

impl Bindings {
    /// Binds a client's connection to the session. `known` is the largest number that the session
    /// knows. Returns the client whose connection must be closed now.
    ///
    /// # Errors
    /// The number is not larger than an earlier one, or the connection is bound to another session:
    /// each connection is bound to one, so that no more is remembered than there are connections.
    pub(crate) fn bind(
        &mut self,
        session: SessionRef<'_>,
        client_id: u64,
        epoch: u64,
        known: Option<u64>,
    ) -> Result<Option<u64>, CommandError> {
        let named: Named = (Rc::from(session.user), Rc::from(session.name));
        let former = self.sessions.get(&named).copied();
        if let Some(known) = known.max(former.map(|former| former.epoch))
            && epoch <= known
        {
            return Err(CommandError::Stale(known));
        }
        if self.clients.get(&client_id).is_some_and(|of| *of != named) {
            return Err(CommandError::BoundToAnother);
        }
        let former = former.map(|former| former.client_id);
        let former = former.filter(|former| *former != client_id);
        if let Some(former) = former {
            self.clients.remove(&former);
        }
        self.clients.insert(client_id, named.clone());
        self.sessions.insert(named, Binding { client_id, epoch });
        Ok(former)
    }

    /// A connection has closed. Returns the session that it was bound to.
    pub(crate) fn closed(&mut self, client_id: u64) -> Option<Named> {
        let named = self.clients.remove(&client_id)?;
        self.sessions.remove(&named);
        if self.clients.is_empty() {
            self.clients.shrink_to(ROOM_KEPT);
            self.sessions.shrink_to(ROOM_KEPT);
        }
        Some(named)
    }
}
