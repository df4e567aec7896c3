//! Where a lock is: which node has it, and where to ask again if a node says otherwise.

use std::sync::{Arc, Mutex};
use std::time::Duration;

use tokio::sync::Notify;

use crate::error::Error;
use crate::locked;
use crate::topology::Node;
use crate::topology::map::{Map, slot_of};
use crate::wire::{Connector, Identity, Session};

/// The servers of a client: one, or the nodes of a cluster.
pub(crate) struct Router {
    /// How long the reply to a command may take.
    pub(crate) response_timeout: Duration,
    /// The one server, if there is no cluster.
    pub(super) only: Option<Arc<Node>>,
    /// Tells how to connect to any node, and is asked like the other seeds.
    pub(super) first: Connector,
    pub(super) seeds: Vec<Connector>,
    pub(crate) identity: Arc<Identity>,
    pub(super) map: Mutex<Map>,
    /// Wakes the task that reads the map.
    pub(super) stale: Notify,
}

/// Where to send a command.
pub(crate) struct Route {
    pub(crate) node: Arc<Node>,
    /// Whether the slot is on its way there (`ASK`).
    pub(crate) asking: bool,
}

impl Router {
    /// One server; or a `cluster`, of whose nodes the first and any of these tell. Nobody has tried
    /// yet whether they are there.
    pub(crate) fn start(
        first: Connector,
        cluster: Option<Vec<Connector>>,
        identity: Identity,
    ) -> Self {
        let identity = Arc::new(identity);
        let only = || Node::start(first.clone(), None, &identity);
        Self {
            response_timeout: first.dialer.response_timeout,
            only: cluster.is_none().then(only),
            first,
            seeds: cluster.unwrap_or_default(),
            identity,
            map: Mutex::default(),
            stale: Notify::new(),
        }
    }

    /// Waits until the first try to reach a server has ended: the error, if it failed.
    pub(crate) async fn tried(&self) -> Result<(), Error> {
        match &self.only {
            Some(only) => only.session.tried().await,
            None => self.cluster_tried().await,
        }
    }

    /// Why the server cannot be asked just now, if it is known not to be there. A cluster is never
    /// known to be.
    pub(crate) fn trouble(&self) -> Option<Error> {
        let session = &self.only.as_ref()?.session;
        (!session.is_attached()).then(|| session.trouble())
    }

    /// The address in the first URL, as it is shown.
    pub(crate) fn address(&self) -> String {
        self.first.shown()
    }

    /// To which server the session is attached, if there is but one.
    pub(crate) fn server(&self) -> Option<Arc<str>> {
        self.only.as_ref()?.session.server()
    }

    /// The node of this session; if it is not used any more, the node that serves the name.
    pub(crate) fn node_of(&self, session: &Arc<Session>, name: &[u8]) -> Arc<Node> {
        let is_its = |node: &&Arc<Node>| Arc::ptr_eq(&node.session, session);
        let node = locked(&self.map).nodes.values().find(is_its).cloned();
        node.unwrap_or_else(|| self.home(name))
    }

    /// Groups of names that one command each can take: in a cluster the names of one slot, in the
    /// order of the slots, so that all callers take several groups in the same order. Empty for a
    /// single server, where one command takes all.
    pub(crate) fn parts(&self, names: &[Arc<[u8]>]) -> Vec<Arc<[Arc<[u8]>]>> {
        if names.len() < 2 || !self.are_several() {
            return Vec::new();
        }
        let mut names = names.to_vec();
        names.sort_by_key(|name| slot_of(name));
        let are_together = |one: &Arc<[u8]>, other: &Arc<[u8]>| slot_of(one) == slot_of(other);
        names.chunk_by(are_together).map(Arc::from).collect()
    }

    /// The node that serves the name, as far as is known.
    pub(crate) fn home(&self, name: &[u8]) -> Arc<Node> {
        match &self.only {
            Some(only) => Arc::clone(only),
            None => self.home_in_cluster(name),
        }
    }

    /// Whether this session's node serves the name, as far as is known.
    pub(crate) fn is_home(&self, session: &Arc<Session>, name: &[u8]) -> bool {
        self.only.is_some() || Arc::ptr_eq(&self.home(name).session, session)
    }

    /// Where a node sends us with this error, if it does and that is known. If not, or if a slot
    /// has moved for good, the map is read again.
    pub(crate) fn redirected(&self, error: &Error) -> Option<Route> {
        if !self.are_several() {
            return None;
        }
        let there = self.follow(error);
        let is_known = there.as_ref().is_some_and(|route| route.asking);
        if !is_known && (error.redirect().is_some() || error.is_unanswered()) {
            self.request_refresh();
        }
        there
    }

    /// Has the map read again.
    pub(crate) fn request_refresh(&self) {
        self.stale.notify_one();
    }

    /// Whether a lock may be at another node than the one that speaks of it.
    pub(crate) fn are_several(&self) -> bool {
        self.only.is_none()
    }
}
