"""Weight files: what is written is what safetensors reads."""

from __future__ import annotations

import hashlib
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from paceline import WeightFolder, safetensors


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
    safetensors.write(tmp_path / "w.safetensors", tensors)
    read = load_file(tmp_path / "w.safetensors")
    assert read.keys() == tensors.keys()
    for name, tensor in tensors.items():
        assert read[name].dtype == tensor.dtype
        assert torch.equal(read[name], tensor), name


def test_numpy_arrays_are_written_too(tmp_path: Path) -> None:
    array = np.arange(6, dtype=np.float32).reshape(2, 3)
    safetensors.write(tmp_path / "w.safetensors", {"a": array, "t": array.T, "s": np.float32(1).reshape(())})
    read = load_file(tmp_path / "w.safetensors")
    assert torch.equal(read["a"], torch.from_numpy(array))
    assert torch.equal(read["t"], torch.from_numpy(array).T)
    assert read["s"].shape == ()


def test_a_dtype_that_the_format_lacks_is_named(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"'c' has dtype complex64"):
        safetensors.write(tmp_path / "w.safetensors", {"c": torch.zeros(1, dtype=torch.complex64)})


def test_the_checksum_goes_over_the_files_in_name_order(tmp_path: Path) -> None:
    (tmp_path / "b.safetensors").write_bytes(b"second")
    (tmp_path / "a.safetensors").write_bytes(b"first")
    (tmp_path / "config.json").write_text("not hashed")
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
        "tokenizer.json",
    ]


def test_an_error_leaves_no_version_behind(tmp_path: Path, model: Path) -> None:
    weights = WeightFolder(tmp_path / "weights", model)
    with pytest.raises(ValueError, match="complex64"):
        weights.write(3, {"w": np.ones(2, np.complex64)})
    assert not list(weights.root.glob("v*"))


def test_the_newest_versions_stay(tmp_path: Path, model: Path) -> None:
    weights = WeightFolder(tmp_path / "weights", model)
    for version in (8, 9, 10):
        weights.write(version, {"w": np.ones(2, np.float32)})
    weights.prune()
    assert sorted(path.name for path in weights.root.iterdir()) == ["v00000009", "v00000010"]


def test_a_version_written_again_is_replaced(tmp_path: Path, model: Path) -> None:
    weights = WeightFolder(tmp_path / "weights", model)
    weights.write(3, {"w": np.ones(2, np.float32)})
    folder = weights.write(3, {"w": np.zeros(2, np.float32)})
    assert load_file(folder / "model.safetensors")["w"].tolist() == [0, 0]
