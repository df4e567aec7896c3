//! Servers that know each other.

mod resharding;
mod sentinels;
mod shards;

pub use resharding::Resharding;
pub use sentinels::{Sentinels, Trio};
pub use shards::Shards;

use crate::eventually::until;
use crate::server::{Builder, Server};

/// A primary and its replica, in sync.
#[derive(Debug)]
pub struct Pair {
    /// The one that decides.
    pub primary: Server,
    /// The one that is told.
    pub replica: Server,
}

impl Pair {
    /// Both with the module.
    #[track_caller]
    pub fn start() -> Self {
        Self::of(Server::builder(), Server::builder())
    }

    /// The replica a server without the module.
    #[track_caller]
    pub fn with_plain_replica() -> Self {
        Self::of(Server::builder(), Server::builder().without_module())
    }

    /// These two. The replica dies rather than go on after a command that it cannot apply.
    #[track_caller]
    pub fn of(primary: Builder, replica: Builder) -> Self {
        let primary = primary.start();
        let replica = replica.config("propagation-error-behavior panic").start();
        let pair = Self { primary, replica };
        pair.replica
            .run(format!("REPLICAOF 127.0.0.1 {}", pair.primary.port()));
        until("the replica is connected", || is_connected(&pair.replica));
        pair.settle();
        pair
    }

    /// Waits until the replica has been told everything that was done so far.
    #[track_caller]
    pub fn settle(&self) {
        in_sync(&self.primary, &self.replica);
    }
}

/// Closes all connections of the default user to this server, and refuses that user from now on.
#[track_caller]
pub fn cut_off(server: &Server) {
    let mut conn = server.connect();
    assert_eq!(conn.run("ACL SETUSER default off"), "OK");
    conn.run("CLIENT KILL USER default").int();
}

/// Waits until `replica` has processed all that `primary` has written.
#[track_caller]
pub fn in_sync(primary: &Server, replica: &Server) {
    until("the replica is in sync", || {
        let written = primary.info_number("master_repl_offset");
        replica
            .info("slave_repl_offset")
            .is_some_and(|read| read == written.to_string())
    });
}

/// Whether this server is a replica that is connected to its primary.
pub(crate) fn is_connected(replica: &Server) -> bool {
    let status = replica.info("master_link_status");
    status.is_some_and(|status| status == "up")
}

/// A cluster of two nodes; all slots lie with the first.
#[derive(Debug)]
pub struct Cluster {
    /// Has all slots at the beginning.
    pub first: Server,
    /// Has none.
    pub second: Server,
}

impl Cluster {
    /// Both with the module.
    #[track_caller]
    pub fn start() -> Self {
        Self::of(&Server::builder())
    }

    /// Both plain servers.
    #[track_caller]
    pub fn start_plain() -> Self {
        Self::of(&Server::builder().without_module())
    }

    /// Two nodes such as this one.
    #[track_caller]
    pub fn of(node: &Builder) -> Self {
        let [first, second] = [(); 2].map(|()| node.clone().cluster().start());
        assert_eq!(first.run("CLUSTER ADDSLOTSRANGE 0 16383"), "OK");
        introduce(&[&first, &second]);
        Self { first, second }
    }

    /// Begins to move the slot of `key` from the first node to the second.
    #[track_caller]
    pub fn open_slot_of(&self, key: &str) {
        self.resharding(key).open();
    }

    /// Moves the key itself.
    #[track_caller]
    pub fn migrate(&self, key: &str) {
        self.resharding(key).migrate(&[key]);
    }

    /// Ends the move: the slot of `key` is the second node's.
    #[track_caller]
    pub fn close_slot_of(&self, key: &str) {
        self.resharding(key).close(&[]);
    }

    #[track_caller]
    fn resharding(&self, key: &str) -> Resharding<'_> {
        Resharding::of(key, &self.first, &self.second)
    }
}

/// Makes one cluster of these nodes, and waits until all agree on it.
#[track_caller]
fn introduce(nodes: &[&Server]) {
    for (epoch, node) in nodes.iter().enumerate() {
        let set = format!("CLUSTER SET-CONFIG-EPOCH {}", epoch + 1);
        assert_eq!(node.run(set), "OK");
    }
    let Some((first, others)) = nodes.split_first() else {
        return;
    };
    for other in others {
        let (port, bus_port) = (other.port_for_servers(), other.bus_port());
        let meet = format!("CLUSTER MEET 127.0.0.1 {port} {bus_port}");
        assert_eq!(first.run(meet), "OK");
    }
    let known = format!("cluster_known_nodes:{}", nodes.len());
    until("all nodes agree on the cluster", || {
        nodes.iter().all(|node| {
            let state = node.run("CLUSTER INFO").text();
            state.contains("cluster_state:ok") && state.contains(&known)
        })
    });
}

/// The slot of `key`, by the server's own account.
#[track_caller]
pub fn slot_of(server: &Server, key: &str) -> i64 {
    server.run(format!("CLUSTER KEYSLOT {key}")).int()
}

#[track_caller]
fn node_id(server: &Server) -> String {
    server.run("CLUSTER MYID").text()
}
