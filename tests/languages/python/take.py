"""Writes its input, line by line, to a store that one process at a time may write to."""

import itertools
import os
import sys
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

# The store's part: it takes no write with a smaller token than the largest it has seen.
write = db.register_script("""
    if tonumber(redis.call('HGET', KEYS[1], 'token') or 0) > tonumber(ARGV[1]) then return 0 end
    redis.call('HSET', KEYS[1], 'token', ARGV[1], 'text', ARGV[2])
    return 1""")


@contextmanager
def lock(name):
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
    return db.execute_command("RLOCK.RENEW", name, owner, LEASE_MS, "TOKEN", token) == 1


try:
    with lock("stock:42") as (owner, token):
        print("held, token", token, flush=True)
        for line in sys.stdin:
            if not renew("stock:42", owner, token):
                sys.exit("lost: stock:42 is not ours any more")
            if not write(keys=["store:42"], args=[token, line.strip()]):
                sys.exit("refused: the store has seen a larger token")
            print("written", flush=True)
    print("released", flush=True)
except (TimeoutError, redis.ResponseError) as error:
    sys.exit(f"{type(error).__name__}: {error}")
