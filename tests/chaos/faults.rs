//! The faults of servers, networks and processes, one after the other.

use std::thread;
use std::time::Duration;

use rlock_tests::{Conn, Resharding, slot_of, until};
use rustix::process::Signal;

use crate::clients::LONGEST_LEASE;
use crate::history::{Time, now};
use crate::random::Random;
use crate::world::World;

/// The set-up of a storm, which decides the faults that are possible.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Menu {
    /// One server.
    One,
    /// One server whose wall clock is set by more than tokens start ahead of it, so it is not
    /// restarted meanwhile.
    Clock,
    /// A primary and its replica, which change places.
    Pair,
    /// The same, watched by sentinels, which replace the primary.
    Sentinels,
    /// A cluster of two, in which the slot of all locks moves.
    Cluster,
    /// One server, and sessions with thousands of holds, which end at once.
    ManyHolds,
    /// One server, and sessions that end in the packet in which their locks are asked for.
    Packets,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub(crate) enum Kind {
    KillClient,
    StopClient,
    KillServer,
    StopServer,
    KillReplica,
    StopReplica,
    KillConnections,
    Unblock,
    Delay,
    CutToServer,
    CutToClient,
    Cut,
    Sever,
    HalfReply,
    Sleep,
    Pause,
    Memory,
    Break,
    Delete,
    Flush,
    Clock,
    Failover,
    Promote,
    MoveSlot,
    ClusterDown,
    NoRoom,
    SentinelKill,
    SentinelStop,
    SentinelOrder,
    EndTogether,
}

use Kind::{
    Break, Clock, ClusterDown, Cut, CutToClient, CutToServer, Delay, Delete, EndTogether, Failover,
    Flush, HalfReply, KillClient, KillConnections, KillReplica, KillServer, Memory, MoveSlot,
    NoRoom, Pause, Promote, SentinelKill, SentinelOrder, SentinelStop, Sever, Sleep, StopClient,
    StopReplica, StopServer, Unblock,
};

const OF_ANY: [Kind; 17] = [
    KillClient,
    StopClient,
    StopServer,
    KillConnections,
    Unblock,
    Delay,
    CutToServer,
    CutToClient,
    Cut,
    Sever,
    HalfReply,
    Sleep,
    Pause,
    Memory,
    Break,
    Delete,
    Flush,
];

impl Menu {
    pub(crate) const ALL: [Self; 7] = [
        Self::One,
        Self::Pair,
        Self::Sentinels,
        Self::Cluster,
        Self::Clock,
        Self::ManyHolds,
        Self::Packets,
    ];

    pub(crate) fn name(self) -> &'static str {
        match self {
            Self::One => "one server",
            Self::Clock => "its clock is set",
            Self::Pair => "with a replica",
            Self::Sentinels => "watched by sentinels",
            Self::Cluster => "a cluster of two",
            Self::ManyHolds => "thousands of holds end at once",
            Self::Packets => "asked for in the packet that ends it",
        }
    }

    /// For how long a round goes on at most. Where twenty thousand things are asked for in a
    /// second, the checkers look at them for longer than it took.
    pub(crate) fn longest(self) -> Duration {
        Duration::from_secs(if self == Self::ManyHolds { 10 } else { 30 })
    }

    fn kinds(self) -> Vec<Kind> {
        let special: &[Kind] = match self {
            Self::One => &[KillServer, KillServer, NoRoom, NoRoom, NoRoom, NoRoom],
            Self::Clock => &[Clock; 6],
            Self::Pair => &[
                KillServer,
                Failover,
                Failover,
                Promote,
                Promote,
                KillReplica,
                StopReplica,
            ],
            Self::Sentinels => &[
                SentinelKill,
                SentinelKill,
                SentinelStop,
                SentinelStop,
                SentinelOrder,
                SentinelOrder,
            ],
            Self::Cluster => &[
                MoveSlot,
                MoveSlot,
                MoveSlot,
                MoveSlot,
                MoveSlot,
                MoveSlot,
                ClusterDown,
                ClusterDown,
            ],
            // Little else: after a fault that may end any session, holds of sessions prove nothing
            // for a while. A DEL would leave the keys of readers behind, whose leases are longer
            // than a round.
            Self::ManyHolds | Self::Packets => {
                let mut kinds = vec![
                    KillClient, KillClient, KillClient, StopClient, Sever, Sleep, Break, Break,
                ];
                kinds.extend([EndTogether; 8]);
                return kinds;
            }
        };
        [&OF_ANY, special].concat()
    }

    /// All faults of this menu in an order of their own, again and again.
    pub(crate) fn schedule(self, random: &mut Random) -> impl Iterator<Item = Kind> + use<> {
        let mut random = random.split();
        let mut left = Vec::new();
        std::iter::from_fn(move || {
            if left.is_empty() {
                left = self.kinds();
            }
            let index = random.within(0, left.len() as u64);
            Some(left.swap_remove(usize::try_from(index).expect("an index")))
        })
    }
}

impl Kind {
    /// As a history calls it.
    fn word(self) -> &'static str {
        match self {
            KillClient => "kill-client",
            StopClient => "stop-client",
            KillServer => "kill-server",
            StopServer => "stop-server",
            KillReplica => "kill-replica",
            StopReplica => "stop-replica",
            KillConnections => "kill-connections",
            Unblock => "unblock",
            Delay => "delay",
            CutToServer => "cut-to-server",
            CutToClient => "cut-to-client",
            Cut => "cut",
            Sever => "sever",
            HalfReply => "half-reply",
            Sleep => "sleep",
            Pause => "pause",
            Memory => "memory",
            Break => "break",
            Delete => "del",
            Flush => "flush",
            Clock => "clock",
            Failover => "failover",
            // Unreplicated writes may be lost in any of them.
            Promote | SentinelKill | SentinelStop | SentinelOrder => "promote",
            NoRoom => "no-room",
            MoveSlot => "move-slot",
            ClusterDown => "cluster-down",
            EndTogether => "end-together",
        }
    }

    /// As a report calls it.
    pub(crate) fn title(self) -> &'static str {
        match self {
            KillClient => "SIGKILL of a client process",
            StopClient => "SIGSTOP of a client process",
            KillServer => "SIGKILL of the primary, restart",
            StopServer => "SIGSTOP of the primary",
            KillReplica => "SIGKILL of the replica, restart",
            StopReplica => "SIGSTOP of the replica",
            KillConnections => "CLIENT KILL of all, several times",
            Unblock => "CLIENT UNBLOCK of all, several times",
            Delay => "network: slow",
            CutToServer => "network: nothing reaches the server",
            CutToClient => "network: nothing reaches the client",
            Cut => "network: cut both ways",
            Sever => "network: connections reset",
            HalfReply => "network: reset within a reply",
            Sleep => "DEBUG SLEEP",
            Pause => "CLIENT PAUSE",
            Memory => "maxmemory reached",
            Break => "RLOCK.BREAK by an operator",
            Delete => "DEL by an operator",
            Flush => "FLUSHALL by an operator",
            Clock => "wall clock set",
            Failover => "FAILOVER",
            Promote => "primary killed, replica promoted",
            MoveSlot => "slot moved to another node",
            ClusterDown => "cluster down, CLIENT KILL of all",
            NoRoom => "no room for the append-only file",
            SentinelKill => "SIGKILL of the primary, sentinels",
            SentinelStop => "SIGSTOP of the primary, sentinels",
            SentinelOrder => "SENTINEL FAILOVER",
            EndTogether => "CLIENT KILL of several sessions at once",
        }
    }

    /// Does it, heals it, and writes it down.
    pub(crate) fn strike(self, world: &mut World, random: &mut Random) {
        let begin = now();
        let place = usize::try_from(random.within(0, world.places.len() as u64)).expect("an index");
        let victim = world.places[place].process.name.clone();
        let lock = (*random.pick(world.locks)).to_owned();
        let mut to = None;
        match self {
            KillClient | StopClient | Delay | CutToServer | CutToClient | Cut | Sever
            | HalfReply => {
                to = Some(victim);
                self.strike_client(world, random, place);
            }
            Break | Delete => {
                let command = if self == Break { "RLOCK.BREAK" } else { "DEL" };
                world.operator().run(format!("{command} {lock}")).int();
                to = Some(lock);
            }
            Clock => {
                // Two steps; each ends leases or prolongs them.
                set_the_clock(world, random);
                // The module compares the clocks ten times a second: it may see this, or not.
                Self::rest(random, 1000);
                world.primary().step_clock(0);
                break_what_was_drawn_out(world);
            }
            Failover => fail_over(world),
            Promote => promote(world),
            MoveSlot => move_slot(world, random),
            ClusterDown => cluster_down(world, random),
            NoRoom => take_the_room(world, random),
            SentinelKill | SentinelStop | SentinelOrder => self.strike_the_watched(world, random),
            EndTogether => end_together(world, random),
            _ => self.strike_server(world, random),
        }
        match self {
            SentinelKill | SentinelStop | SentinelOrder => world.note_replaced(begin),
            _ => self.note(world, begin, to.as_deref()),
        }
    }

    /// Writes it down as histories call it.
    fn note(self, world: &World, begin: Time, to: Option<&str>) {
        let to = to.map(|to| format!(" {to}")).unwrap_or_default();
        world.note(format!("fault {begin} {} {}{to}", now(), self.word()));
    }

    fn rest(random: &mut Random, up_to_ms: u64) {
        thread::sleep(Duration::from_millis(random.within(30, up_to_ms)));
    }

    fn strike_client(self, world: &mut World, random: &mut Random, place: usize) {
        if self == KillClient {
            return world.replace_process(place);
        }
        let place = &world.places[place];
        match self {
            StopClient => place.process.signal(Signal::STOP),
            Delay => place
                .proxy
                .delay(Duration::from_millis(random.within(2, 80))),
            CutToServer => place.proxy.cut_to_server(),
            CutToClient => place.proxy.cut_to_client(),
            Cut => {
                place.proxy.cut_to_server();
                place.proxy.cut_to_client();
            }
            Sever => return place.proxy.sever(),
            _ => place.proxy.break_off_the_next_reply(),
        }
        // Shorter and longer than a grace, a lease, and what clients wait for a reply.
        Self::rest(random, 2500);
        match self {
            StopClient => place.process.signal(Signal::CONT),
            _ => place.proxy.heal(),
        }
    }

    /// The sentinels' answer to a primary that is dead, or silent, or that they are told to
    /// replace. The clients learn of it when the sentinels agree.
    fn strike_the_watched(self, world: &mut World, random: &mut Random) {
        world.watch.look_at(None);
        let sentinels = world.sentinels.as_ref().expect("sentinels");
        let old = world.servers[0].port();
        match self {
            SentinelKill => world.servers[0].kill(),
            SentinelStop => world.servers[0].freeze(),
            _ => sentinels.order_failover(),
        }
        sentinels.await_failover(old);
        world.change_over();
        match self {
            SentinelKill => world.servers[1].restart(),
            SentinelStop => {
                Self::rest(random, 500);
                // For a moment it is a primary that does not know.
                world.servers[1].thaw();
            }
            _ => {}
        }
        world.sentinels.as_ref().expect("sentinels").settle();
    }

    fn strike_server(self, world: &mut World, random: &mut Random) {
        let mut operator = world.operator();
        match self {
            KillServer => {
                world.servers[0].kill();
                world.servers[0].restart();
                world.await_replica();
            }
            StopServer => {
                world.primary().freeze();
                Self::rest(random, 1500);
                world.primary().thaw();
            }
            KillReplica => {
                world.servers[1].kill();
                Self::rest(random, 1500);
                world.bring_back_the_replica();
            }
            StopReplica => {
                world.servers[1].freeze();
                Self::rest(random, 1500);
                world.servers[1].thaw();
                world.await_replica();
            }
            KillConnections => several(random, || {
                operator.run("CLIENT KILL TYPE normal SKIPME yes").int();
            }),
            Unblock => several(random, || unblock_all(&mut operator)),
            Sleep => {
                let seconds = random.within(10, 1200);
                operator.run(format!(
                    "DEBUG SLEEP {}.{:03}",
                    seconds / 1000,
                    seconds % 1000
                ));
            }
            Pause => {
                let all = *random.pick(&["ALL", "WRITE"]);
                let ms = random.within(30, 800);
                operator.run(format!("CLIENT PAUSE {ms} {all}"));
                // A write, so that the answer comes when the pause is over.
                operator
                    .run(format!("DEL {}-no-lock", world.locks[0]))
                    .int();
            }
            Memory => {
                operator.run("CONFIG SET maxmemory 1");
                Self::rest(random, 600);
                operator.run("CONFIG SET maxmemory 0");
            }
            _ => {
                operator.run("FLUSHALL");
            }
        }
    }
}

fn several(random: &mut Random, mut strike: impl FnMut()) {
    for _ in 0..random.within(1, 8) {
        strike();
        thread::sleep(Duration::from_millis(random.within(0, 60)));
    }
}

/// In one packet, and in the same turn every queue is looked at.
fn end_together(world: &World, random: &mut Random) {
    let mut operator = world.operator();
    let clients = operator.run("CLIENT LIST").text();
    // A session's connection has its name.
    let mut sessions: Vec<_> = clients
        .lines()
        .filter_map(|line| {
            let field = |key| line.split(' ').find_map(|word| word.strip_prefix(key));
            let name = field("name=").filter(|name: &&str| name.contains('_'))?;
            Some((field("id=")?, name))
        })
        .collect();
    let mut packet = Vec::new();
    for _ in 0..random.within(1, 5).min(sessions.len() as u64) {
        let index = random.within(0, sessions.len() as u64);
        let (id, name) = sessions.swap_remove(usize::try_from(index).expect("an index"));
        world.note(format!("closed {} {name}", now()));
        packet.push(format!("CLIENT KILL ID {id}"));
    }
    let sweeps = random.within(0, 3);
    packet.extend((0..sweeps).map(|_| "SWAPDB 0 0".to_owned()));
    // A session may have ended by itself.
    let _ = operator.pipeline(&packet);
}

fn unblock_all(operator: &mut Conn) {
    let clients = operator.run("CLIENT LIST").text();
    let blocked = clients.lines().filter(|line| {
        let flags = line.split(' ').find_map(|word| word.strip_prefix("flags="));
        flags.is_some_and(|flags| flags.contains('b'))
    });
    let ids: Vec<_> = blocked
        .filter_map(|line| line.strip_prefix("id=")?.split(' ').next())
        .map(str::to_owned)
        .collect();
    for (index, id) in ids.iter().enumerate() {
        let how = ["", "TIMEOUT", "ERROR"][index % 3];
        operator.run(format!("CLIENT UNBLOCK {id} {how}")).int();
    }
}

/// By a second or by a day, forwards or back.
fn set_the_clock(world: &World, random: &mut Random) {
    let seconds = *random.pick(&[-86_400, -3600, -5, -1, 1, 5, 3600, 86_400]);
    world.primary().step_clock(seconds);
}

/// A lease that began while the clock was ahead lasts for as much longer when that is right again.
/// Owners who are still there renew it or give it back; the operator ends the others. Timeout keys
/// that were over, and that the server had not removed yet, come to life again without their hash.
fn break_what_was_drawn_out(world: &World) {
    let mut operator = world.operator();
    let longest = i64::try_from(LONGEST_LEASE.as_millis()).expect("seconds");
    for lock in world.locks {
        if operator.run(format!("PTTL {lock}")).int() > longest {
            let begin = now();
            operator.run(format!("RLOCK.BREAK {lock}")).int();
            Break.note(world, begin, Some(lock));
        }
    }
    for key in operator.run("KEYS *:rwlock_timeout:*").texts() {
        if operator.run(format!("PTTL {key}")).int() > longest {
            operator.run(format!("DEL {key}")).int();
        }
    }
}

/// In good order: nothing may be lost.
fn fail_over(world: &mut World) {
    world.watch.look_at(None);
    let to = world.servers[1].port();
    assert_eq!(
        world
            .operator()
            .run(format!("FAILOVER TO 127.0.0.1 {to} TIMEOUT 10000")),
        "OK"
    );
    until("the replica is the primary", || {
        let role = |server: &rlock_tests::Server| server.info("role").unwrap_or_default();
        let steady = world.primary().info("master_failover_state");
        role(&world.servers[1]) == "master"
            && role(&world.servers[0]) == "slave"
            && steady.is_some_and(|state| state == "no-failover")
    });
    world.change_over();
    world.await_replica();
}

/// In no order: what the replica does not have is lost.
fn promote(world: &mut World) {
    world.watch.look_at(None);
    world.servers[0].kill();
    assert_eq!(world.servers[1].run("REPLICAOF NO ONE"), "OK");
    world.change_over();
    world.bring_back_the_replica();
}

/// Every write has to be on disk before it is answered, so the server ends; or a second later, so
/// it goes on and refuses to write.
fn take_the_room(world: &mut World, random: &mut Random) {
    let server = &mut world.servers[0];
    if *random.pick(&[true, false]) {
        server.take_the_room();
        assert!(!server.await_end(), "it cannot write");
        server.restart();
    } else {
        assert_eq!(server.run("CONFIG SET appendfsync everysec"), "OK");
        server.take_the_room();
        Kind::rest(random, 1500);
        server.give_the_room_back();
        until("it writes again", || {
            server
                .info("aof_last_write_status")
                .is_some_and(|status| status == "ok")
        });
        assert_eq!(server.run("CONFIG SET appendfsync always"), "OK");
    }
}

/// Key by key, as a resharding does; the clients are told of the new node at the end.
fn move_slot(world: &mut World, random: &mut Random) {
    world.watch.look_at(None);
    let [from, to] = &world.servers[..] else {
        panic!("two nodes")
    };
    let resharding = Resharding::of(world.locks[0], from, to);
    resharding.open();
    while resharding.migrate_some(3) {
        Kind::rest(random, 100);
    }
    resharding.close(&[]);
    world.change_over();
}

/// The cluster of the node that serves the locks is down: the other node is silent, and a slot has
/// no owner. The sessions lose their connections, and some end. If the node had a replica, that
/// could be the primary by now: so nothing may be granted and nothing released.
fn cluster_down(world: &World, random: &mut Random) {
    world.watch.look_at(None);
    let node = world.primary();
    let is_down = || {
        let told = node.run(format!("DEL {}-no-lock", world.locks[0]));
        told.is_error() && told.error().starts_with("CLUSTERDOWN ")
    };
    // While the other is silent it cannot tell that the slot is its own.
    world.servers[1].freeze();
    let slot = slot_of(node, "another");
    let serves_it = !node.run("EXISTS another").is_error();
    assert_eq!(node.run(format!("CLUSTER DELSLOTS {slot}")), "OK");
    until("the cluster is down", is_down);
    let changes = || {
        let counters = ["rlock_grants", "rlock_session_releases", "rlock_releases"];
        counters.map(|counter| node.info_number(counter))
    };
    let (before, mut operator) = (changes(), world.operator());
    several(random, || {
        operator.run("CLIENT KILL TYPE normal SKIPME yes").int();
    });
    Kind::rest(random, 1500);
    assert_eq!(changes(), before, "the cluster of the node is down");
    if serves_it {
        assert_eq!(node.run(format!("CLUSTER ADDSLOTS {slot}")), "OK");
    }
    world.servers[1].thaw();
    until("the cluster is up", || !is_down());
    world.watch.look_at(Some(node.address()));
}

impl World {
    /// A server that was killed begins to follow the other.
    fn bring_back_the_replica(&mut self) {
        self.servers[1].restart();
        let follow = format!("REPLICAOF 127.0.0.1 {}", self.primary().port());
        assert_eq!(self.servers[1].run(follow), "OK");
        self.await_replica();
    }

    /// The next server to be promoted has caught up first.
    fn await_replica(&self) {
        if let Some(replica) = self.servers.get(1) {
            until("the replica is connected", || {
                replica
                    .info("master_link_status")
                    .is_some_and(|status| status == "up")
            });
        }
    }
}

#[test]
fn a_seed_repeats_its_faults_and_every_fault_has_its_turn() {
    for menu in Menu::ALL {
        let all = menu.kinds();
        let schedule = |seed| menu.schedule(&mut Random::new(seed)).take(all.len());
        assert!(schedule(7).eq(schedule(7)));
        assert!(!schedule(7).eq(schedule(8)));
        assert!(
            all.iter()
                .all(|kind| schedule(7).any(|struck| struck == *kind))
        );
    }
}
