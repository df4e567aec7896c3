import static java.nio.charset.StandardCharsets.UTF_8;

import java.util.UUID;
import java.util.concurrent.atomic.AtomicLong;
import redis.clients.jedis.BuilderFactory;
import redis.clients.jedis.CommandArguments;
import redis.clients.jedis.CommandObject;
import redis.clients.jedis.UnifiedJedis;
import redis.clients.jedis.exceptions.JedisConnectionException;

/** A lock of RLOCK that we hold. */
record Lock(UnifiedJedis db, String name, String owner, long token) implements AutoCloseable {
    static final int LEASE_MS = 30_000;
    static final int WAIT_MS = 10_000;
    private static final UUID PROCESS = UUID.randomUUID();
    private static final AtomicLong NUMBER = new AtomicLong();

    static Lock acquire(UnifiedJedis db, String name) {
        var owner = PROCESS + ":" + NUMBER.incrementAndGet(); // another one each time
        var words = command("RLOCK.ACQUIRE", name, owner, LEASE_MS, "BLOCK", WAIT_MS, "ONCE");
        // A blocking command has its own timeout, and a connection of the pool to itself.
        var wait = new CommandObject<>(words.blocking(), BuilderFactory.LONG_LIST);
        for (int attempt = 1; ; attempt++) {
            try {
                var reply = db.executeCommand(wait);
                long count = reply.get(0), value = reply.get(1);
                if (count > 0) return new Lock(db, name, owner, value);
                throw new IllegalStateException(
                    name + " is busy, its lease has " + value + " ms left");
            } catch (JedisConnectionException lost) {
                // The reply is lost: the same words again, which with ONCE do not count twice.
                if (attempt == 3) throw lost;
            }
        }
    }

    /** Whether the lock is still ours, and from now on for a whole lease. */
    boolean renew() {
        var words = command("RLOCK.RENEW", name, owner, LEASE_MS, "TOKEN", token);
        return db.executeCommand(new CommandObject<>(words, BuilderFactory.LONG)) == 1;
    }

    /** Gives it back. The reply is null if it was lost meanwhile. */
    @Override
    public void close() {
        db.executeCommand(command("RLOCK.RELEASE", name, owner, "TOKEN", token));
    }

    private static CommandArguments command(String command, String key, Object... rest) {
        return new CommandArguments(() -> command.getBytes(UTF_8)).key(key).addObjects(rest);
    }
}
