//! The operations that are counted: each is a few commands with their expected replies.

use std::sync::atomic::{AtomicU32, Ordering};

use crate::scripts::Scripts;

/// The holder and the next waiter, in the form in which the crate writes owners.
pub(crate) const OWNER: &str = "0b6bdc62-8d5c-4c0e-9d6f-6b8a5c1f2e3d:1234";
pub(crate) const OTHER: &str = "7f3a1d58-2b90-4a77-8c11-90d2e4b6a5c3:1234";

/// The session that lives by the connection on which everything is counted.
pub(crate) const SESSION: &str = "session";

/// A command, and its reply as `Reply` prints it; `_` stands for any one value.
#[derive(Clone)]
pub(crate) struct Step {
    pub(crate) command: String,
    pub(crate) reply: &'static str,
}

/// The steps for one key.
type Steps = Box<dyn Fn(&str) -> Vec<Step>>;

/// An operation to be counted, on uncontended keys.
pub(crate) struct Operation {
    pub(crate) name: &'static str,
    /// Sent before it is counted.
    pub(crate) before: Steps,
    /// The counted commands. They leave everything as they found it.
    pub(crate) steps: Steps,
    /// Sent afterwards.
    pub(crate) after: Steps,
}

/// The reference for all others, because none of its code is ours.
pub(crate) const YARDSTICK: &str = "SET NX PX + DEL";

/// This one is counted with `rlock.publish off`.
pub(crate) const UNPUBLISHED: &str = "ACQUIRE + RELEASE, publish off";

pub(crate) fn all(scripts: Scripts) -> Vec<Operation> {
    let (by_script, simple) = (scripts.clone(), scripts.clone());
    vec![
        operation(YARDSTICK, set_and_del),
        operation("the same with scripts", move |key| scripts.pair(key, OWNER)),
        operation("SET NX PX + compare-and-delete", move |key| {
            simple.simple_pair(key, OWNER)
        }),
        operation("ACQUIRE + RELEASE", |key| pair(key, "", "")),
        operation(UNPUBLISHED, |key| pair(key, "", "")),
        operation("ACQUIRE READ + RELEASE READ", |key| {
            pair(key, " READ", " READ")
        }),
        operation("ACQUIRE WRITE + RELEASE WRITE", |key| {
            pair(key, " WRITE", " WRITE")
        }),
        operation("MACQUIRE + MRELEASE of three", pair_of_three),
        of_held("re-entry + RELEASE", |key| {
            let reentry = acquire(key, OWNER, "", "[2, _]");
            vec![reentry, release(key, OWNER, "", "1")]
        }),
        of_held("RENEW", |key| {
            let renew = format!("RLOCK.RENEW {key} {OWNER} {LEASE_MS}");
            vec![step(renew, "1")]
        }),
        of_held("ACQUIRE refused", |key| {
            vec![acquire(key, OTHER, "", "[0, _]")]
        }),
        operation("SET", |key| vec![set_data(key, "")]),
        of_held("SET guarded", |key| {
            vec![set_data(key, &format!("RLOCK.GUARD {key} {OWNER} CALL "))]
        }),
        of_held("SET by a script that looks at the lock", move |key| {
            vec![by_script.guarded_set(key, OWNER)]
        }),
        // From here on there is a session, and with it the module listens to changed keys: each
        // costs more.
        Operation {
            before: Box::new(|_| {
                vec![
                    step(format!("RLOCK.EVENTS {SESSION}"), "[_, []]"),
                    // Otherwise the session would be told of each release.
                    step(
                        format!("RLOCK.BIND {SESSION} EPOCH {}", next_epoch()),
                        "[_, _]",
                    ),
                ]
            }),
            ..operation("ACQUIRE SESSION + RELEASE", |key| {
                pair(key, &format!(" SESSION {SESSION}"), "")
            })
        },
        of_held("two hand-overs to the queued", |key| {
            [hand_over(key, OWNER, OTHER), hand_over(key, OTHER, OWNER)].concat()
        }),
        Operation {
            before: Box::new(|key| {
                let (key, queue) = (elsewhere(key), format!(" QUEUE 0 SESSION {SESSION}"));
                let held = acquire(&key, OWNER, "", "[1, _]");
                vec![held, acquire(&key, OTHER, &queue, "[-1, 1, _, _]")]
            }),
            after: Box::new(|key| {
                let key = elsewhere(key);
                let cancel = step(format!("RLOCK.CANCEL {key} {OTHER}"), "1");
                vec![cancel, release(&key, OWNER, "", "0")]
            }),
            ..operation("SET NX PX + DEL while others wait", set_and_del)
        },
    ]
}

fn operation(name: &'static str, steps: impl Fn(&str) -> Vec<Step> + 'static) -> Operation {
    Operation {
        name,
        before: Box::new(|_| Vec::new()),
        steps: Box::new(steps),
        after: Box::new(|_| Vec::new()),
    }
}

/// An operation on a lock that its owner holds.
fn of_held(name: &'static str, steps: impl Fn(&str) -> Vec<Step> + 'static) -> Operation {
    Operation {
        before: Box::new(|key| vec![acquire(key, OWNER, "", "[1, _]")]),
        after: Box::new(|key| vec![release(key, OWNER, "", "0")]),
        ..operation(name, steps)
    }
}

fn set_and_del(key: &str) -> Vec<Step> {
    vec![
        step(format!("SET {key} {OWNER} NX PX 30000"), "+OK"),
        step(format!("DEL {key}"), "1"),
    ]
}

/// A write that a lock protects.
fn set_data(key: &str, guard: &str) -> Step {
    step(format!("{guard}SET data:{key} value"), "+OK")
}

/// Another lock.
fn elsewhere(key: &str) -> String {
    format!("elsewhere:{key}")
}

pub(crate) fn pair(key: &str, how: &str, mode: &str) -> Vec<Step> {
    let take = acquire(key, OWNER, how, "[1, _]");
    vec![take, release(key, OWNER, mode, "0")]
}

fn pair_of_three(key: &str) -> Vec<Step> {
    let keys = format!("3 {key}:a {key}:b {key}:c");
    let acquire = format!("RLOCK.MACQUIRE {OWNER} {LEASE_MS} {keys}");
    let release = format!("RLOCK.MRELEASE {OWNER} {keys}");
    vec![step(acquire, "[1, _]"), step(release, "3")]
}

/// From one owner to the other, which waits for the session and fetches its events. It is bound
/// before each count, with a larger number.
fn next_epoch() -> u32 {
    static LAST: AtomicU32 = AtomicU32::new(0);
    LAST.fetch_add(1, Ordering::Relaxed) + 1
}

fn hand_over(key: &str, from: &str, to: &str) -> Vec<Step> {
    let queue = format!(" QUEUE 0 SESSION {SESSION}");
    vec![
        acquire(key, to, &queue, "[-1, 1, _, _]"),
        release(key, from, "", "0"),
        step(
            format!("RLOCK.EVENTS {SESSION}"),
            "[_, [[_, \"granted\", _, _, _, _, _, _]]]",
        ),
    ]
}

/// So long that none ends while it is counted, however slow the machine is.
const LEASE_MS: u32 = 30_000_000;

pub(crate) fn acquire(key: &str, owner: &str, how: &str, reply: &'static str) -> Step {
    let command = format!("RLOCK.ACQUIRE {key} {owner} {LEASE_MS}{how}");
    step(command, reply)
}

pub(crate) fn release(key: &str, owner: &str, mode: &str, reply: &'static str) -> Step {
    step(format!("RLOCK.RELEASE {key} {owner}{mode}"), reply)
}

pub(crate) fn step(command: String, reply: &'static str) -> Step {
    Step { command, reply }
}
