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
from dataclasses import dataclass
from typing import Any, Callable, NamedTuple, Sequence

from redis.exceptions import AskError, ConnectionError, LockError, ResponseError, TimeoutError

MAX_MS = 2**53 - 1  # the longest lease that the server takes
MAX_COMMANDS = 100_000  # that wait for a connection
BATCH = 1000  # commands that are sent before their replies are read
SAFE = 0.98  # the part of a lease or grace to count on: clocks run at different speeds
# The events, and the bytes of their keys and owners, with which the server ends a reply to EVENTS.
FULL = 1000, 256 * 1024
ASKING, WAITING, HELD, FAILED, OVER = range(5)


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


class Command:
    """A command, until and after its reply. An error is a reply too."""

    def __init__(self, words: Sequence[Any], done: Any, then: Any, repeatable: bool) -> None:
        self.words, self.done, self.then, self.repeatable = words, done, then, repeatable
        self.reply: Any = None
        # The last sending, the life of the session then, and the number of sendings.
        self.sent, self.life, self.times = 0.0, 0, 0


@dataclass(eq=False)
class Hold:
    """A hold of one lock or of several, or a call for one. It belongs to one owner."""

    session: Session
    names: Sequence[bytes]
    owner: bytes
    kind: Kind
    lease: float
    max_hold: float = math.inf
    on_lost: Callable[[], Any] | None = None
    on_wanted: Callable[[], Any] | None = None
    token: int = 0  # given from the start: of a hold that another process took

    def __post_init__(self) -> None:
        if not min(self.lease, self.max_hold) > 0:
            raise ValueError("lease and max_hold must be above 0 seconds")
        self.is_restored, self.deadline, self.users = self.token > 0, math.inf, 1
        self.phase, self.seq, self.life = ASKING, 0, 0
        self.since, self.ends, self.next_look = 0.0, math.inf, math.inf
        self.attempt, self.renewing = 0.0, 0  # the last renewal; those without an answer
        self.kept: list[tuple[int, bytes, Any, int]] = []  # events before the answer
        self.error: Exception | None = None
        self.reason: str | None = None
        # Events to wait for: the call has its answer; the hold is lost; somebody waits for it.
        self.settled, self.lost, self.wanted = (self.session.driver.event() for _ in range(3))

    # How long it is ours.

    def _end(self) -> float:
        confirmed = self.session.confirmed.get(self.life, -math.inf) + self.session.grace * SAFE
        return min(self.since + min(self.lease, self.ends - self.since) * SAFE, confirmed)

    def valid_for(self) -> float:
        """For how many seconds the server surely grants the lock to nobody else."""
        if self.phase != HELD or self.lost.is_set() or os.getpid() != self.session.pid:
            return 0.0
        now = self.session.clock()
        if self._end() <= now:  # a validity that has ended never begins again
            over = "held for as long as it may be"
            is_over = self.since + (self.ends - self.since) * SAFE <= now
            self.lose(over if is_over else "not confirmed in time")
        return max(self._end() - now, 0.0)

    def lose(self, reason: str) -> None:
        if not self.lost.is_set():
            self.reason = reason
            self.lost.set()
            if self.users <= 0:  # it was forgotten
                self.session.discard(self)
            elif self.on_lost and self.phase == HELD:
                self.session.driver.call(self.on_lost)

    def _renew_at(self) -> float:
        # Its lease on the server may cover all the time that it has.
        if self.renewing or self.since + self.lease >= self.ends:
            return math.inf
        due = self.since + self.lease / 3 if self.life == self.session.life else 0.0
        return max(due, self.attempt + min(self.lease / 20, self.session.grace / 5))

    def look(self) -> None:
        """Renews it if that is due, and has the session look again in time."""
        if self.valid_for() > 0:
            now = self.session.clock()
            if self._renew_at() <= now:
                self.renew()
            self.session.look_at(self, max(min(self._end(), self._renew_at()), now + 0.005))

    # What is sent.

    def ask(self) -> None:
        """Asks for it. If the owner holds it already, its lease starts anew."""
        self.phase, self.kept = ASKING, []
        name, lease = self.names[0], milliseconds(min(self.lease, self.max_hold))
        words: list[Any]
        if self.is_restored:  # never taken again, only renewed
            words = ["RLOCK.RENEW", name, self.owner, lease, "TOKEN", self.token]
        elif len(self.names) > 1:
            words = ["RLOCK.MACQUIRE", self.owner, lease, len(self.names), *self.names, "ONCE"]
        else:
            words = ["RLOCK.ACQUIRE", name, self.owner, lease, *self.kind.ask, "ONCE"]
        left = self.deadline - self.session.clock()
        if left > 0 and not self.is_restored:
            words += ["QUEUE", 0 if left == math.inf else milliseconds(left)]
        wanted = ["WANTED"] if self.on_wanted else []
        self.session.send(*words, "SESSION", self.session.id, *wanted, then=self._asked)

    def renew(self, ends: float | None = None) -> Command:
        """Renews each name by the token; the last of the commands. A later end counts when the
        server has said yes, an earlier one at once."""
        answers: list[Command] = []
        self.attempt, until = self.session.clock(), self.ends if ends is None else ends
        self.ends = min(self.ends, until)
        self.renewing += 1

        def answered(command: Command) -> None:
            answers.append(command)
            if len(answers) == len(self.names):
                self._renewed(answers, until)

        lease = milliseconds(min(self.lease, until - self.attempt))
        # In another life the server has forgotten that it was to tell who waits.
        wanted = ["WANTED"] if self.on_wanted and not self.wanted.is_set() else []
        for name in self.names:
            words = ("RLOCK.RENEW", name, self.owner, lease, *self.kind.name, "TOKEN", self.token)
            words = (*words, "SESSION", self.session.id, *wanted)
            command = self.session.send(*words, then=answered)
        return command

    def give_back(self) -> Command | None:
        """What the server may have of it ends, whatever was heard of it."""
        command, words = None, [self.owner, *self.kind.release]
        if self.phase == FAILED:
            return None
        if self.token:
            words += ["TOKEN", self.token]
        else:
            self.session.send("RLOCK.CANCEL", self.names[0], self.owner)
        for name in self.names:
            command = self.session.send("RLOCK.RELEASE", name, *words)
        return command

    # What is heard.

    def _asked(self, command: Command) -> None:
        reply, session = command.reply, self.session
        if self.phase != ASKING:
            return
        kept, self.kept = self.kept, []
        if self.is_restored and reply in (0, 1):
            reply = [reply, self.token]
        if isinstance(reply, Exception):
            self._fail(reply)
        elif reply[0] > 0:
            self._granted(reply[1], command.sent, command.life)
        elif reply[0] == 0:
            self._fail(self.busy())
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
        elif self.phase == HELD and token == self.token:
            if kind == b"lost":
                self.lose(value.decode())
            elif kind == b"wanted" and self.on_wanted and not self.wanted.is_set():
                self.wanted.set()
                self.session.driver.call(self.on_wanted)
        elif self.phase == WAITING and self.life == self.session.life and seq > self.seq:
            since = max(self.since, before)
            is_old = self.session.clock() - since > min(self.lease / 2, self.max_hold / 20)
            # When was it granted, in a wait that long? If it is asked for again, the answer says.
            # But an answer for several locks may name the token of some of them only.
            if kind == b"granted" and is_old and len(self.names) == 1:
                self.ask()
            elif kind == b"granted":
                self._granted(value, since, self.life)
            elif kind == b"left":  # the queue, when the session connection closed
                self.ask()
            elif kind == b"timeout":
                self._fail(self.busy())
            elif kind == b"error":
                self._fail(ResponseError(value.decode(errors="replace")))

    def busy(self) -> NotAcquired:
        return NotAcquired(f"{self.names[0].decode(errors='replace')} is busy")

    def _fail(self, error: Exception) -> None:
        if str(error).startswith("MOVED") or isinstance(error, AskError):  # or MovedError
            error = NotInCluster(f"another node of the cluster serves this lock: {error}")
        self.phase, self.error = FAILED, error
        self.settled.set()

    def _granted(self, token: int, since: float, life: int) -> None:
        self.token, self.since, self.life = token, since, life
        self.phase, self.ends = HELD, since + self.max_hold
        self.settled.set()
        self.look()

    def _renewed(self, answers: list[Command], until: float) -> None:
        self.renewing -= 1
        replies, lives = [each.reply for each in answers], {each.life for each in answers}
        if 0 in replies:
            self.lose("the server knows of no such hold")
        elif replies == [1] * len(replies) and len(lives) == 1 and self.valid_for() > 0:
            self.since, self.life = min(each.sent for each in answers), lives.pop()
            self.ends = until
        self.look()  # after an error it is renewed again, when that is due


class Session:
    """What one process holds and waits for at one server.

    Its driver makes events to wait for (`event`), sends when `work` is set, calls `tick` earlier
    when `time` is set, and calls functions of the application (`call`).
    """

    def __init__(
        self, driver: Any, grace: float, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self.driver, self.grace, self.clock = driver, grace, clock
        self.id, self.pid, self.numbers = str(uuid.uuid4()), os.getpid(), itertools.count(1)
        self.closed = False
        self.table: dict[tuple[bytes, bytes, bytes], Hold] = {}
        self.holds: set[Hold] = set()
        self.commands: deque[Command] = deque()  # without an answer, in order
        self.forgotten: deque[Callable[[], Any]] = deque()  # of objects that are no more
        self.times: list[tuple[float, int, Hold]] = []  # a heap: when to look at a hold
        # The last event heard; for each life, when the last EVENTS answered in it was sent, and
        # the last whose reply told all that had happened.
        self.life, self.seq = 0, 0
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

    def enter(self, hold: Hold, deadline: float = math.inf) -> Hold:
        """Asks for it; or the hold that this owner has or waits for, which has one user more."""
        self.check()
        if len(self.commands) >= MAX_COMMANDS:
            raise Unanswered("too many commands wait for a connection")
        former = self.table.get((hold.names[0], hold.owner, hold.kind.mode))
        if former and former.phase == HELD and former.valid_for() <= 0:
            former.give_back()  # before this owner asks again
        elif former and former.phase != FAILED:
            former.users += 1
            return former
        self.holds.add(hold)
        for name in hold.names:
            self.table[name, hold.owner, hold.kind.mode] = hold
        hold.deadline = deadline
        hold.ask()
        return hold

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
        """One user less. After the last one it ends with its time or, without one, its lease."""
        hold.users -= 1
        if hold.users <= 0:
            hold.ends = hold.since + hold.lease if hold.ends == math.inf else hold.ends
            if hold.lost.is_set():
                self.discard(hold)

    def discard(self, hold: Hold) -> None:
        self.holds.discard(hold)
        for name in hold.names:
            if self.table.get((name, hold.owner, hold.kind.mode)) is hold:
                del self.table[name, hold.owner, hold.kind.mode]

    def send(self, *words: Any, then: Any = None, repeatable: bool = True) -> Command:
        command = Command(words, self.driver.event(), then, repeatable)
        self.commands.append(command)
        self.driver.work.set()
        return command

    def outcome(self, hold: Hold, deadline: float) -> bool:
        """Whether it is held; False: to be asked for again. An error otherwise."""
        if hold.valid_for() > 0:
            return True
        self.check()
        if hold.phase == ASKING:
            raise Unanswered("no answer from the server in time")
        error = hold.error or hold.busy()
        # Word of the grant came too late, or that was the time of another caller of this owner.
        was_others = hold.deadline < deadline and isinstance(error, NotAcquired)
        may_ask = hold.phase == HELD or was_others
        if may_ask and self.clock() < deadline:
            return False
        raise error

    def give_up(self, command: Command) -> None:
        """Nobody waits for its reply any longer: raises what is certain then."""
        if not command.done.is_set():
            if command.times and not command.repeatable:
                raise UnknownOutcome("no reply in time")
            self.withdraw(command)
            raise Unanswered("no answer from the server in time")

    def withdraw(self, command: Command) -> None:
        """One that must not be sent without its caller is not, unless it was."""
        if not command.repeatable and not command.times and command in self.commands:
            self.commands.remove(command)

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
                self.driver.time.set()

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
        if self.clock() >= self.confirmed.get(life, math.inf) + self.grace * SAFE:
            for hold in list(self.holds):
                hold.valid_for()  # what follows confirms none that has ended
        self.confirmed[life] = sent
        if life != self.life:
            self.life, self.seq = life, 0
            for hold in list(self.holds):
                hold.kept, hold.attempt = [], 0.0
                if hold.phase == WAITING and hold.life != life:
                    hold.ask()
                hold.look()
        for seq, kind, name, owner, value, token, mode, *_ in events:
            if seq > self.seq:
                self.seq = seq
                subject = self.table.get((name, owner, mode))
                if subject:
                    subject.hear(seq, kind, value, token, self.told.get(life, 0.0))
        if len(events) < FULL[0] and sum(len(of[2]) + len(of[3]) for of in events) < FULL[1]:
            self.told[life] = sent  # nothing that had happened by then is still to be told
        self.driver.work.set()  # in another life the command connection is replaced

    # For the command connection.

    def rebound(self) -> None:
        """A new connection: what may be sent once only, and was, is not sent again."""
        unknown = [each for each in self.commands if each.times and not each.repeatable]
        for command in unknown:
            self.answered(command, UnknownOutcome("the connection broke before the reply"))

    def refused(self, error: Exception) -> None:
        """The server takes no command of this session. What it may have carried out, and what
        gives back, is tried again all the same."""
        for command in list(self.commands):
            if not command.times and command.words[0] not in ("RLOCK.RELEASE", "RLOCK.CANCEL"):
                self.answered(command, error)

    def batch(self) -> list[Command]:
        """The commands to send now. Their replies come in this order."""
        batch = list(itertools.islice(self.commands, BATCH))
        for command in batch:
            command.sent, command.life = self.clock(), self.life
            command.times += 1
        return batch

    def answered(self, command: Command, reply: Any) -> None:
        self.commands.remove(command)  # the first of them, as a rule
        command.reply = reply
        if command.then:
            command.then(command)
        command.done.set()
