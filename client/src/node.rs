//! One server, and the client's two connections to it.

use std::sync::{Arc, Weak};
use std::time::Duration;

use tokio::runtime::Handle;
use tokio::sync::Mutex;
use tokio::task::AbortHandle;

use crate::acknowledge::{Acknowledger, Copies};
use crate::connection::Connector;
use crate::driver::Driver;
use crate::error::Error;
use crate::lifeline::Lifeline;
use crate::nodes::Nodes;
use crate::session::Session;

/// A server, the task that carries commands to it, and the one that keeps the session attached.
/// Both begin unconnected and connect by themselves; they end with it.
pub(crate) struct Node {
    pub(crate) driver: Driver,
    pub(crate) session: Arc<Session>,
    /// If grants must be acknowledged before they count.
    pub(crate) acknowledger: Option<Acknowledger>,
    /// Held by the watchdog while it waits for this node's answer.
    pub(crate) renewing: Arc<Mutex<()>>,
    lifeline: AbortHandle,
}

/// What a client is called at each of its nodes, and what it asks of them.
#[derive(Clone, Debug)]
pub(crate) struct Identity {
    pub(crate) session: Arc<str>,
    pub(crate) grace: Duration,
    pub(crate) copies: Option<Copies>,
}

impl Node {
    pub(crate) fn start(
        runtime: &Handle,
        connector: Connector,
        identity: Identity,
        nodes: Weak<Nodes>,
    ) -> Arc<Self> {
        let driver = Driver::start(runtime, connector.clone());
        let session = Session::new(identity.session, identity.grace);
        let acknowledger = identity.copies.map(|copies| {
            let (connector, session) = (connector.clone(), Arc::clone(&session));
            Acknowledger::start(runtime, connector, session, copies)
        });
        Arc::new_cyclic(|node| {
            let lifeline = Lifeline::new(connector, Arc::clone(&session), nodes, Weak::clone(node));
            Self {
                driver,
                session,
                acknowledger,
                renewing: Arc::default(),
                lifeline: runtime.spawn(lifeline.run()).abort_handle(),
            }
        })
    }

    /// Waits until the first try to reach it has ended: the error, if it failed.
    pub(crate) async fn tried(&self) -> Result<(), Error> {
        self.session.tried().await?;
        self.driver.tried().await;
        Ok(())
    }
}

impl Drop for Node {
    fn drop(&mut self) {
        // Its driver handle goes with it, and the driver ends with its last handle.
        self.lifeline.abort();
    }
}
