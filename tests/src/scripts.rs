//! Locks as they are usually written in Redis: our own words for what the usual scripts do.

/// Deletes a key that has this value.
pub const COMPARE_AND_DELETE: &str =
    "if redis.call('GET', KEYS[1]) == ARGV[1] then return redis.call('DEL', KEYS[1]) end return 0";

/// A re-entrant lock in a hash: KEYS = lock, ARGV = lease, owner. Nil when held, else the rest of
/// the lease.
pub const ACQUIRE: &str = "\
local taken = redis.call('EXISTS', KEYS[1]) == 1
if taken and redis.call('HEXISTS', KEYS[1], ARGV[2]) == 0 then
    return redis.call('PTTL', KEYS[1])
end
redis.call('HINCRBY', KEYS[1], ARGV[2], 1)
redis.call('PEXPIRE', KEYS[1], ARGV[1])
return nil";

/// Its release: KEYS = lock, channel, latch; ARGV = owner, lease, latch's life. A latch makes a
/// resent release harmless; the client deletes it once it has the reply. 1 when freed, 0 when still
/// held.
pub const RELEASE: &str = "\
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
