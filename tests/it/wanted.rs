//! WANTED: a session hears once that its hold keeps a waiter out.

use rlock_tests::{Conn, Feed, Server, until};

/// Kind, key, owner and number of each event of `s`, since the last call.
#[track_caller]
fn told(life: &mut Conn) -> Vec<String> {
    let events = life.run("RLOCK.EVENTS s").events().into_iter();
    events
        .map(|(event, value)| match event.split(' ').next() {
            Some("wanted") => format!("{event} {}", value.int()),
            _ => event,
        })
        .collect()
}

/// A server on which alice has `k` for the session `s`, and is told when it is wanted.
fn asked(options: &str) -> (Server, Conn, Conn) {
    let server = Server::start();
    let life = server.session_connection("s");
    let mut conn = server.connect();
    let take = format!("RLOCK.ACQUIRE k alice 30000 SESSION s WANTED {options}");
    conn.run(take).held();
    (server, life, conn)
}

#[test]
fn a_holder_is_told_of_the_first_who_waits_and_again_if_it_asks_again() {
    let (server, mut life, mut conn) = asked("");
    assert_eq!(told(&mut life), [] as [&str; 0]);
    let _bob = server.wait_in_queue("k", "bob");
    assert_eq!(told(&mut life), ["wanted k alice 1"]);
    let _carol = server.wait_in_queue("k", "carol");
    conn.run("RLOCK.RENEW k alice 30000 SESSION s");
    conn.run("RLOCK.ACQUIRE k dave 30000").refused();
    assert_eq!(told(&mut life), [] as [&str; 0], "once a grant");
    // Somebody waits still: at once.
    assert_eq!(conn.run("RLOCK.RENEW k alice 30000 SESSION s WANTED"), 1);
    assert_eq!(told(&mut life), ["wanted k alice 2"]);
    conn.run("RLOCK.ACQUIRE k alice 30000 SESSION s WANTED")
        .held();
    assert_eq!(told(&mut life), ["wanted k alice 2"], "a re-entry asks");
    assert_eq!(conn.run("RLOCK.RENEW k bob 30000 SESSION s WANTED"), 0);
    assert_eq!(told(&mut life), [] as [&str; 0], "who holds nothing");
}

#[test]
fn a_caller_that_is_refused_and_does_not_wait_counts_and_one_in_error_does_not() {
    let (server, mut life, mut conn) = asked("");
    server
        .connect()
        .run("CONFIG SET rlock.max-waiters-per-lock 1");
    let cannot_wait = ["MULTI", "RLOCK.ACQUIRE k bob 30000 BLOCK 0", "EXEC"];
    let ask_again = "RLOCK.RENEW k alice 30000 SESSION s WANTED";
    for refused in [&["RLOCK.ACQUIRE k bob 30000"][..], &cannot_wait] {
        conn.pipeline(refused);
        assert_eq!(told(&mut life), ["wanted k alice 0"], "{refused:?}");
        conn.run(ask_again);
    }
    conn.queue("k", "bob", "s");
    assert_eq!(told(&mut life), ["wanted k alice 1"]);
    // Nobody waits elsewhere for what alice asks for now, and others are refused by errors.
    conn.run("RLOCK.CANCEL k bob");
    conn.run(ask_again);
    conn.run("RLOCK.ACQUIRE hers bob 30000").held();
    conn.queue("hers", "alice", "s");
    assert_eq!(told(&mut life), ["timeout k bob"]);
    for (wait, error) in [
        ("RLOCK.ACQUIRE k bob 30000 BLOCK 0", "DEADLOCK"),
        ("RLOCK.ACQUIRE k bob 30000 READ", "WRONGKIND"),
        ("RLOCK.ACQUIRE k bob 30000 SESSION nobody", "NOSESSION"),
        ("RLOCK.MACQUIRE bob 30000 2 k hers BLOCK 0", "QUEUEFULL"),
    ] {
        let refused = conn.run(wait).error();
        assert!(refused.starts_with(error), "{wait}: {refused}");
    }
    assert_eq!(told(&mut life), [] as [&str; 0]);
    conn.run("RLOCK.MACQUIRE bob 30000 2 k hers").refused();
    assert_eq!(told(&mut life), ["wanted k alice 0"]);
}

#[test]
fn a_grant_is_told_before_the_next_waiter_and_a_blocked_waiter_can_ask_too() {
    let server = Server::start();
    let (_life, mut conn) = (server.session_connection("s"), server.connect());
    conn.take("k", "alice");
    conn.run("RLOCK.ACQUIRE k bob 30000 QUEUE 0 SESSION s WANTED")
        .queued();
    let mut carol = server.blocked_in("RLOCK.ACQUIRE k carol 30000 BLOCK 0 SESSION s WANTED");
    conn.queue("k", "dave", "s");
    let mut listener = server.connect();
    listener.send("RLOCK.EVENTS s BLOCK 0");
    listener.expect_nothing_yet();
    conn.let_go("k", "alice");
    let heard: Vec<String> = listener
        .read()
        .events()
        .into_iter()
        .map(|of| of.0)
        .collect();
    assert_eq!(heard, ["granted k bob", "wanted k bob"]);
    conn.let_go("k", "bob");
    carol.read().held();
    assert_eq!(told(&mut listener), ["wanted k carol 1"]);
    conn.let_go("k", "carol");
    assert_eq!(told(&mut listener), ["granted k dave"], "nobody is left");
}

#[test]
fn a_writer_keeps_out_all_and_a_reader_keeps_out_writers() {
    let (server, mut life, mut conn) = asked("READ");
    let reads = "RLOCK.ACQUIRE k bob 30000 READ SESSION s WANTED QUEUE 0";
    conn.run(reads).held();
    assert_eq!(told(&mut life), [] as [&str; 0]);
    let mut writer =
        server.blocked_in("RLOCK.ACQUIRE k carol 30000 WRITE BLOCK 0 SESSION s WANTED");
    assert_eq!(told(&mut life), ["wanted k alice 1", "wanted k bob 1"]);
    // Readers come after the waiting writer, and asked in vain are no news to readers.
    conn.run("RLOCK.RENEW k bob 30000 READ SESSION s WANTED");
    assert_eq!(told(&mut life), ["wanted k bob 1"]);
    conn.run("RLOCK.ACQUIRE k dave 30000 READ SESSION s WANTED QUEUE 0")
        .queued();
    conn.run("RLOCK.ACQUIRE k erin 30000 READ SESSION s WANTED QUEUE 0")
        .queued();
    conn.run("RLOCK.RELEASE k alice READ");
    conn.run("RLOCK.RELEASE k bob READ");
    writer.read().held();
    assert_eq!(told(&mut life), ["wanted k carol 2"]);
    let mut writer = server.blocked_in("RLOCK.ACQUIRE k frank 30000 WRITE BLOCK 0");
    conn.run("RLOCK.RELEASE k carol WRITE");
    // Both come in before it is told of the remaining waiter.
    let mut heard = told(&mut life);
    heard[2..].sort();
    let wanted = ["wanted k dave 1", "wanted k erin 1"];
    let expected = [&["granted k dave", "granted k erin"][..], &wanted].concat();
    assert_eq!(heard, expected);
    conn.run("RLOCK.RELEASE k dave READ");
    conn.run("RLOCK.RELEASE k erin READ");
    writer.read().held();
}

#[test]
fn permits_are_wanted_by_whoever_does_not_fit() {
    let (_server, mut life, mut conn) = asked("PERMITS 2 OF 3");
    let asks = |owner: &str, n: u8| {
        format!("RLOCK.ACQUIRE k {owner} 30000 PERMITS {n} OF 3 SESSION s WANTED QUEUE 0")
    };
    conn.run(asks("bob", 1)).held();
    conn.run("RLOCK.RELEASE k bob PERMITS 1");
    assert_eq!(told(&mut life), [] as [&str; 0]);
    conn.run(asks("carol", 2)).queued();
    assert_eq!(told(&mut life), ["wanted k alice 1"]);
    conn.run(asks("dave", 1)).queued();
    conn.run(asks("erin", 1)).queued();
    conn.run("RLOCK.RELEASE k alice PERMITS 2");
    // Dave fits beside carol, and erin does not.
    let mut heard = told(&mut life);
    heard[2..].sort();
    let wanted = ["wanted k carol 1", "wanted k dave 1"];
    let expected = [&["granted k carol", "granted k dave"][..], &wanted].concat();
    assert_eq!(heard, expected);
}

#[test]
fn of_several_locks_each_hold_has_its_event_and_an_owner_does_not_want_its_own() {
    let server = Server::start();
    let (mut life, mut conn) = (server.session_connection("s"), server.connect());
    conn.run("RLOCK.MACQUIRE alice 30000 2 a b SESSION s WANTED")
        .held();
    conn.take("c", "carol");
    conn.run("RLOCK.MACQUIRE alice 30000 2 c a QUEUE 0 SESSION s WANTED")
        .queued();
    assert_eq!(told(&mut life), [] as [&str; 0]);
    let _bob = server.wait_in_queue("b", "bob");
    assert_eq!(told(&mut life), ["wanted b alice 1"]);
    conn.run("RLOCK.MACQUIRE dave 30000 3 a b free").refused();
    assert_eq!(told(&mut life), ["wanted a alice 1"]);
    let _erin = server.wait_in_queue("a", "erin");
    conn.let_go("c", "carol");
    // It is asked for anew with the grant, and erin waits for one of the two.
    assert_eq!(told(&mut life), ["granted c alice", "wanted a alice 1"]);
    conn.run("RLOCK.ACQUIRE c dave 30000").refused();
    assert_eq!(told(&mut life), ["wanted c alice 0"]);
}

#[test]
fn what_is_wanted_reaches_no_replica_and_ends_with_the_hold() {
    let (server, mut life, mut conn) = asked("");
    let mut feed = Feed::of(&server);
    let bob = server.wait_in_queue("k", "bob");
    conn.run("RLOCK.ACQUIRE k carol 30000").refused();
    assert_eq!(told(&mut life), ["wanted k alice 1"]);
    assert_eq!(feed.news(), [] as [&str; 0]);
    bob.close();
    until("bob has left", || server.waiting_owners("k").is_empty());
    // Asked for, but given back before anybody waits: the next hold does not ask.
    conn.run("RLOCK.RENEW k alice 30000 SESSION s WANTED");
    conn.let_go("k", "alice");
    conn.take_for("k", "alice", "s");
    conn.run("RLOCK.ACQUIRE k bob 30000").refused();
    assert_eq!(told(&mut life), [] as [&str; 0]);
    // Another session that takes the hold over is told.
    conn.run("RLOCK.RENEW k alice 30000 SESSION s WANTED");
    let mut other = server.session_connection("t");
    conn.run("RLOCK.RENEW k alice 30000 SESSION t");
    conn.run("RLOCK.ACQUIRE k bob 30000").refused();
    assert_eq!(told(&mut life), ["lost k alice"]);
    assert_eq!(
        other.run("RLOCK.EVENTS t").event(),
        ("wanted k alice".to_owned(), 0.into())
    );
    conn.run("RLOCK.RENEW k alice 30000 SESSION t WANTED");
    conn.run("RLOCK.ACQUIRE k bob 30000").refused();
    let (_, events) = other.run("RLOCK.EVENTS t").told();
    let token = conn.run("RLOCK.INFO k").get("token").int();
    assert_eq!(
        (&*events[0].what, events[0].token),
        ("wanted k alice", token)
    );
}
