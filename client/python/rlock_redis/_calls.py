"""What is alike for threads and for asyncio, beside the decisions of `_core.py`.

These functions are coroutines. For threads `run` carries them out: there `wait` blocks the thread
and never suspends, so a coroutine runs to its end at once.
"""

from __future__ import annotations

import functools
import itertools
import math
import os
import weakref
from typing import Any, Callable, ContextManager, Coroutine, Generic, Sequence, TypeVar, Union

from redis.exceptions import ConnectionError, LockNotOwnedError, RedisError, ResponseError

from . import _core
from ._core import Command, Hold, Kind, Session, Unanswered, UnknownOutcome, encode

T = TypeVar("T")
Name = Union[str, bytes]
PAUSE = 0.05, 0.5  # seconds before the second attempt to connect, and at most before a later one
SLACK = 0.25  # seconds by which word of the end of a wait may come late
# `connection_pool` finds the primary by Sentinel.
OF_THE_CONNECTION = set(
    "host port path db username password credential_provider socket_type socket_keepalive"
    " client_name encoding connection_pool".split()
)
BUSY = ("LOADING", "MISCONF", "BUSY ", "MASTERDOWN", "CLUSTERDOWN")


def run(coroutine: Coroutine[Any, Any, T]) -> T:
    try:
        coroutine.send(None)
    except StopIteration as end:
        return end.value  # type: ignore[no-any-return]
    raise AssertionError("a wait of threads suspends nothing")


def connection_options(pool: Any, timeout: float) -> dict[str, Any]:
    """Those of the pool; but timeouts, replies and retries are as a session needs them."""
    options = {
        name: value
        for name, value in pool.connection_kwargs.items()
        if name in OF_THE_CONNECTION or name.startswith("ssl")
    }
    mine = {"protocol": 2, "decode_responses": False}
    return {**options, **mine, "socket_timeout": timeout, "socket_connect_timeout": timeout}


class Link:
    """A session and its two connections. How it waits and runs is in the subclasses."""

    mutex: ContextManager[Any]

    def __init__(self, pool: Any, grace: float) -> None:
        # Without a reply for a quarter of the grace, a connection is replaced. EVENTS itself waits
        # for a fifth of the grace.
        self.kind, self.options = pool.connection_class, connection_options(pool, grace / 4)
        self.pause = int(grace * 200)  # milliseconds
        # There is something to send; to look earlier; a reply to EVENTS; a first one, or an error;
        # no command is without an answer; the end.
        self.work, self.time, self.beat = self.event(), self.event(), self.event()
        self.begun, self.idle, self.end = self.event(), self.event(), self.event()
        self.session = Session(grace, self.event, self.work.set, self.time.set, self.call)
        self.numbers, self.beats, self.is_started = itertools.count(1), 0, False
        self.failure: Exception | None = None
        self.connections: dict[Any, Any] = {}

    def valid_for(self, hold: Hold) -> float:
        if os.getpid() != self.session.pid:
            return 0.0  # after a fork, which may have copied a locked mutex
        with self.mutex:
            return hold.valid_for()

    def event(self) -> Any:
        raise NotImplementedError

    def start(self, coroutine: Coroutine[Any, Any, None]) -> None:
        raise NotImplementedError

    def call(self, function: Callable[[], Any]) -> None:
        """Calls a function of the application, which may take long or fail."""
        raise NotImplementedError

    async def wait(self, event: Any, seconds: float | None) -> bool:
        raise NotImplementedError

    async def do(self, result: Any) -> Any:
        """What a method of a connection gives: for asyncio it is to be awaited."""
        raise NotImplementedError

    async def disconnect(self, connection: Any) -> None:
        raise NotImplementedError

    async def stop(self) -> None:
        raise NotImplementedError

    async def ready(self) -> None:
        """Returns when the session has begun; raises what kept it from beginning."""
        self.session.check()
        with self.mutex:
            if not self.is_started:
                self.is_started = True
                self.start(self._keep(self._listen, self.session.grace / 4 + self.pause / 1000))
                self.start(self._keep(self._carry, self.session.grace / 4))
                self.start(self._tick())
            if not self.session.life:
                self.failure = None
                self.begun.clear()
        while not self.session.life:
            await self.wait(self.begun, None)
            if self.failure:
                raise self.failure
            self.session.check()

    async def close(self) -> None:
        """Gives back all that is held, and waits up to the grace until the server knows."""
        if os.getpid() != self.session.pid:
            return  # the sockets are those of the process that forked
        with self.mutex:
            if self.session.closed:
                return
            self.session.close()
            if waits := self.session.life and self.session.commands:
                self.idle.clear()
        try:
            if waits:
                await self.wait(self.idle, self.session.grace)
        finally:
            for event in (self.end, self.work, self.time, self.beat, self.begun):
                event.set()
            await self.stop()

    async def _tick(self) -> None:
        while not self.end.is_set():
            self.time.clear()
            with self.mutex:
                left = self.session.tick()
            await self.wait(self.time, left)

    async def _keep(self, serve: Callable[[Any, int], Any], timeout: float) -> None:
        """Serves on a connection, and on another when it breaks or is silent for too long."""
        pause = PAUSE[0]
        while not self.end.is_set():
            beats = self.beats
            connection = self.kind(**{**self.options, "socket_timeout": timeout})
            self.connections[serve.__name__] = connection
            try:
                await self.do(connection.connect())
                await serve(connection, next(self.numbers))
            except (RedisError, OSError) as error:
                with self.mutex:
                    self.failure = error
                    self.begun.set()
                pause = PAUSE[0] if self.beats != beats else min(2 * pause, PAUSE[1])
                await self.wait(self.end, pause)
            finally:
                await self.disconnect(connection)

    async def _listen(self, connection: Any, number: int) -> None:
        """The session connection."""
        pause = 1  # millisecond: the first call confirms the session at once
        while not self.end.is_set():
            with self.mutex:
                words, sent = self.session.events_words(number, pause), self.session.clock()
            await self.do(connection.send_command(*words))
            reply = await self.do(connection.read_response())
            with self.mutex:
                self.session.hear(sent, *reply)
                self.beats += 1
                self.failure = None
                self.begun.set()
                self.beat.set()
                self.time.set()  # to see what was forgotten
            pause = self.pause

    async def _carry(self, connection: Any, number: int) -> None:
        """The command connection. What has no answer from the one before is sent again."""
        self.beat.clear()
        await self.do(connection.send_command(*self.session.bind_words(number)))
        bound = await self._reply(connection)
        life = None if isinstance(bound, Exception) else bound[0]
        with self.mutex:
            self.session.rebound()
        if life != self.session.life:  # after the next reply to EVENTS there may be a session
            await self.wait(self.beat, None)
        while life == self.session.life:
            self.work.clear()
            with self.mutex:
                batch = self.session.batch()
                if not batch:
                    self.idle.set()
            if not batch:
                if self.end.is_set():
                    return
                await self.wait(self.work, None)
                continue
            packed = connection.pack_commands([command.words for command in batch])
            await self.do(connection.send_packed_command(packed))
            for command in batch:
                reply = await self._reply(connection)
                if isinstance(reply, ResponseError) and str(reply).startswith(BUSY):
                    raise ConnectionError(str(reply))  # sent again, so that the order stays
                with self.mutex:
                    self.session.answered(command, reply)

    async def _reply(self, connection: Any) -> Any:
        try:
            return await self.do(connection.read_response())
        except ResponseError as error:
            return error


async def acquire(link: Link, make: Callable[[], Hold], wait: float) -> Hold:
    """A hold that is held. `make` makes the call for one."""
    await link.ready()
    session = link.session
    deadline = session.clock() + wait
    while True:
        with link.mutex:
            session.check()
            hold = make()
            joined = session.join(hold.names[0], hold.owner, hold.kind)
            if joined:
                hold = joined
            else:
                hold.deadline, hold.may_wait = deadline, wait > 0
                session.enter(hold)
        try:
            left = max(deadline - session.clock(), 0.0)
            seconds = None if left == math.inf else left + SLACK
            settled = await link.wait(hold.settled, seconds)
            if not settled and hold.phase != _core.WAITING:  # nothing was heard of it
                await link.wait(hold.settled, session.grace)
            with link.mutex:
                if session.outcome(hold, deadline):
                    return hold
                session.leave(hold)
        except BaseException:  # also if the task is cancelled or Ctrl-C is pressed
            with link.mutex:
                session.leave(hold)
            raise


async def answer(link: Link, command: Command) -> Any:
    """The reply to a command. An error is raised."""
    if not await link.wait(command.done, link.session.grace):
        with link.mutex:
            if not command.done.is_set():
                if command.repeatable or link.session.withdraw(command):
                    raise Unanswered("no answer from the server in time")
                raise UnknownOutcome("no reply in time")
    if isinstance(command.reply, Exception):
        raise command.reply
    return command.reply


async def call(link: Link, hold: Hold, words: Sequence[Any]) -> Any:
    lost = LockNotOwnedError("the lock was lost: the command was not run")
    with link.mutex:
        if hold.valid_for() <= 0:
            raise lost
        words = (*hold.kind.name, "TOKEN", hold.token, "CALL", *words)
        words = ("RLOCK.GUARD", hold.names[0], hold.owner, *words)
        command = link.session.send(words, repeatable=False)
    try:
        return await answer(link, command)
    except ResponseError as error:
        if not str(error).startswith("NOTHELD"):
            raise
        with link.mutex:
            hold.gone = True
            hold.lose("the server knows of no such hold")
        raise lost from error


class BaseGuard:
    """A lock that is held. Once it says that it is lost, it never says otherwise."""

    def __init__(self, call: BaseCall, hold: Hold) -> None:
        # The client ends when it, its calls and its guards are forgotten.
        link, self._client, self._hold = call._link, call._client, hold
        self._link = link
        #: The fencing token: larger than that of each earlier grant of this lock.
        self.token, self.owner = hold.token, hold.owner
        #: Events of `threading` or `asyncio`. `lost` is set when the lock is lost or released;
        #: `wanted` when somebody waits for it, if `on_wanted` was given.
        self.lost, self.wanted = hold.lost, hold.wanted
        forget: Callable[[], Any] = functools.partial(link.session.leave, hold)
        self._forget = weakref.finalize(self, link.session.forgotten.append, forget)
        self._forget.atexit = False

    @property
    def reason(self) -> str | None:
        """Why it is lost, or None."""
        return self._hold.reason

    def valid_for(self) -> float:
        """For how many seconds the server surely grants the lock to nobody else."""
        return self._link.valid_for(self._hold)

    def is_lost(self) -> bool:
        """Asks nobody, so look before each step of the work."""
        return self.valid_for() <= 0

    def release(self) -> None:
        """Sends the release and waits for no answer. Twice does no harm."""
        if self._forget.detach() and os.getpid() == self._link.session.pid:
            with self._link.mutex:
                self._link.session.leave(self._hold)


C = TypeVar("C")


class Verbs(Generic[C]):
    """The kinds of locks. A call for one does nothing until it is entered or `acquire` is called.

    `timeout` is for how many seconds to wait, without limit if None. `owner` names who holds the
    lock: calls of one client with one owner share the hold, which ends with the last of them.
    `lease` is for how many seconds the lock outlives its last renewal, and `max_hold` after how
    many it is lost though the client lives. `on_lost()` is called when it is lost, and
    `on_wanted()` when somebody waits for it.
    """

    _lease: float

    def _call(self, names: Sequence[Name], kind: Kind, options: dict[str, Any]) -> C:
        raise NotImplementedError

    def lock(self, name: Name, **options: Any) -> C:
        """A lock with one holder."""
        return self._call([name], _core.PLAIN, options)

    def read(self, name: Name, **options: Any) -> C:
        """A read-write lock, beside other readers."""
        return self._call([name], _core.READ, options)

    def write(self, name: Name, **options: Any) -> C:
        """A read-write lock, alone."""
        return self._call([name], _core.WRITE, options)

    def lock_all(self, names: Sequence[Name], **options: Any) -> C:
        """Several locks, all or none. While it waits it holds none of them."""
        if "owner" in options or not names:
            raise ValueError("several locks are one or more, each call with an owner of its own")
        return self._call(list(dict.fromkeys(map(encode, names))), _core.PLAIN, options)

    def permits(self, name: Name, limit: int | None = None, n: int = 1, **options: Any) -> C:
        """`n` permits of a semaphore that has `limit`; or the limit set with RLOCK.LIMIT."""
        if "owner" in options:
            raise ValueError("permits are not re-entrant: each call has an owner of its own")
        return self._call([name], _core.permits(n, limit), options)


class BaseCall:
    """A call for a lock. It can be made again and again, by one caller at a time."""

    def __init__(
        self,
        client: Any,
        names: Sequence[Name],
        kind: Kind,
        *,
        timeout: float | None = None,
        owner: Name | None = None,
        lease: float,
        max_hold: float = math.inf,
        on_lost: Callable[[], Any] | None = None,
        on_wanted: Callable[[], Any] | None = None,
    ) -> None:
        if not (lease > 0 and max_hold > 0):
            raise ValueError("lease and max_hold must be above 0 seconds")
        link: Link = client._link
        self._client, self._link, self._timeout = client, link, timeout
        self._guard: Any = None

        def make() -> Hold:
            whose = link.session.new_owner() if owner is None else encode(owner)
            wants = on_wanted is not None
            locks = [encode(name) for name in names]
            hold = Hold(link.session, locks, whose, kind, lease, max_hold, wants=wants)
            hold.on_lost, hold.on_wanted = on_lost, on_wanted
            return hold

        self._make = make

    def _wait(self) -> float:
        return math.inf if self._timeout is None else self._timeout
