//! Where a lock is: which node has it, and whether the session is attached there.

use std::sync::{Arc, Weak};
use std::time::Duration;

use tokio::runtime::Handle;

use crate::command::Command;
use crate::connection::Connector;
use crate::driver::Answer;
use crate::error::Error;
use crate::hold::Hold;
use crate::node::{Identity, Node};
use crate::owner::Target;
use crate::registry::{Registry, Stray};
use crate::session::Attachment;

/// The servers of a client, and what it has at them.
pub(crate) struct Nodes {
    pub(crate) registry: Arc<Registry>,
    /// How long the reply to a command may take.
    pub(crate) response_timeout: Duration,
    one: Arc<Node>,
}

/// Where to send a command.
#[derive(Clone)]
pub(crate) struct Site {
    pub(crate) node: Arc<Node>,
}

impl Site {
    /// Hands a command over: see [`Driver::send`](crate::driver::Driver::send).
    pub(crate) fn send<T>(&self, command: Command<T>) -> Answer<T> {
        self.node.driver.send(command)
    }

    /// As [`send`](Self::send), and sends it once more if the connection broke before the reply
    /// came. Only for commands that may as well be carried out twice.
    pub(crate) async fn send_harmless<T: Clone>(&self, command: Command<T>) -> Result<T, Error> {
        match self.send(command.clone()).await {
            Err(error) if error.is_broken_connection() => self.send(command).await,
            answer => answer,
        }
    }

    /// Sends all commands as one pipeline and returns their replies in order.
    pub(crate) async fn send_all<T>(
        &self,
        commands: &[Command<T>],
    ) -> Result<Vec<Result<T, Error>>, Error> {
        self.node.driver.send_all(commands).await
    }
}

/// A site where the session is attached.
#[derive(Clone)]
pub(crate) struct Reached {
    pub(crate) site: Site,
    /// What it was attached by when this was looked up.
    pub(crate) attachment: Arc<Attachment>,
}

impl Reached {
    /// Whether the session has been attached there by this ever since.
    pub(crate) fn is_present(&self) -> bool {
        let present = self.site.node.session.attachment();
        present.is_some_and(|one| Arc::ptr_eq(&one, &self.attachment))
    }
}

impl Nodes {
    /// One server. Nobody has tried yet whether it is there.
    pub(crate) fn one(runtime: &Handle, connector: Connector, identity: Identity) -> Arc<Self> {
        Arc::new_cyclic(|nodes| Self {
            registry: Arc::default(),
            response_timeout: connector.response_timeout(),
            one: Node::start(runtime, connector, identity, Weak::clone(nodes)),
        })
    }

    /// Waits until the first try to reach the server has ended: the error, if it failed.
    pub(crate) async fn tried(&self) -> Result<(), Error> {
        self.one.session.tried().await
    }

    /// Why the server cannot be asked just now, if its connection is known to be broken.
    pub(crate) fn trouble(&self) -> Option<Error> {
        let session = &self.one.session;
        let broken = session.attachment().is_none();
        broken.then(|| Error::not_connected(session.trouble()))
    }

    /// Where to ask about this.
    pub(crate) fn site(&self, target: &Target) -> Site {
        // Several locks that are taken in one command are at one node.
        self.site_of(target.names().first().map_or(&[], |name| name))
    }

    fn site_of(&self, _name: &[u8]) -> Site {
        Site {
            node: Arc::clone(&self.one),
        }
    }

    /// The same, if the session is attached there.
    pub(crate) fn reached(&self, target: &Target) -> Option<Reached> {
        let site = self.site(target);
        let attachment = site.node.session.attachment()?;
        Some(Reached { site, attachment })
    }

    /// Waits until the session is attached where to ask about this, otherwise than it was `known`.
    pub(crate) async fn next(
        &self,
        target: &Target,
        known: Option<&Reached>,
    ) -> Result<Reached, Error> {
        let site = self.site(target);
        let known = known.map(|known| &known.attachment);
        let attachment = site.node.session.next_attachment(known).await?;
        Ok(Reached { site, attachment })
    }

    /// As [`next`](Self::next), and after the time for a reply says why there is none.
    pub(crate) async fn next_within(
        &self,
        target: &Target,
        known: Option<&Reached>,
    ) -> Result<Reached, Error> {
        let next = tokio::time::timeout(self.response_timeout, self.next(target, known));
        let trouble = || self.site(target).node.session.trouble();
        next.await.unwrap_or_else(|_| Err(trouble()))
    }

    /// The holds that are at this node.
    pub(crate) fn holds_at(&self, node: &Arc<Node>) -> Vec<Arc<Hold>> {
        let mut holds = self.registry.holds();
        holds.retain(|hold| Arc::ptr_eq(&self.site(hold.target()).node, node));
        holds
    }

    /// Gives back what was granted to nobody.
    pub(crate) fn give_back(&self, stray: Stray) {
        // Should it be lost with the connection, the hold ends with its lease.
        drop(self.site_of(&stray.name).send(stray.release));
    }
}
