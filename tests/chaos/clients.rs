//! The clients, in processes of their own, which can be stopped and killed. They write their
//! requests and answers down line by line as they happen; `history.rs` has the format.

use std::fmt::Display;
use std::io::{BufRead, BufReader, Write as _};
use std::net::SocketAddr;
use std::process::{Child, ChildStdout, Command, Stdio};
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Mutex};
use std::thread;

use rustix::process::{Pid, Signal, kill_process};

use crate::history::now;
use crate::random::Random;

mod commands; // what is locked how, as commands
mod guards; // the client crate
mod many_holds; // thousands of holds that end at once
mod packets; // what ends in the packet in which it is asked for
mod pipelined; // sessions whose commands go in packets
mod plain; // connections that wait in the server
mod sessions; // many waits on one connection
mod store; // an application that trusts its lock, and two that do not

pub(crate) use commands::{LOCKS, LOCKS_OF_A_SLOT, LONGEST_LEASE, Locks};
pub(crate) use many_holds::locks_looked_at;
pub(crate) use packets::LOCKS_IN_PACKETS;

/// The work of a process.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Role {
    Plain,
    Sessions,
    Guards,
    /// Has thousands of holds, and dies: see [`many_holds`].
    ManyHolds,
    /// Waits for them.
    ManyWaits,
    /// See [`packets`].
    Packets,
    /// Adds to a set: see [`store`].
    AddsTrusting,
    AddsWithToken,
    AddsGuarded,
}

const ROLES: [(Role, &str); 9] = [
    (Role::Plain, "plain"),
    (Role::Sessions, "sessions"),
    (Role::Guards, "guards"),
    (Role::ManyHolds, "many-holds"),
    (Role::ManyWaits, "many-waits"),
    (Role::Packets, "packets"),
    (Role::AddsTrusting, "adds-trusting"),
    (Role::AddsWithToken, "adds-with-token"),
    (Role::AddsGuarded, "adds-guarded"),
];

impl Role {
    pub(crate) fn word(self) -> &'static str {
        ROLES
            .iter()
            .find(|(role, _)| *role == self)
            .expect("all are named")
            .1
    }
}

/// A process, from the outside. It is killed with the value.
#[derive(Debug)]
pub(crate) struct Process {
    pub(crate) name: String,
    pub(crate) role: Role,
    child: Child,
    reader: Option<thread::JoinHandle<()>>,
}

impl Process {
    /// Starts it; its lines go to `record`. It connects to the first address; those behind it are
    /// sentinels, which the client crate asks instead.
    pub(crate) fn start(
        name: String,
        role: Role,
        addresses: &[SocketAddr],
        seed: u64,
        locks: Locks,
        record: &Arc<Mutex<Vec<String>>>,
    ) -> Self {
        let locks = if locks == LOCKS_OF_A_SLOT {
            "slot"
        } else {
            "any"
        };
        let addresses: Vec<_> = addresses.iter().map(ToString::to_string).collect();
        let addresses = addresses.join(",");
        let mut child = Command::new(std::env::current_exe().expect("this program"))
            .args(["--exact", "clients::a_process", "--ignored", "--nocapture"])
            .env(
                "RLOCK_CHAOS_PROCESS",
                format!("{name} {} {addresses} {seed} {locks}", role.word()),
            )
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .spawn()
            .expect("this program runs");
        let said = child.stdout.take().expect("a pipe");
        let record = Arc::clone(record);
        let reader = thread::spawn(move || read(said, &record));
        Self {
            name,
            role,
            child,
            reader: Some(reader),
        }
    }

    pub(crate) fn signal(&self, signal: Signal) {
        let id = i32::try_from(self.child.id()).ok().and_then(Pid::from_raw);
        kill_process(id.expect("a process's number"), signal).expect("our child");
    }

    /// Tells it to finish its present step and end.
    pub(crate) fn tell_to_stop(&mut self) {
        // It may have died.
        let _ = self
            .child
            .stdin
            .take()
            .expect("not yet told")
            .write_all(b"stop\n");
    }

    pub(crate) fn has_ended(&mut self) -> bool {
        self.child.try_wait().expect("our child").is_some()
    }

    /// Kills it, and waits until all that it has said is recorded.
    pub(crate) fn kill(&mut self) {
        // It may have ended by itself.
        let _ = self.child.kill();
        let _ = self.child.wait();
        if let Some(reader) = self.reader.take() {
            reader.join().expect("it only reads");
        }
    }
}

impl Drop for Process {
    fn drop(&mut self) {
        self.kill();
    }
}

/// Records a process's lines. The last one of a process that was killed may be a part of one.
fn read(said: ChildStdout, record: &Mutex<Vec<String>>) {
    let mut said = BufReader::new(said);
    let mut line = String::new();
    while said.read_line(&mut line).is_ok_and(|count| count > 0) {
        if let Some(entry) = line
            .strip_prefix("| ")
            .and_then(|line| line.strip_suffix('\n'))
        {
            record.lock().expect("a list").push(entry.to_owned());
        }
        line.clear();
    }
}

#[test]
#[ignore = "not a test: the process that the storm starts"]
fn a_process() {
    let Ok(orders) = std::env::var("RLOCK_CHAOS_PROCESS") else {
        return;
    };
    let orders: Vec<_> = orders.split(' ').collect();
    let [name, role, addresses, seed, locks] = orders[..] else {
        panic!("{orders:?}");
    };
    let role = ROLES
        .iter()
        .find(|(_, word)| *word == role)
        .expect("a role")
        .0;
    let mut addresses = addresses
        .split(',')
        .map(|address| address.parse().expect("an address"));
    let life = Life {
        name: name.to_owned(),
        address: addresses.next().expect("a server's"),
        sentinels: addresses.collect(),
        locks: if locks == "slot" {
            LOCKS_OF_A_SLOT
        } else {
            LOCKS
        },
        is_over: Arc::default(),
        last: AtomicU64::new(0),
    };
    let life = Arc::new(life);
    let listening = Arc::clone(&life);
    thread::spawn(move || {
        let mut word = String::new();
        let heard = std::io::stdin().read_line(&mut word).unwrap_or(0);
        if heard == 0 {
            // The parent process has ended, so this one ends too.
            std::process::exit(1);
        }
        listening.is_over.store(true, Ordering::SeqCst);
    });
    // The test program has begun a line of its own.
    println!();
    let mut random = Random::new(seed.parse().expect("a seed"));
    match role {
        Role::Plain => threads(&life, &mut random, 6, plain::run),
        Role::Sessions => threads(&life, &mut random, 2, sessions::run),
        Role::Guards => guards::run(&life, &mut random),
        Role::ManyHolds => threads(&life, &mut random, 1, many_holds::dies),
        Role::ManyWaits => threads(&life, &mut random, 2, many_holds::lives),
        Role::Packets => threads(&life, &mut random, 2, packets::run),
        Role::AddsTrusting => store::run(&life, store::Check::None),
        Role::AddsWithToken => store::run(&life, store::Check::Token),
        Role::AddsGuarded => store::run(&life, store::Check::Guarded),
    }
}

fn threads(life: &Arc<Life>, random: &mut Random, count: usize, run: fn(&Life, Random)) {
    thread::scope(|scope| {
        for _ in 0..count {
            let random = random.split();
            scope.spawn(move || run(life, random));
        }
    });
}

/// The state that the threads of a process share.
#[derive(Debug)]
struct Life {
    name: String,
    address: SocketAddr,
    sentinels: Vec<SocketAddr>,
    locks: Locks,
    is_over: Arc<AtomicBool>,
    last: AtomicU64,
}

impl Life {
    fn goes_on(&self) -> bool {
        !self.is_over.load(Ordering::SeqCst)
    }

    fn number(&self) -> u64 {
        self.last.fetch_add(1, Ordering::Relaxed) + 1
    }

    /// A part of the process, which ends before it.
    fn session(&self) -> Self {
        Self {
            name: format!("{}_{}", self.name, self.number()),
            address: self.address,
            sentinels: Vec::new(),
            locks: self.locks,
            is_over: Arc::clone(&self.is_over),
            last: AtomicU64::new(0),
        }
    }

    /// An owner that was not used before.
    fn owner(&self) -> String {
        format!("{}-{}", self.name, self.number())
    }

    /// Writes a request down, and returns the number under which its reply is written.
    fn ask(&self, what: impl Display) -> String {
        let id = format!("{}.{}", self.name, self.number());
        println!("| ask {id} {} {what}", now());
        id
    }

    /// Writes down that it ends whatever holds of a lock there are.
    fn breaks(&self, lock: &str) -> String {
        let id = format!("{}.{}", self.name, self.number());
        println!("| breaks {id} {} {lock}", now());
        id
    }

    fn closes(&self) {
        println!("| closed {} {}", now(), self.name);
    }

    /// Something that other processes wait for, and that is no part of a history.
    fn says(&self, word: &str) {
        println!("| says {} {} {word}", now(), self.name);
    }
}

fn told(id: &str, what: impl Display) {
    println!("| told {id} {} {what}", now());
}

fn queued(id: &str) {
    println!("| queued {id} {}", now());
}

/// An event has said that somebody wants what this owner holds.
fn wanted(lock: &str, owner: &str) {
    println!("| wanted {} {lock} {owner}", now());
}

/// A guard has said that it holds.
fn sure(at: u64, lock: &str, owner: impl Display, token: u64) {
    println!("| sure {at} {lock} {owner} {token}");
}
