"""Inputs and tables of the device's clock: texts of the recorded run by cell, old texts, single figures."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

pytest.importorskip("numba")

from bench.device_clock.__main__ import HALF, KeptRows, figures, halved, prepared, tables
from bench.device_clock.old_texts import written
from bench.device_clock.recording import (
    ClockedStep,
    ForkedText,
    OldText,
    OldTexts,
    recorded_texts,
    refused_share,
    with_other_noise,
)
from bench.device_clock.rows import COLUMNS, PACELINE_ROWS, STOCK_ROWS, ClockedRow
from bench.rollout.modelled import H100_8B
from bench.rollout.record import RecordedRun, RunMissingError
from bench.rollout.registry import LONG_TAIL, SMOLLM2
from bench.rollout.training import TrainedStep, Trajectory
from examples.tinymath.options import Options
from paceline import Group, SampleKey
from services.generation.engine.types import Ending, EngineRequest, Finish, SampleStep
from tests.unit.bench.steps import sample, trained


class TextEngine:
    """Draws 100 * seed + position; the runner-up is one more, and the margin is least at position 5."""

    def __init__(self, length: int) -> None:
        self._length = length
        self._waiting: list[EngineRequest] = []
        self.loaded: list[int] = []

    def add(self, request: EngineRequest) -> None:
        self._waiting.append(request)

    @property
    def has_work(self) -> bool:
        return bool(self._waiting)

    def finished_by_prefix(self, request: EngineRequest) -> Ending | None:
        return Ending(Finish.LENGTH) if len(request.prefix) >= self._length else None

    def step(self) -> list[SampleStep]:
        request = self._waiting.pop()
        positions = range(len(request.prefix), self._length)
        tokens = [100 * request.seed + each for each in positions]
        told = (
            {
                "top_token_ids": [each + 1 for each in tokens],
                "top_logprobs": [abs(each - 5) + 0.1 for each in positions],
            }
            if request.near_ties
            else {}
        )
        return [SampleStep(request.sample_id, tokens, [-1.0] * len(tokens), Finish.LENGTH, **told)]

    def apply_weights(self, tensors: Iterable[Any]) -> None:
        self.loaded.append(len(list(tensors)))


def _trained(step: int, slots: int) -> TrainedStep:
    samples = [replace(sample(slot, [1, 2], "p"), seed=10 + slot) for slot in range(slots)]
    return trained(step, [Group("p", [7, 8], slots)], samples)


def test_old_texts_have_the_runner_up_at_their_nearest_ties() -> None:
    found = written(TextEngine(9), _trained(1, 2), Options(max_tokens=9))  # type: ignore[arg-type]
    text = found[SampleKey("p", 1)]
    assert text.response.tolist() == [1100 + each for each in range(9)]
    assert [(fork.at, round(fork.margin, 1)) for fork in text.forks] == [
        (5, 0.1),
        (4, 1.1),
        (6, 1.1),
        (3, 2.1),
    ]
    for fork in text.forks:
        assert fork.response[: fork.at].tolist() == text.response[: fork.at].tolist()
        assert fork.response[fork.at] == text.response[fork.at] + 1
        assert fork.response[fork.at + 1 :].tolist() == text.response[fork.at + 1 :].tolist()


def test_without_a_recorded_run_the_command_that_records_one_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("bench.device_clock.__main__.FOLDER", tmp_path)
    with pytest.raises(RunMissingError, match="make bench SUBJECT=smollm2"):
        prepared(SMOLLM2)


def _recorded(slots: int) -> tuple[Trajectory, list[OldTexts]]:
    """Two steps of a prompt; the text before slot n of the second one is n, n, n."""
    run = Trajectory(Options(samples=slots), (_trained(0, slots), _trained(1, slots)), Path("w"))
    fork = ForkedText(1, 0.1, np.array([7, 8, 9], np.int32))
    old = {SampleKey("p", slot): OldText(np.full(3, slot, np.int32), (fork,)) for slot in range(slots)}
    return run, [{}, old]


def test_texts_to_other_noise_are_of_slots_that_the_regime_leaves_out() -> None:
    run, old = _recorded(4)
    half = halved(replace(SMOLLM2, options=run.options))
    assert (half.name, half.samples) == (HALF, 2)
    cut = RecordedRun(run, "hash").cut(half)
    texts = recorded_texts(cut, old, half)
    assert [sorted(each.responses) for each in texts] == [[(0, 0), (0, 1)]] * 2
    assert {cell: text.tolist() for cell, text in texts[1].before.items()} == {
        (0, 0): [0] * 3,
        (0, 1): [1] * 3,
    }
    assert len(texts[1].forks[0, 1]) == 1
    other = with_other_noise(texts, old, half)
    assert other is not None
    assert {cell: text.tolist() for cell, text in other[1].before.items()} == {
        (0, 0): [2] * 3,
        (0, 1): [3] * 3,
    }
    assert other[0].before == {} == other[1].forks
    assert other[1].responses is texts[1].responses
    # Both samples are 1, 2: the drafts 0 0 0 and 2 2 2 are refused at once, 1 1 1 after a token, 3 3 3 at once.
    assert refused_share(texts) == pytest.approx(2 / 3)
    assert refused_share(other) == 1.0
    assert refused_share(texts[:1]) is None
    # Three slots have no other three.
    most = replace(half, samples=3, max_tokens=2)
    texts = recorded_texts(RecordedRun(run, "hash").cut(most), old, most)
    assert [len(text) for text in texts[1].before.values()] == [2, 2, 2]
    assert with_other_noise(texts, old, most) is None


_STEP = ClockedStep(
    step=1,
    seconds=2.0,
    tokens=100,
    decode_steps=50,
    most_decode_steps=9,
    drafted=80,
    accepted=60,
    covered=90,
    whole=4.0,
)


def _rows(regime: str) -> list[ClockedRow]:
    """Rows that are 1, 2, 3, ... times as fast as plain decoding, at the pessimistic end 1, 1.5, 2, ... times."""
    stock = [row.name for row in STOCK_ROWS]
    names = ["plain", *stock, *(row.name for row in PACELINE_ROWS), "plain, one step off"]
    return [
        ClockedRow(
            regime,
            name,
            (replace(_STEP, seconds=10.0 / (1 + place), whole=20.0 / (1 + place)),),
            (replace(_STEP, seconds=10.0 / (1 + place / 2), whole=20.0 / (1 + place / 2)),),
            (10.0,),
            10.0,
        )
        for place, name in enumerate(names)
    ]


def test_single_figures_are_of_paceline_as_it_comes() -> None:
    found = figures([*_rows(LONG_TAIL), *_rows(HALF)])
    # Ten systems come before it, and vLLM's best is the one before Paceline's first row.
    assert found["speedup_vs_plain_long_tail"] == pytest.approx(11)
    assert found["low_speedup_vs_plain_long_tail"] == pytest.approx(6)
    assert found["speedup_vs_best_vllm_long_tail"] == pytest.approx(11 / 7)
    assert found["low_speedup_vs_best_vllm_long_tail"] == pytest.approx(6 / 4)
    assert found["speedup_vs_other_noise_long_tail_half"] == pytest.approx(11 / 9)
    assert found["colocated_speedup_vs_plain_long_tail"] == pytest.approx(17)
    assert found["one_step_off_speedup_long_tail"] == pytest.approx(18 / 19)
    assert found["tokens_per_step_long_tail"] == 2


def test_tables_compare_the_systems_by_regime() -> None:
    rows = [*_rows("latency-bound"), *_rows(LONG_TAIL), *_rows(HALF)]
    found = tables([row for row in rows if row.regime != HALF or row.system != "plain"], H100_8B)
    assert found["rows"]["columns"] == COLUMNS
    assert {len(line) for line in found["rows"]["rows"]} == {len(COLUMNS)}
    first = next(line for line in found["rows"]["rows"] if line[0] == LONG_TAIL)
    assert first[1:] == ["plain", "2", "0.9", "0.75", "9", "10", "1", "1", "0"]
    assert found["compared"]["columns"][1:] == ["latency-bound", LONG_TAIL, HALF]
    assert found["compared"]["rows"][:2] == [
        ["plain", "1", "1", "-"],
        ["vllm ngram, 8 drafts", *["2 (1.5 to 2)"] * 3],
    ]
    assert found["brief"]["columns"][1:] == ["latency-bound", LONG_TAIL]
    assert found["brief"]["rows"][0] == ["vllm's best method", *["7 (4 to 7)"] * 2]
    assert ["paceline", *["11 (6 to 11)"] * 2] in found["brief"]["rows"]


def test_kept_rows_are_not_computed_again(tmp_path: Path) -> None:
    path, calls = tmp_path / "rows.json", list[str]()

    def steps(name: str) -> Iterable[ClockedStep]:
        calls.append(name)
        yield replace(_STEP, covered=None)

    first = KeptRows(path)
    assert first.of("a")("x", lambda: steps("a")) == (replace(_STEP, covered=None),)
    again = KeptRows(path)
    assert again.of("a")("x", lambda: steps("not again")) == (replace(_STEP, covered=None),)
    again.of("b")("x", lambda: steps("b"))
    assert calls == ["a", "b"]
