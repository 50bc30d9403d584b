"""Calibrations as files, and the step-time model that an engine starts with."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from services.policy.calibration import calibrate
from services.policy.models import architecture_of, step_time_for
from services.policy.step_time import Architecture, StepTime, UnsupportedArchitecture
from services.policy.stored import Calibration, Subject, UnusableCalibration
from tests.unit.policy.test_calibration import BANDWIDTH, THROUGHPUT, TRUTH, swept
from tests.unit.policy.test_step_time import ARCHITECTURE, QWEN3_8B

SUBJECT = Subject(model="Qwen3/8B", machine="AMD EPYC (2nd) x8", dtype="bfloat16")


@pytest.fixture
def kept(tmp_path: Path) -> Path:
    """A calibration in bfloat16."""
    sweep = swept(TRUTH)
    fit = calibrate(ARCHITECTURE, THROUGHPUT, BANDWIDTH, sweep)
    return Calibration.of(SUBJECT, fit, sweep).save(tmp_path / "new" / "folder")


@pytest.fixture
def model(tmp_path: Path) -> Path:
    """A folder with the model's config."""
    (tmp_path / "config.json").write_text(json.dumps(QWEN3_8B))
    return tmp_path


def test_a_calibration_is_read_as_it_was_written(kept: Path) -> None:
    assert kept.name == "Qwen3-8B_AMD-EPYC-2nd-x8_bfloat16.json"
    found = Calibration.load(kept)
    assert found.subject == SUBJECT
    assert len(found.points) == len(found.predicted) > 0
    assert found.held_out.median < 0.01
    assert Calibration.load(found.save(kept.parent)) == found


def test_models_of_one_name_are_told_apart_by_their_architecture() -> None:
    one, other = ARCHITECTURE, Architecture.of(QWEN3_8B | {"num_hidden_layers": 35}, 2)
    names = {Subject.of("model", each, "cpu", "float32").file_name for each in (one, other)}
    assert len(names) == 2
    assert Subject.of("model", one, "cpu", "float32").file_name in names


def test_an_engine_starts_with_its_calibration(kept: Path, model: Path) -> None:
    step_time = step_time_for(model, "bfloat16", kept)
    assert step_time.model == Calibration.load(kept).step_time


def test_without_one_it_starts_with_a_guess(model: Path) -> None:
    step_time = step_time_for(model, "float32", None)
    assert step_time.model == StepTime.prior(architecture_of(model, "float32"))
    assert step_time.model.architecture.weight_bytes == 2 * ARCHITECTURE.weight_bytes


@pytest.mark.parametrize(("dtype", "change"), [("float32", {}), ("bfloat16", {"num_hidden_layers": 35})])
def test_a_calibration_of_something_else_is_refused(
    kept: Path, model: Path, dtype: str, change: dict[str, int]
) -> None:
    (model / "config.json").write_text(json.dumps(QWEN3_8B | change))
    with pytest.raises(UnusableCalibration, match="another model or dtype"):
        step_time_for(model, dtype, kept)


@pytest.mark.parametrize("text", ["", "{}", "[1", '{"subject": 1}'])
def test_a_file_that_is_no_calibration_is_refused(model: Path, text: str) -> None:
    path = model / "calibration.json"
    path.write_text(text)
    with pytest.raises(UnusableCalibration, match=r"calibration\.json"):
        step_time_for(model, "bfloat16", path)


def test_a_calibration_that_is_not_there_is_refused(model: Path) -> None:
    with pytest.raises(UnusableCalibration, match="absent"):
        step_time_for(model, "bfloat16", model / "absent")


@pytest.mark.parametrize("text", ["", "[]", "{}"])
def test_a_model_without_a_usable_config_is_refused(model: Path, text: str) -> None:
    (model / "config.json").write_text(text)
    with pytest.raises(UnsupportedArchitecture):
        architecture_of(model, "bfloat16")


def test_a_dtype_of_unknown_size_is_refused(model: Path) -> None:
    with pytest.raises(UnsupportedArchitecture, match="int3"):
        architecture_of(model, "int3")
