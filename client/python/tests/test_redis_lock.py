"""What the documentation of redis-py says of its locks, true of those and of ours; and what more
ours do."""

import asyncio
import atexit
import inspect
import itertools
import math
import os
import signal
import subprocess
import sys
import threading
import time
import unittest
from concurrent.futures import ThreadPoolExecutor

import redis
import redis.asyncio
from harness import Server
from redis.exceptions import LockError, LockNotOwnedError

import rlock_redis as ours

server = Server()
atexit.register(server.stop)
URL = server.url
names = (f"test:{os.getpid()}:{number}" for number in itertools.count())


of_newer_redis_py = unittest.skipUnless(
    "raise_on_release_error" in inspect.signature(redis.Redis.lock).parameters,
    "this redis-py always raises",
)


class Blocking:
    """A lock of redis.asyncio, with which one speaks as with one of redis."""

    loop = asyncio.new_event_loop()
    threading.Thread(target=loop.run_forever, daemon=True).start()

    def __init__(self, make):
        self.__dict__["lock"] = self.run(make)

    @classmethod
    def run(cls, function, *arguments, **options):
        async def call():
            result = function(*arguments, **options)
            return await result if inspect.isawaitable(result) else result

        return asyncio.run_coroutine_threadsafe(call(), cls.loop).result()

    def __getattr__(self, name):
        value = self.run(getattr, self.lock, name)
        return (lambda *a, **o: self.run(value, *a, **o)) if callable(value) else value

    def __setattr__(self, name, value):
        self.run(setattr, self.lock, name, value)

    def __enter__(self):
        self.run(self.lock.__aenter__)
        return self

    def __exit__(self, *error):
        self.run(self.lock.__aexit__, *error)


class Case(unittest.TestCase):
    lock_class = ours.Lock

    def setUp(self):
        self.db = redis.Redis.from_url(URL)
        self.addCleanup(self.db.close)
        self.name = next(names)

    def lock(self, name=None, url=URL, **options):
        options = {"lock_class": self.lock_class, **options}
        name = self.name if name is None else name
        if issubclass(options["lock_class"], redis.asyncio.lock.Lock):
            client = Blocking.run(redis.asyncio.from_url, url)
            self.addCleanup(Blocking.run, client.aclose)
            # The tests look at it from another thread than that of the loop.
            return Blocking(lambda: client.lock(name, **{**options, "thread_local": False}))
        client = redis.Redis.from_url(url)
        self.addCleanup(client.close)
        lock = client.lock(name, **options)
        return lock

    def until(self, condition, seconds=10):
        deadline = time.monotonic() + seconds
        while not condition():
            self.assertLess(time.monotonic(), deadline, "in time")
            time.sleep(0.005)

    def assert_lasts(self, at_least, at_most):
        left = self.db.pttl(self.name) / 1000
        self.assertGreater(left, max(at_least - 1, 0))  # by what a busy machine takes
        self.assertLessEqual(left, at_most)

    def assert_is_about(self, seconds, expected):
        """Not earlier, and later by what a busy machine takes."""
        self.assertGreater(seconds, expected - 0.1)
        self.assertLess(seconds, expected + 1)

    def in_background(self, function, *arguments, **options):
        pool = ThreadPoolExecutor(1)
        self.addCleanup(pool.shutdown)
        return pool.submit(function, *arguments, **options)

    def waiters(self):
        for name, waiters, _ in self.db.execute_command("RLOCK.LIST"):
            if name == self.name.encode():
                return waiters
        return 0


class Documented:
    """True of redis-py's classes and of ours."""

    def test_acquire_and_release(self):
        lock = self.lock()
        self.assertIs(lock.acquire(blocking=False), True)
        self.assertIs(lock.locked(), True)
        self.assertIs(lock.owned(), True)
        self.assertEqual(self.db.exists(self.name), 1)
        self.assertIsNone(lock.release())
        self.assertIs(lock.locked(), False)
        self.assertIs(lock.owned(), False)
        self.assertEqual(self.db.exists(self.name), 0)

    def test_without_blocking_a_taken_lock_is_refused_at_once(self):
        first, second = self.lock(), self.lock()
        self.assertTrue(first.acquire(blocking=False))
        self.assertIs(second.acquire(blocking=False), False)
        self.assertIs(self.lock(blocking=False).acquire(), False)
        self.assertIs(second.locked(), True)
        self.assertIs(second.owned(), False)
        first.release()
        self.assertTrue(second.acquire(blocking=False))
        second.release()

    def test_the_argument_blocking_is_stronger_than_the_constructors(self):
        first, second = self.lock(), self.lock(blocking=False)
        first.acquire()
        waiting = self.in_background(second.acquire, blocking=True)
        time.sleep(0.3)
        self.assertFalse(waiting.done())
        first.release()
        self.assertIs(waiting.result(10), True)

    def test_a_wait_ends_with_the_blocking_timeout(self):
        self.lock().acquire()
        second = self.lock(blocking_timeout=0.4, sleep=0.05)
        for options, seconds in [({}, 0.4), ({"blocking_timeout": 0.2}, 0.2)]:
            began = time.monotonic()
            self.assertIs(second.acquire(**options), False)
            self.assert_is_about(time.monotonic() - began, seconds)

    def test_a_blocking_timeout_of_zero_asks_once(self):
        self.assertTrue(self.lock().acquire(blocking_timeout=0))
        began = time.monotonic()
        self.assertIs(self.lock().acquire(blocking_timeout=0), False)
        self.assertLess(time.monotonic() - began, 1)

    def test_the_same_lock_taken_twice_waits_for_itself(self):
        lock = self.lock(blocking_timeout=0.2)
        self.assertTrue(lock.acquire())
        self.assertIs(lock.acquire(), False)
        self.assertTrue(lock.owned())
        lock.release()

    def test_the_timeout_is_the_longest_that_it_is_held(self):
        for timeout in (3, 2.5):
            lock = self.lock(timeout=timeout)
            self.assertTrue(lock.acquire())
            self.assert_lasts(timeout - 1, timeout)
            lock.release()
        first, second = self.lock(timeout=0.3), self.lock()
        first.acquire()
        began = time.monotonic()
        self.assertTrue(second.acquire())
        self.assert_is_about(time.monotonic() - began, 0.3)
        self.assertIs(first.owned(), False)
        with self.assertRaises(LockNotOwnedError):
            first.release()
        self.assertIs(second.owned(), True)

    def test_a_context_manager_releases_after_an_error_too(self):
        with self.lock() as lock:
            self.assertTrue(lock.owned())
        self.assertFalse(lock.locked())
        with self.assertRaises(ZeroDivisionError), self.lock() as lock:
            _ = 1 / 0
        self.assertFalse(lock.locked())

    def test_a_context_manager_that_does_not_get_the_lock_raises(self):
        self.lock().acquire()
        with self.assertRaises(LockError), self.lock(blocking_timeout=0.1):
            self.fail("it is taken")
        with self.assertRaises(LockError), self.lock(blocking=False):
            self.fail("it is taken")

    def test_the_end_of_a_context_raises_if_the_lock_was_lost(self):
        with self.assertRaises(LockNotOwnedError), self.lock():
            self.db.delete(self.name)

    @of_newer_redis_py
    def test_or_warns_if_it_is_told_not_to_raise(self):
        with self.assertLogs(level="WARNING"), self.lock(raise_on_release_error=False):
            self.db.delete(self.name)

    @of_newer_redis_py
    def test_without_raising_the_lock_may_be_released_within_its_context(self):
        with self.assertLogs(level="WARNING"), self.lock(raise_on_release_error=False) as lock:
            lock.release()

    def test_only_who_has_it_may_release_extend_and_reacquire_it(self):
        lock = self.lock(timeout=5)
        for attempt in (lock.release, lambda: lock.extend(1), lock.reacquire):
            with self.assertRaises(LockError) as caught:
                attempt()
            self.assertNotIsInstance(caught.exception, LockNotOwnedError)

    def test_a_lock_that_is_anothers_now_is_not_released_nor_extended(self):
        lock, other = self.lock(timeout=5), self.lock()
        lock.acquire()
        self.db.delete(self.name)
        other.acquire()
        for attempt in (lambda: lock.extend(1), lock.reacquire, lock.release):
            with self.assertRaises(LockNotOwnedError):
                attempt()
        self.assertTrue(other.owned())
        with self.assertRaises(LockError):
            lock.release()
        other.release()

    def test_extend_adds_to_what_is_left(self):
        lock = self.lock(timeout=3)
        lock.acquire()
        self.assertIs(lock.extend(2), True)
        self.assert_lasts(4, 5)
        self.assertIs(lock.extend(1.5), True)
        self.assert_lasts(6, 6.5)
        lock.release()

    def test_extend_replaces_what_is_left_if_told_to(self):
        lock = self.lock(timeout=3)
        lock.acquire()
        self.assertIs(lock.extend(2, replace_ttl=True), True)
        self.assert_lasts(1, 2)
        self.assertIs(lock.extend(7, replace_ttl=True), True)
        self.assert_lasts(6, 7)
        lock.release()

    def test_reacquire_starts_the_timeout_anew(self):
        lock = self.lock(timeout=5)
        lock.acquire()
        self.db.pexpire(self.name, 1000)
        self.assertIs(lock.reacquire(), True)
        self.assert_lasts(4, 5)
        lock.release()

    def test_what_has_no_timeout_is_neither_extended_nor_reacquired(self):
        lock = self.lock()
        lock.acquire()
        for attempt in (lambda: lock.extend(1), lock.reacquire):
            with self.assertRaises(LockError):
                attempt()
        lock.release()

    def test_the_token_is_ours_to_choose(self):
        for token in ("static", b"bytes"):
            lock = self.lock()
            self.assertTrue(lock.acquire(token=token))
            self.assertEqual(lock.local.token, token if token == b"bytes" else b"static")
            self.assertTrue(lock.owned())
            lock.release()
            self.assertIsNone(lock.local.token)

    def test_one_thread_at_a_time(self):
        inside, most = itertools.count(), []

        def work(_):
            with self.lock(timeout=9, sleep=0.01):
                before = self.db.incr(self.name + ":inside")
                time.sleep(0.01)
                self.db.decr(self.name + ":inside")
            most.append(before)
            next(inside)

        with ThreadPoolExecutor(8) as pool:
            list(pool.map(work, range(40)))
        self.assertEqual(most, [1] * 40)


class DocumentedOfThreads:
    """Of the classes for threads alone."""

    def test_each_thread_knows_of_its_own_lock_only(self):
        lock = self.lock(timeout=0.3)
        lock.acquire()
        anothers = self.in_background(lambda: lock.acquire() and lock.local.token).result(10)
        self.assertNotEqual(lock.local.token, anothers)
        with self.assertRaises(LockNotOwnedError):
            lock.release()
        self.assertEqual(self.db.exists(self.name), 1)

    def test_or_all_threads_know_of_it(self):
        lock = self.lock(thread_local=False)
        lock.acquire()
        self.in_background(lock.release).result(10)
        self.assertFalse(lock.locked())


class RedisPy(Documented, DocumentedOfThreads, Case):
    lock_class = redis.lock.Lock


class RedisPyAsync(Documented, Case):
    lock_class = redis.asyncio.lock.Lock


class OfBoth:
    """What ours do that redis-py's do not: the same for threads and for tasks."""

    def short(self, lease=3, **options):
        """The class with a short lease; it tells `self.losses` of each loss."""
        self.losses = losses = []

        class Short(self.lock_class):
            def on_lost(self):
                losses.append(time.monotonic())

        Short.lease = lease
        return self.lock(lock_class=Short, **options)

    def test_waiters_are_served_in_order_and_do_not_poll(self):
        first = self.lock()
        first.acquire()
        before = self.db.info("commandstats")["cmdstat_rlock.acquire"]["calls"]
        order = []

        def wait(number):
            with self.lock(sleep=60):
                order.append(number)

        waits = []
        for number in range(5):
            waits.append(self.in_background(wait, number))
            self.until(lambda number=number: self.waiters() == number + 1)
        time.sleep(1)
        began = time.monotonic()
        first.release()
        for each in waits:
            each.result(10)
        self.assertLess(time.monotonic() - began, 1)
        self.assertEqual(order, [0, 1, 2, 3, 4])
        after = self.db.info("commandstats")["cmdstat_rlock.acquire"]["calls"]
        self.assertEqual(after - before, 5)

    def test_a_wait_outlives_the_timeouts_of_the_client(self):
        first = self.lock()
        first.acquire()
        second = self.lock(url=URL + "?socket_timeout=0.2", thread_local=False)
        waiting = self.in_background(second.acquire)
        self.until(lambda: self.waiters() == 1)
        timeouts = self.db.info("rlock")["rlock_departures"]
        time.sleep(1)
        self.assertEqual(self.db.info("rlock")["rlock_departures"], timeouts)
        first.release()
        self.assertTrue(waiting.result(10))
        second.release()

    def test_tokens_grow(self):
        lock = self.lock()
        self.assertIsNone(lock.fencing_token)
        seen = []
        for _ in range(5):
            with lock:
                seen.append(lock.fencing_token)
        self.assertEqual(seen, sorted(set(seen)))
        self.assertIsNone(lock.fencing_token)
        self.assertFalse(lock.lost)

    def test_without_a_timeout_it_is_renewed_until_it_is_released(self):
        lock = self.short()
        lock.acquire()
        fields = self.db.hkeys(self.name)
        ends = time.monotonic() + 7
        while time.monotonic() < ends:
            time.sleep(0.1)
            self.assert_lasts(0, 3)
            self.assertFalse(lock.lost)
        self.assertEqual(self.db.hkeys(self.name), fields)
        lock.release()
        time.sleep(1)
        self.assertFalse(lock.locked())
        self.assertEqual(self.losses, [])

    def test_it_is_renewed_until_its_timeout_and_then_lost(self):
        lock = self.short(timeout=4)
        began = time.monotonic()
        lock.acquire()
        self.assertTrue(lock.extend(0.5))
        self.until(lambda: lock.lost)
        self.assert_is_about(time.monotonic() - began, 4.5)
        self.until(lambda: self.losses)
        self.until(lambda: not lock.locked(), 1)
        with self.assertRaises(LockNotOwnedError):
            lock.release()
        self.assertEqual(len(self.losses), 1)

    def test_a_lock_that_is_extended_beyond_the_lease_is_renewed(self):
        lock = self.short(timeout=1)
        lock.acquire()
        lock.extend(4)
        time.sleep(4)
        self.assertTrue(lock.owned())
        self.assertFalse(lock.lost)
        self.until(lambda: self.losses, 3)

    def test_a_broken_lock_is_told_of_once_within_a_third_of_the_lease(self):
        lock = self.short(lease=6)
        lock.acquire()
        self.assertEqual(self.db.execute_command("RLOCK.BREAK", self.name), 1)
        began = time.monotonic()
        self.until(lambda: self.losses)
        self.assertLess(self.losses[0] - began, 2 + 1)
        self.assertTrue(lock.lost)
        for attempt in (lock.reacquire, lock.release):
            with self.assertRaises(LockError):
                attempt()
        time.sleep(2.5)
        self.assertEqual(len(self.losses), 1)

    def test_a_silent_server_is_told_of_before_the_lease_ends(self):
        lock = self.short()
        lock.acquire()
        self.db.execute_command("CLIENT PAUSE", 6000, "ALL")
        paused = time.monotonic()
        self.until(lambda: self.losses, 5)
        self.assertTrue(lock.lost)
        # It was renewed at most a third of a lease before, and is not counted on after its end.
        self.assertGreater(self.losses[0] - paused, 2 - 0.1)
        self.assertLess(self.losses[0] - paused, 3 + 0.5)
        self.db.ping()
        self.assertEqual(len(self.losses), 1)

    def test_a_short_interruption_is_no_loss(self):
        lock = self.short()
        lock.acquire()
        self.db.execute_command("CLIENT KILL", "TYPE", "normal", "SKIPME", "yes")
        time.sleep(4)
        self.assertTrue(lock.owned())
        self.assertFalse(lock.lost)
        lock.release()
        self.assertEqual(self.losses, [])

    def test_after_a_long_wait_it_is_known_until_when_it_is_ours(self):
        first, second = self.lock(), self.lock(timeout=2, thread_local=False)
        first.acquire()
        waiting = self.in_background(second.acquire)
        time.sleep(2.5)
        first.release()
        self.assertTrue(waiting.result(10))
        self.assertFalse(second.lost)
        self.assertGreater(second._guard.valid_for(), 1)

    def test_a_lease_without_an_end_is_redis_pys_way(self):
        lock = self.short(lease=math.inf, timeout=3)
        lock.acquire()
        self.assert_lasts(2, 3)
        lock.release()
        lock = self.short(lease=math.inf)
        lock.acquire()
        self.assertGreater(self.db.pttl(self.name), 10**12)
        self.assertFalse(lock.lost)
        lock.release()

    def test_the_loss_of_a_lock_that_is_not_renewed_shows_by_the_clock(self):
        lock = self.lock(timeout=0.3)
        lock.acquire()
        self.assertFalse(lock.lost)
        self.until(lambda: lock.lost, 1)

    def test_a_lock_of_redis_py_of_the_same_name_is_an_error(self):
        self.db.lock(self.name, timeout=5).acquire()
        with self.assertRaisesRegex(redis.ResponseError, "WRONGTYPE"):
            self.lock().acquire()

    def test_two_halves_of_a_process_that_forked_are_two_owners(self):
        program = f"""
import asyncio, inspect, os, redis.asyncio, rlock_redis as lock
def attempt():
    global client  # a pool that is forgotten gives its locks back
    client = redis{".asyncio" * (self.lock_class is ours.AsyncLock)}.from_url({URL!r})
    taken = client.lock({self.name!r}, lock_class=lock.{self.lock_class.__name__}).acquire(False)
    return asyncio.run(taken) if inspect.isawaitable(taken) else taken
reads, writes = os.pipe()
child = os.fork()
os.write(1, f"{{attempt()}}\\n".encode())
os.close(writes)
if child: os.waitpid(child, 0)
else: os.read(reads, 1)  # until the parent has asked
"""
        if self.lock_class is ours.Lock:
            program = program.replace("acquire(False)", "acquire(blocking=False)")
        output = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
        self.assertEqual(sorted(output.stdout.split()), ["False", "True"], output.stderr)

    def test_a_killed_process_loses_its_lock_within_the_lease(self):
        program = f"""
import asyncio, redis.asyncio, rlock_redis as lock
class Short(lock.{self.lock_class.__name__}): lease = 3
async def asynchronous():
    held = redis.asyncio.from_url({URL!r}).lock({self.name!r}, lock_class=Short)
    await held.acquire()
    await asyncio.sleep(60)
if issubclass(Short, lock.AsyncLock): asyncio.run(asynchronous())
held = redis.from_url({URL!r}).lock({self.name!r}, lock_class=Short)
held.acquire()
__import__("time").sleep(60)
"""
        process = subprocess.Popen([sys.executable, "-c", program])
        self.addCleanup(process.kill)
        self.until(lambda: self.db.exists(self.name))
        waiting = self.in_background(self.lock().acquire)
        time.sleep(4)
        self.assertFalse(waiting.done(), process.poll())
        process.kill()
        process.wait()
        killed = time.monotonic()
        self.assertTrue(waiting.result(10))
        self.assertLess(time.monotonic() - killed, 3 + 1)


class OurLock(Documented, DocumentedOfThreads, OfBoth, Case):
    def test_ctrl_c_ends_the_wait(self):
        first = self.lock()
        first.acquire()

        def interrupt(*_):
            raise KeyboardInterrupt

        before = signal.signal(signal.SIGALRM, interrupt)
        self.addCleanup(signal.signal, signal.SIGALRM, before)
        signal.setitimer(signal.ITIMER_REAL, 0.5)
        with self.assertRaises(KeyboardInterrupt):
            self.lock().acquire()
        self.until(lambda: self.waiters() == 0)
        first.release()
        self.assertFalse(first.locked())

    def test_a_client_that_decodes_replies_does_as_well(self):
        with self.lock(url=URL + "?decode_responses=True&protocol=2", timeout=60) as lock:
            self.assertTrue(lock.owned())
            self.assertTrue(lock.extend(5))
            self.assertFalse(lock.lost)
        self.assertFalse(lock.locked())


class OurAsyncLock(Documented, OfBoth, Case):
    lock_class = ours.AsyncLock

    def test_a_cancelled_wait_leaves_neither_waiter_nor_hold(self):
        async def race(delay):
            client = redis.asyncio.from_url(URL)
            first = client.lock(self.name, lock_class=ours.AsyncLock)
            await first.acquire()
            second = client.lock(self.name, lock_class=ours.AsyncLock)
            waiting = asyncio.create_task(second.acquire())
            await asyncio.sleep(0.05)
            # The hand-over and the end of the wait meet.
            releasing = asyncio.create_task(first.release())
            await asyncio.sleep(delay)
            waiting.cancel()
            await releasing
            result = (await asyncio.gather(waiting, return_exceptions=True))[0]
            self.assertEqual(await first.locked(), result is True)
            if result is True:
                await second.release()
            await client.aclose()
            return result is True

        taken = [Blocking.run(race, step / 20000) for step in range(60)]
        self.assertEqual(self.waiters(), 0)
        self.assertIn(False, taken)
        print(f"{taken.count(True)} of {len(taken)} were granted before they were cancelled")

    @of_newer_redis_py
    def test_the_loss_can_end_the_work(self):
        async def work():
            task = asyncio.current_task()

            class Guarded(ours.AsyncLock):
                lease = 0.9

                def on_lost(self):
                    task.cancel("lost")

            client = redis.asyncio.from_url(URL)
            lock = client.lock(self.name, lock_class=Guarded, raise_on_release_error=False)
            try:
                async with lock:
                    await asyncio.to_thread(self.db.delete, self.name)
                    await asyncio.sleep(20)
            except asyncio.CancelledError as error:
                return error.args
            finally:
                await client.aclose()

        self.assertEqual(Blocking.run(work), ("lost",))

    def test_hundreds_of_tasks_take_turns(self):
        async def all_of_them():
            client = redis.asyncio.from_url(URL + "?max_connections=250")
            inside = most = 0

            async def work():
                nonlocal inside, most
                async with client.lock(self.name, timeout=9, lock_class=ours.AsyncLock):
                    inside += 1
                    most = max(most, inside)
                    await asyncio.sleep(0)
                    inside -= 1

            await asyncio.gather(*(work() for _ in range(200)))
            await client.aclose()
            return most

        self.assertEqual(Blocking.run(all_of_them), 1)


if __name__ == "__main__":
    unittest.main(verbosity=2)
