import java.io.BufferedReader;
import java.io.InputStreamReader;
import java.net.URI;
import redis.clients.jedis.DefaultJedisClientConfig;
import redis.clients.jedis.RedisClient;

/** Writes its input, line by line, to a store that one process at a time may write to. */
public final class Take {
    /** The store's part: it takes no write with a smaller token than the largest it has seen. */
    static final String WRITE = """
        if tonumber(redis.call('HGET', KEYS[1], 'token') or 0) > tonumber(ARGV[1]) then return 0 end
        redis.call('HSET', KEYS[1], 'token', ARGV[1], 'text', ARGV[2])
        return 1""";

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
        var server = URI.create(url);
        // The client's patience with a wait is longer than that of the server.
        var config = DefaultJedisClientConfig.builder()
            .blockingSocketTimeoutMillis(Lock.WAIT_MS + 5_000).build();
        try (var db = RedisClient.builder().clientConfig(config)
                .hostAndPort(server.getHost(), server.getPort()).build()) {
            work(db);
        } catch (RuntimeException error) {
            System.err.println(error.getMessage());
            System.exit(1);
        }
    }
}
