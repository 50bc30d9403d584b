"""Two ranks of a trainer write one version: the files of a single process, or none at all."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from paceline import WeightFolder
from paceline.weights import safetensors
from paceline.weights.safetensors import Entry
from tests.support.ranks_of_a_trainer import RANKS, SHARD_BYTES, whole_tensors

WAIT = 150.0
Pushes = dict[str, str]
"""Errors of the pushes by their names; "" of one that succeeded."""


@pytest.fixture(scope="module")
def ranks(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[Pushes]]:
    """Folder of two ranks after all of their pushes, and what each says of these. Rank 1 died in the last one."""
    folder = tmp_path_factory.mktemp("ranks")
    (folder / "model").mkdir()
    (folder / "model" / "config.json").write_text("{}")
    command = [sys.executable, "-m", "tests.support.ranks_of_a_trainer"]
    with (folder / "log").open("wb") as log:
        processes = [
            subprocess.Popen([*command, str(rank), str(folder)], stdout=subprocess.PIPE, stderr=log)
            for rank in range(RANKS)
        ]
        try:
            told = [process.communicate(timeout=WAIT)[0] for process in processes]
        finally:
            for process in processes:
                process.kill()
                process.wait()
    assert [process.returncode for process in processes] == [0, 9], (folder / "log").read_text()[-4000:]
    return folder, [json.loads(each.splitlines()[-1]) for each in told]


def content(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in sorted(folder.iterdir())}


def test_the_files_are_those_of_one_process(ranks: tuple[Path, list[Pushes]], tmp_path: Path) -> None:
    folder, (found, _) = ranks
    alone = WeightFolder(tmp_path, folder / "model", shard_bytes=SHARD_BYTES).write(1, whole_tensors())
    expected = content(alone)
    assert len(expected) > RANKS + 2
    assert found["whole"] == found["again"] == ""
    assert content(folder / "run" / "v00000001") == expected
    assert content(folder / "run" / "v00000003") == expected


def test_a_rank_that_fails_leaves_no_version(ranks: tuple[Path, list[Pushes]]) -> None:
    folder, (found, other) = ranks
    assert "RANK_LOST" in found["full"]
    assert "rank 1 could not write its files: OSError(28, 'No space left on device')" in found["full"]
    assert "No space left on device" in other["full"]
    assert "RANK_LOST" not in other["full"]
    assert all("rank 1 has tensors of other names" in each["other"] for each in (found, other))
    assert "rank 0 gave the push up" in other["given_up"]
    assert sorted(path.name for path in (folder / "run").iterdir()) == ["v00000001", "v00000003"]


def test_a_rank_that_dies_ends_the_others_with_an_error(ranks: tuple[Path, list[Pushes]]) -> None:
    assert "AbortedError RANK_LOST" in ranks[1][0]["dead"]


@given(st.lists(st.integers(0, 100), min_size=1, max_size=40), st.integers(1, 200))
def test_a_plan_has_every_tensor_once_in_order_and_no_file_too_large(sizes: list[int], most: int) -> None:
    def unused() -> None:
        raise AssertionError("a plan loads nothing")

    entries = [
        Entry(f"t{number}", "U8", (size,), size, unused)  # type: ignore[arg-type]
        for number, size in enumerate(sizes)
    ]
    header = 128 << 10
    files = safetensors.plan(entries, header + most)
    assert [entry for file in files for entry in file] == entries
    for file in files:
        assert len(file) == 1 or sum(entry.size for entry in file) <= most
