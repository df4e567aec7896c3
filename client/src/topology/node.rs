//! One server, and the client's two connections to it.

use std::sync::Arc;

use tokio::task::JoinSet;

use crate::task;
use crate::wire::{Acknowledger, Connector, Identity, Link, Session, acknowledger, listening};

/// A server, the task that carries commands to it, and the task that listens to it. Both begin
/// unconnected and connect by themselves; they end with it.
pub(crate) struct Node {
    pub(crate) link: Link,
    pub(crate) session: Arc<Session>,
    /// If grants must be acknowledged before they count.
    pub(crate) acknowledger: Option<Acknowledger>,
    /// The task that listens to the session, and behind sentinels the one that checks that this is
    /// still the primary.
    _tasks: JoinSet<()>,
}

impl Node {
    /// `id`: in a cluster, if it was told.
    pub(crate) fn start(
        connector: Connector,
        id: Option<Arc<str>>,
        identity: &Arc<Identity>,
    ) -> Arc<Self> {
        let session = Session::new(connector, id, identity);
        let mut tasks = JoinSet::new();
        if !session.connector.sentinels.is_empty() {
            let watching = session.connector.clone().watch_sentinels(identity.grace);
            tasks.spawn_on(task(watching), &identity.runtime);
        }
        tasks.spawn_on(
            task(listening::run(Arc::clone(&session))),
            &identity.runtime,
        );
        let acknowledge = |durability| acknowledger(&session, durability);
        Arc::new(Self {
            link: Link::start(&session),
            acknowledger: identity.durability.map(acknowledge),
            session,
            _tasks: tasks,
        })
    }
}
