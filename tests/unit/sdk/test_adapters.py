"""Adapters as versions: what is written, and what they build on."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from paceline import Adapter, WeightFolder
from paceline import types as t
from paceline.weights import adapters, expansion, safetensors
from paceline.weights.expansion import BaseWeights, ExpansionKind
from tests.support.disks import largest_file

BASE = BaseWeights(3, "index-sha256:base", "/weights/v00000003")
CONFIG = {"r": 2, "lora_alpha": 4, "target_modules": {"q_proj"}}
STEM = "base_model.model.model.layers.0.self_attn.q_proj.lora_"


def matrices(infix: str = "") -> dict[str, np.ndarray[tuple[int, ...], np.dtype[np.float32]]]:
    return {
        f"{STEM}A{infix}.weight": np.ones((2, 8), np.float32),
        f"{STEM}B{infix}.weight": np.ones((4, 2), np.float32),
    }


@pytest.fixture
def weights(tmp_path: Path) -> WeightFolder:
    (tmp_path / "model").mkdir()
    safetensors.write(tmp_path / "model", {"w": np.ones(3)})
    return WeightFolder(tmp_path / "weights", tmp_path / "model")


def published(version: int, checksum: str, path: Path | str = "") -> t.Versions:
    return t.Versions(version, 0, str(path), checksum, "", ())


def test_an_adapter_in_memory_is_written_as_peft_writes_it(weights: WeightFolder) -> None:
    folder = weights.write_adapter(4, Adapter(matrices(".default"), CONFIG), BASE)
    told = expansion.read(folder)
    assert told is not None
    assert (told.kind, told.base) == (ExpansionKind.ADAPTER, BASE)
    assert sorted(told.files) == ["adapter_config.json", "adapter_model.safetensors"]
    assert load_file(folder / "adapter_model.safetensors").keys() == matrices().keys()
    assert json.loads((folder / adapters.CONFIG).read_bytes()) == {
        "peft_type": "LORA",
        "r": 2,
        "lora_alpha": 4,
        "target_modules": ["q_proj"],
    }
    assert expansion.checksum(folder).startswith("adapter-sha256:")
    assert not (folder / safetensors.INDEX).exists()


def test_the_checksum_names_scale_matrices_and_base(weights: WeightFolder) -> None:
    changed = {name: matrix * 2 for name, matrix in matrices().items()}
    found = {
        expansion.checksum(weights.write_adapter(4, adapter, base))
        for adapter, base in (
            (Adapter(matrices(), CONFIG), BASE),
            (Adapter(matrices(), CONFIG | {"lora_alpha": 8}), BASE),
            (Adapter(changed, CONFIG), BASE),
            (Adapter(matrices(), CONFIG), BaseWeights(3, "index-sha256:other", BASE.path)),
        )
    }
    assert len(found) == 4


def test_a_folder_of_peft_is_taken_and_what_is_none_refused(weights: WeightFolder, tmp_path: Path) -> None:
    source = tmp_path / "peft"
    source.mkdir()
    save_file(matrices(), source / "adapter_model.safetensors")
    with pytest.raises(ValueError, match="to be an adapter"):
        weights.write_adapter(1, source, BASE)
    (source / adapters.CONFIG).write_text('{"r": 2, "lora_alpha": 4}')
    (source / "README.md").write_text("a card")
    folder = weights.write_adapter(1, source, BASE)
    assert sorted(path.name for path in folder.iterdir()) == [*adapters_files(), expansion.MANIFEST]
    with largest_file(10), pytest.raises(OSError, match="File too large"):
        weights.write_adapter(2, source, BASE)
    assert [path.name for path in weights.root.iterdir()] == ["adapter-00000001"]


def adapters_files() -> list[str]:
    return ["adapter_config.json", "adapter_model.safetensors"]


def test_an_adapter_builds_on_the_full_version_and_not_on_an_adapter(weights: WeightFolder) -> None:
    started = weights.base_of(published(0, ""))
    assert started == BaseWeights(0, safetensors.checksum(weights.model))
    assert weights.base_of(published(3, "index-sha256:x", "/w/v3")) == BaseWeights(
        3, "index-sha256:x", "/w/v3"
    )
    folder = weights.write_adapter(4, Adapter(matrices(), CONFIG), started)
    for path in (folder, ""):
        assert weights.base_of(published(4, expansion.checksum(folder), path)) == started
    with pytest.raises(ValueError, match="push full weights first"):
        weights.base_of(published(4, "adapter-sha256:of another trainer", "/gone"))
