"""Room for an update: what is certain to fail is refused with figures, what may run short is a warning."""

from __future__ import annotations

import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from paceline.weights import safetensors
from services.generation.config import GenerationConfig
from services.generation.weights import update_room
from services.generation.weights.update_room import (
    AdoptedDisk,
    HostMemory,
    UpdateDoesNotFit,
    WeightSizes,
    adopted_disk,
    check_host,
    check_update_room,
    host_memory,
    private_dirty,
    weight_sizes,
)
from services.platform.memory import memory_limits

GB = 10**9
SIZES = WeightSizes(model=140 * GB, tensor=2 * GB)
MEMORY = HostMemory(limit=512 * GB, serving=150 * GB, processes=8)
DISK = AdoptedDisk(Path("/adopted"), total=2000 * GB, free=1000 * GB, held=280 * GB, in_memory=False)


def test_room_for_everything_is_no_news() -> None:
    assert check_update_room(SIZES, MEMORY, None) == []
    assert check_update_room(SIZES, MEMORY, DISK) == []


def test_memory_for_the_largest_tensor_is_all_that_is_needed_beside_a_disk() -> None:
    assert check_update_room(SIZES, replace(MEMORY, limit=152 * GB), DISK) == []
    with pytest.raises(UpdateDoesNotFit) as refused:
        check_update_room(SIZES, replace(MEMORY, limit=152 * GB - 1), DISK)
    text = str(refused.value)
    assert (
        "needs 152.000 GB of memory: serving (8 processes) 150.000 GB + the largest tensor 2.000 GB" in text
    )
    assert "the limit has 152.000 GB" in text
    assert "update_room=off" in text


def test_versions_in_memory_count_as_memory() -> None:
    disk = replace(DISK, in_memory=True)
    with pytest.raises(UpdateDoesNotFit, match=r"the new version 140\.000 GB"):
        check_update_room(SIZES, replace(MEMORY, limit=291 * GB), disk)
    (warning,) = check_update_room(SIZES, replace(MEMORY, limit=292 * GB), disk)
    assert "a base of LoRA adapters 140.000 GB" in warning
    assert check_update_room(SIZES, replace(MEMORY, limit=712 * GB), disk) == []


def test_a_disk_that_can_hold_no_version_is_refused_and_one_that_is_full_is_not() -> None:
    with pytest.raises(UpdateDoesNotFit, match=r"needs 140\.000 GB of space in /adopted: the new version"):
        check_update_room(SIZES, MEMORY, replace(DISK, total=140 * GB - 1, free=0))
    (warning,) = check_update_room(SIZES, MEMORY, replace(DISK, free=0))
    assert "the one before 140.000 GB" in warning
    assert "free or held by versions has 280.000 GB" in warning


@given(
    model=st.integers(0, 1000),
    share=st.floats(0, 1),
    limit=st.integers(0, 3000),
    serving=st.integers(0, 1000),
    total=st.integers(0, 5000),
    free=st.floats(0, 1),
    in_memory=st.booleans(),
)
def test_more_room_never_turns_yes_into_no(
    model: int, share: float, limit: int, serving: int, total: int, free: float, in_memory: bool
) -> None:
    sizes = WeightSizes(model, int(share * model))
    memory = HostMemory(limit, serving, 1)
    disk = AdoptedDisk(Path("/adopted"), total, int(free * total), 0, in_memory)
    try:
        warnings = check_update_room(sizes, memory, disk)
    except UpdateDoesNotFit:
        return
    larger = replace(disk, total=total + 1, free=disk.free + 1)
    assert len(check_update_room(sizes, replace(memory, limit=limit + 1), larger)) <= len(warnings)


def test_limits_are_those_of_all_groups_above(tmp_path: Path) -> None:
    for place, name, content in (
        (".", "memory.max", "max"),
        ("pods", "memory.max", "9000"),
        ("pods/one", "memory.max", "5000\n"),
        ("memory/old", "memory.limit_in_bytes", "7000"),
    ):
        (tmp_path / place).mkdir(parents=True, exist_ok=True)
        (tmp_path / place / name).write_text(content)
    lines = ["12:cpu,cpuacct:/old", "11:memory:/old/gone", "0::/pods/one"]
    assert sorted(memory_limits(lines, tmp_path)) == [5000, 7000, 9000]
    assert memory_limits([], tmp_path) == []


def test_sizes_are_of_the_tensors_alone(tmp_path: Path) -> None:
    tensors = {"a": np.zeros((4, 8), np.float32), "b": np.zeros(8, np.int8), "c": np.zeros(0, np.float32)}
    safetensors.write(tmp_path, tensors, shard_bytes=1)
    assert weight_sizes(tmp_path) == WeightSizes(model=136, tensor=128)


def test_a_disk_is_that_of_the_nearest_folder_that_is_there(tmp_path: Path) -> None:
    version = tmp_path / "adopted" / "v00000001-aa"
    version.mkdir(parents=True)
    (version / "model.safetensors").write_bytes(b"x" * 100)
    (tmp_path / "adopted" / ".removed-aa").mkdir()
    disk = adopted_disk(tmp_path / "adopted")
    assert disk.held == 100
    assert 0 <= disk.free <= disk.total
    assert not adopted_disk(Path("/proc/self")).in_memory
    later = adopted_disk(tmp_path / "not" / "yet")
    assert (later.held, later.total) == (0, disk.total)


@pytest.mark.skipif(not os.path.ismount("/dev/shm"), reason="has no tmpfs")
def test_a_folder_on_tmpfs_is_in_memory() -> None:
    assert adopted_disk(Path("/dev/shm/paceline-none")).in_memory


def test_memory_of_children_counts() -> None:
    code = "data = b'x' * (64 << 20); print('there', flush=True); input()"
    with subprocess.Popen(
        [sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as child:
        assert child.stdin is not None
        assert child.stdout is not None
        assert child.stdout.readline() == "there\n"
        assert private_dirty(child.pid) > 64 << 20
        found = host_memory()
        # What this process has may change between the two.
        assert found.serving - private_dirty(os.getpid()) > 32 << 20
        assert found.serving < found.limit
        child.stdin.write("\n")
    assert private_dirty(child.pid) == 0


def test_an_instance_is_refused_unless_told_otherwise(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    safetensors.write(tmp_path, {"a": np.zeros((4, 8), np.float32)})
    full = AdoptedDisk(tmp_path, total=1, free=0, held=0, in_memory=False)
    monkeypatch.setattr(update_room, "adopted_disk", lambda _path: full)
    config = GenerationConfig(model=str(tmp_path), redis_url="redis://r", adopted_weights=tmp_path)
    with pytest.raises(UpdateDoesNotFit, match="space in"):
        check_host(config)
    check_host(config.model_copy(update={"update_room": "off"}))
    check_host(config.model_copy(update={"adopted_weights": None}))
