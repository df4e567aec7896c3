//! One server, and the client's two connections to it.

use std::sync::{Arc, Mutex as Cell, Weak};
use std::time::Duration;

use tokio::runtime::Handle;
use tokio::sync::Mutex;
use tokio::task::JoinSet;

use crate::wire::{
    Acknowledger, Address, Commands, Connector, Durability, Listener, ServerId, Session, events,
    sentinel_watch,
};
use crate::{Error, locked, task};

/// A server, the task that carries commands to it, and the one that keeps the session attached.
/// Both begin unconnected and connect by themselves; they end with it.
pub(crate) struct Node {
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
    /// What keeps the session attached; and behind sentinels, what asks them whether this is still
    /// the primary. They end with it, and do not keep it alive.
    _tasks: JoinSet<()>,
}

/// What a client is called at each of its nodes, what it asks of them, and who hears of it.
pub(crate) struct Identity {
    pub(crate) session: Arc<str>,
    pub(crate) grace: Duration,
    pub(crate) durability: Option<Durability>,
    pub(crate) listener: Weak<dyn Listener>,
    pub(crate) runtime: Handle,
}

impl Node {
    pub(crate) fn start(connector: Connector, identity: &Identity) -> Arc<Self> {
        let (runtime, grace) = (&identity.runtime, identity.grace);
        let start = |durability| Acknowledger::start(runtime, connector.clone(), durability);
        let acknowledger = identity.durability.map(start);
        let mut tasks = JoinSet::new();
        if !connector.sentinels.is_empty() {
            tasks.spawn_on(task(sentinel_watch::run(connector.clone(), grace)), runtime);
        }
        let session = Session::new(Arc::clone(&identity.session), grace);
        let listener = Weak::clone(&identity.listener);
        let events = events::run(connector.clone(), Arc::clone(&session), listener);
        tasks.spawn_on(task(events), runtime);
        Arc::new(Self {
            address: connector.address(),
            commands: Commands::start(runtime, connector),
            session,
            twin: Cell::default(),
            acknowledger,
            renewing: Arc::default(),
            _tasks: tasks,
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
