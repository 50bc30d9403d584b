"""The table of the whole follows from its cells: paired ratios, their spread, goals, Markdown."""

from __future__ import annotations

import json
from dataclasses import asdict, replace
from typing import Any

import pytest

from bench.rollout.cells import AbsentReason, CellName, InstanceLoad, StepFigures, TableCell
from bench.rollout.markdown import goal_table, modelled_table, overview, regime_table
from bench.rollout.modelled import H100_8B, ModelledStep
from bench.rollout.registry import EVERYTHING, FOR_H100, LONG_TAIL, PLAIN
from bench.rollout.table import (
    GOALS,
    PairedRatio,
    headline,
    line_of,
    paired,
    rollout_seconds,
    row,
    rows,
    step_seconds,
    table_of,
    verdicts,
)
from bench.simulate.verification import DraftKind

_STEP = StepFigures(
    step=0,
    rollout_seconds=1.0,
    push_seconds=0.1,
    tokens=100,
    length_max=60,
    decode_steps_mean=20.0,
    decode_steps_max=60,
    drafted=40,
    accepted=30,
    verified=10,
    covered=80,
    bubble_seconds_mean=0.2,
    bubble_seconds_max=0.4,
    moved_bytes=2e6,
    reward=0.5,
    compared=100,
    differing=0,
    planned={},
    last_steps=60,
    last_seconds=0.9,
    modelled={H100_8B: ModelledStep(0.5, 0.1, 0.2)},
)


def _cell(system: str, seconds: float, number: int = 0, regime: str = LONG_TAIL, **changes: Any) -> TableCell:
    """Return a cell whose first step takes far longer than the two that count."""
    slow = replace(_STEP, rollout_seconds=50.0, **changes)
    step = replace(_STEP, rollout_seconds=seconds, **changes)
    return TableCell(CellName(system, regime, number), "key", 1.0, 9.0, (slow, step, step))


def test_the_first_step_does_not_count_and_a_step_has_the_update() -> None:
    cell = _cell(PLAIN, 3.0)
    assert rollout_seconds(cell) == 3.0
    assert step_seconds(cell) == 4.0


def test_ratios_are_of_the_same_round_and_few_rounds_have_a_range() -> None:
    plain = {0: _cell(PLAIN, 4.0), 1: _cell(PLAIN, 8.0), 2: _cell(PLAIN, 1.0)}
    ours = {0: _cell(EVERYTHING, 2.0), 1: _cell(EVERYTHING, 2.0)}
    found = paired(plain, ours, rollout_seconds)
    assert found == PairedRatio(2.0, 3.0, 4.0, 2)
    assert not found.is_interval
    assert paired(plain, {7: _cell(EVERYTHING, 1.0)}, rollout_seconds) is None


def test_fifteen_rounds_have_the_interval_between_the_fourth_and_the_twelfth() -> None:
    plain = {place: _cell(PLAIN, place + 1.0) for place in range(15)}
    ours = {place: _cell(EVERYTHING, 1.0) for place in range(15)}
    found = paired(plain, ours, rollout_seconds)
    assert found == PairedRatio(4.0, 8.0, 12.0, 15)
    assert found.is_interval


def test_the_columns_of_a_row_are_of_the_steps_that_count() -> None:
    found = row({0: _cell(EVERYTHING, 2.0)}, {0: _cell(PLAIN, 4.0)})
    assert (found["rollout_seconds"], found["step_seconds"]) == (2.0, 3.0)
    assert (found["acceptance_length"], found["acceptance_rate"], found["draft_length"]) == (4.0, 0.75, 4.0)
    assert found["tokens_of_step"] == 100
    assert (found["coverage"], found["moved_megabytes"]) == (0.8, 2.0)
    assert (found["last_sample_steps"], found["last_sample_seconds"]) == (60, 0.9)
    assert found["step_speedup_vs_plain"] == PairedRatio(5 / 3, 5 / 3, 5 / 3, 1)
    # A system that pre-generates nothing has no coverage, and one that drafts nothing no acceptance.
    bare = row({0: _cell(PLAIN, 4.0, covered=None, drafted=0, accepted=0, verified=0)}, None)
    assert (bare["coverage"], bare["acceptance_rate"], bare["draft_length"]) == (None, None, None)
    assert bare["speedup_vs_plain"] is None


def test_the_line_is_plain_decodings_and_others_are_measured_against_it() -> None:
    # A step takes 0.1 s and a row 0.01 s; the second instance of each step is the slower one.
    short = (InstanceLoad(5, 20, 0.7), InstanceLoad(10, 30, 1.3))
    long = (InstanceLoad(5, 200, 2.5), InstanceLoad(10, 400, 5.0))
    ours = (InstanceLoad(4, 60, 9.0), InstanceLoad(6, 40, 9.0))
    cells = [
        _cell(PLAIN, 1.3, regime="short", loads=short),
        _cell(PLAIN, 5.0, loads=long),
        _cell(EVERYTHING, 1.25, loads=ours, samples=4),
    ]
    line = line_of(table_of(cells))
    assert line == pytest.approx((0.1, 0.01))
    found = rows(table_of(cells))
    assert found["short"][PLAIN]["line_share"] == pytest.approx(1.0)
    assert found[LONG_TAIL][EVERYTHING]["line_share"] == pytest.approx(0.8)
    assert found[LONG_TAIL][EVERYTHING]["tokens_per_decode_step"] == 100 / (20.0 * 4)


def test_without_loads_of_different_shapes_there_is_no_line() -> None:
    assert line_of(table_of([_cell(PLAIN, 1.0)])) is None
    same = (InstanceLoad(5, 20, 0.7), InstanceLoad(10, 40, 1.4))
    assert line_of(table_of([_cell(PLAIN, 1.4, loads=same)])) is None
    assert rows(table_of([_cell(PLAIN, 1.4, loads=same)]))[LONG_TAIL][PLAIN]["line_share"] is None


def _table(ours: float, differing: int = 0) -> list[TableCell]:
    return [
        _cell(PLAIN, 6.0),
        _cell("a", 5.0),
        _cell("b", 4.0),
        _cell(EVERYTHING, ours, differing=differing),
        _cell(PLAIN, 2.0, regime="compute-bound"),
        _cell(EVERYTHING, 2.5, regime="compute-bound"),
        TableCell(
            CellName("c", LONG_TAIL, 0), "key", 1.0, 9.0, (), AbsentReason.PACKAGE_MISSING, "no compiler"
        ),
    ]


def test_the_headline_is_against_plain_and_against_the_best_of_vllm() -> None:
    table = table_of(_table(2.0))
    assert set(table[LONG_TAIL]) == {PLAIN, "a", "b", EVERYTHING}, "a cell without figures is no row"
    found = headline(table, ["a", "b", "c"], [EVERYTHING])
    assert found["speedup_vs_plain_long_tail"] == 3.0
    assert found["speedup_vs_best_vllm_long_tail"] == 2.0
    assert found["step_time_reduction"] == pytest.approx(1 - 3 / 7)
    assert found["worst_regime_vs_plain_upper"] == 0.8
    assert (found["tokens_differing"], found["paired_rounds"]) == (0, 1)
    said = verdicts(found)
    assert said["speedup_vs_plain_long_tail"] == said["speedup_vs_best_vllm_long_tail"] == "met"
    assert said["worst_regime_vs_plain_upper"] == "missed"
    assert said.keys() == {*GOALS, "tokens_differing"}


def test_a_sample_that_differs_counts_in_every_step_and_a_missing_cell_is_no_zero() -> None:
    found = headline(table_of(_table(2.0, differing=1)), ["a"], [EVERYTHING])
    assert found["tokens_differing"] == 3
    assert verdicts(found)["tokens_differing"] == "missed"
    # A lossy system's samples are others by design.
    assert headline(table_of(_table(2.0, differing=1)), ["a"], [])["tokens_differing"] is None
    empty = headline(table_of([_cell(PLAIN, 6.0)]), ["a"], [EVERYTHING])
    assert empty["speedup_vs_plain_long_tail"] is None
    assert verdicts(empty)["speedup_vs_plain_long_tail"] == "not measured"
    assert verdicts(empty)["tokens_differing"] == "not measured"


def test_markdown_has_a_row_for_each_system_and_says_why_one_is_missing() -> None:
    cells = _table(2.0)
    made = rows(table_of(cells))
    figures = headline(table_of(cells), ["a", "b"], [EVERYTHING])
    lines = overview(made, {})
    assert (
        lines[0]
        == f"| rollouts, times as fast as plain vLLM | {LONG_TAIL} | compute-bound | samples that differ |"
    )
    assert f"| {EVERYTHING} | 3.00 | 0.80 | 0 |" in lines
    assert "| a | 1.20 | - | 0 |" in lines
    goals = goal_table(figures, verdicts(figures))
    assert "| `speedup_vs_plain_long_tail` | 3 | 3.0 at least | met |" in goals
    assert all(line.count("|") == lines[0].count("|") for line in lines)


def _modelled(system: str, seconds: float, number: int = 0) -> TableCell:
    return _cell(system, 9.0, number, modelled={H100_8B: ModelledStep(seconds, 0.5, 0.75)})


def test_modelled_speeds_are_compared_like_measured_ones_and_the_best_of_vllm_is_the_best_there() -> None:
    cells = [
        _modelled(PLAIN, 3.0),
        _modelled("a", 2.0),
        _modelled("b", 2.5),
        _modelled(EVERYTHING, 1.0),
        _modelled(FOR_H100, 0.5),
    ]
    found = headline(table_of(cells), ["a", "b"], [])
    assert found["modelled_speedup_vs_plain_long_tail"] == 3.0
    assert found["modelled_speedup_vs_best_vllm_long_tail"] == 2.0
    assert found["modelled_planned_speedup_vs_plain_long_tail"] == 6.0
    assert found["speedup_vs_plain_long_tail"] == 1.0
    made = rows(table_of(cells))
    ours = made[LONG_TAIL][EVERYTHING]["modelled"][H100_8B]
    # 0.75 s of generating ahead in 0.5 s of idle time and the trainer's second, a third of plain's rollout.
    assert (ours["rollout_seconds"], ours["ahead_share"]) == (1.0, 0.5)
    assert f"| {EVERYTHING} | 3.00 |" in modelled_table(made, {})
    heads = regime_table(made[LONG_TAIL], {})[0]
    assert f"| {H100_8B}, modelled rollout | {H100_8B}, of plain |" in heads
    # Results from before devices were modelled have no such columns.
    for each in made[LONG_TAIL].values():
        del each["modelled"]
    assert "modelled" not in regime_table(made[LONG_TAIL], {})[0]


def _band(
    system: str, rollout: float, pessimistic: float | None, passes: float = 0.0, **changes: Any
) -> TableCell:
    times = {H100_8B: ModelledStep(rollout, 0.5, 0.75, pessimistic, passes)}
    return _cell(system, 9.0, modelled=times, **changes)


_OFF = {DraftKind.LOOKUPS: 0.0, DraftKind.MODELS: 0.42}


def test_a_modelled_speed_has_a_band_and_the_error_of_replays_of_its_kind() -> None:
    cells = [
        _band(PLAIN, 6.0, 6.0, drafted=0),
        _band(EVERYTHING, 2.0, 4.0),
        _band("with a draft model", 3.0, 5.0, passes=1.0),
    ]
    made = rows(table_of(cells), _OFF)
    table = modelled_table(made, {})
    assert f"| {PLAIN} | 1.00 (1.00 to 1.00) |" in table
    assert f"| {EVERYTHING} | 3.00 (1.50 to 3.00) |" in table
    assert "| with a draft model | 2.00 (1.20 to 2.00, replays 42% off) |" in table
    assert " 3.00 (1.50 to 3.00) |" in next(
        line for line in regime_table(made[LONG_TAIL], {}) if line.startswith(f"| {EVERYTHING} ")
    )
    # A table that is read back from JSON says the same.
    plain = json.loads(json.dumps(made, default=asdict))
    assert modelled_table(plain, {}) == table
    found = headline(table_of(cells), [], [])
    assert found["modelled_low_speedup_vs_plain_long_tail"] == 1.5
    assert found["modelled_speedup_vs_plain_long_tail"] == 3.0


def test_a_cell_from_before_there_was_a_band_has_none() -> None:
    new = _band(EVERYTHING, 2.0, 4.0)
    data = new.to_json()
    for step in data["steps"]:
        for times in step["modelled"].values():
            del times["pessimistic"], times["passes"]
    old = TableCell.from_json(json.loads(json.dumps(data)))
    assert old.steps[0].modelled[H100_8B] == ModelledStep(2.0, 0.5, 0.75)
    for cell in (old, new):
        made = rows(table_of([_band(PLAIN, 6.0, None), cell]), _OFF)
        assert f"| {EVERYTHING} | 3.00 |" in modelled_table(made, {})
    assert TableCell.from_json(json.loads(json.dumps(new.to_json()))) == new
