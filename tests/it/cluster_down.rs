//! A node whose cluster is down: it answers CLUSTERDOWN to writes, since its replica may have been
//! promoted where the node cannot see it. There the end of a session or of a
//! lease must write no more than a client may.

use std::thread;
use std::time::Duration;

use rlock_tests::{Cluster, Conn, Server, slot_of, until};

/// The locks that a session has, each waited for by another session. The names share a slot.
const HELD: [(&str, &str); 4] = [
    ("{l}plain", ""),
    ("{l}read", "READ"),
    ("{l}write", "WRITE"),
    ("{l}permits", "PERMITS 1 OF 1"),
];

/// The mode in which others wait: readers would be let in beside a reader.
fn waits_in(mode: &str) -> &str {
    if mode == "READ" { "WRITE" } else { mode }
}

/// A cluster in which session `s` of alice holds every lock, and bob waits for each of them.
struct Down {
    cluster: Cluster,
    alice: Option<Conn>,
    bob: Conn,
    lost_slot: i64,
}

impl Down {
    fn with(reads: &str, lease_ms: u32) -> Self {
        let node = Server::builder().config(&format!("cluster-allow-reads-when-down {reads}"));
        let cluster = Cluster::of(&node);
        let server = &cluster.first;
        let (alice, mut bob) = (
            server.session_connection("s"),
            server.session_connection("t"),
        );
        let mut conn = server.connect();
        for (name, mode) in HELD {
            let hold = format!("RLOCK.ACQUIRE {name} alice {lease_ms} {mode} SESSION s");
            assert!(conn.run(&hold).held().0 > 0, "{hold}");
            let mode = waits_in(mode);
            let wait = format!("RLOCK.ACQUIRE {name} bob 60000 {mode} QUEUE 0 SESSION t");
            assert_eq!(conn.run(&wait).queued(), 1, "{wait}");
        }
        // A hold that nobody waits for is not deleted either.
        let alone = format!("RLOCK.ACQUIRE {{l}}alone alice {lease_ms} SESSION s");
        conn.run(alone).held();
        assert!(bob.run("RLOCK.EVENTS t").events().is_empty());
        let lost_slot = slot_of(server, "another");
        assert_ne!(lost_slot, slot_of(server, "{l}"));
        Self {
            cluster,
            alice: Some(alice),
            bob,
            lost_slot,
        }
    }

    fn server(&self) -> &Server {
        &self.cluster.first
    }

    /// A slot that nobody serves takes the whole cluster down.
    fn goes_down(&self) {
        let drop = format!("CLUSTER DELSLOTS {}", self.lost_slot);
        assert_eq!(self.server().run(drop), "OK");
        self.is_down();
    }

    fn is_down(&self) {
        until("the cluster is down", || {
            let told = self.server().run("SET {l}probe x");
            told.is_error() && told.error().starts_with("CLUSTERDOWN ")
        });
    }

    fn comes_up(&self) {
        let add = format!("CLUSTER ADDSLOTS {}", self.lost_slot);
        assert_eq!(self.server().run(add), "OK");
        until("the cluster is up", || {
            !self.server().run("SET {l}probe x").is_error()
        });
    }

    /// The timer has had many turns. That something does not happen cannot be waited for.
    fn nothing_was_written(&mut self, before: &[i64]) {
        thread::sleep(Duration::from_millis(150));
        assert_eq!(self.counters(), before);
        let told = self.bob.run("RLOCK.EVENTS t").events();
        assert!(told.is_empty(), "{told:?}");
    }

    fn counters(&self) -> Vec<i64> {
        let counters = [
            "rlock_grants",
            "rlock_session_releases",
            "rlock_expiries_noticed",
        ];
        let counters = counters.map(|counter| self.server().info_number(counter));
        let written = self.server().info_number("rdb_changes_since_last_save");
        counters.into_iter().chain([written]).collect()
    }

    fn bob_gets_all(&mut self) {
        let mut granted = 0;
        until("bob has been granted all", || {
            let events = self.bob.run("RLOCK.EVENTS t").events();
            assert!(
                events.iter().all(|(what, _)| what.starts_with("granted ")),
                "{events:?}"
            );
            granted += events.len();
            granted == HELD.len()
        });
    }
}

fn a_session_ends(reads: &str) {
    let mut down = Down::with(reads, 600_000);
    down.goes_down();
    let before = down.counters();
    down.alice.take().expect("her connection").close();
    until("the session has ended", || {
        down.server().info_number("rlock_sessions") == 1
    });
    down.nothing_was_written(&before);
    down.comes_up();
    down.bob_gets_all();
    until("the hold without waiters is gone", || {
        down.server().run("EXISTS {l}alone") == 0
    });
}

#[test]
fn while_the_cluster_is_down_a_session_that_ends_hands_nothing_over() {
    a_session_ends("no");
}

#[test]
fn nor_does_it_where_reads_are_allowed_meanwhile() {
    a_session_ends("yes");
}

fn leases_end(reads: &str) {
    let mut down = Down::with(reads, 600_000);
    // In one turn of the event loop: the cluster is down before the leases end.
    let mut commands: Vec<_> = HELD
        .map(|(name, mode)| {
            let mode = mode.split(' ').next().unwrap_or_default();
            format!("RLOCK.RENEW {name} alice 300 {mode}")
        })
        .into();
    commands.push(format!("CLUSTER DELSLOTS {}", down.lost_slot));
    let replies = down.server().connect().pipeline(&commands);
    assert_eq!(replies[HELD.len()], "OK");
    assert!(replies[..HELD.len()].iter().all(|reply| reply == &1));
    down.is_down();
    let granted = down.server().info_number("rlock_grants");
    thread::sleep(Duration::from_millis(600));
    assert_eq!(down.server().info_number("rlock_grants"), granted);
    let told = down.bob.run("RLOCK.EVENTS t").events();
    assert!(told.is_empty(), "{told:?}");
    down.comes_up();
    down.bob_gets_all();
}

#[test]
fn while_the_cluster_is_down_no_end_of_a_lease_grants() {
    leases_end("no");
}

#[test]
fn nor_does_one_where_reads_are_allowed_meanwhile() {
    leases_end("yes");
}

// --- Slots on their way --------------------------------------------------------------------------

/// The node serves the slot only to clients that send ASKING, as the timer does not.
#[test]
fn a_hold_at_the_node_that_a_slot_moves_to_ends_with_its_session() {
    let cluster = Cluster::start();
    cluster.open_slot_of("k");
    let server = &cluster.second;
    let life = server.session_connection("s");
    let hold = "RLOCK.ACQUIRE k alice 600000 SESSION s";
    let replies = server.connect().pipeline(&["ASKING", hold]);
    replies[1].held();
    life.close();
    until("the session has ended", || {
        server.info_number("rlock_sessions") == 0
    });
    cluster.close_slot_of("k");
    until("the hold is released", || server.run("EXISTS k") == 0);
}

#[test]
fn a_hold_whose_slot_has_no_owner_for_a_while_ends_with_its_session() {
    let node = Server::builder().config("cluster-require-full-coverage no");
    let cluster = Cluster::of(&node);
    let server = &cluster.first;
    let life = server.session_connection("s");
    let mut conn = server.connect();
    conn.run("RLOCK.ACQUIRE k alice 600000 SESSION s").held();
    let slot = slot_of(server, "k");
    assert_eq!(conn.run(format!("CLUSTER DELSLOTS {slot}")), "OK");
    life.close();
    until("the session has ended", || {
        server.info_number("rlock_sessions") == 0
    });
    assert_eq!(conn.run(format!("CLUSTER ADDSLOTS {slot}")), "OK");
    until("the hold is released", || conn.run("EXISTS k") == 0);
}

/// While the slot moves the key cannot be looked at. The token and the end of the hold must be
/// kept, since they tell it from the hold in the other key later.
#[test]
fn a_writer_whose_key_is_replaced_while_its_slot_moves_has_lost_it() {
    let cluster = Cluster::start();
    let server = &cluster.first;
    let mut life = server.session_connection("s");
    let mut conn = server.connect();
    let commands = [
        "RLOCK.ACQUIRE {t}w alice 600000 WRITE SESSION s",
        "RLOCK.ACQUIRE {t}other alice 900000 WRITE",
    ];
    for reply in conn.pipeline(&commands) {
        reply.held();
    }
    cluster.open_slot_of("{t}w");
    assert_eq!(conn.run("RENAME {t}other {t}w"), "OK");
    // The timer has looked, in vain, and will look again.
    thread::sleep(Duration::from_millis(1200));
    let stable = format!("CLUSTER SETSLOT {} STABLE", slot_of(server, "{t}w"));
    for node in [&cluster.first, &cluster.second] {
        assert_eq!(node.run(&stable), "OK");
    }
    let told = life.run("RLOCK.EVENTS s BLOCK 10000").events();
    assert_eq!(told[0].0, "lost {t}w alice");
    assert_eq!(told[0].1, "deleted");
    life.close();
    until("the session has ended", || {
        server.info_number("rlock_sessions") == 0
    });
    let field = conn.run("HGET {t}w alice:write").text();
    assert!(field.starts_with("1:t"), "{field}");
}
