"""Admission by a clock of its own: who gets a place, and when the others should come back."""

from __future__ import annotations

import math
from dataclasses import dataclass

import pytest

from forerun.errors import ConfigError, Overloaded, RateLimited
from forerun.server.admission import LONGEST_WAIT_S, Admission
from forerun.server.config import ServerConfig
from forerun.server.failures import describe
from forerun.server.keys import ApiKey
from forerun.types import FinishReason


@dataclass(eq=False)
class Fake:
    """What admission asks of an engine's request."""

    num_prompt: int = 10
    scheduled_s: float | None = None
    finish_reason: FinishReason | None = None


class Clock:
    def __init__(self) -> None:
        self.now = 1000.0

    def __call__(self) -> float:
        return self.now


def make(num_places: int = 2, **fields: object) -> tuple[Admission, Clock]:
    clock = Clock()
    config = ServerConfig(model_names=("m",), **fields)
    return Admission(config, num_places, clock), clock


def running() -> Fake:
    return Fake(scheduled_s=1.0)


def test_the_queue_is_bounded_by_requests() -> None:
    admission, _ = make(max_queued_requests=1)
    for _ in range(2):
        admission.enter([running()], None)
    admission.enter([Fake()], None)
    with pytest.raises(Overloaded) as caught:
        admission.enter([Fake()], None)
    assert caught.value.retry_after_s >= 1
    assert not isinstance(caught.value, RateLimited)
    assert admission.num_under_way == 3


def test_nobody_waits_who_finds_a_place() -> None:
    admission, _ = make(max_queued_requests=0)
    first = admission.enter([Fake()], None)
    admission.enter([Fake()], None)
    with pytest.raises(Overloaded):
        admission.enter([Fake()], None)
    admission.leave(first)
    admission.enter([Fake()], None)


def test_the_queue_is_bounded_by_prompt_tokens() -> None:
    admission, _ = make(num_places=1, max_queued_tokens=100)
    admission.enter([running()], None)
    admission.enter([Fake(90)], None)
    with pytest.raises(Overloaded, match="tokens"):
        admission.enter([Fake(11)], None)
    admission.enter([Fake(10)], None)


def test_answers_that_have_ended_hold_no_place() -> None:
    """n=2: one answer is done, the other runs. The engine has room for one more."""
    admission, _ = make(num_places=2, max_queued_requests=0)
    done = Fake(scheduled_s=1.0, finish_reason=FinishReason.STOP)
    admission.enter([done, running()], None)
    admission.enter([Fake()], None)


def test_a_key_has_its_own_limit() -> None:
    admission, _ = make(num_places=64)
    alice, bob = ApiKey.of("alicekey1", "alice", 2), ApiKey.of("bobskey12", "bob")
    tickets = [admission.enter([Fake()], alice) for _ in range(2)]
    with pytest.raises(RateLimited) as caught:
        admission.enter([Fake()], alice)
    told = describe(caught.value, "id")
    assert told.status == 429
    assert int(told.headers["Retry-After"]) >= 1
    assert told.kind == "rate_limit_error"
    admission.enter([Fake()], bob)
    admission.leave(tickets[0])
    admission.enter([Fake()], alice)


def test_leaving_twice_is_leaving_once() -> None:
    admission, _ = make(num_places=1, max_queued_requests=0)
    ticket = admission.enter([Fake()], None)
    admission.leave(ticket)
    admission.leave(ticket)
    assert admission.num_under_way == 0


def test_draining_admits_nobody() -> None:
    admission, _ = make(drain_timeout_s=7.0)
    admission.is_draining = True
    with pytest.raises(Overloaded) as caught:
        admission.enter([Fake()], None)
    assert describe(caught.value, "id").headers["Retry-After"] == "7"


def wait_of(admission: Admission) -> float:
    with pytest.raises(Overloaded) as caught:
        admission.enter([Fake()], None)
    return caught.value.retry_after_s


def fill(admission: Admission, places: int) -> list:
    return [admission.enter([running()], None) for _ in range(places)]


def test_retry_after_follows_how_fast_places_come_free() -> None:
    admission, clock = make(num_places=1, max_queued_requests=0)
    for _ in range(20):  # one in four seconds
        ticket = admission.enter([Fake()], None)
        clock.now += 4
        admission.leave(ticket)
    fill(admission, 1)
    assert 3 <= wait_of(admission) <= 5


def test_retry_after_is_bounded() -> None:
    admission, clock = make(num_places=1, max_queued_requests=0)
    fill(admission, 1)
    assert wait_of(admission) == 1.0  # nothing is known yet
    for _ in range(2):
        clock.now += 10_000
        admission._ended.append((clock.now, 1))
    assert 1 <= wait_of(admission) <= LONGEST_WAIT_S
    clock.now += 0
    for _ in range(64):
        admission._ended.append((clock.now, 1000))
    assert wait_of(admission) == 1.0
    assert math.isfinite(wait_of(admission))


def test_a_quiet_hour_does_not_make_retry_after_long() -> None:
    """Ten requests a second while there was something to do; then nothing to do; then a burst."""
    admission, clock = make(num_places=1, max_queued_requests=0)
    for _ in range(64):
        ticket = admission.enter([Fake()], None)
        clock.now += 0.1
        admission.leave(ticket)
    clock.now += 3600
    fill(admission, 1)
    assert wait_of(admission) <= 5


def test_more_answers_than_there_is_room_for_is_not_a_matter_of_time() -> None:
    """An empty server that says 503 will say it for ever: the client must be told otherwise."""
    admission, _ = make(num_places=2, max_queued_requests=0)
    try:
        admission.enter([Fake() for _ in range(8)], None)
    except Overloaded:
        pytest.fail("503 with Retry-After for what never fits")
    except Exception:  # noqa: BLE001  (some 4xx)
        return


def test_config_of_admission() -> None:
    with pytest.raises(ConfigError):
        make(max_queued_requests=-1)
