//! Noise: any bytes at the port, any commands with any options, in transactions and scripts, on
//! keys of any type, while others rewrite those keys in every way. The server answers, whoever
//! holds or waits beside it is not disturbed, replicas end equal, and nothing is left.

use std::io::{Read as _, Write as _};
use std::net::TcpStream;
use std::thread;
use std::time::Duration;

use rlock_tests::{Conn, Pair, Random, Reply, Server, Version, under_valgrind, until};

/// Random commands of other clients.
pub(super) struct Noise(Random);

impl Noise {
    pub(super) fn new(seed: u64) -> Self {
        Self(Random::new(seed))
    }

    fn below(&mut self, bound: usize) -> usize {
        usize::try_from(self.0.below(bound as u64)).unwrap()
    }

    fn of<'a, T: ?Sized>(&mut self, table: &[&'a T]) -> &'a T {
        self.0.pick(table)
    }

    fn one_in(&mut self, count: usize) -> bool {
        self.below(count) == 0
    }

    // --- Bytes -----------------------------------------------------------------------------------

    /// Half commands, half anything: beginnings of real ones, lengths that lie, plain bytes.
    fn bytes(&mut self) -> Vec<u8> {
        let parts: [&[u8]; 12] = [
            b"*5\r\n$13\r\nRLOCK.ACQUIRE\r\n$1\r\nk\r\n$1\r\no\r\n$4\r\n1000\r\n$4\r\nREAD\r\n",
            b"*3\r\n$13\r\nRLOCK.RELEASE\r\n$1\r\nk\r\n$1\r\no\r\n",
            b"*4\r\n$14\r\nRLOCK.MACQUIRE\r\n$1\r\no\r\n$1\r\n9\r\n$2\r\n99\r\n",
            b"*2\r\n$12\r\nRLOCK.EVENTS\r\n$1\r\ns\r\n",
            b"*1\r\n$1000\r\n",
            b"*-7\r\n",
            b"$5\r\nab\r\n",
            b"\r\n\r\n",
            b"RLOCK.INFO\tk \"\\x00\"\r\n",
            b"*2\r\n$-1\r\n$3\r\nfoo\r\n",
            b"\xff\x00\x7f",
            b"*1048577\r\n",
        ];
        let mut bytes = Vec::new();
        for _ in 0..=self.below(6) {
            let part = self.of(&parts);
            let cut = self.below(40).min(part.len());
            let whole = !self.one_in(4);
            bytes.extend_from_slice(if whole { part } else { &part[..cut] });
        }
        bytes
    }

    /// At the server's port, on this number of connections.
    pub(super) fn at_the_port(&mut self, server: &Server, connections: usize) {
        for _ in 0..connections {
            let mut stream = TcpStream::connect(server.address()).expect("the server listens");
            stream
                .set_read_timeout(Some(Duration::from_millis(1)))
                .expect("a timeout");
            // It may close the connection at any byte.
            let _ = stream.write_all(&self.bytes());
            let _ = stream.read(&mut [0; 512]);
        }
    }

    // --- Commands --------------------------------------------------------------------------------

    fn key(&mut self) -> &'static str {
        self.of(&[
            "k0",
            "k0",
            "k1",
            "k1",
            "k2",
            "k3",
            "k3",
            "{k1}:alice:rwlock_timeout:1",
        ])
    }

    /// A command of ours: mostly well formed, with options in any number and order.
    fn ours(&mut self) -> Vec<Vec<u8>> {
        // `K` a key, `C` a limit, `O` an owner, `L` a lease, `N` a number of keys and the keys, `S`
        // a session.
        let (name, fixed, options) = [
            ("ACQUIRE", "KOL", "READ WRITE BLOCK QUEUE SESSION ONCE"),
            ("ACQUIRE", "KOL", "READ WRITE BLOCK QUEUE SESSION ONCE"),
            ("RELEASE", "KO", "READ WRITE TOKEN LEASE"),
            ("RENEW", "KOL", "READ WRITE TOKEN SESSION"),
            ("MACQUIRE", "OLN", "BLOCK QUEUE SESSION ONCE"),
            ("MRELEASE", "ON", ""),
            ("MRENEW", "OLN", "SESSION"),
            ("CANCEL", "KO", ""),
            ("BREAK", "K", ""),
            ("EVENTS", "S", "BLOCK GRACE"),
            ("INFO", "K", ""),
            ("LIST", "", "MATCH COUNT"),
            ("LIMIT", "KC", ""),
            ("GUARD", "KO", "READ WRITE TOKEN"),
        ][self.below(14)];
        let mut words = vec![format!("rlock.{name}").into_bytes()];
        for kind in fixed.bytes() {
            match kind {
                b'K' => words.push(self.key().into()),
                b'O' => words.push(self.owner()),
                b'L' => words.push(self.lease()),
                b'C' => words.push(self.of(&["0", "1", "3", "-1"]).into()),
                b'S' => words.push(self.of(&["s0", "s1", "s2"]).into()),
                _ => {
                    let count = 1 + self.below(3);
                    words.push(count.to_string().into());
                    words.extend((0..count).map(|_| self.key().into()));
                }
            }
        }
        self.options(options, &mut words);
        if words.get(1).is_some_and(|key| key == b"k3") && !self.one_in(8) {
            self.permits(name, &mut words);
        }
        if name == "GUARD" {
            words.push(b"CALL".into());
            words.extend(self.theirs());
        }
        if self.one_in(12) {
            let at = self.below(words.len());
            words[at] = self.odd();
        }
        words
    }

    /// One key is of permits, with a limit or without.
    fn permits(&mut self, name: &str, words: &mut Vec<Vec<u8>>) {
        if !["ACQUIRE", "RELEASE", "RENEW", "GUARD"].contains(&name) {
            return;
        }
        words.push(b"PERMITS".into());
        if name == "ACQUIRE" || name == "RELEASE" {
            words.push(self.of(&["1", "2", "3", "2147483647"]).into());
        }
        if name == "ACQUIRE" && !self.one_in(4) {
            words.extend([b"OF".into(), self.of(&["1", "3", "2147483647"]).into()]);
        }
    }

    /// Mostly those that go together: one lock is a read-write lock, and who queues has a session.
    fn options(&mut self, options: &str, words: &mut Vec<Vec<u8>>) {
        let mut options: Vec<&str> = options.split_ascii_whitespace().collect();
        if options.first() == Some(&"READ") && !self.one_in(8) {
            let modes: Vec<&str> = options.drain(..2).collect();
            if words[1] == b"k1" {
                words.push(self.of(&modes).into());
            }
        }
        while !options.is_empty() && !self.one_in(3) {
            let at = self.below(options.len());
            let option = options[at];
            if !self.one_in(8) {
                options.remove(at);
                options.retain(|other| option != "BLOCK" || *other != "QUEUE");
                options.retain(|other| option != "QUEUE" || *other != "BLOCK");
            }
            words.push(option.into());
            words.extend(self.value(option));
            if option == "QUEUE" && options.contains(&"SESSION") {
                options.retain(|other| *other != "SESSION");
                words.push(b"SESSION".into());
                words.extend(self.value("SESSION"));
            }
        }
    }

    fn owner(&mut self) -> Vec<u8> {
        let known: [&[u8]; 6] = [b"alice", b"bob", b"carol", b"dave", b"\xff\0", b"x:write"];
        self.of(&known).to_vec()
    }

    fn lease(&mut self) -> Vec<u8> {
        self.of(&["1", "5", "20", "30000", "9007199254740991"])
            .into()
    }

    /// The value after an option's word.
    fn value(&mut self, option: &str) -> Option<Vec<u8>> {
        let value = match option {
            "READ" | "WRITE" | "ONCE" => return None,
            "BLOCK" | "QUEUE" => self.of(&["0", "1", "7", "20", "60000"]),
            "SESSION" => self.of(&["s0", "s1", "s2"]),
            "LEASE" => return Some(self.lease()),
            "MATCH" => self.of(&["*", "k[0-1]", "[", "\\"]),
            _ => self.of(&["0", "1", "20", "9223372036854775807"]),
        };
        Some(value.into())
    }

    fn odd(&mut self) -> Vec<u8> {
        let odd: [&[u8]; 9] = [
            b"",
            b"\0",
            b"\xff\xfe",
            b"-1",
            b"fence",
            b"mode",
            b"9223372036854775808",
            b"\r\n-ERR not mine\r\n",
            b"ONCE",
        ];
        match self.below(10) {
            9 => vec![b'x'; 1 << 16],
            at => odd[at].to_vec(),
        }
    }

    /// A command of the server that makes something else of the keys, and knows nothing of locks.
    fn theirs(&mut self) -> Vec<Vec<u8>> {
        let command = self.of(&[
            "SET K v",
            "SETEX K 1 v",
            "GETDEL K",
            "DEL k0 k1 k2",
            "DEL k0 k1 k2",
            "DEL k0 k1 k2",
            "DEL K",
            "UNLINK K",
            "RENAME K J",
            "RENAMENX K J",
            "COPY K J REPLACE",
            "COPY K K DB 2 REPLACE",
            "MOVE K 2",
            "SWAPDB 1 2",
            "FLUSHDB ASYNC",
            "EXPIRE K -1",
            "PEXPIRE K 5",
            "PEXPIRE K 30000",
            "PEXPIREAT K 1",
            "PERSIST K",
            "HSET K alice 1",
            "HSET K alice much fence 7",
            "HSET K alice 2147483647",
            "HSET K mode read alice 1",
            "HSET K mode write alice:write 1",
            "HSET K mode odd",
            "HSET K fence t9223372036854775807",
            "HDEL K alice",
            "HDEL K fence mode",
            "HDEL K mode",
            "HINCRBY K alice 1",
            "HINCRBY K alice -1",
            "HINCRBY K bob:write 1",
            "HPEXPIRE K 5 FIELDS 1 alice",
            "HPEXPIRE K 5 FIELDS 2 mode fence",
            "HPEXPIRE K 0 FIELDS 1 bob",
            "RPUSH K alice",
            "SADD K alice",
            "ZADD K 1 alice",
            "XADD K * alice 1",
            "SORT K BY nosort STORE J",
            "SET {k1}:alice:rwlock_timeout:1 1 PX 20",
            "SET {k1}:alice:rwlock_timeout:2 1",
            "RPUSH {k1}:bob:rwlock_timeout:1 1",
            "EVAL GIANT 1 K",
        ]);
        let moves = command.starts_with("MOVE") || command.contains(" DB ");
        if moves && !Version::at_hand().replicates_moves() {
            return vec![b"DEL".to_vec(), self.key().into()];
        }
        let giant = "for i = 1, 300 do redis.call('HSET', KEYS[1], 'owner' .. i, i) end";
        let words = command.split(' ').map(|word| match word {
            "K" | "J" => self.key().into(),
            "GIANT" => giant.into(),
            _ => word.into(),
        });
        words.collect()
    }

    fn any(&mut self) -> Vec<Vec<u8>> {
        if self.one_in(5) {
            self.theirs()
        } else {
            self.ours()
        }
    }
}

/// One who makes noise, in the databases 1 and 2.
struct Client<'s> {
    server: &'s Server,
    noise: Noise,
    conn: Conn,
    /// The session connection of a session that all may name.
    life: (String, Conn),
    /// Connections whose waits may never end.
    left: Vec<Conn>,
}

impl<'s> Client<'s> {
    fn new(server: &'s Server, seed: u64) -> Self {
        let mut noise = Noise::new(seed);
        let conn = Self::connect(server, &mut noise);
        let listen = format!("RLOCK.EVENTS s{} GRACE 20", noise.below(3));
        let life = (listen, server.connect());
        Self {
            server,
            noise,
            conn,
            life,
            left: Vec::new(),
        }
    }

    fn connect(server: &Server, noise: &mut Noise) -> Conn {
        let mut conn = server.connect();
        if noise.one_in(3) {
            conn = conn.resp3();
        }
        conn.run(noise.of(&["SELECT 1", "SELECT 2"]));
        conn
    }

    fn step(&mut self, also: &[&str]) {
        match self.noise.below(20) {
            0 => self.in_a_transaction(),
            1 => self.in_a_script(),
            2 => self.looks(),
            3 => self.restores(),
            4 if !also.is_empty() => {
                self.conn.run(self.noise.of(also));
            }
            5 | 6 => {
                if self.noise.one_in(20) {
                    self.life.1 = self.server.connect();
                }
                self.life.1.run(&self.life.0);
            }
            7 => {
                let watch = self.noise.of(&["WATCH k0", "UNWATCH"]);
                self.conn.run(watch);
            }
            _ => self.sends_one(),
        }
    }

    /// One command; where it goes on waiting the connection is left alone, and closed at some time.
    fn sends_one(&mut self) {
        let command = self.noise.any();
        self.conn.send_cmd(&command);
        let patience = Duration::from_millis(25);
        if self.conn.try_read(patience).is_err() {
            let next = Self::connect(self.server, &mut self.noise);
            self.left.push(std::mem::replace(&mut self.conn, next));
        }
        if self.left.len() > 8 {
            let at = self.noise.below(self.left.len());
            self.left.swap_remove(at).close();
        }
    }

    fn in_a_transaction(&mut self) {
        self.conn.run("MULTI");
        for _ in 0..=self.noise.below(4) {
            // A command that is refused before it is queued spoils the transaction; that is noise
            // as well.
            let command = self.noise.any();
            self.conn.cmd(&command);
        }
        self.conn.run("EXEC");
    }

    fn in_a_script(&mut self) {
        let script = "local reply = redis.pcall(unpack(ARGV))
            if type(reply) == 'table' and reply.err then return 0 end
            return 1";
        let mut words: Vec<Vec<u8>> = ["EVAL", script, "0"].map(Into::into).to_vec();
        words.extend(self.noise.any());
        self.conn.cmd(&words);
    }

    /// A key as it was some time ago, or as it was elsewhere.
    fn restores(&mut self) {
        let (from, to) = (self.noise.key(), self.noise.key());
        if let Reply::Bulk(dump) = self.conn.run(format!("DUMP {from}")) {
            let ttl = self.noise.of(&["0", "5", "30000"]);
            let words = [b"RESTORE", to.as_bytes(), ttl.as_bytes(), &dump, b"REPLACE"];
            self.conn.cmd(&words);
        }
    }

    /// Commands that only read change nothing, and show a possible state.
    fn looks(&mut self) {
        let key = self.noise.key();
        let kept = [format!("DUMP {key}"), format!("PEXPIRETIME {key}")];
        let look = [
            format!("HGETALL {key}"),
            format!("RLOCK.INFO {key}"),
            "RLOCK.LIST".into(),
            "RLOCK.SESSIONS".into(),
            "RLOCK.LOG COUNT 1000".into(),
        ];
        let transaction = [&["MULTI".into()][..], &kept, &look, &kept, &["EXEC".into()]];
        let told = self.conn.pipeline(&transaction.concat());
        // If a watched key has changed, the transaction was not run.
        let Some(Reply::Array(told)) = told.last() else {
            return;
        };
        assert_eq!(told[..2], told[7..], "{key} before and after a look");
        is_possible(&told[2], &told[3]);
    }
}

/// Whether INFO's answer about a hash is possible.
fn is_possible(hash: &Reply, info: &Reply) {
    if hash.is_error() {
        assert!(info.error().starts_with("WRONGTYPE "), "{info:?}");
        return;
    }
    assert!(info.get("ttl-ms").int() >= -1, "{info:?}");
    let queue = info.get("queue").array();
    let waiters = i64::try_from(queue.len()).unwrap();
    assert_eq!(info.get("waiters"), &waiters, "{info:?}");
    for waiter in queue {
        let shown = (waiter.get("waited-ms").int(), waiter.get("left-ms").int());
        assert!(shown.0 >= 0 && shown.1 >= -1, "{info:?}");
    }
    let fields = hash.keys();
    let is_plain = !fields.iter().any(|field| field == "mode");
    let mut owners = fields.iter().filter(|field| *field != "fence");
    if is_plain {
        let owner = info.get("owner");
        let is_nobody = owner == &Reply::Null;
        let is_there = !is_nobody && owners.any(|field| owner.text() == *field);
        let is_free = is_nobody && owners.next().is_none();
        assert!(is_there || is_free, "{hash:?}: {info:?}");
        assert!(!is_free || info.get("count") == &0, "{hash:?}: {info:?}");
    } else if info.keys().iter().any(|key| key == "holders") {
        for holder in info.get("holders").array() {
            let owner = holder.get("owner").text();
            let as_writer = format!("{owner}:write");
            let is_there = fields.iter().any(|of| *of == owner || *of == as_writer);
            let ttl_ms = holder.get("ttl-ms");
            // Of permits, a field that is no hold has no end.
            let is_odd = ttl_ms == &Reply::Null && holder.get("permits") == &Reply::Null;
            assert!(
                is_there && (is_odd || ttl_ms.int() >= -1),
                "{hash:?}: {info:?}"
            );
        }
    }
}

/// This number of clients make noise at once, with this number of steps each; `also` are commands
/// of their own.
pub(super) fn noise(server: &Server, clients: u64, steps: usize, seed: u64, also: &[&str]) {
    thread::scope(|scope| {
        for client in 0..clients {
            let seed = seed.wrapping_mul(31).wrapping_add(client);
            scope.spawn(move || {
                let mut client = Client::new(server, seed);
                for _ in 0..steps {
                    client.step(also);
                }
            });
        }
        Noise::new(seed).at_the_port(server, steps / 10);
    });
    assert_eq!(server.run("PING"), "PONG", "with seed {seed}");
    let log = server.log();
    assert!(!log.contains("panicked at"), "with seed {seed}: {log}");
}

fn steps() -> usize {
    if under_valgrind() { 100 } else { 1500 }
}

/// Holders and waiters in database 0 while the others are loud.
struct Quiet {
    alice: Conn,
    life: Conn,
    line: Vec<(&'static str, Conn)>,
    before: Vec<Reply>,
}

impl Quiet {
    fn begin(server: &Server) -> Self {
        let mut alice = server.connect();
        for _ in 0..2 {
            alice.run("RLOCK.ACQUIRE quiet alice 600000").held();
        }
        alice.run("RLOCK.ACQUIRE shared r1 600000 READ").held();
        alice.run("RLOCK.ACQUIRE shared r2 600000 READ").held();
        let mut life = server.session_connection("quiet");
        life.run("RLOCK.ACQUIRE kept alice 600000 SESSION quiet")
            .held();
        let mut line = Vec::new();
        for owner in ["bob", "carol", "dave"] {
            line.push((owner, server.wait_in_queue("quiet", owner)));
            life.queue("kept", owner, "quiet");
        }
        let writes = "RLOCK.ACQUIRE shared w 30000 WRITE BLOCK 0";
        line.push(("w", server.blocked_in(writes)));
        let reads = "RLOCK.ACQUIRE shared r3 30000 READ BLOCK 0";
        line.push(("r3", server.blocked_in(reads)));
        let before = Self::shown(&mut alice);
        Self {
            alice,
            life,
            line,
            before,
        }
    }

    /// All of it that does not change with time.
    fn shown(conn: &mut Conn) -> Vec<Reply> {
        let hashes = ["quiet", "shared", "kept"].map(|key| format!("HGETALL {key}"));
        let mut shown = conn.pipeline(&hashes);
        for key in ["quiet", "shared", "kept"] {
            let info = conn.run(format!("RLOCK.INFO {key}"));
            let parts = ["owner", "count", "token", "waiters"].map(|part| info.get(part).clone());
            shown.extend(parts);
            let queue = info.get("queue").array().iter();
            shown.extend(queue.map(|waiter| waiter.get("owner").clone()));
        }
        shown
    }

    fn goes_on(&mut self) {
        assert_eq!(Self::shown(&mut self.alice), self.before);
        for (owner, conn) in &mut self.line {
            assert_eq!(conn.read_now(), None, "{owner} still waits");
        }
    }

    /// Everybody gets their turn, in order, and then nothing is left.
    fn ends(mut self) {
        let alice = &mut self.alice;
        assert_eq!(alice.let_go("quiet", "alice"), 1);
        assert_eq!(alice.let_go("quiet", "alice"), 0);
        let mut last = 0;
        for (owner, conn) in &mut self.line[..3] {
            let (count, token) = conn.read().held();
            assert!(count == 1 && token > last, "{owner}: {count}, {token}");
            last = token;
            assert_eq!(alice.let_go("quiet", owner), 0);
        }
        for reader in ["r1", "r2"] {
            alice.run(format!("RLOCK.RELEASE shared {reader} READ"));
        }
        self.line[3].1.read().held();
        self.line[4].1.expect_nothing_yet();
        assert_eq!(alice.run("RLOCK.RELEASE shared w WRITE"), 0);
        self.line[4].1.read().held();
        assert_eq!(alice.run("RLOCK.RELEASE shared r3 READ"), 0);
        let mut holder = "alice";
        for next in ["bob", "carol", "dave"] {
            assert_eq!(alice.let_go("kept", holder), 0);
            let events = self.life.run("RLOCK.EVENTS quiet BLOCK 0").events();
            assert_eq!(events[0].0, format!("granted kept {next}"));
            holder = next;
        }
        assert_eq!(alice.let_go("kept", holder), 0);
        self.life.close();
    }
}

fn nobody_is_left(server: &Server) {
    until("nobody waits, and no session is left", || {
        server.info_number("rlock_waiters") == 0
            && server.info_number("rlock_sessions") == 0
            && server.info_number("rlock_session_holds") == 0
            && server.info_number("blocked_clients") == 0
    });
}

#[test]
fn smoke_noise_disturbs_no_holder_and_no_waiter() {
    let server = Server::start();
    let seed = u64::from(server.process_id());
    let mut quiet = Quiet::begin(&server);
    noise(&server, 4, steps(), seed, &[]);
    quiet.goes_on();
    quiet.ends();
    nobody_is_left(&server);
    assert_eq!(server.run("FLUSHALL"), "OK");
}

/// In the end the keyspace is the same on both, after all the noise.
#[test]
fn a_replica_equals_its_primary_after_noise() {
    for plain in [true, false] {
        let pair = if plain {
            Pair::with_plain_replica()
        } else {
            Pair::start()
        };
        let seed = u64::from(pair.primary.process_id());
        noise(&pair.primary, 4, steps(), seed, &["FLUSHALL ASYNC"]);
        nobody_is_left(&pair.primary);
        let mut conn = pair.primary.connect();
        // Beside the leftovers of the noise, these can be compared.
        conn.run("SELECT 1");
        conn.run("HSET left mode read alice 2");
        conn.run("RLOCK.ACQUIRE left2 alice 600000").held();
        until("the replica equals its primary", || {
            pair.settle();
            contents(&pair.primary) == contents(&pair.replica)
        });
        assert!(!contents(&pair.primary).is_empty(), "seed {seed}");
    }
}

/// All keys with their expiries, and a digest of their contents.
fn contents(server: &Server) -> Vec<(String, i64)> {
    let mut conn = server.connect();
    let mut contents = vec![(conn.run("DEBUG DIGEST").text(), 0)];
    for database in 0..3 {
        conn.run(format!("SELECT {database}"));
        for name in conn.run("KEYS *").array() {
            // Noise leaves names with spaces in them, and worse.
            let Reply::Bulk(name) = name else {
                panic!("{name:?}")
            };
            let end = conn.cmd(&[b"PEXPIRETIME", &name[..]]).int();
            contents.push((format!("{database} {}", name.escape_ascii()), end));
        }
    }
    contents.sort();
    contents
}

#[test]
fn noise_leaves_no_memory_behind() {
    let server = Server::start();
    let seed = u64::from(server.process_id());
    let round = |round| {
        let seed = seed.wrapping_add(round);
        noise(&server, 4, steps() / 3, seed, &["FLUSHALL"]);
        nobody_is_left(&server);
        server.run("FLUSHALL SYNC");
        server.run("SCRIPT FLUSH SYNC");
        until("all have gone", || {
            server.info_number("connected_clients") <= 1
        });
        server.run("MEMORY PURGE");
        server.info_number("used_memory")
    };
    // First the memory that is allocated once and kept, and the difference between rounds.
    round(0);
    let before = round(1);
    let after = (2..5).map(round).min().unwrap();
    assert!(
        after - before < 200_000,
        "{} bytes more, seed {seed}",
        after - before
    );
}
