"""Writes its input, line by line, to a store that one process at a time may write to."""

import sys

import redis

from lock import db, lock, renew

# The store's part: it takes no write with a smaller token than the largest it has seen.
write = db.register_script("""
    if tonumber(redis.call('HGET', KEYS[1], 'token') or 0) > tonumber(ARGV[1]) then return 0 end
    redis.call('HSET', KEYS[1], 'token', ARGV[1], 'text', ARGV[2])
    return 1""")

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
except (TimeoutError, redis.RedisError) as error:
    sys.exit(f"{type(error).__name__}: {error}")
