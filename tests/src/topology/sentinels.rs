//! A pair that real sentinels watch.

use std::net::SocketAddr;

use crate::conn::Conn;
use crate::eventually::{eventually, until};
use crate::server::{Builder, Server};
use crate::topology::Pair;

/// A primary and its replica, and three sentinels, two of which are enough to replace the primary.
///
/// They are quicker than sentinels are by default: a server is down when it has not answered for a
/// second.
#[derive(Debug)]
pub struct Sentinels {
    // First, so that they end first: they would take the end of the servers for a failure.
    sentinels: Vec<Server>,
    servers: [Server; 2],
}

impl Sentinels {
    /// What the sentinels call the pair.
    pub const SERVICE: &str = "rlock";

    /// Two servers with the module.
    #[track_caller]
    pub fn start() -> Self {
        Self::of(Server::builder(), Server::builder())
    }

    /// These two, the first of which is the primary at the beginning.
    #[track_caller]
    pub fn of(primary: Builder, replica: Builder) -> Self {
        Self::over(Pair::of(primary, replica))
    }

    /// Over a pair that is there.
    #[track_caller]
    pub fn over(pair: Pair) -> Self {
        let Pair { primary, replica } = pair;
        let sentinels = (0..3).map(|_| sentinel(&primary)).collect();
        let servers = [primary, replica];
        let watched = Self { sentinels, servers };
        watched.settle();
        watched
    }

    /// Where the sentinels listen, those too that were killed.
    pub fn addresses(&self) -> Vec<SocketAddr> {
        self.sentinels.iter().map(Server::address).collect()
    }

    /// One of the three.
    pub fn sentinel(&self, number: usize) -> &Server {
        &self.sentinels[number]
    }

    /// Kills one of the three.
    pub fn kill_sentinel(&mut self, number: usize) {
        self.sentinels[number].kill();
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
        let old = self.primary().port();
        let sentinel = self.living().next().expect("a sentinel that lives");
        until("a sentinel finds the replica good enough", || {
            let told = sentinel.run(format!("SENTINEL FAILOVER {}", Self::SERVICE));
            assert!(
                !told.is_error() || told.error().starts_with("NOGOODSLAVE"),
                "{told:?}"
            );
            told == "OK"
        });
        self.await_failover(old);
        self.settle();
    }

    /// Kills the primary, and waits until the sentinels have made the replica the primary.
    /// [`Sentinels::restart`] brings the old one back, as a replica.
    #[track_caller]
    pub fn kill_primary(&mut self) {
        let index = self.index_of_primary();
        self.servers[index].kill();
        self.await_failover(self.servers[index].port());
    }

    /// Waits until another server than the one on port `old` is the primary, and says so itself.
    #[track_caller]
    pub fn await_failover(&self, old: u16) {
        until("the sentinels agree on another primary", || {
            self.agreed()
                .is_some_and(|port| port != old && is(self.server_on(port), &["role:master"]))
        });
    }

    /// Starts the servers that were killed, and waits until all is as it should be.
    #[track_caller]
    pub fn restart(&mut self) {
        for server in &mut self.servers {
            if !server.is_running() {
                server.restart();
            }
        }
        self.settle();
    }

    /// Waits until the sentinels that live agree on the primary and know each other, and the
    /// replica, of which they could make another primary at once, follows it.
    #[track_caller]
    pub fn settle(&self) {
        let is_settled = |port| {
            let replica = self.servers.iter().find(|server| server.port() != port);
            let replica = replica.expect("the other one");
            is(self.server_on(port), &["role:master"])
                && is(replica, &["role:slave", "master_link_status:up"])
                && is(replica, &[&format!("master_port:{port}")])
                && self.living().all(|sentinel| self.knows_all(sentinel))
        };
        until("the sentinels have settled", || {
            self.agreed().is_some_and(is_settled)
        });
    }

    fn knows_all(&self, sentinel: &Server) -> bool {
        let quorum = sentinel.run(format!("SENTINEL CKQUORUM {}", Self::SERVICE));
        let usable = format!("OK {} usable Sentinels", self.living().count());
        let replicas = sentinel.run(format!("SENTINEL REPLICAS {}", Self::SERVICE));
        let is_sound = |replica: &crate::Reply| {
            let fields = replica.texts();
            let has = |name, value| fields.chunks(2).any(|pair| pair == [name, value]);
            has("flags", "slave") && has("master-link-status", "ok")
        };
        let has_quorum = !quorum.is_error() && quorum.text().starts_with(&usable);
        has_quorum && replicas.array().len() == 1 && replicas.array().iter().all(is_sound)
    }

    #[track_caller]
    fn index_of_primary(&self) -> usize {
        let port = eventually("the sentinels agree on the primary", || self.agreed());
        let found = self.servers.iter().position(|server| server.port() == port);
        found.expect("one of the two")
    }

    #[track_caller]
    fn server_on(&self, port: u16) -> &Server {
        let found = self.servers.iter().find(|server| server.port() == port);
        found.expect("one of the two")
    }

    /// The port of the primary, if all sentinels that live name the same one.
    fn agreed(&self) -> Option<u16> {
        let ask = format!("SENTINEL GET-MASTER-ADDR-BY-NAME {}", Self::SERVICE);
        let mut ports = self.living().map(|sentinel| {
            let address = sentinel.run(&ask).texts();
            address[1].parse().expect("a port")
        });
        let first = ports.next()?;
        ports.all(|port| port == first).then_some(first)
    }

    fn living(&self) -> impl Iterator<Item = &Server> {
        self.sentinels
            .iter()
            .filter(|sentinel| sentinel.is_running())
    }
}

/// A sentinel that watches this primary and finds the other sentinels there.
#[track_caller]
fn sentinel(primary: &Server) -> Server {
    let (service, port) = (Sentinels::SERVICE, primary.port());
    let sentinel = Server::builder()
        .sentinel()
        .config(&format!("sentinel monitor {service} 127.0.0.1 {port} 2"))
        .config(&format!("sentinel down-after-milliseconds {service} 1000"))
        .config(&format!("sentinel failover-timeout {service} 3000"))
        .start();
    // How often it asks and tells, in place of every second to every ten. And a machine that
    // stands still for a moment makes it hold back for a second, not for half a minute.
    let periods = "info-period 300 ping-period 300 publish-period 300 tilt-period 1000";
    let told = sentinel.run(format!("SENTINEL DEBUG {periods}"));
    assert_eq!(told, "OK");
    sentinel
}

/// Whether these are lines of what a server says about its replication. It may be dead, and a
/// sentinel that makes it primary or replica closes its connections.
fn is(server: &Server, lines: &[&str]) -> bool {
    let told = Conn::open(server.address()).and_then(|mut conn| conn.try_run("INFO replication"));
    let Ok(told) = told else { return false };
    let told = told.text();
    lines
        .iter()
        .all(|line| told.lines().any(|other| other == *line))
}
