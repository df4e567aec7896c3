"""Writes its input, line by line, to a store that one process at a time may write to."""

import os
import sys

import redis
from redis.backoff import ExponentialWithJitterBackoff
from redis.exceptions import LockError, LockNotOwnedError
from redis.retry import Retry
from rlock_redis import Lock

URL = os.environ.get("REDIS_URL", "redis://127.0.0.1:6379")
# A command whose reply is lost is sent again.
again = Retry(ExponentialWithJitterBackoff(base=0.01, cap=1), retries=3)
db = redis.Redis.from_url(URL, retry=again)

# The store's part: it takes no write with a smaller token than the largest it has seen.
write = db.register_script("""
    if tonumber(redis.call('HGET', KEYS[1], 'token') or 0) > tonumber(ARGV[1]) then return 0 end
    redis.call('HSET', KEYS[1], 'token', ARGV[1], 'text', ARGV[2])
    return 1""")


def work(lock):
    print("held, token", lock.fencing_token, flush=True)
    for line in sys.stdin:
        try:
            lock.reacquire()  # asks the server, and starts the 30 seconds anew
        except LockNotOwnedError:
            sys.exit("lost: stock:42 is not ours any more")
        if not write(keys=["store:42"], args=[lock.fencing_token, line.strip()]):
            sys.exit("refused: the store has seen a larger token")
        print("written", flush=True)


stock = db.lock(
    "stock:42", timeout=30, blocking_timeout=10, lock_class=Lock, raise_on_release_error=False
)
try:
    with stock:
        work(stock)
    print("released", flush=True)
except LockError:
    sys.exit(f"stock:42 is busy, its lease has {db.pttl('stock:42')} ms left")
except redis.RedisError as error:
    sys.exit(f"{type(error).__name__}: {error}")
