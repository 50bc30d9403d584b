"""Deltas between versions of the weights: they come through bit for bit, or not at all."""

from __future__ import annotations

import json
import shutil
import zlib
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from paceline import types as t
from paceline.weights import delta, expansion, safetensors
from paceline.weights.expansion import ExpansionKind
from paceline.weights.folder import WeightFolder
from tests.support.disks import largest_file

WIDTHS = st.sampled_from(["<u1", "<u2", "<u4", "<u8"])


@st.composite
def pairs(draw: st.DrawFn) -> tuple[np.ndarray[Any, Any], np.ndarray[Any, Any]]:
    """Two arrays of bits, NaN of every payload included, of which a drawn share differs by a drawn size."""
    kind = np.dtype(draw(WIDTHS))
    length = draw(st.integers(0, 2000))
    chance = np.random.default_rng(draw(st.integers(0, 1 << 32)))
    base = np.frombuffer(chance.bytes(length * kind.itemsize), kind)
    changed = chance.random(length) < draw(st.sampled_from([0.0, 0.001, 0.1, 0.5, 1.0]))
    bits = draw(st.integers(0, 8 * kind.itemsize - 1))
    moved = (np.frombuffer(chance.bytes(length * 8), "<i8") >> (63 - bits)).astype(kind)
    return base, np.where(changed, base + moved, base).astype(kind)


@given(pairs())
def test_any_bits_come_through(pair: tuple[np.ndarray[Any, Any], np.ndarray[Any, Any]]) -> None:
    base, new = pair
    code = delta.encode(base, new)
    assert len(code) <= new.nbytes + 1, "no code is longer than the values themselves"
    assert delta.decode(code, base).tobytes() == new.tobytes()


@given(pairs(), st.data())
def test_a_code_that_was_changed_or_cut_is_refused_or_has_the_same_length(
    pair: tuple[np.ndarray[Any, Any], np.ndarray[Any, Any]], data: st.DataObject
) -> None:
    """The checksums of files find what is left: nothing else may come of it than an error or as many values."""
    base, new = pair
    code = bytearray(delta.encode(base, new))
    if data.draw(st.booleans()):
        code[data.draw(st.integers(0, len(code) - 1))] ^= data.draw(st.integers(1, 255))
    else:
        del code[data.draw(st.integers(0, len(code) - 1)) :]
    with suppress(ValueError):
        assert len(delta.decode(bytes(code), base)) == len(base)


def test_few_changes_take_few_bytes() -> None:
    """A bfloat16 step of 1 in the last place at 1 of 50 numbers: entropy is 0.16 bits a number."""
    chance = np.random.default_rng(0)
    base = chance.integers(0, 1 << 16, 1 << 20, np.uint16)
    step = np.where(chance.random(len(base)) < 0.02, chance.choice([-1, 1], len(base)), 0)
    code = delta.encode(base, base + step.astype(np.uint16))
    assert len(code) < 0.2 / 16 * base.nbytes


def model(seed: int) -> dict[str, torch.Tensor]:
    """Tensors of many dtypes and shapes; every value of a seed differs from another seed's, except `same`."""
    made = torch.Generator().manual_seed(seed)
    weight = torch.randn(300, 70, generator=made)
    return {
        "bf16": weight.to(torch.bfloat16),
        "f16": weight.half(),
        "f32": weight.clone(),
        "f64": weight.double(),
        "ints": torch.randint(0, 100, (5, 3), generator=made),
        "bools": torch.rand(77, generator=made) < 0.5,
        "scalar": torch.tensor(float(seed)),
        "empty": torch.ones(0, 3),
        "same": torch.arange(9.0),
        "nan": torch.tensor([0x7FC00001 + seed, 0x7F800001], dtype=torch.int32).view(torch.float32),
    }


def written(folder: Path, tensors: Mapping[str, Any], shard_bytes: int = 200_000) -> Path:
    folder.mkdir(parents=True)
    safetensors.write(folder, tensors, shard_bytes)
    return folder


def contents(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir()}


@pytest.fixture
def folders(tmp_path: Path) -> tuple[Path, Path, Path]:
    """A base, the version after it with one tensor less and two of other shapes and names, and the delta."""
    base, new = model(0), model(1)
    new["reshaped"] = new.pop("f16").reshape(-1)
    base["reshaped"] = base["f16"]
    old, later = written(tmp_path / "v1", base), written(tmp_path / "v2", new, 150_000)
    delta.write(old, 1, later, tmp_path / "delta")
    return old, later, tmp_path / "delta"


def expanded(base: Path, change: Path, target: Path) -> dict[str, bytes]:
    target.mkdir()
    delta.expand(base, change, target)
    return contents(target)


def test_a_version_comes_of_its_delta_byte_for_byte(tmp_path: Path, folders: tuple[Path, Path, Path]) -> None:
    base, new, change = folders
    manifest = expansion.read(change)
    assert manifest is not None
    assert manifest.kind is ExpansionKind.DELTA
    assert (manifest.base.version, manifest.base.checksum) == (1, safetensors.checksum(base))
    assert expansion.checksum(change) == safetensors.checksum(new)
    assert manifest.bytes == sum(
        len(content) for name, content in contents(change).items() if name in manifest.files
    )
    assert expanded(base, change, tmp_path / "made") == contents(new)


@settings(max_examples=8, deadline=None)
@given(pieces=st.integers(1, 100), threads=st.integers(1, 3))
def test_pieces_of_any_size_make_the_same_version(
    tmp_path_factory: pytest.TempPathFactory, pieces: int, threads: int
) -> None:
    root = tmp_path_factory.mktemp("pieces")
    base, new = written(root / "v1", model(0)), written(root / "v2", model(1))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(delta, "PIECE_BYTES", 8 * 50 * pieces)
        delta.write(base, 1, new, root / "delta", threads)
        assert expanded(base, root / "delta", root / "made") == contents(new)


@pytest.mark.parametrize("spoil", ["cut", "changed", "longer", "removed", "manifest"])
def test_a_corrupt_delta_is_refused(tmp_path: Path, folders: tuple[Path, Path, Path], spoil: str) -> None:
    base, _, change = folders
    for number, file in enumerate(sorted(change.glob("*.delta"))):
        content, target = file.read_bytes(), tmp_path / f"made-{number}"
        for place in (3, 20, len(content) // 2, len(content) - 1):
            if spoil == "cut":
                file.write_bytes(content[:place])
            elif spoil == "changed":
                file.write_bytes(content[:place] + bytes([content[place] ^ 1]) + content[place + 1 :])
            elif spoil == "longer":
                file.write_bytes(content + b"x")
            elif spoil == "removed":
                file.unlink(missing_ok=True)
            else:
                (change / expansion.MANIFEST).write_text(
                    '{"format": 1, "kind": "delta", "base": [], "files": {}}'
                )
            with pytest.raises(
                OSError if spoil == "removed" else ValueError, match=r"corrupt|trunc|code|delta"
            ):
                expanded(base, change, target)
            shutil.rmtree(target)
        file.write_bytes(content)


@pytest.mark.parametrize("end", [8.0, True])
def test_offsets_that_equal_integers_and_are_none_are_refused(
    tmp_path: Path, folders: tuple[Path, Path, Path], end: object
) -> None:
    base, _, change = folders
    first = min(change.glob("*.delta"))
    header = json.dumps({"w": {"dtype": "U8", "shape": [8], "data_offsets": [0, end]}}).encode()
    packed = zlib.compress(len(header).to_bytes(8, "little") + header)
    first.write_bytes(b"PLDELTA1" + len(packed).to_bytes(4, "little") + packed)
    with pytest.raises(ValueError, match="must be integers"):
        expanded(base, change, tmp_path / "made")


def test_a_manifest_may_name_files_of_its_folder_only(tmp_path: Path) -> None:
    assert expansion.read(tmp_path) is None
    text = (
        '{"format": %d, "kind": "delta", "base": {"version": 1, "checksum": "c"}, '
        '"files": {"%s": {"bytes": %s, "sha256": ""}}}'
    )
    for version, name, size, complaint in (
        (1, "../x", "1", "no file name"),
        (2, "x", "1", "format is 2"),
        (1, "x", "1e999", "no integer"),
        (1, "x", "true", "no integer"),
    ):
        (tmp_path / expansion.MANIFEST).write_text(text % (version, name, size))
        with pytest.raises(ValueError, match=complaint):
            expansion.read(tmp_path)


def test_another_base_gives_other_weights_and_their_checksum_shows_it(
    tmp_path: Path, folders: tuple[Path, Path, Path]
) -> None:
    _, new, change = folders
    other = written(tmp_path / "other", model(5))
    try:
        made = expanded(other, change, tmp_path / "made")
    except ValueError:
        return
    assert made != contents(new)


def test_a_full_disk_leaves_no_delta(tmp_path: Path, folders: tuple[Path, Path, Path]) -> None:
    base, new, _ = folders
    with largest_file(30_000), pytest.raises(OSError, match="File too large"):
        delta.write(base, 1, new, tmp_path / "full")
    assert not (tmp_path / "full").exists()


def test_folders_without_checksums_have_no_delta(tmp_path: Path, folders: tuple[Path, Path, Path]) -> None:
    base, new, _ = folders
    (base / safetensors.INDEX).write_text("{}")
    with pytest.raises(ValueError, match="no index with checksums"):
        delta.write(base, 1, new, tmp_path / "none")
    assert not (tmp_path / "none").exists()


def published(version: int, checksum: str) -> t.Versions:
    return t.Versions(version, 0, "", checksum, "", ())


def moved(count: int) -> dict[str, Any]:
    """A model of which so many numbers differ from those of any other count."""
    weight = np.zeros(100_000, np.float32)
    weight[:count] = count
    return {"w": weight}


def test_a_version_goes_with_a_delta_where_the_published_one_is_here_and_it_pays(tmp_path: Path) -> None:
    (tmp_path / "model").mkdir()
    root = tmp_path / "weights"
    weights = WeightFolder(root, tmp_path / "model", deltas=True)
    first, second = weights.write(1, moved(0)), weights.write(2, moved(10))
    checksum = safetensors.checksum(first)
    change = weights.write_delta(published(1, checksum), second)
    assert change == root / "delta-00000002"
    assert expanded(first, change, tmp_path / "made") == contents(second)
    assert weights.write_delta(published(1, checksum), second) == change, "an attempt that is repeated"
    for other in (
        published(1, "index-sha256:of another run"),
        published(0, checksum),
        published(2, checksum),
    ):
        assert weights.write_delta(other, second) is None
    assert WeightFolder(root, tmp_path / "model").write_delta(published(1, checksum), second) is None
    noise = {"w": np.random.default_rng(0).standard_normal(100_000).astype(np.float32)}
    assert weights.write_delta(published(1, checksum), weights.write(3, noise)) is None, "it would not pay"
    with largest_file(100):
        assert weights.write_delta(published(1, checksum), second) is None, "the disk is full"
    assert sorted(path.name for path in root.iterdir()) == [
        "delta-00000002",
        *(f"v0000000{i}" for i in (1, 2, 3)),
    ]


def test_deltas_are_pruned_as_versions_are(tmp_path: Path) -> None:
    (tmp_path / "model").mkdir()
    weights = WeightFolder(tmp_path / "weights", tmp_path / "model", deltas=True)
    folder = weights.write(1, moved(0))
    for version in range(2, 6):
        before = published(version - 1, safetensors.checksum(folder))
        folder = weights.write(version, moved(version))
        assert weights.write_delta(before, folder)
    weights.prune()
    left = sorted(path.name for path in (tmp_path / "weights").iterdir())
    assert left == ["delta-00000004", "delta-00000005", "v00000004", "v00000005"]
