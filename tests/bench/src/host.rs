//! The server that is measured, on a core of its own where there are two.

use std::fs;

use rlock_tests::{Builder, Conn, Server, until};
use rustix::process::{Resource, getrlimit, setrlimit};
use rustix::thread::{CpuSet, sched_getaffinity, sched_setaffinity};

/// Which core the servers run on, and which one the load. None: wherever the system puts them.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Cores {
    taken: Option<(usize, usize)>,
    /// How many there are.
    count: usize,
}

impl Cores {
    /// The first two cores that we may use; from now on we are on the second one.
    pub(crate) fn take() -> Self {
        let allowed = sched_getaffinity(None).unwrap();
        let numbers = (0..CpuSet::MAX_CPU).filter(|core| allowed.is_set(*core));
        let numbers: Vec<usize> = numbers.collect();
        let cores = Self {
            taken: numbers.first().copied().zip(numbers.get(1).copied()),
            count: numbers.len(),
        };
        cores.go_to(|(_, load)| vec![load]);
        cores
    }

    pub(crate) fn words(self) -> String {
        match self.taken {
            Some((server, load)) => {
                format!(
                    "servers on core {server} and the load on core {load} of {}",
                    self.count
                )
            }
            None => "servers and load on one core".to_owned(),
        }
    }

    /// Starts a server there: a process begins on the core of the thread that starts it, and so do
    /// all the threads that it will have.
    pub(crate) fn start(self, how: Builder) -> Server {
        self.start_on(how, |(server, _)| vec![server])
    }

    /// The same on both cores: one that has threads for its sockets.
    pub(crate) fn start_on_both(self, how: Builder) -> Server {
        self.start_on(how, |(server, load)| vec![server, load])
    }

    fn start_on(self, how: Builder, cores: impl Fn((usize, usize)) -> Vec<usize>) -> Server {
        self.go_to(cores);
        // Thousands of clients that wait, some of them twice.
        let server = how.config("maxclients 18000").start();
        self.go_to(|(_, load)| vec![load]);
        server
    }

    fn go_to(self, some: impl Fn((usize, usize)) -> Vec<usize>) {
        if let Some(cores) = self.taken {
            let mut set = CpuSet::new();
            for core in some(cores) {
                set.set(core);
            }
            sched_setaffinity(None, &set).unwrap();
        }
    }
}

/// Lets us, and the servers that we start, open as many files as we may.
pub(crate) fn open_many_files() {
    let mut limit = getrlimit(Resource::Nofile);
    limit.current = limit.maximum;
    setrlimit(Resource::Nofile, limit).unwrap();
}

/// A server, and a connection to ask for its CPU time.
pub(crate) struct Host {
    pub(crate) server: Server,
    control: Conn,
}

impl Host {
    pub(crate) fn of(server: Server) -> Self {
        let control = server.connect();
        Self { server, control }
    }

    /// Runs a command that is answered with `OK`.
    pub(crate) fn does(&mut self, command: &str) {
        assert_eq!(self.control.run(command), "OK", "{command}");
    }

    /// The CPU time that the server has used so far, in microseconds.
    pub(crate) fn cpu_us(&mut self) -> f64 {
        let text = self.control.run("INFO cpu").text();
        let seconds = number(&text, "used_cpu_user") + number(&text, "used_cpu_sys");
        seconds * 1e6
    }

    /// The bytes that it has allocated, without what the allocator keeps for itself.
    pub(crate) fn memory(&mut self) -> f64 {
        // A dictionary that grows keeps its old table until all of it has been moved.
        until("no table is on the move", || {
            let tables = self.control.run("DEBUG HTSTATS 0").text();
            !tables.contains("rehashing target")
        });
        number(&self.control.run("INFO memory").text(), "used_memory")
    }

    /// How many connections it has.
    pub(crate) fn connections(&mut self) -> f64 {
        let text = self.control.run("INFO clients").text();
        number(&text, "connected_clients")
    }

    pub(crate) fn name(&self) -> String {
        let redis = self.server.info("redis_version").unwrap_or_default();
        match self.server.info("valkey_version") {
            Some(valkey) => format!("Valkey {valkey}"),
            None => format!("Redis {redis}"),
        }
    }
}

/// One field of an INFO.
fn number(info: &str, field: &str) -> f64 {
    let value = info.lines().find_map(|line| {
        let (name, value) = line.split_once(':')?;
        (name == field).then_some(value)
    });
    value.and_then(|value| value.trim().parse().ok()).unwrap()
}

/// The processor's own name.
pub(crate) fn processor() -> String {
    let text = fs::read_to_string("/proc/cpuinfo").unwrap_or_default();
    let model = text.lines().find_map(|line| {
        let (name, value) = line.split_once(':')?;
        (name.trim() == "model name").then(|| value.trim().to_owned())
    });
    model.unwrap_or_else(|| std::env::consts::ARCH.to_owned())
}

/// How many processes wanted a core in the last minute: much above zero, and others are in the way.
pub(crate) fn load_average() -> String {
    let text = fs::read_to_string("/proc/loadavg").unwrap_or_default();
    let minute = text.split(' ').next().filter(|minute| !minute.is_empty());
    minute.unwrap_or("unknown").to_owned()
}
