"""A tiny cell of the benchmark of the whole: a stock vLLM engine that is told what to draw."""

from __future__ import annotations

from pathlib import Path

import pytest

from bench.rollout import stock_engine
from bench.rollout.cells import StepFigures
from bench.rollout.measuring import measure
from bench.rollout.modelled import DEVICES, StepReader
from bench.rollout.registry import SYSTEMS
from bench.rollout.stock_engine import StockEngine, StockSetup
from bench.rollout.training import TrainedStep, Trajectory
from bench.worker import serve
from examples.tinymath.options import MODEL, Options
from paceline import Group
from tests.support.engine_process import EngineProcess
from tests.unit.bench.steps import named, rewarded, sample

# Of two samples one repeats itself, and one ends early by the end token.
_RESPONSES = {"p": [5, 6, 7, 8] * 8, "q": [9, 30, 11, 2]}


def _step(number: int) -> TrainedStep:
    return TrainedStep(
        step=number,
        groups=tuple(Group(name, [1, 20, 21, 22, 23], 1) for name in _RESPONSES),
        samples=named([sample(0, tokens, name) for name, tokens in _RESPONSES.items()]),
        weights=MODEL,
        rollout_seconds=1.0,
        update_seconds=1.0,
        push_seconds=1.0,
        reward=0.0,
        clip_fraction=0.0,
        moved_kl=0.0,
    )


class ForkedEngine(StockEngine):
    """An engine whose process has vLLM imported already."""

    def __init__(self, setup: StockSetup) -> None:
        self._forked = EngineProcess(serve, stock_engine._build, (setup,), core=setup.core)
        self.pipe = self._forked.pipe

    def close(self) -> None:
        self._forked.__exit__(None, None, None)


def test_a_stock_engine_gives_the_recorded_tokens_and_drafts_save_steps(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("bench.rollout.measuring.curriculum_of", lambda model: rewarded(lambda name: 1.0))
    monkeypatch.setattr("bench.rollout.measuring.StockEngine", ForkedEngine)
    run = Trajectory(Options(samples=1, max_tokens=32), (_step(0), _step(1)), MODEL)
    told = list[StepFigures]()
    found = measure(SYSTEMS["vllm ngram"].setup, run, MODEL, 1, 0.0, tmp_path, told.append)
    assert told == list(found)
    assert [step.differing for step in found] == [0, 0]
    assert [step.tokens for step in found] == [36, 36]
    for step in found:
        assert step.accepted > 8, "a response that repeats itself is what n-grams find"
        assert step.decode_steps_max < 32
        assert step.last_steps == step.decode_steps_max
        assert step.push_seconds > 0
    logged = StepReader(tmp_path / "steps" / "vllm-0.jsonl").since()
    assert sum(each.drafted for each in logged) == sum(step.drafted for step in found)
    for device, table in DEVICES.items():
        seconds = sum(table.steps.seconds(each.samples, each.rows, each.context) for each in logged)
        assert sum(step.modelled[device].rollout for step in found) == pytest.approx(seconds)
        assert all(step.modelled[device].ahead == 0 for step in found)
