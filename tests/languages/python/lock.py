"""A lock of RLOCK, with redis-py."""

import itertools
import os
import uuid
from contextlib import contextmanager

import redis
from redis.backoff import ExponentialWithJitterBackoff
from redis.retry import Retry

LEASE_MS, WAIT_MS = 30_000, 10_000
URL = os.environ.get("REDIS_URL", "redis://127.0.0.1:6379")

# A command whose reply is lost is sent again.
again = Retry(ExponentialWithJitterBackoff(base=0.01, cap=1), retries=3)
db = redis.Redis.from_url(URL, retry=again)
# Waits have connections of their own, whose patience is longer than that of the server.
waits = redis.Redis.from_url(URL, retry=again, socket_timeout=WAIT_MS / 1000 + 5)

process, numbers = uuid.uuid4(), itertools.count(1)


@contextmanager
def lock(name):
    """Waits for the lock; gives the owner and the token; releases it at the end."""
    owner = f"{process}:{next(numbers)}"  # another one each time
    # With ONCE the same command, sent again, does not count twice.
    count, value = waits.execute_command(
        "RLOCK.ACQUIRE", name, owner, LEASE_MS, "BLOCK", WAIT_MS, "ONCE"
    )
    if count == 0:
        raise TimeoutError(f"{name} is busy, its lease has {value} ms left")
    try:
        yield owner, value
    finally:
        # None: it was lost meanwhile, or an earlier attempt has released it.
        db.execute_command("RLOCK.RELEASE", name, owner, "TOKEN", value)


def renew(name, owner, token):
    """Whether the lock is still ours, and from now on for a whole lease."""
    return db.execute_command("RLOCK.RENEW", name, owner, LEASE_MS, "TOKEN", token) == 1
