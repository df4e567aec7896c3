//! Waiting until, with a deadline.

use std::thread;
use std::time::{Duration, Instant};

use crate::server::Server;

/// Asks again and again until there is an answer.
///
/// `what` is a sentence for the failure: "the replica is in sync".
///
/// ```
/// let mut asked = 0;
/// let answer = rlock_tests::eventually("the third time", || {
///     asked += 1;
///     (asked == 3).then_some(asked)
/// });
/// assert_eq!(answer, 3);
/// ```
#[track_caller]
pub fn eventually<T>(what: &str, mut ask: impl FnMut() -> Option<T>) -> T {
    let deadline = Instant::now() + patience(Duration::from_secs(15));
    loop {
        if let Some(answer) = ask() {
            return answer;
        }
        assert!(Instant::now() < deadline, "never came true: {what}");
        thread::sleep(Duration::from_millis(2));
    }
}

/// [`eventually`], of something that is simply true at last.
///
/// ```
/// rlock_tests::until("the sky is up", || true);
/// ```
#[track_caller]
pub fn until(what: &str, mut is_true: impl FnMut() -> bool) {
    eventually(what, || is_true().then_some(()));
}

/// Sees that the server's own action comes less than `bound` late: in three of at most thirty
/// rounds, each of which tells how late it was.
///
/// A busy machine makes some rounds late, a fault makes all of them late. An action that waits for
/// the server's own tick comes anywhere between two ticks; they are a second apart from now on (`hz
/// 1`), so that it would be less than 10 ms late in one round of a hundred.
#[track_caller]
pub fn on_time(
    what: &str,
    server: &Server,
    bound: Duration,
    mut lateness: impl FnMut(u32) -> Duration,
) {
    assert_eq!(server.run("CONFIG SET hz 1"), "OK");
    let (mut late, mut on_time) = (Vec::new(), 0);
    for round in 0..30 {
        match lateness(round) {
            short if short < patience(bound) => on_time += 1,
            long => late.push(long),
        }
        if on_time == 3 {
            return;
        }
    }
    panic!("{what}: {on_time} of 30 less than {bound:?} late, the others {late:?}");
}

/// How long to wait where a sound server needs `normally`: longer under valgrind.
///
/// ```
/// use std::time::Duration;
/// assert!(rlock_tests::patience(Duration::from_secs(1)) >= Duration::from_secs(1));
/// ```
pub fn patience(normally: Duration) -> Duration {
    if crate::server::under_valgrind() {
        normally * 10
    } else {
        normally
    }
}
