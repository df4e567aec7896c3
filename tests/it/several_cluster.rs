//! Several locks in a cluster: of one slot, and never granted to two while that is moved.

use rlock_tests::{Cluster, Conn, Reply, Server, slot_of, until};

/// A slot of its own: `#x` in a text is the key `x` of that slot.
#[derive(Clone, Copy)]
struct Tag(&'static str);

impl Tag {
    fn of(self, text: &str) -> String {
        text.replace('#', &format!("{{{}}}", self.0))
    }

    fn run(self, server: &Server, command: &str) -> Reply {
        server.run(self.of(command))
    }

    /// Bob waits for `#x` and `#y`.
    #[track_caller]
    fn bob_waits(self, server: &Server) -> Conn {
        server.blocked_in(&self.of("RLOCK.MACQUIRE bob 30000 2 #x #y BLOCK 0"))
    }

    fn holder(self, server: &Server, name: &str) -> Option<String> {
        server.holder(&self.of(name))
    }

    fn is_moved(self, server: &Server, reply: &Reply) {
        let moved = format!("MOVED {} 127.0.0.1:", slot_of(server, &self.of("#x")));
        let error = reply.error();
        assert!(error.starts_with(&moved), "{error}");
    }
}

/// Gives the server time in which it could answer, and returns the answer if it does.
fn meanwhile(server: &Server, waiter: &mut Conn) -> Option<Reply> {
    for _ in 0..30 {
        if let Some(reply) = waiter.read_now() {
            return Some(reply);
        }
        server.run("PING");
    }
    None
}

#[test]
fn several_locks_of_one_slot_wherever_that_is() {
    let cluster = Cluster::start();
    keys_of_one_slot(&cluster, Tag("t1"));
    freed_in_other_ways_they_are_handed_over(&cluster.first, Tag("t2"));
    nobody_is_granted_when_some_of_the_keys_have_left(&cluster, Tag("t3"), false);
    nobody_is_granted_when_some_of_the_keys_have_left(&cluster, Tag("t4"), true);
    some_of_the_keys_here_and_some_there_are_to_try_again(&cluster, Tag("t5"));
    free_keys_of_a_slot_on_its_way_are_not_taken_twice(&cluster, Tag("t6"));
    a_slot_that_moves_without_its_keys_redirects_the_waiters_too(&cluster, Tag("t7"));
    a_release_of_all_hands_over_and_tells_in_a_slot_on_its_way(&cluster, Tag("t8"));
}

fn keys_of_one_slot(cluster: &Cluster, tag: Tag) {
    let first = &cluster.first;
    for command in [
        "RLOCK.MACQUIRE alice 30000 2 x y",
        "RLOCK.MACQUIRE alice 30000 2 x y BLOCK 0",
        "RLOCK.MRELEASE alice 2 #x y",
        "RLOCK.MRENEW alice 30000 2 y #x",
    ] {
        let error = tag.run(first, command).error();
        assert!(error.starts_with("CROSSSLOT "), "{command}: {error}");
    }
    assert_eq!(first.run("DBSIZE"), 0);
    tag.run(first, "RLOCK.MACQUIRE alice 30000 2 #x #y").held();
    let mut bob = tag.bob_waits(first);
    for command in [
        "RLOCK.MACQUIRE carol 1000 1 #z",
        "RLOCK.MRELEASE alice 2 #x #y",
        "RLOCK.MRENEW alice 1000 2 #x #y",
    ] {
        tag.is_moved(first, &tag.run(&cluster.second, command));
    }
    assert_eq!(tag.run(first, "RLOCK.MRELEASE alice 2 #x #y"), 2);
    bob.read().held();
    assert_eq!(tag.run(first, "RLOCK.MRELEASE bob 2 #x #y"), 2);
}

fn freed_in_other_ways_they_are_handed_over(server: &Server, tag: Tag) {
    for freeing in ["DEL #x", "PEXPIRE #x 40", "FLUSHALL"] {
        tag.run(server, "RLOCK.ACQUIRE #x alice 30000").held();
        let mut bob = tag.bob_waits(server);
        tag.run(server, freeing);
        bob.read().held();
        assert_eq!(tag.run(server, "RLOCK.MRELEASE bob 2 #x #y"), 2);
    }
}

/// Alice's lock has gone to the second node, carol's is still at the first. Carol releases hers:
/// at the first node both look free, and yet bob may not have them.
fn nobody_is_granted_when_some_of_the_keys_have_left(cluster: &Cluster, tag: Tag, queued: bool) {
    let (first, second) = (&cluster.first, &cluster.second);
    tag.run(first, "RLOCK.ACQUIRE #x alice 30000").held();
    tag.run(first, "RLOCK.ACQUIRE #y carol 30000").held();
    let mut bob = if queued {
        let mut life = first.session_connection("s");
        let wait = "RLOCK.MACQUIRE bob 30000 2 #x #y QUEUE 0 SESSION s";
        assert_eq!(tag.run(first, wait).queued(), 1);
        life.send("RLOCK.EVENTS s BLOCK 0");
        life
    } else {
        tag.bob_waits(first)
    };
    cluster.open_slot_of(&tag.of("#x"));
    cluster.migrate(&tag.of("#x"));
    let mut told = meanwhile(first, &mut bob);
    // The key is here still, so the server lets this through.
    assert_eq!(tag.run(first, "RLOCK.RELEASE #y carol"), 0);
    told = told.or_else(|| meanwhile(first, &mut bob));
    assert_eq!(first.run("DBSIZE"), 0, "nobody holds anything here");
    cluster.close_slot_of(&tag.of("#x"));
    let told = told.unwrap_or_else(|| bob.read());
    if queued {
        let (event, error) = told.event();
        assert_eq!(event, tag.of("error #x bob"));
        tag.is_moved(first, &Reply::Error(error.text().into_bytes()));
    } else {
        tag.is_moved(first, &told);
    }
    assert_eq!(tag.holder(second, "#x").as_deref(), Some("alice"));
    let mut bob = tag.bob_waits(second);
    assert_eq!(tag.run(second, "RLOCK.RELEASE #x alice"), 0);
    bob.read().held();
    assert_eq!(tag.run(second, "RLOCK.MRELEASE bob 2 #x #y"), 2);
    assert_eq!(first.info_number("rlock_waiters"), 0);
}

fn some_of_the_keys_here_and_some_there_are_to_try_again(cluster: &Cluster, tag: Tag) {
    let (first, second) = (&cluster.first, &cluster.second);
    tag.run(first, "RLOCK.MACQUIRE alice 30000 2 #x #y").held();
    cluster.open_slot_of(&tag.of("#x"));
    cluster.migrate(&tag.of("#x"));
    for command in [
        "RLOCK.MACQUIRE bob 30000 2 #x #y",
        "RLOCK.MACQUIRE bob 30000 2 #y #x BLOCK 0",
        "RLOCK.MACQUIRE alice 30000 2 #y #x",
        "RLOCK.MRENEW alice 30000 2 #y #x",
        "RLOCK.MRELEASE alice 2 #y #x",
    ] {
        for (server, asking) in [(first, false), (second, true)] {
            let mut conn = server.connect();
            if asking {
                assert_eq!(conn.run("ASKING"), "OK");
            }
            let told = conn.run(tag.of(command));
            let is_told = told.is_error() && told.error().starts_with("TRYAGAIN ");
            assert!(is_told, "{command}, asking: {asking}: {told:?}");
        }
    }
    cluster.migrate(&tag.of("#y"));
    cluster.close_slot_of(&tag.of("#x"));
    assert_eq!(tag.run(second, "RLOCK.MRENEW alice 30000 2 #y #x"), 2);
    assert_eq!(tag.run(second, "RLOCK.MRELEASE alice 2 #y #x"), 2);
    assert_eq!(second.run("DBSIZE"), 0);
}

fn free_keys_of_a_slot_on_its_way_are_not_taken_twice(cluster: &Cluster, tag: Tag) {
    cluster.open_slot_of(&tag.of("#x"));
    let mut holders = 0;
    for (server, asking) in [(&cluster.first, false), (&cluster.second, true)] {
        let mut conn = server.connect();
        if asking {
            assert_eq!(conn.run("ASKING"), "OK");
        }
        let told = conn.run(tag.of("RLOCK.MACQUIRE alice 30000 2 #x #y"));
        holders += usize::from(!told.is_error() && told.ints()[0] == 1);
        if told.is_error() {
            let error = told.error();
            assert!(
                ["ASK", "TRYAGAIN"].contains(&error.split(' ').next().unwrap()),
                "{error}"
            );
        }
    }
    assert!(holders <= 1);
    assert_eq!(
        cluster.first.run("DBSIZE"),
        0,
        "a key that is not there may be at the other node"
    );
    cluster.close_slot_of(&tag.of("#x"));
}

fn a_slot_that_moves_without_its_keys_redirects_the_waiters_too(cluster: &Cluster, tag: Tag) {
    let (first, second) = (&cluster.first, &cluster.second);
    tag.run(first, "RLOCK.ACQUIRE #x alice 30000").held();
    let mut bob = tag.bob_waits(first);
    let to = second.run("CLUSTER MYID").text();
    // As one node takes over from another that was away: its epoch is the higher one.
    assert_eq!(
        second.run("CLUSTER BUMPEPOCH").text().split(' ').next(),
        Some("STILL")
    );
    let take = format!(
        "CLUSTER SETSLOT {} NODE {to}",
        slot_of(first, &tag.of("#x"))
    );
    assert_eq!(second.run(take), "OK");
    tag.is_moved(first, &bob.read());
    until("nobody waits", || first.info_number("rlock_waiters") == 0);
}

fn a_release_of_all_hands_over_and_tells_in_a_slot_on_its_way(cluster: &Cluster, tag: Tag) {
    let first = &cluster.first;
    tag.run(first, "RLOCK.MACQUIRE alice 30000 2 #x #y").held();
    let mut bob = first.blocked_in(&tag.of("RLOCK.ACQUIRE #x bob 30000 BLOCK 0"));
    let mut listener = first.connect();
    for name in ["#x", "#y"] {
        listener.run(tag.of(&format!("SUBSCRIBE redisson_lock__channel:{name}")));
    }
    cluster.open_slot_of(&tag.of("#x"));
    assert_eq!(tag.run(first, "RLOCK.MRELEASE alice 2 #x #y"), 2);
    bob.read().held();
    assert_eq!(tag.holder(first, "#x").as_deref(), Some("bob"));
    for name in ["#x", "#y"] {
        let message = listener.read().texts();
        let channel = tag.of(&format!("redisson_lock__channel:{name}"));
        assert_eq!(message, ["message", &channel, "0"]);
    }
}
