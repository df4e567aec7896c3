//! Servers that know each other.

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

    /// The replica a plain server.
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
        until("the replica is connected", || {
            pair.replica
                .info("master_link_status")
                .is_some_and(|status| status == "up")
        });
        pair.settle();
        pair
    }

    /// Waits until the replica has been told everything that was done so far.
    #[track_caller]
    pub fn settle(&self) {
        in_sync(&self.primary, &self.replica);
    }
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
        let first = node.clone().cluster().start();
        let second = node.clone().cluster().start();
        for (epoch, node) in [&first, &second].into_iter().enumerate() {
            assert_eq!(
                node.run(format!("CLUSTER SET-CONFIG-EPOCH {}", epoch + 1)),
                "OK"
            );
        }
        assert_eq!(first.run("CLUSTER ADDSLOTSRANGE 0 16383"), "OK");
        let bus_port = second.run("CONFIG GET cluster-port").array()[1].text();
        let meet = format!("CLUSTER MEET 127.0.0.1 {} {bus_port}", second.port());
        assert_eq!(first.run(meet), "OK");
        let cluster = Self { first, second };
        until("both nodes agree on the cluster", || {
            [&cluster.first, &cluster.second].iter().all(|node| {
                let state = node.run("CLUSTER INFO").text();
                state.contains("cluster_state:ok") && state.contains("cluster_known_nodes:2")
            })
        });
        cluster
    }

    /// Begins to move the slot of `key` from the first node to the second.
    #[track_caller]
    pub fn open_slot_of(&self, key: &str) {
        let slot = slot_of(&self.first, key);
        let (from, to) = (node_id(&self.first), node_id(&self.second));
        assert_eq!(
            self.second
                .run(format!("CLUSTER SETSLOT {slot} IMPORTING {from}")),
            "OK"
        );
        assert_eq!(
            self.first
                .run(format!("CLUSTER SETSLOT {slot} MIGRATING {to}")),
            "OK"
        );
    }

    /// Moves the key itself.
    #[track_caller]
    pub fn migrate(&self, key: &str) {
        let migrate = format!("MIGRATE 127.0.0.1 {} {key} 0 5000", self.second.port());
        assert_eq!(self.first.run(migrate), "OK");
    }

    /// Ends the move: the slot of `key` is the second node's.
    #[track_caller]
    pub fn close_slot_of(&self, key: &str) {
        let slot = slot_of(&self.first, key);
        let to = node_id(&self.second);
        for node in [&self.second, &self.first] {
            assert_eq!(node.run(format!("CLUSTER SETSLOT {slot} NODE {to}")), "OK");
        }
    }
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
