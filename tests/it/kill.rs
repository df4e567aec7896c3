//! A server that is killed in the midst of traffic: acknowledged holds are there afterwards, and
//! released ones do not come again.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::atomic::{AtomicUsize, Ordering};
use std::thread;
use std::time::{Duration, Instant};

use rlock_tests::{Conn, Reply, Server, until};

const CLIENTS: usize = 6;

/// The holds of one owner: for each of its fields, in the hash of a lock, the hold count.
type Holds = BTreeMap<(String, String), i64>;

/// One command of a client, and its holds afterwards.
struct Step {
    after: Holds,
    /// When it was told so; never, if the server died before.
    told: Option<Instant>,
}

struct Client {
    owner: String,
    conn: Conn,
    steps: Vec<Step>,
    /// The largest token it was told.
    largest: i64,
}

impl Client {
    fn new(server: &Server, number: usize) -> Self {
        let owner = format!("owner{number}");
        let mut conn = server.connect();
        let own = format!("own{number}");
        let hold = format!("RLOCK.ACQUIRE {own} {owner} 600000");
        let largest = conn.run(hold).held().1;
        let after = Holds::from([((own, owner.clone()), 1)]);
        let told = Some(Instant::now());
        let steps = vec![Step { after, told }];
        Self {
            owner,
            conn,
            steps,
            largest,
        }
    }

    /// Takes locks, waiting for them, enters again, and gives them back, until the server dies.
    fn work(&mut self, number: usize, done: &AtomicUsize) {
        let owner = self.owner.clone();
        for round in number.. {
            let (names, field, mode) = match round % 4 {
                0 => (vec!["x", "y"], owner.clone(), ""),
                1 => (vec!["r"], owner.clone(), " READ"),
                2 => (vec!["r"], format!("{owner}:write"), " WRITE"),
                _ => (vec!["k"], owner.clone(), ""),
            };
            let (acquire, release) = if let [name] = names[..] {
                let acquire = format!("RLOCK.ACQUIRE {name} {owner} 600000{mode} BLOCK 0");
                (acquire, format!("RLOCK.RELEASE {name} {owner}{mode}"))
            } else {
                let all = format!("{} {}", names.len(), names.join(" "));
                let acquire = format!("RLOCK.MACQUIRE {owner} 600000 {all} BLOCK 0");
                (acquire, format!("RLOCK.MRELEASE {owner} {all}"))
            };
            let fields: Vec<_> = names
                .iter()
                .map(|name| ((*name).to_owned(), field.clone()))
                .collect();
            for (command, change) in [(&acquire, 1), (&acquire, 1), (&release, -1), (&release, -1)]
            {
                if self.step(command, &fields, change).is_err() {
                    return;
                }
                done.fetch_add(1, Ordering::Relaxed);
            }
        }
    }

    fn step(
        &mut self,
        command: &str,
        fields: &[(String, String)],
        change: i64,
    ) -> std::io::Result<()> {
        let mut after = self.steps.last().expect("the first").after.clone();
        for field in fields {
            *after.entry(field.clone()).or_default() += change;
        }
        after.retain(|_, count| *count > 0);
        self.steps.push(Step { after, told: None });
        let told = self.conn.try_run(command)?;
        if change > 0 {
            self.largest = self.largest.max(told.held().1);
        } else {
            assert!(told.int() >= 0, "{command}: {told:?}");
        }
        self.steps.last_mut().expect("it").told = Some(Instant::now());
        Ok(())
    }

    /// All fields it ever had.
    fn fields(&self) -> BTreeSet<&(String, String)> {
        let steps = self.steps.iter();
        steps.flat_map(|step| step.after.keys()).collect()
    }

    /// The server's state of it is that after one of its commands, and not before the last one that
    /// was acknowledged until `deadline`.
    fn check(&self, server: &Server, deadline: Instant) {
        let mut conn = server.connect();
        let mut found = Holds::new();
        for field in self.fields() {
            let count = conn.cmd(&["HGET", &field.0, &field.1]);
            if count != Reply::Null {
                let value = count.text();
                let (count, _token) = value.split_once(':').unwrap_or((&value, ""));
                let count = count.parse().expect("a count");
                found.insert(field.clone(), count);
            }
        }
        let is_acknowledged = |step: &Step| step.told.is_some_and(|told| told <= deadline);
        let acknowledged = self.steps.iter().rposition(is_acknowledged);
        let acknowledged = acknowledged.expect("its own lock");
        let possible = &self.steps[acknowledged..];
        assert!(
            possible.iter().any(|step| step.after == found),
            "{}: {found:?} is none of the last {} states, from {:?} to {:?}",
            self.owner,
            possible.len(),
            possible.first().map(|step| &step.after),
            possible.last().map(|step| &step.after),
        );
    }
}

/// Traffic of all clients. In its midst the server is killed, after a number of commands and a
/// time. Returns the time until which it surely lived.
fn killed_in_the_midst(
    server: &mut Server,
    commands: usize,
    after: Duration,
) -> (Vec<Client>, Instant) {
    let begun = Instant::now();
    let mut clients: Vec<_> = (0..CLIENTS)
        .map(|number| Client::new(server, number))
        .collect();
    let done = AtomicUsize::new(0);
    let mut alive = begun;
    thread::scope(|scope| {
        for (number, client) in clients.iter_mut().enumerate() {
            let done = &done;
            scope.spawn(move || client.work(number, done));
        }
        until("there is traffic", || {
            done.load(Ordering::Relaxed) >= commands && begun.elapsed() >= after
        });
        alive = Instant::now();
        server.kill();
    });
    let pending = clients.iter().filter(|client| {
        let last = client.steps.last().expect("the first");
        last.told.is_none()
    });
    assert!(pending.count() > 0, "some of them were at it");
    (clients, alive)
}

/// The locks work as before: each can be taken again, with a token larger than any.
fn all_goes_on(server: &Server, clients: &[Client]) {
    let largest = clients.iter().map(|client| client.largest).max();
    for client in clients {
        let mut conn = server.connect();
        for (name, field) in client.fields() {
            let mode = match (name.as_str(), field.ends_with(":write")) {
                ("r", true) => " WRITE",
                ("r", false) => " READ",
                _ => "",
            };
            let release = format!("RLOCK.RELEASE {name} {}{mode}", client.owner);
            while conn.run(&release) != Reply::Null {}
        }
    }
    assert_eq!(server.run("DBSIZE"), 0);
    for name in ["k", "x", "y"] {
        assert!(Some(server.connect().take(name, "next")) > largest);
    }
}

#[test]
fn with_every_write_on_disk_a_kill_loses_nothing_that_was_acknowledged() {
    let how = Server::builder()
        .config("appendonly yes")
        .config("appendfsync always");
    for commands in [150, 400, 700] {
        let mut server = how.clone().start();
        let (clients, _) = killed_in_the_midst(&mut server, commands, Duration::ZERO);
        server.restart();
        for client in &clients {
            client.check(&server, Instant::now());
        }
        all_goes_on(&server, &clients);
    }
}

#[test]
fn a_server_without_the_module_finds_the_same_after_a_kill() {
    let mut server = Server::builder()
        .config("appendonly yes")
        .config("appendfsync always")
        .start();
    let (clients, _) = killed_in_the_midst(&mut server, 300, Duration::ZERO);
    server.restart_without_module();
    for client in &clients {
        client.check(&server, Instant::now());
    }
}

/// Only the end of the history is lost, the same for all, and not more than documented: a second,
/// or two if the disk is slow.
#[test]
fn with_everysec_a_kill_loses_only_the_end_of_the_history() {
    let mut server = Server::builder()
        .config("appendonly yes")
        .config("appendfsync everysec")
        .start();
    let so_long = Duration::from_millis(3500);
    let (clients, alive) = killed_in_the_midst(&mut server, 700, so_long);
    let lasting = alive.checked_sub(Duration::from_secs(3));
    let lasting = lasting.expect("the machine runs for longer");
    server.restart();
    for client in &clients {
        client.check(&server, lasting);
    }
    all_goes_on(&server, &clients);
}
