//! A pair that real sentinels watch.

use std::net::{Ipv4Addr, SocketAddr};

use crate::certificates::Certificates;
use crate::conn::Conn;
use crate::eventually::{eventually, until};
use crate::server::{Builder, Server};
use crate::topology::{Pair, cut_off};

/// A primary and its replica, and three sentinels. Two of them are enough to replace the primary.
///
/// They are quicker than sentinels are by default: a server is down when it has not answered for
/// three seconds.
#[derive(Debug)]
pub struct Sentinels {
    // First, so that they end first: they would take the end of the servers for a failure.
    trio: Trio,
    servers: [Server; 2],
}

/// A busy machine may stop a process for longer than a second.
const DOWN_AFTER_MS: u32 = 3000;

/// A failover that takes longer is given up; that of a dead primary is tried again after twice
/// as long.
const FAILOVER_TIMEOUT_MS: u32 = 3000;

impl Sentinels {
    /// The sentinels' name for the pair.
    pub const SERVICE: &str = "rlock";

    /// Two servers with the module.
    #[track_caller]
    pub fn start() -> Self {
        Self::of(Server::builder(), Server::builder())
    }

    /// These two servers; the first is the primary at the beginning.
    #[track_caller]
    pub fn of(primary: Builder, replica: Builder) -> Self {
        Self::over(Pair::of(primary, replica))
    }

    /// Two servers with the module, and sentinels that speak TLS too, at
    /// [`Sentinels::tls_addresses`].
    #[track_caller]
    pub fn start_with_tls(certificates: &Certificates) -> Self {
        let pair = Pair::start();
        let how = Server::builder().tls(certificates);
        let trio = Trio::of(&pair.primary, DOWN_AFTER_MS, &how);
        let servers = [pair.primary, pair.replica];
        Self { trio, servers }
    }

    /// Over a pair that is there.
    #[track_caller]
    pub fn over(pair: Pair) -> Self {
        let trio = Trio::over(&pair.primary, DOWN_AFTER_MS);
        let servers = [pair.primary, pair.replica];
        Self { trio, servers }
    }

    /// Where the sentinels listen, those too that were killed.
    pub fn addresses(&self) -> Vec<SocketAddr> {
        self.trio.addresses()
    }

    /// Where they listen for TLS.
    pub fn tls_addresses(&self) -> Vec<SocketAddr> {
        self.trio.0.iter().map(Server::tls_address).collect()
    }

    /// A sentinel that alone watches `primary`, which has no replica. They speak TLS with each
    /// other, and by it the sentinel names the primary's port for TLS.
    #[track_caller]
    pub fn alone_over_tls(primary: &Server, certificates: &Certificates) -> Server {
        sentinel(
            primary,
            DOWN_AFTER_MS,
            &Server::builder().tls_among_servers(certificates),
        )
    }

    /// One of the three.
    pub fn sentinel(&self, number: usize) -> &Server {
        &self.trio.0[number]
    }

    /// Kills one of the three.
    pub fn kill_sentinel(&mut self, number: usize) {
        self.trio.0[number].kill();
    }

    /// The server that the sentinels take for the primary, as soon as all that live agree.
    #[track_caller]
    pub fn primary(&self) -> &Server {
        &self.servers[self.index_of_primary()]
    }

    /// The other one.
    #[track_caller]
    pub fn replica(&self) -> &Server {
        &self.servers[1 - self.index_of_primary()]
    }

    /// Has a sentinel replace the primary, which lives and becomes the replica. All is settled
    /// when this returns.
    #[track_caller]
    pub fn fail_over(&self) {
        self.replace_primary();
        self.trio.settle();
    }

    /// The same, where the primary may not hear of it.
    #[track_caller]
    pub fn replace_primary(&self) {
        let old = self.primary().port();
        // An order that was given up is forgotten, while a dead primary stays one.
        self.trio.give_up_failovers_after(15_000);
        self.trio.order_failover();
        self.trio.await_failover(old);
        self.trio.give_up_failovers_after(FAILOVER_TIMEOUT_MS);
    }

    /// Kills the primary, and waits until the sentinels have made the replica the primary.
    /// [`Sentinels::restart`] brings the old one back, as a replica.
    #[track_caller]
    pub fn kill_primary(&mut self) {
        let index = self.index_of_primary();
        self.servers[index].kill();
        self.trio.await_failover(self.servers[index].port());
    }

    /// Cuts the primary off from the sentinels and its replica, for good: the user with whose name
    /// they log in is refused from now on. It is everybody's user unless others are made.
    /// Connections of other users pass.
    #[track_caller]
    pub fn cut_off_primary(&self) {
        cut_off(self.primary());
    }

    /// Waits until another server than the one on port `old` is the primary, and says so itself.
    #[track_caller]
    pub fn await_failover(&self, old: u16) {
        self.trio.await_failover(old);
    }

    /// Starts the servers that were killed, and waits until all is as it should be.
    #[track_caller]
    pub fn restart(&mut self) {
        for server in &mut self.servers {
            if !server.is_running() {
                server.restart();
            }
        }
        self.trio.settle();
    }

    /// Waits until the sentinels that live agree on the primary and know each other, and the
    /// replica, which they could promote at once, follows it.
    #[track_caller]
    pub fn settle(&self) {
        self.trio.settle();
    }

    #[track_caller]
    fn index_of_primary(&self) -> usize {
        let port = eventually("the sentinels agree on the primary", || self.trio.agreed());
        let found = self.servers.iter().position(|server| server.port() == port);
        found.expect("one of the two")
    }
}

/// Three sentinels over a pair that the caller owns.
#[derive(Debug)]
pub struct Trio([Server; 3]);

impl Trio {
    /// Over this primary and its replica, which count as down when they have not answered for this
    /// time.
    #[track_caller]
    pub fn over(primary: &Server, down_after_ms: u32) -> Self {
        Self::of(primary, down_after_ms, &Server::builder())
    }

    #[track_caller]
    fn of(primary: &Server, down_after_ms: u32, how: &Builder) -> Self {
        let trio = Self([(); 3].map(|()| sentinel(primary, down_after_ms, how)));
        trio.settle();
        trio
    }

    /// Where they listen, those too that were killed.
    pub fn addresses(&self) -> Vec<SocketAddr> {
        self.0.iter().map(Server::address).collect()
    }

    /// The port of the primary, if all sentinels that live name the same one.
    pub fn agreed(&self) -> Option<u16> {
        let ask = format!("SENTINEL GET-MASTER-ADDR-BY-NAME {}", Sentinels::SERVICE);
        let mut ports = self.living().map(|sentinel| {
            let address = sentinel.run(&ask).texts();
            address[1].parse().expect("a port")
        });
        let first = ports.next()?;
        ports.all(|port| port == first).then_some(first)
    }

    #[track_caller]
    fn give_up_failovers_after(&self, ms: u32) {
        let set = format!("SENTINEL SET {} failover-timeout {ms}", Sentinels::SERVICE);
        for sentinel in self.living() {
            assert_eq!(sentinel.run(&set), "OK");
        }
    }

    /// Has one of them replace the primary, though it lives.
    #[track_caller]
    pub fn order_failover(&self) {
        let sentinel = self.living().next().expect("a sentinel that lives");
        until("a sentinel finds the replica good enough", || {
            let told = sentinel.run(format!("SENTINEL FAILOVER {}", Sentinels::SERVICE));
            assert!(
                !told.is_error() || told.error().starts_with("NOGOODSLAVE"),
                "{told:?}"
            );
            told == "OK"
        });
    }

    /// Waits until another server than the one on port `old` is the primary, and says so itself.
    #[track_caller]
    pub fn await_failover(&self, old: u16) {
        until("the sentinels agree on another primary", || {
            let agreed = self.agreed().filter(|port| *port != old);
            agreed.is_some_and(|port| says(port, &["role:master"]))
        });
    }

    /// Waits until those that live agree on the primary and know each other, and the replica, which
    /// they could promote at once, follows it.
    #[track_caller]
    pub fn settle(&self) {
        until("the sentinels have settled", || {
            let Some(primary) = self.agreed() else {
                return false;
            };
            let follows = format!("master_port:{primary}");
            let follows = ["role:slave", "master_link_status:up", &follows];
            let is_settled = |sentinel: &Server| {
                let replica = self.replica_known_to(sentinel);
                replica.is_some_and(|replica| says(replica, &follows))
            };
            says(primary, &["role:master"]) && self.living().all(is_settled)
        });
    }

    /// The port of the one replica that this sentinel knows, finds sound and could promote with the
    /// votes of the others.
    fn replica_known_to(&self, sentinel: &Server) -> Option<u16> {
        let quorum = sentinel.run(format!("SENTINEL CKQUORUM {}", Sentinels::SERVICE));
        let usable = format!("OK {} usable Sentinels", self.living().count());
        if quorum.is_error() || !quorum.text().starts_with(&usable) {
            return None;
        }
        let replicas = sentinel.run(format!("SENTINEL REPLICAS {}", Sentinels::SERVICE));
        let [replica] = replicas.array() else {
            return None;
        };
        let fields = replica.texts();
        let field = |name| {
            let mut pairs = fields.chunks(2);
            pairs.find(|pair| pair[0] == name).map(|pair| &*pair[1])
        };
        let is_sound = field("flags") == Some("slave") && field("master-link-status") == Some("ok");
        field("port")?.parse().ok().filter(|_| is_sound)
    }

    fn living(&self) -> impl Iterator<Item = &Server> {
        self.0.iter().filter(|sentinel| sentinel.is_running())
    }
}

/// A sentinel that watches this primary and finds the other sentinels there.
#[track_caller]
fn sentinel(primary: &Server, down_after_ms: u32, how: &Builder) -> Server {
    let (service, port) = (Sentinels::SERVICE, primary.port_for_servers());
    let down = format!("sentinel down-after-milliseconds {service} {down_after_ms}");
    let timeout = format!("sentinel failover-timeout {service} {FAILOVER_TIMEOUT_MS}");
    let sentinel = how
        .clone()
        .sentinel()
        .config(&format!("sentinel monitor {service} 127.0.0.1 {port} 2"))
        .config(&down)
        .config(&timeout)
        .start();
    // How often it asks and tells, in place of every second to every ten. And a machine that
    // is stopped for a moment makes it hold back for a second, not for half a minute.
    let periods = "info-period 300 ping-period 300 publish-period 300 tilt-period 1000";
    let told = sentinel.run(format!("SENTINEL DEBUG {periods}"));
    assert_eq!(told, "OK");
    sentinel
}

/// Whether these are lines of what the server on this port says about its replication. It may be
/// dead, and a sentinel that makes it primary or replica closes its connections.
fn says(port: u16, lines: &[&str]) -> bool {
    let address = SocketAddr::from((Ipv4Addr::LOCALHOST, port));
    let told = Conn::open(address).and_then(|mut conn| conn.try_run("INFO replication"));
    let Ok(told) = told else { return false };
    let told = told.text();
    lines
        .iter()
        .all(|line| told.lines().any(|other| other == *line))
}
