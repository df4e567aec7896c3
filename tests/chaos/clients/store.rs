//! An application that keeps a set in a store: it reads the set, adds to it and writes it back, all
//! under a lock whose lease it does not renew.
//!
//! One trusts the lock alone. The second shows the store its token with every access, reads
//! included, and the store refuses those smaller than the largest it has seen. The third has the
//! server run each access only if the lock is held (`RLOCK.GUARD`); it sends that itself, since a
//! call of its guard would ask the guard again, and seldom the server.

use std::time::Duration;

use rlock_client::{Client, Guard};
use rlock_tests::{Conn, Reply};
use tokio::time::sleep;

use super::Life;

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Check {
    None,
    Token,
    Guarded,
}

/// How long the lock is held if nothing goes wrong is a small part of it.
pub(crate) const LEASE: Duration = Duration::from_millis(400);

const LOCK: &str = "guarded";

const WORK: Duration = Duration::from_millis(30);

/// Compares numbers of one length as text, so that no digit is rounded away.
const CHECKED: &str = "local last = redis.call('get', KEYS[2]) or '' \
     if #ARGV[1] < #last or (#ARGV[1] == #last and ARGV[1] < last) then \
     return redis.error_reply('STALE token') end \
     redis.call('set', KEYS[2], ARGV[1]) \
     if ARGV[2] then redis.call('set', KEYS[1], ARGV[2]) end \
     return redis.call('get', KEYS[1]) or ''";

pub(super) fn run(life: &Life, check: Check) {
    let runtime = tokio::runtime::Builder::new_current_thread()
        .enable_all()
        .build();
    runtime.expect("a runtime").block_on(async {
        let client = Client::connect(&format!("redis://{}", life.address)).await;
        let client = client.expect("a server");
        let mut store = Conn::open(life.address).expect("a server");
        while life.goes_on() {
            add(life, &client, &mut store, check).await;
            sleep(Duration::from_millis(5)).await;
        }
        client.shutdown().await;
    });
}

async fn add(life: &Life, client: &Client, store: &mut Conn, check: Check) {
    let Ok(guard) = client.lock(LOCK).lease(LEASE).lock().await else {
        return;
    };
    let element = life.owner();
    let set = access(store, check, &guard, None);
    let Some(set) = set else {
        return life.says("refused");
    };
    if guard.is_lost() {
        return;
    }
    // From here on it trusts its last look, as any program must at some point.
    life.says(&format!("inside {element}"));
    sleep(WORK).await;
    let set = format!("{set},{element}");
    match access(store, check, &guard, Some(&set)) {
        Some(_) => life.says(&format!("added {element}")),
        None => life.says("refused"),
    }
    // If it was lost there is nothing to give back.
    let _ = guard.unlock().await;
}

/// Reads the set, or writes it; `None`: the store refuses.
fn access(store: &mut Conn, check: Check, guard: &Guard, write: Option<&str>) -> Option<String> {
    let (token, owner) = (guard.token().to_string(), guard.owner().to_string());
    let guarded = ["RLOCK.GUARD", LOCK, &owner, "TOKEN", &token, "CALL"];
    let reply = match (check, write) {
        (Check::None, None) => store.cmd(&["GET", "set"]),
        (Check::None, Some(set)) => store.cmd(&["SET", "set", set]),
        (Check::Token, None) => store.cmd(&["EVAL", CHECKED, "2", "set", "last", &token]),
        (Check::Token, Some(set)) => store.cmd(&["EVAL", CHECKED, "2", "set", "last", &token, set]),
        (Check::Guarded, None) => store.cmd(&[&guarded[..], &["GET", "set"]].concat()),
        (Check::Guarded, Some(set)) => store.cmd(&[&guarded[..], &["SET", "set", set]].concat()),
    };
    match reply {
        Reply::Error(text) if text.starts_with(b"STALE") || text.starts_with(b"NOTHELD") => None,
        Reply::Null => Some(String::new()),
        reply => Some(reply.text()),
    }
}
