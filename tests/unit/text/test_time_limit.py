"""Code that came with a model is ended in time, and nothing is raised anywhere else."""

from __future__ import annotations

import threading
import time

import pytest

from forerun.text.time_limit import TimeIsUp, run_within


def loop_for_ever() -> None:
    while True:
        pass


def limited_threads() -> list[threading.Thread]:
    return [each for each in threading.enumerate() if each.name.startswith("forerun-lim")]


def test_what_it_gives_and_raises() -> None:
    assert run_within(5, lambda: 3) == 3
    assert run_within(5, lambda: None) is None
    with pytest.raises(ZeroDivisionError):
        run_within(5, lambda: 1 // 0)
    with pytest.raises(SystemExit):
        run_within(5, lambda: exit(3))


def test_what_loops_is_ended_and_this_thread_hears_of_it_once() -> None:
    for _ in range(5):
        with pytest.raises(TimeIsUp):
            run_within(0.05, loop_for_ever)
        assert sum(range(100_000)) == 4999950000  # nothing is left to be raised here
        assert limited_threads() == []


def test_code_that_catches_everything_it_can_name_is_ended_too() -> None:
    def stubborn() -> None:
        while True:
            try:
                loop_for_ever()
            except Exception:  # noqa: BLE001
                continue

    with pytest.raises(TimeIsUp):
        run_within(0.05, stubborn)
    assert limited_threads() == []


def test_code_that_catches_the_first_is_ended_by_a_later_one() -> None:
    def swallow() -> None:
        try:
            loop_for_ever()
        except BaseException:  # noqa: BLE001
            loop_for_ever()

    with pytest.raises(TimeIsUp):
        run_within(0.05, swallow)
    assert limited_threads() == []


def test_code_that_waits_outside_python_is_ended_once_it_comes_back() -> None:
    """However long that takes, and nothing of it goes on behind the caller's back."""

    def wait_and_loop() -> None:
        time.sleep(2.5)
        loop_for_ever()

    with pytest.raises(TimeIsUp):
        run_within(0.05, wait_and_loop)
    assert limited_threads() == []


def test_the_end_of_the_code_and_of_its_time_may_meet(
    recwarn: pytest.WarningsRecorder,
) -> None:
    """However they meet: no error in any thread, none here, and no thread is left."""

    def busy(seconds: float) -> float:
        end_s = time.perf_counter() + seconds
        while time.perf_counter() < end_s:
            pass
        return seconds

    given = 0
    for number in range(400):
        seconds = 0.0002 + number * 0.000002
        try:
            given += run_within(0.0005, lambda: busy(seconds)) == seconds  # noqa: B023
        except TimeIsUp:
            given += 1
        for _ in range(2000):
            pass
    assert given == 400
    assert limited_threads() == []
    assert not recwarn.list  # pytest warns of exceptions that nobody caught in a thread
