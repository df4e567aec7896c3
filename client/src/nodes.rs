//! Where a lock is: which node has it, and whether the session is attached there.

use std::sync::{Arc, Weak};
use std::time::Duration;

use tokio::runtime::Handle;
use tokio::time::{sleep, timeout};

use crate::background::{Background, Counted};
use crate::backoff::Backoff;
use crate::cluster::Cluster;
use crate::command::{Command, Released};
use crate::connection::{Connector, ServerId};
use crate::driver::Answer;
use crate::error::Error;
use crate::hold::Hold;
use crate::node::{Identity, Node};
use crate::owner::{Lease, Target};
use crate::part;
use crate::registry::{Registry, Stray};
use crate::session::Attachment;
use crate::slots;

/// The servers of a client, and what it has at them.
pub(crate) struct Nodes {
    pub(crate) registry: Arc<Registry>,
    /// How long the reply to a command may take.
    pub(crate) response_timeout: Duration,
    pub(crate) background: Background,
    layout: Layout,
    runtime: Handle,
}

enum Layout {
    One(Arc<Node>),
    Cluster(Box<Cluster>),
}

/// Where to send a command.
#[derive(Clone)]
pub(crate) struct Site {
    pub(crate) node: Arc<Node>,
    /// Whose slot it is, if that node has sent us here (`ASK`): the slot is on its way.
    sent_by: Option<Arc<Node>>,
}

impl Site {
    /// A node that serves the slot.
    pub(crate) fn at(node: Arc<Node>) -> Self {
        let sent_by = None;
        Self { node, sent_by }
    }

    /// A node to which another sends for this once.
    pub(crate) fn by_word_of(sent_by: Arc<Node>, node: Arc<Node>) -> Self {
        let sent_by = Some(sent_by);
        Self { node, sent_by }
    }

    /// Hands a command over: see [`Driver::send`](crate::driver::Driver::send).
    pub(crate) fn send<T: Send + 'static>(&self, command: Command<T>) -> Answer<T> {
        self.node.driver.send(self.address(command))
    }

    /// As [`send`](Self::send): see [`Driver::send_then`](crate::driver::Driver::send_then).
    pub(crate) fn send_then<T: 'static>(
        &self,
        command: Command<T>,
        then: impl FnOnce(Result<T, Error>) + Send + 'static,
    ) {
        self.node.driver.send_then(self.address(command), then);
    }

    /// As [`send`](Self::send), and sends it once more if the connection broke before the reply
    /// came. Only for commands that may as well be carried out twice.
    pub(crate) async fn send_harmless<T: Clone + Send + 'static>(
        &self,
        command: Command<T>,
    ) -> Result<T, Error> {
        match self.send(command.clone()).await {
            Err(error) if error.is_broken_connection() => self.send(command).await,
            answer => answer,
        }
    }

    /// The same with many: they are in line behind each other before the first is answered.
    pub(crate) async fn send_all_harmless<T: Clone + Send + 'static>(
        &self,
        commands: Vec<Command<T>>,
    ) -> Vec<Result<T, Error>> {
        let answers = commands.iter().map(|command| self.send(command.clone()));
        let answers: Vec<_> = answers.collect();
        let mut told = Vec::with_capacity(answers.len());
        let mut again = Vec::new();
        for (answer, command) in answers.into_iter().zip(commands) {
            let answer = answer.await;
            if answer.as_ref().is_err_and(Error::is_broken_connection) {
                again.push((told.len(), self.send(command)));
            }
            told.push(answer);
        }
        for (place, answer) in again {
            if let Some(told) = told.get_mut(place) {
                *told = answer.await;
            }
        }
        told
    }

    /// Whether commands go there behind an `ASKING`.
    pub(crate) fn is_asking(&self) -> bool {
        self.sent_by.is_some()
    }

    fn address<T>(&self, command: Command<T>) -> Command<T> {
        let asking = self.is_asking();
        Command { asking, ..command }
    }

    pub(crate) fn is_same(&self, other: &Self) -> bool {
        self.is_at(&other.node) && self.sent_by.is_some() == other.sent_by.is_some()
    }

    pub(crate) fn is_at(&self, node: &Arc<Node>) -> bool {
        Arc::ptr_eq(&self.node, node)
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

    /// Whether a grant with this lease can be counted on without another word. One of another
    /// attachment may be over; and one that lay in the socket while this process was stopped may
    /// leave too little.
    pub(crate) fn is_fresh(&self, lease: Lease) -> bool {
        self.is_present() && lease.since.elapsed() <= part(lease.length, FRESH_PART)
    }
}

impl Nodes {
    /// One server. Nobody has tried yet whether it is there.
    pub(crate) fn one(runtime: &Handle, connector: Connector, identity: Identity) -> Arc<Self> {
        Arc::new_cyclic(|nodes| Self {
            registry: Arc::default(),
            background: Background::new(runtime.clone()),
            response_timeout: connector.response_timeout(),
            layout: Layout::One(Node::start(
                runtime,
                connector,
                identity,
                Weak::clone(nodes),
            )),
            runtime: runtime.clone(),
        })
    }

    /// The nodes of a cluster, of which any one of these tells. None of them has been asked yet.
    pub(crate) fn cluster(
        runtime: &Handle,
        first: Connector,
        seeds: Vec<Connector>,
        identity: Identity,
    ) -> Arc<Self> {
        Arc::new_cyclic(|nodes| Self {
            registry: Arc::default(),
            background: Background::new(runtime.clone()),
            response_timeout: first.response_timeout(),
            layout: Layout::Cluster(Box::new(Cluster::new(
                runtime,
                first,
                seeds,
                identity,
                Weak::clone(nodes),
            ))),
            runtime: runtime.clone(),
        })
    }

    /// Where the client's tasks run.
    pub(crate) fn runtime(&self) -> &Handle {
        &self.runtime
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

    /// Where to ask about this.
    pub(crate) fn site(&self, target: &Target) -> Site {
        Site::at(self.home(target))
    }

    fn home(&self, target: &Target) -> Arc<Node> {
        // Several locks that are taken in one command are at one node.
        self.home_of(target.names().first().map_or(&[], |name| name))
    }

    fn home_of(&self, name: &[u8]) -> Arc<Node> {
        match &self.layout {
            Layout::One(node) => Arc::clone(node),
            Layout::Cluster(cluster) => cluster.home(name),
        }
    }

    /// Where to ask about this, if the session is attached there.
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
        let known = known.map(|known| &known.attachment);
        loop {
            let moved = self.moved();
            let site = self.site(target);
            tokio::select! {
                attachment = site.node.session.next_attachment(known) => {
                    return attachment.map(|attachment| Reached { site: site.clone(), attachment });
                }
                () = moved => {}
            }
        }
    }

    /// As [`next`](Self::next), and after the time for a reply says why there is none.
    pub(crate) async fn next_within(
        &self,
        target: &Target,
        known: Option<&Reached>,
    ) -> Result<Reached, Error> {
        let next = timeout(self.response_timeout, self.next(target, known));
        let trouble = || self.home(target).session.trouble();
        next.await.unwrap_or_else(|_| Err(trouble()))
    }

    /// Waits until the session is attached at this site, and after the time for a reply says why it
    /// is not.
    pub(crate) async fn reach(&self, site: Site) -> Result<Reached, Error> {
        let session = &site.node.session;
        let next = timeout(self.response_timeout, session.next_attachment(None));
        let attachment = next.await.unwrap_or_else(|_| Err(session.trouble()))?;
        Ok(Reached { site, attachment })
    }

    /// Ends when a wait that stands at this site has to ask again: the session has been attached
    /// there anew, or the lock is at another node now, where it is attached.
    pub(crate) async fn left(&self, target: &Target, at: &Reached) -> Result<(), Error> {
        loop {
            let moved = self.moved();
            let home = self.home(target);
            // Sent by the slot's owner, it stands in line where the slot is to be.
            let as_ever = at.site.is_at(&home)
                || at
                    .site
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
                next = at.site.node.session.next_attachment(Some(&at.attachment)) => {
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
    pub(crate) fn follow(&self, error: &Error, from: &Site) -> Option<Site> {
        self.as_cluster()?.follow(error, &from.node)
    }

    /// A node cannot be reached: its slots may be another's by now.
    pub(crate) fn doubt(&self) {
        if let Some(cluster) = self.as_cluster() {
            cluster.doubt();
        }
    }

    /// Whether a lock may be at another node than the one that speaks of it.
    pub(crate) fn are_several(&self) -> bool {
        self.as_cluster().is_some()
    }

    pub(crate) fn as_cluster(&self) -> Option<&Cluster> {
        match &self.layout {
            Layout::One(_) => None,
            Layout::Cluster(cluster) => Some(cluster),
        }
    }

    /// The holds that are at this node.
    pub(crate) fn holds_at(&self, node: &Arc<Node>) -> Vec<Arc<Hold>> {
        let mut holds = self.registry.holds();
        holds.retain(|hold| Arc::ptr_eq(&self.home(hold.target()), node));
        holds
    }

    /// Gives back what was granted to nobody. Sent at once, which a shutdown waits for; and again,
    /// where the token says what is meant, until it is answered or the client has gone.
    pub(crate) fn give_back(self: &Arc<Self>, stray: Stray) {
        let site = Site::at(self.home_of(&stray.name));
        let answer = site.send(stray.release.clone());
        let pending = self.background.counted();
        let nodes = Arc::downgrade(self);
        self.runtime
            .spawn(go_on_giving_back(nodes, stray, site, answer, pending));
    }
}

async fn go_on_giving_back(
    nodes: Weak<Nodes>,
    mut stray: Stray,
    mut site: Site,
    mut answer: Answer<Released>,
    pending: Counted,
) {
    let mut pending = Some(pending);
    let mut backoff = Backoff::new();
    let (mut hops, mut other_kind) = (0_u32, false);
    loop {
        let error = match answer.await {
            Ok(Released::NotHeld) if other_kind && !stray.otherwise.is_empty() => None,
            Ok(_) => return,
            Err(error) => Some(error),
        };
        other_kind |= error.as_ref().is_some_and(Error::is_wrong_kind);
        let Some(here) = nodes.upgrade() else { return };
        let there = error.as_ref().and_then(|error| here.follow(error, &site));
        let mut pause = false;
        match error.filter(|error| !error.is_wrong_kind()) {
            Some(_) if there.is_some() => {
                hops = hops.saturating_add(1);
                pause = hops > HOPS;
            }
            Some(error) => {
                if !error.is_could_not_ask() && !error.is_unknown() {
                    return;
                }
                if !stray.by_token {
                    // By now it might take what the owner was granted since.
                    for one in stray.each {
                        here.give_back(one);
                    }
                    return;
                }
                pause = true;
            }
            None => {
                let Some(next) = stray.otherwise.pop() else {
                    return;
                };
                (stray.release, stray.by_token) = next;
            }
        }
        site = there.unwrap_or_else(|| Site::at(here.home_of(&stray.name)));
        drop(here);
        if pause {
            // It cannot be asked now: a shutdown does not wait for that.
            drop(pending.take());
            sleep(backoff.next()).await;
        }
        answer = site.send(stray.release.clone());
    }
}

/// So often in a row nodes may send a command on. Two that have not yet heard of a move send it to
/// each other until they have.
pub(crate) const HOPS: u32 = 5;

/// A grant older than this part of the lease is confirmed first.
const FRESH_PART: u32 = 3;
