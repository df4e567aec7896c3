"""Locks of RLOCK for redis-py. `Redis.lock` makes them if it is told to:

    with client.lock("stock:42", timeout=60, lock_class=Lock) as lock:
        write(text, token=lock.fencing_token)

    async with async_client.lock("stock:42", timeout=60, lock_class=AsyncLock) as lock:
        await write(text, token=lock.fencing_token)
"""

from __future__ import annotations

import asyncio
import logging
import math
import os
import threading
import uuid
from time import monotonic as now
from types import SimpleNamespace
from typing import Any, Literal

import redis.asyncio.lock
import redis.lock
from redis.exceptions import LockNotOwnedError, RedisError, TimeoutError

MAX_MS = 2**53 - 1  # the longest lease there is
PATIENCE = 5.0  # seconds that the reply to a wait may take when the wait is over


def _milliseconds(seconds: float) -> int:
    return int(max(1, min(seconds * 1000, MAX_MS)))


class Hold:
    """One grant of a lock to us, asked for at the time `sent`."""

    def __init__(
        self, owner: bytes, token: int, sent: float, lease: float, timeout: float | None
    ) -> None:
        self.owner, self.token, self.lease = owner, token, lease
        self.ends = sent + (timeout or math.inf)  # nothing is renewed beyond that
        self.until = sent + self.lease_ms(sent) / 1000  # nobody else is granted it before
        self.over = threading.Event()  # it was released or lost
        self.keeper: Any = None  # who renews it
        self._mutex = threading.Lock()

    def lease_ms(self, sent: float) -> int:
        return _milliseconds(min(self.lease, self.ends - sent))

    def left(self) -> float:
        """For how many seconds it is certainly ours."""
        return min(self.until, self.ends) - now()

    def finish(self) -> bool:
        """Whether this call is the first."""
        with self._mutex:
            first = not self.over.is_set()
            self.over.set()
            return first


class _PerThread(threading.local):
    token = None
    hold = None


class _Common:
    """What both classes do without the server."""

    #: For how many seconds the lock outlives a process that died. In the background it is renewed
    #: every third of that until `timeout` is over; with `math.inf` it is not.
    lease = 10.0

    def __init__(self, *arguments: Any, **options: Any) -> None:
        super().__init__(*arguments, **options)
        self.local = _PerThread() if self.thread_local else SimpleNamespace(token=None, hold=None)

    def register_scripts(self) -> None:
        """There are none: all is done by commands of the server."""

    @property
    def fencing_token(self) -> int | None:
        """The number of the grant, larger than those of all earlier grants; None if not held."""
        return self.local.hold and self.local.hold.token

    @property
    def lost(self) -> bool:
        """Whether the lock was ours and may be another's now. Asks nobody, so look often."""
        hold = self.local.hold
        return hold is not None and (hold.over.is_set() or hold.left() <= 0)

    def on_lost(self) -> None:
        """Called once, in the background, if a lock that is renewed is lost. Yours to override."""
        logging.getLogger(__name__).warning("The lock %s was lost.", self.name)

    def _hold(self, owner: bytes, token: int, sent: float) -> Hold:
        return Hold(owner, token, sent, self.lease, self.timeout)

    def _owner(self, token: str | bytes | None, encoder: Any) -> bytes:
        # Unique each time: after os.fork() a counter would go on alike in both processes.
        return encoder.encode(f"{uuid.uuid4()}:{os.getpid()}" if token is None else token)

    def _wait(self, blocking: bool | None, blocking_timeout: float | None) -> float:
        """For how many seconds to wait in the queue."""
        if not (self.blocking if blocking is None else blocking):
            return 0.0
        wait = self.blocking_timeout if blocking_timeout is None else blocking_timeout
        return math.inf if wait is None else wait

    def _acquire_words(self, owner: bytes, wait: float) -> list[Any]:
        lease_ms = _milliseconds(min(self.lease, self.timeout or math.inf))
        # With ONCE the same command, sent again after a lost reply, does not count twice.
        words = ["RLOCK.ACQUIRE", self.name, owner, lease_ms, "ONCE"]
        if wait > 0:
            words += ["BLOCK", 0 if wait == math.inf else math.ceil(wait * 1000)]
        return words

    def _renew_words(self, hold: Hold, lease_ms: int) -> list[Any]:
        return ["RLOCK.RENEW", self.name, hold.owner, lease_ms, "TOKEN", hold.token]

    def _release_words(self, owner: bytes, hold: Hold | None) -> list[Any]:
        token = ["TOKEN", hold.token] if hold else []
        return ["RLOCK.RELEASE", self.name, owner, *token]

    def _take(self, hold: Hold) -> None:
        """This hold is the present one."""
        if self.local.hold:
            self.local.hold.finish()
        self.local.hold, self.local.token = hold, hold.owner

    def _drop(self) -> Hold | None:
        """There is no hold any more, and nothing is said of its loss from now on."""
        hold, self.local.hold = self.local.hold, None
        if hold:
            hold.finish()
        return hold

    def _lose(self, hold: Hold) -> None:
        if hold.finish():
            self.on_lost()

    def _not_owned(self, what: str) -> LockNotOwnedError:
        return LockNotOwnedError(f"Cannot {what} a lock that's no longer owned", self.name)


class Lock(_Common, redis.lock.Lock):
    """`redis.lock.Lock`, kept by RLOCK: who waits is in a queue, and is handed the lock."""

    def acquire(
        self,
        sleep: float | None = None,
        blocking: bool | None = None,
        blocking_timeout: float | None = None,
        token: str | bytes | None = None,
    ) -> bool:
        """As in redis-py. `sleep` means nothing here, and `token` is the owner's name."""
        deadline = now() + self._wait(blocking, blocking_timeout)
        owner = self._owner(token, self.redis.get_encoder())
        while True:
            sent = now()
            count, fencing_token = self._ask(owner, deadline)
            if count == 0:
                return False
            hold = self._hold(owner, fencing_token, sent)
            if hold.left() < (hold.until - sent) / 2:
                # When was it granted, in a wait that long? A renewal tells until when it is ours.
                hold = self._hold(owner, fencing_token, now())
                try:
                    held = self._renew(hold)
                except BaseException:
                    self._give_up(owner)
                    raise
                if not held:
                    continue
            self._take(hold)
            self._keep(hold)
            return True

    def _ask(self, owner: bytes, deadline: float) -> list[int]:
        """Asks for the lock on a connection of its own, whose timeouts are those of the wait."""
        pool = self.redis.connection_pool
        connection = pool.get_connection()

        def ask() -> list[int]:
            wait = deadline - now()
            connection.send_command(*self._acquire_words(owner, wait))
            if not connection.can_read(None if wait == math.inf else max(wait, 0) + PATIENCE):
                raise TimeoutError(f"No reply to a wait for {self.name}")
            return connection.read_response()

        try:
            return connection.retry.call_with_retry(ask, lambda _: connection.disconnect())
        except BaseException as error:
            connection.disconnect()  # which takes us out of the queue
            if not isinstance(error, RedisError):
                self._give_up(owner)
            raise
        finally:
            pool.release(connection)

    def _give_up(self, owner: bytes) -> None:
        """Ctrl-C, while the lock may have been granted to a reply that is never read."""
        try:
            self.redis.execute_command("RLOCK.CANCEL", self.name, owner)
            self.redis.execute_command(*self._release_words(owner, None))
        except RedisError:
            pass  # its lease ends it

    def _renew(self, hold: Hold) -> bool:
        sent = now()
        lease_ms = hold.lease_ms(sent)
        held = self.redis.execute_command(*self._renew_words(hold, lease_ms)) == 1
        if held:
            hold.until = sent + lease_ms / 1000
        return held

    def _keep(self, hold: Hold) -> None:
        """Has it renewed in the background, if it is to last for longer than a lease."""
        if hold.ends > hold.until and hold.lease < math.inf and not hold.keeper:
            hold.keeper = threading.Thread(target=self._keep_renewed, args=[hold], daemon=True)
            hold.keeper.start()

    def _keep_renewed(self, hold: Hold) -> None:
        pause = hold.lease / 3
        if hold.over.wait(pause):
            return
        # A thread of its own, since a renewal may hang for longer than the lease.
        threading.Thread(target=self._watch, args=[hold], daemon=True).start()
        while not hold.over.is_set():
            try:
                if not self._renew(hold):
                    self._lose(hold)
                pause = hold.lease / 3
            except Exception:  # also what a client raises that is closed from another thread
                pause = hold.lease / 20  # try again until the watch says that it is too late
            hold.over.wait(pause)

    def _watch(self, hold: Hold) -> None:
        while (left := hold.left()) > 0:
            if hold.over.wait(left):
                return
        self._lose(hold)

    def locked(self) -> bool:
        return self.redis.exists(self.name) == 1

    def owned(self) -> bool:
        owner = self.local.token
        return owner is not None and bool(self.redis.hexists(self.name, owner))

    def do_release(self, expected_token: bytes) -> None:
        hold = self._drop()
        if self.redis.execute_command(*self._release_words(expected_token, hold)) is None:
            raise self._not_owned("release")

    def do_extend(self, additional_time: float, replace_ttl: bool) -> Literal[True]:
        hold = self.local.hold
        hold.ends = additional_time + (now() if replace_ttl else hold.ends)
        if hold.over.is_set() or not self._renew(hold):
            hold.finish()
            raise self._not_owned("extend")
        self._keep(hold)
        return True

    def do_reacquire(self) -> Literal[True]:
        return self.do_extend(self.timeout, replace_ttl=True)


class AsyncLock(_Common, redis.asyncio.lock.Lock):
    """The same for `redis.asyncio`."""

    async def acquire(
        self,
        blocking: bool | None = None,
        blocking_timeout: float | None = None,
        token: str | bytes | None = None,
    ) -> bool:
        """As in redis-py. `token` is the owner's name."""
        deadline = now() + self._wait(blocking, blocking_timeout)
        owner = self._owner(token, self.redis.get_encoder())
        while True:
            sent = now()
            count, fencing_token = await self._ask(owner, deadline)
            if count == 0:
                return False
            hold = self._hold(owner, fencing_token, sent)
            if hold.left() < (hold.until - sent) / 2:
                hold = self._hold(owner, fencing_token, now())
                try:
                    held = await self._renew(hold)
                except BaseException:
                    await self._give_up(owner)
                    raise
                if not held:
                    continue
            self._take(hold)
            self._keep(hold)
            return True

    async def _ask(self, owner: bytes, deadline: float) -> list[int]:
        pool = self.redis.connection_pool
        connection = await pool.get_connection()

        async def ask() -> list[int]:
            wait = deadline - now()
            await connection.send_command(*self._acquire_words(owner, wait))
            return await connection.read_response(timeout=max(wait, 0) + PATIENCE)

        try:
            return await connection.retry.call_with_retry(ask, lambda _: connection.disconnect())
        except BaseException as error:
            await connection.disconnect(nowait=True)
            if not isinstance(error, RedisError):
                await self._give_up(owner)
            raise
        finally:
            await pool.release(connection)

    async def _give_up(self, owner: bytes) -> None:
        """The task was cancelled."""
        try:
            await self.redis.execute_command("RLOCK.CANCEL", self.name, owner)
            await self.redis.execute_command(*self._release_words(owner, None))
        except RedisError:
            pass

    async def _renew(self, hold: Hold) -> bool:
        sent = now()
        lease_ms = hold.lease_ms(sent)
        held = await self.redis.execute_command(*self._renew_words(hold, lease_ms)) == 1
        if held:
            hold.until = sent + lease_ms / 1000
        return held

    def _keep(self, hold: Hold) -> None:
        if hold.ends > hold.until and hold.lease < math.inf and not hold.keeper:
            hold.keeper = asyncio.create_task(self._keep_renewed(hold))

    async def _keep_renewed(self, hold: Hold) -> None:
        pause = hold.lease / 3
        while not hold.over.is_set():
            await asyncio.sleep(min(pause, hold.left()))
            try:
                held = await asyncio.wait_for(self._renew(hold), hold.left())
                pause = hold.lease / 3
            except Exception:
                held = hold.left() > 0
                pause = hold.lease / 20
            if not held:
                self._lose(hold)

    async def locked(self) -> bool:
        return await self.redis.exists(self.name) == 1

    async def owned(self) -> bool:
        owner = self.local.token
        return owner is not None and bool(await self.redis.hexists(self.name, owner))

    async def do_release(self, expected_token: bytes) -> None:
        hold = self._drop()
        if hold and hold.keeper:
            hold.keeper.cancel()
        if await self.redis.execute_command(*self._release_words(expected_token, hold)) is None:
            raise self._not_owned("release")

    async def do_extend(self, additional_time: float, replace_ttl: bool) -> Literal[True]:
        hold = self.local.hold
        hold.ends = additional_time + (now() if replace_ttl else hold.ends)
        if hold.over.is_set() or not await self._renew(hold):
            hold.finish()
            raise self._not_owned("extend")
        self._keep(hold)
        return True

    async def do_reacquire(self) -> Literal[True]:
        return await self.do_extend(self.timeout, replace_ttl=True)
