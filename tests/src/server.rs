//! One real server.

use std::env;
use std::fmt::Write as _;
use std::fs::{self, File};
use std::net::{Ipv4Addr, SocketAddr, TcpListener};
use std::os::unix::fs::FileExt as _;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, ExitStatus, Stdio};
use std::sync::atomic::{AtomicU16, Ordering};
use std::thread;
use std::time::{Duration, Instant, SystemTime, UNIX_EPOCH};

use tempfile::TempDir;

use crate::certificates::Certificates;
use crate::conn::Conn;
use crate::eventually::{eventually, patience, until};
use crate::nodes_file::agree_on_shards;

/// The server to test: `RLOCK_SERVER`, else `redis-server` from the path.
pub(crate) fn server_program() -> String {
    env::var("RLOCK_SERVER").unwrap_or_else(|_| "redis-server".to_owned())
}

/// Whether the servers run under valgrind: ten times slower, and no error is forgiven.
pub fn under_valgrind() -> bool {
    env::var("RLOCK_VALGRIND").is_ok_and(|value| value == "1")
}

/// The module to load: `RLOCK_MODULE`, else the one beside the test executable, where cargo has
/// just built it because the tests depend on it.
pub fn module_path() -> PathBuf {
    if let Ok(path) = env::var("RLOCK_MODULE") {
        return fs::canonicalize(path).expect("RLOCK_MODULE names a file");
    }
    let beside = env::current_exe()
        .expect("a running test")
        .with_file_name("librlock.so");
    assert!(beside.exists(), "no {}: set RLOCK_MODULE", beside.display());
    beside
}

/// How to start a server: see [`Server::builder`].
#[derive(Debug, Clone)]
pub struct Builder {
    module: bool,
    kind: Kind,
    settable_clock: bool,
    clock_ahead: i64,
    data: Option<PathBuf>,
    small_disk: bool,
    tls: Option<Tls>,
    program: Option<String>,
    under: Vec<String>,
    config: Vec<String>,
    user: Option<(String, String)>,
}

/// The kind of process.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Kind {
    Alone,
    ClusterNode,
    Sentinel,
}

/// How a server speaks TLS on its second port.
#[derive(Debug, Clone)]
struct Tls {
    certificates: Certificates,
    demands_certificates: bool,
    /// Whether it speaks to other servers so.
    to_others: bool,
}

impl Builder {
    /// Starts this server, and not the one to test.
    #[must_use]
    pub fn program(mut self, path: &str) -> Self {
        self.program = Some(path.to_owned());
        self
    }

    /// Starts the server through another program: its name, and its arguments before those of the
    /// server.
    #[must_use]
    pub fn under(mut self, program: &[&str]) -> Self {
        self.under = program.iter().map(|&word| word.to_owned()).collect();
        self
    }

    /// A server whose wall clock [`Server::step_clock`] can set. Its monotonic clock stays.
    #[must_use]
    pub fn settable_clock(mut self) -> Self {
        self.settable_clock = true;
        self
    }

    /// The same, and whenever it starts its clock is this many seconds ahead of the real one, or
    /// behind it.
    #[must_use]
    pub fn clock_ahead(mut self, seconds: i64) -> Self {
        self.clock_ahead = seconds;
        self.settable_clock()
    }

    /// A server that finds a copy of this folder's files in its directory when it first starts.
    #[must_use]
    pub fn data(mut self, folder: impl Into<PathBuf>) -> Self {
        self.data = Some(folder.into());
        self
    }

    /// A server that writes an append-only file, for which [`Server::take_the_room`] can leave no
    /// room.
    #[must_use]
    pub fn on_a_small_disk(mut self, appendfsync: &str) -> Self {
        self.small_disk = true;
        // A process that writes beyond its limit gets a signal; one that ignores it gets an error,
        // as from a disk that is full.
        self.under(&["sh", "-c", r#"trap "" XFSZ; exec "$@""#, "sh"])
            .config("appendonly yes")
            .config(&format!("appendfsync {appendfsync}"))
    }

    /// One more line of `redis.conf`; it wins over what the harness writes.
    #[must_use]
    pub fn config(mut self, line: &str) -> Self {
        self.config.push(line.to_owned());
        self
    }

    /// The harness comes in as this user: `default` may not.
    #[must_use]
    pub fn user(mut self, name: &str, password: &str) -> Self {
        self.user = Some((name.to_owned(), password.to_owned()));
        self
    }

    /// A plain server, to which the keys of locks are hashes like any other.
    #[must_use]
    pub fn without_module(mut self) -> Self {
        self.module = false;
        self
    }

    /// A node of a cluster, still without slots and peers.
    #[must_use]
    pub fn cluster(mut self) -> Self {
        self.kind = Kind::ClusterNode;
        self
    }

    /// A sentinel, which is this same server in another mode.
    #[must_use]
    pub(crate) fn sentinel(mut self) -> Self {
        self.kind = Kind::Sentinel;
        self.without_module()
    }

    /// A server that speaks TLS too, at [`Server::tls_address`]. [`Certificates::are_understood`]
    /// says whether it can.
    #[must_use]
    pub fn tls(mut self, certificates: &Certificates) -> Self {
        self.tls = Some(Tls {
            certificates: certificates.clone(),
            demands_certificates: false,
            to_others: false,
        });
        self
    }

    /// The same, and there it turns away clients without a certificate of this authority.
    #[must_use]
    pub fn tls_with_client_certificates(mut self, certificates: &Certificates) -> Self {
        self.tls = Some(Tls {
            certificates: certificates.clone(),
            demands_certificates: true,
            to_others: false,
        });
        self
    }

    /// As [`Builder::tls`], and it speaks TLS to other servers as well: to its primary, to the
    /// other nodes of its cluster, or as a sentinel to those that it watches.
    #[must_use]
    pub fn tls_among_servers(mut self, certificates: &Certificates) -> Self {
        self.tls = Some(Tls {
            certificates: certificates.clone(),
            demands_certificates: false,
            to_others: true,
        });
        self
    }

    /// Starts it and waits until it answers.
    #[track_caller]
    pub fn start(self) -> Server {
        self.try_start()
            .unwrap_or_else(|log| panic!("the server does not start:\n{log}"))
    }

    /// Starts it and waits until it ends by itself. Its log.
    #[track_caller]
    pub fn refuses_to_start(self) -> String {
        self.try_start().expect_err("a server that does not start")
    }

    fn try_start(self) -> Result<Server, String> {
        let directory = tempfile::tempdir().expect("a temporary directory");
        if let Some(data) = &self.data {
            copy_folder(data, directory.path());
        }
        let mut last_failure = String::new();
        // Another process may take a port between our look and the server's bind.
        for _ in 0..10 {
            match Running::start(&self, directory.path(), Ports::free()) {
                Ok(running) => {
                    return Ok(Server {
                        running,
                        how: self,
                        directory,
                    });
                }
                Err(log) => last_failure = log,
            }
            if !last_failure.contains(IN_USE) {
                break;
            }
        }
        Err(last_failure)
    }

    /// A new connection of the user with whose name the harness logs in.
    fn open(&self, address: SocketAddr) -> std::io::Result<Conn> {
        let mut conn = Conn::open(address)?;
        if let Some((name, password)) = &self.user {
            conn.try_run(&format!("AUTH {name} {password}"))?;
        }
        Ok(conn)
    }

    /// The whole configuration file.
    fn file(&self, directory: &Path, ports: Ports) -> String {
        let Ports { plain, bus, tls } = ports;
        let mut file = format!(
            "port {plain}\nbind 127.0.0.1\ndir {}\n",
            directory.display()
        );
        file += "logfile server.log\n";
        if self.kind != Kind::Sentinel {
            file += "save \"\"\nappendonly no\n";
            file += "enable-debug-command yes\nenable-module-command yes\n";
            // A full sync starts at once, the end does not wait for replicas and saves nothing.
            file += "repl-diskless-sync-delay 0\nshutdown-timeout 0\nshutdown-on-sigterm nosave\n";
        }
        if self.kind == Kind::ClusterNode {
            let _ = writeln!(file, "cluster-enabled yes\ncluster-port {bus}");
            // No server is taken for dead because the machine is busy.
            file += "cluster-node-timeout 15000\n";
        }
        if let Some(how) = &self.tls {
            let demand = if how.demands_certificates {
                "yes"
            } else {
                "no"
            };
            let _ = writeln!(file, "tls-port {tls}\ntls-auth-clients {demand}");
            file += &how.certificates.of_a_server();
            if how.to_others {
                file += "tls-replication yes\n";
            }
            if how.to_others && self.kind == Kind::ClusterNode {
                file += "tls-cluster yes\n";
            }
        }
        if self.module {
            let path = module_path();
            let _ = writeln!(file, "loadmodule {}", path.display());
        }
        file + &self.config.join("\n") + "\n"
    }
}

/// Copies the files of one folder to another, which exists.
fn copy_folder(from: &Path, to: &Path) {
    let entries = fs::read_dir(from).unwrap_or_else(|e| panic!("{}: {e}", from.display()));
    for entry in entries.map(|entry| entry.expect("an entry")) {
        let target = to.join(entry.file_name());
        if entry.path().is_dir() {
            fs::create_dir(&target).expect("a new folder");
            copy_folder(&entry.path(), &target);
        } else {
            fs::copy(entry.path(), &target).expect("a copy");
        }
    }
}

/// The words of a server whose port belongs to another process.
const IN_USE: &str = "Address already in use";

/// A server of its own for a test. It dies with the value; if the test has failed, its log is
/// printed; if it died by itself, or ends with an error, the test fails.
#[derive(Debug)]
pub struct Server {
    running: Running,
    how: Builder,
    directory: TempDir,
}

impl Server {
    /// A server with the module, and nothing else set.
    #[track_caller]
    pub fn start() -> Self {
        Self::builder().start()
    }

    /// A server with the module, to be told more about.
    pub fn builder() -> Builder {
        Builder {
            module: true,
            kind: Kind::Alone,
            settable_clock: false,
            clock_ahead: 0,
            data: None,
            small_disk: false,
            tls: None,
            program: None,
            under: Vec::new(),
            config: Vec::new(),
            user: None,
        }
    }

    /// A new connection.
    #[track_caller]
    pub fn connect(&self) -> Conn {
        let opened = self.how.open(self.address());
        opened.expect("the server accepts connections")
    }

    /// Where it listens.
    pub fn address(&self) -> SocketAddr {
        self.running.ports.address()
    }

    /// The port, on 127.0.0.1.
    pub fn port(&self) -> u16 {
        self.running.ports.plain
    }

    /// Where it listens for TLS, if it was built with [`Builder::tls`].
    pub fn tls_address(&self) -> SocketAddr {
        assert!(self.how.tls.is_some(), "this server speaks no TLS");
        SocketAddr::from((Ipv4Addr::LOCALHOST, self.running.ports.tls))
    }

    /// The port at which other servers speak to it.
    pub(crate) fn port_for_servers(&self) -> u16 {
        let tls = self.how.tls.as_ref();
        if tls.is_some_and(|how| how.to_others) {
            self.running.ports.tls
        } else {
            self.port()
        }
    }

    /// The port of the cluster's own connections.
    pub(crate) fn bus_port(&self) -> u16 {
        self.running.ports.bus
    }

    /// Its directory, with its data and its log.
    pub fn directory(&self) -> &Path {
        self.directory.path()
    }

    /// Its log so far.
    pub fn log(&self) -> String {
        log_in(self.directory())
    }

    /// Runs one command on a connection of its own.
    #[track_caller]
    pub fn run(&self, command: impl AsRef<str>) -> crate::Reply {
        self.connect().run(command)
    }

    /// A new session connection of `session`, without a grace.
    #[track_caller]
    pub fn session_connection(&self, session: &str) -> Conn {
        let mut conn = self.connect();
        conn.run(format!("RLOCK.EVENTS {session}")).events();
        conn
    }

    /// A new connection that waits for `name` as `owner`, without limit and for a lease of 30 s;
    /// it is seen waiting there, so later waiters are behind it.
    #[track_caller]
    pub fn wait_in_queue(&self, name: &str, owner: &str) -> Conn {
        self.blocked_in(&format!("RLOCK.ACQUIRE {name} {owner} 30000 BLOCK 0"))
    }

    /// A new connection on which `command` has been sent and blocks.
    #[track_caller]
    pub fn blocked_in(&self, command: &str) -> Conn {
        let mut conn = self.connect();
        let id = conn.id();
        // The call that begins a session is answered at once.
        if let Some(session) = command.strip_prefix("RLOCK.EVENTS ") {
            let session = session.split(' ').next().unwrap_or_default();
            conn.run(format!("RLOCK.EVENTS {session}")).events();
        }
        conn.send(command);
        let mut observer = self.connect();
        until(&format!("{command} blocks"), || {
            if let Some(reply) = conn.read_now() {
                panic!("{command} does not block: {reply:?}");
            }
            is_blocked(&mut observer, id)
        });
        conn
    }

    /// The holder of the lock `name`, by its hash alone: `None` if it is free.
    #[track_caller]
    pub fn holder(&self, name: &str) -> Option<String> {
        let fields = self.run(format!("HKEYS {name}")).texts();
        let holders: Vec<_> = fields
            .into_iter()
            .filter(|field| field != "fence")
            .collect();
        assert!(
            holders.len() <= 1,
            "{name} has several holders: {holders:?}"
        );
        holders.into_iter().next()
    }

    /// The owners in the queue of the lock `name`, next one first.
    #[track_caller]
    pub fn waiting_owners(&self, name: &str) -> Vec<String> {
        let info = self.run(format!("RLOCK.INFO {name}"));
        info.get("queue")
            .array()
            .iter()
            .map(|waiter| waiter.get("owner").text())
            .collect()
    }

    /// One field of `INFO`; `None` if it is not there.
    #[track_caller]
    pub fn info(&self, field: &str) -> Option<String> {
        let everything = self.run("INFO everything").text();
        let found = everything
            .lines()
            .find_map(|line| line.strip_prefix(field)?.strip_prefix(':'));
        found.map(str::to_owned)
    }

    /// One number of `INFO`.
    #[track_caller]
    pub fn info_number(&self, field: &str) -> i64 {
        let value = self
            .info(field)
            .unwrap_or_else(|| panic!("INFO has no {field}"));
        value
            .parse()
            .unwrap_or_else(|_| panic!("{field} is no number: {value}"))
    }

    /// For how long its main thread has been at work on a processor: what a busy machine gives to
    /// others is not counted.
    #[track_caller]
    pub fn processor_time(&self) -> Duration {
        let told = self.run("INFO cpu").text();
        let seconds = ["user", "sys"].map(|kind| {
            let field = format!("used_cpu_{kind}_main_thread:");
            let value = told.lines().find_map(|line| line.strip_prefix(&field));
            let value = value.unwrap_or_else(|| panic!("INFO has no {field}"));
            value.parse::<f64>().expect("seconds")
        });
        Duration::from_secs_f64(seconds.iter().sum())
    }

    /// The median time of the calls of `command` since `CONFIG RESETSTAT`, in microseconds by the
    /// server's own account: a busy machine delays a few of many, not half of them.
    #[track_caller]
    pub fn median_cost(&self, command: &str) -> f64 {
        let told = self.run("INFO latencystats").text();
        let field = format!("latency_percentiles_usec_{command}:p50=");
        let value = told.lines().find_map(|line| line.strip_prefix(&field));
        let value = value.unwrap_or_else(|| panic!("INFO has no {field}"));
        let median = value.split(',').next().and_then(|value| value.parse().ok());
        median.expect("microseconds")
    }

    /// Compiles a module from `tests/data` with the C compiler, and loads it.
    #[track_caller]
    pub fn load_c_module(&self, name: &str) {
        let object = compile(name, self.directory());
        assert_eq!(self.connect().cmd(&["MODULE", "LOAD", &object]), "OK");
    }

    /// Sets the wall clock of a server with a [`Builder::settable_clock`] this far ahead of the
    /// real one, or behind it, whatever it is doing.
    pub fn set_clock(&self, seconds: i64) {
        let path = self.directory().join("clock");
        let us = seconds.saturating_mul(1_000_000).to_ne_bytes();
        // In place: the server has the file mapped.
        let file = File::options().write(true).open(path).expect("the clock");
        file.write_all_at(&us, 0).expect("eight bytes");
    }

    /// As [`set_clock`](Self::set_clock), and the server has seen it when this returns.
    pub fn step_clock(&self, seconds: i64) {
        self.set_clock(seconds);
        let real = || {
            let since = SystemTime::now().duration_since(UNIX_EPOCH);
            i64::try_from(since.expect("after 1970").as_secs()).expect("seconds")
        };
        let mut conn = self.connect();
        until("the server's clock is set", || {
            let told: i64 = conn.run("TIME").texts()[0].parse().expect("seconds");
            (told - real() - seconds).abs() <= 1
        });
    }

    /// The server's process.
    pub fn process_id(&self) -> u32 {
        self.running.child.id()
    }

    /// Whether it has neither been stopped nor killed.
    pub fn is_running(&self) -> bool {
        !self.running.over
    }

    /// Stops the process where it is, as a machine under load does (SIGSTOP). It finds all later
    /// commands at once when it goes on.
    #[track_caller]
    pub fn freeze(&self) {
        self.running.signal("STOP");
        // The signal is on its way when `kill` returns, and the server may be half through a turn.
        until("the process stands still", || self.process_state() == 'T');
    }

    /// Waits until it has nothing to do, and sleeps.
    #[track_caller]
    pub fn fall_asleep(&self) {
        until("the process sleeps", || self.process_state() == 'S');
    }

    /// `R` if the process runs, `S` if it sleeps, `T` if it was stopped.
    fn process_state(&self) -> char {
        let stat = format!("/proc/{}/stat", self.process_id());
        let stat = fs::read_to_string(stat).expect("a process");
        let state = stat.rsplit(')').next().and_then(|rest| rest.chars().nth(1));
        state.expect("a state")
    }

    /// From now on the append-only file of a server [`Builder::on_a_small_disk`] cannot grow by
    /// more than a few bytes.
    #[track_caller]
    pub fn take_the_room(&self) {
        // No file can: so the append-only file is made the longest, and the log may still grow.
        let mut conn = self.connect();
        let padding = "-".repeat(512 * 1024);
        assert_eq!(conn.run(format!("SET rlock-tests:padding {padding}")), "OK");
        assert_eq!(conn.run("DEL rlock-tests:padding"), 1);
        let size = eventually("the padding is written", || {
            let files = append_only_files(self.directory()).into_iter();
            let size = files.map(|file| fs::metadata(file).expect("a file").len());
            size.max().filter(|size| *size > 512 * 1024)
        });
        let limit = size + 8;
        self.limit_files(&limit.to_string());
    }

    /// There is room again.
    #[track_caller]
    pub fn give_the_room_back(&self) {
        self.limit_files("unlimited");
    }

    #[track_caller]
    fn limit_files(&self, limit: &str) {
        assert!(
            self.how.small_disk,
            "a file too long would kill this server"
        );
        let status = Command::new("prlimit")
            .args(["--pid", &self.process_id().to_string()])
            .arg(format!("--fsize={limit}:unlimited"))
            .status();
        assert!(status.expect("prlimit, of util-linux").success());
    }

    /// Waits until the process has ended by itself, and says whether it called that a success.
    /// [`Server::restart`] brings it back.
    #[track_caller]
    pub fn await_end(&mut self) -> bool {
        let status = eventually("the process ends", || self.running.ended());
        self.running.over = true;
        status.success()
    }

    /// Lets it go on (SIGCONT).
    pub fn thaw(&self) {
        self.running.signal("CONT");
    }

    /// Kills the process, as a power cut does (SIGKILL). [`Server::restart`] brings it back.
    pub fn kill(&mut self) {
        self.running.kill();
    }

    /// Ends it in good order, if it still runs, and starts it again: same port, same data.
    #[track_caller]
    pub fn restart(&mut self) {
        self.stop();
        if self.how.kind == Kind::ClusterNode {
            agree_on_shards(&self.directory().join("nodes.conf"));
        }
        let ports = self.running.ports;
        let mut tries = 0;
        self.running = loop {
            match Running::start(&self.how, self.directory.path(), ports) {
                Ok(running) => break running,
                // Another process may be looking whether the port is free.
                Err(log) if tries < 10 && log.contains(IN_USE) => {
                    tries += 1;
                    thread::sleep(Duration::from_millis(100));
                }
                Err(log) => panic!("it does not start again:\n{log}"),
            }
        };
    }

    /// [`Server::restart`], from now on without the module.
    #[track_caller]
    pub fn restart_without_module(&mut self) {
        self.how.module = false;
        self.restart();
    }

    /// Ends it in good order.
    #[track_caller]
    pub fn stop(&mut self) {
        if let Some(complaint) = self.running.stop() {
            panic!("{complaint}\n{}", self.log());
        }
    }
}

impl Drop for Server {
    fn drop(&mut self) {
        let complaint = self.running.stop();
        if thread::panicking() {
            eprintln!(
                "--- log of the server on port {}\n{}---",
                self.port(),
                self.log()
            );
        } else if let Some(complaint) = complaint {
            panic!("{complaint}\n{}", self.log());
        }
    }
}

/// The process, from its start to its end.
#[derive(Debug)]
struct Running {
    child: Child,
    ports: Ports,
    over: bool,
}

/// Where a server listens. It keeps all of them when it is started again: others know it by them.
#[derive(Debug, Clone, Copy)]
struct Ports {
    plain: u16,
    /// Of the cluster's own connections.
    bus: u16,
    tls: u16,
}

impl Ports {
    fn free() -> Self {
        Self {
            plain: free_port(),
            bus: free_port(),
            tls: free_port(),
        }
    }

    fn address(self) -> SocketAddr {
        SocketAddr::from((Ipv4Addr::LOCALHOST, self.plain))
    }
}

/// The C compiler of this machine with its flags, as build scripts find them: `CC`, `CFLAGS` and
/// their siblings count.
#[track_caller]
fn c_compiler(directory: &Path) -> Command {
    // A build script is told these by cargo; a test is not, and runs where it was compiled for.
    let target = env!("TARGET");
    let mut build = cc::Build::new();
    build.target(target).host(target).opt_level(0).debug(false);
    build.out_dir(directory).cargo_metadata(false);
    build.pic(true).warnings(true).extra_warnings(true);
    build.warnings_into_errors(true);
    build.get_compiler().to_command()
}

/// Compiles a library from `tests/data` with the C compiler. Its path.
#[track_caller]
pub fn compile(name: &str, directory: &Path) -> String {
    let source = format!("{}/data/{name}.c", env!("CARGO_MANIFEST_DIR"));
    let object = directory.join(format!("{name}.so")).display().to_string();
    let output = c_compiler(directory)
        .args(["-shared", "-o", &object, &source])
        .output()
        .expect("a C compiler, or the one that CC names");
    let complaints = String::from_utf8_lossy(&output.stderr);
    assert!(
        output.status.success(),
        "{name}.c does not compile:\n{complaints}"
    );
    object
}

impl Running {
    /// Starts the process and waits until it answers; `Err`: its log, if it ends instead.
    fn start(how: &Builder, directory: &Path, ports: Ports) -> Result<Self, String> {
        fs::write(directory.join("redis.conf"), how.file(directory, ports)).expect("a file");
        let output = File::options()
            .create(true)
            .append(true)
            .open(directory.join("output"));
        let output = output.expect("a file");
        let mut server = match &how.under[..] {
            [] => command(how),
            [program, arguments @ ..] => {
                let command = command(how);
                let mut under = Command::new(program);
                under.args(arguments).arg(command.get_program());
                under.args(command.get_args());
                under
            }
        };
        if how.settable_clock {
            let clock = directory.join("clock");
            let us = how.clock_ahead.saturating_mul(1_000_000);
            fs::write(&clock, us.to_ne_bytes()).expect("a file");
            server.env("LD_PRELOAD", compile("clock", directory));
            server.env("RLOCK_TEST_CLOCK", clock);
        }
        server.arg(directory.join("redis.conf"));
        if how.kind == Kind::Sentinel {
            server.arg("--sentinel");
        }
        let child = server
            .stdin(Stdio::null())
            .stdout(output.try_clone().expect("a file"))
            .stderr(output)
            .spawn()
            .unwrap_or_else(|e| panic!("cannot start {:?}: {e}", server_program()));
        let process_id = child.id();
        let mut running = Self {
            child,
            ports,
            over: false,
        };
        let answers = eventually("the server answers", || {
            if running.ended().is_some() {
                running.over = true;
                return Some(false);
            }
            is_at_home(how, ports.address(), process_id)
                .is_ok_and(|yes| yes)
                .then_some(true)
        });
        if answers {
            Ok(running)
        } else {
            Err(log_in(directory))
        }
    }

    fn ended(&mut self) -> Option<ExitStatus> {
        self.child.try_wait().expect("our child")
    }

    fn signal(&self, name: &str) {
        let kill = format!("kill -{name} {}", self.child.id());
        let status = Command::new("sh")
            .args(["-c", &kill])
            .status()
            .expect("a shell");
        assert!(status.success(), "cannot send SIG{name}");
    }

    fn kill(&mut self) {
        self.over = true;
        // It may have ended already, and then there is nothing to kill.
        let _ = self.child.kill();
        let _ = self.child.wait();
    }

    /// Ends the process in good order. Returns what went wrong while it ran or ended, if anything.
    fn stop(&mut self) -> Option<String> {
        if self.over {
            return None;
        }
        if let Some(status) = self.ended() {
            self.over = true;
            return Some(format!("the server died by itself: {status}"));
        }
        let deadline = Instant::now() + patience(Duration::from_secs(30));
        while Instant::now() < deadline {
            // Told anew each second: one that writes its first append-only file does not heed it.
            self.signal("TERM");
            self.signal("CONT");
            let told_again = Instant::now() + Duration::from_secs(1);
            while Instant::now() < told_again {
                if let Some(status) = self.ended() {
                    self.over = true;
                    return (!status.success()).then(|| format!("the server ended with {status}"));
                }
                thread::sleep(Duration::from_millis(2));
            }
        }
        self.kill();
        Some("the server did not end when told to".to_owned())
    }
}

impl Drop for Running {
    fn drop(&mut self) {
        if !self.over {
            self.kill();
        }
    }
}

/// The server's command line, without its configuration file.
fn command(how: &Builder) -> Command {
    let program = how.program.clone().unwrap_or_else(server_program);
    if !under_valgrind() {
        return Command::new(program);
    }
    let mut command = Command::new("valgrind");
    command
        .args(["-q", "--error-exitcode=9", "--leak-check=full"])
        .args([
            "--errors-for-leak-kinds=definite",
            "--show-leak-kinds=definite",
        ])
        .args([
            "--soname-synonyms=somalloc=*jemalloc*",
            "--keep-debuginfo=yes",
        ])
        .arg(concat!(
            "--suppressions=",
            env!("CARGO_MANIFEST_DIR"),
            "/data/valgrind.supp"
        ))
        .arg(program);
    command
}

/// Where a server in this directory writes its append-only file, which is several.
pub(crate) fn append_only_files(directory: &Path) -> Vec<PathBuf> {
    let entries = fs::read_dir(directory.join("appendonlydir")).expect("an AOF");
    let mut files: Vec<_> = entries
        .map(|entry| entry.expect("an entry").path())
        .collect();
    files.sort();
    files
}

/// Whether the server at `address` answers and is this process, not a stranger that took the port
/// first.
fn is_at_home(how: &Builder, address: SocketAddr, process_id: u32) -> std::io::Result<bool> {
    let mut conn = how.open(address)?;
    if conn.try_run("PING")? != "PONG" {
        return Ok(false); // it is still loading
    }
    let info = conn.try_run("INFO server")?.text();
    let own = format!("process_id:{process_id}");
    Ok(info.lines().any(|line| line == own))
}

fn is_blocked(observer: &mut Conn, id: i64) -> bool {
    let listed = observer.run(format!("CLIENT LIST ID {id}")).text();
    listed
        .split(' ')
        .any(|word| word.starts_with("flags=") && word.contains('b'))
}

fn log_in(directory: &Path) -> String {
    let read = |name| fs::read(directory.join(name)).unwrap_or_default();
    let bytes = [read("server.log"), read("output")].concat();
    String::from_utf8_lossy(&bytes).into_owned()
}

/// A port on which no server listens now.
///
/// Below the range from which the kernel gives ports to connections, so that a server can come
/// back to its port; each process begins somewhere else.
fn free_port() -> u16 {
    const FIRST: u16 = 11_000;
    const COUNT: u16 = 20_000;
    static NEXT: AtomicU16 = AtomicU16::new(0);
    let process = u16::try_from(u64::from(std::process::id()) * 97 % u64::from(COUNT));
    let process = process.expect("less than COUNT");
    loop {
        let offset = process.wrapping_add(NEXT.fetch_add(1, Ordering::Relaxed)) % COUNT;
        let port = FIRST + offset;
        if TcpListener::bind((Ipv4Addr::LOCALHOST, port)).is_ok() {
            return port;
        }
    }
}
