"""Locks for redis-py, whose `Redis.lock` makes them if it is told to:

    with client.lock("stock:42", timeout=60, lock_class=Lock) as lock:
        write(text, token=lock.fencing_token)

All locks of one connection pool share a session, so a wait takes no connection of the pool.
"""

from __future__ import annotations

import contextlib
import logging
import math
import weakref
from typing import Any, Callable, Coroutine

import redis.asyncio.lock
import redis.lock
from redis.exceptions import LockError, LockNotOwnedError

from ._calls import BaseGuard, Link, acquire, answer, do, run
from ._core import PLAIN, Hold, NotAcquired, encode
from .aio import TaskLink
from .sync import ThreadLink, pool_of


class _Common:
    """What both classes do. Its coroutines suspend nothing where the link is one for threads."""

    #: For how many seconds the lock outlives its last renewal, and its process. It is renewed every
    #: third of that until `timeout` is over.
    lease = 10.0

    name: Any
    redis: Any
    timeout: float | None
    blocking: bool
    blocking_timeout: float | None
    local: Any
    _links: Any
    _run: Callable[[Coroutine[Any, Any, Any]], Any]

    def __init__(self, *arguments: Any, **options: Any) -> None:
        super().__init__(*arguments, **options)
        pool_of(self.redis)  # refuses a cluster
        if self.timeout is not None and self.timeout < 0:
            raise LockError("timeout must be above 0 seconds, or None")

    def register_scripts(self) -> None:
        """There are none: all is done by commands of the server."""

    def _link(self) -> Link:
        """The link of the pool, in this process or event loop."""
        pool, place = pool_of(self.redis), self._links.place()
        links: dict[Any, Link] = vars(pool).setdefault("_rlock_links", {})
        if place not in links:
            link = self._links(pool, 10.0, pool)
            if links.setdefault(place, link) is not link:  # two threads have made one
                link.abandon()
        return links[place]

    @property
    def _guard(self) -> BaseGuard | None:
        """That of the hold that this lock has taken, if `local.token` is still that one's."""
        guard: BaseGuard | None = getattr(self.local, "guard", None)
        return guard if guard and guard.owner == self.local.token else None

    @property
    def fencing_token(self) -> int | None:
        """The number of the grant, larger than those of all earlier grants; None if not held."""
        return self._guard.token if self._guard else None

    @property
    def lost(self) -> bool:
        """Whether the lock was ours and may be another's now. Asks nobody, so look often."""
        return self._guard is not None and self._guard.is_lost()

    def on_lost(self) -> Any:
        """Called once, in the background, if the lock is lost. Yours to override."""
        logging.getLogger(__name__).warning("The lock %s was lost.", self.name)

    async def _take(self, owner: bytes, wait: float, seconds: float, token: int = 0) -> BaseGuard:
        link, this, names = self._link(), weakref.ref(self), [encode(self.name)]

        def make() -> Hold:
            hold = Hold(link.session, names, owner, PLAIN, self.lease, seconds, token=token)
            hold.on_lost = lambda: (lock := this()) and lock.on_lost()
            return hold

        hold = await acquire(link, make, wait)
        # If the lock is forgotten, the hold is not renewed for ever.
        guard = BaseGuard(link, hold, link.session.forget, None)
        self.local.token, self.local.guard = owner, guard
        return guard

    async def _acquire(self, blocking: bool | None, wait: float | None, token: Any) -> bool:
        owner = self._link().session.new_owner() if token is None else encode(token)
        wait = self.blocking_timeout if wait is None else wait
        if not (self.blocking if blocking is None else blocking):
            wait = 0.0
        try:
            await self._take(owner, math.inf if wait is None else wait, self.timeout or math.inf)
        except NotAcquired:
            return False
        return True

    async def _release(self, owner: bytes) -> None:
        link, guard = self._link(), getattr(self.local, "guard", None)
        self.local.guard = None
        await link.ready()
        with link.mutex:
            hold = link.session.table.get((encode(self.name), owner, PLAIN.mode))
            hold = guard._hold if guard and guard.owner == owner else hold
            was_held = hold is not None and hold.valid_for() > 0
            if hold and hold.session is not link.session:  # it is the parent's, who forked
                raise self._not_owned("release")
            if hold:
                hold.users = 1
                command = link.session.leave(hold)
            else:
                command = link.session.send("RLOCK.RELEASE", encode(self.name), owner)
        reply = command and await answer(link, command)
        # The first of two sendings may have released it.
        if reply is None and not (command and was_held and command.times > 1):
            raise self._not_owned("release")

    async def _extend(self, additional_time: float, replace_ttl: bool) -> bool:
        link = self._link()
        hold = (self._guard or await self._restored(link))._hold
        with link.mutex:
            if hold.valid_for() <= 0:
                raise self._not_owned("extend")
            since = link.session.clock() if replace_ttl else hold.ends
            command = hold.renew(since + additional_time)
        if await answer(link, command) != 1:
            raise self._not_owned("extend")
        return True

    async def _restored(self, link: Link) -> BaseGuard:
        """The hold of a lock that was taken elsewhere, by its owner's name. It is ours from now."""
        await link.ready()
        with link.mutex:
            command = link.session.send("RLOCK.INFO", encode(self.name))
        reply = await answer(link, command)
        info = dict(zip(reply[::2], reply[1::2]))
        owner, token = encode(self.local.token), info[b"token"]
        if info[b"owner"] == owner and token:
            seconds = max(info[b"ttl-ms"], 1) / 1000
            with contextlib.suppress(NotAcquired):
                return await self._take(owner, 0.0, seconds, token)
        raise self._not_owned("extend")

    async def _finds(self, answer: Any) -> bool:
        return bool(await do(answer))

    def locked(self) -> Any:
        return self._run(self._finds(self.redis.exists(self.name)))

    def owned(self) -> Any:
        return self._run(self._finds(self.redis.hexists(self.name, self.local.token or b"")))

    def do_release(self, expected_token: Any) -> Any:
        return self._run(self._release(encode(expected_token)))

    def do_extend(self, additional_time: float, replace_ttl: bool) -> Any:
        return self._run(self._extend(additional_time, replace_ttl))

    def do_reacquire(self) -> Any:
        return self._run(self._extend(self.timeout or 0, True))

    def _not_owned(self, what: str) -> LockNotOwnedError:
        return LockNotOwnedError(f"Cannot {what} a lock that's no longer owned")


class Lock(_Common, redis.lock.Lock):
    """`redis.lock.Lock`, kept by RLOCK: a waiter stands in a queue, and is handed the lock."""

    _links = ThreadLink
    _run = staticmethod(run)

    def acquire(
        self,
        sleep: float | None = None,
        blocking: bool | None = None,
        blocking_timeout: float | None = None,
        token: str | bytes | None = None,
    ) -> bool:
        """As in redis-py. `sleep` means nothing here, and `token` is the owner's name."""
        return run(self._acquire(blocking, blocking_timeout, token))


class AsyncLock(_Common, redis.asyncio.lock.Lock):
    """The same for `redis.asyncio`."""

    _links = TaskLink
    _run = staticmethod(do)

    async def acquire(
        self,
        blocking: bool | None = None,
        blocking_timeout: float | None = None,
        token: str | bytes | None = None,
    ) -> bool:
        """As in redis-py. `token` is the owner's name."""
        return await self._acquire(blocking, blocking_timeout, token)
