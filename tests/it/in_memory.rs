//! The server in memory (`rlock-test`) answers as a real one does: the same commands go to both.
//! The results of the simulation hold only as far as this is true.

use std::collections::HashMap;
use std::time::Duration;

use rlock_client::test_util::{Dial, Stream};
use rlock_test::Network;

use rlock_tests::{Cluster, Conn, Random, Reply, Sentinels, Server, slot_of, until};
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::time::sleep;

const READ_WRITE_LOCKS: [&str; 2] = ["r", "s"];
const OWNERS: [&str; 4] = ["one", "two", "three", "four"];
const SESSIONS: [&str; 2] = ["s1", "s2"];

/// A command by chance. Leases are so long that none ends while the test runs.
fn command(random: &mut Random) -> String {
    let owner = random.pick(&OWNERS).to_owned();
    let (is_read_write, several) = (random.below(3) == 0, random.below(5) == 0);
    let (key, mode) = if is_read_write {
        (
            random.pick(&READ_WRITE_LOCKS),
            random.pick(&["READ", "WRITE"]),
        )
    } else {
        // Now and then one of the other kind.
        (random.pick(&["a", "b", "c", "a", "b", "c", "r"]), "")
    };
    let lease = random.pick(&["3600000", "7200000"]);
    let session = random.pick(&SESSIONS);
    let wait = random.pick(&["", "", "QUEUE 0", "QUEUE 3600000"]);
    let session = if wait.is_empty() && random.below(2) == 0 {
        String::new()
    } else {
        let wanted = random.pick(&["", "WANTED"]);
        format!("SESSION {session} {wanted}")
    };
    let once = random.pick(&["", "ONCE"]);
    let keys = match random.below(3) {
        0 => "2 a b",
        1 => "3 b c a",
        _ => "1 c",
    };
    match random.below(20) {
        0..7 if several => format!("RLOCK.MACQUIRE {owner} {lease} {keys} {wait} {session} {once}"),
        0..7 => format!("RLOCK.ACQUIRE {key} {owner} {lease} {mode} {wait} {session} {once}"),
        7..13 if several => format!("RLOCK.MRELEASE {owner} {keys}"),
        7..13 => format!("RLOCK.RELEASE {key} {owner} {mode}"),
        13..15 if several => {
            let session = session.replace("WANTED", "");
            format!("RLOCK.MRENEW {owner} {lease} {keys} {session}")
        }
        13..15 => format!("RLOCK.RENEW {key} {owner} {lease} {mode} {session}"),
        15 => format!("RLOCK.CANCEL {key} {owner}"),
        16 => format!("RLOCK.BREAK {key}"),
        17 => format!("RLOCK.RELEASE {key} {owner} {mode} TOKEN 7"),
        18 => format!("RLOCK.ACQUIRE {key}"),
        _ => format!("RLOCK.RENEW {key} {owner} x"),
    }
}

/// A connection to the server in memory.
struct InMemory(Box<dyn Stream>);

impl InMemory {
    async fn open(network: &Network) -> Self {
        Self::at(network, "server:6379").await
    }

    async fn at(network: &Network, address: &str) -> Self {
        let dial = network.host().dial();
        Self(dial.dial(address).await.expect("it is there"))
    }

    async fn run(&mut self, command: &str) -> Reply {
        let words: Vec<&str> = command.split_whitespace().collect();
        let parts = words
            .iter()
            .map(|word| format!("${}\r\n{word}\r\n", word.len()));
        let sent = format!("*{}\r\n{}", words.len(), parts.collect::<String>());
        self.0.write_all(sent.as_bytes()).await.expect("it is open");
        let mut bytes = Vec::new();
        loop {
            if let Some((reply, _)) = Reply::decode(&bytes) {
                return reply;
            }
            let read = self.0.read_buf(&mut bytes).await.expect("it is open");
            assert!(read > 0, "the connection has ended at {command}");
        }
    }
}

/// Sends all of them to both, which must answer alike.
async fn compare(network: &Network, at: &str, real: &Server, commands: &[&str]) {
    let mut in_memory = InMemory::at(network, at).await;
    let mut real = real.connect().resp3();
    for command in commands {
        let expected = real.run(command);
        let answer = in_memory.run(command).await;
        // Each server says this in other words.
        let refused = "WAIT cannot be used with replica instances";
        let both_refuse = [&answer, &expected]
            .iter()
            .all(|reply| format!("{reply:?}").contains(refused));
        let [answer, expected] = [answer, expected].map(|reply| Answers::default().shown(&reply));
        assert!(
            both_refuse || answer == expected,
            "{command}: {answer}, {expected}"
        );
    }
}

/// Answers with tokens and lives numbered as they come, and with times roughly.
#[derive(Default)]
struct Answers {
    tokens: HashMap<i64, usize>,
    lives: HashMap<i64, usize>,
}

impl Answers {
    fn shown(&mut self, reply: &Reply) -> String {
        const A_TOKEN: i64 = 1_000_000_000_000_000;
        match reply {
            Reply::Int(token) if *token > A_TOKEN => {
                let next = self.tokens.len();
                format!("token {}", self.tokens.entry(*token).or_insert(next))
            }
            Reply::Int(ms) if *ms > 1_000_000 => format!("{} min", (ms + 600_000) / 1_800_000 * 30),
            Reply::Array(all) => self.array(all),
            // Of several circles another one may be told: a hash has no order.
            Reply::Error(text) if text.starts_with(b"DEADLOCK") => "DEADLOCK".to_owned(),
            other => format!("{other:?}"),
        }
    }

    /// Nobody promises an order among holders of one lock that are wanted together.
    fn events(&mut self, events: &[Reply]) -> String {
        let wanted = |event: &Reply| match event.array() {
            [_, kind, key, ..] if *kind == "wanted" => Some(key.text()),
            _ => None,
        };
        let together =
            |one: &Reply, next: &Reply| wanted(one).is_some() && wanted(one) == wanted(next);
        let runs = events.chunk_by(together).map(|run| {
            let seq = run[0].array()[0].int();
            let shown = run.iter().map(|event| self.array(&event.array()[1..]));
            let mut shown: Vec<String> = shown.collect();
            shown.sort();
            format!("{seq}: {}", shown.join(" "))
        });
        let runs: Vec<String> = runs.collect();
        format!("[{}]", runs.join(", "))
    }

    fn array(&mut self, all: &[Reply]) -> String {
        let next = self.lives.len();
        let mut life = |life| format!("life {}", self.lives.entry(life).or_insert(next));
        let shown: Vec<String> = match all {
            [Reply::Int(told), Reply::Array(events)] => {
                let life = life(*told);
                vec![life, self.events(events)]
            }
            [Reply::Int(-1), position, seq, Reply::Int(told)] => {
                let life = life(*told);
                vec!["-1".to_owned(), self.shown(position), self.shown(seq), life]
            }
            all => all.iter().map(|one| self.shown(one)).collect(),
        };
        format!("[{}]", shown.join(" "))
    }
}

#[test]
fn the_server_in_memory_answers_as_a_real_one() {
    let server = Server::start();
    let mut commands = server.connect().resp3();
    for seed in 0..12 {
        commands.run("FLUSHALL");
        rlock_test::run(seed, async |network| {
            let _server = network.server("server:6379");
            let mut in_memory = InMemory::open(&network).await;
            let mut listeners = Vec::new();
            let mut random = Random::new(seed);
            let (mut real_answers, mut answers) = (Answers::default(), Answers::default());
            let mut history = Vec::new();
            for session in SESSIONS {
                listeners.push((
                    session,
                    server.connect().resp3(),
                    InMemory::open(&network).await,
                ));
            }
            for _ in 0..200 {
                for (session, real, in_memory) in &mut listeners {
                    let fetch = format!("RLOCK.EVENTS {session} GRACE 3600000");
                    let real = real_answers.shown(&real.run(&fetch));
                    let answer = answers.shown(&in_memory.run(&fetch).await);
                    history.push(format!("{fetch} -> {real}"));
                    assert_eq!(real, answer, "seed {seed}:\n{}", history.join("\n"));
                }
                let command = command(&mut random);
                let words: Vec<&str> = command.split_whitespace().collect();
                let real = real_answers.shown(&commands.cmd(&words));
                let answer = answers.shown(&in_memory.run(&command).await);
                history.push(format!("{command} -> {real}"));
                assert_eq!(real, answer, "seed {seed}:\n{}", history.join("\n"));
            }
            // The next history begins without sessions.
            for (session, real, _) in &mut listeners {
                real.run(format!("RLOCK.EVENTS {session} GRACE 0"));
            }
        });
        until("no session is left", || {
            server.info_number("rlock_sessions") == 0
        });
    }
}

#[test]
fn a_replica_in_memory_answers_as_a_real_one() {
    let server = Server::start();
    assert_eq!(server.run("REPLICAOF 127.0.0.1 1"), "OK");
    rlock_test::run(1, async |network| {
        let nowhere = network.server("primary:6379");
        nowhere.crash(true);
        let _replica = network.replica("replica:6379", &nowhere);
        let commands = [
            "RLOCK.ACQUIRE a one 1000",
            "RLOCK.ACQUIRE a one x",
            "RLOCK.MACQUIRE one 1000 1 a",
            "RLOCK.RELEASE a one",
            "RLOCK.MRELEASE one 1 a",
            "RLOCK.RENEW a one 1000",
            "RLOCK.MRENEW one 1000 1 a",
            "RLOCK.CANCEL a one",
            "RLOCK.BREAK a",
            "RLOCK.EVENTS s",
            "WAIT 0 1",
            "PING",
        ];
        compare(&network, "replica:6379", &server, &commands).await;
        let real = server.connect();
        let mut in_memory = InMemory::at(&network, "replica:6379").await;
        let (real, answer) = (real.resp3().run("HELLO"), in_memory.run("HELLO").await);
        for part in ["role", "mode", "proto"] {
            assert_eq!(answer.get(part), real.get(part), "{part}");
        }
    });
}

#[test]
fn a_primary_in_memory_without_replicas_waits_for_none_as_a_real_one() {
    let server = Server::start();
    rlock_test::run(1, async |network| {
        let _primary = network.server("primary:6379");
        let commands = [
            "RLOCK.ACQUIRE a one 3600000",
            "WAIT 0 1",
            "WAIT 1 1",
            "WAIT x 1",
            "WAIT 1 -1",
        ];
        for command in commands.iter().skip(1) {
            compare(&network, "primary:6379", &server, &[command]).await;
        }
    });
}

#[test]
fn a_sentinel_in_memory_answers_as_a_real_one() {
    let watched = Sentinels::start();
    let address = format!("127.0.0.1:{}", watched.primary().port());
    rlock_test::run(1, async |network| {
        let service = Sentinels::SERVICE;
        let sentinel = network.sentinel("sentinel:26379", service);
        sentinel.set_primary(&address);
        let named = format!("SENTINEL GET-MASTER-ADDR-BY-NAME {service}");
        let commands = [
            &*named,
            "SENTINEL get-master-addr-by-name nobody",
            "PING",
            "SUBSCRIBE +switch-master",
        ];
        compare(&network, "sentinel:26379", watched.sentinel(0), &commands).await;
    });
}

#[test]
fn a_node_in_memory_sends_clients_on_as_a_real_one() {
    let cluster = Cluster::start();
    let at = |server: &Server| format!("127.0.0.1:{}", server.port());
    let (first, second) = (at(&cluster.first), at(&cluster.second));
    rlock_test::run(1, async |network| {
        let in_memory = network.cluster(&[&first, &second]);
        for name in ["k", "l", "m", "n{k}", "{}x", "o{", "a{{k}}"] {
            let is_here = !cluster
                .first
                .run(format!("RLOCK.CANCEL {name} one"))
                .is_error();
            in_memory.move_slot(name, usize::from(!is_here));
            let keyslot = format!("CLUSTER KEYSLOT {name}");
            let commands = [
                &*keyslot,
                &format!("RLOCK.RELEASE {name} one"),
                &format!("RLOCK.RENEW {name} one 1000"),
                &format!("RLOCK.CANCEL {name} one"),
                &format!("RLOCK.MRENEW one 1000 1 {name}"),
                &format!("RLOCK.MRELEASE one 1 {name}"),
            ];
            for (address, server) in [(&first, &cluster.first), (&second, &cluster.second)] {
                compare(&network, address, server, &commands).await;
            }
        }
        compare(
            &network,
            &first,
            &cluster.first,
            &["RLOCK.MRELEASE one 2 k l"],
        )
        .await;
    });
}

/// A node, and the one in memory at the same address.
struct Twins<'a> {
    real: &'a Server,
    commands: (Conn, InMemory),
    /// Of each session.
    listeners: Vec<(Conn, InMemory)>,
}

/// Commands to both clusters, and both answers.
#[derive(Default)]
struct Compared {
    real: Answers,
    in_memory: Answers,
    said: Vec<String>,
}

impl Compared {
    fn both(&mut self, what: &str, real: &Reply, in_memory: &Reply) {
        let real = self.real.shown(real);
        self.said.push(format!("{what} -> {real}"));
        let answer = self.in_memory.shown(in_memory);
        assert_eq!(real, answer, "{}", self.said.join("\n"));
    }
}

impl<'a> Twins<'a> {
    async fn open(network: &Network, real: &'a Server) -> Self {
        let address = format!("127.0.0.1:{}", real.port());
        let mut listeners = Vec::new();
        for _ in SESSIONS {
            let in_memory = InMemory::at(network, &address).await;
            listeners.push((real.connect().resp3(), in_memory));
        }
        let in_memory = InMemory::at(network, &address).await;
        Self {
            real,
            commands: (real.connect().resp3(), in_memory),
            listeners,
        }
    }

    /// The answer of the real one.
    async fn run(&mut self, command: &str, compared: &mut Compared) -> Reply {
        let (real, in_memory) = &mut self.commands;
        let words: Vec<&str> = command.split_whitespace().collect();
        let (real, answer) = (real.cmd(&words), in_memory.run(command).await);
        let at = self.real.port();
        compared.both(&format!("{at}: {command}"), &real, &answer);
        real
    }

    /// The events of sessions. Both look at queues once a second by clocks of their own: the one
    /// with fewer events is given time.
    async fn listen(&mut self, compared: &mut Compared) {
        for (session, (real, in_memory)) in SESSIONS.iter().zip(&mut self.listeners) {
            let fetch = format!("RLOCK.EVENTS {session} GRACE 3600000");
            let (mut told, mut expected) = (Vec::new(), Vec::new());
            for _ in 0..2_000 {
                sleep(Duration::from_millis(1)).await;
                expected.extend(in_memory.run(&fetch).await.array().iter().cloned());
                until("the real one has told as much", || {
                    told.extend(real.run(&fetch).array().iter().cloned());
                    told.len() >= expected.len()
                });
                if told.len() == expected.len() {
                    break;
                }
            }
            let at = self.real.port();
            let (told, expected) = (Reply::Array(told), Reply::Array(expected));
            compared.both(&format!("{at}: {fetch}"), &told, &expected);
        }
    }
}

/// A command for locks of this slot.
fn command_at(random: &mut Random, tag: &str) -> String {
    loop {
        let command = command(random);
        let words = command.split_whitespace().map(|word| match word {
            "a" | "b" | "c" | "r" | "s" => format!("{{{tag}}}{word}"),
            word => word.to_owned(),
        });
        let words: Vec<String> = words.collect();
        // Where a word is missing the server does not look for keys.
        if words.len() > 2 || words[0] == "RLOCK.BREAK" {
            return words.join(" ");
        }
    }
}

/// Sends this number of commands to either node by chance, and follows redirects.
async fn traffic(
    count: usize,
    nodes: &mut [Twins<'_>; 2],
    random: &mut Random,
    tag: &str,
    compared: &mut Compared,
) {
    for _ in 0..count {
        let command = command_at(random, tag);
        let node = usize::from(random.below(4) == 0);
        let told = nodes[node].run(&command, compared).await;
        if told.is_error() && told.error().starts_with("ASK ") {
            nodes[1].run("ASKING", compared).await;
            nodes[1].run(&command, compared).await;
        }
        for node in &mut *nodes {
            node.listen(compared).await;
        }
    }
}

/// One key after the other, with any commands in between, at both nodes.
#[test]
fn a_slot_on_its_way_is_answered_for_in_memory_as_by_real_nodes() {
    let cluster = Cluster::start();
    let addresses = [&cluster.first, &cluster.second].map(|of| format!("127.0.0.1:{}", of.port()));
    for seed in 0..16 {
        let tag = format!("t{seed}");
        let slot = slot_of(&cluster.first, &tag);
        rlock_test::run(seed, async |network| {
            let in_memory = network.cluster(&[&addresses[0], &addresses[1]]);
            in_memory.move_slot(&tag, 0);
            // Tokens of the two shall differ: they begin with the clock.
            sleep(Duration::from_secs(1)).await;
            in_memory.node(1).crash(true);
            in_memory.node(1).restart();
            let first = Twins::open(&network, &cluster.first).await;
            let second = Twins::open(&network, &cluster.second).await;
            let nodes = &mut [first, second];
            let (mut random, mut compared) = (Random::new(seed), Compared::default());
            let (random, compared) = (&mut random, &mut compared);
            compared.said.push(format!("seed {seed}"));
            for node in &mut *nodes {
                node.listen(compared).await;
            }
            traffic(30, nodes, random, &tag, compared).await;
            cluster.open_slot_of(&tag);
            let resharding = in_memory.reshard(&tag, 1).expect("it is at the first");
            compared.said.push("the slot is on its way".to_owned());
            loop {
                traffic(6, nodes, random, &tag, compared).await;
                let left = resharding.keys_left();
                let ask = format!("CLUSTER GETKEYSINSLOT {slot} 1000");
                let mut there = cluster.first.run(ask).texts();
                there.sort();
                assert_eq!(there, left, "{}", compared.said.join("\n"));
                if left.is_empty() {
                    break;
                }
                let place = random.below(left.len() as u64);
                let key = &left[usize::try_from(place).expect("a small number")];
                cluster.migrate(key);
                assert!(resharding.migrate(key));
                compared.said.push(format!("{key} has gone ahead"));
                for node in &mut *nodes {
                    node.listen(compared).await;
                }
            }
            cluster.close_slot_of(&tag);
            assert!(resharding.tell(1) && resharding.tell(0));
            compared.said.push("the slot has moved".to_owned());
            traffic(20, nodes, random, &tag, compared).await;
            // The next begins without sessions.
            for (session, node) in SESSIONS
                .iter()
                .flat_map(|of| nodes.iter().map(move |n| (of, n)))
            {
                let mut conn = node.real.connect();
                conn.run(format!("RLOCK.EVENTS {session} GRACE 0"));
            }
        });
        for node in [&cluster.first, &cluster.second] {
            node.run("FLUSHALL");
            until("no session is left", || {
                node.info_number("rlock_sessions") == 0
            });
        }
    }
}
