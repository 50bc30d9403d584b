"""Drafters on disk."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from paceline.files import MOST_CONFIG_BYTES
from services.contracts import drafter_checkpoint
from services.contracts.drafter_checkpoint import Checkpoint, CorruptCheckpoint
from services.drafter.learning.head import Eagle3Head, HeadShape

SHAPE = HeadShape(20, 12, 16, 24, 4, 2, 4, layers=(1, 2, 3), eps=1e-6,
                  rope_theta=10000.0, max_positions=64)  # fmt: skip


@pytest.fixture
def saved(tmp_path: Path) -> Checkpoint:
    return drafter_checkpoint.save(tmp_path, 7, SHAPE.config(), Eagle3Head(SHAPE).tensors())


@pytest.mark.parametrize("draft_vocabulary", [12, 20])
def test_what_is_saved_is_loaded(tmp_path: Path, draft_vocabulary: int) -> None:
    shape = replace(SHAPE, draft_vocab_size=draft_vocabulary)
    head = Eagle3Head(shape)
    if draft_vocabulary < 20:
        head.set_vocabulary(torch.tensor([0, 2, 3, 5, 6, 7, 9, 11, 13, 14, 16, 19]))
    saved = drafter_checkpoint.save(tmp_path, 7, shape.config(), head.tensors())
    config, tensors = drafter_checkpoint.load(saved.path, saved.sha256)
    assert saved.path == tmp_path / "drafter-000007"
    assert drafter_checkpoint.version_of(saved.path) == saved.version == 7
    assert HeadShape.of(config) == shape
    assert tensors.keys() == head.tensors().keys() == drafter_checkpoint.shapes(config).keys()
    assert all(torch.equal(tensors[name], tensor) for name, tensor in head.tensors().items())
    assert ("d2t" in tensors) == (draft_vocabulary < 20), (
        "vLLM has no place for a map of the whole vocabulary"
    )


def test_a_head_may_be_larger_than_a_file_of_settings_and_no_larger_than_its_config_says(
    tmp_path: Path,
) -> None:
    shape = replace(SHAPE, vocab_size=30_000, draft_vocab_size=30_000, hidden_size=160)
    saved = drafter_checkpoint.save(tmp_path, 1, shape.config(), Eagle3Head(shape).tensors())
    file = saved.path / "model.safetensors"
    assert file.stat().st_size > MOST_CONFIG_BYTES
    assert drafter_checkpoint.load(saved.path, saved.sha256)[1]["lm_head.weight"].shape == (30_000, 160)
    with file.open("r+b") as stream:
        stream.truncate(100 << 20)
    with pytest.raises(CorruptCheckpoint, match=r"model\.safetensors cannot be read"):
        drafter_checkpoint.load(saved.path)


def test_a_version_is_replaced_and_nothing_else_is_left(tmp_path: Path) -> None:
    first = drafter_checkpoint.save(tmp_path, 1, SHAPE.config(), Eagle3Head(SHAPE).tensors())
    second = drafter_checkpoint.save(tmp_path, 1, SHAPE.config(), Eagle3Head(SHAPE).tensors())
    assert first.sha256 != second.sha256
    drafter_checkpoint.load(second.path, second.sha256)
    assert [path.name for path in tmp_path.iterdir()] == ["drafter-000001"]


def test_a_disk_that_does_not_take_it_changes_nothing(
    saved: Checkpoint, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(path: Path, content: bytes) -> None:
        path.write_bytes(content[:10])
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(drafter_checkpoint, "write_durably", full)
    with pytest.raises(OSError, match="No space"):
        drafter_checkpoint.save(saved.path.parent, 7, SHAPE.config(), Eagle3Head(SHAPE).tensors())
    drafter_checkpoint.load(saved.path, saved.sha256)
    assert [path.name for path in saved.path.parent.iterdir()] == ["drafter-000007"]


def _tensors(change: Callable[[dict[str, torch.Tensor]], None]) -> Callable[[Path], None]:
    def apply(path: Path) -> None:
        file = path / "model.safetensors"
        tensors = load_file(file)
        change(tensors)
        save_file(tensors, file)

    return apply


def _config(**changes: object) -> Callable[[Path], None]:
    def apply(path: Path) -> None:
        file = path / "config.json"
        file.write_text(json.dumps(json.loads(file.read_text()) | changes))

    return apply


FAULTS = {
    "no weights": (lambda path: (path / "model.safetensors").unlink(), "cannot be read"),
    "no config": (lambda path: (path / "config.json").unlink(), "cannot be read"),
    "config is not JSON": (lambda path: (path / "config.json").write_text("{"), "not JSON"),
    "config is a list": (lambda path: (path / "config.json").write_text("[]"), "not an object"),
    "truncated": (
        lambda path: (path / "model.safetensors").write_bytes((path / "model.safetensors").read_bytes()[:-9]),
        "truncated",
    ),
    "missing tensor": (_tensors(lambda found: found.pop("fc.weight")), "missing: \\['fc.weight'\\]"),
    "embedding": (_tensors(lambda found: found.update({"embed_tokens.weight": torch.ones(2)})), "not of a"),
    "NaN": (_tensors(lambda found: found["norm.weight"].fill_(torch.nan)), "NaN"),
    "infinite": (_tensors(lambda found: found["lm_head.weight"][3].fill_(torch.inf)), "infinite"),
    "shape": (_tensors(lambda found: found.update({"norm.weight": torch.ones(5)})), "shape \\[5\\]"),
    "integers": (
        _tensors(lambda found: found.update({"norm.weight": torch.ones(16, dtype=torch.int32)})),
        "floating",
    ),
    "map": (_tensors(lambda found: found["d2t"].add_(1)), "do not name the same tokens"),
    "another model": (_config(architectures=["LlamaForCausalLM"]), "architectures"),
    "no layers": (_config(eagle_config={}), "names no"),
    "bool": (_config(eagle_config={"eagle_aux_hidden_state_layer_ids": [True, 2]}), "names no"),
    "layers": (_config(eagle_config={"eagle_aux_hidden_state_layer_ids": [3, 1]}), "rising"),
    "hidden size": (_config(hidden_size=32), "shape"),
    "count": (_config(num_attention_heads="4"), "positive integer"),
    "vocabulary": (_config(vocab_size=8), "above vocab_size"),
}


@pytest.mark.parametrize("name", FAULTS)
def test_a_broken_drafter_is_refused(saved: Checkpoint, name: str) -> None:
    spoil, says = FAULTS[name]
    spoil(saved.path)
    with pytest.raises(CorruptCheckpoint, match=says):
        drafter_checkpoint.load(saved.path)


def test_a_drafter_that_is_not_the_one_referred_to_is_refused(saved: Checkpoint) -> None:
    _tensors(lambda found: found["norm.weight"][0].mul_(1 + 2**-20))(saved.path)
    drafter_checkpoint.load(saved.path)
    for check in (drafter_checkpoint.load, drafter_checkpoint.verify):
        with pytest.raises(CorruptCheckpoint, match="SHA-256"):
            check(saved.path, saved.sha256)


def test_what_cannot_be_loaded_is_not_saved(tmp_path: Path) -> None:
    tensors = Eagle3Head(SHAPE).tensors()
    tensors["norm.weight"] = torch.full((16,), torch.nan)
    with pytest.raises(ValueError, match="NaN"):
        drafter_checkpoint.save(tmp_path, 1, SHAPE.config(), tensors)
    with pytest.raises(ValueError, match="at least 1"):
        drafter_checkpoint.save(tmp_path, 0, SHAPE.config(), Eagle3Head(SHAPE).tensors())
    assert not list(tmp_path.iterdir())


def test_the_sum_is_checked_without_torch(saved: Checkpoint) -> None:
    code = (
        "import sys; from pathlib import Path; from services.contracts import drafter_checkpoint;"
        "drafter_checkpoint.verify(Path(sys.argv[1]), sys.argv[2]); assert 'torch' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", code, str(saved.path), saved.sha256], check=True, timeout=60)


def test_a_head_of_another_build_is_known() -> None:
    plain = SHAPE.config()
    of_others = {
        name: value for name, value in plain.items() if name not in ("rope_parameters", "attention_bias")
    }
    assert HeadShape.of(of_others | {"rope_theta": 5e5}) == replace(SHAPE, rope_theta=5e5)
    for change in (
        {"norm_before_residual": True},
        {"rope_scaling": {"rope_type": "yarn"}},
        {"hidden_act": "gelu"},
    ):
        with pytest.raises(ValueError, match="plain build"):
            HeadShape.of({**of_others, **change})


@pytest.mark.parametrize("name", ["drafter-1", "drafter-00000x", "policy-000001", "xdrafter-000001"])
def test_other_names_are_no_drafters(name: str) -> None:
    with pytest.raises(ValueError, match="no drafter's name"):
        drafter_checkpoint.version_of(Path("/somewhere") / name)
