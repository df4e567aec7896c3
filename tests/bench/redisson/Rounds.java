import java.io.BufferedReader;
import java.io.InputStreamReader;
import java.nio.charset.StandardCharsets;
import java.util.Arrays;
import java.util.ArrayList;
import java.util.List;
import java.util.concurrent.Callable;
import java.util.concurrent.ExecutorService;
import java.util.concurrent.Executors;
import java.util.concurrent.Future;
import org.redisson.Redisson;
import org.redisson.api.RLock;
import org.redisson.api.RedissonClient;
import org.redisson.config.Config;

/**
 * Redisson as a contender of the benchmark: one client with its own defaults, but more patient.
 *
 * <p>A line is {@code threads own|shared milliseconds}: so many threads take and give back a lock
 * for that long, each one of its own or all the same. The answer is how many were given back in
 * that time; the median, the 99th percentile and the longest of the waits in microseconds; and what
 * the thread with the fewest has given back, and the one with the most, in percent of the mean. The
 * process ends with its input.
 */
public final class Rounds {
    public static void main(String[] arguments) throws Exception {
        // Whoever talks to us waits for an answer or the end.
        Thread.setDefaultUncaughtExceptionHandler(
                (thread, exception) -> {
                    exception.printStackTrace();
                    Runtime.getRuntime().halt(1);
                });
        Config config = new Config();
        // Patient: on a busy machine a release that is sent again, since its reply was late, finds
        // nothing to release.
        config.useSingleServer().setAddress("redis://" + arguments[0]).setTimeout(60_000);
        RedissonClient client = Redisson.create(config);
        ExecutorService threads = Executors.newCachedThreadPool();
        BufferedReader input =
                new BufferedReader(new InputStreamReader(System.in, StandardCharsets.UTF_8));
        for (String line = input.readLine(); line != null; line = input.readLine()) {
            String[] words = line.split(" ");
            int count = Integer.parseInt(words[0]);
            long over = System.nanoTime() + Long.parseLong(words[2]) * 1_000_000;
            List<Future<long[]>> rounds = new ArrayList<>();
            for (int number = 0; number < count; number++) {
                String name = words[1].equals("own") ? "redisson:" + number : "redisson";
                RLock lock = client.getLock(name);
                Callable<long[]> fighter = () -> fight(lock, over);
                rounds.add(threads.submit(fighter));
            }
            System.out.println(summary(rounds));
        }
        Runtime.getRuntime().halt(0);
    }

    /** How many were given back in time, and then the waits in nanoseconds. */
    private static long[] fight(RLock lock, long over) {
        long[] result = new long[1024];
        int waits = 0;
        while (System.nanoTime() < over) {
            long begun = System.nanoTime();
            lock.lock();
            if (waits + 1 == result.length) {
                result = Arrays.copyOf(result, result.length * 2);
            }
            result[++waits] = System.nanoTime() - begun;
            lock.unlock();
            if (System.nanoTime() < over) {
                result[0]++;
            }
        }
        return Arrays.copyOf(result, waits + 1);
    }

    private static String summary(List<Future<long[]>> rounds) throws Exception {
        long done = 0;
        long least = Long.MAX_VALUE;
        long most = 0;
        List<long[]> all = new ArrayList<>();
        int count = 0;
        for (Future<long[]> round : rounds) {
            long[] result = round.get();
            done += result[0];
            least = Math.min(least, result[0]);
            most = Math.max(most, result[0]);
            count += result.length - 1;
            all.add(result);
        }
        long[] waits = new long[count];
        int at = 0;
        for (long[] result : all) {
            System.arraycopy(result, 1, waits, at, result.length - 1);
            at += result.length - 1;
        }
        Arrays.sort(waits);
        double percent = 100.0 * rounds.size() / done;
        String times = us(waits, 0.5) + " " + us(waits, 0.99) + " " + us(waits, 1);
        return done + " " + times + " " + least * percent + " " + most * percent;
    }

    private static double us(long[] sorted, double part) {
        return sorted[(int) Math.round((sorted.length - 1) * part)] / 1000.0;
    }
}
