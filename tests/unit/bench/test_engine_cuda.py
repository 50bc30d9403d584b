"""Steps of the engines' first minutes that fail, hang, or outlive their slice."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from contextlib import suppress
from multiprocessing import Pipe
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import pytest

from bench.engine_cuda import __main__ as program
from bench.engine_cuda.host import WorkerHost
from bench.engine_cuda.kinds import CudaSizes, EngineKind, EngineSetup
from bench.engine_cuda.plan import CudaStep, left, steps
from bench.engine_cuda.report import differences, lines
from kernels.tune.state import State

ABOUT = {"device": "a device", "torch": "2", "triton": "3", "vllm": "0.32"}
SETUPS = [
    EngineSetup(kind, Path("model"), "bfloat16", 4, 64)
    for kind in (EngineKind.NONE, EngineKind.V1, EngineKind.AHEAD)
]
Answers = dict[str, Callable[[], Any]]


class Worker:
    """A thread in place of a process, that answers each order as it is told."""

    def __init__(self, answers: Answers, started: list[EngineSetup], setup: EngineSetup) -> None:
        self.pipe, theirs = Pipe()
        started.append(setup)
        threading.Thread(target=self._serve, args=(theirs, answers), daemon=True).start()

    def _serve(self, theirs: Connection[Any, Any], answers: Answers) -> None:
        # Only this thread closes its end: two threads that close one connection may close its number twice.
        with theirs, suppress(EOFError, OSError):
            theirs.send(True)
            while True:
                order, _ = theirs.recv()
                answer = answers[order]()
                if answer is None:
                    return
                theirs.send(answer)

    def kill(self) -> None:
        """Do nothing: the host has closed its own end, so the thread ends at its next read or write."""


def plan() -> list[CudaStep]:
    alone, v1, ahead = SETUPS
    return [
        CudaStep("environment", alone, "environment", 1),
        CudaStep("first", v1, "first", 1),
        CudaStep("second", v1, "second", 1),
        CudaStep("third", ahead, "third", 1, more=lambda state: {"of": state.done["first"]}),
    ]


def run(path: Path, answers: Answers, seconds: float = 1000) -> tuple[int, State, list[EngineSetup]]:
    started: list[EngineSetup] = []
    everything: Answers = {"environment": lambda: ABOUT, "second": dict, "third": dict} | answers
    with WorkerHost(CudaSizes(), lambda setup, _: Worker(everything, started, setup)) as host:
        status = program.run_slice(plan(), host, path, time.monotonic() + seconds, "model")
    state = State.load(path)
    assert state is not None
    return status, state, started


@pytest.mark.parametrize(
    ("answer", "reason"),
    [(lambda: "Traceback\nKernelMismatch: 3 tokens", "3 tokens"), (lambda: None, "gone")],
)
def test_a_step_that_fails_costs_its_engine_and_what_needs_its_result(
    tmp_path: Path, answer: Callable[[], Any], reason: str
) -> None:
    status, state, started = run(tmp_path / "state.json", {"first": answer})
    assert status == program.FAILED
    assert reason in state.failed["first"]
    assert "'first' failed, whose result it needs" in state.failed["third"]
    assert "second" in state.done
    # The engine that failed is not asked again.
    assert started == [SETUPS[0], SETUPS[1], SETUPS[1]]
    assert "## Failed" in "\n".join(lines(state, plan()))


def test_a_step_that_hangs_has_failed_unless_the_slice_was_over(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    never = threading.Event()
    monkeypatch.setattr(program, "_GRACE_SECONDS", 0)
    status, state, _ = run(tmp_path / "state.json", {"first": never.wait}, seconds=0.1)
    assert status == program.MORE
    assert not state.failed
    assert state.running is None
    monkeypatch.setattr(program, "STEP_SECONDS", 0.1)
    status, state, _ = run(tmp_path / "state.json", {"first": never.wait})
    assert status == program.FAILED
    assert "too long" in state.failed["first"]


def test_the_plan_builds_each_engine_once_and_has_every_number_type(tmp_path: Path) -> None:
    made = steps(tmp_path, "bfloat16", CudaSizes())
    setups = [step.setup for step in made]
    changes = [setup for before, setup in zip([None, *setups], setups, strict=False) if before != setup]
    assert len(changes) == len(set(changes)) == 10
    assert len({step.name for step in made}) == len(made)
    assert {setup.dtype for setup in setups} == {"float32", "bfloat16"}
    state = State(tmp_path / "state.json", {})
    whole = left(state, made)
    state.done[made[0].name] = {"seconds": 2 * (made[0].seconds + 10), "result": {}}
    # The first took twice as long as estimated.
    assert left(state, made) == pytest.approx(2 * (whole - made[0].seconds - 10))


def test_differences_are_counted_up_to_the_first_of_a_sample() -> None:
    truth = {"0": [1, 2, 3], "1": [4, 5, 6], "2": [7]}
    assert differences(truth, {"0": [1, 2, 3], "1": [4, 9, 9], "2": []}) == (5, 2, 0)
