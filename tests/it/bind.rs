//! RLOCK.BIND: a connection that was given up carries nothing out any more.

use rlock_tests::{Cluster, Conn, Reply, Server, until};

/// A connection that is bound to `s`.
fn bound(server: &Server, epoch: usize) -> Conn {
    let mut conn = server.connect();
    conn.run(format!("RLOCK.BIND s EPOCH {epoch}")).array();
    conn
}

/// An old connection has sent `length` commands, and a new one is bound while the server has read
/// neither, in either order. The server may carry out commands of the old one before the reply. One
/// that is carried out afterwards would be a second owner's.
fn race(server: &Server, round: usize, length: usize, old_first: bool, slow: bool) {
    let mut old = bound(server, 2 * round + 1);
    let mut new = server.connect();
    let mut pipeline = vec!["INCR n"; length];
    if slow {
        // Long enough for the rest to be read meanwhile, by threads of the server where it has any.
        pipeline.insert(0, "EVAL 'for i = 1, 20000 do redis.call([[PING]]) end' 0");
    }
    let bind = format!("RLOCK.BIND s EPOCH {}", 2 * round + 2);
    server.freeze();
    if old_first {
        old.try_send_all(&pipeline).unwrap();
        new.send_all(&[&bind, "GET n"]);
    } else {
        new.send_all(&[&bind, "GET n"]);
        old.try_send_all(&pipeline).unwrap();
    }
    server.thaw();
    // It may be closed already.
    let _ = old.try_send_all(&["INCR n"; 3]);
    assert!(!new.read().is_error());
    let seen = new.read();
    old.read_to_end();
    let after = new.run("GET n");
    assert_eq!(
        after, seen,
        "{length} commands, old first: {old_first}, slow: {slow}"
    );
}

fn rounds(io_threads: usize, rounds: usize) {
    let server = Server::builder()
        .config(&format!("io-threads {io_threads}"))
        .start();
    let _life = server.session_connection("s");
    server.run("SET n 0");
    for round in 0..rounds {
        let length = 1 + round * 7 % 300;
        race(&server, round, length, round % 2 == 0, round % 5 == 0);
    }
}

#[test]
fn what_the_former_connection_has_sent_is_not_carried_out_after_the_reply() {
    rounds(1, 120);
}

#[test]
fn nor_is_what_another_thread_of_the_server_has_read() {
    rounds(4, 120);
}

#[test]
#[ignore = "long, `make soak` runs it"]
fn soak_ten_thousand_former_connections() {
    for io_threads in [1, 4] {
        rounds(io_threads, 5_000);
    }
}

/// A server that is kept busy reads the commands of both in one turn.
#[test]
fn a_former_connection_that_is_blocked_is_closed_with_its_wait() {
    let server = Server::start();
    let _life = server.session_connection("s");
    let mut alice = server.connect();
    alice.take("k", "alice");
    for (epoch, wait) in [
        "RLOCK.ACQUIRE k bob 30000 BLOCK 0",
        "RLOCK.ACQUIRE k bob 30000 BLOCK 0 SESSION s",
        "RLOCK.MACQUIRE bob 30000 2 k l BLOCK 0",
        "BLPOP list 0",
        "WAIT 5 0",
    ]
    .into_iter()
    .enumerate()
    {
        let mut old = bound(&server, 2 * epoch + 1);
        old.send(wait);
        old.expect_nothing_yet();
        let _new = bound(&server, 2 * epoch + 2);
        old.read_to_end();
        until("its wait has left", || {
            server.info_number("rlock_waiters") == 0
        });
    }
    assert_eq!(server.run("EXISTS l"), 0);
}

/// The grant is on its way to the former connection, and goes on to the next.
#[test]
fn a_grant_to_the_former_connection_is_taken_back() {
    let server = Server::start();
    let _life = server.session_connection("s");
    let mut alice = server.connect();
    alice.take("k", "alice");
    let mut old = bound(&server, 1);
    old.send("RLOCK.ACQUIRE k bob 30000 BLOCK 0");
    old.expect_nothing_yet();
    let mut carol = server.wait_in_queue("k", "carol");
    let replies = alice.pipeline(&["RLOCK.RELEASE k alice", "RLOCK.BIND s EPOCH 2"]);
    assert_eq!(replies[0], 0);
    carol.read().held();
    old.read_to_end();
}

#[test]
fn the_former_connection_may_be_the_session_connection_or_a_subscriber() {
    let server = Server::start();
    let mut life = server.connect();
    life.run("RLOCK.EVENTS s GRACE 60000").events();
    life.run("RLOCK.BIND s EPOCH 1").array();
    life.take_for("k", "bob", "s");
    let mut next = server.connect();
    // Its session is in its grace, and nobody listens.
    let refused = next.run("RLOCK.BIND s EPOCH 2").error();
    assert!(refused.starts_with("NOSESSION"), "{refused}");
    life.read_to_end();
    assert_eq!(server.holder("k").as_deref(), Some("bob"));
    let _life = server.session_connection("s");
    // It was bound all the same.
    let stale = next.run("RLOCK.BIND s EPOCH 2").error();
    assert!(stale.starts_with("STALE"), "{stale}");
    next.run("RLOCK.BIND s EPOCH 3").array();
    next.run("SUBSCRIBE news").array();
    let _new = bound(&server, 4);
    next.read_to_end();
}

/// The commands of the old one may be carried out after the session's end as well.
#[test]
fn the_former_connection_is_closed_after_the_sessions_end_too() {
    let server = Server::start();
    let life = server.session_connection("s");
    let mut old = bound(&server, 5);
    life.close();
    until("it is over", || server.info_number("rlock_sessions") == 0);
    let _life = server.session_connection("s");
    let mut new = server.connect();
    // Its number is remembered as long as it is there.
    let stale = new.run("RLOCK.BIND s EPOCH 5").error();
    assert_eq!(
        stale,
        "STALE a later connection has named EPOCH 5 for this session"
    );
    assert_eq!(old.run("PING"), "PONG");
    new.run("RLOCK.BIND s EPOCH 6").array();
    old.read_to_end();
    // That connection has gone, and its session too: nothing is left of the number.
    new.close();
    until("it is forgotten", || {
        server.run("RLOCK.SESSIONS").array()[0].get("bound") == &Reply::Null
    });
}

#[test]
fn a_connection_may_be_bound_again_and_is_not_closed_for_itself() {
    let server = Server::start();
    let _lives = [
        server.session_connection("s"),
        server.session_connection("t"),
    ];
    let mut conn = bound(&server, 1);
    for epoch in [2, 7] {
        conn.run(format!("RLOCK.BIND s EPOCH {epoch}")).array();
    }
    for stale in [0, 6, 7] {
        let error = conn.run(format!("RLOCK.BIND s EPOCH {stale}")).error();
        assert_eq!(
            error,
            "STALE a later connection has named EPOCH 7 for this session"
        );
    }
    let error = conn.run("RLOCK.BIND t EPOCH 1").error();
    assert_eq!(
        error,
        "ERR this connection is bound to another session already"
    );
    assert_eq!(conn.run("PING"), "PONG");
}

#[test]
fn only_the_user_who_began_the_session_may_bind_with_no_right_but_this() {
    let server = Server::start();
    for user in ["alice", "mallory"] {
        server.run(format!(
            "ACL SETUSER {user} on nopass +rlock.bind +rlock.events +ping"
        ));
    }
    let of = |user: &str| {
        let mut conn = server.connect();
        assert_eq!(conn.run(format!("AUTH {user} any")), "OK");
        conn
    };
    let mut life = of("alice");
    life.run("RLOCK.EVENTS s").events();
    let (mut old, mut new, mut mallory) = (of("alice"), of("alice"), of("mallory"));
    old.run("RLOCK.BIND s EPOCH 1").array();
    assert!(
        mallory
            .run("RLOCK.BIND s EPOCH 2")
            .error()
            .starts_with("NOPERM")
    );
    assert_eq!(old.run("PING"), "PONG");
    new.run("RLOCK.BIND s EPOCH 2").array();
    old.read_to_end();
}

#[test]
fn not_in_a_transaction_a_script_or_another_modules_call() {
    let server = Server::start();
    server.load_c_module("caller");
    let _life = server.session_connection("s");
    let mut conn = server.connect();
    let error = "ERR RLOCK.BIND needs a connection of its own, \
                 so not here within MULTI or another call";
    let replies = conn.pipeline(&["MULTI", "RLOCK.BIND s EPOCH 1", "EXEC"]);
    assert_eq!(replies[2].array()[0].error(), error);
    let script = "return redis.pcall('RLOCK.BIND', 's', 'EPOCH', '1')";
    assert_eq!(conn.cmd(&["EVAL", script, "0"]).error(), error);
    assert_eq!(conn.run("CALLER.CALL RLOCK.BIND s EPOCH 1").error(), error);
}

#[test]
fn the_reply_names_the_life_and_the_server() {
    let server = Server::start();
    let mut life = server.session_connection("s");
    let (number, _) = life.run("RLOCK.EVENTS s").told();
    let mut conn = server.connect();
    let info = server.run("INFO server").text();
    let run_id = info.lines().find_map(|line| line.strip_prefix("run_id:"));
    let reply = conn.run("RLOCK.BIND s EPOCH 1");
    let [told, by] = reply.array() else {
        panic!("{reply:?}")
    };
    assert_eq!((told.int(), Some(&*by.text())), (number, run_id));
    let cluster = Cluster::start();
    for node in [&cluster.first, &cluster.second] {
        let _life = node.session_connection("s");
        let reply = node.run("RLOCK.BIND s EPOCH 1");
        assert_eq!(reply.array()[1], node.run("CLUSTER MYID"));
    }
}
