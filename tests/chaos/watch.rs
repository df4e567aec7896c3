//! Asks the server again and again for holders and queues, on a connection that nothing disturbs.

use std::io;
use std::net::SocketAddr;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex};
use std::thread;
use std::time::Duration;

use rlock_tests::{Conn, Reply};

use crate::clients::Locks;
use crate::history::now;

#[derive(Debug)]
pub(crate) struct Watch {
    shared: Arc<Shared>,
    thread: Option<thread::JoinHandle<()>>,
}

#[derive(Debug)]
struct Shared {
    /// The server that decides; none while that is not sure.
    server: Mutex<Option<SocketAddr>>,
    locks: Locks,
    is_over: AtomicBool,
}

const EVERY: Duration = Duration::from_millis(10);

impl Watch {
    pub(crate) fn start(
        server: SocketAddr,
        locks: Locks,
        record: &Arc<Mutex<Vec<String>>>,
    ) -> Self {
        let shared = Arc::new(Shared {
            server: Mutex::new(Some(server)),
            locks,
            is_over: AtomicBool::new(false),
        });
        let (watching, record) = (Arc::clone(&shared), Arc::clone(record));
        let thread = thread::spawn(move || {
            while !watching.is_over.load(Ordering::SeqCst) {
                let server = *watching.server.lock().expect("an address");
                if let Some(server) = server {
                    // A server that is down is looked at again when it is up.
                    let _ = watch(server, &watching, &record);
                }
                thread::sleep(EVERY);
            }
        });
        Self {
            shared,
            thread: Some(thread),
        }
    }

    pub(crate) fn look_at(&self, server: Option<SocketAddr>) {
        *self.shared.server.lock().expect("an address") = server;
    }

    pub(crate) fn end(&mut self) {
        self.shared.is_over.store(true, Ordering::SeqCst);
        if let Some(thread) = self.thread.take() {
            thread.join().expect("it only looks");
        }
    }
}

impl Drop for Watch {
    fn drop(&mut self) {
        self.end();
    }
}

fn watch(server: SocketAddr, shared: &Shared, record: &Mutex<Vec<String>>) -> io::Result<()> {
    let mut conn = Conn::open(server)?;
    while !shared.is_over.load(Ordering::SeqCst) {
        let asked = now();
        for lock in shared.locks {
            conn.try_send(&format!("RLOCK.INFO {lock}"))?;
        }
        let replies: io::Result<Vec<_>> = shared
            .locks
            .iter()
            .map(|_| conn.try_read(Duration::from_secs(20)))
            .collect();
        let (replies, told) = (replies?, now());
        if replies.iter().any(Reply::is_error) {
            return Ok(());
        }
        // Held until the look is written down, so that a fault that changes it is written after it.
        let server_now = shared.server.lock().expect("an address");
        if *server_now != Some(server) {
            return Ok(());
        }
        let lines = shared.locks.iter().zip(&replies).map(|(lock, reply)| {
            format!(
                "info {asked} {told} {lock} {} {}",
                holders(reply),
                queue(reply)
            )
        });
        record.lock().expect("a list").extend(lines);
        drop(server_now);
        thread::sleep(EVERY);
    }
    Ok(())
}

fn holders(info: &Reply) -> String {
    let one = |of: &Reply, mode: &str| {
        let token = match of.get("token") {
            Reply::Int(token) => token.to_string(),
            _ => "?".to_owned(),
        };
        format!("{}/{mode}/{token}", of.get("owner").text())
    };
    let has = |what: &str| info.keys().iter().any(|key| key == what);
    if has("holders") && has("permits") {
        let holders = info.get("holders").array().iter();
        return list(holders.map(|holder| one(holder, &permits(holder))));
    }
    if has("holders") {
        let holders = info.get("holders").array().iter();
        return list(holders.map(|holder| one(holder, &holder.get("mode").text())));
    }
    match info.get("owner") {
        Reply::Null => "-".to_owned(),
        _ => one(info, "plain"),
    }
}

fn queue(info: &Reply) -> String {
    let waiters = info.get("queue").array().iter();
    list(waiters.map(|waiter| {
        let has = |what: &str| waiter.keys().iter().any(|key| key == what);
        let mode = if has("permits") {
            permits(waiter)
        } else if has("mode") {
            waiter.get("mode").text()
        } else {
            "plain".to_owned()
        };
        format!("{}/{mode}", waiter.get("owner").text())
    }))
}

/// The mode of a holder of permits, or of a waiter for them.
fn permits(of: &Reply) -> String {
    format!("permits:{}", of.get("permits").int())
}

fn list(items: impl Iterator<Item = String>) -> String {
    let items: Vec<_> = items.collect();
    if items.is_empty() {
        "-".to_owned()
    } else {
        items.join(",")
    }
}
