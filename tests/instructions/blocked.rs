//! Hand-overs to clients that are blocked, each on a connection of its own.

use rlock_tests::Conn;

use crate::counted::{Counted, expect};
use crate::operations::{OTHER, OWNER, Step, acquire, release};
use crate::{KEYS, difference};

pub(crate) const NAME: &str = "hand-over to the blocked";

/// The instructions of an ACQUIRE that waits and the RELEASE by which it has the lock.
pub(crate) fn count(server: &mut Counted) -> u64 {
    let keys: Vec<String> = (0..KEYS).map(|number| format!("lock:{number}")).collect();
    let for_keys =
        |step: &dyn Fn(&str) -> Step| -> Vec<Step> { keys.iter().map(|key| step(key)).collect() };
    let mut waiters: Vec<Conn> = keys.iter().map(|_| server.server.connect()).collect();
    server.run(&for_keys(&|key| acquire(key, OWNER, "", "[1, _]")));

    let (mut holds, mut waits) = (OWNER, OTHER);
    let cost = difference(server, KEYS, |server| {
        let blocked = for_keys(&|key| acquire(key, waits, " BLOCK 0", "[1, _]"));
        let released = for_keys(&|key| release(key, holds, "", "0"));
        // All of it is there when the server looks, so that it takes the same turns every time;
        // it reads connections in the order in which something came.
        server.server.fall_asleep();
        server.server.freeze();
        for (waiter, step) in waiters.iter_mut().zip(&blocked) {
            waiter.send(&step.command);
        }
        let commands: Vec<&str> = released.iter().map(|step| step.command.as_str()).collect();
        server.conn().send_all(&commands);
        server.server.thaw();
        for step in &released {
            let reply = server.conn().read();
            expect(step, &format!("{reply:?}"));
        }
        for (waiter, step) in waiters.iter_mut().zip(&blocked) {
            expect(step, &format!("{:?}", waiter.read()));
        }
        std::mem::swap(&mut holds, &mut waits);
    });
    server.keep_profile(NAME);
    server.run(&for_keys(&|key| release(key, holds, "", "0")));
    cost
}
