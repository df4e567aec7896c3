"""Adds one to a number that only the holder of a lock may change."""

import os

import redis
from rlock_redis import Client

URL = os.environ.get("REDIS_URL", "redis://127.0.0.1:6379")

db = redis.Redis.from_url(URL)
with Client(URL) as client:
    with client.lock("stock:42", timeout=10) as guard:
        number = int(db.get("number") or 0)
        if guard.is_lost():  # look before each step
            raise SystemExit("lost: stock:42 is not ours any more")
        guard.call("SET", "number", number + 1)  # run only if the lock is held at that moment
        print("written, token", guard.token)
