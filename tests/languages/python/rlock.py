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
import threading
import uuid
from collections import deque
from concurrent.futures import Future
from contextlib import asynccontextmanager, contextmanager, suppress
from time import monotonic as now

from redis.asyncio.connection import Connection, parse_url
from redis.exceptions import LockError, RedisError, ResponseError

# Seconds before another attempt to connect; commands that are sent before their replies are read;
# the part of a lease or grace that a client may count on, since clocks run at different speeds.
PAUSE, BATCH, SAFE = 0.05, 1000, 0.98
# The events, and the bytes of their keys and owners, with which the server ends a reply to EVENTS.
FULL = 1000, 256 * 1024
ASKING, REFUSED, WAITING, HELD, OVER = "asking", "refused", "waiting", "held", "over"


class NotAcquired(LockError):
    """The lock was not free within the timeout."""


def settle(future, error=None):
    """Unless its caller has given up."""
    if error and not future.done():
        future.set_exception(error)
    elif not future.done():
        future.set_result(True)


async def reply_on(connection):
    try:
        return await connection.read_response()
    except ResponseError as error:
        return error


class Guard:
    """A hold of a lock, or a call for one. Each has an owner of its own."""

    def __init__(self, client, name, mode):
        self.client, self.name, self.mode = client, name, (mode,) if mode else ()
        self.owner = f"{client.session}:{next(client.numbers)}"
        self.terms = (int(client.lease * 1000), *self.mode, "SESSION", client.session)
        self.granted = client.loop.create_future()
        # `lost` is an event to wait for; then `reason` says why.
        self.lost, self.reason, self.renewing = client.event(), None, False
        client.guards[self.owner.encode()] = self
        self.ask()

    # From any thread:

    def is_lost(self):
        return self.valid_for() <= 0

    def valid_for(self):
        """For how many seconds the server surely grants the lock to nobody else."""
        lease = self.since + self.client.lease * SAFE
        left = min(lease, self.client.confirmed[self.life] + self.client.grace * SAFE) - now()
        if left <= 0:  # a validity that has ended never begins again
            self.lose("not confirmed in time")
        return 0 if self.lost.is_set() else left

    # In the client's event loop:

    def lose(self, reason):
        self.reason = self.reason or reason
        self.lost.set()

    def send(self, verb, *words):
        self.client.commands.append((self, (f"RLOCK.{verb}", self.name, self.owner, *words)))
        self.client.idle.clear()
        self.client.work.set()

    def ask(self):
        self.phase, self.kept = ASKING, []
        self.send("ACQUIRE", *self.terms, "QUEUE", 0, "ONCE")  # the client ends the wait

    def answer(self, verb, reply):
        """The reply to a command whose last sending was at `sent`, in the life `sent_in`."""
        no_session = str(reply).startswith("NOSESSION")
        if verb == "RLOCK.ACQUIRE" and self.phase == ASKING:
            kept = self.kept
            if no_session:
                self.phase = REFUSED  # until the next reply to EVENTS
            elif isinstance(reply, Exception):
                settle(self.granted, reply)
            elif reply[0] > 0:
                self.hold(reply[1], self.sent, self.sent_in)
            elif self.client.life in (reply[3], self.sent_in):
                self.phase, self.seq, self.life = WAITING, *reply[2:]
            else:
                self.ask()  # it was sent in an earlier life, whose waits have left
            for event in kept:
                self.hear(*event, 0)
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
                error = ResponseError(value.decode()) if kind == "error" else TimeoutError()
                settle(self.granted, error)

    def hold(self, token, since, life):
        self.phase, self.token, self.since, self.life = HELD, token, since, life
        self.watch()
        self.renew()
        settle(self.granted)

    def watch(self):
        """Tells of the end of the validity when it comes."""
        if self.phase == HELD and not self.is_lost():
            self.client.loop.call_later(self.valid_for(), self.watch)

    def renew(self):
        is_due = self.life != self.client.life or now() > self.since + self.client.lease / 3
        if is_due and not self.renewing and not self.is_lost():
            self.renewing = True
            self.send("RENEW", *self.terms, "TOKEN", self.token)

    def release(self):
        """Gives back what the server may have for this owner, whatever was heard of it."""
        if self.phase == HELD:
            self.send("RELEASE", *self.mode, "TOKEN", self.token)
        elif self.phase != OVER:
            self.send("CANCEL")
            self.send("RELEASE", *self.mode)
        self.phase = OVER
        self.lose("released")
        settle(self.granted, ConnectionError("the client is closed"))
        self.client.guards.pop(self.owner.encode(), None)


class Client:
    """A session at a server, on two connections."""

    def __init__(self, url, *, lease=30.0, grace=5.0, event=asyncio.Event):
        self.lease, self.grace, self.event = lease, grace, event
        self.session, self.numbers = str(uuid.uuid4()), itertools.count(1)
        # The guards by their owners, and the commands without an answer, in order.
        self.guards, self.commands = {}, deque()
        # The last event heard; for each life, when the last EVENTS answered in it was sent, and
        # the last whose reply told all that had happened.
        self.life, self.seq, self.confirmed, self.told = 0, 0, {}, {}
        self.beat, self.work, self.idle = asyncio.Event(), asyncio.Event(), asyncio.Event()
        self.idle.set()
        self.patience = grace / 4  # without a reply for longer, a connection is replaced
        mine = {"protocol": 2, "decode_responses": False, "socket_timeout": self.patience}
        self.options = {**parse_url(url), **mine, "socket_connect_timeout": self.patience}
        self.kind = self.options.pop("connection_class", Connection)

    @asynccontextmanager
    async def lock(self, name, *, timeout=None, mode=None):
        """Waits for the lock for `timeout` seconds, or without limit. `mode` is READ or WRITE."""
        guard = Guard(self, name, mode)
        try:
            try:
                async with asyncio.timeout(timeout):
                    while await guard.granted and guard.is_lost():  # word of it came too late
                        guard.release()
                        guard = Guard(self, name, mode)
            except TimeoutError:
                raise NotAcquired(f"{name} is busy") from None
            yield guard
        finally:  # also if the task is cancelled
            guard.release()

    async def __aenter__(self):
        self.loop = asyncio.get_running_loop()
        self.begun = self.loop.create_future()
        self.tasks = [self.loop.create_task(self.keep(run)) for run in (self.listen, self.carry)]
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
            pending = self.tasks
            while pending:  # wait_for, in redis-py, may swallow a cancellation before Python 3.12
                for task in pending:
                    task.cancel()
                _, pending = await asyncio.wait(pending, timeout=PAUSE)

    async def keep(self, serve):
        """Serves on a connection, and on another when it breaks or is silent for too long."""
        while True:
            connection = self.kind(**self.options)
            try:
                await connection.connect()
                await serve(connection, next(self.numbers))
            except (RedisError, OSError) as error:
                settle(self.begun, error)
                await asyncio.sleep(PAUSE)
            finally:
                await connection.disconnect(nowait=True)

    async def listen(self, connection, number):
        """The session connection."""
        words = ("RLOCK.EVENTS", self.session, "EPOCH", number, "GRACE", int(self.grace * 1000))
        pause = 1  # millisecond: the first call confirms the session at once
        while True:
            connection.socket_timeout = self.patience + pause / 1000
            sent = now()
            await connection.send_command(*words, "BLOCK", pause, "AFTER", self.life, self.seq)
            self.hear(sent, *await connection.read_response())
            pause = int(min(self.grace / 5, self.lease / 6) * 1000)

    def hear(self, sent, life, events):
        before = self.told.get(life, 0)
        guards = list(self.guards.values())
        for guard in guards:
            if guard.phase == HELD:
                guard.is_lost()  # what follows confirms none that has ended
        self.confirmed[life] = sent
        if len(events) < FULL[0] and sum(len(of[2]) + len(of[3]) for of in events) < FULL[1]:
            self.told[life] = sent  # nothing that had happened by then is still to be told
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
        settle(self.begun)

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
            await connection.send_packed_command(connection.pack_commands(w for _, w in batch))
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
        settle(entered, error)


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

    def __enter__(self):
        return self

    def __exit__(self, *error):
        self.client.loop.call_soon_threadsafe(self.left.set)
        self.thread.join()
