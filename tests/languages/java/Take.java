import static java.nio.charset.StandardCharsets.UTF_8;

import java.io.BufferedReader;
import java.io.InputStreamReader;
import java.net.URI;
import java.util.UUID;
import java.util.concurrent.atomic.AtomicLong;
import redis.clients.jedis.BuilderFactory;
import redis.clients.jedis.CommandArguments;
import redis.clients.jedis.CommandObject;
import redis.clients.jedis.DefaultJedisClientConfig;
import redis.clients.jedis.RedisClient;
import redis.clients.jedis.exceptions.JedisConnectionException;

/** Writes its input, line by line, to a store that one process at a time may write to. */
public final class Take {
    static final int LEASE_MS = 30_000;
    static final int WAIT_MS = 10_000;
    static final UUID CLIENT = UUID.randomUUID();
    static final AtomicLong NUMBER = new AtomicLong();

    /** The store's part: it takes no write with a smaller token than the largest it has seen. */
    static final String WRITE = """
        if tonumber(redis.call('HGET', KEYS[1], 'token') or 0) > tonumber(ARGV[1]) then return 0 end
        redis.call('HSET', KEYS[1], 'token', ARGV[1], 'text', ARGV[2])
        return 1""";

    record Lock(RedisClient db, String name, String owner, long token) implements AutoCloseable {
        static Lock acquire(RedisClient db, String name) {
            var owner = CLIENT + ":" + NUMBER.incrementAndGet(); // another one each time
            // "blocking" gives it the timeout of waits; it has a connection of the pool to itself.
            var words = command("RLOCK.ACQUIRE", name, owner, LEASE_MS, "BLOCK", WAIT_MS, "ONCE");
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
            var renew = command("RLOCK.RENEW", name, owner, LEASE_MS, "TOKEN", token);
            return db.executeCommand(new CommandObject<>(renew, BuilderFactory.LONG)) == 1;
        }

        /** Gives it back. The reply is null if it was lost meanwhile. */
        @Override
        public void close() {
            db.executeCommand(command("RLOCK.RELEASE", name, owner, "TOKEN", token));
        }
    }

    static CommandArguments command(String command, String key, Object... rest) {
        return new CommandArguments(() -> command.getBytes(UTF_8)).key(key).addObjects(rest);
    }

    static void work(RedisClient db) throws Exception {
        try (var lock = Lock.acquire(db, "stock:42")) {
            System.out.println("held, token " + lock.token());
            var input = new BufferedReader(new InputStreamReader(System.in));
            for (String line; (line = input.readLine()) != null; ) {
                if (!lock.renew()) {
                    throw new IllegalStateException("lost: stock:42 is not ours any more");
                }
                if (db.eval(WRITE, 1, "store:42", "" + lock.token(), line).equals(0L)) {
                    throw new IllegalStateException("refused: the store has seen a larger token");
                }
                System.out.println("written");
            }
        }
        System.out.println("released");
    }

    public static void main(String[] arguments) throws Exception {
        var url = System.getenv().getOrDefault("REDIS_URL", "redis://127.0.0.1:6379");
        var at = URI.create(url);
        // The client's patience with a wait is longer than that of the server.
        var config = DefaultJedisClientConfig.builder()
            .blockingSocketTimeoutMillis(WAIT_MS + 5_000).build();
        try (var db = RedisClient.builder()
                .hostAndPort(at.getHost(), at.getPort()).clientConfig(config).build()) {
            work(db);
        } catch (RuntimeException error) {
            System.err.println(error.getMessage());
            System.exit(1);
        }
    }
}
