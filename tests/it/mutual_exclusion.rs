//! Never two holders of one lock, whatever ends in one moment: sessions with many holds, several
//! sessions in one turn of the event loop, holds that a command finds at their end.

use rlock_tests::{Conn, Server, until};

/// More than the server ends in one turn.
const MANY: usize = 1500;

/// Which of these owners a session was told that it holds `name`, and the token of each.
fn granted_of(listener: &mut Conn, session: &str, name: &str) -> Vec<(String, i64)> {
    let events = listener.run(format!("RLOCK.EVENTS {session}")).events();
    let granted = events.iter().filter_map(|(event, token)| {
        let owner = event.strip_prefix(&format!("granted {name} "))?;
        Some((owner.to_owned(), token.int()))
    });
    granted.collect()
}

#[test]
fn a_session_with_many_holds_dies_and_one_waiter_is_granted() {
    let server = Server::start();
    let mut live = server.session_connection("live");
    let mut dying = server.session_connection("dying");
    let acquire = |at| format!("RLOCK.ACQUIRE k{at} holder{at} 30000 SESSION dying");
    let holds: Vec<_> = (0..MANY).map(acquire).collect();
    for reply in dying.pipeline(&holds) {
        reply.held();
    }
    let last = format!("k{}", MANY - 1);
    dying.queue(&last, "x", "dying");
    live.queue(&last, "b", "live");
    live.queue(&last, "c", "live");
    dying.close();
    until("all that the session held is over", || {
        server.info_number("rlock_session_releases") == i64::try_from(MANY).unwrap()
    });
    let granted = granted_of(&mut live, "live", &last);
    let owners: Vec<_> = granted.iter().map(|(owner, _)| owner.as_str()).collect();
    assert_eq!(owners, ["b"]);
    assert_eq!(server.holder(&last).as_deref(), Some("b"));
    assert_eq!(server.waiting_owners(&last), ["c"]);
    // The next one's token is its own.
    live.let_go(&last, "b");
    let next = granted_of(&mut live, "live", &last);
    assert_eq!(next[0].0, "c");
    assert!(next[0].1 > granted[0].1, "{next:?} after {granted:?}");
}

#[test]
fn two_waiters_for_each_lock_of_a_dead_session_are_granted_in_turn() {
    let server = Server::start();
    let mut live = server.session_connection("live");
    let mut dying = server.session_connection("dying");
    let count = 2 * MANY;
    let acquire = |at| format!("RLOCK.ACQUIRE k{at} holder{at} 30000 SESSION dying");
    dying.pipeline(&(0..count).map(acquire).collect::<Vec<_>>());
    for owner in ["b", "c"] {
        let wait = |at| format!("RLOCK.ACQUIRE k{at} {owner}{at} 30000 QUEUE 0 SESSION live");
        // The last comes first, so that its queue is looked at while its hold has yet to end.
        for reply in live.pipeline(&(0..count).rev().map(wait).collect::<Vec<_>>()) {
            reply.queued();
        }
    }
    let kill = format!("CLIENT KILL ID {}", dying.id());
    // Two that make the server look at every queue.
    live.pipeline(&[&kill, "SWAPDB 0 1", "SWAPDB 1 0"]);
    until("all that the session held is over", || {
        server.info_number("rlock_session_releases") == i64::try_from(count).unwrap()
    });
    let events = live.all_events("live");
    assert_eq!(events.len(), count, "one grant a lock");
    for (event, _) in &events {
        assert!(event.contains(" b"), "{event}");
    }
}

#[test]
fn a_writer_that_also_reads_ends_with_both_sessions_and_one_writer_is_next() {
    for order in [["writing", "reading"], ["reading", "writing"]] {
        let server = Server::start();
        let mut live = server.session_connection("live");
        let mut ids = Vec::new();
        let mut lives = Vec::new();
        for session in order {
            let mut life = server.session_connection(session);
            ids.push(life.id());
            lives.push(life);
        }
        let mut conn = server.connect();
        conn.run("RLOCK.ACQUIRE k w 30000 WRITE SESSION writing")
            .held();
        conn.run("RLOCK.ACQUIRE k w 30000 READ SESSION reading")
            .held();
        for writer in ["w1", "w2"] {
            let wait = format!("RLOCK.ACQUIRE k {writer} 30000 WRITE QUEUE 0 SESSION live");
            live.run(wait).queued();
        }
        let kill = |id| format!("CLIENT KILL ID {id}");
        conn.pipeline(&ids.iter().map(kill).collect::<Vec<_>>());
        until("both holds are over", || {
            server.info_number("rlock_session_releases") == 2
        });
        let granted = granted_of(&mut live, "live", "k");
        assert_eq!(granted.len(), 1, "{granted:?}");
        assert_eq!(granted[0].0, "w1");
        let fields = server.run("HKEYS k").texts();
        assert_eq!(fields, ["mode", "w1:write"]);
        assert_eq!(server.waiting_owners("k"), ["w2"]);
    }
}

#[test]
fn several_locks_are_given_back_as_they_are_once_others_have_ended() {
    let server = Server::start();
    let mut live = server.session_connection("live");
    let mut dying = server.session_connection("dying");
    live.take("a", "x");
    live.take_for("c", "d", "dying");
    live.run("RLOCK.MACQUIRE x 30000 2 a c QUEUE 0 SESSION live")
        .queued();
    live.queue("a", "y", "live");
    // In one packet: the end of d's hold lets x in at both, and then x gives one of each back.
    let kill = format!("CLIENT KILL ID {}", dying.id());
    let replies = server
        .connect()
        .pipeline(&[&kill, "RLOCK.MRELEASE x 2 a c"]);
    assert_eq!(replies[1], 2);
    let granted = granted_of(&mut live, "live", "a");
    assert_eq!(granted.len(), 1, "{granted:?}");
    assert_eq!(granted[0].0, "x");
    assert_eq!(server.holder("a").as_deref(), Some("x"));
    assert_eq!(server.waiting_owners("a"), ["y"]);
    assert_eq!(server.holder("c"), None);
    live.let_go("a", "x");
    assert_eq!(granted_of(&mut live, "live", "a")[0].0, "y");
}

#[test]
fn several_locks_are_taken_and_renewed_as_they_are_once_others_have_ended() {
    for (command, count) in [
        ("RLOCK.MACQUIRE x 30000 2 a c", 3),
        ("RLOCK.MRENEW x 30000 2 a c", 2),
    ] {
        let server = Server::start();
        let mut live = server.session_connection("live");
        let mut dying = server.session_connection("dying");
        live.take("a", "x");
        live.take_for("c", "d", "dying");
        live.run("RLOCK.MACQUIRE x 30000 2 a c QUEUE 0 SESSION live")
            .queued();
        live.queue("a", "y", "live");
        let kill = format!("CLIENT KILL ID {}", dying.id());
        server.connect().pipeline(&[&kill, command]);
        assert_eq!(granted_of(&mut live, "live", "a")[0].0, "x");
        assert_eq!(
            server.run("HGET a x").text(),
            count.to_string(),
            "{command}"
        );
        assert_eq!(
            server.run("HGET c x").text(),
            (count - 1).to_string(),
            "{command}"
        );
        assert_eq!(server.waiting_owners("a"), ["y"]);
    }
}
