"""The log of an engine's steps: a line a step, of what vLLM schedules, and no harm where it cannot be written."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from services.generation.engine.step_log import LoggedStep, StepLog


class _Scheduler:
    """Schedules what it is given, and counts it as computed, as vLLM does."""

    def __init__(self) -> None:
        self.requests = {
            "a": SimpleNamespace(num_computed_tokens=0),
            "b": SimpleNamespace(num_computed_tokens=7),
        }

    def schedule(self, tokens: dict[str, int], drafts: dict[str, list[int]], *, quick: bool = True) -> Any:
        for name, count in tokens.items():
            self.requests[name].num_computed_tokens += count
        return SimpleNamespace(
            num_scheduled_tokens=tokens,
            total_num_scheduled_tokens=sum(tokens.values()),
            scheduled_spec_decode_tokens=drafts,
            quick=quick,
        )


def test_a_step_is_a_line_with_its_samples_tokens_and_context(tmp_path: Path) -> None:
    scheduler, path = _Scheduler(), tmp_path / "steps" / "i.jsonl"
    times = iter([10.0, 11.0])
    StepLog(scheduler, path, clock=lambda: next(times))
    # A prompt of 5 tokens, beside a sample of 8 tokens that verifies a draft of 3.
    output = scheduler.schedule({"a": 5, "b": 4}, {"b": [1, 2, 3]}, quick=False)
    assert not output.quick
    # Nothing to do is no step.
    scheduler.schedule({}, {})
    # All of the draft was rejected.
    scheduler.requests["b"].num_computed_tokens -= 3
    scheduler.schedule({"a": 1, "b": 1}, {})
    assert [LoggedStep.of_line(line) for line in path.read_text().splitlines()] == [
        LoggedStep(10.0, 2, 9, 3, 5 + 8),
        LoggedStep(11.0, 2, 2, 0, 6 + 9),
    ]


def test_a_log_that_is_full_ends_and_the_engine_goes_on() -> None:
    full = Path("/dev/full")
    if not full.exists():
        pytest.skip("this machine has no device that is always full")
    scheduler = _Scheduler()
    StepLog(scheduler, full)
    for _ in range(3):
        assert scheduler.schedule({"a": 1}, {}).total_num_scheduled_tokens == 1


def test_a_log_that_cannot_be_made_is_an_error_at_once(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(OSError, match="file"):
        StepLog(_Scheduler(), tmp_path / "file" / "i.jsonl")
