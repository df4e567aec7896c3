//! Moving over, step by step, and back: docs/redisson.md.

use rlock_tests::{Server, module_path, until};

use crate::java::Redisson;
use crate::rounds;

#[test]
fn the_module_comes_and_goes_while_java_works() {
    const ROUNDS: u32 = 300;
    let server = Server::builder().without_module().start();
    let redisson = Redisson::of(&server);
    let owners = [redisson.owner(), redisson.owner()];
    for owner in &owners {
        owner.tell(&format!("lock k rounds {ROUNDS} 1000"));
        // Told now, done when the module may be gone again.
        owner.tell("lock k rounds 50 1000");
    }
    until("Java is at work", || server.run("LLEN rounds:k").int() > 50);
    assert_eq!(
        server.run(format!("MODULE LOAD {}", module_path().display())),
        "OK"
    );
    rounds::play(&server, "k", "ours", "", ROUNDS);
    assert_eq!(server.run("MODULE UNLOAD rlock"), "OK");
    for owner in &owners {
        for rounds in [ROUNDS, 50] {
            assert_eq!(owner.answer().text, rounds.to_string());
        }
        assert_eq!(owner.ask("lock k rounds 50 0"), "50");
    }
    rounds::check(&server, "k", ROUNDS * 3 + 200, 50);
}

#[test]
fn what_we_hold_is_respected_by_java_when_the_module_is_gone() {
    let server = Server::start();
    let redisson = Redisson::of(&server);
    let (java, mut conn) = (redisson.owner(), server.connect());
    conn.run("RLOCK.ACQUIRE k ours 700").held();
    assert_eq!(server.run("MODULE UNLOAD rlock"), "OK");
    assert_eq!(java.ask("lock k trylock"), "false");
    assert_eq!(java.ask("lock k islocked"), "true");
    java.does("lock k lock");
    assert_eq!(server.holder("k"), Some(java.id()));
    java.does("lock k unlock");
}

#[test]
fn what_java_holds_is_respected_when_the_module_comes() {
    let server = Server::builder().without_module().start();
    let redisson = Redisson::of(&server);
    let java = redisson.owner();
    java.does("lock k lock");
    java.does("lock k lock");
    assert_eq!(
        server.run(format!("MODULE LOAD {}", module_path().display())),
        "OK"
    );
    let mut waiter = server.wait_in_line("k", "ours");
    java.does("lock k unlock");
    waiter.expect_nothing_yet();
    java.does("lock k unlock");
    waiter.read().held();
}

#[test]
fn a_fenced_lock_goes_on_from_our_tokens_when_its_counter_is_set() {
    let server = Server::start();
    let redisson = Redisson::of(&server);
    let (java, mut conn) = (redisson.owner(), server.connect());
    java.does("fenced k lock");
    java.does("fenced k unlock");
    let token = conn.take("k", "ours");
    assert_eq!(conn.let_go("k", "ours"), 0);
    // Ours count microseconds since 1970 and are the larger ones.
    assert!(java.ask("fenced k token").parse::<i64>().unwrap() < token);
    assert_eq!(
        server.run(format!("SET redisson_lock_token:{{k}} {token}")),
        "OK"
    );
    java.does("fenced k lock");
    assert_eq!(java.ask("fenced k token"), (token + 1).to_string());
}
