"""What is alike for threads and for asyncio, beside the decisions of `_core.py`.

These functions are coroutines. For threads `run` carries them out: there `wait` blocks the thread
and never suspends, so a coroutine runs to its end at once.
"""

from __future__ import annotations

import contextlib
import functools
import logging
import math
import operator
import os
import weakref
from typing import Any, Callable, ContextManager, Coroutine, Generic, Sequence, TypeVar, Union

from redis.exceptions import (
    ConnectionError,
    LockNotOwnedError,
    MasterDownError,
    ReadOnlyError,
    ResponseError,
)

from . import _core
from ._core import Command, Hold, Kind, NotAcquired, Session, encode

T = TypeVar("T")
Name = Union[str, bytes]
PAUSE = 0.1  # seconds before another attempt to connect
SLACK = 0.25  # seconds by which word of the end of a wait may come late
# `connection_pool` finds the primary by Sentinel.
OF_THE_CONNECTION = set(
    "host port path db username password credential_provider socket_type socket_keepalive"
    " client_name encoding connection_pool".split()
)
# What the server cannot do just now. It is sent again on another connection, so the order stays.
# (Of LOADING redis-py makes a ConnectionError.)
LATER = ("MISCONF", "BUSY ", "NOSESSION")


def run(coroutine: Coroutine[Any, Any, T]) -> T:
    try:
        coroutine.send(None)
    except StopIteration as end:
        return end.value  # type: ignore[no-any-return]
    raise AssertionError("a wait of threads suspends nothing")


def passes(error: Exception) -> bool:
    """Whether a connection is not bound just now, for a reason that passes."""
    is_early = str(error).startswith((*LATER, "STALE"))
    # At a replica the session connection hears so too.
    return is_early or isinstance(error, (ReadOnlyError, MasterDownError))


async def do(result: Any) -> Any:
    """The result of a function: of one for asyncio it is to be awaited."""
    return await result if hasattr(result, "__await__") else result


links: weakref.WeakSet[Link] = weakref.WeakSet()


def _after_fork() -> None:
    """A child has copies of the sockets. The server must see it when they end in the parent."""
    for link in list(links):
        for connection in list(link.connections.values()):
            with contextlib.suppress(AttributeError, OSError):
                os.close(link.socket(connection).detach())


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_after_fork)


class Link:
    """A session and its two connections. How it waits and runs is in the subclasses."""

    mutex: ContextManager[Any]
    event: Callable[[], Any]
    #: Starts a coroutine; calls a function of the application; waits; ends the connections; closes
    #: later.
    start: Callable[[Coroutine[Any, Any, None]], None]
    call: Callable[[Callable[[], Any]], None]
    wait: Callable[[Any, float | None], Coroutine[Any, Any, bool]]
    stop: Callable[[], Coroutine[Any, Any, None]]
    abandon: Callable[[], Any]
    #: The socket of a connection of redis-py.
    socket: Callable[[Any], Any]

    def __init__(self, pool: Any, grace: float, user: Any) -> None:
        """It closes when nobody has the user any more."""
        # Without a reply for a quarter of the grace, a connection is replaced. EVENTS itself waits
        # for a fifth of the grace.
        self.silence, self.pause = grace / 4, grace / 5
        # Of the pool's options; timeouts, replies and retries are as a session needs them.
        options = pool.connection_kwargs.items()
        taken = {k: v for k, v in options if k in OF_THE_CONNECTION or k.startswith("ssl")}
        mine = {"protocol": 2, "decode_responses": False, "socket_connect_timeout": self.silence}
        self.kind, self.options = pool.connection_class, {**taken, **mine}
        self.encoder = pool.get_encoder()
        # There is something to send; to look earlier; a reply to EVENTS; a first one, or an error;
        # the end.
        self.work, self.time, self.beat = self.event(), self.event(), self.event()
        self.begun, self.end = self.event(), self.event()
        self.session = Session(self, grace)
        self.is_started = False
        self.failure: Exception | None = None
        self.connections: dict[Any, Any] = {}
        weakref.finalize(user, self.abandon).atexit = False
        links.add(self)

    async def run_call(self, function: Callable[[], Any]) -> None:
        """Calls a function of the application, which may take long or fail."""
        try:
            await do(function())
        except (Exception, SystemExit):  # the next ones are called all the same
            logging.getLogger(__name__).exception("A callback of a lock failed.")

    async def ready(self) -> None:
        """Returns when the session has begun; raises what kept it from beginning."""
        self.session.check()
        with self.mutex:
            if not self.is_started:
                self.is_started = True
                self.start(self._keep(self._listen, self.silence + self.pause))
                self.start(self._keep(self._carry, self.silence))
                self.start(self._tick())
        while not self.session.life:
            await self.wait(self.begun, None)
            if self.failure and not self.session.life:
                raise self.failure
            self.session.check()

    async def close(self) -> None:
        """Gives back all that is held, and waits up to the grace until the server knows."""
        if os.getpid() != self.session.pid or self.session.closed:
            return  # the sockets are those of the process that forked
        with self.mutex:
            self.session.close()
            commands = self.session.commands
            last = commands[-1].done if self.session.life and commands else None
        try:
            if last:
                await self.wait(last, self.session.grace)
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
        while not self.end.is_set():
            connection = self.kind(**self.options, socket_timeout=timeout)
            self.connections[serve] = connection
            try:
                await do(connection.connect())
                await serve(connection, next(self.session.numbers))
            except Exception as error:  # also one of the application's credential provider
                self.failure = error
                self.begun.set()
                await self.wait(self.end, PAUSE)
            finally:
                await do(connection.disconnect(True))  # without a wait

    async def _listen(self, connection: Any, number: int) -> None:
        """The session connection."""
        pause = 1  # millisecond: the first call confirms the session at once
        while not self.end.is_set():
            with self.mutex:
                words, sent = self.session.events_words(number, pause), self.session.clock()
            await do(connection.send_command(*words))
            reply = await do(connection.read_response())
            with self.mutex:
                self.session.hear(sent, *reply)
                for event in (self.begun, self.beat, self.time):  # to see what was forgotten
                    event.set()
                late = self.session.clock() - sent - pause / 1000
            # A late reply says nothing of the time since it was asked for: the next comes at once,
            # so that another silence does not come on top of this one. But not again and again.
            is_late = pause > 1 and late > self.session.grace / 8
            pause = 1 if is_late else int(self.pause * 1000)

    async def _carry(self, connection: Any, number: int) -> None:
        """The command connection. What has no answer from the one before is sent again."""
        self.beat.clear()
        await do(connection.send_command("RLOCK.BIND", self.session.id, "EPOCH", number))
        bound = await self._reply(connection)
        life = None if isinstance(bound, Exception) else bound[0]
        with self.mutex:
            self.session.rebound()
            if isinstance(bound, Exception) and not passes(bound):
                self.session.refused(bound)  # such as for want of a right: callers hear of it
                raise bound
        if life != self.session.life:  # after the next reply to EVENTS there may be a session
            await self.wait(self.beat, None)
        while life == self.session.life and not self.end.is_set():
            with self.mutex:
                batch = self.session.batch()
            if not batch:
                await self.wait(self.work, None)
                self.work.clear()
                continue
            packed = connection.pack_commands([command.words for command in batch])
            await do(connection.send_packed_command(packed))
            for command in batch:
                reply = await self._reply(connection)
                if isinstance(reply, ResponseError) and str(reply).startswith(LATER):
                    raise ConnectionError(str(reply))
                with self.mutex:
                    self.session.answered(command, reply)

    async def _reply(self, connection: Any) -> Any:
        try:
            return await do(connection.read_response())
        except ResponseError as error:
            return error


async def acquire(link: Link, make: Callable[[], Hold], wait: float) -> Hold:
    """A hold that is held. `make` makes the call for one."""
    await link.ready()
    session = link.session
    deadline = session.clock() + wait
    while True:
        with link.mutex:
            hold = session.enter(make(), deadline)
        try:
            left = max(deadline - session.clock(), 0.0) + SLACK
            settled = await link.wait(hold.settled, None if left == math.inf else left)
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
    try:
        in_time = await link.wait(command.done, link.session.grace)
    except BaseException:  # the task is cancelled, or Ctrl-C is pressed
        with link.mutex:
            link.session.withdraw(command)
        raise
    if not in_time:
        with link.mutex:
            link.session.give_up(command)
    if isinstance(command.reply, Exception):
        raise command.reply
    return command.reply


async def call(link: Link, hold: Hold, words: Sequence[Any]) -> Any:
    lost = LockNotOwnedError("the lock was lost: the command was not run")
    if len(hold.names) > 1:
        raise ValueError("a command is run under one lock, and not under several")
    words = [link.encoder.encode(word) for word in words]  # what cannot be sent is refused here
    with link.mutex:
        if hold.valid_for() <= 0:
            raise lost
        subject = (hold.names[0], hold.owner, *hold.kind.name, "TOKEN", hold.token)
        command = link.session.send("RLOCK.GUARD", *subject, "CALL", *words, repeatable=False)
    try:
        return await answer(link, command)
    except ResponseError as error:
        if not str(error).startswith("NOTHELD"):
            raise
        with link.mutex:
            hold.lose("the server knows of no such hold")
        raise lost from error


class BaseGuard:
    """A lock that is held. Once it says that it is lost, it never says otherwise."""

    def __init__(self, link: Link, hold: Hold, forget: Callable[[Hold], Any], client: Any) -> None:
        # The client ends when it, its calls and its guards are forgotten.
        self._link, self._hold, self._client = link, hold, client
        #: The fencing token: larger than that of each earlier grant of this lock.
        self.token, self.owner = hold.token, hold.owner
        #: Events of `threading` or `asyncio`. `lost` is set when the lock is lost or released;
        #: `wanted` when somebody waits for it, if `on_wanted` was given.
        self.lost, self.wanted = hold.lost, hold.wanted
        forgotten = link.session.forgotten
        self._forget = weakref.finalize(self, forgotten.append, functools.partial(forget, hold))
        self._forget.atexit = False

    @property
    def reason(self) -> str | None:
        """Why it is lost, or None."""
        return self._hold.reason

    def valid_for(self) -> float:
        """For how many seconds the server surely grants the lock to nobody else."""
        if os.getpid() != self._link.session.pid:
            return 0.0  # after a fork, which may have copied a locked mutex
        with self._link.mutex:
            return self._hold.valid_for()

    def is_lost(self) -> bool:
        """Asks nobody, so look before each step of the work."""
        return self.valid_for() <= 0

    def release(self) -> None:
        """Sends the release and waits for no answer. Twice does no harm."""
        if self._forget.detach() and os.getpid() == self._link.session.pid:
            with self._link.mutex:
                self._link.session.leave(self._hold)


C = TypeVar("C")
G = TypeVar("G", bound=BaseGuard)


class Verbs(Generic[C]):
    """The kinds of locks. A call for one does nothing until it is entered or `acquire` is called.

    `timeout` is for how many seconds to wait, without limit if None. `owner` names who holds the
    lock: calls of one client with one owner share the hold, which ends with the last of them.
    `lease` is for how many seconds the lock outlives its last renewal, and `max_hold` after how
    many it is lost though the client lives. `on_lost()` is called when it is lost, and
    `on_wanted()` when somebody waits for it.
    """

    _call: Callable[[Sequence[Name], Kind, dict[str, Any]], C]

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
        n, limit = operator.index(n), None if limit is None else operator.index(limit)
        ask = ("PERMITS", n) if limit is None else ("PERMITS", n, "OF", limit)
        return self._call([name], Kind(b"permits", ask, ("PERMITS",), ("PERMITS", n)), options)


class BaseCall(Generic[G]):
    """A call for a lock. It can be made again and again, by one caller at a time."""

    _guards: type[G]
    _entered: G | None = None

    def __init__(self, client: Any, link: Link, names: Any, kind: Kind, **options: Any) -> None:
        timeout, owner = options.pop("timeout", None), options.pop("owner", None)
        self._client, self._link = client, link
        self._timeout = math.inf if timeout is None else timeout

        def make() -> Hold:
            whose = link.session.new_owner() if owner is None else encode(owner)
            return Hold(link.session, [encode(name) for name in names], whose, kind, **options)

        self._make = make
        make()  # refuses options that are none

    async def _acquire(self, wait: float) -> G:
        hold = await acquire(self._link, self._make, wait)
        return self._guards(self._link, hold, self._link.session.leave, self._client)

    async def _try_acquire(self) -> G | None:
        try:
            return await self._acquire(0.0)
        except NotAcquired:
            return None

    async def _enter(self) -> G:
        if self._entered:
            raise RuntimeError("this call is entered already: make another one")
        self._entered = guard = await self._acquire(self._timeout)
        return guard

    def _exit(self) -> None:
        guard, self._entered = self._entered, None
        if guard:
            guard.release()
