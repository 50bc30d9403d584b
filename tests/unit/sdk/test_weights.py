"""Weight files: what is written is what safetensors reads."""

from __future__ import annotations

import hashlib
import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from paceline import WeightFolder
from paceline.weights import safetensors


def written(
    folder: Path, tensors: safetensors.Tensors, shard_bytes: int = safetensors.SHARD_BYTES
) -> dict[str, Any]:
    """Write a folder, and return what safetensors reads from its files."""
    folder.mkdir()
    safetensors.write(folder, tensors, shard_bytes)
    found: dict[str, Any] = {}
    for path in sorted(folder.glob("*.safetensors")):
        found |= load_file(path)
    return found


def numbered(count: int, size: int = 1000) -> Iterator[tuple[str, Any]]:
    """Pairs of names and float32 arrays of `size` values."""
    for number in range(count):
        yield f"layer.{number}", np.full(size, number, np.float32)


def test_files_read_back_equal(tmp_path: Path) -> None:
    torch.manual_seed(0)
    tensors = {
        "bf16": torch.randn(3, 5).to(torch.bfloat16),
        "f32": torch.randn(4, 2, 2),
        "f16": torch.randn(7).half(),
        "transposed": torch.randn(3, 5).T,
        "i64": torch.arange(4),
        "bool": torch.tensor([True, False, True]),
        "scalar": torch.tensor(2.5),
        "empty": torch.zeros(0, 3),
        "grad": torch.nn.Parameter(torch.randn(2)),
    }
    read = written(tmp_path / "new", tensors)
    assert read.keys() == tensors.keys()
    for name, tensor in tensors.items():
        assert read[name].dtype == tensor.dtype
        assert torch.equal(read[name], tensor), name


def test_numpy_arrays_are_written_too(tmp_path: Path) -> None:
    array = np.arange(6, dtype=np.float32).reshape(2, 3)
    read = written(tmp_path / "new", {"a": array, "t": array.T, "s": np.float32(1).reshape(())})
    assert torch.equal(read["a"], torch.from_numpy(array))
    assert torch.equal(read["t"], torch.from_numpy(array).T)
    assert read["s"].shape == ()


def test_a_dtype_that_the_format_lacks_is_named(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"'c' has dtype complex64"):
        written(tmp_path / "new", {"c": torch.zeros(1, dtype=torch.complex64)})


def test_shards_of_an_iterator_stay_below_the_limit_and_the_index_tells_where_each_tensor_is(
    tmp_path: Path,
) -> None:
    # Room for the header and two tensors.
    limit = (128 << 10) + 9000
    read = written(tmp_path / "new", numbered(5), limit)
    assert {name: tensor.tolist() for name, tensor in read.items()} == {
        name: array.tolist() for name, array in numbered(5)
    }
    index = json.loads((tmp_path / "new" / safetensors.INDEX).read_bytes())
    names = [f"model-{number:05d}-of-00003.safetensors" for number in (1, 2, 3)]
    assert sorted(path.name for path in (tmp_path / "new").iterdir()) == [*names, safetensors.INDEX]
    assert index["weight_map"] == {f"layer.{number}": names[number // 2] for number in range(5)}
    assert index["metadata"]["total_size"] == 20000
    for name, told in index["metadata"]["shards"].items():
        content = (tmp_path / "new" / name).read_bytes()
        assert told["bytes"] == len(content) <= limit
        header = 8 + int.from_bytes(content[:8], "little")
        assert told["sha256"] == hashlib.sha256(content[header:] + content[:header]).hexdigest()


def test_a_tensor_above_the_limit_and_more_names_than_a_header_holds_get_shards_of_their_own(
    tmp_path: Path,
) -> None:
    written(tmp_path / "large", numbered(3), 1)
    assert len(list((tmp_path / "large").glob("*.safetensors"))) == 3
    read = written(tmp_path / "many", numbered(3000, size=1))
    assert {name: float(tensor) for name, tensor in read.items()} == {f"layer.{n}": n for n in range(3000)}
    assert len(list((tmp_path / "many").glob("*.safetensors"))) == 2


@pytest.mark.parametrize(
    ("tensors", "complaint"),
    [
        ([*numbered(2), *numbered(1)], "'layer.0' came twice"),
        ([], "no tensors"),
        ({"n" * (1 << 17): np.ones(1)}, "has a name of 131072 characters"),
    ],
)
def test_tensors_that_cannot_be_one_model_are_refused(
    tmp_path: Path, tensors: safetensors.Tensors, complaint: str
) -> None:
    with pytest.raises(ValueError, match=complaint):
        written(tmp_path / "new", tensors)
    assert not (tmp_path / "new" / safetensors.INDEX).exists()


MEMORY = """
import sys
from pathlib import Path
import numpy as np
from paceline.weights import safetensors

def kilobytes(file, *names):
    lines = dict(line.split(":", 1) for line in open(f"/proc/self/{file}") if ":" in line)
    return sum(int(lines[name].split()[0]) for name in names)

def private():
    return kilobytes("smaps_rollup", "Private_Clean", "Private_Dirty")

def tensors():
    for number in range(40):
        most.append(private())
        # Transposed, so that it is copied to be written.
        yield f"layer.{number}", np.full((1024, 2048), number, np.float32).T

folder = Path(sys.argv[1])
folder.mkdir()
safetensors.write(folder, [("warm", np.ones(1))])
(folder / safetensors.INDEX).unlink()
(folder / "model.safetensors").unlink()
most, before = [], private()
open("/proc/self/clear_refs", "w").write("5")
peak = kilobytes("status", "VmHWM")
safetensors.write(folder, tensors(), 100 << 20)
print(max(most) - before, kilobytes("status", "VmHWM") - peak)
"""


def test_a_model_is_written_with_one_tensor_in_memory(tmp_path: Path) -> None:
    """40 tensors of 8 MiB: 320 MiB. A tensor and its copy are 16."""
    # What is freed goes back at once: glibc keeps or returns twice 8 MiB by a margin of a few bytes.
    environment = {**os.environ, "MALLOC_MMAP_THRESHOLD_": str(1 << 20)}
    ended = subprocess.run(
        [sys.executable, "-c", MEMORY, tmp_path / "new"],
        capture_output=True,
        text=True,
        check=True,
        env=environment,
    )
    private, peak = map(int, ended.stdout.split())
    assert private < 8 << 10, "between tensors, none is held"
    assert peak < 40 << 10, "kilobytes beyond what the process had"
    assert len(list((tmp_path / "new").glob("*.safetensors"))) == 4


def test_the_checksum_is_that_of_the_index_where_it_has_those_of_the_files(tmp_path: Path) -> None:
    written(tmp_path / "new", numbered(2))
    index = (tmp_path / "new" / safetensors.INDEX).read_bytes()
    assert safetensors.checksum(tmp_path / "new") == f"index-sha256:{hashlib.sha256(index).hexdigest()}"


def test_the_checksum_without_such_an_index_goes_over_the_files_in_name_order(tmp_path: Path) -> None:
    (tmp_path / "b.safetensors").write_bytes(b"second")
    (tmp_path / "a.safetensors").write_bytes(b"first")
    (tmp_path / "config.json").write_text("not hashed")
    (tmp_path / safetensors.INDEX).write_text('{"metadata": {"total_size": 1}}')
    assert safetensors.checksum(tmp_path) == "sha256:" + hashlib.sha256(b"firstsecond").hexdigest()


def test_a_folder_without_weights_has_no_checksum(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="no safetensors files"):
        safetensors.checksum(tmp_path)


@pytest.fixture
def model(tmp_path: Path) -> Path:
    folder = tmp_path / "model"
    folder.mkdir()
    for name in ("config.json", "tokenizer.json", "model.safetensors", "model.safetensors.index.json"):
        (folder / name).write_text(name)
    return folder


def test_a_version_has_the_models_config_and_its_own_weights(tmp_path: Path, model: Path) -> None:
    folder = WeightFolder(tmp_path / "weights", model).write(3, {"w": np.ones(2, np.float32)})
    assert folder.is_absolute()
    assert sorted(path.name for path in folder.iterdir()) == [
        "config.json",
        "model.safetensors",
        "model.safetensors.index.json",
        "tokenizer.json",
    ]
    assert json.loads((folder / safetensors.INDEX).read_bytes())["weight_map"] == {"w": "model.safetensors"}


def test_an_error_leaves_no_version_behind(tmp_path: Path, model: Path) -> None:
    weights = WeightFolder(tmp_path / "weights", model)
    with pytest.raises(ValueError, match="complex64"):
        weights.write(3, {"w": np.ones(2, np.complex64)})
    assert not list(weights.root.iterdir())


def test_a_trainer_that_dies_leaves_no_version_and_the_next_removes_the_rest(
    tmp_path: Path, model: Path
) -> None:
    code = """
import os, sys
from pathlib import Path
import numpy as np
from paceline import WeightFolder

def tensors():
    for number in range(3):
        yield f"layer.{number}", np.ones(1000)
    os._exit(9)

WeightFolder(Path(sys.argv[1]), Path(sys.argv[2]), shard_bytes=1).write(3, tensors())
"""
    root = tmp_path / "weights"
    assert subprocess.run([sys.executable, "-c", code, root, model], check=False).returncode == 9
    (left,) = root.iterdir()
    assert left.name.startswith(".v00000003.")
    assert not list(left.glob("*.safetensors"))
    assert not (left / safetensors.INDEX).exists()
    WeightFolder(root, model).write(3, numbered(2))
    assert [path.name for path in root.iterdir()] == ["v00000003"]


def test_a_full_disk_is_an_error_that_leaves_the_old_version(tmp_path: Path, model: Path) -> None:
    """A process may write files of 1 MB at most, which is refused in mid-write as a full disk is."""
    root = tmp_path / "weights"
    WeightFolder(root, model).write(3, numbered(2))
    code = """
import resource, signal, sys
from pathlib import Path
import numpy as np
from paceline import WeightFolder

signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 20, 1 << 20))
try:
    WeightFolder(Path(sys.argv[1]), Path(sys.argv[2])).write(3, {"w": np.ones(1 << 20)})
except OSError as error:
    print(error.strerror)
"""
    ended = subprocess.run(
        [sys.executable, "-c", code, root, model], capture_output=True, text=True, check=True
    )
    assert ended.stdout == "File too large\n"
    assert [path.name for path in root.iterdir()] == ["v00000003"]
    assert load_file(root / "v00000003" / "model.safetensors").keys() == {"layer.0", "layer.1"}


def test_the_newest_versions_stay(tmp_path: Path, model: Path) -> None:
    weights = WeightFolder(tmp_path / "weights", model)
    for version in (8, 9, 10):
        weights.write(version, {"w": np.ones(2, np.float32)})
    weights.prune()
    assert sorted(path.name for path in weights.root.iterdir()) == ["v00000009", "v00000010"]


def test_the_newest_versions_stay_where_versions_count_from_the_beginning_again(
    tmp_path: Path, model: Path
) -> None:
    weights = WeightFolder(tmp_path / "weights", model)
    for second, version in enumerate((500, 501, 1)):
        folder = weights.write(version, {"w": np.ones(2, np.float32)})
        # Trainers take longer between two versions than the clock of a file system.
        os.utime(folder, (second, second))
    weights.prune()
    assert sorted(path.name for path in weights.root.iterdir()) == ["v00000001", "v00000501"]


def test_a_version_written_again_is_replaced(tmp_path: Path, model: Path) -> None:
    weights = WeightFolder(tmp_path / "weights", model)
    weights.write(3, {"w": np.ones(2, np.float32)})
    folder = weights.write(3, {"w": np.zeros(2, np.float32)})
    assert load_file(folder / "model.safetensors")["w"].tolist() == [0, 0]
