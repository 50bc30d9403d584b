"""The curves that instances start from."""

from __future__ import annotations

from pathlib import Path

import pytest

from services.platform.registry import InstanceRecord
from services.policy.stored import UnusableCalibration
from services.reallocator.config import ReallocatorConfig
from services.reallocator.models import Rooflines

TINYMATH = "examples/tinymath/model"


def record(name: str, model: str = TINYMATH, device: str = "cpu", most: int = 32) -> InstanceRecord:
    return InstanceRecord("generation", name, model=model, device=device, max_running=most)


def test_equals_share_a_curve_and_others_do_not() -> None:
    rooflines = Rooflines(ReallocatorConfig())
    first = rooflines(record("a"))
    assert rooflines(record("b")) is first
    assert rooflines(record("c", device="cuda")) is not first
    assert rooflines(record("d", most=64)) is not first
    assert len(first.curve().seconds) == 32


def test_a_model_that_cannot_be_looked_at_has_a_curve_all_the_same() -> None:
    seconds = Rooflines(ReallocatorConfig())(record("a", model="/nowhere")).curve().seconds
    assert list(seconds) == sorted(seconds)


def test_a_calibration_that_cannot_be_read_is_said_at_the_start(tmp_path: Path) -> None:
    with pytest.raises(UnusableCalibration):
        Rooflines(ReallocatorConfig(calibration=tmp_path / "none.json"))
