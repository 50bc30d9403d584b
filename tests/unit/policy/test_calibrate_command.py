"""`paceline calibrate` around a measurement: what it keeps, shows and refuses."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from paceline.cli import calibrate as command
from paceline.cli.app import run
from services.policy.calibration import calibrate
from services.policy.stored import Calibration
from tests.unit.policy.test_calibration import BANDWIDTH, THROUGHPUT, TRUTH, swept
from tests.unit.policy.test_step_time import ARCHITECTURE, QWEN3_8B
from tests.unit.policy.test_stored import SUBJECT


@pytest.fixture
def model(tmp_path: Path) -> Path:
    """A folder with a model's config."""
    folder = tmp_path / "model"
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(QWEN3_8B))
    return folder


def measures(monkeypatch: pytest.MonkeyPatch, noise: float) -> None:
    """Let the command measure a machine like the model, with noise."""

    def measured(*_: Any) -> Any:
        sweep = swept(TRUTH, noise)
        return SUBJECT, sweep, calibrate(ARCHITECTURE, THROUGHPUT, BANDWIDTH, sweep)

    monkeypatch.setattr(command, "_measure", measured)


def test_a_good_fit_is_shown_and_kept_with_its_picture(
    monkeypatch: pytest.MonkeyPatch, model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    measures(monkeypatch, 0.03)
    assert run(["calibrate", "--model", str(model), "--out", str(tmp_path / "out")]) == 0
    kept = tmp_path / "out" / SUBJECT.file_name
    assert Calibration.load(kept).subject == SUBJECT
    assert "<svg" in kept.with_suffix(".svg").read_text()
    shown = capsys.readouterr().out
    assert "held-out points" in shown
    assert shown.count("%") >= swept(TRUTH).held_out.sum()


def test_a_bad_fit_is_refused_and_not_kept(
    monkeypatch: pytest.MonkeyPatch, model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    measures(monkeypatch, 0.8)
    assert run(["calibrate", "--model", str(model), "--out", str(tmp_path / "out")]) == 1
    assert not list((tmp_path / "out").glob("*.json"))
    assert "not kept: step times held out from the fit are off by median" in capsys.readouterr().err


def test_how_bad_a_fit_may_be_can_be_said(
    monkeypatch: pytest.MonkeyPatch, model: Path, tmp_path: Path
) -> None:
    measures(monkeypatch, 0.8)
    limits = ["--most-median", "100", "--most-p90", "100"]
    assert run(["calibrate", "--model", str(model), "--out", str(tmp_path / "out"), *limits]) == 0


def test_a_model_that_cannot_be_calibrated_is_refused_before_anything_is_started(
    monkeypatch: pytest.MonkeyPatch, model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    def started(*_: Any) -> Any:
        raise AssertionError("an engine was started")

    monkeypatch.setattr(command, "_measure", started)
    (model / "config.json").write_text(json.dumps(QWEN3_8B | {"num_experts": 8}))
    assert run(["calibrate", "--model", str(model), "--out", str(tmp_path / "out")]) == 2
    assert "mixture of experts" in capsys.readouterr().err
