"""The clients, on servers that this starts itself, with faults of every kind. After each test no
lock, no waiter and no session may be left in the server."""

import asyncio
import contextlib
import random
import signal
import subprocess
import sys
import threading
import time
import unittest

import redis
import redis.asyncio
from harness import Proxy, Server

from rlock_redis import AsyncClient, Client, NotAcquired, Unanswered

GRACE = 2.0
# Takes no write with a smaller token than the largest it has seen. A write can come late: fenced.
FENCED = """
    if tonumber(redis.call('HGET', KEYS[1], 'token') or 0) > tonumber(ARGV[1]) then return 0 end
    redis.call('HSET', KEYS[1], 'token', ARGV[1], 'n', ARGV[2])
    return 1"""


async def count(url, tasks, rounds, fenced):
    """Increments a counter, in steps that lose updates unless one at a time does so."""
    db = redis.asyncio.Redis.from_url(url)
    written = 0

    async def one(client):
        nonlocal written
        for _ in range(rounds):
            async with client.lock("lock", timeout=60) as guard:
                n = int(await db.hget("counter", "n") or 0)
                await asyncio.sleep(random.random() / 500)
                if guard.is_lost():
                    continue
                if fenced:
                    written += await db.eval(FENCED, 1, "counter", guard.token, n + 1)
                else:
                    await db.hset("counter", "n", n + 1)
                    written += 1

    async with AsyncClient(url, grace=GRACE) as client:
        await asyncio.gather(*(one(client) for _ in range(tasks)))
    await db.aclose()
    print(written)


def wait(url):
    # A process in the background of a script ignores the signal, and its children do.
    signal.signal(signal.SIGINT, signal.default_int_handler)
    with Client(url, grace=GRACE) as client:
        try:
            with client.lock("lock"):
                print("held")
        except KeyboardInterrupt:
            print("interrupted")


class Case(unittest.IsolatedAsyncioTestCase):
    config = ()

    def setUp(self):
        self.server = Server(*self.config)
        self.addCleanup(self.server.stop)
        self.url = self.server.url

    def tearDown(self):
        deadline = time.monotonic() + 2 * GRACE + 5
        while left := self.left_over():
            self.assertLess(time.monotonic(), deadline, left)
            time.sleep(0.05)

    def left_over(self):
        return self.server.left_over()

    def client(self, url=None, grace=GRACE, **options):
        return AsyncClient(url or self.url, grace=grace, **options)

    async def until(self, condition, seconds=15):
        deadline = time.monotonic() + seconds
        while not condition():
            self.assertLess(time.monotonic(), deadline, "in time")
            await asyncio.sleep(0.01)

    def program(self, *words):
        words = [sys.executable, __file__, *map(str, words)]
        return subprocess.Popen(words, stdout=subprocess.PIPE, text=True)

    async def counted(self, programs, meanwhile):
        """Each program counts; `meanwhile` is called until they are done. No update is lost."""
        await self.until(
            lambda: (
                len(self.server.run("RLOCK.SESSIONS")) == len(programs)
                or any(program.poll() is not None for program in programs)
            ),
            30,
        )
        while any(program.poll() is None for program in programs):
            await meanwhile()
        outputs = [program.communicate()[0] for program in programs]
        self.assertEqual([program.returncode for program in programs], [0] * len(programs))
        written = sum(int(output) for output in outputs)
        self.assertEqual(int(self.server.db.hget("counter", "n")), written)
        return written

    async def waiting(self, client, number=1, **options):
        """A task that waits for the lock, and then holds it until it is cancelled; its guard."""
        guard = asyncio.get_running_loop().create_future()

        async def wait():
            async with client.lock("lock", **options) as held:
                guard.set_result(held)
                await asyncio.Event().wait()

        task = asyncio.create_task(wait())
        await self.until(lambda: self.server.waiters() == number)
        return task, guard

    async def end(self, task):
        task.cancel()
        with self.assertRaises(asyncio.CancelledError):
            await task


class Calm(Case):
    async def test_processes_exclude_each_other(self):
        programs = [self.program("count", self.url, 4, 20) for _ in range(4)]
        self.assertEqual(await self.counted(programs, lambda: asyncio.sleep(0.1)), 320)

    async def test_waiters_get_it_in_their_order(self):
        async with self.client() as one, self.client() as two:
            async with one.lock("lock") as guard:
                waits = [
                    await self.waiting(client, n + 1) for n, client in enumerate((two, one, two))
                ]
            tokens = [guard.token]
            for task, granted in waits:
                tokens.append((await granted).token)
                await self.end(task)
            self.assertEqual(tokens, sorted(tokens))

    async def test_a_call_that_times_out_or_is_cancelled_leaves_the_queue(self):
        async with self.client() as client, client.lock("lock"):
            began = time.monotonic()
            with self.assertRaises(NotAcquired):
                async with client.lock("lock", timeout=0.3):
                    self.fail("two have it")
            self.assertLess(time.monotonic() - began, 2)
            await self.until(lambda: self.server.waiters() == 0)
            task, _ = await self.waiting(client)
            await self.end(task)
            await self.until(lambda: self.server.waiters() == 0)

    async def test_a_call_cancelled_at_any_moment_leaves_nothing(self):
        async with self.client() as client:
            for n in range(150):
                task = asyncio.create_task(self.take(client))
                await asyncio.sleep(n / 150 * 0.004)
                task.cancel()
            async with client.lock("lock", timeout=10):
                self.assertEqual(self.server.waiters(), 0)

    async def take(self, client):
        async with client.lock("lock"):
            await asyncio.sleep(0.001)

    async def test_ctrl_c_ends_a_wait_of_a_program_without_asyncio(self):
        async with self.client() as client, client.lock("lock"):
            program = self.program("wait", self.url)
            await self.until(lambda: self.server.waiters() == 1)
            program.send_signal(signal.SIGINT)
            self.assertEqual(
                await asyncio.to_thread(lambda: program.communicate()[0]), "interrupted\n"
            )
            self.assertEqual((program.returncode, self.server.waiters()), (0, 0))

    async def test_a_guard_hears_of_its_loss(self):
        async with self.client() as client:
            for end, reason in [
                (lambda: self.server.run("RLOCK.BREAK", "lock"), "broken"),
                (lambda: self.server.db.delete("lock"), "deleted"),
                (lambda: self.server.db.pexpire("lock", 50), "expired"),
            ]:
                async with client.lock("lock") as guard:
                    self.assertFalse(guard.is_lost())
                    end()
                    await asyncio.wait_for(guard.lost.wait(), 5)
                    self.assertEqual(
                        (guard.reason, guard.is_lost(), guard.valid_for()), (reason, True, 0)
                    )

    async def test_a_lease_is_renewed(self):
        async with self.client(lease=2) as client, client.lock("lock") as guard:
            await asyncio.sleep(5)
            self.assertFalse(guard.is_lost())
            self.assertEqual(self.server.info()[b"token"], guard.token)

    async def test_a_guard_that_could_not_look_is_lost_for_good(self):
        async with self.client() as client, client.lock("lock") as guard:
            time.sleep(GRACE * 1.2)  # blocks the event loop, and with it all replies
            await asyncio.sleep(GRACE / 2)
            self.assertEqual((guard.is_lost(), guard.reason), (True, "not confirmed in time"))

    async def test_readers_share_and_a_writer_does_not(self):
        async with self.client() as client:
            async with client.read("lock"), client.read("lock"):
                with self.assertRaises(NotAcquired):
                    async with client.write("lock", timeout=0.2):
                        self.fail("a writer beside readers")
            async with client.write("lock", timeout=5):
                pass

    async def test_an_error_is_raised(self):
        async with self.client() as client:
            self.server.db.set("lock", "text")
            with self.assertRaisesRegex(redis.ResponseError, "WRONGTYPE"):
                async with client.lock("lock"):
                    self.fail("no lock")
            self.server.db.delete("lock")

    def test_threads_exclude_each_other_and_hear_of_losses(self):
        numbers = []

        def work(client):
            for _ in range(30):
                with client.lock("lock", timeout=30):
                    numbers.append(None)
                    last = len(numbers)
                    time.sleep(0.0005)
                    self.assertEqual(len(numbers), last)

        with Client(self.url, grace=GRACE) as client:
            threads = [threading.Thread(target=work, args=(client,)) for _ in range(5)]
            for thread in threads:
                thread.start()
            for thread in threads:
                thread.join()
            self.assertEqual(len(numbers), 150)
            with client.lock("lock") as guard:
                self.server.run("RLOCK.BREAK", "lock")
                self.assertTrue(guard.lost.wait(5))
                self.assertEqual(guard.reason, "broken")
            with (
                client.lock("lock"),
                self.assertRaises(NotAcquired),
                client.lock("lock", timeout=0.1),
            ):
                pass

    async def test_a_program_that_dies_loses_its_lock_after_the_grace(self):
        program = self.program("count", self.url, 1, 1_000_000)
        await self.until(lambda: self.server.info()[b"count"] == 1)
        program.kill()
        program.communicate()
        async with self.client() as client, client.lock("lock", timeout=GRACE + 5):
            pass


class Cut(Case):
    async def kill(self, which=lambda command: True):
        self.server.kill(which)

    async def test_connections_that_are_killed_again_and_again_lose_no_update(self):
        programs = [self.program("count", self.url, 3, 30) for _ in range(3)]

        async def meanwhile():
            await asyncio.sleep(random.random() / 5)
            await self.kill(
                random.choice(
                    [
                        lambda command: command == "rlock.events",
                        lambda command: command != "rlock.events",
                        lambda command: True,
                        lambda command: random.random() < 0.3,
                    ]
                )
            )

        self.assertEqual(await self.counted(programs, meanwhile), 270)

    async def test_a_guard_and_a_wait_outlast_each_cut(self):
        async with self.client() as client:
            async with client.lock("lock") as guard:
                task, granted = await self.waiting(client)
                for which in (str.__len__, "rlock.events".__eq__, "rlock.events".__ne__) * 3:
                    await self.kill(which)
                    await asyncio.sleep(GRACE / 3)
                    await self.until(lambda: self.server.waiters() == 1)
                self.assertFalse(guard.is_lost())
                life = client._link.session.life
                self.assertEqual(len(client._link.session.confirmed), 1, life)
            await asyncio.wait_for(granted, 5)
            await self.end(task)


class Restart(Case):
    config = ("--appendonly", "yes", "--appendfsync", "always")

    async def test_with_its_data_a_hold_stays_and_a_wait_waits_again(self):
        async with self.client() as client:
            async with client.lock("lock") as guard:
                task, granted = await self.waiting(client)
                self.server.signal(signal.SIGKILL)
                self.server.start()
                await self.until(lambda: self.server.waiters() == 1)
                await asyncio.sleep(1.5 * GRACE)
                self.assertFalse(guard.is_lost())
                self.assertEqual(self.server.info()[b"token"], guard.token)
                self.assertFalse(granted.done())
            self.assertGreater((await asyncio.wait_for(granted, 5)).token, guard.token)
            await self.end(task)


class EmptyRestart(Case):
    async def test_without_its_data_a_hold_is_lost_and_a_wait_is_granted(self):
        async with self.client() as client, self.client() as other:
            async with client.lock("lock") as guard:
                task, granted = await self.waiting(other)
                self.server.signal(signal.SIGKILL)
                self.server.start()
                await asyncio.wait_for(guard.lost.wait(), 10)
                self.assertIn(
                    guard.reason, ["the server knows of no such hold", "not confirmed in time"]
                )
                await asyncio.wait_for(granted, 5)
            await self.end(task)

    async def test_counting_goes_on_after_restarts(self):
        async with self.client() as client:
            for _ in range(3):
                calls = [asyncio.create_task(self.take(client)) for _ in range(20)]
                await asyncio.sleep(0.02)
                self.server.signal(signal.SIGKILL)
                self.server.start()
                await asyncio.wait_for(asyncio.gather(*calls), 30)

    async def take(self, client):
        async with client.lock("lock"):
            await asyncio.sleep(0.002)


class Freeze(Case):
    async def freeze(self, seconds):
        self.server.signal(signal.SIGSTOP)
        await asyncio.sleep(seconds)
        self.server.signal(signal.SIGCONT)

    async def test_a_freeze_shorter_than_the_grace_costs_no_guard(self):
        # What is left of the grace after a freeze of a third is for a busy machine.
        grace = 3 * GRACE
        async with self.client(grace=grace) as client, client.lock("lock") as guard:
            for _ in range(3):
                # Otherwise it is one freeze, with the one before.
                await self.until(lambda: guard.valid_for() > grace * 0.7)
                await self.freeze(grace / 3)
                self.assertFalse(guard.is_lost())
                async with client.lock("other", timeout=5):
                    pass
            self.assertEqual(self.server.info()[b"token"], guard.token)

    async def test_after_a_freeze_the_session_is_confirmed_at_once(self):
        # The late reply says nothing of the time since it was asked for, and the usual one after it
        # nothing of its own fifth of the grace: a second freeze would come on top of both.
        grace = 3 * GRACE
        async with self.client(grace=grace) as client, client.lock("lock") as guard:
            for _ in range(10):  # a busy machine may miss the moment
                await self.freeze(grace * 0.23)
                with contextlib.suppress(AssertionError):
                    await self.until(lambda: guard.valid_for() > grace * 0.9, seconds=1)
                    return
            self.fail("it is confirmed later")

    async def test_in_a_freeze_longer_than_the_grace_a_guard_says_lost_in_time(self):
        async with self.client() as client:
            async with client.lock("lock") as guard:
                await asyncio.sleep(GRACE / 2)
                self.server.signal(signal.SIGSTOP)
                began = time.monotonic()
                await asyncio.wait_for(guard.lost.wait(), GRACE)
                self.assertLess(time.monotonic() - began, GRACE)
                await asyncio.sleep(GRACE)
                self.server.signal(signal.SIGCONT)
                async with client.lock("other", timeout=5) as other:
                    self.assertFalse(other.is_lost())
                self.assertTrue(guard.is_lost())
            async with client.lock("lock", timeout=5):
                pass

    async def test_freezes_lose_no_update(self):
        # A write that is under way in a freeze can come after the lock is another's.
        programs = [self.program("count", self.url, 3, 30, "fenced") for _ in range(3)]

        async def meanwhile():
            await self.freeze(random.choice([0.1, GRACE / 3, GRACE / 2, 1.3 * GRACE]))
            await asyncio.sleep(0.3)

        await self.counted(programs, meanwhile)


class HalfOpen(Case):
    def setUp(self):
        super().setUp()
        self.proxy = Proxy(self.server.port)
        self.addCleanup(self.proxy.close)

    async def test_silent_connections_are_replaced(self):
        async with self.client(self.proxy.url) as client, client.lock("lock") as guard:
            for _ in range(3):
                self.proxy.deaf.update(range(len(self.proxy.pairs)))
                async with client.lock("other", timeout=GRACE):  # on a new connection
                    pass
                await asyncio.sleep(GRACE)
                self.assertFalse(guard.is_lost())

    async def test_replies_that_are_held_back_tell_a_waiter_of_its_grant_later(self):
        async with self.client() as holder, self.client(self.proxy.url) as client:
            async with holder.lock("lock"):
                task, granted = await self.waiting(client)
                self.proxy.deaf.add("all")
            await asyncio.sleep(GRACE / 2)
            self.assertFalse(granted.done())
            self.proxy.deaf.clear()
            guard = await asyncio.wait_for(granted, 5)
            self.assertFalse(guard.is_lost())
            await self.end(task)

    async def test_replies_held_back_for_longer_than_the_grace_lose_the_guard_and_leave_nothing(
        self,
    ):
        async with self.client(self.proxy.url) as client:
            async with client.lock("lock") as guard:
                self.proxy.deaf.add("all")
                await asyncio.wait_for(guard.lost.wait(), GRACE + 0.5)
                with self.assertRaises(Unanswered):
                    async with client.lock("other", timeout=0.3):
                        self.fail("without a reply")
                await asyncio.sleep(GRACE)
                self.proxy.deaf.clear()
            async with client.lock("other", timeout=5):
                pass

    async def test_replies_held_back_at_random_lose_no_update(self):
        programs = [self.program("count", self.proxy.url, 2, 30) for _ in range(3)]

        async def meanwhile():
            # Not the connections of the counter itself.
            ids = list(self.server.connections())
            ports = {
                int(a["addr"].rsplit(":", 1)[1])
                for a in self.server.db.client_list()
                if a["id"] in ids
            }
            pairs = list(enumerate(self.proxy.pairs))
            mine = []
            for number, (_, server) in pairs:
                with contextlib.suppress(OSError):
                    if server.getsockname()[1] in ports:
                        mine.append(number)
            self.proxy.deaf.update(random.sample(mine, len(mine) // 2))
            await asyncio.sleep(random.random())
            self.proxy.deaf.clear()
            await asyncio.sleep(0.1)

        self.assertEqual(await self.counted(programs, meanwhile), 180)


if __name__ == "__main__":
    if sys.argv[1] == "count":
        asyncio.run(count(sys.argv[2], int(sys.argv[3]), int(sys.argv[4]), len(sys.argv) > 5))
    else:
        wait(sys.argv[2])
