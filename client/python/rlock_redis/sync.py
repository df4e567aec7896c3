"""The client for threads. Whatever a process holds and waits for, it has two connections."""

from __future__ import annotations

import atexit
import contextlib
import os
import queue
import socket
import threading
from typing import Any, Callable, Sequence

import redis

from ._calls import BaseCall, BaseGuard, Link, Name, Verbs, call, links, run
from ._core import Kind, NotInCluster

@atexit.register
def _close_all() -> None:
    for link in list(links):
        if isinstance(link, ThreadLink):
            run(link.close())


class ThreadLink(Link):
    """A thread for each connection, one for time, and one for functions of the application."""

    event = threading.Event
    place = os.getpid

    def __init__(self, pool: Any, grace: float, user: Any) -> None:
        self.mutex = threading.RLock()
        super().__init__(pool, grace, user)
        self.threads: list[threading.Thread] = []
        self.calls: queue.SimpleQueue[Callable[[], Any] | None] = queue.SimpleQueue()
        self.start(self._run_calls())

    def socket(self, connection: Any) -> Any:
        return connection._sock

    def abandon(self) -> None:
        # A finalizer must not wait, so a thread does; at the end of the process _close_all.
        threading.Thread(target=lambda: run(self.close()), daemon=True).start()

    def start(self, coroutine: Any) -> None:
        self.threads.append(threading.Thread(target=run, args=(coroutine,), daemon=True))
        self.threads[-1].start()

    async def wait(self, event: threading.Event, seconds: float | None) -> bool:
        return event.wait(seconds)

    def call(self, function: Callable[[], Any]) -> None:
        self.calls.put(function)

    async def _run_calls(self) -> None:
        while function := self.calls.get():
            await self.run_call(function)

    async def stop(self) -> None:
        self.calls.put(None)
        for connection in list(self.connections.values()):
            with contextlib.suppress(AttributeError, OSError):
                connection._sock.shutdown(socket.SHUT_RDWR)  # which ends what a thread reads
        for thread in self.threads:
            thread.join(self.session.grace)


class Guard(BaseGuard):
    def call(self, *words: Any) -> Any:
        """Runs a command of the server if the lock is held, in one step with looking at that.

        `guard.call("HINCRBY", "item:7", "left", -1)`; the reply is as the server gives it.
        LockNotOwnedError: it was not run. UnknownOutcome: the connection broke meanwhile.
        """
        return run(call(self._link, self._hold, words))


class Call(BaseCall[Guard]):
    _guards = Guard

    def acquire(self) -> Guard:
        """Waits for the lock. Raises NotAcquired when the timeout is over."""
        return run(self._acquire(self._timeout))

    def try_acquire(self) -> Guard | None:
        """Does not wait for the lock: None if it is not free."""
        return run(self._try_acquire())

    def __enter__(self) -> Guard:
        return run(self._enter())

    def __exit__(self, *error: Any) -> None:
        self._exit()


class Client(Verbs[Call]):
    """A session at a server. `source` is a URL or a `redis.Redis`, whose address it takes.

    `lease` is for how many seconds a lock outlives its last renewal; it is renewed three times as
    often. `grace` is for how many seconds the locks outlive both connections, and the process.
    """

    def __init__(self, source: Any, *, lease: float = 30.0, grace: float = 5.0) -> None:
        client = redis.Redis.from_url(source) if isinstance(source, str) else source
        self._lease, self._link = lease, ThreadLink(pool_of(client), grace, self)

    def close(self) -> None:
        run(self._link.close())

    def _call(self, names: Sequence[Name], kind: Kind, options: dict[str, Any]) -> Call:
        return Call(self, self._link, names, kind, **{"lease": self._lease, **options})

    def __enter__(self) -> Client:
        run(self._link.ready())
        return self

    def __exit__(self, *error: Any) -> None:
        self.close()


def pool_of(client: Any) -> Any:
    if not hasattr(client, "connection_pool"):
        raise NotInCluster(
            "rlock_redis does not work with RedisCluster: it does not find the node that serves a "
            "lock. Give it a redis.Redis of one primary, also one that Sentinel found"
        )
    return client.connection_pool
