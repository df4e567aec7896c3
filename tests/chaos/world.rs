//! One storm's servers, networks and processes, and the record of all that they say.

use std::net::SocketAddr;
use std::sync::{Arc, Mutex};
use std::thread;
use std::time::{Duration, Instant};

use rlock_tests::{Builder, Cluster, Conn, Pair, Proxy, Server, Trio, eventually, until};

use crate::clients::{
    LOCKS, LOCKS_IN_PACKETS, LOCKS_OF_A_SLOT, LONGEST_LEASE, Locks, Process, Role, locks_looked_at,
};
use crate::faults::Menu;
use crate::history::{Time, is_part_of, now};
use crate::random::Random;
use crate::watch::Watch;

/// A process that clients run in, and the network between it and the server.
#[derive(Debug)]
pub(crate) struct Place {
    pub(crate) process: Process,
    pub(crate) proxy: Proxy,
}

/// Everything there is in one storm.
#[derive(Debug)]
pub(crate) struct World {
    /// In the menu that has them. They end first, or they would take the end of the servers for a
    /// failure.
    pub(crate) sentinels: Option<Trio>,
    /// The first one decides.
    pub(crate) servers: Vec<Server>,
    pub(crate) places: Vec<Place>,
    pub(crate) locks: Locks,
    pub(crate) watch: Watch,
    record: Arc<Mutex<Vec<String>>>,
    seeds: Random,
    started: usize,
    /// When the sentinels last took the first server for the primary.
    agreed: Time,
}

/// Longer than a machine under load holds a server up, so that this is not taken for its death.
const DOWN_AFTER_MS: u32 = 2000;

/// A busy machine takes less; only a stuck server takes longer.
const IN_THE_END: Duration = Duration::from_secs(20);

fn roles(menu: Menu) -> &'static [Role] {
    match menu {
        Menu::ManyHolds => &[
            Role::ManyHolds,
            Role::ManyWaits,
            Role::ManyHolds,
            Role::ManyWaits,
        ],
        Menu::Packets => &[Role::Packets; 3],
        _ => &[Role::Plain, Role::Sessions, Role::Guards, Role::Plain],
    }
}

impl World {
    pub(crate) fn start(menu: Menu, random: &mut Random) -> Self {
        let servers = match menu {
            Menu::Pair | Menu::Sentinels => {
                let Pair { primary, replica } = Pair::of(server(), server());
                vec![primary, replica]
            }
            Menu::One | Menu::Clock => vec![server().start()],
            // No server ends there, so nothing has to be on disk, and more happens in a second.
            Menu::ManyHolds | Menu::Packets => vec![Server::start()],
            Menu::Cluster => {
                // The nodes have one clock. Without a start ahead of it, their tokens have one
                // order.
                let node = server().config("rlock.fence-guard-ms 0");
                let Cluster { first, second } = Cluster::of(&node);
                vec![first, second]
            }
        };
        let watches = menu == Menu::Sentinels;
        let sentinels = watches.then(|| Trio::over(&servers[0], DOWN_AFTER_MS));
        let locks = match menu {
            Menu::Cluster => LOCKS_OF_A_SLOT,
            Menu::ManyHolds => locks_looked_at(),
            Menu::Packets => LOCKS_IN_PACKETS,
            _ => LOCKS,
        };
        let record = Arc::default();
        let mut world = Self {
            sentinels,
            places: Vec::new(),
            watch: Watch::start(servers[0].address(), locks, &record),
            servers,
            locks,
            record,
            seeds: random.split(),
            started: 0,
            agreed: now(),
        };
        for role in roles(menu) {
            let proxy = Proxy::to(world.primary().address());
            let process = world.start_process(*role, proxy.address());
            world.places.push(Place { process, proxy });
        }
        until("every process has begun", || {
            let said = world.said();
            said > 50 * world.places.len()
        });
        world
    }

    pub(crate) fn primary(&self) -> &Server {
        &self.servers[0]
    }

    /// A connection for an operator.
    pub(crate) fn operator(&self) -> Conn {
        self.primary().connect()
    }

    /// The other server is the one that decides.
    pub(crate) fn change_over(&mut self) {
        self.servers.swap(0, 1);
        let address = self.primary().address();
        self.places
            .iter()
            .for_each(|place| place.proxy.redirect(address));
        self.watch.look_at(Some(address));
    }

    /// On a busy machine the sentinels can replace a primary that had no fault. Then that happened
    /// at some time since they were last asked, and later words of the old one do not count.
    pub(crate) fn follow_sentinels(&mut self) {
        let Some(sentinels) = &self.sentinels else {
            return;
        };
        let since = std::mem::replace(&mut self.agreed, now());
        let primary = eventually("the sentinels agree", || sentinels.agreed());
        if primary == self.primary().port() {
            return;
        }
        self.watch.look_at(None);
        let is_true = |line: &String| {
            let asked = line
                .strip_prefix("info ")
                .and_then(|rest| rest.split(' ').next());
            asked.is_none_or(|asked| asked.parse::<Time>().expect("a time") < since)
        };
        self.record.lock().expect("a list").retain(is_true);
        sentinels.settle();
        self.change_over();
        self.note_replaced(since);
    }

    /// The sentinels have replaced the primary since then. Unreplicated writes may be lost; and the
    /// old one may have granted locks to clients that were still connected to it.
    pub(crate) fn note_replaced(&self, since: Time) {
        let until = now();
        self.note(format!("fault {since} {until} promote"));
        self.note(format!("fault {since} {until} two-primaries"));
    }

    /// Kills a process, and starts another in its place.
    pub(crate) fn replace_process(&mut self, index: usize) {
        let process = &mut self.places[index].process;
        let died = format!("died {} {}", now(), process.name);
        process.kill();
        let (role, address) = (process.role, self.places[index].proxy.address());
        self.note(died);
        self.places[index].process = self.start_process(role, address);
    }

    fn start_process(&mut self, role: Role, address: SocketAddr) -> Process {
        self.started += 1;
        let seed = self.seeds.next();
        let sentinels = self.sentinels.iter().flat_map(Trio::addresses);
        let asked = sentinels.filter(|_| role == Role::Guards);
        let addresses: Vec<_> = std::iter::once(address).chain(asked).collect();
        Process::start(
            self.started.to_string(),
            role,
            &addresses,
            seed,
            self.locks,
            &self.record,
        )
    }

    pub(crate) fn note(&self, line: String) {
        self.record.lock().expect("a list").push(line);
    }

    /// How many lines.
    fn said(&self) -> usize {
        self.record.lock().expect("a list").len()
    }

    fn lines(&self) -> Vec<String> {
        self.record.lock().expect("a list").clone()
    }

    /// Ends everything in good order. Returns the records and the leftovers.
    pub(crate) fn end(mut self) -> (Vec<String>, Vec<String>) {
        self.follow_sentinels();
        let mut left = self.no_progress();
        for place in &mut self.places {
            place.process.tell_to_stop();
        }
        let deadline = Instant::now() + IN_THE_END;
        for place in &mut self.places {
            while !place.process.has_ended() && Instant::now() < deadline {
                thread::sleep(Duration::from_millis(5));
            }
            if !place.process.has_ended() {
                let Process { name, role, .. } = &place.process;
                left.push(format!(
                    "process {name} ({}) does not come to an end",
                    role.word()
                ));
            }
            place.process.kill();
        }
        for place in &self.places {
            self.note(format!("died {} {}", now(), place.process.name));
        }
        let mut operator = self.operator();
        let deadline = Instant::now() + LONGEST_LEASE + IN_THE_END;
        let mut rest = remains(&mut operator);
        while !rest.is_empty() && Instant::now() < deadline {
            thread::sleep(Duration::from_millis(10));
            rest = remains(&mut operator);
        }
        left.extend(rest);
        self.watch.end();
        (self.lines(), left)
    }

    /// With everything healed, each process must be granted something soon.
    fn no_progress(&self) -> Vec<String> {
        let from = self.said();
        let deadline = Instant::now() + LONGEST_LEASE + IN_THE_END;
        let waits_still = |place: &&Place| {
            let is_grant = |line: &String| {
                let id = line
                    .strip_prefix("told ")
                    .and_then(|rest| rest.split('.').next());
                id.is_some_and(|process| is_part_of(process, &place.process.name))
                    && line.contains(" held ")
            };
            let record = self.record.lock().expect("a list");
            !record[from..].iter().any(is_grant)
        };
        while Instant::now() < deadline {
            if !self.places.iter().any(|place| waits_still(&place)) {
                return Vec::new();
            }
            thread::sleep(Duration::from_millis(10));
        }
        let without = self.places.iter().filter(waits_still);
        without
            .map(|place| format!("process {} is granted nothing any more", place.process.name))
            .collect()
    }
}

/// Every acknowledged write is on disk.
fn server() -> Builder {
    Server::builder()
        .settable_clock()
        .on_a_small_disk("always")
        .config("repl-backlog-size 64mb")
        // A node that has given its last slot away stays a primary.
        .config("cluster-allow-replica-migration no")
}

/// The state that a server still keeps of clients that have ended.
fn remains(operator: &mut Conn) -> Vec<String> {
    let mut remains = Vec::new();
    let keys = operator.run("KEYS *").texts();
    if !keys.is_empty() {
        remains.push(format!("keys are left when everybody is gone: {keys:?}"));
    }
    let info = operator.run("INFO rlock").text();
    for field in ["waiters", "locks_waited_for", "sessions", "session_holds"] {
        let field = format!("rlock_{field}:");
        let value = info.lines().find_map(|line| line.strip_prefix(&field));
        let value = value.expect("a field of INFO");
        if value != "0" {
            remains.push(format!("{field}{value} when everybody is gone"));
        }
    }
    remains
}
