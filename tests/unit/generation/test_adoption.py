"""Weights that instances keep, whatever becomes of the folders that they came from."""

from __future__ import annotations

import os
import shutil
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from paceline.weights import safetensors
from services.contracts.errors import DataLoss, FailedPrecondition
from services.generation.weights.adoption import AdoptedWeights
from services.generation.weights.files import WeightFile, open_weight_files
from tests.support.disks import largest_file


@pytest.fixture
def adopted(tmp_path: Path) -> AdoptedWeights:
    return AdoptedWeights(tmp_path / "adopted")


def given(folder: Path, value: float = 1.0) -> Path:
    """A folder of the SDK with two shards."""
    folder.mkdir(parents=True)
    safetensors.write(folder, {"a": np.full(4, value), "b": np.full(4, -value)}, 1)
    return folder


def shards(folder: Path) -> list[WeightFile]:
    return open_weight_files(folder, indexed=False, served=10)


def contents(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir()}


def versions(root: Path) -> list[str]:
    return sorted(path.name[:9] for path in root.iterdir() if path.name != ".lock")


def test_files_of_the_sdk_are_linked_and_stay(tmp_path: Path, adopted: AdoptedWeights) -> None:
    folder = given(tmp_path / "given")
    expected = contents(folder)
    (folder / "config.json").write_text("not weights")
    inode = (folder / "model-00001-of-00002.safetensors").stat().st_ino
    place = adopted.adopt(shards(folder), 1, "c")
    shutil.rmtree(folder)
    assert contents(place) == expected
    assert (place / "model-00001-of-00002.safetensors").stat().st_ino == inode
    assert adopted.held(1, "c") == place
    for other in ((1, "d"), (2, "c")):
        assert adopted.held(*other) is None


def test_files_that_others_may_write_again_are_copied(tmp_path: Path, adopted: AdoptedWeights) -> None:
    """`save_pretrained` writes the next version into the very files of the one before."""
    folder = given(tmp_path / "given")
    (folder / safetensors.INDEX).write_text('{"metadata": {"total_size": 64}}')
    expected = contents(folder)
    place = adopted.adopt(shards(folder), 1, "c")
    for file in folder.glob("*.safetensors"):
        file.write_bytes(b"the next version")
    assert contents(place) == expected


def test_where_no_link_can_be_made_files_are_copied(
    tmp_path: Path, adopted: AdoptedWeights, monkeypatch: pytest.MonkeyPatch
) -> None:
    def other_file_system(*_: Any) -> None:
        raise OSError(18, "Invalid cross-device link")

    monkeypatch.setattr(os, "link", other_file_system)
    folder = given(tmp_path / "given")
    expected = contents(folder)
    assert contents(adopted.adopt(shards(folder), 1, "c")) == expected


def test_of_instances_that_begin_at_once_one_takes_over(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = given(tmp_path / "given")
    linked: list[Path] = []
    link, all_there = os.link, threading.Barrier(4)

    def counted(source: Path, target: Path) -> None:
        linked.append(target)
        link(source, target)

    def adopt(_: int) -> Path:
        instance = AdoptedWeights(tmp_path / "adopted")
        all_there.wait(60)
        return instance.adopt(shards(folder), 1, "c")

    monkeypatch.setattr(os, "link", counted)
    with ThreadPoolExecutor(4) as pool:
        (place,) = set(pool.map(adopt, range(4)))
    assert len(linked) == 2
    assert contents(place) == contents(folder)


def test_a_link_to_a_file_is_followed(tmp_path: Path, adopted: AdoptedWeights) -> None:
    """Caches of hubs have links to their files."""
    blobs, folder = given(tmp_path / "blobs"), tmp_path / "snapshot"
    folder.mkdir()
    for file in blobs.iterdir():
        (folder / file.name).symlink_to(file)
    expected = contents(folder)
    place = adopted.adopt(shards(folder), 1, "c")
    shutil.rmtree(blobs)
    assert contents(place) == expected


def test_a_take_over_that_fails_leaves_nothing_and_says_why(tmp_path: Path, adopted: AdoptedWeights) -> None:
    folder = given(tmp_path / "given")
    (folder / safetensors.INDEX).unlink()
    # The last file is too large for the disk.
    large = tmp_path / "large"
    large.mkdir()
    safetensors.write(large, {"c": np.ones(1000)})
    (large / "model.safetensors").rename(folder / "model-00003-of-00003.safetensors")
    first, _, last = found = shards(folder)
    with largest_file(first.bytes), pytest.raises(FailedPrecondition, match="File too large") as caught:
        adopted.adopt(found, 1, "c")
    assert first.bytes < last.bytes
    assert caught.value.reason == "WEIGHTS_NOT_ADOPTED"
    assert versions(tmp_path / "adopted") == []
    # What an instance left that died in the middle is no obstacle either.
    for name in (".taking-" + adopted.adopt(shards(folder), 1, "c").name, ".removed-x"):
        (tmp_path / "adopted" / name).mkdir()
        (tmp_path / "adopted" / name / "model.safetensors").write_bytes(b"a part")
    adopted.hide(1)
    assert contents(adopted.adopt(shards(folder), 1, "c")) == contents(folder)
    assert versions(tmp_path / "adopted") == ["v00000001"]


def test_the_served_version_the_one_before_and_later_ones_stay(
    tmp_path: Path, adopted: AdoptedWeights
) -> None:
    for version in (1, 3, 4, 5, 7):
        adopted.adopt(shards(given(tmp_path / f"given-{version}", version)), version, f"c{version}")
    aborted = adopted.adopt(shards(tmp_path / "given-1"), 5, "of an attempt that was aborted")
    adopted.prune(5, "c5")
    assert versions(tmp_path / "adopted") == ["v00000004", "v00000005", "v00000007"]
    assert not aborted.exists()


def test_a_folder_that_cannot_be_pruned_costs_no_update(
    tmp_path: Path, adopted: AdoptedWeights, monkeypatch: pytest.MonkeyPatch
) -> None:
    def read_only(*_: Any) -> None:
        raise OSError(30, "Read-only file system")

    for version in (1, 2, 3):
        adopted.adopt(shards(given(tmp_path / f"given-{version}", version)), version, "c")
    monkeypatch.setattr(Path, "rename", read_only)
    adopted.prune(3, "c")
    assert versions(tmp_path / "adopted") == ["v00000001", "v00000002", "v00000003"]
    monkeypatch.undo()
    adopted.prune(3, "c")
    assert versions(tmp_path / "adopted") == ["v00000002", "v00000003"]


def test_what_was_given_up_takes_no_room_beside_what_is_received(
    tmp_path: Path, adopted: AdoptedWeights
) -> None:
    adopted.adopt(shards(given(tmp_path / "superseded")), 1, "c")
    adopted.hide(1)
    folder = adopted.receiving("one")
    assert [place.name for place in (tmp_path / "adopted").iterdir() if place.name != ".lock"] == [
        folder.name
    ]


def test_what_is_hidden_is_adopted_anew(tmp_path: Path, adopted: AdoptedWeights) -> None:
    place = adopted.adopt(shards(given(tmp_path / "bad")), 1, "c")
    adopted.hide(1)
    assert not place.exists()
    good = given(tmp_path / "good", 2.0)
    assert contents(adopted.adopt(shards(good), 1, "c")) == contents(good)


def test_a_file_that_grows_meanwhile_is_not_taken_over(tmp_path: Path, adopted: AdoptedWeights) -> None:
    folder = given(tmp_path / "given")
    (folder / safetensors.INDEX).unlink()
    found = shards(folder)
    with found[-1].path.open("ab") as file:
        file.truncate(1 << 40)
    with pytest.raises(DataLoss, match="was changed after it was checked"):
        adopted.adopt(found, 1, "c")
    assert versions(tmp_path / "adopted") == []
