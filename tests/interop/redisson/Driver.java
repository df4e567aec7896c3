import java.io.BufferedReader;
import java.io.InputStreamReader;
import java.nio.charset.StandardCharsets;
import java.util.Arrays;
import java.util.List;
import java.util.Map;
import java.util.concurrent.BlockingQueue;
import java.util.concurrent.ConcurrentHashMap;
import java.util.concurrent.LinkedBlockingQueue;
import java.util.concurrent.Semaphore;
import java.util.concurrent.TimeUnit;
import java.util.concurrent.locks.LockSupport;
import org.redisson.Redisson;
import org.redisson.api.RFencedLock;
import org.redisson.api.RLock;
import org.redisson.api.RPermitExpirableSemaphore;
import org.redisson.api.RSemaphore;
import org.redisson.api.RedissonClient;
import org.redisson.client.codec.StringCodec;
import org.redisson.config.BaseConfig;
import org.redisson.config.Config;

/**
 * Redisson, told line by line what to do.
 *
 * <p>A line is {@code thread client words…}. Each thread name is a Java thread of its own, so an
 * owner of its own; it does what it is told in order, and the threads do not wait for each other.
 * The answer is {@code thread began ended result}: the times are System.nanoTime() right before and
 * right after Redisson was called. A client is one Redisson instance. The words:
 *
 * <pre>
 * open single|cluster address watchdog-ms [user password]
 *                                             its uuid
 * shutdown                                    ok; locks are not given back
 * now                                         ok
 * id                                          the owner that this thread is
 * parked thread                               whether that thread sleeps until a message or a TTL
 * kind name lock [lease-ms]                   ok
 * kind name trylock [wait-ms lease-ms]        true, false; a lease of -1: the watchdog's
 * kind name unlock                            ok
 * kind name pass                              ok: lock and unlock at once
 * kind name force | islocked | isheld         true, false
 * kind name heldby thread-id                  true, false
 * kind name count | ttl | token               a number
 * kind name rounds n pause-us                 n: so often counter:name was read under the lock and
 *                                             it and copy:name written, with pauses up to that long
 * sem name set n                             true, false: whether it had no limit before
 * sem name acquire | release                 ok
 * sem name free                              a number: the permits that are left
 * sem name turns n hold-us                   n: so often a permit was taken, held and given back
 * expirable …                                the same with the other kind of semaphore, of which
 *                                            acquire and turns may name a lease-ms at the end
 * kind name reads n pause-us                  n: so often the two were read under the lock, and
 *                                             found equal
 * </pre>
 *
 * <p>The kind is lock, once (the one that is not re-entrant), fair, fenced, spin, multi (of plain
 * locks, whose names are joined by commas), read or write. An exception is
 * {@code error class message}. The process ends with its input.
 */
public final class Driver {
    private static final Map<String, RedissonClient> CLIENTS = new ConcurrentHashMap<>();
    private static final Map<String, Owner> OWNERS = new ConcurrentHashMap<>();
    /** Of the expirable semaphore, by the thread that has it. */
    private static final Map<String, String> PERMITS = new ConcurrentHashMap<>();

    public static void main(String[] arguments) throws Exception {
        BufferedReader input =
                new BufferedReader(new InputStreamReader(System.in, StandardCharsets.UTF_8));
        for (String line = input.readLine(); line != null; line = input.readLine()) {
            List<String> words = Arrays.asList(line.split(" "));
            OWNERS.computeIfAbsent(words.get(0), Owner::new).tasks.add(words);
        }
        // Nothing is given back: what is held now was held by a process that died.
        Runtime.getRuntime().halt(0);
    }

    /** A thread that does one thing after the other. */
    private static final class Owner extends Thread {
        final BlockingQueue<List<String>> tasks = new LinkedBlockingQueue<>();

        Owner(String name) {
            super(name);
            setDaemon(true);
            start();
        }

        @Override
        public void run() {
            while (true) {
                try {
                    answer(tasks.take());
                } catch (InterruptedException e) {
                    return;
                }
            }
        }

        private void answer(List<String> words) {
            String result;
            long began = System.nanoTime();
            long ended;
            try {
                result = String.valueOf(Driver.run(words.get(1), words.subList(2, words.size())));
                ended = System.nanoTime();
            } catch (Exception e) {
                ended = System.nanoTime();
                String text = "error " + e.getClass().getSimpleName() + " " + e.getMessage();
                result = text.replace('\n', ' ').replace('\r', ' ');
            }
            System.out.println(getName() + " " + began + " " + ended + " " + result);
        }
    }

    private static Object run(String client, List<String> words) throws Exception {
        switch (words.get(0)) {
            case "open":
                return open(client, words);
            case "shutdown":
                CLIENTS.remove(client).shutdown();
                return "ok";
            case "now":
                return "ok";
            case "id":
                return CLIENTS.get(client).getId() + ":" + Thread.currentThread().getId();
            case "parked":
                return isParked(OWNERS.get(words.get(1)));
            case "sem":
                return onSemaphore(CLIENTS.get(client).getSemaphore(words.get(1)), words);
            case "expirable":
                return onExpirable(
                        CLIENTS.get(client).getPermitExpirableSemaphore(words.get(1)), words);
            default:
                return onLock(CLIENTS.get(client), words);
        }
    }

    private static String open(String client, List<String> words) {
        Config config = new Config();
        config.setLockWatchdogTimeout(Long.parseLong(words.get(3)));
        config.setThreads(4).setNettyThreads(4);
        String address = "redis://" + words.get(2);
        BaseConfig<?> server;
        if (words.get(1).equals("cluster")) {
            server = config.useClusterServers()
                    .addNodeAddress(address)
                    .setMasterConnectionMinimumIdleSize(2);
        } else {
            server = config.useSingleServer()
                    .setAddress(address)
                    .setConnectionMinimumIdleSize(2);
        }
        if (words.size() > 4) {
            server.setUsername(words.get(4));
            server.setPassword(words.get(5));
        }
        RedissonClient opened = Redisson.create(config);
        CLIENTS.put(client, opened);
        return opened.getId();
    }

    /** Redisson's waiters sleep on a semaphore of their own, whatever the kind of lock. */
    private static boolean isParked(Thread owner) {
        StackTraceElement[] stack = owner.getStackTrace();
        return stack.length > 0
                && stack[0].getMethodName().equals("park")
                && Arrays.stream(stack)
                        .anyMatch(frame -> frame.getClassName().equals(Semaphore.class.getName()));
    }

    private static Object onLock(RedissonClient client, List<String> words) throws Exception {
        String name = words.get(1);
        RLock lock = lock(client, words.get(0), name);
        long[] numbers = words.stream().skip(3).mapToLong(Long::parseLong).toArray();
        TimeUnit ms = TimeUnit.MILLISECONDS;
        switch (words.get(2)) {
            case "lock":
                if (numbers.length == 0) {
                    lock.lock();
                } else {
                    lock.lock(numbers[0], ms);
                }
                return "ok";
            case "trylock":
                return numbers.length == 0
                        ? lock.tryLock()
                        : lock.tryLock(numbers[0], numbers[1], ms);
            case "unlock":
                lock.unlock();
                return "ok";
            case "pass":
                lock.lock();
                lock.unlock();
                return "ok";
            case "force":
                return lock.forceUnlock();
            case "islocked":
                return lock.isLocked();
            case "isheld":
                return lock.isHeldByCurrentThread();
            case "heldby":
                return lock.isHeldByThread(numbers[0]);
            case "count":
                return lock.getHoldCount();
            case "ttl":
                return lock.remainTimeToLive();
            case "token":
                return ((RFencedLock) lock).getToken();
            case "rounds":
                return rounds(client, lock, name, numbers[0], numbers[1]);
            case "reads":
                return reads(client, lock, name, numbers[0], numbers[1]);
            default:
                throw new IllegalArgumentException("unknown: " + words.get(2));
        }
    }

    private static Object onSemaphore(RSemaphore semaphore, List<String> words)
            throws InterruptedException {
        switch (words.get(2)) {
            case "set":
                return semaphore.trySetPermits(Integer.parseInt(words.get(3)));
            case "acquire":
                semaphore.acquire();
                return "ok";
            case "release":
                semaphore.release();
                return "ok";
            case "free":
                return semaphore.availablePermits();
            case "turns":
                long count = Long.parseLong(words.get(3));
                for (long turn = 0; turn < count; turn++) {
                    semaphore.acquire();
                    LockSupport.parkNanos(Long.parseLong(words.get(4)) * 1000);
                    semaphore.release();
                }
                return count;
            default:
                throw new IllegalArgumentException("unknown: " + words.get(2));
        }
    }

    private static Object onExpirable(RPermitExpirableSemaphore semaphore, List<String> words)
            throws InterruptedException {
        switch (words.get(2)) {
            case "set":
                return semaphore.trySetPermits(Integer.parseInt(words.get(3)));
            case "acquire":
                PERMITS.put(Thread.currentThread().getName(), permit(semaphore, words, 3));
                return "ok";
            case "release":
                semaphore.release(PERMITS.remove(Thread.currentThread().getName()));
                return "ok";
            case "free":
                return semaphore.availablePermits();
            case "turns":
                long count = Long.parseLong(words.get(3));
                for (long turn = 0; turn < count; turn++) {
                    String permit = permit(semaphore, words, 5);
                    LockSupport.parkNanos(Long.parseLong(words.get(4)) * 1000);
                    semaphore.release(permit);
                }
                return count;
            default:
                throw new IllegalArgumentException("unknown: " + words.get(2));
        }
    }

    /** With the lease that the word at that place names, if there is one. */
    private static String permit(
            RPermitExpirableSemaphore semaphore, List<String> words, int place)
            throws InterruptedException {
        return words.size() > place
                ? semaphore.acquire(Long.parseLong(words.get(place)), TimeUnit.MILLISECONDS)
                : semaphore.acquire();
    }

    private static RLock lock(RedissonClient client, String kind, String name)
            throws ReflectiveOperationException {
        switch (kind) {
            case "lock":
                return client.getLock(name);
            case "once":
                // Versions before 4.4.0, with which this compiles as well, have no such lock.
                return (RLock) RedissonClient.class
                        .getMethod("getNonReentrantLock", String.class)
                        .invoke(client, name);
            case "fair":
                return client.getFairLock(name);
            case "fenced":
                return client.getFencedLock(name);
            case "spin":
                return client.getSpinLock(name);
            case "multi":
                return client.getMultiLock(
                        Arrays.stream(name.split(",")).map(client::getLock).toArray(RLock[]::new));
            case "read":
                return client.getReadWriteLock(name).readLock();
            case "write":
                return client.getReadWriteLock(name).writeLock();
            default:
                throw new IllegalArgumentException("unknown: " + kind);
        }
    }

    /** Reads and then writes, so that an update is lost wherever two are inside at once. */
    private static long rounds(
            RedissonClient client, RLock lock, String name, long count, long pause) {
        for (long round = 0; round < count; round++) {
            lock.lock();
            try {
                long next = read(client, "counter:" + name) + 1;
                client.getList("rounds:" + name, StringCodec.INSTANCE).add("java");
                write(client, "counter:" + name, next);
                write(client, "copy:" + name, next);
            } finally {
                lock.unlock();
            }
            pause(round, pause);
        }
        return count;
    }

    private static long reads(
            RedissonClient client, RLock lock, String name, long count, long pause) {
        for (long round = 0; round < count; round++) {
            lock.lock();
            try {
                long copy = read(client, "copy:" + name);
                long counter = read(client, "counter:" + name);
                if (counter != copy) {
                    throw new IllegalStateException(counter + " is not " + copy);
                }
            } finally {
                lock.unlock();
            }
            pause(round, pause);
        }
        return count;
    }

    /** Another time in each round, up to this long. */
    private static void pause(long round, long microseconds) {
        LockSupport.parkNanos(round * 7919 % (microseconds + 1) * 1000);
    }

    private static long read(RedissonClient client, String key) {
        String seen = client.<String>getBucket(key, StringCodec.INSTANCE).get();
        return seen == null ? 0 : Long.parseLong(seen);
    }

    private static void write(RedissonClient client, String key, long value) {
        client.<String>getBucket(key, StringCodec.INSTANCE).set(Long.toString(value));
    }
}
