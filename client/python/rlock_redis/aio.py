"""The client for asyncio. Whatever a process holds and waits for, it has two connections."""

from __future__ import annotations

import asyncio
import contextlib
import os
from typing import Any, Callable, Sequence

import redis.asyncio

from ._calls import BaseCall, BaseGuard, Link, Name, Verbs, call
from ._core import Kind
from .sync import pool_of


class TaskLink(Link):
    """A task for each connection, and one for time, in the loop that made it."""

    event = asyncio.Event
    mutex = contextlib.nullcontext()
    place = asyncio.get_running_loop

    def __init__(self, pool: Any, grace: float, user: Any) -> None:
        super().__init__(pool, grace, user)
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

    def call(self, function: Callable[[], Any]) -> None:
        self.start(self.run_call(function))

    async def stop(self) -> None:
        tasks = self.tasks - {asyncio.current_task()}
        while tasks:  # redis-py may swallow a cancellation before Python 3.12
            for task in tasks:
                task.cancel()
            _, tasks = await asyncio.wait(tasks, timeout=0.05)

    def socket(self, connection: Any) -> Any:
        return connection._writer.get_extra_info("socket")._sock

    def abandon(self) -> None:
        if os.getpid() == self.session.pid:
            with contextlib.suppress(RuntimeError):  # the loop is closed
                self.loop.call_soon_threadsafe(lambda: self.loop.create_task(self.close()))


class AsyncGuard(BaseGuard):
    async def call(self, *words: Any) -> Any:
        """Runs a command of the server if the lock is held, in one step with looking at that.

        `await guard.call("HINCRBY", "item:7", "left", -1)`; the reply is as the server gives it.
        LockNotOwnedError: it was not run. UnknownOutcome: the connection broke meanwhile.
        """
        return await call(self._link, self._hold, words)


class AsyncCall(BaseCall[AsyncGuard]):
    _guards = AsyncGuard

    async def acquire(self) -> AsyncGuard:
        """Waits for the lock. Raises NotAcquired when the timeout is over."""
        return await self._acquire(self._timeout)

    async def try_acquire(self) -> AsyncGuard | None:
        """Does not wait for the lock: None if it is not free."""
        return await self._try_acquire()

    async def __aenter__(self) -> AsyncGuard:
        return await self._enter()

    async def __aexit__(self, *error: Any) -> None:
        self._exit()


class AsyncClient(Verbs[AsyncCall]):
    """A session at a server, of one event loop: `async with AsyncClient(source) as client`.

    `source`, `lease` and `grace` as of Client; it takes a `redis.asyncio.Redis`.
    """

    _own_link: TaskLink | None = None

    def __init__(self, source: Any, *, lease: float = 30.0, grace: float = 5.0) -> None:
        client = redis.asyncio.Redis.from_url(source) if isinstance(source, str) else source
        self._pool, self._lease, self._grace = pool_of(client), lease, grace

    @property
    def _link(self) -> TaskLink:
        if not self._own_link:
            self._own_link = TaskLink(self._pool, self._grace, self)
        return self._own_link

    async def close(self) -> None:
        await self._link.close()

    def _call(self, names: Sequence[Name], kind: Kind, options: dict[str, Any]) -> AsyncCall:
        return AsyncCall(self, self._link, names, kind, **{"lease": self._lease, **options})

    async def __aenter__(self) -> AsyncClient:
        await self._link.ready()
        return self

    async def __aexit__(self, *error: Any) -> None:
        await self.close()
