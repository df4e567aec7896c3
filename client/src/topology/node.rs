//! One server, and the client's two connections to it.

use std::sync::atomic::AtomicU64;
use std::sync::{Arc, Weak};
use std::time::Duration;

use tokio::runtime::Handle;
use tokio::sync::Mutex;
use tokio::task::JoinSet;

use crate::task;
use crate::wire::{
    Acknowledger, Address, Connector, Durability, Link, Listener, Session, listening,
    sentinel_watch,
};

/// A server, the task that carries commands to it, and the task that listens to it. Both begin
/// unconnected and connect by themselves; they end with it.
pub(crate) struct Node {
    pub(crate) link: Link,
    pub(crate) session: Arc<Session>,
    /// Where it is connected to.
    pub(crate) address: Address,
    /// If grants must be acknowledged before they count.
    pub(crate) acknowledger: Option<Acknowledger>,
    /// The task that listens to the session, and behind sentinels the one that checks that this is
    /// still the primary.
    _tasks: JoinSet<()>,
}

/// The client's session name and settings at each of its nodes, and the listener for its events.
pub(crate) struct Identity {
    pub(crate) session: Arc<str>,
    pub(crate) grace: Duration,
    pub(crate) durability: Option<Durability>,
    pub(crate) listener: Weak<dyn Listener>,
    pub(crate) runtime: Handle,
    /// Held while many holds are renewed at once.
    pub(crate) gathering: Arc<Mutex<()>>,
    /// Numbers the connections.
    pub(crate) epochs: Arc<AtomicU64>,
}

impl Node {
    /// `id`: in a cluster, if it was told.
    pub(crate) fn start(
        connector: Connector,
        id: Option<Arc<str>>,
        identity: &Identity,
    ) -> Arc<Self> {
        let (runtime, grace) = (&identity.runtime, identity.grace);
        let start = |durability| {
            let gathering = Arc::clone(&identity.gathering);
            Acknowledger::start(runtime, connector.clone(), durability, gathering)
        };
        let acknowledger = identity.durability.map(start);
        let mut tasks = JoinSet::new();
        if !connector.sentinels.is_empty() {
            tasks.spawn_on(task(sentinel_watch::run(connector.clone(), grace)), runtime);
        }
        let epochs = Arc::clone(&identity.epochs);
        let session = Session::new(Arc::clone(&identity.session), grace, id, epochs);
        let listener = Weak::clone(&identity.listener);
        let listening = listening::run(connector.clone(), Arc::clone(&session), listener);
        tasks.spawn_on(task(listening), runtime);
        let listener = Weak::clone(&identity.listener);
        Arc::new(Self {
            address: connector.address(),
            link: Link::start(runtime, connector, &session, listener),
            session,
            acknowledger,
            _tasks: tasks,
        })
    }
}
