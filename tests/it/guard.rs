//! RLOCK.GUARD: commands that are run only if the owner holds the lock, and then as if they had
//! come alone.

use rlock_tests::{Cluster, Conn, Feed, Pair, Reply, Server, until};

const NOT_HELD: &str = "NOTHELD this owner does not hold the lock, or not with this token";

/// The same command, guarded by `l`, which alice has.
fn guarded(command: &str) -> String {
    format!("RLOCK.GUARD l alice CALL {command}")
}

fn held_by_alice() -> (Server, Conn) {
    let server = Server::start();
    let mut conn = server.connect();
    conn.take("l", "alice");
    (server, conn)
}

#[test]
fn a_guarded_command_is_run_only_for_who_holds_the_lock_with_this_token() {
    let server = Server::start();
    let mut conn = server.connect();
    let token = conn.take("l", "alice");
    assert_eq!(conn.run("rlock.guard l alice call SET k 1"), "OK");
    let with = |token: i64| format!("RLOCK.GUARD l alice TOKEN {token} CALL INCR k");
    assert_eq!(conn.run(with(token)), 2);
    for (command, present) in [
        (with(token + 1), Some(token)),
        ("RLOCK.GUARD l bob CALL INCR k".to_owned(), Some(token)),
        ("RLOCK.GUARD free alice CALL INCR k".to_owned(), None),
    ] {
        let present = present.map_or_else(String::new, |of| format!(", the present one is {of}"));
        assert_eq!(conn.run(command).error(), format!("{NOT_HELD}{present}"));
    }
    // The hold of a session ends with its connection, before anything is run for it.
    let mut session = server.session_connection("s");
    session.take_for("s-lock", "alice", "s");
    assert_eq!(session.run("RLOCK.GUARD s-lock alice CALL INCR k"), 3);
    let id = session.id();
    let ended = [
        &*format!("CLIENT KILL ID {id}"),
        "RLOCK.GUARD s-lock alice CALL INCR k",
    ];
    assert_eq!(conn.pipeline(&ended)[1].error(), NOT_HELD);
    assert_eq!(conn.let_go("l", "alice"), 0);
    assert_eq!(conn.run(guarded("INCR k")).error(), NOT_HELD);
    assert_eq!(conn.run("GET k"), "3");
}

#[test]
fn readers_and_writers_guard_as_well() {
    let server = Server::start();
    let mut conn = server.connect();
    let (_, reader) = conn.run("RLOCK.ACQUIRE r alice 30000 READ").held();
    let (_, writer) = conn.run("RLOCK.ACQUIRE w alice 30000 WRITE").held();
    for command in [
        format!("RLOCK.GUARD r alice READ TOKEN {reader} CALL PING"),
        format!("RLOCK.GUARD w alice TOKEN {writer} WRITE CALL PING"),
    ] {
        assert_eq!(conn.run(&command), "PONG", "{command}");
    }
    for (command, expected) in [
        ("RLOCK.GUARD r bob READ CALL PING".into(), NOT_HELD.into()),
        (
            "RLOCK.GUARD r alice WRITE CALL PING".into(),
            NOT_HELD.into(),
        ),
        (
            format!("RLOCK.GUARD r alice READ TOKEN {} CALL PING", reader + 9),
            format!("{NOT_HELD}, the present one is {reader}"),
        ),
        (
            "RLOCK.GUARD w bob WRITE CALL PING".to_owned(),
            format!("{NOT_HELD}, the present one is {writer}"),
        ),
        (
            "RLOCK.GUARD w alice CALL PING".into(),
            "WRONGKIND the key holds a read-write lock, not a plain one".into(),
        ),
    ] {
        assert_eq!(conn.run(&command).error(), expected, "{command}");
    }
}

#[test]
fn who_has_permits_guards_until_the_end_of_its_own_lease() {
    let server = Server::start();
    let mut conn = server.connect();
    let (_, alice) = conn
        .run("RLOCK.ACQUIRE p alice 30000 PERMITS 2 OF 3")
        .held();
    conn.run("RLOCK.ACQUIRE p bob 30000 PERMITS 1 OF 3").held();
    let called = format!("RLOCK.GUARD p alice PERMITS TOKEN {alice} CALL INCR k");
    assert_eq!(conn.run(&called), 1);
    assert_eq!(conn.run("RLOCK.GUARD p bob PERMITS CALL INCR k"), 2);
    let other = format!(
        "RLOCK.GUARD p alice PERMITS TOKEN {} CALL INCR k",
        alice - 1
    );
    let present = format!("{NOT_HELD}, the present one is {alice}");
    assert_eq!(conn.run(other).error(), present);
    for (command, expected) in [
        ("RLOCK.GUARD p carol PERMITS CALL INCR k", NOT_HELD),
        (
            "RLOCK.GUARD p alice CALL INCR k",
            "WRONGKIND the key holds permits, not a plain lock",
        ),
        (
            "RLOCK.GUARD p alice PERMITS READ CALL INCR k",
            "ERR option 'PERMITS' cannot be combined with 'READ' or 'WRITE'",
        ),
        (
            "RLOCK.GUARD p alice PERMITS 2 CALL INCR k",
            "ERR unknown option '2'",
        ),
    ] {
        assert_eq!(conn.run(command).error(), expected, "{command}");
    }
    let keys = conn.run("COMMAND GETKEYS RLOCK.GUARD p alice PERMITS CALL INCR k");
    assert_eq!(keys.texts(), ["p", "k"]);
    assert_eq!(conn.run("RLOCK.RENEW p alice 1 PERMITS"), 1);
    // The key lives on with bob's.
    until("alice's lease is over", || {
        *conn.run("RLOCK.INFO p").get("permits") == 1
    });
    assert_eq!(conn.run(&called).error(), NOT_HELD);
    assert_eq!(conn.run("GET k"), "2");
}

/// Keys of every type; `l` is the lock.
fn keys_anew(conn: &mut Conn) {
    conn.pipeline(&[
        "FLUSHALL",
        "RLOCK.ACQUIRE l alice 600000",
        "SET string 5",
        "RPUSH list a b c",
        "HSET hash f v",
        "SADD set m",
        "ZADD zset 1 m",
        "XADD stream 1-1 f v",
        "PFADD hll a",
    ]);
}

/// The answers and the effects of commands on keys of every type, in both protocols.
#[test]
fn replies_errors_and_changes_are_those_of_the_command_alone() {
    let (server, _) = held_by_alice();
    for mut conn in [server.connect(), server.connect().resp3()] {
        for key in [
            "string", "list", "hash", "set", "zset", "stream", "hll", "none",
        ] {
            for command in [
                "GET #",
                "SET # v",
                "SET # v GET",
                "GETSET # v",
                "GETDEL #",
                "GETDEL # x",
                "GETEX # EX 10",
                "INCR #",
                "APPEND # x",
                "SETNX # x",
                "MGET # string",
                "DEL # string",
                "EXISTS #",
                "TYPE #",
                "EXPIRE # 100",
                "PTTL #",
                "RENAME # other",
                "COPY # other REPLACE",
                "RPUSH # x",
                "LRANGE # 0 -1",
                "LPOP # 2",
                "LMPOP 1 # LEFT",
                "BLPOP # string 0",
                "BLMOVE # list LEFT RIGHT 0",
                "HSET # f w",
                "HGETALL #",
                "HINCRBYFLOAT # g 1.5",
                "SADD # x y",
                "SMEMBERS #",
                "SISMEMBER # m",
                "ZADD # 2 x",
                "ZRANGE # 0 -1 WITHSCORES",
                "ZSCORE # m",
                "BZPOPMIN # 0",
                "XADD # 9-9 f v",
                "XRANGE # - +",
                "XREAD BLOCK 0 STREAMS # $",
                "XGROUP CREATE # g $",
                "XINFO STREAM #",
                "PFCOUNT #",
                "PFMERGE # hll",
                "BITCOUNT #",
                "SETBIT # 1 1",
                "GEOADD # 1 1 m",
                "OBJECT ENCODING #",
                "SORT # ALPHA",
                "UNLINK #",
                "GET",
                "SET #",
            ] {
                let command = command.replace('#', key);
                // Blocking commands are to answer as in a transaction; older servers refuse them.
                let blocks = ["BL", "BZ", "XREAD"]
                    .iter()
                    .any(|of| command.starts_with(of));
                let mut run = |guard: bool| {
                    keys_anew(&mut conn);
                    let reply = match (guard, blocks) {
                        (true, _) => conn.run(guarded(&command)),
                        (false, false) => conn.run(&command),
                        (false, true) => {
                            conn.pipeline(&["MULTI", &command, "EXEC"])[2].array()[0].clone()
                        }
                    };
                    let size = conn.run("DBSIZE");
                    let left = ["GET", "LRANGE", "HGETALL"].map(|read| {
                        let range = if read == "LRANGE" { " 0 -1" } else { "" };
                        conn.run(format!("{read} {key}{range}"))
                    });
                    (reply, size, left)
                };
                let (alone, guarded) = (run(false), run(true));
                let is_refused = blocks
                    && guarded.0.is_error()
                    && guarded.0.error().contains("does not let scripts run it");
                if !is_refused {
                    assert_eq!(guarded, alone, "{command}");
                }
            }
        }
    }
}

/// Each of these would end a server, change the connection, or run out of the guard's sight.
#[test]
fn what_cannot_be_guarded_is_refused_by_name_and_leaves_all_as_it_was() {
    let (server, mut conn) = held_by_alice();
    server.load_c_module("caller");
    let before = conn.run("CLIENT ID");
    for command in [
        "MULTI",
        "EXEC",
        "DISCARD",
        "WATCH k",
        "UNWATCH",
        "SUBSCRIBE c",
        "PSUBSCRIBE c",
        "SSUBSCRIBE c",
        "MONITOR",
        "SYNC",
        "PSYNC ? -1",
        "REPLICAOF NO ONE",
        "HELLO 3",
        "AUTH default x",
        "SELECT 1",
        "RESET",
        "QUIT",
        "ASKING",
        "READONLY",
        "READWRITE",
        "CLIENT REPLY OFF",
        "CLIENT PAUSE 100",
        "CLIENT KILL ID 1",
        "CLIENT NOSUCH",
        "CONFIG SET save x",
        "ACL WHOAMI",
        "DEBUG SLEEP 1",
        "SHUTDOWN NOSAVE",
        "FAILOVER",
        "EVAL return(1) 0",
        "EVALSHA x 0",
        "EVAL_RO return(1) 0",
        "EVALSHA_RO x 0",
        "FCALL f 0",
        "FCALL_RO f 0",
        "SCRIPT FLUSH",
        "FUNCTION FLUSH",
        "WAIT 0 100",
        "WAITAOF 0 0 100",
        "CLUSTER SLOTS",
        "INFO",
        "COMMAND",
        "COMMAND INFO get",
        "OBJECT",
        "MODULE LIST",
        "RLOCK.RELEASE l alice",
        "RLOCK.GUARD l alice CALL PING",
        "rlock.info l",
        "CALLER.CALL SET k v",
        "NOSUCHCOMMAND x",
    ] {
        let error = conn.run(guarded(command)).error();
        assert!(error.starts_with("ERR command '"), "{command}: {error}");
        assert!(error.contains("cannot be guarded"), "{command}: {error}");
        let name = command.split(' ').next().unwrap();
        assert!(error.contains(name), "{command}: {error}");
    }
    for name in [
        &b""[..],
        b"GET\0",
        b"OBJECT|ENCODING",
        b"\xff\r\n",
        &[b'x'; 10_000],
    ] {
        let words = [&b"RLOCK.GUARD"[..], b"l", b"alice", b"CALL", name];
        let error = conn.cmd(&words).error();
        assert!(error.contains("the server does not know it"), "{error}");
    }
    assert_eq!(conn.run("CLIENT ID"), before);
    assert_eq!(conn.run("EXISTS k"), 0);
    assert_eq!(server.holder("l").as_deref(), Some("alice"));
}

/// A command within a command within a command … must not end the server's stack.
#[test]
fn keys_are_those_of_the_lock_and_of_the_command_however_deep_it_is_hidden() {
    let (_server, mut conn) = held_by_alice();
    for (command, keys) in [
        ("l alice CALL PING", &["l"][..]),
        ("l alice TOKEN 5 CALL SET k v", &["l", "k"]),
        ("l alice WRITE CALL MSET a 1 b 2", &["l", "a", "b"]),
        (
            "l alice CALL XREAD COUNT 1 STREAMS x y 0 0",
            &["l", "x", "y"],
        ),
        ("l alice CALL EVAL code 2 a b c", &["l", "a", "b"]),
        ("l alice CALL RLOCK.GUARD m bob CALL SET k v", &["l"]),
        ("l alice CALL NOSUCH k", &["l"]),
        ("l alice CALL GET", &["l"]),
        ("l alice NONSENSE CALL GET k", &["l"]),
        ("CALL CALL CALL GET k", &["CALL", "k"]),
    ] {
        let told = conn.run(format!("COMMAND GETKEYS RLOCK.GUARD {command}"));
        assert_eq!(told.texts(), keys, "{command}");
    }
    let deep = "RLOCK.GUARD l alice CALL ".repeat(20_000);
    let told = conn.run(format!("COMMAND GETKEYS {deep}PING"));
    assert_eq!(told.texts(), ["l"]);
    assert!(conn.run(format!("{deep}PING")).is_error());
}

#[test]
fn the_caller_needs_the_right_to_the_lock_the_command_and_its_keys() {
    let (server, mut conn) = held_by_alice();
    conn.run("SET other:1 v");
    let rules = "ACL SETUSER clerk on nopass ~l ~mine:* %R~shared &news -@all \
        +rlock.guard +set +get +copy +publish +xread";
    assert_eq!(conn.run(rules), "OK");
    let mut clerk = server.connect();
    assert_eq!(clerk.run("AUTH clerk anything"), "OK");
    assert_eq!(clerk.run(guarded("SET mine:1 v")), "OK");
    assert_eq!(clerk.run(guarded("GET shared")), Reply::Null);
    assert_eq!(clerk.run(guarded("PUBLISH news x")), 0);
    let script = "return redis.call('RLOCK.GUARD','l','alice','CALL','GET','other:1')";
    conn.run("ACL SETUSER clerk +eval");
    for refused in [
        guarded("GET other:1"),
        guarded("SET shared v"),
        guarded("COPY mine:1 other:2"),
        guarded("DEL mine:1"),
        guarded("PUBLISH olds x"),
        guarded("XREAD STREAMS other:1 0"),
        "RLOCK.GUARD other:1 alice CALL GET mine:1".to_owned(),
    ] {
        let error = clerk.run(&refused).error();
        assert!(error.starts_with("NOPERM "), "{refused}: {error}");
    }
    assert!(clerk.cmd(&["EVAL", script, "0"]).is_error());
    let script = script.replace("other:1", "mine:1");
    assert_eq!(clerk.cmd(&["EVAL", &script, "0"]), "v");
    // Another module's call in nobody's name may do anything.
    server.load_c_module("caller");
    assert_eq!(
        conn.run("CALLER.CALL RLOCK.GUARD l alice CALL GET other:1"),
        "v"
    );
    for name in ["AS-USER", "AS-MADE-USER"] {
        let call = format!("CALLER.{name} RLOCK.GUARD l alice CALL GET other:1");
        assert_eq!(conn.run(call), "v", "{name}");
    }
}

#[test]
fn what_replicates_is_what_the_command_itself_replicates() {
    let (server, mut conn) = held_by_alice();
    let mut feed = Feed::of(&server);
    conn.run("SADD set m");
    for (command, news) in [
        ("SET k v EX 1000", &["SET k v PXAT"][..]),
        ("INCRBYFLOAT n 1.5", &["SET n 1.5 KEEPTTL"]),
        ("SPOP set", &["DEL set"]),
        ("GET k", &[]),
        ("SET k other NX", &[]),
        ("GETDEL k", &["DEL k"]),
        ("PUBLISH news x", &["PUBLISH news x"]),
        ("HSET l f v", &["HSET l f v"]),
    ] {
        feed.news();
        conn.run(guarded(command));
        let told = feed.news();
        assert_eq!(told.len(), news.len(), "{command}: {told:?}");
        // Older servers write SREM for the last member.
        let is_same = |(told, news): (&String, &&str)| {
            told.starts_with(news) || command == "SPOP set" && told == "SREM set m"
        };
        assert!(told.iter().zip(news).all(is_same), "{command}: {told:?}");
    }
    feed.news();
    conn.pipeline(&[
        "MULTI",
        &guarded("INCR n2"),
        "RLOCK.GUARD l bob CALL INCR n2",
        "EXEC",
    ]);
    let script = "redis.call('RLOCK.GUARD','l','alice','CALL','INCR','n2')
        redis.pcall('RLOCK.GUARD','l','bob','CALL','INCR','n2')";
    conn.cmd(&["EVAL", script, "0"]);
    let told: Vec<_> = feed.news();
    let written = told
        .iter()
        .filter(|line| !["MULTI", "EXEC"].contains(&line.as_str()));
    assert_eq!(written.collect::<Vec<_>>(), ["INCR n2", "INCR n2"]);
}

#[test]
fn transactions_and_scripts_guard_and_nothing_blocks_there_or_anywhere() {
    let (server, mut conn) = held_by_alice();
    let replies = conn.pipeline(&[
        "MULTI",
        &guarded("INCR n"),
        "RLOCK.GUARD l bob CALL INCR n",
        &guarded("BLPOP none 0"),
        "EXEC",
    ]);
    let [done, refused, blocking] = replies[4].array() else {
        panic!("{replies:?}")
    };
    assert_eq!(done, &1);
    assert!(refused.error().starts_with(NOT_HELD));
    let waited_for_nothing = |reply: &Reply| *reply == Reply::Null || reply.is_error();
    assert!(waited_for_nothing(blocking), "{blocking:?}");
    assert!(waited_for_nothing(&conn.run(guarded("BLPOP none 0"))));
    // A refused one disturbs nobody's WATCH, one that is run does.
    for (by, expected) in [("bob", false), ("alice", true)] {
        conn.pipeline(&["WATCH n l", "MULTI", "PING"]);
        server.run(format!("RLOCK.GUARD l {by} CALL INCR n"));
        assert_eq!(conn.run("EXEC") == Reply::Null, expected, "{by}");
    }
    let script = "return redis.call('RLOCK.GUARD','l',ARGV[1],'CALL','INCR','n')";
    assert_eq!(conn.cmd(&["EVAL", script, "0", "alice"]), 3);
    let error = conn.cmd(&["EVAL", script, "0", "bob"]).error();
    assert!(error.contains("NOTHELD"), "{error}");
}

#[test]
fn limits_of_memory_and_of_replicas_hold_as_for_the_command() {
    let pair = Pair::start();
    let mut conn = pair.primary.connect();
    conn.take("l", "alice");
    conn.run("SET k v");
    conn.run("CONFIG SET maxmemory 1");
    assert!(conn.run(guarded("SET k w")).error().starts_with("OOM "));
    assert_eq!(conn.run(guarded("GET k")), "v");
    assert_eq!(conn.run(guarded("DEL k")), 1);
    conn.run("CONFIG SET maxmemory 0");
    pair.settle();
    let error = pair.replica.run(guarded("GET k")).error();
    assert!(error.starts_with("READONLY "), "{error}");
    // A command that frees the lock that guards it.
    assert_eq!(conn.run(guarded("DEL l")), 1);
    assert_eq!(conn.run(guarded("PING")).error(), NOT_HELD);
}

/// The key that the guarded command deletes is the lock: the waiter has it, and the command was run
/// before.
#[test]
fn a_lock_that_its_guarded_command_frees_goes_to_the_next() {
    let (server, mut conn) = held_by_alice();
    let mut bob = server.wait_in_queue("l", "bob");
    assert_eq!(conn.run(guarded("UNLINK l")), 1);
    bob.read().held();
    let mut carol = server.wait_in_queue("l", "carol");
    assert_eq!(conn.run("RLOCK.GUARD l bob CALL FLUSHALL"), "OK");
    carol.read().held();
}

#[test]
fn a_cluster_routes_by_the_keys_of_the_lock_and_of_the_command() {
    let cluster = Cluster::start();
    let mut conn = cluster.first.connect();
    conn.take("l", "alice");
    assert_eq!(conn.run(guarded("SET {l}k 1")), "OK");
    let error = conn.run(guarded("SET other 1")).error();
    assert!(error.starts_with("CROSSSLOT "), "{error}");
    let error = conn.run("RLOCK.GUARD l alice CALL MGET {l}k other").error();
    assert!(error.starts_with("CROSSSLOT "), "{error}");
    let moved = cluster.second.run(guarded("GET {l}k")).error();
    assert!(moved.starts_with("MOVED "), "{moved}");
    // On its way: the lock has gone ahead, and the key has not.
    cluster.open_slot_of("l");
    assert_eq!(conn.run(guarded("INCR {l}k")), 2);
    cluster.migrate("l");
    let error = conn.run(guarded("INCR {l}k")).error();
    assert!(error.starts_with("TRYAGAIN "), "{error}");
    cluster.migrate("{l}k");
    let ask = conn.run(guarded("INCR {l}k")).error();
    assert!(ask.starts_with("ASK "), "{ask}");
    let there = cluster
        .second
        .connect()
        .pipeline(&["ASKING", &guarded("INCR {l}k")]);
    assert_eq!(there[1], 3);
    cluster.close_slot_of("l");
    assert_eq!(cluster.second.run(guarded("INCR {l}k")), 4);
}
