"""The toggle's boundary over measured points."""

from __future__ import annotations

from pathlib import Path
from xml.etree import ElementTree

import pytest

from bench.boundary import ACCEPTANCES, draw, figures, speedups, tokens
from services.policy.step_time import Architecture, StepTime
from services.policy.sweep import Point

ARCHITECTURE = Architecture(weight_bytes=1e9, kv_bytes=1e4, dense_flops=1e9, attention_flops=1e3)
MODEL = StepTime(architecture=ARCHITECTURE, throughput=2e13, bandwidth=1e12)


def swept(factor: float = 1.0) -> list[Point]:
    """A sweep of a machine whose verifying steps take `factor` times what the model says."""
    points = []
    for requests in (1, 16, 128):
        for length in (32, 256):
            for drafts in (0, 4, 8):
                rows, context = requests * (1 + drafts), requests * length
                seconds = float(MODEL.seconds(requests, rows, context)) * (factor if drafts else 1.0)
                points.append(Point(requests=requests, rows=rows, context=context, seconds=seconds))
    return points


def test_a_model_that_is_right_divides_the_points() -> None:
    found = speedups(swept(), MODEL)
    assert len(found) == 3 * 2 * 2 * len(ACCEPTANCES)
    assert all(each.measured == pytest.approx(each.predicted) for each in found)
    said = figures(found, 1e-6)
    assert (said["boundary_agreement"], said["boundary_harmful"], said["boundary_worst"]) == (1.0, 0.0, 1.0)
    assert {each.measured > 1 for each in found} == {True, False}, "the sweep has points on both sides"


def test_a_machine_that_is_slower_than_the_model_shows_what_the_toggle_would_cost() -> None:
    said = figures(speedups(swept(factor=3.0), MODEL), 0.02)
    assert said["boundary_agreement"] < 1
    assert said["boundary_harmful"] > 0
    assert 0 < said["boundary_worst"] < 1


def test_tokens_of_a_verification() -> None:
    assert tokens(1.0, 4) == 5
    assert tokens(0.5, 2) == pytest.approx(1.75)


def test_it_is_drawn_with_a_panel_for_each_length_and_acceptance(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    assert draw(speedups(swept(), MODEL), MODEL, 0.02, tmp_path / "boundary.svg")
    root = ElementTree.parse(tmp_path / "boundary.svg").getroot()
    panels = [each for each in root.iter() if each.get("id", "").startswith("axes_")]
    assert len(panels) == 2 * len(ACCEPTANCES) + 1, "and the scale of colours"
