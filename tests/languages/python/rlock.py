"""A complete client of RLOCK: it waits in the server, renews, tells of losses and reconnects.

    async with Client("redis://127.0.0.1:6379") as client:
        async with client.lock("stock:42", timeout=10) as guard:
            await write(text, token=guard.token)  # before each step look at guard.is_lost()

    with SyncClient("redis://127.0.0.1:6379") as client:
        with client.lock("stock:42", timeout=10) as guard:
            write(text, token=guard.token)
"""

import asyncio
import itertools
import math
import threading
import uuid
from collections import deque
from concurrent.futures import Future
from contextlib import asynccontextmanager, contextmanager, suppress
from time import monotonic as now

from redis.asyncio.connection import Connection, parse_url
from redis.exceptions import LockError, RedisError, ResponseError

PAUSE = 0.05  # seconds before another attempt to connect
BATCH = 1000  # commands that are sent before their replies are read
ASKING, REFUSED, WAITING, HELD, OVER = "asking", "refused", "waiting", "held", "over"


class NotAcquired(LockError):
    """The lock was not free within the timeout."""


def safe(seconds):
    """The part of a lease or grace that a client may count on: clocks run at different speeds."""
    return seconds * 0.99 - 0.002


async def reply_on(connection):
    try:
        return await connection.read_response()
    except ResponseError as error:
        return error


class Guard:
    """A hold of a lock, or a call for one. Each has an owner of its own."""

    def __init__(self, client, name, mode, queue):
        self.client, self.name, self.mode, self.queue = client, name, mode, queue
        self.owner = f"{client.session}:{next(client.numbers)}"
        self.terms = (int(client.lease * 1000), *mode, "SESSION", client.session)
        self.granted = client.loop.create_future()
        self.lost, self.reason = client.event(), None  # an event to wait for, and its reason
        self.timer, self.renewing = None, False
        client.guards[self.owner.encode()] = self
        self.ask()

    # From any thread:

    def is_lost(self):
        return self.valid_for() <= 0

    def valid_for(self):
        """For how many seconds the server surely grants the lock to nobody else."""
        lease = self.since + safe(self.client.lease)
        left = min(lease, self.client.confirmed[self.life] + safe(self.client.grace)) - now()
        if left <= 0:  # a validity that has ended never begins again
            self.lose("not confirmed in time")
        return 0 if self.lost.is_set() else left

    # In the client's event loop:

    def lose(self, reason):
        if not self.lost.is_set():
            self.reason = reason
            self.lost.set()

    def send(self, verb, *words):
        self.client.send(self, (f"RLOCK.{verb}", self.name, self.owner, *words))

    def ask(self):
        self.phase, self.kept = ASKING, []
        self.send("ACQUIRE", *self.terms, *self.queue, "ONCE")

    def answer(self, verb, reply):
        """The reply to a command whose last sending was at `sent`, in the life `sent_in`."""
        no_session = str(reply).startswith("NOSESSION")
        if verb == "RLOCK.ACQUIRE" and self.phase == ASKING:
            kept = self.kept
            if no_session:
                self.phase = REFUSED  # until the next reply to EVENTS
            elif isinstance(reply, Exception):
                self.fail(reply)
            elif reply[0] > 0:
                self.hold(reply[1], self.sent, self.sent_in)
            elif reply[0] == 0:
                self.fail(TimeoutError())
            elif self.client.life in (reply[3], self.sent_in):
                self.phase, self.seq, self.life = WAITING, *reply[2:]
            else:
                self.ask()  # it was sent in an earlier life, whose waits have left
            for event in kept:
                self.hear(*event, -math.inf)
        elif verb == "RLOCK.RENEW" and self.phase == HELD:
            self.renewing = False
            if reply == 1 and not self.is_lost():
                self.since, self.life = self.sent, self.sent_in
                self.renew()
            elif reply != 1 and not no_session:
                self.lose("the server knows of no such hold")

    def hear(self, seq, kind, value, token, before):
        """An event, which had surely not happened when the time was `before`."""
        if self.phase == ASKING:  # the reply will tell whether it is about this ACQUIRE
            self.kept.append((seq, kind, value, token))
        elif self.phase == HELD and kind == "lost" and token == self.token:
            self.lose(value.decode())
        elif self.phase == WAITING and self.life == self.client.life and seq > self.seq:
            if kind == "granted":
                self.hold(value, max(self.sent, before), self.life)
            elif kind == "left":  # the queue, when the session connection closed
                self.ask()
            elif kind in ("timeout", "error"):
                self.fail(ResponseError(value.decode()) if kind == "error" else TimeoutError())

    def hold(self, token, since, life):
        self.phase, self.token, self.since, self.life = HELD, token, since, life
        self.watch()
        self.renew()
        if not self.granted.done():  # by a caller that gives up
            self.granted.set_result(True)

    def watch(self):
        """Tells of the end of the validity when it comes."""
        if self.phase == HELD and not self.is_lost():
            self.timer = self.client.loop.call_later(self.valid_for(), self.watch)

    def renew(self):
        is_due = self.life != self.client.life or now() > self.since + self.client.lease / 3
        if is_due and not self.renewing and not self.is_lost():
            self.renewing = True
            self.send("RENEW", *self.terms, "TOKEN", self.token)

    def fail(self, error):
        if not self.granted.done():
            self.granted.set_exception(error)

    def release(self):
        """Gives back what the server may have for this owner, whatever was heard of it."""
        if self.timer:
            self.timer.cancel()
        if self.phase == HELD:
            self.send("RELEASE", *self.mode, "TOKEN", self.token)
        elif self.phase != OVER:
            self.send("CANCEL")
            self.send("RELEASE", *self.mode)
        self.phase = OVER
        self.lose("released")
        self.fail(ConnectionError("the client is closed"))
        self.client.guards.pop(self.owner.encode(), None)


class Client:
    """A session at a server, on two connections."""

    def __init__(self, url, *, lease=30.0, grace=5.0, event=asyncio.Event):
        self.lease, self.grace, self.event = lease, grace, event
        self.session, self.numbers = str(uuid.uuid4()), itertools.count(1)
        self.guards = {}  # by owner
        self.commands = deque()  # without an answer, in order
        self.life = self.seq = 0  # the last event heard
        self.confirmed = {}  # life: when the last EVENTS answered in it was sent
        self.beat, self.work, self.idle = asyncio.Event(), asyncio.Event(), asyncio.Event()
        self.idle.set()
        self.patience = grace / 4  # without a reply for longer, a connection is replaced
        mine = {"protocol": 2, "decode_responses": False, "socket_timeout": self.patience}
        self.options = {**parse_url(url), **mine, "socket_connect_timeout": self.patience}
        self.kind = self.options.pop("connection_class", Connection)

    @asynccontextmanager
    async def lock(self, name, *, timeout=None, mode=None):
        """`timeout` is in seconds, 0: only if the lock is free. `mode` is READ or WRITE."""
        # The client ends the wait, not the server. Without a queue the reply comes at once.
        queue, patience = ((), self.grace) if timeout == 0 else (("QUEUE", 0), timeout)
        terms = (self, name, (mode,) if mode else (), queue)
        guard = Guard(*terms)
        try:
            try:
                async with asyncio.timeout(patience):
                    while await guard.granted and guard.is_lost():  # word of it came too late
                        guard.release()
                        guard = Guard(*terms)
            except TimeoutError:
                raise NotAcquired(f"{name} is busy") from None
            yield guard
        finally:  # also if the task is cancelled
            guard.release()

    async def __aenter__(self):
        self.loop = asyncio.get_running_loop()
        self.begun = self.loop.create_future()
        serve = (self.listen, self.carry)
        self.tasks = [asyncio.create_task(self.keep(each)) for each in serve]
        try:
            await self.begun
        except BaseException:
            await self.__aexit__()
            raise
        return self

    async def __aexit__(self, *error):
        for guard in list(self.guards.values()):
            guard.release()
        try:
            with suppress(TimeoutError):  # what has no answer by then ends with the session
                await asyncio.wait_for(self.idle.wait(), self.grace)
        finally:
            for task in self.tasks:
                task.cancel()
            await asyncio.gather(*self.tasks, return_exceptions=True)

    async def keep(self, serve):
        """Serves on a connection, and on another when it breaks or is silent for too long."""
        while True:
            connection = self.kind(**self.options)
            try:
                await connection.connect()
                await serve(connection, next(self.numbers))
            except (RedisError, OSError) as error:
                if not self.begun.done():
                    self.begun.set_exception(error)
                await asyncio.sleep(PAUSE)
            finally:
                await connection.disconnect(nowait=True)

    async def listen(self, connection, number):
        """The session connection."""
        grace = ("GRACE", int(self.grace * 1000))
        words = ("RLOCK.EVENTS", self.session, "EPOCH", number, *grace, "AFTER")
        pause = 0  # the first call confirms the session at once
        while True:
            connection.socket_timeout = self.patience + pause
            block = ("BLOCK", int(pause * 1000)) if pause else ()
            sent = now()
            await connection.send_command(*words, self.life, self.seq, *block)
            self.hear(sent, *await connection.read_response())
            pause = min(self.grace / 5, self.lease / 6)

    def hear(self, sent, life, events):
        before = self.confirmed.get(life, -math.inf)
        guards = list(self.guards.values())
        for guard in guards:
            if guard.phase == HELD:
                guard.is_lost()  # what follows confirms none that has ended
        self.confirmed[life] = sent
        if life != self.life:
            self.life, self.seq = life, 0
            for guard in guards:
                guard.kept = []
                if guard.phase == WAITING and guard.life != life:
                    guard.ask()
        for seq, kind, _, owner, value, token, *_ in events:
            if seq > self.seq and owner in self.guards:
                self.guards[owner].hear(seq, kind.decode(), value, token, before)
            self.seq = max(seq, self.seq)
        for guard in guards:
            if guard.phase == REFUSED:
                guard.ask()
            elif guard.phase == HELD:
                guard.renew()
        self.beat.set()
        self.work.set()  # in another life the command connection is replaced
        if not self.begun.done():
            self.begun.set_result(None)

    def send(self, guard, words):
        self.commands.append((guard, words))
        self.idle.clear()
        self.work.set()

    async def carry(self, connection, number):
        """The command connection. What has no answer from the one before is sent again."""
        self.beat.clear()
        await connection.send_command("RLOCK.BIND", self.session, "EPOCH", number)
        bound = await reply_on(connection)
        life = None if isinstance(bound, ResponseError) else bound[0]
        if life != self.life:
            await self.beat.wait()  # after the next reply to EVENTS there may be a session
        while life == self.life:
            batch = list(itertools.islice(self.commands, BATCH))
            for guard, _ in batch:
                guard.sent, guard.sent_in = now(), life
            packed = connection.pack_commands([words for _, words in batch])
            await connection.send_packed_command(packed)
            for guard, words in batch:
                reply = await reply_on(connection)
                self.commands.popleft()
                guard.answer(words[0], reply)
            if not self.commands:
                self.idle.set()
                self.work.clear()
                await self.work.wait()


async def stay(context, entered, left):
    """Is inside of the context from `entered`, which gets its value or an error, until `left`."""
    try:
        async with context as value:
            entered.set_result(value)
            await left.wait()
    except BaseException as error:
        if not entered.done():
            entered.set_exception(error)


class SyncClient:
    """The same for threads. The client runs in the event loop of a thread of its own."""

    def __init__(self, url, **options):
        self.left, entered = asyncio.Event(), Future()
        inside = stay(Client(url, event=threading.Event, **options), entered, self.left)
        self.thread = threading.Thread(target=asyncio.run, args=(inside,), daemon=True)
        self.thread.start()
        self.client = entered.result()

    @contextmanager
    def lock(self, name, **options):
        entered = Future()
        inside = stay(self.client.lock(name, **options), entered, asyncio.Event())
        task = asyncio.run_coroutine_threadsafe(inside, self.client.loop)
        try:
            yield entered.result()
        finally:  # also if the wait is interrupted, as by KeyboardInterrupt
            task.cancel()

    def close(self):
        self.client.loop.call_soon_threadsafe(self.left.set)
        self.thread.join()

    def __enter__(self):
        return self

    def __exit__(self, *error):
        self.close()
