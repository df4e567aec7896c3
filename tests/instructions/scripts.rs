//! A re-entrant lock as it is usually written in Redis: our own words for what such scripts do.

use rlock_tests::Conn;

use crate::operations::{Step, step};

/// KEYS = lock; ARGV = lease, owner. Nil when held, else what is left.
const ACQUIRE: &str = "\
local taken = redis.call('EXISTS', KEYS[1]) == 1
if taken and redis.call('HEXISTS', KEYS[1], ARGV[2]) == 0 then
    return redis.call('PTTL', KEYS[1])
end
redis.call('HINCRBY', KEYS[1], ARGV[2], 1)
redis.call('PEXPIRE', KEYS[1], ARGV[1])
return nil";

/// KEYS = lock, channel, latch; ARGV = owner, lease, the latch's life. The latch makes a release
/// that is sent again harmless; the client deletes it once it has the reply.
const RELEASE: &str = "\
local done = redis.call('GET', KEYS[3])
if done then
    return tonumber(done)
end
if redis.call('HEXISTS', KEYS[1], ARGV[1]) == 0 then
    return nil
end
local left = redis.call('HINCRBY', KEYS[1], ARGV[1], -1)
if left > 0 then
    redis.call('PEXPIRE', KEYS[1], ARGV[2])
    redis.call('SET', KEYS[3], 0, 'PX', ARGV[3])
    return 0
end
redis.call('DEL', KEYS[1])
redis.call('PUBLISH', KEYS[2], '0')
redis.call('SET', KEYS[3], 1, 'PX', ARGV[3])
return 1";

/// The names by which the server knows them.
pub(crate) struct Scripts {
    acquire: String,
    release: String,
}

impl Scripts {
    pub(crate) fn load(conn: &mut Conn) -> Self {
        let mut load = |script| conn.cmd(&["SCRIPT", "LOAD", script]).text();
        Self {
            acquire: load(ACQUIRE),
            release: load(RELEASE),
        }
    }

    pub(crate) fn pair(&self, key: &str, owner: &str) -> Vec<Step> {
        let Self { acquire, release } = self;
        let latch = format!("latch:{key}");
        let keys = format!("3 {key} released:{key} {latch}");
        vec![
            step(format!("EVALSHA {acquire} 1 {key} 30000 {owner}"), "null"),
            step(format!("EVALSHA {release} {keys} {owner} 30000 16000"), "1"),
            step(format!("DEL {latch}"), "1"),
        ]
    }
}
