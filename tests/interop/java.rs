//! The Java process: Redisson clients and their threads. They get their commands line by line;
//! `redisson/Driver.java` documents the lines.

use std::collections::HashMap;
use std::env;
use std::io::{BufRead, BufReader, Write as _};
use std::process::{Child, ChildStdin, ChildStdout, Command, Stdio};
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::mpsc::{Receiver, Sender, channel};
use std::sync::{LazyLock, Mutex};
use std::thread;
use std::time::{Duration, Instant};

use rlock_tests::{Server, patience, until};

/// One process for all tests, since a virtual machine takes a second to start. It ends with its
/// input, so with us.
static JAVA: LazyLock<Java> = LazyLock::new(Java::start);

struct Java {
    input: Mutex<ChildStdin>,
    answers: Mutex<HashMap<String, Sender<Line>>>,
    /// The two clocks' times at the same moment.
    clocks: (Instant, i64),
    /// How far apart the two may have been.
    inaccuracy: Duration,
    _child: Child,
}

/// An answer as it was printed.
struct Line {
    began: i64,
    ended: i64,
    text: String,
}

/// A thread's command, and the times at which Redisson was called and returned.
#[derive(Debug)]
pub(crate) struct Answer {
    pub(crate) text: String,
    pub(crate) began: Instant,
    pub(crate) ended: Instant,
}

/// One Redisson instance. It is shut down with the value, and its locks are not given back.
pub(crate) struct Redisson {
    name: String,
    uuid: String,
}

/// A Java thread of its own, and so an owner.
pub(crate) struct Owner {
    thread: String,
    client: String,
    answers: Receiver<Line>,
}

/// How long a call that does not wait may take.
const SOON: Duration = Duration::from_secs(20);

fn number() -> u64 {
    static NEXT: AtomicU64 = AtomicU64::new(0);
    NEXT.fetch_add(1, Ordering::Relaxed)
}

impl Java {
    fn start() -> Self {
        let class_path = env::var("RLOCK_CLASS_PATH");
        let class_path = class_path.expect("RLOCK_CLASS_PATH: start these tests by `make interop`");
        let mut child = Command::new("java")
            // Starts soon, stays small, and keeps its own remarks out of the answers.
            .args(["-XX:+UseSerialGC", "-XX:TieredStopAtLevel=1", "-Xmx256m"])
            .arg("-XX:+DisplayVMOutputToStderr")
            .args(["-Dslf4j.internal.verbosity=ERROR", "-cp", &class_path])
            .arg(concat!(
                env!("CARGO_MANIFEST_DIR"),
                "/interop/redisson/Driver.java"
            ))
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .spawn()
            .expect("java starts");
        let mut input = child.stdin.take().expect("its input");
        let mut output = BufReader::new(child.stdout.take().expect("its output"));
        let (clocks, inaccuracy) = compare_clocks(&mut input, &mut output);
        thread::spawn(|| hand_out(output));
        Self {
            input: Mutex::new(input),
            answers: Mutex::default(),
            clocks,
            inaccuracy,
            _child: child,
        }
    }

    fn say(&self, line: &str) {
        let mut input = self.input.lock().expect("no thread died saying");
        writeln!(input, "{line}").expect("java reads what it is told");
    }

    /// The moment at which Java's clock showed that.
    fn instant(&self, nanos: i64) -> Instant {
        let (instant, at) = self.clocks;
        let apart = Duration::from_nanos(nanos.abs_diff(at));
        if nanos >= at {
            instant + apart
        } else {
            instant.checked_sub(apart).expect("after the boot")
        }
    }
}

/// Asks Java for the time and takes the answer that came fastest: it was right in the middle, give
/// or take half of the time it took.
fn compare_clocks(
    input: &mut ChildStdin,
    output: &mut BufReader<ChildStdout>,
) -> ((Instant, i64), Duration) {
    let mut best = None::<(Duration, Instant, i64)>;
    for _ in 0..200 {
        let asked = Instant::now();
        writeln!(input, "clock - now").expect("java reads");
        let mut line = String::new();
        output.read_line(&mut line).expect("java answers");
        let took = asked.elapsed();
        let (_, line) = parse(&line);
        if best.is_none_or(|(least, ..)| took < least) {
            best = Some((took, asked + took / 2, line.ended));
        }
    }
    let (took, instant, nanos) = best.expect("an answer");
    ((instant, nanos), took / 2)
}

fn parse(line: &str) -> (&str, Line) {
    let words: Vec<_> = line.trim_end().splitn(4, ' ').collect();
    let [thread, began, ended, text] = words[..] else {
        panic!("java says {line:?}");
    };
    let nanos = |word: &str| {
        word.parse()
            .unwrap_or_else(|_| panic!("java says {line:?}"))
    };
    let (began, ended) = (nanos(began), nanos(ended));
    let text = text.to_owned();
    (thread, Line { began, ended, text })
}

/// Gives each answer to its thread. One for an owner that has been dropped is discarded.
fn hand_out(output: BufReader<ChildStdout>) {
    for line in output.lines() {
        let line = line.expect("text");
        let (thread, answer) = parse(&line);
        let answers = JAVA.answers.lock().expect("no thread died listening");
        if let Some(listener) = answers.get(thread) {
            let _ = listener.send(answer);
        }
    }
}

/// By how much times of Java may be wrong here.
pub(crate) fn clock_inaccuracy() -> Duration {
    JAVA.inaccuracy
}

impl Redisson {
    /// A client of this server, with Redisson's own watchdog of 30 s.
    #[track_caller]
    pub(crate) fn of(server: &Server) -> Self {
        Self::with_watchdog(server, Duration::from_secs(30))
    }

    /// A client whose locks without a lease have this one, and are renewed each third of it.
    #[track_caller]
    pub(crate) fn with_watchdog(server: &Server, watchdog: Duration) -> Self {
        Self::open("single", server, watchdog, "")
    }

    /// A client of this node's cluster.
    #[track_caller]
    pub(crate) fn of_cluster(node: &Server) -> Self {
        Self::open("cluster", node, Duration::from_secs(30), "")
    }

    /// A client that gives a name and a password.
    #[track_caller]
    pub(crate) fn as_user(server: &Server, user_and_password: &str) -> Self {
        Self::open("single", server, Duration::from_secs(30), user_and_password)
    }

    /// Whether it is at least this version.
    pub(crate) fn is_at_least(version: (u32, u32)) -> bool {
        let class_path = env::var("RLOCK_CLASS_PATH").unwrap_or_default();
        let jar = class_path.split("/redisson-").nth(1).expect("its jar");
        let mut numbers = jar.split('.').map(|number| number.parse().unwrap_or(0));
        let mut number = || numbers.next().unwrap_or(0);
        (number(), number()) >= version
    }

    #[track_caller]
    fn open(mode: &str, server: &Server, watchdog: Duration, user: &str) -> Self {
        let name = format!("c{}", number());
        let opener = Owner::new(&name);
        let (address, watchdog) = (server.address(), watchdog.as_millis());
        let uuid = opener.ask(format!("open {mode} {address} {watchdog} {user}").trim_end());
        assert!(!uuid.starts_with("error"), "{uuid}");
        Self { name, uuid }
    }

    /// The prefix of this client's owners.
    pub(crate) fn uuid(&self) -> &str {
        &self.uuid
    }

    /// A new thread of this client.
    pub(crate) fn owner(&self) -> Owner {
        Owner::new(&self.name)
    }
}

impl Drop for Redisson {
    fn drop(&mut self) {
        // Owners that wait get an exception.
        let answer = Owner::new(&self.name).ask("shutdown");
        if !thread::panicking() {
            assert_eq!(answer, "ok");
        }
    }
}

impl Owner {
    fn new(client: &str) -> Self {
        let thread = format!("t{}", number());
        let (sender, answers) = channel();
        let mut all = JAVA.answers.lock().expect("no thread died listening");
        all.insert(thread.clone(), sender);
        Self {
            thread,
            client: client.to_owned(),
            answers,
        }
    }

    /// Tells the thread what to do.
    pub(crate) fn tell(&self, words: &str) {
        JAVA.say(&format!("{} {} {words}", self.thread, self.client));
    }

    /// Its answer to the first command.
    #[track_caller]
    pub(crate) fn answer(&self) -> Answer {
        self.answer_within(SOON)
    }

    /// [`Owner::answer`], which must come in that time.
    #[track_caller]
    pub(crate) fn answer_within(&self, deadline: Duration) -> Answer {
        let line = self.answers.recv_timeout(patience(deadline));
        let line = line.unwrap_or_else(|_| panic!("no answer of Java within {deadline:?}"));
        Answer {
            text: line.text,
            began: JAVA.instant(line.began),
            ended: JAVA.instant(line.ended),
        }
    }

    /// Tells it and waits for its answer.
    #[track_caller]
    pub(crate) fn ask(&self, words: &str) -> String {
        self.tell(words);
        self.answer().text
    }

    /// Takes or gives back something, which must succeed.
    #[track_caller]
    pub(crate) fn does(&self, words: &str) {
        assert_eq!(self.ask(words), "ok", "{words}");
    }

    /// The owner's name in the hash of a lock: `<uuid>:<thread id>`.
    #[track_caller]
    pub(crate) fn id(&self) -> String {
        self.ask("id")
    }

    /// Tells it to take a lock that it cannot have now, and sees it asleep until a message or the
    /// TTL that it was told.
    #[track_caller]
    pub(crate) fn waits(&self, words: &str) {
        self.tell(words);
        self.sleeps();
    }

    /// Sees it asleep so.
    #[track_caller]
    pub(crate) fn sleeps(&self) {
        let watcher = Self::new(&self.client);
        until("the Java thread sleeps", || {
            watcher.ask(&format!("parked {}", self.thread)) == "true"
        });
    }

    /// It is not done yet.
    #[track_caller]
    pub(crate) fn has_not_answered(&self) {
        self.has_not_answered_within(Duration::ZERO);
    }

    /// It takes longer than that.
    #[track_caller]
    pub(crate) fn has_not_answered_within(&self, time: Duration) {
        if let Ok(line) = self.answers.recv_timeout(time) {
            panic!("an answer too early: {}", line.text);
        }
    }
}

impl Drop for Owner {
    fn drop(&mut self) {
        let mut all = JAVA.answers.lock().expect("no thread died listening");
        all.remove(&self.thread);
    }
}
