//! Many that wait for a session, on one connection that carries all of them.

use rlock_tests::Server;

use crate::load::all_of;
use crate::wire::{Step, Wire};

/// How many wait for each lock of those that [`queue_elsewhere`] makes.
const A_LOCK: u64 = 10;

/// A session connection. The waits and holds of the session end with it.
pub(crate) fn session_connection(server: &Server, session: &str) -> Wire {
    let mut wire = Wire::open(server);
    wire.ask(&["RLOCK.EVENTS", session], &["*2", ":", "*0"]);
    wire
}

/// A wait that begins, at whatever place in the queue.
pub(crate) fn queue(lock: &str, owner: &str, session: &str) -> Step {
    let words = [
        "RLOCK.ACQUIRE",
        lock,
        owner,
        "3600000",
        "QUEUE",
        "0",
        "SESSION",
        session,
    ];
    Step::of(&words, &["*4", ":-1", ":", ":", ":"])
}

/// Waiters on locks that are held and stay so, ten on each. They go with the connection.
pub(crate) fn queue_elsewhere(server: &Server, waiters: u64) -> Wire {
    let session_connection = session_connection(server, "elsewhere");
    let locks = (0..waiters / A_LOCK).map(|lock| format!("elsewhere:{lock}"));
    all_of(
        server,
        locks.flat_map(|lock| {
            let held = ["RLOCK.ACQUIRE", &lock, "holder", "3600000"];
            let held = Step::of(&held, &["*2", ":1", ":"]);
            let wait = |number| queue(&lock, &format!("waiter:{number}"), "elsewhere");
            let waits: Vec<Step> = (0..A_LOCK).map(wait).collect();
            [held].into_iter().chain(waits)
        }),
    );
    session_connection
}
