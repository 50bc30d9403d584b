"""Turns of an engine's thread: which count, what they are made of, and how loads are compared."""

from __future__ import annotations

import threading
import time
from concurrent.futures import Future
from dataclasses import asdict
from types import SimpleNamespace
from typing import Any

import pytest

from bench.event_loop.figures import SILENT, per_turn, summary
from bench.event_loop.turns import TurnClock


class Loop:
    """Loop of a thread whose turns are given: the samples of each, and how long it computes."""

    def __init__(self) -> None:
        self.native_id = threading.get_native_id()
        self.samples: set[int] = set()
        self.ready: Future[Any] = Future()
        self.engine = SimpleNamespace(step=lambda: compute(0.004))
        self.ready.set_result(self.engine)

    def _turn(self) -> None:
        self.engine.step()
        self._record([None] * len(self.samples), 0.0)
        self.flush()

    def _record(self, steps: list[Any], began: float) -> None:
        compute(0.002)

    def flush(self) -> None:
        time.sleep(0.003)


def compute(seconds: float) -> None:
    until = time.thread_time() + seconds
    while time.thread_time() < until:
        pass


def test_turns_in_which_all_samples_decode_count_but_the_first_ones() -> None:
    loop = Loop()
    clock = TurnClock(loop)
    loop.samples = {1, 2}
    loop._turn()
    clock.begin(2)
    for samples in ({1}, {1, 2}, {1, 2}, {1}, {1, 2}, {1, 2}, {1, 2}, {1}):
        loop.samples = samples
        loop._turn()
    times = clock.end()
    loop._turn()
    assert times.turns == 2
    for part, cpu in (("step", 0.008), ("record", 0.004)):
        assert cpu <= times.parts[part].cpu <= times.cpu
    assert times.parts["flush"].wall >= 0.006
    assert times.parts["flush"].cpu < 0.006
    # Where the time goes is known; other programs may take the core meanwhile.
    assert times.wall - times.cpu - times.queued == pytest.approx(0.006, rel=0.5)


def test_a_round_that_begins_within_a_turn_has_nothing_of_the_one_before() -> None:
    loop = Loop()
    clock = TurnClock(loop)
    clock.begin(2)
    loop.samples = {1, 2}
    for _ in range(5):
        loop._turn()
    loop.samples = set()
    # The thread waits for samples when the round begins.
    loop.engine.step = lambda: clock.begin(2)
    loop._turn()
    assert "step" not in clock.end().parts


def times_of(cpu: float, slept: float = 0.0, queued: float = 0.0) -> dict[str, Any]:
    clock = TurnClock(Loop())
    found = clock.end()
    found.turns, found.cpu, found.queued = 10, 10 * cpu, 10 * queued
    found.wall = found.cpu + found.queued + 10 * slept
    found.others, found.others_turns = {"event loop": 0.4, "grpc": 0.4}, 8
    return asdict(found)


def test_a_load_is_compared_with_none_without_the_time_that_other_programs_took() -> None:
    rounds = [
        {SILENT: times_of(0.010, queued=queued), "streams": times_of(0.011, 0.001)}
        for queued in (0, 0.05, 0, 0, 0.03, 0)
    ]
    found = summary(rounds)["streams"]
    assert [found[name] for name in ("ratio", "ratio_low", "ratio_high")] == pytest.approx([1.2] * 3)
    assert found["more_processor"] == pytest.approx(1)
    assert found["more_sleep"] == pytest.approx(1)
    assert found["others_processor"] == pytest.approx(100)
    assert per_turn(rounds[1][SILENT])["no_core"] == pytest.approx(50)
