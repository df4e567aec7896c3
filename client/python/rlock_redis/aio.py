"""The client for asyncio. Whatever a process holds and waits for, it has two connections."""

from __future__ import annotations

import asyncio
import contextlib
import inspect
import logging
import os
import weakref
from typing import Any, Callable, Sequence

import redis.asyncio

from ._calls import BaseCall, BaseGuard, Link, Name, Verbs, acquire, call
from ._core import Kind, NotAcquired
from .sync import pool_of


class TaskLink(Link):
    """A task for each connection, and one for time, in the loop that made it."""

    event = asyncio.Event
    mutex = contextlib.nullcontext()

    def __init__(self, pool: Any, grace: float) -> None:
        super().__init__(pool, grace)
        self.loop = asyncio.get_running_loop()
        self.tasks: set[asyncio.Task[Any]] = set()  # a loop keeps them by weak references alone

    def start(self, coroutine: Any) -> None:
        task = self.loop.create_task(coroutine)
        self.tasks.add(task)
        task.add_done_callback(self.tasks.discard)

    async def wait(self, event: asyncio.Event, seconds: float | None) -> bool:
        # Not wait_for, which before Python 3.12 may swallow a cancellation.
        waiting = self.loop.create_task(event.wait())
        try:
            await asyncio.wait([waiting], timeout=seconds)
        finally:
            waiting.cancel()
        return event.is_set()

    async def do(self, result: Any) -> Any:
        return await result

    def call(self, function: Callable[[], Any]) -> None:
        self.start(self._run_call(function))

    async def _run_call(self, function: Callable[[], Any]) -> None:
        try:
            result = function()
            if inspect.isawaitable(result):
                await result
        except Exception:
            logging.getLogger(__name__).exception("A callback of a lock failed.")

    async def disconnect(self, connection: Any) -> None:
        await connection.disconnect(nowait=True)

    async def stop(self) -> None:
        tasks = self.tasks - {asyncio.current_task()}
        while tasks:  # redis-py may swallow a cancellation before Python 3.12
            for task in tasks:
                task.cancel()
            _, tasks = await asyncio.wait(tasks, timeout=0.05)

    def close_with(self, thing: Any) -> None:
        """Closes when nobody has the thing any more, if the loop still runs then."""
        weakref.finalize(thing, self._abandon).atexit = False

    def _abandon(self) -> None:
        if os.getpid() == self.session.pid and not self.loop.is_closed():
            with contextlib.suppress(RuntimeError):  # the loop was closed meanwhile
                self.loop.call_soon_threadsafe(lambda: self.loop.create_task(self.close()))


class AsyncGuard(BaseGuard):
    async def call(self, *words: Any) -> Any:
        """Runs a command of the server if the lock is held, in one step with looking at that.

        `await guard.call("HINCRBY", "item:7", "left", -1)`; the reply is as the server gives it.
        LockNotOwnedError: it was not run. UnknownOutcome: the connection broke meanwhile.
        """
        return await call(self._link, self._hold, words)


class AsyncCall(BaseCall):
    async def acquire(self) -> AsyncGuard:
        """Waits for the lock. Raises NotAcquired when the timeout is over."""
        return AsyncGuard(self, await acquire(self._link, self._make, self._wait()))

    async def try_acquire(self) -> AsyncGuard | None:
        """Does not wait for the lock: None if it is not free."""
        try:
            return AsyncGuard(self, await acquire(self._link, self._make, 0.0))
        except NotAcquired:
            return None

    async def __aenter__(self) -> AsyncGuard:
        if self._guard:
            raise RuntimeError("this call is entered already: make another one")
        self._guard = guard = await self.acquire()
        return guard

    async def __aexit__(self, *error: Any) -> None:
        guard, self._guard = self._guard, None
        if guard:
            guard.release()


class AsyncClient(Verbs[AsyncCall]):
    """A session at a server, of one event loop: `async with AsyncClient(source) as client`.

    `source`, `lease` and `grace` as of Client; it takes a `redis.asyncio.Redis`.
    """

    def __init__(self, source: Any, *, lease: float = 30.0, grace: float = 5.0) -> None:
        client = redis.asyncio.Redis.from_url(source) if isinstance(source, str) else source
        self._pool, self._lease, self._grace = pool_of(client), lease, grace
        self._link: TaskLink | None = None

    def _call(self, names: Sequence[Name], kind: Kind, options: dict[str, Any]) -> AsyncCall:
        if self._link is None:
            self._link = TaskLink(self._pool, self._grace)
            self._link.close_with(self)
        return AsyncCall(self, names, kind, **{"lease": self._lease, **options})

    async def close(self) -> None:
        if self._link:
            await self._link.close()

    async def __aenter__(self) -> AsyncClient:
        self.lock("")  # which makes the link
        assert self._link
        await self._link.ready()
        return self

    async def __aexit__(self, *error: Any) -> None:
        await self.close()
