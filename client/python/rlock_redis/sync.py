"""The client for threads. Whatever a process holds and waits for, it has two connections."""

from __future__ import annotations

import atexit
import contextlib
import logging
import queue
import socket
import threading
import weakref
from typing import Any, Callable, Sequence

import redis

from ._calls import BaseCall, BaseGuard, Link, Name, Verbs, acquire, call, run
from ._core import Kind, NotAcquired, NotInCluster

_links: weakref.WeakSet[ThreadLink] = weakref.WeakSet()


@atexit.register
def _close_all() -> None:
    for link in list(_links):
        run(link.close())


class ThreadLink(Link):
    """A thread for each connection, one for time, and one for functions of the application."""

    event = threading.Event

    def __init__(self, pool: Any, grace: float) -> None:
        self.mutex = threading.RLock()
        super().__init__(pool, grace)
        self.threads: list[threading.Thread] = []
        self.calls: queue.SimpleQueue[Callable[[], Any]] | None = None
        _links.add(self)

    def close_with(self, thing: Any) -> None:
        """Closes when nobody has the thing any more."""
        # A finalizer must not wait, so another thread does; at the end of the process _close_all.
        weakref.finalize(thing, self._thread, lambda: run(self.close())).atexit = False

    def _thread(self, function: Callable[..., Any], *words: Any) -> threading.Thread:
        thread = threading.Thread(target=function, args=words, daemon=True, name="rlock")
        thread.start()
        return thread

    def start(self, coroutine: Any) -> None:
        self.threads.append(self._thread(run, coroutine))

    async def wait(self, event: threading.Event, seconds: float | None) -> bool:
        return event.wait(seconds)

    async def do(self, result: Any) -> Any:
        return result

    def call(self, function: Callable[[], Any]) -> None:
        if not self.calls:
            self.calls = queue.SimpleQueue()
            self._thread(self._run_calls, self.calls)
        self.calls.put(function)

    def _run_calls(self, calls: Any) -> None:
        while function := calls.get():
            try:
                function()
            except Exception:
                logging.getLogger(__name__).exception("A callback of a lock failed.")

    async def disconnect(self, connection: Any) -> None:
        connection.disconnect()

    async def stop(self) -> None:
        if self.calls:
            self.calls.put(None)  # type: ignore[arg-type]
        for connection in list(self.connections.values()):
            with contextlib.suppress(AttributeError, OSError):
                connection._sock.shutdown(socket.SHUT_RDWR)  # which ends what a thread reads
        for thread in self.threads:
            if thread is not threading.current_thread():
                thread.join(self.session.grace)


class Guard(BaseGuard):
    def call(self, *words: Any) -> Any:
        """Runs a command of the server if the lock is held, in one step with looking at that.

        `guard.call("HINCRBY", "item:7", "left", -1)`; the reply is as the server gives it.
        LockNotOwnedError: it was not run. UnknownOutcome: the connection broke meanwhile.
        """
        return run(call(self._link, self._hold, words))


class Call(BaseCall):
    def acquire(self) -> Guard:
        """Waits for the lock. Raises NotAcquired when the timeout is over."""
        return Guard(self, run(acquire(self._link, self._make, self._wait())))

    def try_acquire(self) -> Guard | None:
        """Does not wait for the lock: None if it is not free."""
        try:
            return Guard(self, run(acquire(self._link, self._make, 0.0)))
        except NotAcquired:
            return None

    def __enter__(self) -> Guard:
        if self._guard:
            raise RuntimeError("this call is entered already: make another one")
        self._guard = guard = self.acquire()
        return guard

    def __exit__(self, *error: Any) -> None:
        guard, self._guard = self._guard, None
        if guard:
            guard.release()


class Client(Verbs[Call]):
    """A session at a server. `source` is a URL or a `redis.Redis`, whose address it takes.

    `lease` is for how many seconds a lock outlives its last renewal; it is renewed three times as
    often. `grace` is for how many seconds the locks outlive both connections, and the process.
    """

    def __init__(self, source: Any, *, lease: float = 30.0, grace: float = 5.0) -> None:
        client = redis.Redis.from_url(source) if isinstance(source, str) else source
        self._lease, self._link = lease, ThreadLink(pool_of(client), grace)
        self._link.close_with(self)

    def close(self) -> None:
        run(self._link.close())

    def _call(self, names: Sequence[Name], kind: Kind, options: dict[str, Any]) -> Call:
        return Call(self, names, kind, **{"lease": self._lease, **options})

    def __enter__(self) -> Client:
        run(self._link.ready())
        return self

    def __exit__(self, *error: Any) -> None:
        self.close()


def pool_of(client: Any) -> Any:
    if not hasattr(client, "connection_pool"):
        raise NotInCluster(
            "rlock_redis works at one primary (also one found by Sentinel), not with RedisCluster: "
            "it does not find the node that serves a lock"
        )
    return client.connection_pool
