//! Replication: a primary's writes reach its replicas a little later.
//!
//! A replica is sent all keys after each step that has written something, and takes them over in
//! that order: it has the keys that its primary had some time ago.

use std::cell::{Cell, RefCell};
use std::rc::{Rc, Weak};
use std::time::Duration;

use tokio::sync::{mpsc, watch};
use tokio::task::spawn_local;
use tokio::time::{Instant, sleep, sleep_until};
use tokio_util::sync::CancellationToken;

use super::{Inner, Server};
use crate::keyspace::Keyspace;
use crate::life::while_alive;

/// A server's part in replication.
#[derive(Debug)]
pub(super) struct Replication {
    /// Its primary; none if it is a primary itself.
    of: RefCell<Option<Weak<Inner>>>,
    /// Cancelled when it copies another primary, or none.
    following: RefCell<CancellationToken>,
    /// Its own replicas.
    feeds: RefCell<Vec<Feed>>,
    /// The offset that its replicas were sent last.
    fed: Cell<u64>,
    /// The offset up to which it has copied its primary.
    copied: Cell<u64>,
    /// The longest time that a write or an acknowledgement is under way between it and its primary.
    lag: Cell<Duration>,
    /// Whether anything gets through between it and its primary.
    link: watch::Sender<bool>,
    /// A replica has acknowledged something.
    pub(super) acknowledged: watch::Sender<()>,
    /// Blocked clients are sent away.
    pub(super) demoted: watch::Sender<()>,
    /// Cancelled when the connections of all clients are closed.
    pub(super) clients: RefCell<CancellationToken>,
}

impl Default for Replication {
    fn default() -> Self {
        Self {
            of: RefCell::default(),
            following: RefCell::default(),
            feeds: RefCell::default(),
            fed: Cell::default(),
            copied: Cell::default(),
            lag: Cell::default(),
            link: watch::Sender::new(true),
            acknowledged: watch::Sender::default(),
            demoted: watch::Sender::default(),
            clients: RefCell::default(),
        }
    }
}

/// One replica, as its primary knows it.
#[derive(Debug)]
struct Feed {
    copies: mpsc::UnboundedSender<Copy>,
    acknowledged: Rc<Cell<u64>>,
}

/// All keys after a write.
#[derive(Debug)]
struct Copy {
    sent: Instant,
    /// How much was written until then.
    offset: u64,
    keys: Keyspace,
}

impl Server {
    /// From now on it is a replica of this server, as by `REPLICAOF`: it takes over its keys, and
    /// answers `READONLY` to commands that write. Clients that are blocked are sent away; the
    /// others keep their connections.
    pub fn replicate(&self, primary: &Self) {
        let replication = &self.inner.replication;
        let primary = Rc::downgrade(&primary.inner);
        let before = replication.of.replace(Some(primary));
        // Keys of another primary do not count as copied from this one.
        replication.copied.set(0);
        replication.feeds.take();
        if before.is_none() {
            replication.demoted.send_replace(());
            self.inner.engine.borrow_mut().demoted();
            self.turned();
        }
        self.inner.follow();
    }

    /// From now on it is a primary, as by `REPLICAOF NO ONE`, with the keys that it has. Writes in
    /// flight from its former primary are lost.
    pub fn promote(&self) {
        let replication = &self.inner.replication;
        replication.following.borrow().cancel();
        if replication.of.take().is_some() {
            let now = self.inner.begins();
            self.inner.engine.borrow_mut().promoted(now);
            self.turned();
        }
    }

    /// Whether it is a replica.
    pub fn is_replica(&self) -> bool {
        self.inner.is_replica()
    }

    /// A write of its primary takes up to this time to get here, and so does the acknowledgement.
    pub fn set_lag(&self, longest: Duration) {
        self.inner.replication.lag.set(longest);
    }

    /// Cuts the link to its primary, in both directions: writes in flight wait.
    pub fn cut_replication(&self) {
        self.inner.replication.link.send_replace(false);
    }

    /// Mends the link to its primary.
    pub fn mend_replication(&self) {
        self.inner.replication.link.send_replace(true);
    }

    /// Closes the connections of all clients, as `CLIENT KILL TYPE normal`. Sentinels do so at a
    /// server whose role they change.
    pub fn disconnect_clients(&self) {
        let clients = self.inner.replication.clients.take();
        clients.cancel();
    }

    /// How much of its primary's writes this replica has. A replica with a lower offset lacks
    /// writes that another has.
    pub fn offset(&self) -> u64 {
        self.inner.replication.copied.get()
    }

    /// Whether this replica has all that its primary has written.
    pub fn is_in_sync(&self) -> bool {
        let primary = self.inner.replication.of.borrow();
        let primary = primary.as_ref().and_then(Weak::upgrade);
        let copied = self.inner.replication.copied.get();
        primary.is_some_and(|primary| primary.engine.borrow().keys().written() == copied)
    }
}

impl Inner {
    pub(super) fn is_replica(&self) -> bool {
        self.replication.of.borrow().is_some()
    }

    /// How many replicas have acknowledged this offset.
    pub(super) fn copies_of(&self, offset: u64) -> i64 {
        let feeds = self.replication.feeds.borrow();
        let have = feeds
            .iter()
            .filter(|feed| feed.acknowledged.get() >= offset && !feed.copies.is_closed());
        i64::try_from(have.count()).unwrap_or(i64::MAX)
    }

    /// Sends replicas the writes since the last call.
    pub(super) fn feed_replicas(&self) {
        let engine = self.engine.borrow();
        let offset = engine.keys().written();
        if self.replication.fed.replace(offset) == offset || self.is_replica() {
            return;
        }
        let sent = Instant::now();
        let feeds = &mut *self.replication.feeds.borrow_mut();
        feeds.retain(|feed| {
            let keys = engine.keys().clone();
            feed.copies.send(Copy { sent, offset, keys }).is_ok()
        });
    }

    /// It has crashed: its replicas hear that their connections have ended.
    pub(super) fn forget_replicas(&self) {
        self.replication.feeds.take();
    }

    /// Copies its primary, if it has one, as long as it lives and that is its primary.
    pub(super) fn follow(self: &Rc<Self>) {
        let replication = &self.replication;
        replication.following.take().cancel();
        let primary = replication.of.borrow().clone();
        let (Some(primary), true) = (primary, self.is_up.get()) else {
            return;
        };
        let following = CancellationToken::new();
        replication.following.replace(following.clone());
        let (life, inner) = (self.life.borrow().clone(), Rc::clone(self));
        spawn_local(async move {
            let copies = while_alive(&following, inner.copy_all(primary));
            while_alive(&life, copies).await;
        });
    }

    async fn copy_all(&self, primary: Weak<Self>) {
        loop {
            self.is_connected().await;
            self.is_running().await;
            let connected = primary.upgrade().filter(|primary| primary.has_replicas());
            let fed = connected.map(|primary| primary.feed());
            if let Some((copies, acknowledged)) = fed {
                self.copy(&primary, copies, &acknowledged).await;
            }
            sleep(CONNECT_AGAIN).await;
        }
    }

    /// Until the connection ends.
    async fn copy(
        &self,
        primary: &Weak<Self>,
        mut copies: mpsc::UnboundedReceiver<Copy>,
        acknowledged: &Cell<u64>,
    ) {
        let (has_copied, mut taken_over) = mpsc::unbounded_channel();
        let there = async move {
            while let Some(copy) = copies.recv().await {
                self.arrives(copy.sent).await;
                self.is_running().await;
                self.replication.copied.set(copy.offset);
                self.count_change();
                self.engine.borrow_mut().copy(copy.keys);
                let _ = has_copied.send((Instant::now(), copy.offset));
            }
        };
        let back = async {
            while let Some((sent, offset)) = taken_over.recv().await {
                self.arrives(sent).await;
                acknowledged.set(offset);
                if let Some(primary) = primary.upgrade() {
                    primary.replication.acknowledged.send_replace(());
                }
            }
        };
        tokio::join!(there, back);
    }

    async fn arrives(&self, sent: Instant) {
        let delay = self.chance.up_to(self.replication.lag.get());
        sleep_until(sent.checked_add(delay).unwrap_or(sent)).await;
        self.is_connected().await;
    }

    async fn is_connected(&self) {
        let mut link = self.replication.link.subscribe();
        // The sender is `self`: there is no other end to this.
        let _ = link.wait_for(|open| *open).await;
    }

    /// Whether another can copy it. A replica of a replica waits until that is a primary.
    fn has_replicas(&self) -> bool {
        self.count_turn();
        self.is_up.get() && *self.stops.borrow() == 0 && !self.is_replica()
    }

    /// Another begins to copy it: all keys first.
    fn feed(&self) -> (mpsc::UnboundedReceiver<Copy>, Rc<Cell<u64>>) {
        self.feed_replicas();
        let (copies, fed) = mpsc::unbounded_channel();
        let keys = self.engine.borrow().keys().clone();
        let _ = copies.send(Copy {
            sent: Instant::now(),
            offset: keys.written(),
            keys,
        });
        // Less than all that can be written: it has nothing yet.
        let acknowledged = Rc::default();
        let replica = Feed {
            copies,
            acknowledged: Rc::clone(&acknowledged),
        };
        self.replication.feeds.borrow_mut().push(replica);
        (fed, acknowledged)
    }
}

/// A replica tries again after this time to connect to its primary.
const CONNECT_AGAIN: Duration = Duration::from_secs(1);
