//! The log that operators read, and the counters by patterns of names.

use crate::wanted::{LIMITS, NOW, decide, words};
use rlock_core::request::{Acquire, Events, MultiAcquire, Release};
use rlock_core::{
    BlockedClient, Command, Count, Effect, Hash, HeldBy, Known, LOGGED_NAME_MAX, LockRef, Locks,
    LogEvent, LogOptions, LogView, Longest, Mode, Now, Outcome, Purpose, Read, Stored, Subject,
    Token, Turn,
};

const END: i64 = 9_000_000;

/// Logs ten entries, and holds and waits from a second on.
fn locks_that_log() -> Locks {
    let mut locks = Locks::default();
    locks.set_log_options(LogOptions {
        max_len: 10,
        holds_ms: 1000,
        waits_ms: 1000,
    });
    locks
}

fn entries(locks: &Locks) -> Vec<LogView> {
    let entries = locks.log_entries();
    entries
        .filter_map(|entry| entry.seen_by(|_| true))
        .collect()
}

fn events(locks: &Locks) -> Vec<(LogEvent, String)> {
    let entries = entries(locks).into_iter();
    entries.map(|entry| (entry.event, entry.text)).collect()
}

fn plain(own: Option<Token>, ends_at: Option<i64>) -> Stored {
    Stored::Plain(Hash {
        own: own.map(|_| Count::Valid(1)),
        token: Known::read(own.or(Token::new(7))),
        others: own.is_none(),
        ends_at: Known::read(ends_at),
    })
}

fn takes(locks: &mut Locks, request: &str) -> Token {
    let request = Acquire::parse(words(request)).unwrap();
    match decide(locks, Command::Acquire(&request), &[Stored::Free]).1 {
        Outcome::Held { token, .. } => token,
        other => panic!("{other:?}"),
    }
}

/// Runs a command at this time. Bob holds `b`, and alice the other locks. The client waits, if it
/// must.
fn runs(
    locks: &mut Locks,
    command: Command<'_>,
    now: Now,
    stored: &[Stored],
) -> Result<Outcome, rlock_core::CommandError> {
    let (mut turn, mut effects) = (Turn::of(command, 0, 10), Vec::new());
    let (alice, bob) = ([Box::from(&b"alice"[..])], [Box::from(&b"bob"[..])]);
    while let Some(task) = locks.next_task(&mut turn, now) {
        let read = match (&task.subject, task.purpose, command) {
            (Subject::One(lock, _), Purpose::Holders, _) if &*lock.name == b"b" => {
                Read::Owners(&bob)
            }
            (_, Purpose::Holders, _) => Read::Owners(&alice),
            (_, _, Command::MultiAcquire(_)) => Read::Several(stored),
            _ => Read::One(&stored[0]),
        };
        locks.decide(&mut turn, task.found(read), now, &mut effects);
    }
    let outcome = turn.outcome();
    if let Ok(Outcome::MustWait { .. }) = outcome {
        let client = BlockedClient {
            handle: 1,
            client_id: 1,
        };
        let joined = locks.enqueue(&mut turn, Some(client), now, &mut effects);
        assert!(joined.is_some());
    }
    outcome
}

fn waits(locks: &mut Locks, request: &str, now: Now, ends_at: Option<i64>) {
    let request = Acquire::parse(words(request)).unwrap();
    let held = [plain(None, ends_at)];
    let outcome = runs(locks, Command::Acquire(&request), now, &held);
    assert!(
        matches!(outcome, Ok(Outcome::MustWait { .. })),
        "{outcome:?}"
    );
}

fn listens(locks: &mut Locks) {
    let listens = Events::parse(words("s")).unwrap();
    let session = locks.attach(&listens, 1, LIMITS, NOW, &mut Vec::new());
    assert!(locks.take_events(session.unwrap().session, NOW).is_some());
}

#[test]
fn a_hold_is_logged_when_it_was_as_long_as_the_threshold() {
    for (held_ms, is_long) in [(999, false), (1000, true), (1001, true)] {
        let mut locks = locks_that_log();
        let token = takes(&mut locks, "k alice 5000");
        let release = Release::parse(words("k alice")).unwrap();
        let own = [plain(Some(token), Some(END))];
        let now = NOW.after(held_ms);
        runs(&mut locks, Command::Release(&release), now, &own).unwrap();
        let text = format!("given back, after {held_ms} ms");
        let should = is_long.then_some((LogEvent::LongHold, text));
        assert_eq!(events(&locks), Vec::from_iter(should));
    }
}

/// When the present holder's token was minted ahead of the clock, only the latest tells its time.
#[test]
fn a_hold_of_unknown_age_is_not_logged() {
    let mut locks = locks_that_log();
    locks.start_tokens(NOW, 60_000);
    let token = takes(&mut locks, "k alice 5000");
    takes(&mut locks, "other alice 5000");
    let release = Release::parse(words("k alice")).unwrap();
    let own = [plain(Some(token), Some(END))];
    let now = NOW.after(2000);
    runs(&mut locks, Command::Release(&release), now, &own).unwrap();
    assert_eq!(events(&locks), []);
}

/// Others were granted since, so the token alone does not tell its age any more.
#[test]
fn a_hold_keeps_its_age_when_its_owner_enters_again() {
    let mut locks = Locks::default();
    listens(&mut locks);
    locks.start_tokens(NOW, 60_000);
    let token = takes(&mut locks, "k alice 5000 SESSION s");
    takes(&mut locks, "other alice 5000");
    let again = Acquire::parse(words("k alice 5000")).unwrap();
    let own = [plain(Some(token), Some(END))];
    runs(&mut locks, Command::Acquire(&again), NOW.after(10), &own).unwrap();
    let (at, now) = (LockRef { db: 0, name: b"k" }, NOW.after(30));
    let view = locks.hold_view(at, b"alice", Mode::Plain, Some(token), now);
    assert_eq!(view.held_ms, Some(30));
}

/// Alice has one lock and waits for the other; bob has that one, and wants alice's.
fn circle(locks: &mut Locks, alices: &str) -> Result<Outcome, rlock_core::CommandError> {
    let first = Acquire::parse(words("b alice 1000 BLOCK 0")).unwrap();
    let held = [plain(None, Some(END))];
    runs(locks, Command::Acquire(&first), NOW, &held).unwrap();
    let second = format!("{alices} bob 1000 BLOCK 0");
    let second = Acquire::parse(words(&second)).unwrap();
    runs(locks, Command::Acquire(&second), NOW, &held)
}

#[test]
fn a_refused_circle_is_logged_with_its_owners_and_locks() {
    let mut locks = locks_that_log();
    circle(&mut locks, "a").unwrap_err();
    let text = "2 owners would wait for each other: 'bob' waits for 'alice' at 'a', \
                'alice' waits for 'bob' at 'b'";
    assert_eq!(events(&locks), [(LogEvent::Deadlock, text.to_owned())]);
    // Nobody reads the name of a lock that is not theirs.
    let entry = locks.log_entries().next().unwrap();
    let seen = entry.seen_by(|name| name == b"a").unwrap();
    assert!(!seen.text.contains("at 'b'"), "{}", seen.text);
    // Off, it logs nothing.
    let mut silent = Locks::default();
    circle(&mut silent, "a").unwrap_err();
    assert_eq!(events(&silent), []);
}

#[test]
fn a_circle_at_a_lock_with_a_name_too_long_to_be_kept_is_not_logged() {
    for (len, kept) in [(LOGGED_NAME_MAX, 1), (LOGGED_NAME_MAX + 1, 0)] {
        let mut locks = locks_that_log();
        circle(&mut locks, &"a".repeat(len)).unwrap_err();
        assert_eq!(events(&locks).len(), kept);
    }
}

/// The timer fires. Returns the locks that it looked at for the log, and the lines for the server's
/// own log.
fn notes(locks: &mut Locks, now: Now, holder: Option<&HeldBy>) -> (Vec<Vec<u8>>, Vec<String>) {
    let (mut turn, mut effects) = (Turn::of_deadlines(), Vec::new());
    let mut looked_at = Vec::new();
    while let Some(task) = locks.next_task(&mut turn, now) {
        assert_eq!(task.purpose, Purpose::LongWait);
        let Subject::One(lock, _) = &task.subject else {
            panic!("{task:?}");
        };
        looked_at.push(lock.name.to_vec());
        let read = Read::Holder(holder.cloned());
        locks.decide(&mut turn, task.found(read), now, &mut effects);
    }
    let mut lines = Vec::new();
    for effect in effects {
        if let Effect::Log(line) = effect {
            lines.push(line);
        }
    }
    (looked_at, lines)
}

#[test]
fn a_long_wait_names_the_holder_in_both_logs() {
    let mut locks = locks_that_log();
    listens(&mut locks);
    let token = takes(&mut locks, "k alice 5000 SESSION s");
    waits(&mut locks, "k bob 1000 BLOCK 0", NOW, Some(END));
    let now = NOW.after(1000);
    let alice = HeldBy {
        owner: Box::from(&b"alice"[..]),
        mode: Mode::Plain,
        token: Some(token),
        ends_at: NOW.wall_ms() + 5000,
    };
    let (looked_at, lines) = notes(&mut locks, now, Some(&alice));
    assert_eq!(looked_at, [b"k"]);
    let text = format!(
        "has waited for 1000 ms, number 1 in the queue; held by 'alice' for 1000 ms, token {}, \
         session 's', 4000 ms of its lease are left",
        token.get()
    );
    assert!(lines.len() == 1 && lines[0].contains(&text), "{lines:?}");
    assert_eq!(events(&locks), [(LogEvent::LongWait, text)]);
}

#[test]
fn a_long_wait_for_a_lock_that_nobody_holds_says_so() {
    let mut locks = locks_that_log();
    waits(&mut locks, "k bob 1000 BLOCK 0", NOW, Some(END));
    notes(&mut locks, NOW.after(1000), None);
    let text = "has waited for 1000 ms, number 1 in the queue; nobody holds it now";
    assert_eq!(events(&locks), [(LogEvent::LongWait, text.to_owned())]);
}

/// Nobody waits any more, and nothing else is due.
#[test]
fn lines_that_were_left_out_are_counted_although_nothing_else_happens() {
    let mut locks = locks_that_log();
    let names: Vec<String> = (0..12).map(|number| format!("k{number}")).collect();
    for name in &names {
        let request = format!("{name} bob{name} 1000 BLOCK 0");
        waits(&mut locks, &request, NOW, Some(END));
    }
    let mut now = NOW.after(1000);
    assert_eq!(notes(&mut locks, now, None).1.len(), 10);
    for name in &names {
        let request = format!("{name} bob{name}");
        let cancel = rlock_core::request::Cancel::parse(words(&request)).unwrap();
        let held = [plain(None, Some(END))];
        runs(&mut locks, Command::Cancel(&cancel), now, &held).unwrap();
    }
    assert_eq!(locks.next_task(&mut Turn::of_timer(), now), None);
    assert!(!locks.is_quiet());
    assert_eq!(locks.next_deadline(now), Some(1000));
    now = now.after(1000);
    let mut effects = Vec::new();
    locks.passed(now, &mut effects);
    let line = "2 more long waits were left out of this log";
    assert_eq!(effects, [Effect::Log(line.to_owned())]);
    assert!(locks.is_quiet());
}

/// The one whose lease is known to end is held; the other may be free.
#[test]
fn of_several_the_lock_that_is_held_is_looked_at() {
    for held in [0, 1] {
        let mut locks = locks_that_log();
        let wait = MultiAcquire::parse(words("bob 1000 2 a b BLOCK 0")).unwrap();
        let mut stored = [Stored::Free; 2];
        stored[held] = plain(None, Some(END));
        let wait = Command::MultiAcquire(&wait);
        runs(&mut locks, wait, NOW, &stored).unwrap();
        let (looked_at, _) = notes(&mut locks, NOW.after(1000), None);
        assert_eq!(looked_at, [[b"a", b"b"][held]]);
    }
}

#[test]
fn a_session_that_ends_is_logged_if_it_had_holds() {
    let mut locks = locks_that_log();
    listens(&mut locks);
    locks.client_gone(1, NOW, &mut Vec::new());
    assert_eq!(events(&locks), [], "it had none");
    listens(&mut locks);
    takes(&mut locks, "a alice 5000 SESSION s");
    takes(&mut locks, "b alice 5000 SESSION s");
    locks.client_gone(1, NOW, &mut Vec::new());
    let text = "the session 's' ended with 2 holds, among them 'a', 'b'";
    assert_eq!(events(&locks), [(LogEvent::SessionEnded, text.to_owned())]);
}

#[test]
fn a_session_tells_its_age() {
    let mut locks = Locks::default();
    listens(&mut locks);
    let views: Vec<_> = locks.session_views(NOW.after(30)).collect();
    assert_eq!(views[0].age_ms, 30);
}

#[test]
fn each_event_has_the_name_of_the_manual() {
    let names = [
        (LogEvent::Lost, "lost"),
        (LogEvent::Broken, "broken"),
        (LogEvent::Deadlock, "deadlock"),
        (LogEvent::LongWait, "long-wait"),
        (LogEvent::LongHold, "long-hold"),
        (LogEvent::SessionEnded, "session-ended"),
        (LogEvent::QueueFull, "queue-full"),
    ];
    for (event, name) in names {
        assert_eq!(event.name(), name);
    }
}

// --- By patterns of names ------------------------------------------------------------------------

fn counted(locks: &Locks) -> Vec<(Vec<u8>, u64, u64)> {
    let counters = locks.pattern_counters().iter();
    counters
        .map(|of| (of.pattern.to_vec(), of.grants, of.waits))
        .collect()
}

#[test]
fn grants_and_waits_are_counted_by_the_first_pattern_that_fits() {
    let mut locks = Locks::default();
    locks.set_metrics_patterns(b"a* *b");
    takes(&mut locks, "ab alice 5000");
    takes(&mut locks, "b alice 5000");
    takes(&mut locks, "c alice 5000");
    waits(&mut locks, "bb bob 1000 BLOCK 0", NOW, Some(END));
    let row = |pattern: &str, grants, waits| (pattern.as_bytes().to_vec(), grants, waits);
    assert_eq!(counted(&locks), [row("a*", 1, 0), row("*b", 1, 1)]);
    // The same again leaves the counts; others begin anew.
    locks.set_metrics_patterns(b"a* *b");
    assert_eq!(counted(&locks), [row("a*", 1, 0), row("*b", 1, 1)]);
    locks.set_metrics_patterns(b"*b");
    assert_eq!(counted(&locks), [row("*b", 0, 0)]);
}

/// The longest wait and hold, of the locks of each pattern and of all.
fn longest(locks: &Locks, now: Now) -> [(i64, i64); 3] {
    [Some(1), Some(2), None].map(|pattern| {
        let Longest { wait_ms, hold_ms } = locks.longest(pattern, now);
        (wait_ms, hold_ms)
    })
}

#[test]
fn the_longest_wait_and_hold_are_told_by_pattern_also_when_the_patterns_change() {
    let mut locks = Locks::default();
    locks.set_metrics_patterns(b"a* b*");
    listens(&mut locks);
    assert_eq!(longest(&locks, NOW), [(0, 0); 3]);
    takes(&mut locks, "a1 alice 9000 SESSION s");
    waits(&mut locks, "a1 bob 1000 BLOCK 0", NOW.after(10), Some(END));
    waits(
        &mut locks,
        "a1 carol 1000 BLOCK 0",
        NOW.after(20),
        Some(END),
    );
    waits(&mut locks, "b1 bob 1000 BLOCK 0", NOW.after(30), Some(END));
    let now = NOW.after(100);
    assert_eq!(longest(&locks, now), [(90, 100), (70, 0), (90, 100)]);
    locks.set_metrics_patterns(b"b* a*");
    assert_eq!(longest(&locks, now), [(70, 0), (90, 100), (90, 100)]);
    // The first waiter goes, and the hold ends.
    let cancel = rlock_core::request::Cancel::parse(words("a1 bob")).unwrap();
    let held = [plain(None, Some(END))];
    runs(&mut locks, Command::Cancel(&cancel), now, &held).unwrap();
    assert_eq!(longest(&locks, now), [(70, 0), (80, 100), (80, 100)]);
    locks.client_gone(1, now, &mut Vec::new());
    assert_eq!(longest(&locks, now), [(70, 0), (80, 0), (80, 0)]);
}
