//! Redisson's two semaphores and our permits: on names of their own, since the layouts do not meet.

#![allow(clippy::cast_precision_loss, reason = "thousands of grants")]

use std::thread;
use std::time::{Duration, Instant};

use rlock_tests::{Conn, Reply, Server, until};

use crate::costs::commands;
use crate::java::Redisson;
use crate::measure::{A_WHILE, AT_ONCE, WakeUps, took_about};

#[test]
fn a_semaphore_of_redisson_and_permits_of_ours_do_not_meet() {
    let server = Server::start();
    let redisson = Redisson::of(&server);
    let (java, mut conn) = (redisson.owner(), server.connect());
    assert_eq!(java.ask("sem k set 2"), "true");
    let refused = conn.run("RLOCK.ACQUIRE k ours 30000 PERMITS 1 OF 2");
    assert!(refused.error().starts_with("WRONGTYPE"), "{refused:?}");
    conn.run("RLOCK.ACQUIRE j ours 30000 PERMITS 1 OF 2").held();
    let refused = java.ask("sem j acquire");
    assert!(refused.starts_with("error"), "{refused}");
    assert_eq!(java.ask("sem k free"), "2");
    assert_eq!(conn.run("RLOCK.INFO j").get("permits"), &Reply::Int(1));
}

/// A process that has the only permit dies, and another one waits for it.
fn of_redisson_with_a_dead_holder(server: &Server, kind: &str, acquire: &str) -> Redisson {
    let dying = Redisson::of(server);
    let java = dying.owner();
    assert_eq!(java.ask(&format!("{kind} k set 1")), "true");
    java.does(&format!("{kind} k {acquire}"));
    drop(dying);
    Redisson::of(server)
}

#[test]
fn what_a_dead_holder_of_redissons_semaphore_had_is_gone_for_good() {
    for kind in ["sem", "expirable"] {
        let server = Server::start();
        let living = of_redisson_with_a_dead_holder(&server, kind, "acquire");
        let waiter = living.owner();
        waiter.waits(&format!("{kind} k acquire"));
        waiter.has_not_answered_within(A_WHILE);
        assert_eq!(living.owner().ask(&format!("{kind} k free")), "0");
        // Nothing of it will ever end by itself.
        let keys = server.run("KEYS *").texts();
        let ttls: Vec<_> = keys
            .iter()
            .map(|key| server.run(format!("PTTL {key}")).int())
            .collect();
        assert!(
            !ttls.is_empty() && ttls.iter().all(|ttl| *ttl == -1),
            "{keys:?} {ttls:?}"
        );
    }
}

#[test]
fn what_a_dead_holder_of_redissons_expirable_semaphore_had_is_free_when_its_lease_is_over() {
    let lease = Duration::from_secs(3);
    let server = Server::start();
    let began = Instant::now();
    let acquire = format!("acquire {}", lease.as_millis());
    let living = of_redisson_with_a_dead_holder(&server, "expirable", &acquire);
    let waiter = living.owner();
    waiter.tell("expirable k acquire");
    let answer = waiter.answer_within(lease + AT_ONCE);
    assert_eq!(answer.text, "ok");
    let took = answer.ended - began;
    took_about(took, lease);
    println!("an expirable permit of {lease:?} whose holder died: free after {took:.2?}");
}

#[test]
fn what_a_dead_holder_of_ours_had_is_granted_at_once() {
    let server = Server::start();
    let mut wake_ups = WakeUps::of("the end of a session grants its permits", &[&server]);
    for round in 0..30 {
        let session = format!("s{round}");
        let life = server.session_connection(&session);
        let mut conn = server.connect();
        conn.run(format!(
            "RLOCK.ACQUIRE k dies{round} 30000 PERMITS 1 OF 1 SESSION {session}"
        ))
        .held();
        let lives = format!("lives{round}");
        let wait = format!("RLOCK.ACQUIRE k {lives} 30000 PERMITS 1 OF 1 BLOCK 0");
        let mut waiter = server.blocked_in(&wait);
        let freed = Instant::now();
        life.close();
        waiter.read().held();
        wake_ups.add(freed, Instant::now());
        assert_eq!(waiter.run(format!("RLOCK.RELEASE k {lives} PERMITS 1")), 0);
    }
    wake_ups.check();
}

const CLIENTS: usize = 50;

const PERMITS: usize = 5;

/// So often each client takes a permit.
const TURNS: usize = 40;

/// And holds it for so long.
const HOLD: Duration = Duration::from_millis(1);

/// Fifty clients take turns with five permits.
struct Turns {
    what: &'static str,
    took: Duration,
    /// The clients' requests to take and to give back: scripts, or our commands.
    sent: u64,
    /// All commands, those that scripts ran as well.
    run: u64,
    /// The time that the server's main thread was at work.
    cpu: Duration,
}

#[test]
fn fifty_clients_on_five_permits_cost_two_commands_a_grant() {
    let all = [
        turns_of_redisson("sem", "", "Redisson's RSemaphore"),
        turns_of_redisson("expirable", "30000", "its RPermitExpirableSemaphore"),
        turns_of_ours(),
    ];
    let grants = CLIENTS * TURNS;
    for of in &all {
        let of_grant = |sent: u64| sent as f64 / grants as f64;
        println!(
            "{CLIENTS} clients on {PERMITS} permits, {}: {:.0} grants a second, {:.2} sent and \
             {:.2} commands run a grant, {:.0} us of the server a grant",
            of.what,
            grants as f64 / of.took.as_secs_f64(),
            of_grant(of.sent),
            of_grant(of.run),
            of.cpu.as_secs_f64() * 1e6 / grants as f64,
        );
    }
    let least = 2 * grants as u64;
    let [semaphore, expirable, ours] = all;
    assert_eq!((ours.sent, ours.run), (least, least));
    assert!(semaphore.sent > least && expirable.sent > least);
}

#[track_caller]
fn turns_of_redisson(kind: &str, lease: &str, what: &'static str) -> Turns {
    let server = Server::start();
    let clients: Vec<_> = (0..CLIENTS).map(|_| Redisson::of(&server)).collect();
    let owners: Vec<_> = clients.iter().map(Redisson::owner).collect();
    owners[0].ask(&format!("{kind} warm set {CLIENTS}"));
    owners[0].ask(&format!("{kind} k set {PERMITS}"));
    for owner in &owners {
        // The server knows the scripts now, and each client has its connections.
        owner.ask(format!("{kind} warm turns 1 0 {lease}").trim_end());
    }
    let hold = HOLD.as_micros();
    let turns = format!("{kind} k turns {TURNS} {hold} {lease}");
    measured(&server, what, "evalsha:", || {
        for owner in &owners {
            owner.tell(turns.trim_end());
        }
        for owner in &owners {
            let answer = owner.answer_within(Duration::from_secs(60));
            assert_eq!(answer.text, TURNS.to_string());
        }
    })
}

#[track_caller]
fn turns_of_ours() -> Turns {
    let server = Server::start();
    let mut clients: Vec<_> = (0..CLIENTS).map(|_| server.connect()).collect();
    let turns = |number: usize, conn: &mut Conn| {
        for _ in 0..TURNS {
            let owner = format!("w{number}");
            let acquire = format!("RLOCK.ACQUIRE k {owner} 30000 PERMITS 1 OF {PERMITS} BLOCK 0");
            conn.run(acquire).held();
            thread::sleep(HOLD);
            assert_eq!(conn.run(format!("RLOCK.RELEASE k {owner} PERMITS 1")), 0);
        }
    };
    let cost = measured(&server, "this module", "rlock.", || {
        thread::scope(|scope| {
            for (number, conn) in clients.iter_mut().enumerate() {
                scope.spawn(move || turns(number, conn));
            }
        });
    });
    until("nothing is left", || server.run("EXISTS k") == 0);
    cost
}

fn measured(server: &Server, what: &'static str, prefix: &str, does: impl FnOnce()) -> Turns {
    server.run("CONFIG RESETSTAT");
    let (began, before) = (Instant::now(), server.processor_time());
    does();
    let (took, cpu) = (
        began.elapsed(),
        server.processor_time().saturating_sub(before),
    );
    let (sent, run) = commands(server, prefix);
    Turns {
        what,
        took,
        sent,
        run,
        cpu,
    }
}
