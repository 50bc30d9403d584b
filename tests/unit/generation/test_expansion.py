"""How an instance comes by a version: by what it holds, by link, by delta, by copy."""

from __future__ import annotations

import json
import shutil
import zlib
from pathlib import Path

import numpy as np
import pytest

from paceline import Adapter, WeightFolder
from paceline.weights import delta, expansion, safetensors
from paceline.weights.expansion import BaseWeights, ExpansionKind
from services.contracts.errors import DataLoss, FailedPrecondition, InvalidArgument
from services.generation.weights.adoption import AdoptedWeights
from services.generation.weights.expansion import GivenWeights, WeightReader
from services.generation.weights.staging import read_manifest
from tests.support.disks import largest_file

Made = dict[str, np.ndarray[tuple[int, ...], np.dtype[np.float32]]]


def tensors(version: int) -> Made:
    """A model of which a tenth changes with every version."""
    base = np.random.default_rng(0).standard_normal((4, 5000)).astype(np.float32)
    for each in range(1, version + 1):
        base[:, each::10] += np.float32(0.01)
    return {f"layer.{i}": row for i, row in enumerate(base)}


class Trainer:
    """A trainer's folders: versions in two shards each, and deltas between them."""

    def __init__(self, root: Path) -> None:
        self.root = root

    def full(self, version: int) -> GivenWeights:
        folder = self.root / f"v{version}"
        if not folder.is_dir():
            folder.mkdir(parents=True)
            safetensors.write(folder, tensors(version), 200_000)
        return GivenWeights(folder, safetensors.checksum(folder))

    def change(self, base: int, version: int, *, alone: bool = True) -> GivenWeights:
        """A version with its delta; `alone`: without the folder of the version."""
        old, new = self.full(base), self.full(version)
        place = self.root / f"delta-{base}-{version}"
        assert old.folder is not None
        assert new.folder is not None
        delta.write(old.folder, base, new.folder, place)
        return GivenWeights(None if alone else new.folder, new.checksum, place)


@pytest.fixture
def trainer(tmp_path: Path) -> Trainer:
    return Trainer(tmp_path / "trainer")


@pytest.fixture
def adopted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> AdoptedWeights:
    """A folder on another file system than the trainer's: nothing can be linked."""
    monkeypatch.setattr(AdoptedWeights, "links", lambda *_: False)
    monkeypatch.setattr("os.link", lambda *_: (_ for _ in ()).throw(OSError(18, "Invalid cross-device link")))
    return AdoptedWeights(tmp_path / "adopted")


@pytest.fixture
def reader(trainer: Trainer, adopted: AdoptedWeights) -> WeightReader:
    folder = trainer.full(0).folder
    assert folder is not None
    return WeightReader(folder, read_manifest(folder), None, adopted)


def place_of(adopted: AdoptedWeights, version: int, given: GivenWeights) -> Path:
    place = adopted.held(version, given.checksum)
    assert place is not None
    return place


def files(folder: Path | None) -> dict[str, bytes]:
    assert folder is not None
    return {file.name: file.read_bytes() for file in folder.iterdir()}


def spoil(folder: Path) -> None:
    """Change the last byte of a file in place."""
    file = sorted(folder.glob("*.safetensors"))[-1]
    content = file.read_bytes()
    file.write_bytes(content[:-1] + bytes([content[-1] ^ 1]))


def test_version_after_version_comes_of_deltas(
    trainer: Trainer, reader: WeightReader, adopted: AdoptedWeights
) -> None:
    reader.read(1, trainer.full(1))
    for version in (2, 3, 4):
        given = trainer.change(version - 1, version)
        staged = reader.read(version, given)
        adopted.prune(version, staged.checksum)
        full = trainer.full(version)
        assert staged.checksum == full.checksum
        assert files(place_of(adopted, version, given)) == files(full.folder)


def test_without_the_base_the_folder_is_read_and_without_a_folder_the_answer_says_what_is_there(
    trainer: Trainer, reader: WeightReader, tmp_path: Path
) -> None:
    held = trainer.full(1)
    reader.read(1, held)
    with pytest.raises(FailedPrecondition) as caught:
        reader.read(3, trainer.change(2, 3))
    assert caught.value.reason == "BASE_NOT_HELD"
    (info,) = [detail for detail in caught.value.details if hasattr(detail, "reason")]
    assert info.metadata["held"] == f"1 {held.checksum}"
    assert info.metadata["base"] == f"2 {trainer.full(2).checksum}"
    given = trainer.change(1, 3)
    other = GivenWeights(trainer.full(3).folder, given.checksum, trainer.root / "delta-2-3")
    assert reader.read(3, other).checksum == given.checksum
    with pytest.raises(FailedPrecondition, match="adopted_weights is not set"):
        WeightReader(tmp_path, reader._manifest, None, None).read(3, given)


def test_a_base_that_came_by_stream_is_as_good_as_any_other(
    trainer: Trainer, adopted: AdoptedWeights
) -> None:
    started, pushed = trainer.full(0), trainer.full(1)
    assert started.folder is not None
    assert pushed.folder is not None
    # What came by stream is in a folder that no trainer may name.
    reader = WeightReader(started.folder, read_manifest(started.folder), trainer.root, adopted)
    received = adopted.receiving("instance")
    shutil.copytree(pushed.folder, received, dirs_exist_ok=True)
    place = adopted.keep(received, 1, pushed.checksum)
    assert reader.read_received(1, place, pushed.checksum, {}).checksum == pushed.checksum
    with pytest.raises(InvalidArgument, match="must be in weights_root"):
        reader.read(1, GivenWeights(place, pushed.checksum))
    change = trainer.change(1, 2)
    assert reader.read(2, change).checksum == change.checksum
    assert files(place_of(adopted, 2, change)) == files(trainer.full(2).folder)


def test_a_base_that_is_corrupt_gives_way_to_the_folder(
    trainer: Trainer, reader: WeightReader, adopted: AdoptedWeights
) -> None:
    reader.read(1, first := trainer.full(1))
    spoil(place_of(adopted, 1, first))
    with pytest.raises(DataLoss, match="is corrupt"):
        reader.read(2, trainer.change(1, 2))
    assert adopted.held(2, trainer.full(2).checksum) is None, "nothing is left of it"
    given = GivenWeights(trainer.full(2).folder, trainer.full(2).checksum, trainer.root / "delta-1-2")
    assert reader.read(2, given).checksum == given.checksum
    assert files(place_of(adopted, 2, given)) == files(given.folder)


def test_a_delta_that_is_corrupt_or_gone_gives_way_to_the_folder(
    trainer: Trainer, reader: WeightReader
) -> None:
    reader.read(1, trainer.full(1))
    given = trainer.change(1, 2, alone=False)
    assert given.delta is not None
    file = next(given.delta.glob("*.delta"))
    file.write_bytes(file.read_bytes()[:-1])
    with pytest.raises(DataLoss, match="cannot be expanded"):
        reader.read(2, GivenWeights(None, given.checksum, given.delta))
    assert reader.read(2, given).checksum == given.checksum
    shutil.rmtree(given.delta)
    third = trainer.full(3)
    assert reader.read(3, GivenWeights(third.folder, third.checksum, given.delta)).version == 3
    with pytest.raises(InvalidArgument, match="no folder with a delta"):
        reader.read(4, GivenWeights(None, third.checksum, given.delta))


def test_a_copy_that_was_corrupted_on_disk_is_made_anew(
    trainer: Trainer, reader: WeightReader, adopted: AdoptedWeights
) -> None:
    given = trainer.full(1)
    reader.read(1, given)
    spoil(place_of(adopted, 1, given))
    assert reader.read(1, given).checksum == given.checksum
    assert files(place_of(adopted, 1, given)) == files(given.folder)


def test_weights_that_were_corrupt_when_they_came_are_not_kept(
    trainer: Trainer, reader: WeightReader, adopted: AdoptedWeights
) -> None:
    given = trainer.full(1)
    assert given.folder is not None
    spoil(given.folder)
    with pytest.raises(DataLoss):
        reader.read(1, given)
    assert adopted.held(1, given.checksum) is None
    spoil(given.folder)  # the bit turns back
    assert reader.read(1, given).checksum == given.checksum


def test_a_good_copy_is_not_given_up_for_a_bad_one_that_it_replaced(
    trainer: Trainer, reader: WeightReader, adopted: AdoptedWeights
) -> None:
    given = trainer.full(1)
    reader.read(1, given)
    place = place_of(adopted, 1, given)

    def find() -> None:
        shutil.move(place, place.with_name("bad"))
        reader.read(1, given)
        raise DataLoss("it is corrupt")

    with pytest.raises(DataLoss, match="it is corrupt"), adopted.checking(place, DataLoss):
        find()
    assert adopted.held(1, given.checksum) == place


def test_what_can_be_linked_is_not_expanded(
    trainer: Trainer, reader: WeightReader, adopted: AdoptedWeights, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.undo()
    reader.read(1, trainer.full(1))
    given = trainer.change(1, 2, alone=False)
    reader.read(2, given)
    assert given.folder is not None
    shards = sorted(given.folder.glob("*.safetensors"))
    assert len(shards) == 2
    assert all((place_of(adopted, 2, given) / shard.name).samefile(shard) for shard in shards)


def test_a_disk_that_is_full_is_named_and_keeps_nothing(
    trainer: Trainer, reader: WeightReader, adopted: AdoptedWeights, tmp_path: Path
) -> None:
    reader.read(1, trainer.full(1))
    given = trainer.change(1, 2)
    with largest_file(150_000), pytest.raises(FailedPrecondition, match="File too large") as caught:
        reader.read(2, given)
    assert caught.value.reason == "WEIGHTS_NOT_ADOPTED"
    assert [path.name[:9] for path in (tmp_path / "adopted").iterdir() if path.is_dir()] == ["v00000001"]
    assert reader.read(2, given).checksum == given.checksum


def of_an_adapter(trainer: Trainer) -> GivenWeights:
    """An adapter of one matrix of a model that has no other."""
    rng = np.random.default_rng(1)
    names = [f"base_model.model.layer.lora_{each}.weight" for each in "AB"]
    shapes = [(2, 600), (400, 2)]
    matrices = {n: rng.standard_normal(s).astype(np.float32) for n, s in zip(names, shapes, strict=True)}
    model = trainer.root / "model"
    weights = WeightFolder(trainer.root / "adapters", model=model)
    config = {"r": 2, "lora_alpha": 2, "target_modules": ["layer"]}
    base = BaseWeights(0, safetensors.checksum(model))
    folder = weights.write_adapter(1, Adapter(matrices, config), base)
    return GivenWeights(folder, expansion.checksum(folder))


def without_an_index(trainer: Trainer, *, told: bool) -> GivenWeights:
    folder = trainer.full(1).folder
    assert folder is not None
    (folder / safetensors.INDEX).unlink()
    return GivenWeights(folder, safetensors.checksum(folder) if told else "")


WAYS = {
    "copy": lambda trainer: trainer.full(2),
    "copy-without-an-index": lambda trainer: without_an_index(trainer, told=True),
    "copy-without-a-checksum": lambda trainer: without_an_index(trainer, told=False),
    "delta": lambda trainer: trainer.change(1, 2),
    "adapter": of_an_adapter,
}


class GivenUp(Exception):
    pass


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("keeps", [False, True], ids=["in-place", "kept"])
@pytest.mark.usefixtures("adopted")
def test_reading_ends_wherever_it_is_given_up_and_begins_anew(
    trainer: Trainer, tmp_path: Path, way: str, keeps: bool
) -> None:
    """Each call of `proceed` in turn is the one that ends it, until none is left to do so."""
    if way == "adapter":
        folder = trainer.root / "model"
        folder.mkdir(parents=True)
        rows = np.random.default_rng(0).standard_normal((400, 600)).astype(np.float32)
        safetensors.write(folder, {"layer.weight": rows, "norm.weight": rows[0]})
    else:
        found = trainer.full(0).folder
        assert found is not None
        folder = found
    if not keeps and way in ("delta", "adapter"):
        pytest.skip("nothing is expanded where nothing is kept")
    given = WAYS[way](trainer)
    before = trainer.full(1) if way == "delta" else None
    for last in range(1, 1000):
        # A reader and a folder that know of no attempt before.
        adopted = AdoptedWeights(tmp_path / f"adopted-{last}")
        reader = WeightReader(folder, read_manifest(folder), None, adopted if keeps else None)
        if before is not None:
            reader.read(1, before)
        calls = 0

        def proceed(last: int = last) -> None:
            nonlocal calls
            calls += 1
            if calls == last:
                raise GivenUp

        try:
            staged = reader.read(2, given, proceed)
            break
        except GivenUp:
            assert not list(tmp_path.glob("adopted-*/.taking*"))
            assert reader.read(2, given).checksum
    assert calls == last - 1
    assert calls > 1, "it is called while files are read"
    assert staged.checksum == (given.checksum or safetensors.checksum(given.folder or tmp_path))


def test_a_delta_to_more_than_the_model_has_is_refused_before_it_is_expanded(
    trainer: Trainer, reader: WeightReader, adopted: AdoptedWeights, tmp_path: Path
) -> None:
    """A tebibyte of zeros takes a gigabyte of a delta, and 4 KB where it breaks off."""
    reader.read(1, trainer.full(1))
    given = trainer.change(1, 2)
    assert given.delta is not None
    file = min(given.delta.glob("*.delta"))
    size = 1 << 40
    header = json.dumps({"layer.0": {"dtype": "U8", "shape": [size], "data_offsets": [0, size]}}).encode()
    packed = zlib.compress(len(header).to_bytes(8, "little") + header)
    code = delta.encode_raw(np.zeros(delta.PIECE_BYTES, np.uint8))
    pieces = (len(code).to_bytes(4, "little") + code) * 3
    file.write_bytes(b"PLDELTA1" + len(packed).to_bytes(4, "little") + packed + pieces)
    expansion.write(
        given.delta,
        ExpansionKind.DELTA,
        BaseWeights(1, trainer.full(1).checksum),
        [path.name for path in given.delta.iterdir() if path.name != expansion.MANIFEST],
    )
    with pytest.raises(DataLoss, match=f"leads to {size + len(header) + 8} bytes"):
        reader.read(2, given)
    assert adopted.held(2, given.checksum) is None
