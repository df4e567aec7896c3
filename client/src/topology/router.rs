//! Where a lock is: which node has it, and whether the session is attached there. And where to ask
//! again if a command was not carried out: at another node, or when the session is attached anew.

use std::mem;
use std::sync::{Arc, Mutex};
use std::time::Duration;

use tokio::sync::Notify;
use tokio::time::{Instant, sleep, timeout};

use crate::topology::{Identity, Map, Node, slot_of};
use crate::wire::{Answer, Attachment, Command, Connector, ServerId, Then};
use crate::{Backoff, Error, Lease};

/// The servers of a client: one, or the nodes of a cluster.
pub(crate) struct Router {
    /// How long the reply to a command may take.
    pub(crate) response_timeout: Duration,
    /// The one server, if there is no cluster.
    pub(super) only: Option<Arc<Node>>,
    /// Tells how to connect to any node, and is asked like the other seeds.
    pub(super) first: Connector,
    pub(super) seeds: Vec<Connector>,
    pub(super) identity: Identity,
    pub(super) map: Mutex<Map>,
    /// Wakes whoever has looked up where a lock is, when one has moved to another node.
    pub(super) moves: Notify,
    /// Wakes the task that asks who serves what.
    pub(super) stale: Notify,
}

/// Where to send a command.
#[derive(Clone)]
pub(crate) struct Route {
    pub(crate) node: Arc<Node>,
    /// Whose slot it is, if that node has sent us here (`ASK`): the slot is on its way.
    pub(super) sent_by: Option<Arc<Node>>,
}

impl Route {
    /// Hands a command over, and gives its answer. It is carried out even if that is dropped.
    pub(crate) fn send<T: Send + 'static>(&self, command: Command<T>) -> Answer<T> {
        let (told, answer) = Answer::open();
        // If it is not sent, the answer says that there is no runtime.
        let _unsent = self.send_then(command, |answer| {
            // A caller that no longer listens has its own way of undoing what it asked for.
            let _ = told.send(answer);
        });
        answer
    }

    /// Hands a command over: see [`Commands::send_then`](crate::wire::Commands::send_then).
    pub(crate) fn send_then<T: 'static>(
        &self,
        command: Command<T>,
        then: impl FnOnce(Result<T, Error>) + Send + 'static,
    ) -> Option<Then> {
        self.node.commands.send_then(self.address(command), then)
    }

    /// Where another node has sent it, a command goes behind an `ASKING`.
    pub(crate) fn address<T>(&self, mut command: Command<T>) -> Command<T> {
        command.call.asking = self.sent_by.is_some();
        command
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
    /// Whether a grant with this lease can be counted on without another word. One of another
    /// attachment may be over; and one that lay in the socket while this process was stopped may
    /// leave too little.
    pub(crate) fn is_fresh(&self, lease: Lease) -> bool {
        let session = &self.route.node.session;
        session.is_attached_by(&self.attachment)
            && lease.since.elapsed().saturating_mul(FRESH_PART) <= lease.length
    }
}

impl Router {
    /// One server; or a `cluster`, of whose nodes the first and any of these tell. Nobody has tried
    /// yet whether they are there.
    pub(crate) fn start(
        first: Connector,
        cluster: Option<Vec<Connector>>,
        identity: Identity,
    ) -> Arc<Self> {
        let only = || Node::start(first.clone(), &identity);
        Arc::new(Self {
            response_timeout: first.dialer.response_timeout,
            only: cluster.is_none().then(only),
            first,
            seeds: cluster.unwrap_or_default(),
            identity,
            map: Mutex::default(),
            moves: Notify::new(),
            stale: Notify::new(),
        })
    }

    /// Why the server cannot be asked just now, if its connection is known to be broken. A cluster
    /// is never known to be.
    pub(crate) fn trouble(&self) -> Option<Error> {
        let session = &self.only.as_ref()?.session;
        let broken = session.attachment().is_none();
        broken.then(|| session.trouble())
    }

    /// To which server the session is attached, if there is but one.
    pub(crate) fn server(&self) -> Option<ServerId> {
        self.only.as_ref()?.session.server()
    }

    /// Names that can be taken in one command each: in a cluster those of one slot, in the order of
    /// the slots: whoever takes several parts takes them in the same order as everybody else. None
    /// if there is one server, and one command takes all.
    pub(crate) fn parts(&self, names: &[Arc<[u8]>]) -> Vec<Arc<[Arc<[u8]>]>> {
        if !self.are_several() {
            return Vec::new();
        }
        let mut names = names.to_vec();
        names.sort_by_key(|name| slot_of(name));
        let are_together = |one: &Arc<[u8]>, other: &Arc<[u8]>| slot_of(one) == slot_of(other);
        names.chunk_by(are_together).map(Arc::from).collect()
    }

    /// Where to ask about this lock.
    pub(crate) fn route(&self, name: &[u8]) -> Route {
        let (node, sent_by) = (self.home(name), None);
        Route { node, sent_by }
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

    /// As [`attached_at`](Self::attached_at) where the lock is, or `there`, where a node has sent
    /// us; and after the time for a reply says why it is not attached.
    ///
    /// A node to which another sends may turn out to be known by another address, and then it is
    /// attached there and never here.
    pub(crate) async fn next_within(
        &self,
        name: &[u8],
        known: Option<&Arc<Attachment>>,
        mut there: Option<Route>,
    ) -> Result<AttachedRoute, Error> {
        let mut present = || match &mut there {
            Some(there) => {
                there.node = self.present(&there.node);
                there.clone()
            }
            None => self.route(name),
        };
        let next = timeout(self.response_timeout, self.attached_at(&mut present, known)).await;
        next.unwrap_or_else(|_| Err(present().node.session.trouble()))
    }

    /// Waits until the session is attached there, otherwise than it was `known`. Where that is, is
    /// looked up again whenever a lock has moved.
    pub(crate) async fn attached_at(
        &self,
        mut there: impl FnMut() -> Route,
        known: Option<&Arc<Attachment>>,
    ) -> Result<AttachedRoute, Error> {
        loop {
            // Before it is looked up: a move in between is heard of.
            let moved = self.moves.notified();
            let route = there();
            tokio::select! {
                next = route.node.session.next_attachment(known) => {
                    let attachment = next?;
                    return Ok(AttachedRoute { route, attachment });
                }
                () = moved => {}
            }
        }
    }

    /// Ends when a wait that stands at this route has to ask again: the session has been attached
    /// there anew, or the lock is at another node now, where it is attached.
    pub(crate) async fn left(&self, name: &[u8], at: &AttachedRoute) -> Result<(), Error> {
        let AttachedRoute { route, attachment } = at;
        loop {
            let moved = self.moves.notified();
            let home = self.home(name);
            // Sent by the slot's owner, it waits in the queue where the slot is to be: as long as
            // that node is there. Should it be replaced, the owner may have taken the slot back
            // meanwhile, and says nothing of it.
            let sent_by = route.sent_by.as_ref();
            let is_sent = sent_by.is_some_and(|by| Arc::ptr_eq(by, &home));
            let as_ever = route.is_at(&home) || is_sent && route.node.is_attached();
            let left = tokio::select! {
                left = route.node.session.next_attachment(Some(attachment)) => left,
                left = home.session.next_attachment(None), if !as_ever => left,
                () = moved => continue,
                () = sleep(LOOK_EVERY), if is_sent => continue,
            };
            return left.map(drop);
        }
    }

    /// Has something asked where this lock is by now. Each node that sends it on, or at which the
    /// session is not attached, has said that it did nothing, so asking at the next does no harm.
    /// If asking `twice` does none either, it is asked again when the connection has broken: the
    /// next may be a good one. The last error stands if asking again is of no use, or takes longer
    /// than the reply to a command may.
    ///
    /// Beside the route there is by what it was attached before anything is sent: what is confirmed
    /// now counts on this or a later one.
    pub(crate) async fn carry_out<T, A: Future<Output = Result<T, Error>>>(
        &self,
        name: &[u8],
        mut twice: bool,
        ask: impl Fn(Route, Option<Arc<Attachment>>) -> A,
    ) -> Result<T, Error> {
        let (began, mut backoff) = (Instant::now(), Backoff::new());
        let (mut hops, mut attached_anew) = (0_u32, false);
        let mut route = self.route(name);
        loop {
            let attachment = route.node.session.attachment();
            let error = match ask(route.clone(), attachment.clone()).await {
                Err(error) => error,
                answer => return answer,
            };
            if error.is_broken_connection() && mem::take(&mut twice) {
                continue;
            }
            let in_time = began.elapsed() < self.response_timeout;
            if error.has_code("NOSESSION") {
                // Connections may break one after the other: each time nothing was done.
                if mem::replace(&mut attached_anew, true) && !in_time {
                    return Err(error);
                }
                let next = self.next_within(name, attachment.as_ref(), None).await;
                route = next.map_err(|_| error)?.route;
                continue;
            }
            let there = self.redirected(&error, &route);
            if there.is_none() && !(error.is_try_again() && self.are_several()) {
                return Err(error);
            }
            if !in_time {
                return Err(error.misdirected());
            }
            hops = hops.saturating_add(1);
            // Two nodes that have not yet heard of a move send us to each other.
            if there.is_none() || hops > MAX_REDIRECTS {
                sleep(backoff.next()).await;
            }
            route = self.next_within(name, None, there).await?.route;
        }
    }

    /// Whether a lock may be at another node than the one that speaks of it.
    pub(crate) fn are_several(&self) -> bool {
        self.only.is_none()
    }
}

/// So often in a row nodes may send a command on. Two that have not yet heard of a move send it to
/// each other until they have.
pub(crate) const MAX_REDIRECTS: u32 = 5;

/// So often it is looked whether a node is there to which a slot is on its way.
const LOOK_EVERY: Duration = Duration::from_secs(2);

/// A grant older than this part of the lease is confirmed first.
const FRESH_PART: u32 = 3;
