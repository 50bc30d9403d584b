"""Steps of a run on a GPU that fail, hang, do not start, or outlive their call."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from multiprocessing import Pipe
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import pytest

from bench.gpu import running
from bench.gpu.__main__ import main
from bench.gpu.report import differences, lines
from bench.gpu.running import LINES, GpuStep, OtherRun, State, WorkerHost, left

ABOUT = {"device": "a device", "torch": "2", "triton": "3", "vllm": "0.32"}
Answers = dict[str, Callable[[], Any]]


@dataclass(frozen=True)
class NamedSetup:
    """A process by its name."""

    name: str
    start_seconds: float = 1.0

    def orders(self) -> Any:
        """Never called: a thread answers."""
        raise NotImplementedError


ALONE, ONE, OTHER = map(NamedSetup, ("alone", "one", "other"))


class Worker:
    """A thread in place of a process, which gives prepared answers to orders."""

    def __init__(self, answers: Answers, started: list[NamedSetup], setup: NamedSetup) -> None:
        self.pipe, theirs = Pipe()
        started.append(setup)
        threading.Thread(target=self._serve, args=(theirs, answers, setup.name), daemon=True).start()

    def _serve(self, theirs: Connection[Any, Any], answers: Answers, name: str) -> None:
        # Only this thread closes its end: two threads that close one connection may close its number twice.
        with theirs, suppress(EOFError, OSError):
            started = answers.get(f"start {name}", lambda: True)()
            if started is None:
                return
            theirs.send(started)
            while True:
                order, _ = theirs.recv()
                answer = answers[order]()
                if answer is None:
                    return
                theirs.send(answer)

    def kill(self) -> None:
        """Do nothing: the host has closed its own end, so the thread ends at its next read or write."""


STEPS = [
    GpuStep("environment", ALONE, "environment", 1),
    GpuStep("first", ONE, "first", 1),
    GpuStep("second", ONE, "second", 1),
    GpuStep("third", OTHER, "third", 1, more=lambda state: {"of": state.done["first"]}),
]


def run(
    path: Path, answers: Answers, seconds: float = 1000, steps: Sequence[GpuStep] = STEPS
) -> tuple[int, State, list[NamedSetup]]:
    started: list[NamedSetup] = []
    everything: Answers = {
        "environment": lambda: ABOUT,
        "first": dict,
        "second": dict,
        "third": dict,
    } | answers
    with WorkerHost(lambda setup: Worker(everything, started, setup)) as host:
        until = time.monotonic() + seconds
        status = running.run(steps, host, path, until, "model", lambda state: None)
    state = State.load(path)
    assert state is not None
    return status, state, started


@pytest.mark.parametrize(
    ("answer", "reason"),
    [(lambda: "Traceback\nKernelMismatch: 3 tokens", "3 tokens"), (lambda: None, "has ended")],
)
def test_a_step_that_fails_costs_its_process_and_what_needs_its_result(
    tmp_path: Path, answer: Callable[[], Any], reason: str
) -> None:
    status, state, started = run(tmp_path / "state.json", {"first": answer})
    assert status == running.FAILED
    assert reason in state.failed["first"]
    assert "'first' failed, or was left out, whose result it needs" in state.failed["third"]
    assert "second" in state.done
    # The process that failed is not asked again.
    assert started == [ALONE, ONE, ONE]
    assert "## Failed" in "\n".join(lines(state, STEPS))
    written = [json.loads(line) for line in (tmp_path / LINES).read_text().splitlines()]
    assert [line["step"] for line in written] == ["environment", "first", "second", "third"]
    assert reason in written[1]["error"]


@pytest.mark.parametrize(
    "start", [lambda: "Traceback\nNoMemory: 8 GiB", lambda: None], ids=["raises", "gone"]
)
def test_a_process_that_does_not_start_is_tried_once(tmp_path: Path, start: Callable[[], Any]) -> None:
    status, state, started = run(tmp_path / "state.json", {"start one": start})
    assert status == running.FAILED
    assert started == [ALONE, ONE]
    assert state.failed["second"] == "its process did not start, as for 'first'"
    assert not state.done.keys() - {"environment"}


def test_a_process_that_does_not_start_in_time_is_tried_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(running, "_limit", lambda step, starts: 0.1 if step.setup is ONE else 60)
    never = threading.Event()
    status, state, started = run(tmp_path / "state.json", {"start one": never.wait})
    assert status == running.FAILED
    assert started == [ALONE, ONE]
    assert state.failed["second"] == "its process did not start, as for 'first'"


def test_what_was_done_stays_done_where_its_process_does_not_start_again(tmp_path: Path) -> None:
    starts = iter([True, "Traceback\nNoMemory: 8 GiB"])
    steps = [*STEPS[:3], GpuStep("fourth", ONE, "fourth", 1), GpuStep("fifth", ONE, "fifth", 1)]
    answers: Answers = {"start one": lambda: next(starts), "second": lambda: "Traceback\nKernelMismatch"}
    _, state, _ = run(tmp_path / "state.json", answers, steps=steps)
    assert set(state.done) == {"environment", "first"}
    assert set(state.failed) == {"second", "fourth", "fifth"}
    assert state.failed["fifth"] == "its process did not start, as for 'fourth'"


def test_a_step_that_hangs_has_failed_unless_the_call_was_over(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    never = threading.Event()
    monkeypatch.setattr(running, "GRACE_SECONDS", 0)
    status, state, _ = run(tmp_path / "state.json", {"first": never.wait}, seconds=0.1)
    assert status == running.MORE
    assert not state.failed
    assert state.running is None
    monkeypatch.setattr(running, "_limit", lambda step, starts: 0.1 if step.name == "first" else 60)
    status, state, _ = run(tmp_path / "state.json", {"first": never.wait})
    assert status == running.FAILED
    assert "too long" in state.failed["first"]
    assert "third" in state.failed


def test_a_step_that_does_not_fit_is_left_to_the_next_call_and_a_shorter_one_is_done(tmp_path: Path) -> None:
    long = [*STEPS[:2], GpuStep("second", ONE, "second", 5000), GpuStep("third", ONE, "third", 1)]
    status, state, _ = run(tmp_path / "state.json", {}, steps=long)
    assert status == running.MORE
    assert set(state.done) == {"environment", "first", "third"}
    status, state, started = run(tmp_path / "state.json", {}, steps=long)
    # One step is done however short a call is.
    assert status == running.DONE
    assert started == [ALONE, ONE]
    assert left(state, long) == 0


def test_failures_within_a_result_are_failures_of_the_run(tmp_path: Path) -> None:
    found = {"rows": [], "failed": {"sampler, wide": "RuntimeError: out of shared memory"}}
    status, state, _ = run(tmp_path / "state.json", {"second": lambda: found})
    assert status == running.FAILED
    assert state.failed == found["failed"]
    assert "second" in state.done


def test_a_run_on_another_machine_is_not_gone_on_with(tmp_path: Path) -> None:
    run(tmp_path / "state.json", {})
    with pytest.raises(OtherRun, match=r"another device \('a device', not 'b'\)"):
        run(tmp_path / "state.json", {"environment": lambda: ABOUT | {"device": "b"}})


def test_without_a_device_the_status_says_so_and_nothing_is_written(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("bench.gpu.__main__.gpu_count", lambda: 0)
    assert main(["--out", str(tmp_path / "run")]) == running.REFUSED
    assert "no CUDA device" in capsys.readouterr().err
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("option", "said"),
    [
        (["--model", "nowhere"], "must be a folder with a config.json, or one of q17, q8, tiny"),
        (["--only", "no such *"], "--only no such *: no step has such a name"),
    ],
)
def test_what_cannot_be_run_is_refused(
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    option: list[str],
    said: str,
) -> None:
    monkeypatch.setattr("bench.gpu.__main__.MADE", tmp_path / "made")
    assert main(["--device", "cpu", "--out", str(tmp_path / "run"), *option]) == running.REFUSED
    assert said in capsys.readouterr().err


def test_differences_are_counted_up_to_the_first_of_a_sample() -> None:
    truth = {"0": [1, 2, 3], "1": [4, 5, 6], "2": [7]}
    assert differences(truth, {"0": [1, 2, 3], "1": [4, 9, 9], "2": []}) == (5, 2, 0)
