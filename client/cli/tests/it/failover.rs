//! Jobs of `rlock run` that go on over a failover, as docs/operations.md has them.

use std::net::SocketAddr;
use std::process::Command;

use nix::sys::signal::Signal;
use rlock_tests::{Pair, Proxy, Sentinels, Server, in_sync, until};

use crate::program::{PROGRAM, Running};

/// A job that goes on until it gets a signal; the server is where these words say.
#[track_caller]
fn job(place: &[&str]) -> Running {
    let mut command = Command::new("env");
    command.args(["--default-signal", PROGRAM]).args(place);
    command.args(["run", "--grace", "20s", "a", "--", "sleep", "600"]);
    command.env_remove("RLOCK_URL");
    let running = Running::start(command);
    running.await_command();
    running
}

/// It has its lock at this server, in a session there, and gives it back there.
#[track_caller]
fn goes_on_at(server: &Server, mut running: Running) {
    until("its session holds the lock there", || {
        server.run("RLOCK.SESSIONS").array().len() == 1 && server.holder("a").is_some()
    });
    assert!(running.0.try_wait().unwrap().is_none(), "the job was ended");
    running.signal(Signal::SIGTERM);
    assert_eq!(running.status(), 143);
    until("the lock is free", || server.holder("a").is_none());
}

#[test]
fn a_job_that_knows_the_sentinels_goes_on_at_the_new_primary() {
    let watched = Sentinels::start();
    let urls: Vec<_> = watched.addresses().iter().map(in_url).collect();
    let running = job(&["--sentinel", Sentinels::SERVICE, "--url", &urls.join(",")]);
    // A failover loses a grant that has not reached the replica.
    in_sync(watched.primary(), watched.replica());
    watched.fail_over();
    goes_on_at(watched.primary(), running);
}

/// The address of the page: it leads to the new primary, and its connections are closed.
#[test]
fn a_job_whose_address_moves_goes_on_after_the_planned_failover_of_the_page() {
    let page = std::fs::read_to_string(concat!(
        env!("CARGO_MANIFEST_DIR"),
        "/../../docs/operations.md"
    ))
    .unwrap();
    let planned = "redis-cli -h OLD FAILOVER TO NEW 6379 TIMEOUT 5000 ";
    assert!(page.contains(planned));
    let Pair { primary, replica } = Pair::start();
    let address = Proxy::to(primary.address());
    let running = job(&["--url", &in_url(&address.address())]);
    let new = format!("{} {}", replica.address().ip(), replica.port());
    let command = planned.trim_start_matches("redis-cli -h OLD ").trim();
    let command = command.replace("NEW 6379", &new);
    until("the replica is online, and the failover begins", || {
        primary.run(&command) == "OK"
    });
    until("the replica is the primary", || {
        primary.info("master_failover_state").as_deref() == Some("no-failover")
            && primary.info("role").as_deref() == Some("slave")
            && replica.info("role").as_deref() == Some("master")
    });
    address.redirect(replica.address());
    goes_on_at(&replica, running);
}

fn in_url(address: &SocketAddr) -> String {
    format!("redis://{address}")
}
