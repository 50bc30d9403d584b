"""The log of what ran in long turns of an event loop."""

from __future__ import annotations

import asyncio
import gc
import threading
import time
from typing import Any

import structlog

from services.platform.observability.event_loop import LONG_TURN, MeteredLoop, TurnProfiler, TurnSelector


def crunch(seconds: float, profiler: TurnProfiler) -> None:
    """Use so much processor time, and let the profiler take a sample."""
    end = time.thread_time() + seconds
    while time.thread_time() < end:
        pass
    sampling = threading.Thread(target=profiler.sample)
    sampling.start()
    sampling.join()


def lines(turns: list[list[float]], *, collect: bool = False) -> list[dict[str, Any]]:
    """Return what is logged of turns with calls of `crunch` that take so many seconds each."""

    async def work() -> None:
        loop = asyncio.get_running_loop()
        assert isinstance(loop, MeteredLoop)
        with TurnProfiler(loop.turns) as profiler:
            for seconds in turns:
                await asyncio.sleep(0)
                for each in seconds:
                    crunch(each, profiler)
                if collect:
                    gc.collect()
            await asyncio.sleep(0)

    # A collection of all that a test process holds can be a long turn by itself.
    gc.disable()
    try:
        with structlog.testing.capture_logs() as logged, asyncio.Runner(loop_factory=MeteredLoop) as runner:
            runner.run(work())
    finally:
        gc.enable()
    return [dict(line) for line in logged if line["event"] == "long_turn"]


def test_a_long_turn_is_logged_with_its_callback_and_its_stack() -> None:
    (line,) = lines([[2 * LONG_TURN]])
    assert line["cpu_ms"] >= 1000 * 2 * LONG_TURN
    (callback,) = line["callbacks"]
    assert "work" in callback
    assert any(call.startswith("crunch (platform/test_turn_profiler.py:") for call in line["calls"])
    assert line["callbacks"][callback] <= line["cpu_ms"]


def test_processor_time_counts_for_the_stack_that_is_found_after_it() -> None:
    (line,) = lines([[0.7 * LONG_TURN, 0.7 * LONG_TURN]])
    assert sum(line["callbacks"].values()) >= 1000 * 1.4 * LONG_TURN


def test_of_many_long_turns_only_those_longer_than_all_before_are_logged_at_once() -> None:
    with structlog.testing.capture_logs() as logged:
        profiler = TurnProfiler(TurnSelector())
        for seconds in (0.2, 0.1, 0.3, 0.3):
            profiler.ended(seconds, seconds)
    assert [line["cpu_ms"] for line in logged] == [200.0, 300.0]


def test_the_line_can_be_written_in_every_format() -> None:
    (line,) = lines([[2 * LONG_TURN]])
    for render in (structlog.dev.ConsoleRenderer(colors=False), structlog.processors.JSONRenderer()):
        assert "crunch" in str(render(None, "warning", dict(line)))


def test_garbage_collection_is_told_apart() -> None:
    (line,) = lines([[LONG_TURN]], collect=True)
    assert 0 < line["collection_ms"] <= line["cpu_ms"]


def test_nothing_is_left_behind() -> None:
    before = list(gc.callbacks)
    lines([[0.0]])
    assert gc.callbacks == before
    assert "turn-profiler" not in {thread.name for thread in threading.enumerate()}
