//! A cluster as it is run: several primaries, each with a replica.

use std::net::SocketAddr;

use crate::eventually::{eventually, until};
use crate::server::{Builder, Server};
use crate::topology::{Resharding, introduce, is_connected, node_id};

/// A cluster of three primaries with a third of the slots each, and a replica of each.
///
/// A node that has not answered for four seconds is taken for dead.
#[derive(Debug)]
pub struct Shards {
    nodes: Vec<Server>,
}

/// The slots of the three primaries at the beginning.
const RANGES: [&str; 3] = ["0 5460", "5461 10922", "10923 16383"];

impl Shards {
    /// All with the module.
    #[track_caller]
    pub fn start() -> Self {
        Self::of(&Server::builder())
    }

    /// Six nodes such as this one.
    #[track_caller]
    pub fn of(node: &Builder) -> Self {
        let node = node.clone().cluster();
        let nodes: Vec<_> = (0..2 * RANGES.len())
            .map(|_| {
                let node = node.clone().config("cluster-node-timeout 4000");
                // The dead and the living keep to their shards.
                node.config("cluster-allow-replica-migration no").start()
            })
            .collect();
        for (range, primary) in RANGES.iter().zip(&nodes) {
            let add = format!("CLUSTER ADDSLOTSRANGE {range}");
            assert_eq!(primary.run(add), "OK");
        }
        introduce(&nodes.iter().collect::<Vec<_>>());
        for (primary, replica) in nodes.iter().zip(&nodes[RANGES.len()..]) {
            let replicate = format!("CLUSTER REPLICATE {}", node_id(primary));
            assert_eq!(replica.run(replicate), "OK");
        }
        let shards = Self { nodes };
        shards.settle();
        shards
    }

    /// All six, whatever they are at the moment.
    pub fn nodes(&self) -> &[Server] {
        &self.nodes
    }

    /// Where they listen, those too that were killed.
    pub fn addresses(&self) -> Vec<SocketAddr> {
        self.nodes.iter().map(Server::address).collect()
    }

    /// The primaries that live, in the order in which they were started.
    pub fn primaries(&self) -> Vec<&Server> {
        self.living().filter(|node| is_primary(node)).collect()
    }

    /// The primary that serves `key`; waits until one does.
    #[track_caller]
    pub fn primary_of(&self, key: &str) -> &Server {
        &self.nodes[self.index_of_primary(key)]
    }

    /// The replica of the primary that serves `key`.
    #[track_caller]
    pub fn replica_of(&self, key: &str) -> &Server {
        let primary = node_id(self.primary_of(key));
        let is_its_replica = |node: &&Server| {
            let role = myself(node);
            role.get(3).is_some_and(|id| *id == primary)
        };
        let found = self.living().find(is_its_replica);
        found.unwrap_or_else(|| panic!("the primary of {key} has no replica"))
    }

    /// A name that begins with `prefix` and is served by `node`, a primary.
    #[track_caller]
    pub fn name_at(&self, node: &Server, prefix: &str) -> String {
        let mut conn = node.connect();
        let mut names = (0..).map(|number| format!("{prefix}{number}"));
        let found = names.find(|name| !conn.run(format!("EXISTS {name}")).is_error());
        found.expect("names without end")
    }

    /// Kills the primary that serves `key`, and waits until its replica does.
    /// [`Shards::restart`] brings it back, as a replica.
    #[track_caller]
    pub fn kill_primary_of(&mut self, key: &str) {
        let index = self.index_of_primary(key);
        self.nodes[index].kill();
        let heir = self.primary_of(key);
        assert_ne!(heir.port(), self.nodes[index].port());
    }

    /// Has the replica of the primary that serves `key` change places with it, in good order.
    #[track_caller]
    pub fn fail_over(&self, key: &str) {
        let replica = self.replica_of(key);
        assert_eq!(replica.run("CLUSTER FAILOVER"), "OK");
        until("the replica serves the slots", || serves(replica, key));
        self.settle();
    }

    /// Moves the slot of `key` with all that is in it to the primary `to`.
    #[track_caller]
    pub fn move_slot(&self, key: &str, to: &Server) {
        let from = self.primary_of(key);
        let resharding = Resharding::of(key, from, to);
        resharding.open();
        while resharding.migrate_some(10) {}
        let is_other = |node: &&Server| ![from.port(), to.port()].contains(&node.port());
        let bystanders: Vec<_> = self.primaries().into_iter().filter(is_other).collect();
        resharding.close(&bystanders);
    }

    /// Starts the nodes that were killed, and waits until all is as it should be.
    #[track_caller]
    pub fn restart(&mut self) {
        for node in &mut self.nodes {
            if !node.is_running() {
                node.restart();
            }
        }
        self.settle();
    }

    /// Waits until all live nodes agree on the members, and each replica follows its primary.
    #[track_caller]
    pub fn settle(&self) {
        until("the cluster has settled", || {
            let views: Vec<_> = self.living().map(view).collect();
            let (first, others) = views.split_first().expect("a node that lives");
            first.is_some() && others.iter().all(|other| other == first)
        });
        until("the replicas follow", || {
            let mut replicas = self.living().filter(|node| !is_primary(node));
            replicas.all(is_connected)
        });
    }

    #[track_caller]
    fn index_of_primary(&self, key: &str) -> usize {
        eventually(&format!("somebody serves {key}"), || {
            let serves = |node: &Server| node.is_running() && serves(node, key);
            self.nodes.iter().position(serves)
        })
    }

    fn living(&self) -> impl Iterator<Item = &Server> {
        self.nodes.iter().filter(|node| node.is_running())
    }
}

/// A primary does; a replica redirects clients to its primary.
fn serves(node: &Server, key: &str) -> bool {
    !node.run(format!("EXISTS {key}")).is_error()
}

fn is_primary(node: &Server) -> bool {
    let role = myself(node);
    role[2].contains("master")
}

/// A node's own line of `CLUSTER NODES`, word by word.
fn myself(node: &Server) -> Vec<String> {
    let nodes = node.run("CLUSTER NODES").text();
    let own = nodes.lines().find(|line| line.contains("myself"));
    let words = own.expect("it knows itself").split(' ');
    words.map(str::to_owned).collect()
}

/// The members, as a node sees them: ids, roles, primaries and slots. None while it is unsure.
fn view(node: &Server) -> Option<Vec<String>> {
    if !node.run("CLUSTER INFO").text().contains("cluster_state:ok") {
        return None;
    }
    let nodes = node.run("CLUSTER NODES").text();
    let mut view: Vec<_> = nodes
        .lines()
        .map(|line| {
            let words: Vec<_> = line.split(' ').collect();
            let role = words[2].trim_start_matches("myself,");
            let slots = words[8..].join(" ");
            format!("{} {role} {} {slots}", words[0], words[3])
        })
        .collect();
    view.sort();
    let is_unsure = |line: &String| line.contains("fail?") || line.contains("handshake");
    (!view.iter().any(is_unsure)).then_some(view)
}
