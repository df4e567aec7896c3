"""Locks of RLOCK, a module of Redis and Valkey.

    with Client("redis://127.0.0.1:6379") as client:
        with client.lock("stock:42", timeout=10) as guard:
            write(text, token=guard.token)  # before each step look at guard.is_lost()

    async with AsyncClient("redis://127.0.0.1:6379") as client:
        async with client.lock("stock:42", timeout=10) as guard:
            await write(text, token=guard.token)

`Lock` and `AsyncLock` are for what takes the classes of redis-py: `lock_class=Lock`.
"""

from ._core import NotAcquired, NotInCluster, Unanswered, UnknownOutcome
from .aio import AsyncClient, AsyncGuard
from .redis_lock import AsyncLock, Lock
from .sync import Client, Guard

__all__ = [
    "AsyncClient",
    "AsyncGuard",
    "AsyncLock",
    "Client",
    "Guard",
    "Lock",
    "NotAcquired",
    "NotInCluster",
    "Unanswered",
    "UnknownOutcome",
]
