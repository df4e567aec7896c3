//! Waiting until, with a deadline.

use std::thread;
use std::time::{Duration, Instant};

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
