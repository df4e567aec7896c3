"""The decisions alone, without a server: a clock that stands still, and written replies."""

import math
from types import SimpleNamespace

import pytest
from redis.exceptions import ResponseError

from rlock_redis import NotAcquired, Unanswered, UnknownOutcome, _core
from rlock_redis._core import HELD, PLAIN, WAITING, Hold, Session

LIFE, LATER_LIFE, TOKEN = 1000, 2000, 77


class Event:
    def __init__(self):
        self.is_it = False

    def set(self):
        self.is_it = True

    def is_set(self):
        return self.is_it


class World:
    """A session that has begun, and everything it wants to be sent."""

    def __init__(self, grace=5.0):
        self.now, self.calls = 100.0, []
        driver = SimpleNamespace(event=Event, call=self.calls.append, work=Event(), time=Event())
        self.session = Session(driver, grace, lambda: self.now)
        self.hear()

    def hear(self, *events, life=LIFE, sent=None):
        self.session.hear(self.now if sent is None else sent, life, list(events))

    def event(self, seq, kind, hold, value=0, token=0):
        return [seq, kind, hold.names[0], hold.owner, value, token, hold.kind.mode, 0]

    def hold(self, name=b"lock", owner=None, lease=30.0, **options):
        owner = owner or self.session.new_owner()
        hold = Hold(self.session, [name], owner, PLAIN, lease, **options)
        return self.session.enter(hold)

    def sent(self):
        return [command.words for command in self.session.commands]

    def answer(self, *replies):
        batch = self.session.batch()
        assert len(batch) == len(replies), self.sent()
        for command, reply in zip(batch, replies):
            self.session.answered(command, reply)

    def held(self, **options):
        hold = self.hold(**options)
        self.answer([1, TOKEN])
        assert hold.phase == HELD
        return hold

    def waiting(self, seq=0, **options):
        hold = self.hold(**options)
        self.answer([-1, 1, seq, LIFE])
        assert hold.phase == WAITING
        return hold


@pytest.fixture
def world():
    return World()


def test_each_command_names_the_session_or_the_token(world):
    hold = world.held(lease=10.0)
    world.now += 4
    world.hear()
    hold.look()
    assert [word for word in world.sent()[0] if word in ("TOKEN", TOKEN, "SESSION")] == [
        "TOKEN",
        TOKEN,
        "SESSION",
    ]
    world.answer(1)
    world.session.leave(hold)
    assert world.sent() == [("RLOCK.RELEASE", b"lock", hold.owner, "TOKEN", TOKEN)]


def test_a_guard_is_lost_when_the_session_is_not_confirmed_for_the_grace(world):
    hold = world.held()
    world.now += 5 * _core.SAFE - 0.01
    assert hold.valid_for() > 0
    world.now += 0.02
    assert hold.valid_for() == 0
    assert hold.reason == "not confirmed in time"


def test_a_guard_is_lost_when_its_lease_is_over_and_no_renewal_was_answered(world):
    hold = world.held(lease=10.0)
    for _ in range(10):
        world.now += 1
        world.hear()
        world.session.tick()
    assert hold.lost.is_set()


def test_a_validity_that_has_ended_never_begins_again(world):
    hold = world.held(lease=10.0)
    world.now += 4
    world.hear()
    hold.look()
    world.now += 4.95
    world.hear()  # comes after the grace is over: a late reply
    world.answer(1)
    assert (hold.valid_for(), hold.lost.is_set()) == (0, True)


def test_a_renewal_counts_from_its_sending_not_from_its_answer(world):
    hold = world.held(lease=10.0)
    world.now += 4
    world.hear()
    hold.look()
    batch = world.session.batch()
    world.now += 3
    world.hear()
    world.session.answered(batch[0], 1)
    assert hold.valid_for() == pytest.approx(min(9.8 - 3, 4.9))


def test_a_wait_hears_only_later_events_of_its_own(world):
    hold = world.waiting(seq=5, owner=b"me")
    world.hear(world.event(5, b"timeout", hold))
    assert hold.phase == WAITING
    world.hear(world.event(6, b"granted", hold, TOKEN, TOKEN))
    assert (hold.phase, hold.token) == (HELD, TOKEN)


def test_a_grant_that_is_told_before_the_reply_to_its_acquire_is_kept_until_then(world):
    hold = world.hold()
    world.hear(world.event(1, b"granted", hold, TOKEN, TOKEN))
    assert hold.phase != HELD
    world.answer([-1, 1, 0, LIFE])
    assert (hold.phase, hold.token) == (HELD, TOKEN)


def test_the_loss_of_an_earlier_hold_is_none_of_a_later_one(world):
    first = world.held(owner=b"me")
    world.session.leave(first)
    second = world.hold(owner=b"me")
    world.answer(0, [1, TOKEN + 1])
    world.hear(world.event(1, b"lost", second, b"expired", TOKEN))
    assert second.valid_for() > 0
    world.hear(world.event(2, b"lost", second, b"broken", TOKEN + 1))
    assert second.reason == "broken"


def test_in_another_life_a_hold_is_renewed_by_its_token_and_a_wait_asked_for_again(world):
    hold, wait = world.held(), world.waiting()
    world.hear(life=LATER_LIFE)
    assert sorted(words[0] for words in world.sent()) == ["RLOCK.ACQUIRE", "RLOCK.RENEW"]
    replies = {"RLOCK.RENEW": 1, "RLOCK.ACQUIRE": [-1, 1, 0, LATER_LIFE]}
    world.answer(*[replies[words[0]] for words in world.sent()])
    assert (hold.life, wait.life, wait.phase) == (LATER_LIFE, LATER_LIFE, WAITING)
    world.now += 4
    world.hear(life=LATER_LIFE)
    world.now += 2
    assert hold.valid_for() > 0  # it counts on the new life


def test_a_hold_that_is_not_renewed_in_another_life_ends_with_the_grace_of_the_earlier(world):
    hold = world.held()
    world.hear(life=LATER_LIFE)
    world.answer(ResponseError("NOSESSION"))
    world.now += 4
    world.hear(life=LATER_LIFE)
    world.now += 1
    assert hold.valid_for() == 0


def test_in_the_same_life_only_a_wait_that_left_is_asked_for_again(world):
    stays, left = world.waiting(), world.waiting()
    world.hear(world.event(1, b"left", left))
    assert [words[2] for words in world.sent()] == [left.owner]
    assert stays.phase == WAITING


def test_a_command_without_an_answer_is_sent_again_but_not_one_that_may_run_once(world):
    once = world.session.send("RLOCK.GUARD", repeatable=False)
    hold = world.hold()
    world.session.batch()
    world.session.rebound()
    assert isinstance(once.reply, UnknownOutcome)
    assert [words[0] for words in world.sent()] == ["RLOCK.ACQUIRE"]
    world.answer([1, TOKEN])
    assert hold.phase == HELD


def test_one_that_was_never_sent_is_sent_on_the_next_connection(world):
    once = world.session.send("RLOCK.GUARD", repeatable=False)
    world.session.rebound()
    world.answer(b"OK")
    assert once.reply == b"OK"


def test_a_command_that_may_run_once_is_not_sent_after_its_caller_has_given_up(world):
    once = world.session.send("RLOCK.GUARD", repeatable=False)
    again = world.session.send("RLOCK.INFO")
    for command in (once, again):
        with pytest.raises(Unanswered):
            world.session.give_up(command)
    assert world.sent() == [("RLOCK.INFO",)]
    once = world.session.send("RLOCK.GUARD", repeatable=False)
    world.session.batch()
    with pytest.raises(UnknownOutcome):
        world.session.give_up(once)


def test_events_are_acknowledged_by_life_and_number(world):
    hold = world.waiting()
    world.hear(world.event(1, b"granted", hold, TOKEN, TOKEN))
    assert world.session.events_words(9, 1)[-3:] == ("AFTER", LIFE, 1)
    world.hear(world.event(1, b"granted", hold, TOKEN, TOKEN))  # told again
    assert world.session.events_words(9, 1)[-3:] == ("AFTER", LIFE, 1)


def test_after_a_wait_in_which_the_grant_may_be_old_it_is_asked_for_again(world):
    hold = world.waiting(lease=10.0, max_hold=2.0)
    world.now += 4
    world.hear(world.event(1, b"granted", hold, TOKEN, TOKEN))
    assert not hold.settled.is_set()
    world.answer([1, TOKEN])
    assert hold.valid_for() == pytest.approx(2 * _core.SAFE)


def test_a_grant_that_was_over_before_it_was_told_waits_again(world):
    hold = world.waiting(lease=10.0, max_hold=2.0)
    world.now += 4
    world.hear(world.event(1, b"granted", hold, TOKEN, TOKEN))
    world.hear(world.event(2, b"lost", hold, b"expired", TOKEN))
    world.answer([-1, 1, 2, LIFE])
    assert (hold.phase, hold.settled.is_set()) == (WAITING, False)
    world.hear(world.event(3, b"granted", hold, TOKEN + 1, TOKEN + 1))
    assert (hold.token, hold.valid_for()) == (TOKEN + 1, pytest.approx(2 * _core.SAFE))


def test_of_several_locks_a_grant_that_may_be_old_is_renewed_at_once(world):
    hold = Hold(world.session, [b"a", b"b"], b"me", PLAIN, 3.0)
    world.session.enter(hold)
    world.answer([-1, 1, 0, LIFE])
    world.now += 2
    world.hear(world.event(1, b"granted", hold, TOKEN, TOKEN))
    assert [words[0] for words in world.sent()] == ["RLOCK.RENEW"] * 2
    world.answer(1, 1)
    assert hold.valid_for() == pytest.approx(3.0 * _core.SAFE)


def test_a_hold_that_another_process_took_is_renewed_and_never_taken(world):
    hold = world.hold(token=TOKEN)
    world.session.batch()
    world.session.rebound()
    world.hear(life=LATER_LIFE)
    assert [words[0] for words in world.sent()] == ["RLOCK.RENEW"]
    world.answer(1)
    assert (hold.phase, hold.token) == (HELD, TOKEN)
    other = world.hold(owner=b"other", token=TOKEN)
    world.answer(1 - 1)
    assert isinstance(other.error, NotAcquired) and world.sent() == []


def test_a_hold_of_two_users_is_forgotten_after_the_second(world):
    hold = world.held(owner=b"me")
    assert world.hold(owner=b"me") is hold
    world.session.forget(hold)
    assert hold.ends == math.inf
    world.session.forget(hold)
    assert hold.ends < math.inf


def test_an_owner_enters_again_without_asking_and_the_last_one_releases(world):
    hold = world.held(owner=b"me")
    assert world.hold(owner=b"me") is hold
    world.session.leave(hold)
    assert world.sent() == []
    world.session.leave(hold)
    assert [words[0] for words in world.sent()] == ["RLOCK.RELEASE"]
    world.session.leave(hold)
    assert len(world.sent()) == 1


def test_a_lost_hold_of_an_owner_is_released_before_the_owner_asks_again(world):
    former = world.held(owner=b"me")
    world.now += 6
    assert world.hold(owner=b"me") is not former
    assert world.sent()[0] == ("RLOCK.RELEASE", b"lock", b"me", "TOKEN", TOKEN)
    assert [words[0] for words in world.sent()[1:]] == ["RLOCK.ACQUIRE"]


def test_a_call_that_is_given_up_is_undone_whatever_was_heard_of_it(world):
    hold = world.hold()
    world.session.batch()
    world.session.leave(hold)
    verbs = [words[0] for words in world.sent()]
    assert verbs == ["RLOCK.ACQUIRE", "RLOCK.CANCEL", "RLOCK.RELEASE"]


def test_a_busy_lock_is_an_error_of_its_own(world):
    hold = world.hold()
    world.answer([0, 500])
    with pytest.raises(NotAcquired):
        world.session.outcome(hold, world.now)


def test_a_full_reply_to_events_proves_nothing_of_what_had_not_happened(world):
    hold = world.waiting(lease=10.0)
    world.now += 4
    sent = world.now
    other = world.session.new_owner()
    many = [[n, b"lost", b"x", other, b"expired", 1, b"plain", 0] for n in range(1, 1001)]
    world.hear(*many, sent=sent)
    world.hear(world.event(1001, b"granted", hold, TOKEN, TOKEN))
    assert hold.since == 100.0


def test_the_time_to_look_again_is_the_renewal_or_the_end(world):
    world.held(lease=9.0)
    assert world.session.tick() == pytest.approx(3.0)
    world.held(lease=math.inf)
    assert world.session.tick() == pytest.approx(3.0)


def test_one_look_is_kept_for_each_hold(world):
    hold = world.held(lease=9.0)
    for _ in range(50):
        world.now += 1
        world.hear()
        world.session.tick()
        world.answer(*[1] * len(world.sent()))
    assert hold.valid_for() > 0
    assert len(world.session.times) <= 3


def test_a_later_end_counts_when_the_server_has_said_yes(world):
    hold = world.held(lease=10.0, max_hold=2.0)
    command = hold.renew(hold.ends + 5)
    assert hold.valid_for() <= 2
    assert command.words[3] > 2_000
    world.answer(1)
    assert hold.valid_for() > 4


def test_what_may_have_been_carried_out_is_not_refused(world):
    asked = world.waiting()
    world.session.leave(asked)
    asking = Hold(world.session, [b"z"], b"me", PLAIN, 3.0)
    world.session.enter(asking)
    world.session.refused(PermissionError("NOPERM"))
    assert isinstance(asking.error, PermissionError)
    assert {words[0] for words in world.sent()} == {"RLOCK.CANCEL", "RLOCK.RELEASE"}
