"""Cells have an order and keys, a regime cuts the run, and vLLM draws the recorded tokens."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict, replace
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from bench.rollout.cells import (
    AbsentReason,
    CellFolder,
    CellName,
    TableCell,
    cell_key,
    code_hash,
    planned,
    seconds_left,
)
from bench.rollout.measuring import stock_figures
from bench.rollout.modelled import InstanceWork, modelled
from bench.rollout.record import RecordedRun
from bench.rollout.registry import ARCTIC, PACELINE, PLAIN, REGIMES, SUBJECTS, SYSTEMS, Regime, StockSystem
from bench.rollout.session import last_line
from bench.rollout.stock_engine import StockMeasurement
from bench.rollout.systems import System
from bench.rollout.table import update_of
from bench.rollout.told_tokens import ToldTokens, padded, told
from bench.rollout.training import TrainedStep, Trajectory
from examples.tinymath.options import Options
from examples.tinymath.train import plan
from paceline import Group
from services.generation.engine.step_log import LoggedStep
from tests.unit.bench.steps import rewarded, sample, trained


def test_a_kept_cell_is_found_and_a_broken_file_is_none(tmp_path: Path) -> None:
    name, folder = CellName("vllm suffix", "long tail", 2), CellFolder(tmp_path / "cells")
    cell = TableCell(name, "key", 1.5, 20.0, (), AbsentReason.PACKAGE_MISSING, "no compiler")
    assert folder.find(name) is None
    folder.keep(cell)
    assert folder.find(name) == cell
    path = tmp_path / "cells" / name.file
    assert json.loads(path.read_text())["absent"] == "package missing"
    path.write_text(path.read_text()[:-20])
    assert folder.find(name) is None


def test_code_changes_a_key_and_files_that_measure_nothing_do_not(tmp_path: Path) -> None:
    (tmp_path / "one.py").write_text("a")
    (tmp_path / "table.py").write_text("b")
    before = code_hash([tmp_path], without=[tmp_path / "table.py"])
    (tmp_path / "table.py").write_text("c")
    assert code_hash([tmp_path], without=[tmp_path / "table.py"]) == before
    (tmp_path / "one.py").write_text("b")
    assert code_hash([tmp_path], without=[tmp_path / "table.py"]) != before
    assert cell_key("a", "b") != cell_key("ab")
    systems = [system.setup for system in SYSTEMS.values()]
    assert len({cell_key(each) for each in systems}) == len(systems)


def test_plain_leads_and_every_other_round_goes_backwards() -> None:
    names = planned(["a", PLAIN, "b"], ["x", "y"], 2)
    assert [each.system for each in names if each.round == 0] == [PLAIN, "a", "b"] * 2
    assert [each.system for each in names if each.round == 1] == ["b", "a", PLAIN] * 2
    assert len(set(names)) == len(names)


def test_the_time_that_is_left_is_that_of_like_cells() -> None:
    left = [CellName("a", "x", 1), CellName("b", "x", 0)]
    assert seconds_left(left, {}) == 180
    assert seconds_left(left, {CellName("a", "x", 0): 10.0, CellName("c", "x", 0): 30.0}) == 10 + 20


def test_the_registry_is_what_the_issue_asks_for() -> None:
    options = SUBJECTS["tinymath"].options
    assert (options.steps >= 12, options.pool >= 64) == (True, True)
    seen = [problem.id for problems in plan(options) for problem in problems]
    assert min(seen.count(each) for each in set(seen)) >= 3, "several later steps see a prompt again"
    assert {name for name, system in SYSTEMS.items() if system.quick} == {
        PLAIN,
        "vllm ngram",
        "vllm suffix",
        "paceline",
    }
    papers = {"bubblespec eq 2", "spec-rl", "efficientrollout", "rlhfspec", "respec"}
    assert papers < SYSTEMS.keys()
    others = {"bubblespec eq 2", "spec-rl", "paceline coupled_history"}
    assert {name for name, system in SYSTEMS.items() if not system.recorded} == others
    assert all(SYSTEMS[name].note for name in others)
    suffix = SYSTEMS["vllm suffix"].setup
    assert isinstance(suffix, StockSystem)
    assert suffix.needs == ARCTIC


def test_the_update_is_a_quarter_of_plain_decodings_step() -> None:
    update = update_of(3.0)
    assert update / (3.0 + update) == pytest.approx(0.25)


def test_the_last_line_that_says_anything_is_the_reason() -> None:
    assert last_line(RuntimeError("Traceback\n  a\nOSError: no room\n\n")) == "RuntimeError: OSError: no room"
    assert last_line(ValueError()) == "ValueError: "


def _step() -> TrainedStep:
    kept = [
        sample(slot, [slot] * length, prompt) for prompt in ("p", "q") for slot, length in ((0, 3), (1, 9))
    ]
    return trained(0, [Group("p", [1], 2), Group("q", [1], 2)], kept)


def test_a_regime_cuts_samples_and_tokens() -> None:
    run = RecordedRun(Trajectory(Options(samples=2, max_tokens=10), (_step(),), Path("last")), "hash")
    few = run.cut(Regime("few", "", 1))
    assert [group.samples for group in few.steps[0].groups] == [1, 1]
    assert {(key.prompt_id, key.slot) for key in few.steps[0].samples} == {("p", 0), ("q", 0)}
    assert (few.options.samples, few.options.max_tokens) == (1, 10)
    short = run.cut(Regime("short", "", 8, 4))
    assert sorted(len(each.token_ids) for each in short.steps[0].samples.values()) == [3, 3, 4, 4]
    assert (short.options.samples, short.options.max_tokens) == (2, 4)
    assert all(REGIMES[name] for name in SUBJECTS["tinymath"].regimes)


def test_drafts_hold_as_far_as_they_agree_with_the_record() -> None:
    window = np.array([[5, 6, 7, 8], [5, 6, 7, 8], [5, 6, 7, 8], [5, -1, -1, -1]])
    drafts = padded(np.array([5, 6, 9, 5, 6, 7, 9]), [3, 3, 0, 1], 3)
    assert drafts.tolist() == [[5, 6, 9], [5, 6, 7], [-2, -2, -2], [9, -2, -2]]
    tokens, held = told(window, drafts)
    assert tokens.tolist() == [[5, 6, 7, -1], [5, 6, 7, 8], [5, -1, -1, -1], [5, -1, -1, -1]]
    assert held.tolist() == [2, 3, 0, 0]


def _batch(ids: Sequence[str], lengths: Sequence[int]) -> SimpleNamespace:
    prompts = np.full(8, 4)
    return SimpleNamespace(
        req_ids=list(ids), num_prompt_tokens=prompts, num_tokens_no_spec=prompts + np.resize(lengths, 8)
    )


def test_every_request_draws_its_own_recorded_token_at_its_own_position() -> None:
    tokens = ToldTokens()
    tokens.begin({"a": [1, 2, 3], "b": [7, 8]}, 2)
    drawn = torch.full((2, 1), 99, dtype=torch.int32)
    tokens._replace(_batch(["b", "a"], [1, 2]), drawn, None)
    assert drawn.tolist() == [[8], [3]]
    # The batch changes, and the next step verifies drafts.
    drawn = torch.full((2, 3), 99, dtype=torch.int32)
    metadata = SimpleNamespace(draft_token_ids=torch.tensor([1, 9, 7]), num_draft_tokens=[2, 1])
    tokens._replace(_batch(["a", "b"], [0, 0]), drawn, metadata)
    assert drawn.tolist() == [[1, 2, -1], [7, 8, -1]]
    assert (tokens.counts.drafted, tokens.counts.accepted, tokens.counts.verified) == (3, 2, 2)


def test_the_figures_of_stock_engines_are_of_the_slower_one() -> None:
    fast = StockMeasurement(
        responses={"0/p/0": [0] * 3, "0/p/1": [1] * 9},
        decode_steps={"0/p/0": 3, "0/p/1": 5},
        ended={"0/p/0": 11.0, "0/p/1": 12.0},
        began=10.0,
        drafted=8,
        accepted=4,
        verified=2,
    )
    slow = replace(
        fast,
        responses={"0/q/0": [0] * 3, "0/q/1": [1] * 8},
        decode_steps={"0/q/0": 3, "0/q/1": 9},
        ended={"0/q/0": 14.0, "0/q/1": 16.0},
        began=10.5,
    )
    work = [
        InstanceWork([LoggedStep(0.0, 2, rows, 0, 30) for rows in given]) for given in ((9, 2), (9, 2, 2))
    ]
    tasks = rewarded(lambda name: float(name == "p"))
    ngram = StockSystem("vllm ngram", "", {"method": "ngram"})
    found = stock_figures(_step(), [fast, slow], 0.5, ngram, work, tasks)
    assert found.modelled == modelled(work)
    # Without drafts vLLM schedules ahead, and the host costs nothing.
    plain = stock_figures(_step(), [fast, slow], 0.5, StockSystem(PLAIN, ""), work, tasks).modelled
    assert plain == modelled(work, host_hidden=True)
    assert all(each.pessimistic == each.rollout for each in plain.values())
    assert (found.samples, found.loads) == (4, ((2, 11, 2.0), (3, 13, 5.5)))
    assert (found.rollout_seconds, found.push_seconds) == (6.0, 0.5)
    assert (found.bubble_seconds_mean, found.bubble_seconds_max) == (2.0, 4.0)
    assert (found.last_steps, found.last_seconds) == (9, 5.5)
    assert (found.decode_steps_mean, found.decode_steps_max) == (5.0, 9)
    assert (found.drafted, found.accepted, found.verified) == (16, 8, 4)
    assert (found.tokens, found.reward) == (23, 0.5)
    # One response lacks its last token.
    assert (found.differing, found.compared) == (1, 3 + 9 + 3 + 9)


def test_each_row_of_the_leave_one_out_table_differs_from_everything_in_one_thing() -> None:
    rows = [system.setup for name, system in SYSTEMS.items() if name.startswith("without ")]
    assert len(rows) == 8
    for row in rows:
        assert isinstance(row, System)
        changed = {name for name in asdict(PACELINE) if getattr(row, name) != getattr(PACELINE, name)}
        assert changed - {"name", "about"}, row.name
        assert len(changed) == 3, changed
