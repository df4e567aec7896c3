"""RedBeat, Celery's scheduler in Redis, with RLOCK's lock and with redis-py's: a beat is killed."""

import os
import re
import subprocess
import sys
import threading
import time
import unittest

import redis
from celery import Celery

URL = os.environ["REDIS_URL"]
DEADLINE = 60
LOCK = "redbeat::lock"

# With redis-py's lock. RedBeat's lock timeout is 25 minutes by default, and it polls every 5: both
# are shortened here, or nobody would wait for this test.
plain = Celery("plain", broker=URL)
plain.conf.redbeat_redis_url = URL
plain.conf.redbeat_lock_timeout = 20
plain.conf.beat_max_loop_interval = 2
plain.conf.beat_schedule = {"tick": {"task": "tick", "schedule": 1.0}}


class Beat:
    """A scheduler's process, and when it first printed each of its lines."""

    def __init__(self, app):
        command = [sys.executable, "-m", "celery", "-A", app, "beat", "-l", "debug"]
        options = ["-S", "redbeat.RedBeatScheduler", "--pidfile="]
        self.process = subprocess.Popen(
            command + options, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
        )
        self.lines, self.ended, self.printed = [], False, threading.Condition()
        self.reader = threading.Thread(target=self._read, daemon=True)
        self.reader.start()

    def _read(self):
        for line in self.process.stdout:
            with self.printed:
                self.lines.append((time.monotonic(), line))
                self.printed.notify_all()
        with self.printed:
            self.ended = True
            self.printed.notify_all()

    def prints(self, pattern):
        """When it printed that."""
        with self.printed:
            self.printed.wait_for(lambda: self.ended or self._find(pattern), DEADLINE)
            found = self._find(pattern)
        if found is None:
            raise AssertionError(f"no {pattern} in: " + "".join(line for _, line in self.lines))
        return found

    def _find(self, pattern):
        return next((when for when, line in self.lines if re.search(pattern, line)), None)

    def kill(self):
        self.process.kill()
        self.process.wait()
        self.reader.join()
        self.process.stdout.close()


class ABeatIsKilled(unittest.TestCase):
    def setUp(self):
        self.db = redis.Redis.from_url(URL, decode_responses=True)
        self.db.flushall()

    def beat(self, app):
        beat = Beat(app)
        self.addCleanup(beat.kill)
        return beat

    def seconds_without(self, app):
        """Two beats; one dies by SIGKILL. For how long nothing is scheduled."""
        first = self.beat(app)
        first.prints("Acquired lock")
        second = self.beat(app)
        second.prints("Acquiring lock")
        first.prints("Sending due task tick")
        time.sleep(3)
        self.assertIsNone(second._find("Acquired lock"))
        first.kill()
        killed = time.monotonic()
        second.prints("Acquired lock")
        return second.prints("Sending due task tick") - killed

    def test_with_rlock_the_other_beat_schedules_within_the_lease(self):
        seconds = self.seconds_without("beat:app")
        print(f"RLOCK: scheduled again after {seconds:.1f} s; lease 10 s, lock timeout 1500 s")
        self.assertLess(seconds, 10 + 5)

    def test_with_redis_pys_lock_it_waits_for_the_lock_timeout(self):
        seconds = self.seconds_without("test_beat:plain")
        print(f"redis-py: scheduled again after {seconds:.1f} s; lock timeout 20 s")
        self.assertGreater(seconds, 15)

    def test_a_beat_that_ends_by_itself_hands_over_at_once(self):
        first = self.beat("beat:app")
        first.prints("Acquired lock")
        second = self.beat("beat:app")
        second.prints("Acquiring lock")
        first.process.terminate()
        released = first.prints("Releasing lock")
        self.assertLess(second.prints("Acquired lock") - released, 2)

    def test_a_beat_that_lost_the_lock_schedules_nothing_more(self):
        beat = self.beat("beat:app")
        beat.prints("Sending due task tick")
        self.assertEqual(self.db.execute_command("RLOCK.BREAK", LOCK), 1)
        self.db.execute_command("RLOCK.ACQUIRE", LOCK, "another", 60000)
        beat.prints("LockNotOwnedError")
        self.assertNotEqual(beat.process.wait(DEADLINE), 0)

    def test_each_tick_prolongs_the_lock_to_the_lock_timeout_and_no_further(self):
        import beat

        self.db.delete(LOCK)
        lock = beat.app.redbeat_redis.lock(LOCK, timeout=3, sleep=300)
        self.assertIs(type(lock), beat.BeatLock)
        self.assertTrue(lock.acquire())
        for _ in range(5):
            lock.extend(3)
        self.assertLessEqual(self.db.pttl(LOCK), 3000)
        lock.release()


if __name__ == "__main__":
    unittest.main(verbosity=2)
