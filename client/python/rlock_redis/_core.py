"""What a session decides, without sockets, threads or tasks: `sync.py` and `aio.py` drive it.

It works by five rules. (1) The server has one hold for each owner, name and mode; who enters again
is counted here. (2) Each command names its owner, token or session, and may be sent twice. (3) One
ACQUIRE of an owner is in flight at a time. (4) A new connection sends all commands that have no
answer again, in order, after BIND. (5) In another life of the session each hold is renewed by its
token and each wait is asked for again; in the same life only the waits that `left` are.
"""

from __future__ import annotations

import heapq
import itertools
import math
import os
import time
import uuid
from collections import deque
from typing import Any, Callable, NamedTuple, Sequence

from redis.exceptions import ConnectionError, LockError, ResponseError, TimeoutError

MAX_MS = 2**53 - 1  # the longest lease that the server takes
MAX_COMMANDS = 100_000  # that wait for a connection
BATCH = 1000  # commands that are sent before their replies are read
SAFE = 0.98  # the part of a lease or grace to count on: clocks run at different speeds
# The events, and the bytes of their keys and owners, with which the server ends a reply to EVENTS.
FULL = 1000, 256 * 1024
ASKING, REFUSED, WAITING, CONFIRMING, HELD, FAILED, OVER = range(7)


class NotAcquired(LockError):
    """The lock was not free in time."""


class Unanswered(TimeoutError):
    """The server gave no answer in time. Nothing is left behind: an answer that comes is undone."""


class UnknownOutcome(ConnectionError):
    """The connection broke before the reply: the command was carried out, or it was not."""


class NotInCluster(LockError):
    """This package does not find the node of a cluster that serves a lock."""


def encode(text: Any) -> bytes:
    return text if isinstance(text, bytes) else str(text).encode()


def milliseconds(seconds: float) -> int:
    return int(max(1, min(seconds * 1000, MAX_MS)))


class Kind(NamedTuple):
    """The mode of a hold, as events name it, and the words for it in commands."""

    mode: bytes
    ask: tuple[Any, ...] = ()
    name: tuple[Any, ...] = ()
    release: tuple[Any, ...] = ()


PLAIN = Kind(b"plain")
READ = Kind(b"read", ("READ",), ("READ",), ("READ",))
WRITE = Kind(b"write", ("WRITE",), ("WRITE",), ("WRITE",))


def permits(n: int, limit: int | None) -> Kind:
    of = () if limit is None else ("OF", limit)
    return Kind(b"permits", ("PERMITS", n, *of), ("PERMITS",), ("PERMITS", n))


class Command:
    """A command, until and after its reply. An error is a reply too."""

    def __init__(self, words: Sequence[Any], done: Any, repeatable: bool) -> None:
        self.words, self.done, self.repeatable = words, done, repeatable
        self.then: Callable[[Command], None] | None = None
        self.reply: Any = None
        # The last sending, the life of the session then, and the number of sendings.
        self.sent, self.life, self.times = 0.0, 0, 0


class Hold:
    """A hold of one lock or of several, or a call for one. It belongs to one owner."""

    def __init__(
        self,
        session: Session,
        names: Sequence[bytes],
        owner: bytes,
        kind: Kind,
        lease: float,
        max_hold: float = math.inf,
        wants: bool = False,
    ) -> None:
        self.session, self.names, self.owner, self.kind = session, tuple(names), owner, kind
        self.lease, self.max_hold, self.wants = lease, max_hold, wants
        self.deadline, self.may_wait = math.inf, True
        self.users = 1
        self.phase, self.token, self.seq, self.life = ASKING, 0, 0, 0
        self.since, self.ends, self.attempt, self.renewing = 0.0, math.inf, 0.0, 0
        self.kept: list[tuple[int, bytes, Any, int]] = []
        self.error: Exception | None = None
        self.reason: str | None = None
        self.gone = False  # the server has said that it has no such hold
        self.restored = False  # known by its owner's name alone: it is not asked for again
        self.forgotten = False  # nobody can give it back any more: it ends with its time
        self.next_look = math.inf
        # Events to wait for: the call has its answer; the hold is lost; somebody waits for it.
        self.settled, self.lost, self.wanted = session.event(), session.event(), session.event()
        self.on_lost: Callable[[], Any] | None = None
        self.on_wanted: Callable[[], Any] | None = None

    # How long it is ours.

    def _end(self) -> float:
        confirmed = self.session.confirmed.get(self.life, -math.inf)
        lease = min(self.since + self.lease * SAFE, confirmed + self.session.grace * SAFE)
        return min(lease, self.ends)

    def valid_for(self) -> float:
        """For how many seconds the server surely grants the lock to nobody else."""
        if self.phase != HELD or self.lost.is_set() or os.getpid() != self.session.pid:
            return 0.0
        left = self._end() - self.session.clock()
        if left <= 0:  # a validity that has ended never begins again
            over = self.ends <= self.session.clock()
            self.lose("held for as long as it may be" if over else "not confirmed in time")
            return 0.0
        return left

    def lose(self, reason: str) -> None:
        if self.lost.is_set():
            return
        self.reason = reason
        self.lost.set()
        if self.forgotten:
            self.session.discard(self)
        elif self.on_lost and self.phase == HELD:
            self.session.call(self.on_lost)

    def _renew_at(self) -> float:
        again = self.attempt + min(self.lease / 20, self.session.grace / 5)
        if self.renewing:
            return math.inf
        if self.life != self.session.life:  # at once, and then as after an error
            return again if self.attempt >= self.session.began else 0.0
        # Its lease on the server may cover all the time that it has.
        is_enough = self.since + self.lease >= self.ends
        return math.inf if is_enough else max(self.since + self.lease / 3, again)

    def look(self) -> None:
        """Renews it if that is due, and has the session look again in time."""
        if self.phase == HELD and self.valid_for() > 0:
            now = self.session.clock()
            if self._renew_at() <= now:
                self.renew()
            self.session.look_at(self, max(min(self._end(), self._renew_at()), now + 0.005))

    # What is sent.

    def _send(self, verb: str, *words: Any) -> Command:
        return self.session.send((f"RLOCK.{verb}", *words))

    def ask(self) -> None:
        self.phase, self.kept = ASKING, []
        words: list[Any] = [milliseconds(min(self.lease, self.max_hold))]
        options: list[Any] = ["SESSION", self.session.id, "ONCE"]
        if self.wants:
            options.append("WANTED")
        left = self.deadline - self.session.clock()
        if self.may_wait:
            options += ["QUEUE", 0 if left == math.inf else milliseconds(left)]
        if len(self.names) == 1:
            words = ["ACQUIRE", self.names[0], self.owner, *words, *self.kind.ask]
        else:
            words = ["MACQUIRE", self.owner, *words, len(self.names), *self.names]
        self._send(*words, *options).then = self._asked

    def renew(self) -> Command:
        """Renews each name by the token; the last of the commands."""
        answers: list[Command] = []
        self.attempt = self.session.clock()
        self.renewing += 1

        def answered(command: Command) -> None:
            answers.append(command)
            if len(answers) == len(self.names):
                self._renewed(answers)

        lease = milliseconds(min(self.lease, self.ends - self.attempt))
        # In another life the server has forgotten that it was to tell who waits.
        wanted = ["WANTED"] if self.wants and not self.wanted.is_set() else []
        for name in self.names:
            options = ["TOKEN", self.token, "SESSION", self.session.id, *wanted]
            command = self._send("RENEW", name, self.owner, lease, *self.kind.name, *options)
            command.then = answered
        return command

    def give_back(self) -> Command | None:
        """What the server may have of it ends, whatever was heard of it."""
        command = None
        if self.phase in (ASKING, REFUSED, WAITING):
            self._send("CANCEL", self.names[0], self.owner)
            for name in self.names:
                command = self._send("RELEASE", name, self.owner, *self.kind.release)
        elif self.phase in (CONFIRMING, HELD) and not self.gone:
            for name in self.names:
                words = (name, self.owner, *self.kind.release, "TOKEN", self.token)
                command = self._send("RELEASE", *words)
        return command

    def restore(self, token: int) -> None:
        """Another process took it, and gave its owner's name: with this token it is ours now."""
        self.token, self.restored, self.phase = token, True, CONFIRMING
        self.session.add(self)
        self.renew()

    # What is heard.

    def _asked(self, command: Command) -> None:
        reply, session = command.reply, self.session
        if self.phase != ASKING:
            return
        kept, self.kept = self.kept, []
        if str(reply).startswith("NOSESSION"):
            self.phase = REFUSED  # until the next reply to EVENTS
        elif isinstance(reply, Exception):
            self._fail(reply)
        elif reply[0] > 0:
            self._granted(reply[1], command.sent, command.life)
        elif reply[0] == 0:
            self._fail(NotAcquired(f"{self.names[0].decode(errors='replace')} is busy"))
        elif session.life in (reply[3], command.life):
            self.phase, self.seq, self.life = WAITING, reply[2], reply[3]
            self.since = command.sent
        else:
            self.ask()  # it was sent in an earlier life, whose waits have left
        for event in kept:
            self.hear(*event, 0.0)

    def hear(self, seq: int, kind: bytes, value: Any, token: int, before: float) -> None:
        """An event, which had surely not happened when the time was `before`."""
        if self.phase == ASKING:  # the reply tells whether it is about this ACQUIRE
            self.kept.append((seq, kind, value, token))
        elif self.phase in (HELD, CONFIRMING) and token == self.token:
            if kind == b"lost" and self.phase == CONFIRMING:
                self._ask_again()
            elif kind == b"lost":
                self.gone = True
                self.lose(value.decode())
            elif kind == b"wanted" and not self.wanted.is_set():
                self.wanted.set()
                if self.on_wanted:
                    self.session.call(self.on_wanted)
        elif self.phase == WAITING and self.life == self.session.life and seq > self.seq:
            if kind == b"granted":
                self._granted(value, max(self.since, before), self.life)
            elif kind == b"left":  # the queue, when the session connection closed
                self.ask()
            elif kind == b"timeout":
                self._fail(NotAcquired(f"{self.names[0].decode(errors='replace')} is busy"))
            elif kind == b"error":
                self._fail(ResponseError(value.decode(errors="replace")))

    def _fail(self, error: Exception) -> None:
        if str(error).startswith("MOVED") or type(error).__name__ == "MovedError":
            error = NotInCluster(f"another node of the cluster serves this lock: {error}")
        self.phase, self.error = FAILED, error
        self.settled.set()

    def _granted(self, token: int, since: float, life: int) -> None:
        self.token, self.since, self.life = token, since, life
        self.ends = since + self.max_hold
        if self.session.clock() - since > min(self.lease / 2, self.max_hold / 20):
            # When was it granted, in a wait that long? A renewal tells until when it is ours.
            self.phase, self.ends = CONFIRMING, math.inf
            self.renew()
        else:
            self._hold()

    def _hold(self) -> None:
        self.phase = HELD
        self.settled.set()
        self.look()

    def _renewed(self, answers: list[Command]) -> None:
        self.renewing -= 1
        sent, lives = min(each.sent for each in answers), {each.life for each in answers}
        replies = [each.reply for each in answers]
        if self.phase not in (CONFIRMING, HELD):
            return
        if all(reply == 1 for reply in replies) and len(lives) == 1:
            if self.phase == CONFIRMING:
                self.since, self.life, self.ends = sent, lives.pop(), sent + self.max_hold
                self._hold()
            elif self.valid_for() > 0:
                self.since, self.life = sent, lives.pop()
        elif 0 in replies and self.phase == CONFIRMING:
            self._ask_again()
        elif 0 in replies:
            self.gone = True
            self.lose("the server knows of no such hold")
        self.look()  # after an error it is renewed again, when that is due

    def _ask_again(self) -> None:
        """It was granted and is over, before anybody was told."""
        if self.restored:
            self.gone = True
            self._fail(NotAcquired("this owner does not hold the lock"))
        else:
            self.give_back()
            self.ask()


class Session:
    """What one process holds and waits for at one server."""

    def __init__(
        self,
        grace: float,
        event: Callable[[], Any],
        wake: Callable[[], None],
        alarm: Callable[[], None],
        call: Callable[[Callable[[], Any]], None],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        # `event` makes an event to wait for, `wake` says that there is something to send, `alarm`
        # that the next time to look is earlier, `call` runs a function of the application.
        self.grace, self.event, self.wake, self.alarm = grace, event, wake, alarm
        self.call, self.clock = call, clock
        self.id, self.pid, self.numbers = str(uuid.uuid4()), os.getpid(), itertools.count(1)
        self.closed = False
        self.table: dict[tuple[bytes, bytes, bytes], Hold] = {}
        self.holds: set[Hold] = set()
        self.commands: deque[Command] = deque()  # without an answer, in order
        self.forgotten: deque[Callable[[], Any]] = deque()  # of objects that are no more
        self.times: list[tuple[float, int, Hold]] = []  # a heap: when to look at a hold
        # The last event heard; for each life, when the last EVENTS answered in it was sent, and
        # the last whose reply told all that had happened.
        self.life, self.seq, self.began = 0, 0, 0.0
        self.confirmed: dict[int, float] = {}
        self.told: dict[int, float] = {}

    # For callers.

    def check(self) -> None:
        if os.getpid() != self.pid:
            raise LockError("a process that forked has to make a client of its own")
        if self.closed:
            raise LockError("the client is closed")

    def new_owner(self) -> bytes:
        return f"{self.id}:{next(self.numbers)}".encode()

    def join(self, name: bytes, owner: bytes, kind: Kind) -> Hold | None:
        """The hold that this owner has or waits for already: it is entered once more."""
        hold = self.table.get((name, owner, kind.mode))
        if hold is None or hold.phase == FAILED:
            return None
        if hold.phase == HELD and hold.valid_for() <= 0:
            # What the server may still have of it ends before this owner asks again.
            hold.give_back()
            hold.gone = True
            return None
        hold.users += 1
        return hold

    def enter(self, hold: Hold) -> None:
        self.check()
        if len(self.commands) >= MAX_COMMANDS:
            raise Unanswered("too many commands wait for a connection")
        self.add(hold)
        hold.ask()

    def add(self, hold: Hold) -> None:
        self.holds.add(hold)
        for name in hold.names:
            self.table[name, hold.owner, hold.kind.mode] = hold

    def leave(self, hold: Hold) -> Command | None:
        """One user less; the last one gives the hold back. The command that tells the server."""
        hold.users -= 1
        if hold.users or hold.phase == OVER:
            return None
        command = hold.give_back()
        hold.phase = OVER
        hold.lose("released")
        hold.settled.set()
        self.discard(hold)
        return command

    def forget(self, hold: Hold) -> None:
        """Nobody can give it back any more: it ends with its time or, without one, its lease."""
        hold.forgotten = True
        if hold.ends == math.inf:
            hold.ends = hold.since + hold.lease
        if hold.phase != HELD or hold.lost.is_set():
            self.discard(hold)

    def discard(self, hold: Hold) -> None:
        self.holds.discard(hold)
        for name in hold.names:
            if self.table.get((name, hold.owner, hold.kind.mode)) is hold:
                del self.table[name, hold.owner, hold.kind.mode]

    def send(self, words: Sequence[Any], repeatable: bool = True) -> Command:
        command = Command(words, self.event(), repeatable)
        self.commands.append(command)
        self.wake()
        return command

    def outcome(self, hold: Hold, deadline: float) -> bool:
        """Whether it is held; False: to be asked for again. An error otherwise."""
        if hold.valid_for() > 0:
            return True
        has_time = self.clock() < deadline
        if hold.phase == HELD and has_time:  # word of the grant came too late
            return False
        if hold.phase == FAILED and hold.error:
            if has_time and hold.users > 1 and isinstance(hold.error, NotAcquired):
                return False  # that was the time of another caller of this owner
            raise hold.error
        if hold.phase == OVER:
            raise LockError("the client is closed")
        if hold.phase in (HELD, WAITING):
            raise NotAcquired(f"{hold.names[0].decode(errors='replace')} is busy")
        raise Unanswered("no answer from the server in time")

    def withdraw(self, command: Command) -> bool:
        """Whether the command was never sent; it will not be."""
        if command.times == 0 and command in self.commands:
            self.commands.remove(command)
            return True
        return False

    def close(self) -> None:
        for hold in list(self.holds):
            hold.users = 1
            self.leave(hold)
        self.closed = True

    # For time.

    def look_at(self, hold: Hold, at: float) -> None:
        if at < hold.next_look:
            hold.next_look = at
            heapq.heappush(self.times, (at, next(self.numbers), hold))
            if self.times[0][2] is hold:
                self.alarm()

    def tick(self) -> float | None:
        """Renews and ends what is due. The seconds until the next time, if there is one."""
        while self.forgotten:
            self.forgotten.popleft()()
        now = self.clock()
        while self.times and self.times[0][0] <= now:
            at, _, hold = heapq.heappop(self.times)
            if at == hold.next_look:
                hold.next_look = math.inf
                hold.look()
        return max(0.0, self.times[0][0] - self.clock()) if self.times else None

    # For the session connection.

    def events_words(self, epoch: int, pause: int) -> tuple[Any, ...]:
        words = ("RLOCK.EVENTS", self.id, "EPOCH", epoch, "GRACE", milliseconds(self.grace))
        return (*words, "BLOCK", pause, "AFTER", self.life, self.seq)

    def hear(self, sent: float, life: int, events: list[Any]) -> None:
        """The reply to an EVENTS that was sent at `sent`."""
        before = self.told.get(life, 0.0)
        if self.clock() >= self.confirmed.get(life, math.inf) + self.grace * SAFE:
            for hold in list(self.holds):
                hold.valid_for()  # what follows confirms none that has ended
        self.confirmed[life] = sent
        if len(events) < FULL[0] and sum(len(of[2]) + len(of[3]) for of in events) < FULL[1]:
            self.told[life] = sent  # nothing that had happened by then is still to be told
        if life != self.life:
            self.life, self.seq, self.began = life, 0, self.clock()
            for hold in list(self.holds):
                hold.kept = []
                if hold.phase == WAITING and hold.life != life:
                    hold.ask()
                hold.look()
        for seq, kind, name, owner, value, token, mode, *_ in events:
            if seq > self.seq:
                self.seq = seq
                hold_of_it = self.table.get((name, owner, mode))
                if hold_of_it:
                    hold_of_it.hear(seq, kind, value, token, before)
        for hold in list(self.holds):
            if hold.phase == REFUSED:
                hold.ask()
            elif hold.phase == CONFIRMING and not hold.renewing:
                hold.renew()
        self.wake()  # in another life the command connection is replaced

    # For the command connection.

    def bind_words(self, epoch: int) -> tuple[Any, ...]:
        return ("RLOCK.BIND", self.id, "EPOCH", epoch)

    def rebound(self) -> None:
        """A new connection: what may be sent once only, and was, is not sent again."""
        unknown = [each for each in self.commands if each.times and not each.repeatable]
        for command in unknown:
            self.commands.remove(command)
            self._answer(command, UnknownOutcome("the connection broke before the reply"))

    def batch(self) -> list[Command]:
        """The commands to send now. Their replies come in this order."""
        batch = list(itertools.islice(self.commands, BATCH))
        for command in batch:
            command.sent, command.life = self.clock(), self.life
            command.times += 1
        return batch

    def answered(self, command: Command, reply: Any) -> None:
        self.commands.popleft()
        self._answer(command, reply)

    def _answer(self, command: Command, reply: Any) -> None:
        command.reply = reply
        if command.then:
            command.then(command)
        command.done.set()
