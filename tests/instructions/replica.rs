//! The cost where locks are replicated: of ACQUIRE + RELEASE and of hand-overs at a primary with an
//! append-only file or a replica, bytes of both, and instructions of a replica.

use std::path::Path;

use rlock_tests::{Conn, Server, in_sync};

use crate::blocked;
use crate::counted::{Counted, expect};
use crate::figures::Figures;
use crate::operations::{OWNER, Step, pair};
use crate::{KEYS, difference};

pub(crate) fn count(folder: &Path, figures: &mut Figures) {
    let primary = Server::builder()
        .config("appendonly yes")
        .config("appendfsync no")
        // The replica's commands must be ours alone.
        .config("repl-ping-replica-period 3600")
        .start();
    let before = written(&primary, "aof_current_size");
    run(&mut primary.connect());
    let bytes = written(&primary, "aof_current_size") - before;
    figures.add("bytes in the AOF", bytes / KEYS as u64);

    let mut replica = Counted::start(folder);
    let replicaof = format!("REPLICAOF 127.0.0.1 {}", primary.port());
    assert_eq!(replica.conn().run(replicaof), "OK");
    in_sync(&primary, &replica.server);
    rlock_tests::until("the replica is online", || {
        let replication = primary.run("INFO replication").text();
        replication.contains("state=online")
    });
    // The module looks for replicas at every tick.
    let mut subscriber = replica.server.connect();
    subscriber.run("SUBSCRIBE redisson_lock__channel:{lock:0}");
    rlock_tests::until("messages are told to it", || {
        run(&mut primary.connect());
        in_sync(&primary, &replica.server);
        subscriber.read_now().is_some()
    });
    subscriber.close();
    let before = written(&primary, "master_repl_offset");
    run(&mut primary.connect());
    let bytes = written(&primary, "master_repl_offset") - before;
    figures.add("bytes to a replica", bytes / KEYS as u64);
    let cost = difference(&mut replica, KEYS * TIMES_EACH, |replica| {
        // All of it is there when the replica looks.
        replica.server.freeze();
        let mut conn = primary.connect();
        (0..TIMES_EACH).for_each(|_| run(&mut conn));
        // Sent on the connection of the last write, it is answered when the replica has that.
        conn.send("WAIT 1 0");
        replica.server.thaw();
        assert_eq!(conn.read(), 1);
    });
    replica.keep_profile("a replica");
    figures.add("a replica", cost);
}

/// The same at a primary that has a replica.
pub(crate) fn count_primary(folder: &Path, figures: &mut Figures) {
    let mut primary = Counted::start(folder);
    let replica = Server::start();
    replica.run(format!("REPLICAOF 127.0.0.1 {}", primary.server.port()));
    let mut subscriber = replica.connect();
    subscriber.run("SUBSCRIBE redisson_lock__channel:{lock:0}");
    rlock_tests::until("messages are told to it", || {
        run(primary.conn());
        subscriber.settle();
        subscriber.read_now().is_some()
    });
    subscriber.close();
    count_replicated(&mut primary, "with a replica", figures);
}

/// The same at a server with an append-only file, which leaves the disk to the kernel.
pub(crate) fn count_aof(folder: &Path, figures: &mut Figures) {
    let mut server = Counted::with(folder, &["appendonly yes", "appendfsync no"]);
    count_replicated(&mut server, "with an AOF", figures);
}

fn count_replicated(server: &mut Counted, how: &str, figures: &mut Figures) {
    let name = format!("ACQUIRE + RELEASE {how}");
    let cost = difference(server, KEYS, |server| run(server.conn()));
    server.keep_profile(&name);
    figures.add(&name, cost);
    let cost = blocked::count_in_queue(server);
    figures.add(&format!("{}, {how}", blocked::IN_QUEUE), cost);
}

/// So many pairs for each key make what the replica does besides small.
const TIMES_EACH: usize = 10;

fn written(server: &Server, field: &str) -> u64 {
    server.info_number(field).try_into().unwrap()
}

/// A pair for each key.
fn run(primary: &mut Conn) {
    let keys = (0..KEYS).map(|number| format!("lock:{number}"));
    let steps: Vec<Step> = keys.flat_map(|key| pair(&key, "", "")).collect();
    let commands: Vec<&str> = steps.iter().map(|step| step.command.as_str()).collect();
    let replies = primary.pipeline(&commands);
    assert!(OWNER.len() > 36, "an owner as the crate writes it");
    for (step, reply) in steps.iter().zip(replies) {
        expect(step, &format!("{reply:?}"));
    }
}
