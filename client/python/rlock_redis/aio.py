"""The client for asyncio. Whatever a process holds and waits for, it has two connections."""

from __future__ import annotations

import asyncio
import contextlib
import inspect
import itertools
import logging
import os
import weakref
from typing import Any, Callable, Dict, Optional, Sequence, Set

import redis.asyncio
from redis.exceptions import ConnectionError, RedisError, ResponseError

from ._calls import PAUSE, BaseCall, BaseGuard, Link, Name, Verbs, acquire, answer, call
from ._calls import connection_options, is_busy
from ._core import Kind, NotAcquired, Session
from .sync import pool_of


class TaskLink(Link):
    """A task for each connection, and one for time, in the loop that made it."""

    mutex = contextlib.nullcontext()

    def __init__(self, pool: Any, grace: float) -> None:
        self.kind, self.options = pool.connection_class, connection_options(pool, grace / 4)
        self.loop = asyncio.get_running_loop()
        # `work`: there is something to send; `time`: to look earlier; `beat`: a reply to EVENTS,
        # or an error instead; `idle`: no command is without an answer.
        self.work, self.time = asyncio.Event(), asyncio.Event()
        self.beat, self.idle = asyncio.Event(), asyncio.Event()
        self.session = Session(grace, asyncio.Event, self.work.set, self.time.set, self._call)
        self.numbers, self.beats = itertools.count(1), 0
        self.failure: Optional[Exception] = None
        self.tasks: Set[asyncio.Task[Any]] = set()

    def _start(self, coroutine: Any) -> None:
        task = self.loop.create_task(coroutine)
        self.tasks.add(task)  # a loop keeps tasks by weak references alone
        task.add_done_callback(self.tasks.discard)

    async def ready(self) -> None:
        self.session.check()
        if not self.tasks:
            for coroutine in (self._keep(self._listen), self._keep(self._carry), self._tick()):
                self._start(coroutine)
        if not self.session.life:
            self.failure = None
        while not self.session.life:
            if self.failure:
                raise self.failure
            self.beat.clear()
            await self.beat.wait()

    async def wait(self, event: asyncio.Event, seconds: Optional[float]) -> bool:
        # Not wait_for, which before Python 3.12 may swallow a cancellation.
        waiting = self.loop.create_task(event.wait())
        try:
            await asyncio.wait([waiting], timeout=seconds)
        finally:
            waiting.cancel()
        return event.is_set()

    def _call(self, function: Callable[[], Any]) -> None:
        async def carry_out() -> None:
            try:
                result = function()
                if inspect.isawaitable(result):
                    await result
            except Exception:
                logging.getLogger(__name__).exception("A callback of a lock failed.")

        self._start(carry_out())

    async def _tick(self) -> None:
        while True:
            self.time.clear()
            await self.wait(self.time, self.session.tick())

    async def _keep(self, serve: Callable[[Any, int], Any]) -> None:
        """Serves on a connection, and on another when it breaks or is silent for too long."""
        pause = PAUSE[0]
        while True:
            connection, beats = self.kind(**self.options), self.beats
            try:
                await connection.connect()
                await serve(connection, next(self.numbers))
            except (RedisError, OSError) as error:
                self.failure = error
                self.beat.set()
                pause = PAUSE[0] if self.beats != beats else min(2 * pause, PAUSE[1])
                await asyncio.sleep(pause)
            finally:
                await connection.disconnect(nowait=True)

    async def _listen(self, connection: Any, number: int) -> None:
        """The session connection."""
        grace, pause = self.session.grace, 1  # millisecond: it confirms the session at once
        while True:
            sent = self.session.clock()
            await connection.send_command(*self.session.events_words(number, pause))
            self.session.hear(sent, *await connection.read_response())
            self.beats += 1
            self.beat.set()
            pause = int(grace * 200)

    async def _carry(self, connection: Any, number: int) -> None:
        """The command connection. What has no answer from the one before is sent again."""
        self.beat.clear()
        await connection.send_command(*self.session.bind_words(number))
        bound = await self._reply(connection)
        life = None if isinstance(bound, Exception) else bound[0]
        self.session.rebound()
        if life != self.session.life:
            await self.beat.wait()  # after the next reply to EVENTS there may be a session
        while life == self.session.life:
            batch = self.session.batch()
            if not batch:
                self.idle.set()
                self.work.clear()
                await self.work.wait()
                self.idle.clear()
                continue
            packed = connection.pack_commands([command.words for command in batch])
            await connection.send_packed_command(packed)
            for command in batch:
                reply = await self._reply(connection)
                if is_busy(reply):
                    raise ConnectionError(str(reply))
                self.session.answered(command, reply)

    async def _reply(self, connection: Any) -> Any:
        try:
            return await connection.read_response()
        except ResponseError as error:
            return error

    async def close(self) -> None:
        """Gives back all that is held, and waits up to the grace until the server knows."""
        if os.getpid() != self.session.pid or self.session.closed:
            return
        self.session.close()
        try:
            if self.session.life and self.session.commands:
                self.idle.clear()
                await self.wait(self.idle, self.session.grace)
        finally:
            tasks = self.tasks - {asyncio.current_task()}
            while tasks:  # redis-py may swallow a cancellation before Python 3.12
                for task in tasks:
                    task.cancel()
                _, tasks = await asyncio.wait(tasks, timeout=PAUSE[0])

    def abandon(self) -> None:
        """From any thread: the client is no more, and its loop may still run."""
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
        return AsyncGuard(self._link, await acquire(self._link, self._make, self._wait()))

    async def try_acquire(self) -> Optional[AsyncGuard]:
        """Does not wait for the lock: None if it is not free."""
        try:
            return AsyncGuard(self._link, await acquire(self._link, self._make, 0.0))
        except NotAcquired:
            return None

    async def __aenter__(self) -> AsyncGuard:
        if self._guard:
            raise RuntimeError("this call is entered already: make another one")
        self._guard = await self.acquire()
        return self._guard

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
        self._link: Optional[TaskLink] = None

    def _call(self, names: Sequence[Name], kind: Kind, options: Dict[str, Any]) -> AsyncCall:
        if self._link is None:
            self._link = TaskLink(self._pool, self._grace)
            weakref.finalize(self, self._link.abandon).atexit = False
        return AsyncCall(self._link, names, kind, **{"lease": self._lease, **options})

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
