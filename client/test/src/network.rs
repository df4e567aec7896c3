//! Links in memory between hosts, on which clients run, and servers.
//!
//! A link has two directions. Each delays its bytes by a time of its own, in order within a
//! connection but not between two. Each can be cut: bytes in flight, and the end of a connection,
//! wait until it is mended. One connection of a link can be cut or end by itself, and be half open:
//! one end is told that it is closed, and the other is not.

use std::cell::{Cell, RefCell};
use std::collections::BTreeMap;
use std::io;
use std::rc::Rc;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::task::Waker;
use std::time::Duration;

use rlock_client::test_util::{self, Dial, Dialing, Stream};
use tokio::sync::{mpsc, oneshot, watch};
use tokio::task::spawn_local;
use tokio::time::{Instant, sleep};

use crate::chance::Chance;
use crate::courier::Courier;
use crate::moments::{self, ConnectionId, Moment};
use crate::sentinel::Sentinel;
use crate::server::{Cluster, Server};
use crate::wire::{End, Wire, ends};

/// Servers at their addresses, and the hosts from which they are called.
#[derive(Clone, Debug)]
pub struct Network {
    inner: Rc<Inner>,
}

#[derive(Debug)]
struct Inner {
    chance: Chance,
    /// When wall clocks began.
    started: Instant,
    servers: RefCell<BTreeMap<String, Server>>,
    hosts: Cell<usize>,
    sentinels: RefCell<BTreeMap<String, Sentinel>>,
    courier: Arc<Courier>,
}

/// One way through a link.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Direction {
    /// From the host to the server.
    ToServer,
    /// From the server to the host.
    ToHost,
}

impl Direction {
    pub(crate) const BOTH: [Self; 2] = [Self::ToServer, Self::ToHost];

    pub(crate) fn back(self) -> Self {
        match self {
            Self::ToServer => Self::ToHost,
            Self::ToHost => Self::ToServer,
        }
    }
}

/// The server or sentinel at an address.
enum Peer {
    Server(Server),
    Sentinel(Sentinel),
}

impl Peer {
    /// The number of a server.
    fn server(&self) -> Option<usize> {
        match self {
            Self::Server(server) => Some(server.number()),
            Self::Sentinel(_) => None,
        }
    }

    fn accept(&self, stream: End) {
        match self {
            Self::Server(server) => server.accept(stream),
            Self::Sentinel(sentinel) => sentinel.accept(stream),
        }
    }
}

impl Inner {
    /// The server or sentinel that is up at this address.
    fn peer(&self, address: &str) -> Option<Peer> {
        let server = self.servers.borrow().get(address).cloned();
        if let Some(server) = server.filter(Server::is_up) {
            return Some(Peer::Server(server));
        }
        let sentinel = self.sentinels.borrow().get(address).cloned();
        let sentinel = sentinel.filter(Sentinel::is_up);
        sentinel.map(Peer::Sentinel)
    }
}

impl Network {
    /// A network without servers. The seed decides all that is left to chance in it.
    ///
    /// Use it within a [`tokio::task::LocalSet`] that is entered, as [`run`](crate::run) does.
    pub fn new(seed: u64) -> Self {
        moments::set_observer(None);
        let courier = Arc::<Courier>::default();
        let inner = Inner {
            chance: Chance::of(seed),
            started: Instant::now(),
            servers: RefCell::default(),
            hosts: Cell::default(),
            sentinels: RefCell::default(),
            courier: Arc::clone(&courier),
        };
        spawn_local(async move { courier.run().await });
        Self {
            inner: Rc::new(inner),
        }
    }

    /// Starts a server at this address, `host:port`.
    pub fn server(&self, address: &str) -> Server {
        let mut servers = self.inner.servers.borrow_mut();
        let number = servers.len();
        let server = Server::start(number, self.inner.chance.clone(), self.inner.started);
        servers.insert(address.to_owned(), server.clone());
        server
    }

    /// Starts a replica of this server at this address, `host:port`.
    pub fn replica(&self, address: &str, primary: &Server) -> Server {
        let server = self.server(address);
        server.replicate(primary);
        server
    }

    /// Starts the nodes of a cluster at these addresses, `host:port`, with as many slots each.
    pub fn cluster(&self, addresses: &[&str]) -> Cluster {
        let nodes = addresses.iter();
        let nodes = nodes.map(|address| ((*address).to_owned(), self.server(address)));
        Cluster::of(nodes.collect())
    }

    /// Starts a sentinel at this address, `host:port`, that tells where this service is, once it
    /// has been [told](Sentinel::set_primary).
    pub fn sentinel(&self, address: &str, service: &str) -> Sentinel {
        let sentinel = Sentinel::start(service);
        let mut sentinels = self.inner.sentinels.borrow_mut();
        sentinels.insert(address.to_owned(), sentinel.clone());
        sentinel
    }

    /// Tells of each moment in the course of each message, and of its connection, at that moment:
    /// changes that the observer makes to servers and hosts come before anything else.
    ///
    /// A server that stands still or dies when it is told of a command has not carried it out, and
    /// one that does so when it is about to send a reply has not sent it. One observer is told at a
    /// time.
    pub fn observe(&self, observer: impl Fn(Moment, ConnectionId) + 'static) {
        moments::set_observer(Some(Rc::new(observer)));
    }

    /// A host on which a client can run.
    pub fn host(&self) -> Host {
        let (calls, requests) = mpsc::unbounded_channel();
        let courier = Arc::clone(&self.inner.courier);
        courier.add_host(self.inner.chance.seed());
        let number = self.inner.hosts.get();
        self.inner.hosts.set(number.saturating_add(1));
        let inner = Rc::new(HostInner {
            number,
            network: Rc::clone(&self.inner),
            links: RefCell::default(),
            courier,
            process: Arc::default(),
            is_dead: Cell::new(false),
            dials: Cell::new(0),
        });
        spawn_local(Rc::clone(&inner).connect_all(requests));
        Host { inner, calls }
    }
}

/// A host on which a client runs, with its links to the servers.
#[derive(Clone, Debug)]
pub struct Host {
    inner: Rc<HostInner>,
    calls: mpsc::UnboundedSender<Call>,
}

#[derive(Debug)]
struct HostInner {
    number: usize,
    network: Rc<Inner>,
    links: RefCell<BTreeMap<String, Rc<Link>>>,
    courier: Arc<Courier>,
    process: Arc<Process>,
    is_dead: Cell<bool>,
    dials: Cell<u64>,
}

/// A call for a connection.
#[derive(Debug)]
struct Call {
    address: String,
    reply: oneshot::Sender<io::Result<End>>,
}

impl Host {
    /// Opens the connections of a client on this host.
    pub fn dial(&self) -> impl Dial {
        Dialer(self.calls.clone())
    }

    /// Runs this as a part of the process there, which stands still with it. Clients that are to
    /// stand still too must be made in it: all that they do without their callers is then a part of
    /// the process as well.
    pub fn run<F: Future>(&self, part: F) -> impl Future<Output = F::Output> + use<F> {
        test_util::within(self.inner.process.clone(), part)
    }

    /// The process stands still, as after SIGSTOP: no part of it does anything. Clocks go on, and
    /// bytes that are sent to it are there when it goes on.
    pub fn pause(&self) {
        self.inner.process.set(true);
    }

    /// It goes on, unless it has died.
    pub fn resume(&self) {
        if !self.inner.is_dead.get() {
            self.inner.process.set(false);
        }
    }

    /// From now on each direction of a link delays its bytes by up to this time.
    pub fn set_latency(&self, longest: Duration) {
        self.inner.courier.set_latency(self.inner.number, longest);
    }

    /// Cuts one direction of the link to this server.
    pub fn cut(&self, address: &str, direction: Direction) {
        self.inner.link(address).set(direction, true);
    }

    /// Cuts one direction of one connection to this server; of several that are open, by its number
    /// in their order. The others go on.
    pub fn cut_one(&self, address: &str, number: usize, direction: Direction) -> Option<CutOne> {
        let wire = self.inner.link(address).wire(number)?;
        wire.cut(direction);
        Some(CutOne { wire })
    }

    /// The number by which [`cut_one`](Self::cut_one) finds this connection of the host now, if it
    /// is open and to the server at this address.
    pub fn number_of(&self, address: &str, connection: ConnectionId) -> Option<usize> {
        let wires = self.inner.link(address).open_wires();
        wires.iter().position(|wire| wire.id == connection)
    }

    /// How often a part of the process was about to do something: see
    /// [`connections_used`](Self::connections_used).
    pub fn turns(&self) -> u64 {
        self.inner.process.standing().turns
    }

    /// Of each open connection to the server at this address, in their order, its number, and how
    /// often its direction to the server and that to the host were used: bytes were sent or
    /// arrived, or it was cut, mended or ended. And how often the link was used to open a
    /// connection, cut, or mended. Between two moments of the same count a fault there finds the
    /// same.
    pub fn connections_used(&self, address: &str) -> (Vec<(usize, [u64; 2])>, u64) {
        let link = self.inner.link(address);
        let wires = link.open_wires();
        let used = wires.iter().map(|wire| (wire.id.number, wire.changes()));
        (used.collect(), link.passed.get())
    }

    /// Mends both directions, of the link and of each connection: the bytes in flight arrive.
    pub fn mend(&self, address: &str) {
        let link = self.inner.link(address);
        for direction in Direction::BOTH {
            link.set(direction, false);
        }
        for wire in link.open_wires() {
            wire.mend();
        }
    }

    /// Ends all connections to this server. Both ends are told, also through a cut, and the bytes
    /// in flight are lost.
    pub fn reset(&self, address: &str) {
        self.inner.link(address).end_all();
    }

    /// Ends one connection to this server; of several that are open, by its number in their order.
    pub fn reset_one(&self, address: &str, number: usize) {
        if let Some(wire) = self.inner.link(address).wire(number) {
            wire.end();
        }
    }

    /// Ends one connection to this server, and tells only the end to which this direction leads.
    /// Bytes that the other end sends are lost. The server is told after [`KEEPALIVE`] that its
    /// peer does not answer; the host has to notice it by the replies that are missing.
    pub fn half_open(&self, address: &str, number: usize, told: Direction) {
        if let Some(wire) = self.inner.link(address).wire(number) {
            wire.end_for(told);
            if told == Direction::ToHost {
                wire.tell(Direction::ToServer, KEEPALIVE);
            }
        }
    }

    /// How often clients on this host called for a connection.
    pub fn dials(&self) -> u64 {
        self.inner.dials.get()
    }

    /// The process dies: no part of it does anything any more, servers hear that its connections
    /// have ended, and it opens no more.
    pub fn kill(&self) {
        self.inner.is_dead.set(true);
        self.pause();
        for link in self.inner.links.borrow().values() {
            link.end_all();
        }
    }
}

/// A process, that may stand still.
#[derive(Debug, Default)]
struct Process(Mutex<Standing>);

#[derive(Debug, Default)]
struct Standing {
    /// How often a part of it was about to do something.
    turns: u64,
    is_still: bool,
    /// Its tasks that were woken while it stood still.
    woken: Vec<Waker>,
}

impl Process {
    fn standing(&self) -> MutexGuard<'_, Standing> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn set(&self, is_still: bool) {
        let mut standing = self.standing();
        standing.turns = standing.turns.wrapping_add(1);
        standing.is_still = is_still;
        let woken = std::mem::take(&mut standing.woken);
        drop(standing);
        woken.into_iter().for_each(Waker::wake);
    }
}

impl test_util::Process for Process {
    fn runs(&self, task: &Waker) -> bool {
        let mut standing = self.standing();
        standing.turns = standing.turns.wrapping_add(1);
        if standing.is_still {
            standing.woken.push(task.clone());
        }
        !standing.is_still
    }
}

/// A connection that is cut, by [`Host::cut_one`].
#[derive(Debug)]
pub struct CutOne {
    wire: Arc<Wire>,
}

impl CutOne {
    /// Mends both directions, and the bytes in flight arrive; or else ends the connection.
    pub fn end(self, arrives: bool) {
        if arrives {
            self.wire.mend();
        } else {
            self.wire.end();
        }
    }
}

#[derive(Debug)]
struct Dialer(mpsc::UnboundedSender<Call>);

impl Dial for Dialer {
    fn dial(&self, address: &str) -> Dialing {
        let (reply, connected) = oneshot::channel();
        let call = Call {
            address: address.to_owned(),
            reply,
        };
        let sent = self.0.send(call);
        Box::pin(async move {
            let gone = || io::Error::from(io::ErrorKind::NotConnected);
            sent.map_err(|_| gone())?;
            let stream = connected.await.map_err(|_| gone())??;
            let stream: Box<dyn Stream> = Box::new(stream);
            Ok(stream)
        })
    }
}

/// The way between a host and a server.
#[derive(Debug, Default)]
struct Link {
    to_server: Gate,
    to_host: Gate,
    /// The connections, in the order in which they were opened.
    wires: RefCell<Vec<Arc<Wire>>>,
    /// How many were opened so far.
    opened: Cell<usize>,
    /// How often something was about to pass it that is not on a connection yet, or had passed, and
    /// how often it was cut and mended.
    passed: Cell<u64>,
}

/// Whether one direction is cut.
#[derive(Debug, Default)]
struct Gate(watch::Sender<bool>);

impl Gate {
    async fn is_open(&self) {
        let mut is_cut = self.0.subscribe();
        // The sender is `self`: there is no other end to this.
        let _ = is_cut.wait_for(|is_cut| !is_cut).await;
    }
}

impl Link {
    fn gate(&self, direction: Direction) -> &Gate {
        match direction {
            Direction::ToServer => &self.to_server,
            Direction::ToHost => &self.to_host,
        }
    }

    fn count_pass(&self) {
        self.passed.set(self.passed.get().wrapping_add(1));
    }

    /// Cuts a direction, or mends it.
    fn set(&self, direction: Direction, is_cut: bool) {
        self.count_pass();
        // If the gate of a link that is cut already woke those who wait at it, each would draw a
        // new place in line from tokio's chance, and the place of the fault among the work of its
        // moment would matter to all later draws.
        let gate = &self.gate(direction).0;
        gate.send_if_modified(|was_cut| std::mem::replace(was_cut, is_cut) != is_cut);
        for wire in self.open_wires() {
            wire.set_link(direction, is_cut);
        }
    }

    fn open_wires(&self) -> Vec<Arc<Wire>> {
        let mut wires = self.wires.borrow_mut();
        wires.retain(|wire| wire.is_open());
        wires.clone()
    }

    fn wire(&self, number: usize) -> Option<Arc<Wire>> {
        let wires = self.open_wires();
        let number = number.checked_rem(wires.len())?;
        wires.get(number).cloned()
    }

    fn end_all(&self) {
        for wire in self.open_wires() {
            wire.end();
        }
    }

    /// A new connection of this host.
    fn connect(&self, host: &HostInner, server: Option<usize>) -> (End, End) {
        let number = self.opened.get();
        self.opened.set(number.saturating_add(1));
        let wire = Arc::new(Wire::of(ConnectionId {
            host: host.number,
            server,
            number,
        }));
        for direction in Direction::BOTH {
            wire.set_link(direction, *self.gate(direction).0.borrow());
        }
        let ends = ends(&wire, &host.courier);
        self.open_wires();
        self.wires.borrow_mut().push(wire);
        ends
    }
}

impl HostInner {
    fn link(&self, address: &str) -> Rc<Link> {
        let mut links = self.links.borrow_mut();
        let link = links.entry(address.to_owned());
        Rc::clone(link.or_default())
    }

    async fn connect_all(self: Rc<Self>, mut requests: mpsc::UnboundedReceiver<Call>) {
        while let Some(call) = requests.recv().await {
            spawn_local(Rc::clone(&self).connect(call));
        }
    }

    /// As a handshake of three: it needs both directions, and takes the time of both.
    async fn connect(self: Rc<Self>, call: Call) {
        let link = self.link(&call.address);
        self.dials.set(self.dials.get().saturating_add(1));
        // Otherwise a client that retries at once would do so for ever: no time would go by.
        sleep(Duration::from_millis(1)).await;
        for direction in [Direction::ToServer, Direction::ToHost] {
            sleep(self.courier.delay(self.number)).await;
            link.count_pass();
            link.gate(direction).is_open().await;
            link.count_pass();
        }
        if call.reply.is_closed() {
            return;
        }
        if self.is_dead.get() {
            // There is no answer: the process is dead.
            return std::future::pending().await;
        }
        let Some(peer) = self.network.peer(&call.address) else {
            let refused = io::Error::from(io::ErrorKind::ConnectionRefused);
            let _ = call.reply.send(Err(refused));
            return;
        };
        let (host_end, server_end) = link.connect(&self, peer.server());
        if call.reply.send(Ok(host_end)).is_ok() {
            peer.accept(server_end);
        }
    }
}

/// After this time a server notices that the peer of a half-open connection does not answer.
pub const KEEPALIVE: Duration = Duration::from_secs(60);
