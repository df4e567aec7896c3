"""The client for threads. Whatever a process holds and waits for, it has two connections."""

from __future__ import annotations

import atexit
import contextlib
import itertools
import logging
import os
import queue
import socket
import threading
import weakref
from typing import Any, Callable, Dict, List, Optional, Sequence

import redis
from redis.exceptions import ConnectionError, RedisError, ResponseError

from ._calls import PAUSE, BaseCall, BaseGuard, Link, Name, Verbs, acquire, call
from ._calls import connection_options, is_busy, run
from ._core import Hold, Kind, NotAcquired, Session


_links: weakref.WeakSet[ThreadLink] = weakref.WeakSet()


@atexit.register
def _close_all() -> None:
    for link in list(_links):
        link.close()


class ThreadLink(Link):
    """A thread for each connection, one for time, and one for functions of the application."""

    def __init__(self, pool: Any, grace: float) -> None:
        # Without a reply for a quarter of the grace, a connection is replaced.
        self.kind, self.options = pool.connection_class, connection_options(pool, grace / 4)
        self.mutex = threading.RLock()
        self.changed, self.time = threading.Condition(self.mutex), threading.Condition(self.mutex)
        self.calls: queue.SimpleQueue[Callable[[], Any]] = queue.SimpleQueue()
        self.session = Session(
            grace, threading.Event, self.changed.notify_all, self.time.notify_all, self._call
        )
        self.numbers, self.beats = itertools.count(1), 0
        self.failure: Optional[Exception] = None
        self.stopped, self.threads = False, []  # type: bool, List[threading.Thread]
        self.connections: Dict[Any, Any] = {}
        self.caller: Optional[threading.Thread] = None
        _links.add(self)

    def close_with(self, thing: Any) -> None:
        """Closes when nobody has the thing any more."""
        close = weakref.finalize(thing, self._start, self.close)
        close.atexit = False  # a finalizer must not wait; at the end of the process we do

    def _start(self, function: Callable[..., None], *words: Any) -> threading.Thread:
        thread = threading.Thread(target=function, args=words, daemon=True, name="rlock")
        thread.start()
        return thread

    async def ready(self) -> None:
        self.session.check()
        with self.changed:
            if not self.threads:
                self.threads = [self._start(self._keep, serve) for serve in (self._listen, self._carry)]
                self.threads.append(self._start(self._tick))
            if not self.session.life:
                self.failure = None
            while not self.session.life:
                if self.failure:
                    raise self.failure
                self.changed.wait()

    async def wait(self, event: threading.Event, seconds: Optional[float]) -> bool:
        return event.wait(seconds)

    def _call(self, function: Callable[[], Any]) -> None:
        self.calls.put(function)
        if not self.caller:
            self.caller = self._start(self._run_calls)

    def _run_calls(self) -> None:
        while True:
            try:
                self.calls.get()()
            except Exception:
                logging.getLogger(__name__).exception("A callback of a lock failed.")

    def _tick(self) -> None:
        with self.time:
            while not self.stopped:
                self.time.wait(self.session.tick())

    def _keep(self, serve: Callable[[Any, int], None]) -> None:
        """Serves on a connection, and on another when it breaks or is silent for too long."""
        pause = PAUSE[0]
        while not self.stopped:
            connection, beats = self.kind(**self.options), self.beats
            self.connections[serve] = connection
            try:
                connection.connect()
                serve(connection, next(self.numbers))
            except (RedisError, OSError) as error:
                with self.changed:
                    self.failure = error
                    self.changed.notify_all()
                    pause = PAUSE[0] if self.beats != beats else min(2 * pause, PAUSE[1])
                    self.time.wait_for(lambda: self.stopped, pause)
            finally:
                connection.disconnect()

    def _listen(self, connection: Any, number: int) -> None:
        """The session connection."""
        grace, pause = self.session.grace, 1  # millisecond: it confirms the session at once
        while not self.stopped:
            with self.mutex:
                words, sent = self.session.events_words(number, pause), self.session.clock()
            connection.send_command(*words)
            reply = connection.read_response()
            with self.changed:
                self.session.hear(sent, *reply)
                self.beats += 1
                self.changed.notify_all()
            # Less than the connection's timeout.
            pause = int(grace * 200)

    def _carry(self, connection: Any, number: int) -> None:
        """The command connection. What has no answer from the one before is sent again."""
        beats = self.beats
        bound = self._ask(connection, *self.session.bind_words(number))
        life = None if isinstance(bound, Exception) else bound[0]
        with self.changed:
            self.session.rebound()
            if life != self.session.life:  # after the next reply to EVENTS there may be a session
                self.changed.wait_for(lambda: self.beats != beats or self.stopped)
        while True:
            with self.changed:
                while life == self.session.life and not self.session.commands and not self.stopped:
                    self.changed.wait()
                if life != self.session.life or self.stopped:
                    return
                batch = self.session.batch()
            packed = connection.pack_commands([command.words for command in batch])
            connection.send_packed_command(packed)
            for command in batch:
                reply = self._reply(connection)
                if is_busy(reply):
                    raise ConnectionError(str(reply))
                with self.changed:
                    self.session.answered(command, reply)
                    self.changed.notify_all()

    def _ask(self, connection: Any, *words: Any) -> Any:
        connection.send_command(*words)
        return self._reply(connection)

    def _reply(self, connection: Any) -> Any:
        try:
            return connection.read_response()
        except ResponseError as error:
            return error

    def close(self) -> None:
        """Gives back all that is held, and waits up to the grace until the server knows."""
        if os.getpid() != self.session.pid:
            return  # the sockets are those of the process that forked
        with self.changed:
            if self.session.closed:
                return
            self.session.close()
            if self.session.life:
                self.changed.wait_for(lambda: not self.session.commands, self.session.grace)
            self.stopped = True
            self.changed.notify_all()
            self.time.notify_all()
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
        return Guard(self._link, run(acquire(self._link, self._make, self._wait())))

    def try_acquire(self) -> Optional[Guard]:
        """Does not wait for the lock: None if it is not free."""
        try:
            return Guard(self._link, run(acquire(self._link, self._make, 0.0)))
        except NotAcquired:
            return None

    def __enter__(self) -> Guard:
        if self._guard:
            raise RuntimeError("this call is entered already: make another one")
        self._guard = self.acquire()
        return self._guard

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
        self._link.close()

    def _call(self, names: Sequence[Name], kind: Kind, options: Dict[str, Any]) -> Call:
        return Call(self._link, names, kind, **{"lease": self._lease, **options})

    def __enter__(self) -> Client:
        run(self._link.ready())
        return self

    def __exit__(self, *error: Any) -> None:
        self.close()


def pool_of(client: Any) -> Any:
    from ._core import NotInCluster

    if not hasattr(client, "connection_pool"):
        raise NotInCluster(
            "rlock_redis works at one primary (also one found by Sentinel), not with RedisCluster: "
            "it does not find the node that serves a lock"
        )
    return client.connection_pool


__all__ = ["Call", "Client", "Guard", "Hold"]
