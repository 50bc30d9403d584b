"""The report is one file that needs nothing else."""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest

from examples.tinymath import drafter, pictures, report
from examples.tinymath.background import Stretch
from examples.tinymath.drafter import KINDS
from examples.tinymath.records import StepRecord, StepTiming, UpdateRecord, summarize
from examples.tinymath.spans import SampleSpan
from paceline import Decision

DRAWN = (
    pictures.reward_curve,
    pictures.length_histogram,
    pictures.time_shares,
    pictures.throughput,
    pictures.timelines,
)


def record(step: int, **changes: Any) -> StepRecord:
    values: dict[str, Any] = {
        "step": step,
        "policy_version": step,
        "began": 100.0,
        "learned": UpdateRecord(0.1 * step, 0.0, 1e-4, 0.01),
        "timing": StepTiming(4.0, 2.0, 1.0),
        "lengths": (4, 16, 9),
        "truncated": 0,
        "instances": ("a", "b"),
        "spans": (SampleSpan("a", 0.0, 1.0), SampleSpan("b", 0.0, 4.0)),
        "drafted": 0,
        "accepted": 0,
        "verify_steps": 0,
        "decode_steps": 29,
        "cached": 0,
        "reused": 0,
        "migrations": 0,
        "resubmissions": 0,
    }
    return StepRecord(**(values | changes))


def written(folder: Path, records: list[StepRecord], decisions: Sequence[Decision] = ()) -> str:
    about = {"name": "<test> run", "started": "now", "model": "m", "instances": 2, "device": "cpu"}
    times = {"start_seconds": 1.0, "wall_seconds": 9.0}
    options = {"prompts": 1, "samples": 3, "pool": 5}
    summary = {**about, **times, **summarize(records, options)}
    report.write_report(folder / "r.html", records, summary, decisions)
    return (folder / "r.html").read_text()


@pytest.mark.parametrize("draw", DRAWN)
def test_pictures_are_svg_in_the_colours_of_the_page(draw: Any) -> None:
    svg = draw([record(0), record(1)])
    assert ElementTree.fromstring(svg).tag.endswith("svg")
    assert "var(--ink)" in svg or "var(--muted)" in svg
    assert not set(pictures._VARIABLES) & set(re.findall(r"#[0-9a-f]{6}", svg))


@pytest.mark.parametrize("draw", DRAWN)
def test_pictures_of_little_can_be_drawn(draw: Any) -> None:
    assert draw([record(0, learned=UpdateRecord(0.0, 0.0, 0.0, 0.0), spans=(), lengths=(1,))]).startswith(
        "<svg"
    )


def test_of_many_steps_some_are_shown() -> None:
    svg = pictures.timelines([record(step) for step in range(40)])
    shown = [int(step) for step in re.findall(r">step (\d+)<", svg)]
    assert len(shown) == pictures.MOST_ROWS
    assert (shown[0], shown[-1]) == (0, 39)


def test_the_report_is_self_contained(tmp_path: Path) -> None:
    page = written(tmp_path, [record(0), record(1)])
    fetched = re.findall(r"(?:src|href)=\"(?!#)|url\((?!#)|@import|<script|<link", page)
    assert fetched == []
    assert page.count("<svg") == 5
    assert "&lt;test&gt; run" in page


def test_speculation_has_its_columns_only_when_there_was_some(tmp_path: Path) -> None:
    assert "block eff." not in written(tmp_path, [record(0)])
    page = written(tmp_path, [record(0, drafted=10, accepted=4, verify_steps=2)])
    assert "block eff." in page
    assert "3.00" in page


def test_what_was_generated_ahead_is_drawn_and_listed(tmp_path: Path) -> None:
    assert "/ reused<" not in written(tmp_path, [record(0)])
    ahead = (Stretch("a", 1.5, 5.0, 3),)
    page = written(tmp_path, [record(0, cached=20, reused=10, background=ahead)])
    assert "/ reused<" in page
    assert "69%" in page, "20 cached of 29 tokens"
    assert pictures.timelines([record(0, background=ahead)]) != pictures.timelines([record(0)])


def test_a_bubble_is_filled_as_far_as_something_is_generated_ahead_in_it() -> None:
    assert report.filled_share([record(0)]) == 0.0
    ahead = (Stretch("a", 1.75, 6.0, 3),)
    assert report.filled_share([record(0, background=ahead)]) == pytest.approx(2.25 / 3.0)
    assert report.filled_share([record(0, spans=())]) == 0.0


def test_the_bubble_share_is_idle_over_all_instance_time() -> None:
    assert report.bubble_share([record(0)]) == pytest.approx(3.0 / 8.0)
    assert report.bubble_share([record(0, spans=())]) == 0.0


def test_a_drafter_that_learns_is_shown_with_what_became_of_its_candidates(tmp_path: Path) -> None:
    figures = {"candidate_acceptance_length": 1.4, "held_out_samples": 8}
    decisions = [
        Decision(2.0, KINDS[1], "no", 0.0, figures | {"update": 2, "current_acceptance_length": 1.5}),
        Decision(1.0, KINDS[0], "yes", 0.1, figures | {"update": 1, "current_acceptance_length": None}),
        Decision(0.0, KINDS[0], "given at the start", 0.0, {"version": 1}),
    ]
    found = drafter.comparisons(decisions)
    assert [(each.update, each.current, each.published) for each in found] == [
        (1, None, True),
        (2, 1.5, False),
    ]
    records = [
        record(0, drafter_version=1),
        record(1, drafter_version=2, eagle3_drafted=10, eagle3_accepted=4),
    ]
    page = written(tmp_path, records, decisions)
    assert "The drafter that learns" in page
    assert "version 2" in page
    assert "v2: 4 / 10" in page
    assert "The drafter that learns" not in written(tmp_path, [record(0), record(1)])
