"""Share of memory in use, from the files of control groups."""

from __future__ import annotations

from pathlib import Path

import pytest

from services.platform.memory import memory_share, own_memory_share


def _group(folder: Path, limit: str, used: int, droppable: int, first: bool = False) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    names = ("memory.limit_in_bytes", "memory.usage_in_bytes") if first else ("memory.max", "memory.current")
    for name, value in zip(names, (limit, str(used)), strict=True):
        (folder / name).write_text(f"{value}\n")
    entry = "total_inactive_file" if first else "inactive_file"
    (folder / "memory.stat").write_text(f"anon 5\n{entry} {droppable}\n")


def test_pages_that_can_be_dropped_are_not_in_use(tmp_path: Path) -> None:
    _group(tmp_path / "pod/one", "1000", 900, 400)
    assert memory_share(["0::/pod/one"], tmp_path) == pytest.approx(0.5)


def test_the_fullest_of_nested_groups_counts(tmp_path: Path) -> None:
    _group(tmp_path / "pod", "2000", 1900, 0)
    _group(tmp_path / "pod/one", "1000", 500, 0)
    assert memory_share(["0::/pod/one"], tmp_path) == pytest.approx(0.95)


def test_control_groups_of_the_first_version(tmp_path: Path) -> None:
    _group(tmp_path / "memory/pod", "1000", 800, 100, first=True)
    assert memory_share(["4:cpu,memory:/pod", "3:pids:/pod"], tmp_path) == pytest.approx(0.7)


def test_no_limit_is_no_share(tmp_path: Path) -> None:
    _group(tmp_path / "pod", "max", 900, 0)
    assert memory_share(["0::/pod"], tmp_path) == 0
    assert memory_share([], tmp_path) == 0
    assert 0 <= own_memory_share() < 1
