//! One server, and the client's two connections to it.

use std::collections::BTreeSet;
use std::sync::{Arc, Mutex as Cell, Weak};
use std::time::Duration;

use tokio::runtime::Handle;
use tokio::sync::Mutex;
use tokio::task::JoinSet;
use tokio::time::Instant;
use uuid::Uuid;

use crate::background::task;
use crate::error::Error;
use crate::topology::Router;
use crate::wire::{
    Acknowledger, Address, Attachment, Commands, Connector, Durability, Event, Events, ServerId,
    Session, SessionListener, sentinel_watch,
};
use crate::{chance, locked};

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
    listener: Weak<dyn Listener>,
    /// Knows the nodes beside it.
    router: Weak<Router>,
    /// What keeps the session attached; and behind sentinels, what asks them whether this is still
    /// the primary. They end with it, and do not keep it alive.
    _tasks: JoinSet<()>,
}

/// Tells nodes apart.
pub(crate) type NodeNumber = Uuid;

/// What a client is called at each of its nodes, what it asks of them, and who hears of it.
pub(crate) struct Identity {
    pub(crate) session: Arc<str>,
    pub(crate) grace: Duration,
    pub(crate) durability: Option<Durability>,
    pub(crate) listener: Weak<dyn Listener>,
    pub(crate) runtime: Handle,
}

/// Who hears what happens at the nodes of a client.
pub(crate) trait Listener: Send + Sync {
    /// What this node has told; none of it happened before `since`.
    fn told(self: Arc<Self>, node: &Arc<Node>, events: Vec<Event>, since: Instant);

    /// The session is attached there anew: what is held there is to be confirmed.
    fn attached(self: Arc<Self>, node: &Arc<Node>, attachment: &Arc<Attachment>);

    /// The session there does not answer.
    fn broken(&self);

    /// These slots have moved: what is held there is to be confirmed where they are now.
    fn moved(self: Arc<Self>, slots: &BTreeSet<u16>);

    /// Whether something held counts on this session, be it attached at present or not.
    fn counts_on(&self, session: &Session) -> bool;
}

impl Node {
    pub(crate) fn start(
        connector: Connector,
        identity: &Identity,
        router: Weak<Router>,
    ) -> Arc<Self> {
        let (runtime, grace) = (&identity.runtime, identity.grace);
        let start = |durability| Acknowledger::start(runtime, connector.clone(), durability);
        let acknowledger = identity.durability.map(start);
        let mut tasks = JoinSet::new();
        if !connector.sentinels.is_empty() {
            tasks.spawn_on(task(sentinel_watch::run(connector.clone(), grace)), runtime);
        }
        Arc::new_cyclic(|node| {
            let session = Session::new(Arc::clone(&identity.session), grace);
            let events = Events::new(connector.clone(), Arc::clone(&session), Weak::clone(node));
            tasks.spawn_on(task(events.run()), runtime);
            Self {
                number: chance::uuid(),
                address: connector.address(),
                commands: Commands::start(runtime, connector),
                session,
                twin: Cell::default(),
                acknowledger,
                renewing: Arc::default(),
                listener: Weak::clone(&identity.listener),
                router,
                _tasks: tasks,
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
        let there = self.session.server();
        there.is_some_and(|there| there.is_surely(server))
    }

    /// The node that takes its place, as long as there is one.
    pub(crate) fn twin(&self) -> Option<Arc<Self>> {
        locked(&self.twin).upgrade()
    }

    /// Says who takes its place: whether that is news.
    pub(crate) fn set_twin(&self, twin: Option<&Arc<Self>>) -> bool {
        let twin = twin.map(Arc::downgrade).unwrap_or_default();
        let known = std::mem::replace(&mut *locked(&self.twin), twin.clone());
        !known.ptr_eq(&twin)
    }
}

/// Tells the client's listener, unless the client has gone.
fn tell(node: &Weak<Node>, tell: impl FnOnce(Arc<dyn Listener>, &Arc<Node>)) {
    if let Some(node) = node.upgrade()
        && let Some(listener) = node.listener.upgrade()
    {
        tell(listener, &node);
    }
}

impl SessionListener for Weak<Node> {
    fn may_attach(&self, server: &ServerId) -> bool {
        let router = |node: &Arc<Node>| node.router.upgrade();
        let may_attach = |node| router(&node).is_none_or(|all| all.may_attach(&node, server));
        self.upgrade().is_none_or(may_attach)
    }

    fn told(&self, events: Vec<Event>, since: Instant) {
        tell(self, |listener, node| listener.told(node, events, since));
    }

    fn attached(&self, attachment: &Arc<Attachment>) {
        tell(self, |listener, node| listener.attached(node, attachment));
    }

    fn broken(&self) {
        tell(self, |listener, _| listener.broken());
    }
}
