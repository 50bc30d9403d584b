"""The demo's tables on a terminal of 80 columns."""

from __future__ import annotations

import io
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
from rich.console import Console

pytest.importorskip("reasoning_gym")

from examples.tinymath.demo import Screen, step_tables
from examples.tinymath.options import Options
from paceline.cli.app import run


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
    tables = step_tables(records)
    assert max(len(line) for lines in tables for line in lines) <= 80
    return tables


def test_times_are_readable_and_drafts_are_left_out_where_there_were_none() -> None:
    (times,) = shown([record(), record(step=101)])
    row = next(line.split() for line in times if line.split()[:1] == ["100"])
    for value in ("0.875", "123456", "200/380/400", "123.45", "12345", "35.79", "23.45", "1.25"):
        assert value in row, "no figure is folded or cut"


def test_drafts_have_a_table_of_their_own() -> None:
    drafted = record(
        drafted=123_456, accepted=98_765, block_efficiency=4.75, cached=9, coverage=0.87, reuse=0.64
    )
    learned = record(step=101, drafter_version=12, eagle3_drafted=45_678, eagle3_accepted=23_456)
    _, drafts = shown([drafted, learned])
    assert drafts[1].split() == ["100", "98765/123456", "4.75", "87%", "64%"]
    assert drafts[2].split() == ["101", "0/0", "1.00", "0%", "0%", "v12", "23456/45678"]


def test_a_column_without_a_figure_is_left_out() -> None:
    _, drafts = shown([record(drafted=9, accepted=3)])
    assert "reused" in drafts[0]
    assert "drafter" not in drafts[0]
    assert "eagle3" not in drafts[0]


def test_without_a_terminal_each_step_is_shown_once_and_as_it_ends() -> None:
    console = Console(width=80, file=io.StringIO(), force_terminal=False)
    screen = Screen(console, Options(steps=2, prompts=2, samples=4))

    def lines() -> list[list[str]]:
        assert isinstance(console.file, io.StringIO)
        return [line.split() for line in console.file.getvalue().splitlines()]

    screen.watch(100, 3, 8)
    assert screen.awaited == "5 of 8 samples of step 100"
    screen.watch(100, 8, 8)
    assert screen.awaited == "the update of step 100"
    with screen.display:
        screen.add(record(drafted=9, accepted=3))
        assert [line[0] for line in lines()] == ["step", "100"]
        screen.add(record(step=101, drafted=9, accepted=3))
    assert [line[:1] for line in lines()] == [
        [each] if each else [] for each in ("step", "100", "101", "", "step", "100", "101")
    ]


@pytest.mark.parametrize(
    ("arguments", "status", "said"),
    [
        (["--steps=0"], 1, "--steps is 0; must be at least 1"),
        (["--samples=-1"], 1, "--samples is -1; must be at least 1"),
        (["--lr=nan"], 1, "--lr is nan"),
        (["--model=nope"], 1, "'nope' is neither a folder"),
        (["--model=."], 1, "config.json"),
        (["--out=file"], 1, "file"),
        (["--instances=0"], 2, "must be at least 1"),
        (["--device=tpu"], 2, "'auto', 'cpu', 'cuda'"),
        (["--steps=many"], 2, "--steps"),
    ],
)
def test_a_wrong_option_is_named_before_anything_starts(
    arguments: list[str],
    status: int,
    said: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "file").touch()
    assert run(["demo", *arguments]) == status
    shown = capsys.readouterr()
    assert said in shown.out + shown.err
    assert "Starting" not in shown.out
    assert sorted(path.name for path in tmp_path.iterdir()) == ["file"]


def test_help_fits_a_terminal_of_80_columns(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    assert run(["demo", "--help"]) == 0
    assert max(map(len, capsys.readouterr().out.splitlines())) <= 80


def test_help_and_wrong_options_need_no_torch() -> None:
    code = "from paceline.cli.app import run; import sys; run(['demo', '-h']); print('torch' in sys.modules)"
    root = Path(__file__).parents[3]
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=root, check=True)
    assert done.stdout.splitlines()[0].startswith("usage: paceline demo")
    assert done.stdout.splitlines()[-1] == "False"
