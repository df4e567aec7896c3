//! Hand-overs to clients that are blocked, each on a connection of its own.

use rlock_tests::Conn;

use crate::counted::{Counted, expect};
use crate::operations::{OTHER, OWNER, Step, acquire, release};
use crate::{KEYS, difference};

/// One waits for each lock, and one owner for all of them.
pub(crate) const ALONE: &str = "hand-over to the blocked";

/// All wait for one lock, each for itself.
pub(crate) const IN_QUEUE: &str = "hand-over within a queue";

/// The instructions of an ACQUIRE that waits and the RELEASE by which it has the lock.
pub(crate) fn count_alone(server: &mut Counted) -> u64 {
    let keys: Vec<String> = (0..KEYS).map(|number| format!("lock:{number}")).collect();
    let for_keys =
        |step: &dyn Fn(&str) -> Step| -> Vec<Step> { keys.iter().map(|key| step(key)).collect() };
    let mut waiters = connect(server);
    server.run(&for_keys(&|key| acquire(key, OWNER, "", "[1, _]")));

    let (mut holds, mut waits) = (OWNER, OTHER);
    let cost = difference(server, KEYS, |server| {
        let blocked = for_keys(&|key| acquire(key, waits, " BLOCK 0", "[1, _]"));
        let released = for_keys(&|key| release(key, holds, "", "0"));
        hand_over(server, &mut waiters, &blocked, &released);
        std::mem::swap(&mut holds, &mut waits);
    });
    server.keep_profile(ALONE);
    server.run(&for_keys(&|key| release(key, holds, "", "0")));
    cost
}

/// The same, where each RELEASE is by the one before.
pub(crate) fn count_in_queue(server: &mut Counted) -> u64 {
    let key = "lock";
    let owners: Vec<String> = (0..KEYS).map(|number| format!("{OWNER}{number}")).collect();
    let mut waiters = connect(server);
    let mut holds = OTHER.to_owned();
    server.run(&[acquire(key, &holds, "", "[1, _]")]);

    let cost = difference(server, KEYS, |server| {
        // The last of the queue holds it, and waits no more: another is in its place.
        let waits = |owner: &String| if *owner == holds { OTHER } else { owner }.to_owned();
        let waits: Vec<String> = owners.iter().map(waits).collect();
        let blocked: Vec<Step> = waits
            .iter()
            .map(|owner| acquire(key, owner, " BLOCK 0", "[1, _]"))
            .collect();
        let holders = [&holds].into_iter().chain(&waits).take(KEYS);
        let released: Vec<Step> = holders.map(|owner| release(key, owner, "", "0")).collect();
        hand_over(server, &mut waiters, &blocked, &released);
        holds.clone_from(&waits[KEYS - 1]);
    });
    server.keep_profile(IN_QUEUE);
    server.run(&[release(key, &holds, "", "0")]);
    cost
}

fn connect(server: &Counted) -> Vec<Conn> {
    (0..KEYS).map(|_| server.server.connect()).collect()
}

/// Each of the waiters blocks, and one connection releases for all holders.
fn hand_over(server: &mut Counted, waiters: &mut [Conn], blocked: &[Step], released: &[Step]) {
    // All of it is there when the server looks, so that it takes the same turns every time; it
    // reads connections in the order in which something came.
    server.server.fall_asleep();
    server.server.freeze();
    for (waiter, step) in waiters.iter_mut().zip(blocked) {
        waiter.send(&step.command);
    }
    let commands: Vec<&str> = released.iter().map(|step| step.command.as_str()).collect();
    server.conn().send_all(&commands);
    server.server.thaw();
    for step in released {
        let reply = server.conn().read();
        expect(step, &format!("{reply:?}"));
    }
    for (waiter, step) in waiters.iter_mut().zip(blocked) {
        expect(step, &format!("{:?}", waiter.read()));
    }
}
