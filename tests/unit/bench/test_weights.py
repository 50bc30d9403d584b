"""Pure parts of the weights benchmark: the figures of its rows, and the sizes of its models."""

from __future__ import annotations

from typing import Any

import pytest

from bench.weights.__main__ import arguments, summary
from bench.weights.fleet import FOLDER, STREAM
from bench.weights.models import shape_of


def transfer(transport: str, megabytes: int, instances: int, ratio: float) -> dict[str, Any]:
    return {
        "transport": transport,
        "megabytes": megabytes,
        "instances": instances,
        "vs_copy_and_check": ratio,
    }


def test_the_summary_has_the_largest_model_and_one_instance() -> None:
    rows = [
        transfer(FOLDER, 100, 1, 9.0),
        transfer(FOLDER, 1000, 4, 8.0),
        transfer(FOLDER, 1000, 1, 1.4),
        transfer(STREAM, 1000, 1, 1.6),
    ]
    assert summary(rows) == {"folder_vs_copy": 1.4, "stream_vs_copy": 1.6}
    assert summary(rows[:2]) == {"folder_vs_copy": None, "stream_vs_copy": None}
    assert summary([]) == {"folder_vs_copy": None, "stream_vs_copy": None}


@pytest.mark.parametrize("megabytes", [100, 300, 1000])
def test_a_model_is_about_as_large_as_asked(megabytes: int) -> None:
    hidden, layers = shape_of(megabytes)
    assert 4 * (12 * hidden**2 * layers + 4096 * hidden) == pytest.approx(megabytes * 1e6, rel=0.1)


def test_sizes_are_given_by_commas() -> None:
    given = arguments(["--sizes=1,2"])
    assert (given.sizes, given.fleets) == ([1, 2], [1, 2, 4])
