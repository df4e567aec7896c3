//! One server, and the client's two connections to it.

use std::collections::HashSet;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex as Cell, Weak};
use std::time::Duration;

use tokio::runtime::Handle;
use tokio::sync::Mutex;
use tokio::task::AbortHandle;
use tokio::time::Instant;

use crate::error::Error;
use crate::locked;
use crate::lost_reason::LostReason;
use crate::topology::cluster::Cluster;
use crate::wire::commands::Commands;
use crate::wire::connection::{Connector, ServerId};
use crate::wire::durability::{Acknowledger, Durability};
use crate::wire::endpoint::Address;
use crate::wire::events::{Events, SessionListener};
use crate::wire::reply::Event;
use crate::wire::sentinel_watch;
use crate::wire::session::{Attachment, Session};

/// A server, the task that carries commands to it, and the one that keeps the session attached.
/// Both begin unconnected and connect by themselves; they end with it.
pub(crate) struct Node {
    pub(crate) number: NodeNumber,
    pub(crate) commands: Commands,
    pub(crate) session: Arc<Session>,
    /// Where it is connected to.
    pub(crate) address: Address,
    /// The node that is attached to the same server, and so takes this one's place.
    twin: Cell<Weak<Node>>,
    /// If grants must be acknowledged before they count.
    pub(crate) acknowledger: Option<Acknowledger>,
    /// Held by the watchdog while it waits for this node's answer.
    pub(crate) renewing: Arc<Mutex<()>>,
    events: AbortHandle,
    /// Behind sentinels, what asks them whether this is still the primary.
    sentinel_watch: Option<AbortHandle>,
}

/// Tells the nodes of this process apart.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct NodeNumber(u64);

impl NodeNumber {
    pub(crate) fn next() -> Self {
        static LAST: AtomicU64 = AtomicU64::new(0);
        Self(LAST.fetch_add(1, Ordering::Relaxed))
    }
}

/// What a client is called at each of its nodes, and what it asks of them.
#[derive(Clone, Debug)]
pub(crate) struct Identity {
    pub(crate) session: Arc<str>,
    pub(crate) grace: Duration,
    pub(crate) durability: Option<Durability>,
}

/// Who hears what happens at the nodes of a client.
pub(crate) trait Listener: Send + Sync {
    /// What this node has told; none of it happened before `since`.
    fn told(self: Arc<Self>, node: &Arc<Node>, events: Vec<Event>, since: Instant);

    /// The session is attached there anew: what is held there is to be confirmed.
    fn attached(self: Arc<Self>, node: &Arc<Node>, attachment: &Arc<Attachment>);

    /// The session there does not answer.
    fn broken(&self);

    /// The session there will not come back.
    fn over(&self, node: &Arc<Node>, reason: LostReason);

    /// These slots have moved: what is held there is to be confirmed where they are now.
    fn moved(self: Arc<Self>, slots: &HashSet<u16>);

    /// Whether something held counts on this session, be it attached at present or not.
    fn counts_on(&self, session: &Session) -> bool;
}

impl Node {
    pub(crate) fn start(
        runtime: &Handle,
        connector: Connector,
        identity: Identity,
        listener: Weak<dyn Listener>,
        cluster: Option<Weak<Cluster>>,
    ) -> Arc<Self> {
        let address = connector.address();
        let commands = Commands::start(runtime, connector.clone());
        let session = Session::new(identity.session, identity.grace);
        let acknowledger = identity
            .durability
            .map(|durability| Acknowledger::start(runtime, connector.clone(), durability));
        let is_watched = !connector.endpoint().sentinels().is_empty();
        let sentinel_watch = is_watched.then(|| {
            let watch = sentinel_watch::run(connector.clone(), identity.grace);
            runtime.spawn(watch).abort_handle()
        });
        Arc::new_cyclic(|node| {
            let here = Here {
                node: Weak::clone(node),
                listener,
                cluster,
            };
            let events = Events::new(connector, Arc::clone(&session), here);
            Self {
                number: NodeNumber::next(),
                commands,
                session,
                address,
                twin: Cell::default(),
                acknowledger,
                renewing: Arc::default(),
                events: runtime.spawn(events.run()).abort_handle(),
                sentinel_watch,
            }
        })
    }

    /// Waits until the first try to reach it has ended: the error, if it failed.
    pub(crate) async fn tried(&self) -> Result<(), Error> {
        self.session.tried().await?;
        self.commands.tried().await;
        Ok(())
    }

    pub(crate) fn is_attached(&self) -> bool {
        self.session.attachment().is_some()
    }

    /// Whether the session is attached to this very server. One that does not tell its run id is
    /// taken for another.
    pub(crate) fn is_attached_to(&self, server: &ServerId) -> bool {
        let attachment = self.session.attachment();
        let there = attachment.as_ref().and_then(|one| one.server());
        there.is_some_and(|there| server.is_surely(there))
    }

    /// The node that takes its place, as long as there is one.
    pub(crate) fn twin(&self) -> Option<Arc<Self>> {
        locked(&self.twin).upgrade()
    }

    /// Says who takes its place: whether that is news.
    pub(crate) fn set_twin(&self, twin: Option<&Arc<Self>>) -> bool {
        let twin = twin.map(Arc::downgrade).unwrap_or_default();
        let mut known = locked(&self.twin);
        let is_new = !known.ptr_eq(&twin);
        *known = twin;
        is_new
    }
}

impl Drop for Node {
    fn drop(&mut self) {
        // The handle of the commands goes with it, and their task ends with its last handle.
        self.events.abort();
        if let Some(watch) = &self.sentinel_watch {
            watch.abort();
        }
    }
}

/// Tells the client's listener which node it is about. It keeps neither alive.
struct Here {
    node: Weak<Node>,
    listener: Weak<dyn Listener>,
    /// If it has others beside it.
    cluster: Option<Weak<Cluster>>,
}

impl Here {
    fn tell(&self, tell: impl FnOnce(Arc<dyn Listener>, &Arc<Node>)) {
        if let (Some(listener), Some(node)) = (self.listener.upgrade(), self.node.upgrade()) {
            tell(listener, &node);
        }
    }
}

impl Here {
    /// With the nodes beside this one; none without a cluster.
    fn among_nodes<T>(&self, ask: impl FnOnce(&Cluster, &Arc<Node>) -> T) -> Option<T> {
        let cluster = self.cluster.as_ref()?.upgrade()?;
        Some(ask(&cluster, &self.node.upgrade()?))
    }
}

impl SessionListener for Here {
    fn may_attach(&self, server: &ServerId) -> bool {
        let may = self.among_nodes(|cluster, node| cluster.may_attach(node, server));
        may.unwrap_or(true)
    }

    fn may_be_a_twin(&self, server: &ServerId) -> bool {
        let may_be = self.among_nodes(|cluster, node| cluster.may_be_a_twin(node, server));
        may_be.unwrap_or(false)
    }

    fn told(&self, events: Vec<Event>, since: Instant) {
        self.tell(|listener, node| listener.told(node, events, since));
    }

    fn attached(&self, attachment: &Arc<Attachment>) {
        self.tell(|listener, node| listener.attached(node, attachment));
    }

    fn broken(&self) {
        self.tell(|listener, _| listener.broken());
    }

    fn over(&self, reason: LostReason) {
        self.tell(|listener, node| listener.over(node, reason));
    }
}
