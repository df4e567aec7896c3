//! Slots that move as a whole: `CLUSTER MIGRATESLOTS` of Valkey 9, `CLUSTER MIGRATION IMPORT` of
//! Redis 8.4. Writes during the copy of a slot go along, and nobody holds a lock at both nodes.

use std::sync::atomic::{AtomicBool, AtomicU32, Ordering};
use std::thread;
use std::time::{Duration, Instant};

use rlock_tests::{Cluster, Conn, Reply, Server, Version, patience, slot_of, until};

/// A slot on its way from one node to another, as long as the test needs it to be.
struct Migration<'a> {
    slot: i64,
    from: &'a Server,
    to: &'a Server,
}

impl<'a> Migration<'a> {
    /// Begins to move the slot of `key`. It is copied and later writes follow, but the other node
    /// does not get it until [`Self::finish`].
    fn begin(key: &str, from: &'a Server, to: &'a Server) -> Self {
        let slot = slot_of(from, key);
        let migration = Self { slot, from, to };
        if Version::at_hand().valkey {
            assert_eq!(from.run("DEBUG SLOTMIGRATION PREVENT-PAUSE 1"), "OK");
            migration.start();
            until("the copy is made", || {
                migration.state().contains("waiting-to-pause")
            });
            return migration;
        }
        // To write a few keys takes long enough for the other node to be stopped meanwhile.
        for number in 0..20 {
            from.run(format!("SET {{{key}}}:filler:{number} x"));
        }
        assert_eq!(from.run("CONFIG SET rdb-key-save-delay 100000"), "OK");
        migration.start();
        until("the copy has begun", || {
            migration.state().contains("send-bulk-and-stream")
        });
        to.freeze();
        assert_eq!(from.run("CONFIG SET rdb-key-save-delay 0"), "OK");
        migration
    }

    fn start(&self) {
        let Self { slot, from, to } = self;
        if Version::at_hand().valkey {
            let id = to.run("CLUSTER MYID").text();
            let migrate = format!("CLUSTER MIGRATESLOTS SLOTSRANGE {slot} {slot} NODE {id}");
            assert_eq!(from.run(migrate), "OK");
        } else {
            let import = to.run(format!("CLUSTER MIGRATION IMPORT {slot} {slot}"));
            assert!(!import.is_error(), "{import:?}");
        }
    }

    /// The source's state of it.
    fn state(&self) -> String {
        let ask = if Version::at_hand().valkey {
            "CLUSTER GETSLOTMIGRATIONS"
        } else {
            "CLUSTER MIGRATION STATUS ALL"
        };
        format!("{:?}", self.from.run(ask))
    }

    fn has_arrived(&self) -> bool {
        let [there, here] = [self.to, self.from].map(|node| {
            let probe = format!("CLUSTER COUNTKEYSINSLOT {}", self.slot);
            assert!(!node.run(probe).is_error());
            let nodes = node.run("CLUSTER NODES").text();
            let me = nodes.lines().find(|line| line.contains("myself"));
            let slots: Vec<_> = me
                .into_iter()
                .flat_map(|me| me.split(' ').skip(8))
                .collect();
            slots.iter().any(|range| {
                let (first, last) = range.split_once('-').unwrap_or((range, range));
                let bounds = first.parse::<i64>().ok().zip(last.parse::<i64>().ok());
                bounds.is_some_and(|(first, last)| (first..=last).contains(&self.slot))
            })
        });
        there && !here
    }

    /// Lets the other node have the slot.
    fn finish(&self) {
        if Version::at_hand().valkey {
            assert_eq!(self.from.run("DEBUG SLOTMIGRATION PREVENT-PAUSE 0"), "OK");
        } else {
            self.to.thaw();
        }
        until("the slot is the other node's", || self.has_arrived());
    }

    /// Calls it off.
    fn cancel(&self) {
        if Version::at_hand().valkey {
            assert_eq!(self.from.run("CLUSTER CANCELSLOTMIGRATIONS"), "OK");
            assert_eq!(self.from.run("DEBUG SLOTMIGRATION PREVENT-PAUSE 0"), "OK");
        } else {
            assert!(!self.from.run("CLUSTER MIGRATION CANCEL ALL").is_error());
            self.to.thaw();
            self.to.run("CLUSTER MIGRATION CANCEL ALL");
        }
        until("it is called off", || {
            let state = self.state();
            state.contains("cancel") || state.contains("fail")
        });
        assert!(!self.has_arrived());
    }
}

/// Holds of every kind of the tag `{k}`, and waiters for them.
struct Scene {
    alice: Conn,
    /// The session that has a hold, and dies.
    dying: Option<Conn>,
    /// The session for which carol and dora wait.
    life: Conn,
    /// By lock: the owners that are granted while the slot moves.
    granted: Vec<(&'static str, Conn)>,
    /// The waiters, until it has moved.
    waiting: Vec<Conn>,
}

fn scene(node: &Server) -> Scene {
    let mut alice = node.connect();
    for name in ["released", "deleted", "kept", "one", "two"] {
        alice.take(&format!("{{k}}{name}"), "alice");
    }
    for read in ["alice", "zoe"] {
        alice
            .run(format!("RLOCK.ACQUIRE {{k}}read {read} 60000 READ"))
            .held();
    }
    alice
        .run("RLOCK.ACQUIRE {k}written alice 60000 WRITE")
        .held();
    alice.run("RLOCK.ACQUIRE {k}expiring alice 60000").held();
    let mut dying = node.session_connection("dying");
    dying.take_for("{k}of-session", "alice", "dying");
    let granted = [
        ("released", "RLOCK.ACQUIRE {k}released bob 60000 BLOCK 0"),
        ("deleted", "RLOCK.ACQUIRE {k}deleted bob 60000 BLOCK 0"),
        ("expiring", "RLOCK.ACQUIRE {k}expiring bob 60000 BLOCK 0"),
        (
            "of-session",
            "RLOCK.ACQUIRE {k}of-session bob 60000 BLOCK 0",
        ),
        (
            "written",
            "RLOCK.ACQUIRE {k}written bob 60000 WRITE BLOCK 0",
        ),
        (
            "one",
            "RLOCK.MACQUIRE bob 60000 3 {k}one {k}two {k}three BLOCK 0",
        ),
    ]
    .map(|(name, command)| (name, node.blocked_in(command)))
    .into();
    let mut life = node.session_connection("s");
    life.queue("{k}released", "carol", "s");
    life.queue("{k}kept", "kim", "s");
    let waiting = [
        "RLOCK.ACQUIRE {k}kept ben 60000 BLOCK 0",
        "RLOCK.ACQUIRE {k}read ron 60000 WRITE BLOCK 0",
        "RLOCK.ACQUIRE {k}written dora 60000 READ BLOCK 0",
        "RLOCK.MACQUIRE eve 60000 2 {k}four {k}kept BLOCK 0",
    ]
    .map(|command| node.blocked_in(command))
    .into();
    Scene {
        alice,
        dying: Some(dying),
        life,
        granted,
        waiting,
    }
}

impl Scene {
    /// All ways in which a lock becomes free. The next waiters have them, with these tokens.
    fn free_some(&mut self) -> Vec<(&'static str, i64)> {
        let alice = &mut self.alice;
        assert_eq!(alice.let_go("{k}released", "alice"), 0);
        assert_eq!(alice.run("DEL {k}deleted"), 1);
        assert_eq!(alice.run("RLOCK.RENEW {k}expiring alice 50"), 1);
        assert_eq!(alice.run("RLOCK.RELEASE {k}written alice WRITE"), 0);
        assert_eq!(alice.run("RLOCK.MRELEASE alice 2 {k}one {k}two"), 2);
        self.dying.take().expect("it lives").close();
        let told = |(name, conn): &mut (&'static str, Conn)| (*name, conn.read().held().1);
        self.granted.iter_mut().map(told).collect()
    }
}

/// The field of the holder, and the token in the hash.
fn at(node: &Server, name: &str) -> Vec<String> {
    let mut fields = node.run(format!("HGETALL {{k}}{name}")).texts();
    fields.sort();
    fields
}

#[test]
fn holds_and_grants_travel_with_a_slot_that_moves_as_a_whole() {
    if !Version::at_hand().moves_whole_slots() {
        return;
    }
    let cluster = Cluster::start();
    let (from, to) = (&cluster.first, &cluster.second);
    let mut scene = scene(from);
    let migration = Migration::begin("k", from, to);
    let granted = scene.free_some();
    let names = [
        "released",
        "deleted",
        "expiring",
        "of-session",
        "one",
        "two",
        "three",
        "kept",
        "read",
    ];
    let before = names.map(|name| at(from, name));
    migration.finish();
    let after = names.map(|name| at(to, name));
    assert_eq!(after, before);
    for (name, token) in granted {
        let (field, count) = match name {
            "written" => ("bob:write", "1:"),
            _ => ("fence", ""),
        };
        let stored = to.run(format!("HGET {{k}}{name} {field}"));
        assert_eq!(stored, format!("{count}t{token}").as_str(), "{name}");
        let ttl = to.run(format!("PTTL {{k}}{name}")).int();
        assert!((1..=60_000).contains(&ttl), "{name} ends in {ttl} ms");
    }
    // All waiters are sent there; no owner holds anything here.
    let moved = from.run("GET {k}").error();
    for waiter in &mut scene.waiting {
        assert_eq!(waiter.read().error(), moved);
    }
    let mut events = Vec::new();
    while events.len() < 2 {
        events.extend(scene.life.run("RLOCK.EVENTS s BLOCK 0").events());
    }
    events.sort_by(|a, b| a.0.cmp(&b.0));
    let told = |name: &str, owner: &str| {
        let event = format!("error {{k}}{name} {owner}");
        (event, Reply::from(moved.as_str()))
    };
    assert_eq!(events, [told("kept", "kim"), told("released", "carol")]);
    // There they wait, and are granted.
    let mut bob = to.wait_in_queue("{k}kept", "bob");
    assert_eq!(to.connect().let_go("{k}kept", "alice"), 0);
    bob.read().held();
    for reader in ["alice", "zoe"] {
        let release = format!("RLOCK.RELEASE {{k}}read {reader} READ");
        assert_eq!(to.run(release), 0, "its timeout key came along");
    }
    assert_eq!(to.run("EXISTS {k}read"), 0);
    assert_eq!(to.run("RLOCK.RELEASE {k}written bob WRITE"), 0);
}

#[test]
fn a_migration_that_is_called_off_leaves_holds_and_waiters_where_they_were() {
    if !Version::at_hand().moves_whole_slots() {
        return;
    }
    let cluster = Cluster::start();
    let (from, to) = (&cluster.first, &cluster.second);
    let mut scene = scene(from);
    let migration = Migration::begin("k", from, to);
    scene.free_some();
    migration.cancel();
    for waiter in &mut scene.waiting {
        assert_eq!(waiter.read_now(), None);
    }
    assert_eq!(scene.alice.let_go("{k}kept", "alice"), 0);
    assert_eq!(scene.life.run("RLOCK.EVENTS s BLOCK 0").events().len(), 1);
    scene.life.run("RLOCK.RELEASE {k}kept kim").int();
    scene.waiting[0].read().held();
    assert!(to.run("HKEYS {k}kept").error().starts_with("MOVED "));
    // A second attempt takes all of it along.
    migration.start();
    until("the slot is the other node's", || migration.has_arrived());
    assert_eq!(to.run("HEXISTS {k}kept ben"), 1);
    for waiter in &mut scene.waiting[1..] {
        assert!(waiter.read().error().starts_with("MOVED "));
    }
}

/// Redis takes the keys out after the slot has gone, in its own time. A session that ends meanwhile
/// must not hand on a lock that is the other node's.
#[test]
fn the_end_of_a_session_grants_nothing_of_a_slot_that_has_moved() {
    if !Version::at_hand().moves_whole_slots() {
        return;
    }
    let cluster = Cluster::start();
    let (from, to) = (&cluster.first, &cluster.second);
    if !Version::at_hand().valkey {
        assert_eq!(from.run("DEBUG ASM-TRIM-METHOD none 0"), "OK");
    }
    let mut dying = from.session_connection("dying");
    let mut waiters = Vec::new();
    for number in 0..20 {
        let name = format!("{{k}}{number}");
        dying.take_for(&name, "alice", "dying");
        waiters.push(from.wait_in_queue(&name, "bob"));
    }
    let migration = Migration::begin("k", from, to);
    migration.finish();
    dying.close();
    let moved = from.run("GET {k}").error();
    for (number, mut waiter) in waiters.into_iter().enumerate() {
        assert_eq!(waiter.read().error(), moved);
        let name = format!("{{k}}{number}");
        assert_eq!(to.holder(&name).as_deref(), Some("alice"));
    }
}

/// The source waits for the other node to take over, and may not write until it has.
#[test]
fn no_waiter_is_granted_while_the_source_waits_for_the_slot_to_be_taken() {
    if !(Version::at_hand().moves_whole_slots() && Version::at_hand().valkey) {
        return; // Redis cannot be held there.
    }
    let cluster = Cluster::start();
    let (from, to) = (&cluster.first, &cluster.second);
    from.connect().take("{k}", "alice");
    let mut bob = from.wait_in_queue("{k}", "bob");
    let mut dying = from.session_connection("dying");
    dying.take_for("{k}of-session", "alice", "dying");
    let mut carol = from.wait_in_queue("{k}of-session", "carol");
    let migration = Migration::begin("k", from, to);
    assert_eq!(to.run("DEBUG SLOTMIGRATION PREVENT-FAILOVER 1"), "OK");
    assert_eq!(from.run("RLOCK.RENEW {k} alice 300"), 1);
    assert_eq!(from.run("DEBUG SLOTMIGRATION PREVENT-PAUSE 0"), "OK");
    until("the source has stopped to write", || {
        migration.state().contains("failover-")
    });
    dying.close();
    until("the lease is over", || from.run("PTTL {k}").int() < 0);
    thread::sleep(Duration::from_millis(50)); // some turns of the timer
    let told = [bob.read_now(), carol.read_now()];
    let was_paused = migration.state().contains("failover-");
    assert_eq!(to.run("DEBUG SLOTMIGRATION PREVENT-FAILOVER 0"), "OK");
    if was_paused {
        assert_eq!(told, [None, None]);
        until("the slot is the other node's", || migration.has_arrived());
        assert!(bob.read().error().starts_with("MOVED "));
        assert!(carol.read().error().starts_with("MOVED "));
        assert_eq!(to.holder("{k}of-session").as_deref(), Some("alice"));
        assert_eq!(to.holder("{k}"), None);
    }
}

/// Four clients fight for a lock while its slot goes back and forth; each follows it.
#[test]
fn never_two_holders_while_a_slot_moves_back_and_forth() {
    const MOVES: usize = 6;
    if !Version::at_hand().moves_whole_slots() {
        return;
    }
    // A node without any slot would become the replica of the other.
    let node = Server::builder().config("cluster-allow-replica-migration no");
    let cluster = Cluster::of(&node);
    let nodes = [&cluster.first, &cluster.second];
    let (held, over, grants) = (
        AtomicBool::new(false),
        AtomicBool::new(false),
        AtomicU32::new(0),
    );
    thread::scope(|scope| {
        for number in 0..4 {
            let (held, over, grants) = (&held, &over, &grants);
            scope.spawn(move || {
                let mut conns = nodes.map(Server::connect);
                let (mut place, owner) = (0, format!("owner-{number}"));
                // However it ends, so that a client that fails does not leave the others waiting.
                let deadline = Instant::now() + patience(Duration::from_secs(30));
                while !over.load(Ordering::SeqCst) && Instant::now() < deadline {
                    let acquire = format!("RLOCK.ACQUIRE k {owner} 600000 BLOCK 500 ONCE");
                    let told = conns[place].run(acquire);
                    if told.is_error() {
                        assert!(told.error().starts_with("MOVED "), "{told:?}");
                        place = 1 - place;
                        continue;
                    }
                    if told.ints()[0] == 0 {
                        continue;
                    }
                    assert!(!held.swap(true, Ordering::SeqCst), "two holders");
                    grants.fetch_add(1, Ordering::SeqCst);
                    thread::yield_now();
                    assert!(held.swap(false, Ordering::SeqCst));
                    let release = format!("RLOCK.RELEASE k {owner}");
                    let mut released = conns[place].run(&release);
                    while released.is_error() {
                        assert!(released.error().starts_with("MOVED "), "{released:?}");
                        place = 1 - place;
                        released = conns[place].run(&release);
                    }
                    assert_eq!(released, 0, "the hold came along");
                }
            });
        }
        for number in 0..MOVES {
            let before = grants.load(Ordering::SeqCst);
            until("the lock goes round", || {
                grants.load(Ordering::SeqCst) > before + 20
            });
            let (from, to) = (nodes[number % 2], nodes[1 - number % 2]);
            let slot = slot_of(from, "k");
            let migration = Migration { slot, from, to };
            migration.start();
            until("the slot is the other node's", || migration.has_arrived());
        }
        over.store(true, Ordering::SeqCst);
    });
}
