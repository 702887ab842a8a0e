"""Sharing work: every part once, nobody ahead of the others, whoever comes and whenever."""

from __future__ import annotations

import gc
import threading

import numpy as np
import pytest
from numba import njit

from forerun.kernels.team import finish, new_counters, take
from forerun.kernels.workers import Workers, shared_workers


@njit(nogil=True)
def stages(counters, data, takers, me):
    """data [phases + 1, parts]: each phase adds up the one before, so nobody may be early."""
    num_phases, parts = data.shape[0] - 1, data.shape[1]
    for phase in range(num_phases):
        mine = 0
        part = take(counters, phase)
        while part < parts:
            total = 0
            for i in range(parts):
                total += data[phase, i]
            data[phase + 1, part] += total + part
            takers[phase, part] += 1
            mine += 1
            part = take(counters, phase)
        finish(counters, phase, mine, parts)


def expected(num_phases: int, parts: int) -> np.ndarray:
    rows = [np.ones(parts, np.int64)]
    for _ in range(num_phases):
        rows.append(rows[-1].sum() + np.arange(parts))
    return np.stack(rows)


@pytest.mark.parametrize("num_threads", [1, 2, 3, 8])
@pytest.mark.parametrize("parts", [0, 1, 2, 7, 100])
def test_every_part_is_done_once_and_in_order(num_threads, parts):
    num_phases = 6
    workers = Workers(num_threads)
    for _ in range(20):
        data = np.zeros((num_phases + 1, parts), np.int64)
        data[0] = 1
        takers = np.zeros((num_phases, parts), np.int64)
        workers.run(stages, new_counters(num_phases), data, takers, 0)
        assert (takers == 1).all()
        assert np.array_equal(data, expected(num_phases, parts))


def test_whoever_comes_late_finds_all_done():
    counters, data = new_counters(3), np.zeros((4, 5), np.int64)
    data[0] = 1
    takers = np.zeros((3, 5), np.int64)
    stages(counters, data, takers, 0)
    before = data.copy()
    stages(counters, data, takers, 1)
    assert np.array_equal(data, before)
    assert (takers == 1).all()


def test_several_callers_at_once_each_get_their_own():
    workers = Workers(3)
    failures: list[str] = []

    def call() -> None:
        for _ in range(50):
            data, takers = np.zeros((5, 9), np.int64), np.zeros((4, 9), np.int64)
            data[0] = 1
            workers.run(stages, new_counters(4), data, takers, 0)
            if not np.array_equal(data, expected(4, 9)):
                failures.append("wrong")

    threads = [threading.Thread(target=call) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not failures


def test_workers_go_home_with_their_owner():
    before = set(threading.enumerate())
    workers = Workers(4)
    hired = set(threading.enumerate()) - before
    assert len(hired) == 3
    del workers
    gc.collect()
    for thread in hired:
        thread.join(timeout=30)
        assert not thread.is_alive(), "a worker outlived its owner"


def test_one_set_of_workers_for_a_process():
    assert shared_workers(2) is shared_workers(2)
