"""What is wrong with a model folder, by its files."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from paceline.weights import safetensors
from services.models.download import WORK
from services.models.local_model import fault_of


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A folder with two files of weights and their index."""
    made = tmp_path / "model"
    made.mkdir()
    (made / "config.json").write_text('{"architectures": ["LlamaForCausalLM"]}')
    tensors = {name: np.zeros(64, np.float32) for name in ("a", "b")}
    safetensors.write(made, tensors, shard_bytes=256)
    assert len(list(made.glob("*.safetensors"))) == 2
    return made


def _cut(folder: Path) -> None:
    file = min(folder.glob("*.safetensors"))
    file.write_bytes(file.read_bytes()[:-1])


def _without_weights(folder: Path) -> None:
    for file in (*folder.glob("*.safetensors"), folder / safetensors.INDEX):
        file.unlink()


def _unfinished(folder: Path) -> None:
    (folder / "config.json").unlink()
    (folder / WORK).mkdir()


def _as_file(folder: Path) -> None:
    shutil.rmtree(folder)
    folder.touch()


DAMAGES: list[tuple[Callable[[Path], object], str]] = [
    (shutil.rmtree, "there is no folder"),
    (_as_file, "is a file"),
    (lambda folder: (folder / "config.json").unlink(), "has no config.json"),
    (_unfinished, "is not complete; run `paceline download` again"),
    (lambda folder: (folder / "config.json").write_text("{"), "config.json is no JSON: "),
    (lambda folder: (folder / "config.json").write_text("[]"), "config.json is no JSON object"),
    (lambda folder: (folder / safetensors.INDEX).write_text(json.dumps({})), "has no weight_map"),
    (
        lambda folder: max(folder.glob("*.safetensors")).unlink(),
        "lacks 1 of 2 files of weights, such as model-",
    ),
    (_without_weights, "has no weights"),
    (_cut, "is damaged or not complete"),
]


def test_a_whole_folder_has_no_fault(folder: Path) -> None:
    assert fault_of(folder) == ""


@pytest.mark.parametrize(("damage", "said"), DAMAGES, ids=[said for _, said in DAMAGES])
def test_a_fault_is_named_with_its_file(folder: Path, damage: Callable[[Path], object], said: str) -> None:
    damage(folder)
    fault = fault_of(folder)
    assert said in fault
    assert str(folder) in fault


def test_a_name_that_can_be_fetched_is_not_mistaken_for_a_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    for name in ("organization/model", "smollm2"):
        assert f"`paceline up --model {name}` fetches it" in fault_of(Path(name))
    assert "fetches" not in fault_of(tmp_path / "model")
