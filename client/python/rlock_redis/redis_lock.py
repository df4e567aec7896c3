"""Locks for redis-py, whose `Redis.lock` makes them if it is told to:

    with client.lock("stock:42", timeout=60, lock_class=Lock) as lock:
        write(text, token=lock.fencing_token)

All locks of one connection pool share a session, so a wait takes no connection of the pool.
"""

from __future__ import annotations

import functools
import logging
import math
import os
import threading
import weakref
from types import SimpleNamespace
from typing import Any

import redis.asyncio.lock
import redis.lock
from redis.exceptions import LockError, LockNotOwnedError

from ._calls import Link, acquire, answer, run
from ._core import HELD, PLAIN, Command, Hold, NotAcquired, encode
from .aio import TaskLink
from .sync import ThreadLink, pool_of

_links: weakref.WeakKeyDictionary[Any, Any] = weakref.WeakKeyDictionary()
_links_mutex = threading.Lock()


def _after_fork() -> None:
    global _links, _links_mutex
    _links, _links_mutex = weakref.WeakKeyDictionary(), threading.Lock()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_after_fork)


class _Taken:
    """A hold that a lock knows of. If the lock is forgotten, it is not renewed for ever."""

    def __init__(self, link: Link, hold: Hold) -> None:
        self.link, self.hold = link, hold
        forget = functools.partial(link.session.forget, hold)
        self.end = weakref.finalize(self, link.session.forgotten.append, forget)
        self.end.atexit = False


class _PerThread(threading.local):
    token = None
    taken = None


class _Common:
    """What both classes do. Its coroutines suspend nothing where the link is one for threads."""

    #: For how many seconds the lock outlives its last renewal, and its process. It is renewed every
    #: third of that until `timeout` is over.
    lease = 10.0

    name: Any
    redis: Any
    timeout: float | None
    local: Any

    def __init__(self, *arguments: Any, **options: Any) -> None:
        super().__init__(*arguments, **options)
        pool_of(self.redis)  # refuses a cluster
        if self.timeout is not None and self.timeout < 0:
            raise LockError("timeout must be above 0 seconds, or None")
        names = SimpleNamespace(token=None, taken=None)
        self.local = _PerThread() if self.thread_local else names  # type: ignore[attr-defined]

    def register_scripts(self) -> None:
        """There are none: all is done by commands of the server."""

    def _link(self) -> Link:
        raise NotImplementedError

    @property
    def _hold(self) -> Hold | None:
        """The hold that this lock has taken, if `local.token` is still that one's."""
        taken = self.local.taken
        return taken.hold if taken and taken.hold.owner == self.local.token else None

    @property
    def fencing_token(self) -> int | None:
        """The number of the grant, larger than those of all earlier grants; None if not held."""
        return self._hold.token if self._hold else None

    @property
    def lost(self) -> bool:
        """Whether the lock was ours and may be another's now. Asks nobody, so look often."""
        hold = self._hold
        return hold is not None and self.local.taken.link.valid_for(hold) <= 0

    def on_lost(self) -> None:
        """Called once, in the background, if the lock is lost. Yours to override."""
        logging.getLogger(__name__).warning("The lock %s was lost.", self.name)

    def _make(self, link: Link, owner: bytes) -> Hold:
        hold = Hold(
            link.session, [encode(self.name)], owner, PLAIN, self.lease, self.timeout or math.inf
        )
        this = weakref.ref(self)

        def on_lost() -> None:
            lock = this()
            if lock:
                lock.on_lost()

        hold.on_lost = on_lost
        return hold

    async def _acquire(
        self,
        blocking: bool | None,
        blocking_timeout: float | None,
        token: str | bytes | None,
    ) -> bool:
        link = self._link()
        owner = link.session.new_owner() if token is None else encode(token)
        wait = blocking_timeout
        if wait is None:
            wait = self.blocking_timeout  # type: ignore[attr-defined]
        if not (self.blocking if blocking is None else blocking):  # type: ignore[attr-defined]
            wait = 0.0
        try:
            hold = await acquire(
                link, lambda: self._make(link, owner), math.inf if wait is None else max(wait, 0.0)
            )
        except NotAcquired:
            return False
        self.local.token, self.local.taken = owner, _Taken(link, hold)
        return True

    async def _release(self, owner: bytes) -> None:
        link, taken = self._link(), self.local.taken
        await link.ready()
        self.local.taken = None
        # A lock that was taken elsewhere is released by its owner's name, which `token` is.
        hold = taken.hold if taken and taken.hold.owner == owner else None
        if taken:
            taken.end.detach()
        command: Command | None
        with link.mutex:
            hold = hold or link.session.table.get((encode(self.name), owner, PLAIN.mode))
            was_held = hold is not None and hold.valid_for() > 0
            if hold is None:
                command = link.session.send(("RLOCK.RELEASE", self.name, owner))
            else:
                if hold.session is not link.session:  # it is the parent's, who forked
                    raise self._not_owned("release")
                hold.users = 1
                command = link.session.leave(hold)
        # The first of two sendings may have released it.
        if command is None or await answer(link, command) is None:
            if not (command and was_held and command.times > 1):
                raise self._not_owned("release")

    async def _extend(self, additional_time: float, replace_ttl: bool) -> bool:
        link = self._link()
        hold = self._hold or await self._restore(link)
        with link.mutex:
            if hold.valid_for() <= 0:
                raise self._not_owned("extend")
            hold.ends = additional_time + (link.session.clock() if replace_ttl else hold.ends)
            command = hold.renew()
        if await answer(link, command) != 1:
            raise self._not_owned("extend")
        return True

    async def _restore(self, link: Link) -> Hold:
        """The hold of a lock that was taken elsewhere, by its owner's name. It is ours from now."""
        owner = encode(self.local.token)
        await link.ready()
        with link.mutex:
            command = link.session.send(("RLOCK.INFO", self.name))
        info = await answer(link, command)
        info = dict(zip(info[::2], info[1::2]))
        if info[b"owner"] != owner or not info[b"token"]:
            raise self._not_owned("extend")
        with link.mutex:
            hold = link.session.table.get((encode(self.name), owner, PLAIN.mode))
            if hold is None:
                hold = self._make(link, owner)
                hold.max_hold = max(info[b"ttl-ms"], 1) / 1000
                hold.restore(info[b"token"])
        await link.wait(hold.settled, link.session.grace)
        if hold.phase != HELD:
            with link.mutex:
                link.session.discard(hold)
            raise self._not_owned("extend")
        self.local.token, self.local.taken = owner, _Taken(link, hold)
        return hold

    def _not_owned(self, what: str) -> LockNotOwnedError:
        return LockNotOwnedError(f"Cannot {what} a lock that's no longer owned")


class Lock(_Common, redis.lock.Lock):
    """`redis.lock.Lock`, kept by RLOCK: a waiter stands in a queue, and is handed the lock."""

    def _link(self) -> ThreadLink:
        pool = pool_of(self.redis)
        with _links_mutex:
            if pool not in _links:
                _links[pool] = ThreadLink(pool, grace=10.0)
                _links[pool].close_with(pool)
            link: ThreadLink = _links[pool]
            return link

    def acquire(
        self,
        sleep: float | None = None,
        blocking: bool | None = None,
        blocking_timeout: float | None = None,
        token: str | bytes | None = None,
    ) -> bool:
        """As in redis-py. `sleep` means nothing here, and `token` is the owner's name."""
        return run(self._acquire(blocking, blocking_timeout, token))

    def locked(self) -> bool:
        return bool(self.redis.exists(self.name))

    def owned(self) -> bool:
        owner = self.local.token
        return owner is not None and bool(self.redis.hexists(self.name, owner))

    def do_release(self, expected_token: Any) -> None:
        run(self._release(encode(expected_token)))

    def do_extend(self, additional_time: float, replace_ttl: bool) -> Any:
        return run(self._extend(additional_time, replace_ttl))

    def do_reacquire(self) -> Any:
        return run(self._extend(self.timeout or 0, True))


class AsyncLock(_Common, redis.asyncio.lock.Lock):
    """The same for `redis.asyncio`."""

    def _link(self) -> TaskLink:
        pool = pool_of(self.redis)
        link = _links.get(pool)
        if link is None or link.loop.is_closed():
            link = _links[pool] = TaskLink(pool, grace=10.0)
            link.close_with(pool)
        return link

    async def acquire(
        self,
        blocking: bool | None = None,
        blocking_timeout: float | None = None,
        token: str | bytes | None = None,
    ) -> bool:
        """As in redis-py. `token` is the owner's name."""
        return await self._acquire(blocking, blocking_timeout, token)

    async def locked(self) -> bool:
        return bool(await self.redis.exists(self.name))

    async def owned(self) -> bool:
        owner = self.local.token
        return owner is not None and bool(await self.redis.hexists(self.name, owner))

    async def do_release(self, expected_token: Any) -> None:
        await self._release(encode(expected_token))

    async def do_extend(self, additional_time: float, replace_ttl: bool) -> Any:
        return await self._extend(additional_time, replace_ttl)

    async def do_reacquire(self) -> Any:
        return await self._extend(self.timeout or 0, True)
