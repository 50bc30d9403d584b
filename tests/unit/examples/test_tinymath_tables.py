"""The demo's tables on a terminal of 80 columns."""

from __future__ import annotations

import io
from types import SimpleNamespace
from typing import Any, cast

import pytest
from rich.console import Console

pytest.importorskip("reasoning_gym")

from examples.tinymath.demo import step_tables


def record(**changed: Any) -> Any:
    values: dict[str, Any] = {
        "step": 100,
        "reward": 0.875,
        "tokens": 123_456,
        "lengths": [100, 200, 400],
        "timing": SimpleNamespace(rollout=123.45, update=23.45, push=1.25),
        "tokens_per_second": 12_345.0,
        "bubbles": {"instance-0": 12.34, "instance-1": 23.45},
        "drafted": 0,
        "accepted": 0,
        "block_efficiency": 1.0,
        "cached": 0,
        "coverage": 0.0,
        "reuse": 0.0,
        "drafter_version": 0,
        "eagle3_drafted": 0,
        "eagle3_accepted": 0,
    }
    return cast(Any, SimpleNamespace(**values | changed))


def shown(records: list[Any]) -> list[list[str]]:
    tables = []
    for table in step_tables(records):
        console = Console(width=80, file=io.StringIO())
        console.print(table)
        assert isinstance(console.file, io.StringIO)
        tables.append(console.file.getvalue().splitlines())
    return tables


def test_times_are_readable_and_drafts_are_left_out_where_there_were_none() -> None:
    (times,) = shown([record(), record(step=101)])
    assert max(map(len, times)) <= 80
    row = next(line.split() for line in times if line.split()[:1] == ["100"])
    for value in ("0.875", "123456", "200/380/400", "123.45", "12345", "12.34", "23.45", "1.25"):
        assert value in row, "no figure is folded or cut"


def test_drafts_have_a_table_of_their_own() -> None:
    drafted = record(
        drafted=123_456, accepted=98_765, block_efficiency=4.75, cached=9, coverage=0.87, reuse=0.64
    )
    learned = record(step=101, drafter_version=12, eagle3_drafted=45_678, eagle3_accepted=23_456)
    _, drafts = shown([drafted, learned])
    assert max(map(len, drafts)) <= 80
    assert drafts[1].split() == ["100", "98765/123456", "4.75", "87%", "64%"]
    assert drafts[2].split() == ["101", "0/0", "1.00", "0%", "0%", "v12", "23456/45678"]
