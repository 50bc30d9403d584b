"""Documents say what the kept figures say; the quick forms fit into their time."""

from __future__ import annotations

import json
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest

from bench.measured_code import measured_by
from bench.nightly.__main__ import DOCUMENTS, JOBS, LONGER, NIGHT_MINUTES, NightlyJob, run
from bench.nightly.documents import (
    DocumentError,
    command_of,
    publish,
    published,
    reduced,
    rewritten,
    written_by_hand,
)
from bench.nightly.evidence import ANSWERS
from bench.rollout.registry import LONG_TAIL, PLAIN

_ROOT = Path(__file__).parents[3]
_ROW: dict[str, Any] = {
    "rollout_seconds": 2.0,
    "speedup_vs_plain": {"low": 1.5, "median": 2.0, "high": 2.5, "rounds": 3, "interval": False},
    "step_seconds": 3.0,
    "step_speedup_vs_plain": None,
    "push_seconds": 0.1,
    "tokens_of_step": 5000.0,
    "decode_steps_mean": 10.0,
    "decode_steps_max": 60.0,
    "acceptance_length": 4.0,
    "acceptance_rate": 0.75,
    "draft_length": 4.0,
    "coverage": None,
    "bubble_seconds_mean": 0.2,
    "bubble_seconds_max": 0.4,
    "moved_megabytes": 2.0,
    "reward": 0.5,
    "samples_differing": 0,
    "last_sample_steps": 60.0,
    "last_sample_seconds": 0.9,
}
_FIGURES = {
    "speedup_vs_plain_long_tail": 2.0,
    "speedup_vs_best_vllm_long_tail": 1.5,
    "step_time_reduction": 0.4,
    "worst_regime_vs_plain_upper": 1.0,
    "tokens_differing": 0,
}
_WHOLE: dict[str, Any] = {
    **_FIGURES,
    "goals": dict.fromkeys(_FIGURES, "missed"),
    "subjects": {
        "tinymath": {
            "figures": _FIGURES,
            "goals": dict.fromkeys(_FIGURES, "missed"),
            "rows": {LONG_TAIL: {PLAIN: _ROW, "other": _ROW}},
            "absent": {"third, long tail": {"reason": "failed", "why": "no room"}},
            "cells": [{"steps": []}],
        }
    },
    "systems": {
        name: {"about": "", "note": note} for name, note in ((PLAIN, ""), ("other", "not as published"))
    },
    "regimes": {LONG_TAIL: "to their ends"},
    "machine": {"cpus": 2, "processor": "a processor"},
    "measured_at": "2026-11-24T08:00:00+00:00",
}
_PART = "text\n<!-- figures: {} -->\nold | 1\n<!-- /figures -->\nmore\n"


def test_a_figure_that_somebody_changes_is_not_what_the_results_say() -> None:
    figures = {"whole": reduced(_WHOLE, "make bench")}
    text = rewritten(_PART.format("whole overview"), figures)
    assert "| other [1] | 2.00 (1.50 to 2.50) | 0 |" in text
    assert rewritten(text, figures) == text
    assert rewritten(text.replace("2.50", "2.60"), figures) != text.replace("2.50", "2.60")


def test_a_generated_part_has_the_figures_and_the_command_that_gave_them() -> None:
    figures = {"whole": reduced(_WHOLE, "make bench")}
    text = rewritten(_PART.format("whole overview"), figures)
    assert text.startswith("text\n<!-- figures: whole overview -->\n| rollouts")
    assert text.endswith("<!-- /figures -->\nmore\n")
    assert "old" not in text
    assert "- [1] other: not as published\n- [2] third, long tail: no figures: failed, no room" in text
    assert "| `tokens_differing` | 0 | 0 | missed |" in text
    assert "`make bench`, 2026-11-24, 2 cores of a processor" in text
    regimes = rewritten(_PART.format("whole regimes"), figures)
    assert "tinymath, long tail (to their ends):" in regimes
    assert "| plain | 2 | 2.00 (1.50 to 2.50) | 3 | - |" in regimes
    # Of other benchmarks, every single figure with its goal.
    plain = reduced({"a": 1.23456, "b": None, "rows": [1], "goals": {"a": ">= 1"}}, "make bench NAME=x")
    assert plain["figures"] == {"a": 1.23456, "b": None}
    shown = rewritten(_PART.format("x figures"), {"x": plain})
    assert "| `a` | 1.23 | >= 1 |\n| `b` | - |  |" in shown


def test_a_brief_table_has_the_systems_that_were_measured_most_often_everywhere() -> None:
    once = _ROW | {
        "speedup_vs_plain": {"low": 3.0, "median": 3.0, "high": 3.0, "rounds": 1, "interval": False}
    }
    modelled = {"a device": {"speedup_vs_plain": None, "rollout_seconds": 1.0, "ahead_share": 0.0}}
    rows = {
        "short": {PLAIN: _ROW | {"modelled": modelled}, "once": once},
        LONG_TAIL: {PLAIN: _ROW, "once": once, "long only": _ROW},
    }
    whole = _WHOLE | {"subjects": {"tinymath": {**_WHOLE["subjects"]["tinymath"], "rows": rows}}}
    figures = {"whole": reduced(whole, "make bench")}
    text = rewritten(_PART.format("whole brief"), figures)
    assert "\n| plain |" in text
    assert "once" not in text
    assert "long only" not in text
    # Goals are on the page of results.
    assert "| `tokens_differing` |" not in text
    assert "| `tokens_differing` |" in rewritten(_PART.format("whole overview"), figures)
    assert "\n| once | 3.00 | 3.00 | 0 |" in rewritten(_PART.format("whole overview"), figures)


@pytest.mark.parametrize(
    ("name", "result", "command"),
    [
        ("x", {}, "make bench NAME=x"),
        ("x", {"options": {"rounds": 3}}, 'make bench NAME=x BENCH_ARGS="--rounds 3"'),
        ("x.y", {"subjects": {"y": {}}}, "make bench NAME=x SUBJECT=y"),
        ("x.y", {"subjects": {"z": {}}}, "make bench NAME=x.y"),
    ],
)
def test_the_command_of_a_result_has_its_subject_and_rounds(
    name: str, result: dict[str, Any], command: str
) -> None:
    assert command_of(name, result) == command


def test_a_table_that_a_benchmark_has_made_is_shown_as_it_is() -> None:
    table = {"columns": ["arm", "s"], "rows": [["frozen", "1.5"], ["Sync", "2"]]}
    kept = reduced({"a": 1, "tables": {"arms": table}, "models": {"x": {"parts": [1]}}}, "make bench NAME=x")
    assert "models" not in kept
    shown = rewritten(_PART.format("x arms"), {"x": kept})
    assert "| arm | s |\n| --- | ---: |\n| frozen | 1.5 |\n| Sync | 2 |\n\n`make bench NAME=x`, " in shown
    assert "No results are kept yet" in rewritten(_PART.format("x arms"), {})
    with pytest.raises(DocumentError, match="pictures of x: there are"):
        rewritten(_PART.format("x pictures"), {"x": kept})


def test_what_was_not_measured_is_said_and_what_does_not_exist_is_refused() -> None:
    assert "No results are kept yet: `make bench NAME=x`" in rewritten(_PART.format("x figures"), {})
    with pytest.raises(DocumentError, match="pictures of x: there are"):
        rewritten(_PART.format("x pictures"), {"x": {"figures": {}}})
    with pytest.raises(DocumentError, match="does not end"):
        rewritten("<!-- figures: x figures -->\n", {})


def test_tables_of_words_and_generated_ones_are_not_written_by_hand() -> None:
    text = "| a | b |\n| --- | ---: |\n| c | 1.5 |\n\n| a |\n| --- |\n| SHA-256 |\n" + _PART.format(
        "x figures"
    )
    assert written_by_hand(text) == ["| a | b |"]


def test_answers_have_the_figures_of_many_benchmarks_each_with_its_origin() -> None:
    def fleet(instances: str) -> dict[str, Any]:
        columns = ["instances", "gateway, ms of processor time a sample", "share of a core"]
        tables = {"fleets": {"columns": columns, "rows": [["125", "9", "8"], [instances, "0.3", "0.5"]]}}
        whole = {"measured_at": "2026-11-24T08:00:00+00:00", "tables": tables}
        return {"fleet": {**reduced(whole, "make bench NAME=fleet"), "mark": "older code"}}

    text = rewritten(_PART.format("evidence answers"), fleet("1,000"))
    assert "0.3 ms a sample, 0.5 of a core | `make bench NAME=fleet`, 2026-11-24; **older code** |" in text
    assert "| 11 | no results are kept yet | `make bench NAME=migration` |" in text
    assert "| 10 | the last run has no such figure |" in rewritten(text, fleet("250"))
    shown = (_ROOT / "docs/evidence.md").read_text()
    for answer in ANSWERS:
        assert f"\n## {answer.number}. " in shown, "a section of the page discusses each answer"


def test_results_are_kept_small(tmp_path: Path) -> None:
    (tmp_path / "whole.json").write_text(json.dumps(_WHOLE))
    publish("whole", "make bench", tmp_path / "results", tmp_path)
    kept = published(tmp_path / "results")["whole"]
    assert kept["command"] == "make bench"
    assert kept["figures"] == _FIGURES
    assert "cells" not in kept["subjects"]["tinymath"]
    with pytest.raises(OSError, match="absent"):
        publish("absent", "make bench", tmp_path / "results", tmp_path)


def test_all_quick_forms_fit_into_a_night_and_every_benchmark_has_its_part() -> None:
    assert sum(job.minutes for job in JOBS) <= NIGHT_MINUTES
    text = "".join((_ROOT / document).read_text() for document in DOCUMENTS)
    for name in (*(job.name for job in JOBS), *LONGER):
        assert measured_by(name), "bench/measured_code.py names the code of each benchmark"
    for job in JOBS:
        assert f"<!-- figures: {job.name} " in text


@pytest.mark.parametrize("job", JOBS, ids=lambda job: job.name)
def test_a_benchmark_takes_the_options_of_its_quick_form(
    job: NightlyJob, monkeypatch: pytest.MonkeyPatch
) -> None:
    package = (_ROOT / job.module.replace(".", "/")).is_dir()
    module = import_module(f"{job.module}.__main__" if package else job.module)
    monkeypatch.setattr("sys.argv", [job.module, *job.options])
    parse = getattr(module, "arguments", None) or module._arguments
    assert parse() is not None


def test_a_benchmark_that_takes_too_long_is_ended(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert "took more than" in run(NightlyJob("x", "http.server", 0.01, ("--bind", "127.0.0.1", "0")))
    assert "ended with status 1" in run(NightlyJob("x", "no_such_module", 1.0))
