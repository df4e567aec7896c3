//! Where a lock is: which node has it, and whether the session is attached there.

use std::sync::{Arc, Weak};
use std::time::Duration;

use tokio::runtime::Handle;
use tokio::time::timeout;

use crate::error::Error;
use crate::time::{Lease, part};
use crate::topology::cluster::Cluster;
use crate::topology::node::{Identity, Listener, Node};
use crate::topology::slots;
use crate::wire::commands::Answer;
use crate::wire::connection::{Connector, ServerId};
use crate::wire::request::Command;
use crate::wire::session::Attachment;

/// The servers of a client.
pub(crate) struct Router {
    /// How long the reply to a command may take.
    pub(crate) response_timeout: Duration,
    layout: Layout,
}

enum Layout {
    One(Arc<Node>),
    Cluster(Arc<Cluster>),
}

/// Where to send a command.
#[derive(Clone)]
pub(crate) struct Route {
    pub(crate) node: Arc<Node>,
    /// Whose slot it is, if that node has sent us here (`ASK`): the slot is on its way.
    sent_by: Option<Arc<Node>>,
}

impl Route {
    /// A node that serves the slot.
    pub(crate) fn to(node: Arc<Node>) -> Self {
        let sent_by = None;
        Self { node, sent_by }
    }

    /// A node to which another sends for this once.
    pub(crate) fn asking(sent_by: Arc<Node>, node: Arc<Node>) -> Self {
        let sent_by = Some(sent_by);
        Self { node, sent_by }
    }

    /// Hands a command over: see [`Commands::send`](crate::wire::commands::Commands::send).
    pub(crate) fn send<T: Send + 'static>(&self, command: Command<T>) -> Answer<T> {
        self.node.commands.send(self.address(command))
    }

    /// As [`send`](Self::send): see
    /// [`Commands::send_then`](crate::wire::commands::Commands::send_then).
    pub(crate) fn send_then<T: 'static>(
        &self,
        command: Command<T>,
        then: impl FnOnce(Result<T, Error>) + Send + 'static,
    ) {
        self.node.commands.send_then(self.address(command), then);
    }

    /// Whether commands go there behind an `ASKING`.
    pub(crate) fn is_asking(&self) -> bool {
        self.sent_by.is_some()
    }

    pub(crate) fn address<T>(&self, command: Command<T>) -> Command<T> {
        let asking = self.is_asking();
        Command { asking, ..command }
    }

    pub(crate) fn is_at(&self, node: &Arc<Node>) -> bool {
        Arc::ptr_eq(&self.node, node)
    }
}

/// A route to where the session is attached.
#[derive(Clone)]
pub(crate) struct AttachedRoute {
    pub(crate) route: Route,
    /// What it was attached by when this was looked up.
    pub(crate) attachment: Arc<Attachment>,
}

impl AttachedRoute {
    /// Whether the session has been attached there by this ever since.
    pub(crate) fn is_present(&self) -> bool {
        let present = self.route.node.session.attachment();
        present.is_some_and(|one| Arc::ptr_eq(&one, &self.attachment))
    }

    /// Whether a grant with this lease can be counted on without another word. One of another
    /// attachment may be over; and one that lay in the socket while this process was stopped may
    /// leave too little.
    pub(crate) fn is_fresh(&self, lease: Lease) -> bool {
        self.is_present() && lease.since.elapsed() <= part(lease.length, FRESH_PART)
    }
}

impl Router {
    /// One server. Nobody has tried yet whether it is there.
    pub(crate) fn one(
        runtime: &Handle,
        connector: Connector,
        identity: Identity,
        listener: Weak<dyn Listener>,
    ) -> Self {
        Self {
            response_timeout: connector.response_timeout(),
            layout: Layout::One(Node::start(runtime, connector, identity, listener, None)),
        }
    }

    /// The nodes of a cluster, of which any one of these tells. None of them has been asked yet.
    pub(crate) fn cluster(
        runtime: &Handle,
        first: Connector,
        seeds: Vec<Connector>,
        identity: Identity,
        listener: Weak<dyn Listener>,
    ) -> Self {
        Self {
            response_timeout: first.response_timeout(),
            layout: Layout::Cluster(Cluster::start(runtime, first, seeds, identity, listener)),
        }
    }

    /// Waits until the first try to reach a server has ended: the error, if it failed.
    pub(crate) async fn tried(&self) -> Result<(), Error> {
        match &self.layout {
            Layout::One(node) => node.tried().await,
            Layout::Cluster(cluster) => cluster.tried().await,
        }
    }

    /// Why the server cannot be asked just now, if its connection is known to be broken. A cluster
    /// is never known to be.
    pub(crate) fn trouble(&self) -> Option<Error> {
        let Layout::One(node) = &self.layout else {
            return None;
        };
        let broken = node.session.attachment().is_none();
        broken.then(|| node.session.trouble().unasked())
    }

    /// To which server the session is attached, if there is but one.
    pub(crate) fn server(&self) -> Option<ServerId> {
        let Layout::One(node) = &self.layout else {
            return None;
        };
        node.session.attachment()?.server().cloned()
    }

    /// Names that can be taken in one command each: with one server all, in a cluster those of one
    /// slot, in the order of the slots.
    pub(crate) fn parts(&self, names: &Arc<[Arc<[u8]>]>) -> Vec<Arc<[Arc<[u8]>]>> {
        if self.are_several() {
            slots::parts(names)
        } else {
            vec![Arc::clone(names)]
        }
    }

    /// Where to ask about this lock.
    pub(crate) fn route(&self, name: &[u8]) -> Route {
        Route::to(self.home(name))
    }

    fn home(&self, name: &[u8]) -> Arc<Node> {
        match &self.layout {
            Layout::One(node) => Arc::clone(node),
            Layout::Cluster(cluster) => cluster.home(name),
        }
    }

    /// Whether this node serves the lock, as far as is known.
    pub(crate) fn is_home(&self, node: &Arc<Node>, name: &[u8]) -> bool {
        Arc::ptr_eq(&self.home(name), node)
    }

    /// Where to ask about this lock, if the session is attached there.
    pub(crate) fn attached(&self, name: &[u8]) -> Option<AttachedRoute> {
        let route = self.route(name);
        let attachment = route.node.session.attachment()?;
        Some(AttachedRoute { route, attachment })
    }

    /// Waits until the session is attached where to ask about this lock, otherwise than it was
    /// `known`.
    pub(crate) async fn next(
        &self,
        name: &[u8],
        known: Option<&AttachedRoute>,
    ) -> Result<AttachedRoute, Error> {
        let known = known.map(|known| &known.attachment);
        loop {
            let moved = self.moved();
            let route = self.route(name);
            tokio::select! {
                next = route.node.session.next_attachment(known) => {
                    let attachment = next?;
                    return Ok(AttachedRoute { route, attachment });
                }
                () = moved => {}
            }
        }
    }

    /// As [`next`](Self::next), and after the time for a reply says why there is none.
    pub(crate) async fn next_within(
        &self,
        name: &[u8],
        known: Option<&AttachedRoute>,
    ) -> Result<AttachedRoute, Error> {
        let next = timeout(self.response_timeout, self.next(name, known));
        let trouble = || self.home(name).session.trouble();
        next.await.unwrap_or_else(|_| Err(trouble()))
    }

    /// Waits until the session is attached at this route, and after the time for a reply says why
    /// it is not.
    pub(crate) async fn reach(&self, route: Route) -> Result<AttachedRoute, Error> {
        let session = &route.node.session;
        let reached = timeout(self.response_timeout, self.reached(route.clone()));
        reached.await.unwrap_or_else(|_| Err(session.trouble()))
    }

    /// A node to which another sends may turn out to be known by another address, and then it is
    /// attached there and never here.
    async fn reached(&self, mut route: Route) -> Result<AttachedRoute, Error> {
        loop {
            let moved = self.moved();
            route.node = self.present(route.node);
            tokio::select! {
                next = route.node.session.next_attachment(None) => {
                    let attachment = next?;
                    return Ok(AttachedRoute { route, attachment });
                }
                () = moved => {}
            }
        }
    }

    /// The node that has this one's place by now.
    fn present(&self, node: Arc<Node>) -> Arc<Node> {
        match self.as_cluster() {
            None => node,
            Some(cluster) => cluster.present(&node),
        }
    }

    /// Ends when a wait that stands at this route has to ask again: the session has been attached
    /// there anew, or the lock is at another node now, where it is attached.
    pub(crate) async fn left(&self, name: &[u8], at: &AttachedRoute) -> Result<(), Error> {
        loop {
            let moved = self.moved();
            let home = self.home(name);
            // Sent by the slot's owner, it waits in the queue where the slot is to be.
            let as_ever = at.route.is_at(&home)
                || at
                    .route
                    .sent_by
                    .as_ref()
                    .is_some_and(|by| Arc::ptr_eq(by, &home));
            let elsewhere = async {
                if as_ever {
                    std::future::pending().await
                } else {
                    home.session.next_attachment(None).await
                }
            };
            tokio::select! {
                next = at.route.node.session.next_attachment(Some(&at.attachment)) => {
                    return next.map(drop);
                }
                next = elsewhere => return next.map(drop),
                () = moved => {}
            }
        }
    }

    /// Ends when from now on a lock has moved to another node; with one server, never.
    fn moved(&self) -> impl Future<Output = ()> + 'static {
        let moves = self.as_cluster().map(Cluster::moves);
        async move {
            match moves {
                // Without a sender there is no client either.
                Some(mut moves) => drop(moves.changed().await),
                None => std::future::pending().await,
            }
        }
    }

    /// Where a command has to go instead, if a node has sent us on with this error. Others it may
    /// make us look up who serves what.
    pub(crate) fn redirected(&self, error: &Error, from: &Route) -> Option<Route> {
        self.as_cluster()?.redirected(error, &from.node)
    }

    /// A node cannot be reached: its slots may be another's by now.
    pub(crate) fn request_refresh(&self) {
        if let Some(cluster) = self.as_cluster() {
            cluster.request_refresh();
        }
    }

    /// Whether a lock may be at another node than the one that speaks of it.
    pub(crate) fn are_several(&self) -> bool {
        self.as_cluster().is_some()
    }

    fn as_cluster(&self) -> Option<&Cluster> {
        match &self.layout {
            Layout::One(_) => None,
            Layout::Cluster(cluster) => Some(cluster),
        }
    }
}

/// So often in a row nodes may send a command on. Two that have not yet heard of a move send it to
/// each other until they have.
pub(crate) const MAX_REDIRECTS: u32 = 5;

/// A grant older than this part of the lease is confirmed first.
const FRESH_PART: u32 = 3;
