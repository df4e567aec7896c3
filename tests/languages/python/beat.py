"""A Celery app whose scheduler, RedBeat, starts again soon after its process died."""

import os

import redis
from celery import Celery
from redis.backoff import ExponentialWithJitterBackoff
from redis.retry import Retry
from rlock_redis import Lock

URL = os.environ.get("REDIS_URL", "redis://127.0.0.1:6379")


class BeatLock(Lock):
    """RedBeat's `extend(n)` means n seconds from now: it gives redis-py's lock a script for it."""

    def extend(self, additional_time, replace_ttl=True):
        return super().extend(additional_time, replace_ttl)


class Redis(redis.Redis):
    """RedBeat asks its client for a lock, and names no class."""

    def lock(self, name, **options):
        return super().lock(name, **options, lock_class=BeatLock)


app = Celery("beat", broker=URL)
app.conf.redbeat_redis_url = URL
app.conf.beat_schedule = {"tick": {"task": "tick", "schedule": 1.0}}
# RedBeat takes the client that it finds here.
again = Retry(ExponentialWithJitterBackoff(), retries=10)
app.redbeat_redis = Redis.from_url(URL, decode_responses=True, retry=again)
