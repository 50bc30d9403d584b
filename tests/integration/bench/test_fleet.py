"""A tiny run of the fleet benchmark: a real gateway, Redis, and processes of simulated instances."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from bench.fleet.__main__ import arguments, measure, summary, table_of

_SMALL = (
    "--instances=3",
    "--samples=6",
    "--hosts=2",
    # Longer than usual.
    "--longest=3000",
    "--median=3000",
    "--batch-samples=10",
    "--idle-seconds=0.1",
)
# A checkpoint every 50 ms, or after 512 tokens.
_QUICK = ("--speed=100", "--compression=100", "--gateway-option=--journal-tokens=1")


async def test_every_sample_of_a_small_fleet_ends_whole_and_its_cost_is_measured(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("bench.fleet.__main__.FOLDER", tmp_path)
    kept: list[list[dict[str, Any]]] = []
    (row,) = await measure(arguments([*_SMALL, *_QUICK]), kept.append)
    assert kept == [[row]]
    assert (row["instances"], row["samples"], row["wrong_samples"]) == (3, 18, 0)
    assert (row["leases_lost"], row["lost_instances"]) == (0, 0)
    assert row["gateway_ms_per_sample"] > 0
    assert row["submissions"] == 2
    # Samples are reported before they end, their tokens cost 7 to 9 bytes, and each comes back once.
    assert row["partial_writes"] > 0
    assert 5 * row["tokens"] < row["result_bytes"] < row["redis_bytes"]
    table = table_of([row])
    assert [(cells[:2], len(cells)) for cells in table["rows"]] == [(("3", "18"), len(table["columns"]))]
    figures = summary([row], {"partial_writes_per_token": 1.0})
    assert figures["samples"] == 18
    assert figures["journal_writes_reduction"] == row["tokens"] / row["partial_writes"]
