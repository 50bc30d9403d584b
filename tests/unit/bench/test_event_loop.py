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
from bench.event_loop.turns import PartTime, TurnClock


class Clock:
    """Clocks of a thread: how long it has computed, slept, and waited for a core."""

    def __init__(self) -> None:
        self.computed = self.slept = self.queued = 0.0

    def thread_time(self) -> float:
        return self.computed

    def perf_counter(self) -> float:
        return self.computed + self.slept + self.queued


class Loop:
    """Loop of a thread whose turns are given: the samples of each, and where its time goes."""

    def __init__(self) -> None:
        self.native_id = threading.get_native_id()
        self.clock = Clock()
        self.samples: set[int] = set()
        self.ready: Future[Any] = Future()
        self.engine = SimpleNamespace(step=self._step)
        self.ready.set_result(self.engine)

    def _turn(self) -> None:
        self.engine.step()
        self._record([None] * len(self.samples), 0.0)
        self.flush()

    def _step(self) -> None:
        self.clock.computed += 0.5

    def _record(self, steps: list[Any], began: float) -> None:
        self.clock.computed += 0.25
        self.clock.queued += 1.0

    def flush(self) -> None:
        self.clock.slept += 0.125


def test_turns_in_which_all_samples_decode_count_but_the_first_ones(monkeypatch: pytest.MonkeyPatch) -> None:
    loop = Loop()
    monkeypatch.setattr("bench.event_loop.turns.time", loop.clock)
    monkeypatch.setattr(TurnClock, "_scheduled", lambda _: (loop.clock.computed, loop.clock.queued))
    clock = TurnClock(loop)
    loop.samples = {1, 2}
    loop._turn()
    clock.begin(2)
    for samples in ({1}, {1, 2}, {1, 2}, {1}, {1, 2}, {1, 2}, {1, 2}, {1}):
        loop.samples = samples
        loop._turn()
    times = clock.end()
    loop._turn()
    assert (times.turns, times.wall, times.cpu, times.queued) == (2, 3.75, 1.5, 2.0)
    assert times.parts == {
        "step": PartTime(wall=1.0, cpu=1.0),
        "record": PartTime(wall=2.5, cpu=0.5),
        "flush": PartTime(wall=0.25, cpu=0.0),
    }


def test_the_kernel_says_how_long_a_thread_ran_and_how_long_it_waited_for_a_core() -> None:
    clock = TurnClock(Loop())
    ran, waited = clock._scheduled()
    until = time.thread_time() + 0.002
    while time.thread_time() < until:
        pass
    ran_until_now, waited_until_now = clock._scheduled()
    assert ran_until_now >= ran + 0.002
    assert waited_until_now >= waited >= 0


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
