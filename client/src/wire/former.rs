//! Connections that were given up are closed at the server before others take their place.

use std::sync::{Arc, Mutex};

use crate::wire::{Call, Connection, Connector, ServerId, request, within};
use crate::{Error, locked};

/// The connections that a client has opened, as one of its nodes sees them: which of them were
/// before the node's present ones.
///
/// What was sent on a connection may arrive long after it was given up: systems go on sending what
/// a closed socket has left for some 100 s, and a server that stood still reads what it has
/// received. Behind what goes by the next connection it does harm: a release without a token frees
/// a newer hold, a renewal shortens its lease, and RLOCK.EVENTS takes the session over from
/// ourselves. So the next connection has the server close those before it first. A user that may
/// not say CLIENT KILL, or read the run id by which the server is known, does without.
///
/// A server that has another address has another node of the client. That has all connections of
/// the former node closed when it attaches the session: nothing is granted by it before.
#[derive(Clone, Debug, Default)]
pub(crate) struct Former {
    opened: Arc<Mutex<Vec<Opened>>>,
    node: Arc<()>,
}

#[derive(Debug)]
struct Opened {
    id: ClientId,
    purpose: Purpose,
    node: Arc<()>,
}

/// What a connection is for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Purpose {
    Commands,
    Copies,
    Session,
    /// Nothing any more: it was the session's, and is to be closed behind the next RLOCK.EVENTS.
    FormerSession,
}

/// Which client a connection is at which server. No number is given twice in one life of a server.
pub(crate) type ClientId = (ServerId, u64);

impl Connector {
    /// Opens the next connection for this purpose, for which the node has one at a time.
    pub(crate) async fn open_next(&self, purpose: Purpose) -> Result<Connection, Error> {
        let next = self.open().await?;
        let former = self.former.before(&next.server, purpose);
        if !former.is_empty() {
            // With a time of its own: where the way is long, the handshake may have used up its.
            let limit = self.dialer.response_timeout;
            let closed = within(limit, next.ask(kills(&former).into_iter(), None)).await;
            closed.map_err(Error::unasked)?;
            self.former.are_closed(&former);
        }
        self.former.add(next.id(), purpose);
        Ok(next)
    }
}

impl Former {
    /// The same connections, as another node sees them.
    pub(crate) fn of_other_node(&self) -> Self {
        let (opened, node) = (Arc::clone(&self.opened), Arc::default());
        Self { opened, node }
    }

    /// This connection of the node is for this from now on.
    pub(crate) fn add(&self, id: Option<ClientId>, purpose: Purpose) {
        let id = id.filter(|(server, _)| server.is_surely(server));
        let Some(id) = id else { return };
        let mut opened = locked(&self.opened);
        opened.retain(|one| one.id != id);
        if opened.len() == KEPT_MAX {
            opened.remove(0);
        }
        let node = Arc::clone(&self.node);
        opened.push(Opened { id, purpose, node });
    }

    /// What is to be closed at this server for a new connection of this purpose.
    pub(crate) fn before(&self, server: &ServerId, purpose: Purpose) -> Vec<ClientId> {
        let is_before = |one: &&Opened| {
            let is_own = Arc::ptr_eq(&one.node, &self.node);
            one.id.0 == *server
                && match purpose {
                    Purpose::Session => !is_own || one.purpose == Purpose::FormerSession,
                    _ => is_own && one.purpose == purpose,
                }
        };
        let opened = locked(&self.opened);
        let before = opened.iter().filter(is_before);
        before.map(|one| one.id.clone()).collect()
    }

    /// That was answered, with what does not matter: whoever may not say it never may.
    pub(crate) fn are_closed(&self, closed: &[ClientId]) {
        locked(&self.opened).retain(|one| !closed.contains(&one.id));
    }
}

/// What has their server close them.
pub(crate) fn kills(former: &[ClientId]) -> Vec<Call> {
    former.iter().map(|(_, id)| request::kill(*id)).collect()
}

/// The oldest are forgotten. Tries are paced, so what was sent on them is too old to arrive; and no
/// client has so many nodes.
const KEPT_MAX: usize = 10_000;

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_node_has_its_own_former_ones_closed_and_those_of_others_when_it_attaches() {
        let server = ServerId::RunId("one".into());
        let node = Former::default();
        let other = node.of_other_node();
        let id = |number| (server.clone(), number);
        node.add(Some(id(1)), Purpose::Commands);
        node.add(Some(id(2)), Purpose::Session);
        node.add(Some((ServerId::At("a:1".into()), 3)), Purpose::Commands);
        assert_eq!(node.before(&server, Purpose::Commands), [id(1)]);
        assert_eq!(node.before(&server, Purpose::Copies), []);
        assert_eq!(node.before(&server, Purpose::Session), []);
        // A node that is only another name of one in use does not close what that works with.
        assert_eq!(other.before(&server, Purpose::Commands), []);
        assert_eq!(other.before(&server, Purpose::Session), [id(1), id(2)]);
        assert_eq!(
            other.before(&ServerId::RunId("two".into()), Purpose::Session),
            []
        );
        node.add(Some(id(2)), Purpose::FormerSession);
        assert_eq!(node.before(&server, Purpose::Session), [id(2)]);
        other.are_closed(&[id(1), id(2)]);
        assert_eq!(node.before(&server, Purpose::Commands), []);
    }
}
