"""The curves that instances start from."""

from __future__ import annotations

from services.platform.redis.registry import InstanceRecord
from services.reallocator.config import ReallocatorConfig
from services.reallocator.members import Rooflines

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
