"""What is alike for threads and for asyncio, beside the decisions of `_core.py`.

These functions are coroutines. For threads `run` carries them out: there `wait` blocks the thread
and never suspends, so a coroutine runs to its end at once.
"""

from __future__ import annotations

import functools
import math
import weakref
from typing import Any, Callable, ContextManager, Coroutine, Dict, Generic, Optional, Sequence
from typing import TypeVar, Union

from redis.exceptions import LockNotOwnedError, ResponseError

from . import _core
from ._core import Command, Hold, Kind, Session, Unanswered, UnknownOutcome, encode

T = TypeVar("T")
Name = Union[str, bytes]
PAUSE = 0.05, 0.5  # seconds before the second attempt to connect, and at most before a later one
SLACK = 0.25  # seconds by which word of the end of a wait may come late
OF_THE_CONNECTION = ("host", "port", "path", "db", "username", "password", "credential_provider")
OF_THE_CONNECTION += ("socket_keepalive", "socket_type", "client_name", "encoding")
OF_THE_CONNECTION += ("connection_pool",)  # which finds the primary by Sentinel
BUSY = ("LOADING", "MISCONF", "BUSY ", "MASTERDOWN", "CLUSTERDOWN")


def run(coroutine: Coroutine[Any, Any, T]) -> T:
    try:
        coroutine.send(None)
    except StopIteration as end:
        return end.value  # type: ignore[no-any-return]
    raise AssertionError("a wait of threads suspends nothing")


def connection_options(pool: Any, timeout: float) -> Dict[str, Any]:
    """Those of the pool; but timeouts, replies and retries are as a session needs them."""
    options = {
        name: value
        for name, value in pool.connection_kwargs.items()
        if name in OF_THE_CONNECTION or name.startswith("ssl")
    }
    mine = {"protocol": 2, "decode_responses": False}
    return {**options, **mine, "socket_timeout": timeout, "socket_connect_timeout": timeout}


def is_busy(reply: Any) -> bool:
    """Whether the server cannot do it just now: it is sent again, so that the order stays."""
    return isinstance(reply, ResponseError) and str(reply).startswith(BUSY)


class Link:
    """A session and its two connections. What drives it is in the subclasses."""

    session: Session
    mutex: ContextManager[Any]

    async def ready(self) -> None:
        """Returns when the session has begun; raises what kept it from beginning."""
        raise NotImplementedError

    async def wait(self, event: Any, seconds: Optional[float]) -> bool:
        raise NotImplementedError


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

    def __init__(self, link: Link, hold: Hold) -> None:
        self._link, self._hold = link, hold
        forget = functools.partial(link.session.leave, hold)
        self._forget = weakref.finalize(self, link.session.forgotten.append, forget)
        self._forget.atexit = False

    @property
    def token(self) -> int:
        """The fencing token: larger than that of each earlier grant of this lock."""
        return self._hold.token

    @property
    def owner(self) -> bytes:
        return self._hold.owner

    @property
    def reason(self) -> Optional[str]:
        """Why it is lost, or None."""
        return self._hold.reason

    @property
    def lost(self) -> Any:
        """An event (of `threading` or `asyncio`) that is set when the lock is lost or released."""
        return self._hold.lost

    @property
    def wanted(self) -> Any:
        """An event that is set when somebody waits for the lock, if `on_wanted` was given."""
        return self._hold.wanted

    def valid_for(self) -> float:
        """For how many seconds the server surely grants the lock to nobody else."""
        with self._link.mutex:
            return self._hold.valid_for()

    def is_lost(self) -> bool:
        """Asks nobody, so look before each step of the work."""
        return self.valid_for() <= 0

    def release(self) -> None:
        """Sends the release and waits for no answer. Twice does no harm."""
        if self._forget.detach() and _core.os.getpid() == self._link.session.pid:
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

    def _call(self, names: Sequence[Name], kind: Kind, options: Dict[str, Any]) -> C:
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

    def permits(self, name: Name, limit: Optional[int] = None, n: int = 1, **options: Any) -> C:
        """`n` permits of a semaphore that has `limit`; or the limit set with RLOCK.LIMIT."""
        if "owner" in options:
            raise ValueError("permits are not re-entrant: each call has an owner of its own")
        return self._call([name], _core.permits(n, limit), options)


class BaseCall:
    """A call for a lock. It can be made again and again, by one caller at a time."""

    def __init__(
        self,
        link: Link,
        names: Sequence[Name],
        kind: Kind,
        *,
        timeout: Optional[float] = None,
        owner: Optional[Name] = None,
        lease: float,
        max_hold: float = math.inf,
        on_lost: Optional[Callable[[], Any]] = None,
        on_wanted: Optional[Callable[[], Any]] = None,
    ) -> None:
        if not (lease > 0 and max_hold > 0):
            raise ValueError("lease and max_hold must be above 0 seconds")
        self._link, self._timeout, self._guard = link, timeout, None

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
