"""Adapters: what can be merged, and what comes of it."""

from __future__ import annotations

import json
import math
import os
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from paceline import Adapter, WeightFolder
from paceline import types as t
from paceline.weights import expansion, safetensors
from paceline.weights.expansion import BaseWeights
from services.contracts.errors import DataLoss, FailedPrecondition, InvalidArgument
from services.generation.weights.adapters import merged, plan_merge, read_adapter
from services.generation.weights.adoption import AdoptedWeights
from services.generation.weights.expansion import GivenWeights, WeightReader
from services.generation.weights.staging import StagedWeights, read_manifest

Tensors = dict[str, torch.Tensor]
Q, MLP = "model.layers.0.self_attn.q_proj", "model.layers.0.mlp.up_proj"
CONFIG: dict[str, Any] = {
    "peft_type": "LORA",
    "r": 5,
    "lora_alpha": 12,
    "target_modules": ["q_proj", "up_proj"],
}
SHAPES = {f"{Q}.weight": (40, 24), f"{MLP}.weight": (24, 40), "model.norm.weight": (24,)}


def model(dtype: torch.dtype = torch.bfloat16) -> Tensors:
    made = torch.Generator().manual_seed(0)
    return {name: (torch.randn(shape, generator=made) * 0.1).to(dtype) for name, shape in SHAPES.items()}


def adapter(seed: int = 1, dtype: torch.dtype = torch.float32) -> Tensors:
    made = torch.Generator().manual_seed(seed)
    found: Tensors = {}
    for module in (Q, MLP):
        rows, columns = SHAPES[f"{module}.weight"]
        for name, shape in (("A", (5, columns)), ("B", (rows, 5))):
            value = torch.randn(shape, generator=made).to(dtype) * 0.05
            found[f"base_model.model.{module}.lora_{name}.weight"] = value
    return found


def plan(config: Mapping[str, Any] = CONFIG, **changed: tuple[int, ...] | None) -> Any:
    """The plan for the adapter, some of whose tensors have other shapes or are missing."""
    found = {name: tuple(tensor.shape) for name, tensor in adapter().items()}
    for name, shape in changed.items():
        if shape is None:
            del found[name]
        else:
            found[name] = shape
    return plan_merge(config, found, SHAPES)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
@pytest.mark.parametrize("rslora", [False, True])
def test_a_merge_is_that_of_torch(dtype: torch.dtype, rslora: bool) -> None:
    base, matrices = model(dtype), adapter(dtype=torch.bfloat16)
    made = dict(merged(base, plan(CONFIG | {"use_rslora": rslora}), matrices, 2))
    assert made.keys() == base.keys()
    assert torch.equal(made["model.norm.weight"], base["model.norm.weight"])
    scale = 12 / (math.sqrt(5) if rslora else 5)
    for module in (Q, MLP):
        a, b = (matrices[f"base_model.model.{module}.lora_{name}.weight"].double() for name in "AB")
        exact = base[f"{module}.weight"].double() + scale * (b @ a)
        got = made[f"{module}.weight"]
        assert got.dtype == dtype
        unit = torch.finfo(dtype).eps * exact.abs() + 1e-6
        assert bool(((got.double() - exact).abs() <= 0.5 * unit + 1e-6).all()), "the nearest number there is"


def test_a_merge_is_that_of_peft() -> None:
    peft = pytest.importorskip("peft", reason="peft is not installed")
    layer = torch.nn.Sequential()
    layer.add_module("q_proj", torch.nn.Linear(24, 40, bias=False))
    base = layer.q_proj.weight.detach().clone()
    wrapped = peft.get_peft_model(layer, peft.LoraConfig(r=5, lora_alpha=12, target_modules=["q_proj"]))
    torch.nn.init.normal_(wrapped.base_model.model.q_proj.lora_B["default"].weight)
    matrices = peft.get_peft_model_state_dict(wrapped)
    config = {"r": 5, "lora_alpha": 12, "target_modules": ["q_proj"]}
    found = {name: tuple(tensor.shape) for name, tensor in matrices.items()}
    plan = plan_merge(config, found, {"q_proj.weight": (40, 24)})
    made = dict(merged({"q_proj.weight": base}, plan, matrices, 1))
    expected = wrapped.merge_and_unload().q_proj.weight
    torch.testing.assert_close(made["q_proj.weight"], expected.detach())


@pytest.mark.parametrize(
    ("option", "value"),
    [
        ("use_dora", True),
        ("bias", "all"),
        ("modules_to_save", ["lm_head"]),
        ("peft_type", "ADALORA"),
        ("init_lora_weights", "pissa_niter_16"),
        ("rank_pattern", {"q_proj": 4}),
        ("fan_in_fan_out", True),
        ("r", 0),
        ("lora_alpha", None),
        ("lora_alpha", math.nan),
        ("lora_alpha", True),
        pytest.param("lora_alpha", 10**400, id="lora_alpha-huge"),
    ],
)
def test_options_that_cannot_be_merged_are_refused_by_name(option: str, value: Any) -> None:
    with pytest.raises(InvalidArgument) as caught:
        plan(CONFIG | {option: value})
    assert [each.field for each in caught.value.violations] == [f"adapter_config.json.{option}"]


@pytest.mark.parametrize(
    ("name", "shape", "complaint"),
    [
        (f"base_model.model.{Q}.lora_A.weight", (4, 24), "allowed is [5, 24]"),
        (f"base_model.model.{Q}.lora_B.weight", (40, 4), "allowed is [40, 5]"),
        (f"base_model.model.{Q}.lora_B.weight", None, "has no "),
        (f"base_model.model.{Q}.lora_magnitude_vector", (40,), "which are all that can be merged"),
        ("base_model.model.model.norm.lora_A.weight", (5, 24), "has no "),
        ("base_model.model.model.embed_tokens.lora_embedding_A", (5, 24), "all that can be merged"),
    ],
)
def test_tensors_that_cannot_be_merged_are_refused_by_name(
    name: str, shape: tuple[int, ...] | None, complaint: str
) -> None:
    with pytest.raises(InvalidArgument, match="tensors") as caught:
        plan(**{name: shape})
    assert any(complaint in each.description for each in caught.value.violations)


def test_modules_that_are_not_the_models_or_not_named_are_refused() -> None:
    with pytest.raises(InvalidArgument, match="target_modules does not name"):
        plan(CONFIG | {"target_modules": ["q_proj"]})
    with pytest.raises(InvalidArgument, match="no matrix of the model"):
        plan_merge(CONFIG, {name: tuple(each.shape) for name, each in adapter().items()}, {})
    plan(CONFIG | {"target_modules": "all-linear"})


class Fleet:
    """A trainer's folders and two instances of one deployment, whose disk is not the trainer's."""

    def __init__(self, root: Path) -> None:
        started = root / "model"
        started.mkdir()
        safetensors.write(started, model())
        self.weights = WeightFolder(root / "weights", started)
        self.adopted = AdoptedWeights(root / "adopted")
        self.readers = [WeightReader(started, read_manifest(started), None, self.adopted) for _ in range(2)]

    def base(self, checksum: str = "", version: int = 0, path: str = "") -> BaseWeights:
        return self.weights.base_of(t.Versions(version, 0, path, checksum, "", ()))

    def given(self, version: int, base: BaseWeights, seed: int = 1) -> GivenWeights:
        folder = self.weights.write_adapter(version, Adapter(adapter(seed), CONFIG), base)
        return GivenWeights(folder, expansion.checksum(folder))


@pytest.fixture
def fleet(tmp_path: Path) -> Fleet:
    return Fleet(tmp_path)


def expected(base: Mapping[str, torch.Tensor], seed: int) -> Tensors:
    return dict(merged(base, plan(), adapter(seed), 1))


def equal(staged: StagedWeights, tensors: Tensors) -> bool:
    return staged.tensors.keys() == tensors.keys() and all(
        torch.equal(staged.tensors[name], tensor) for name, tensor in tensors.items()
    )


def test_each_adapter_is_merged_with_the_base_and_not_with_the_one_before(fleet: Fleet) -> None:
    base = fleet.base()
    for version in (1, 2, 3):
        given = fleet.given(version, base, seed=version)
        for reader in fleet.readers:
            staged = reader.read(version, given)
            assert staged.checksum == given.checksum
            assert equal(staged, expected(model(), version))
        fleet.adopted.prune(version, given.checksum)
        assert fleet.base(given.checksum, version) == base


def test_a_base_that_was_pushed_stays_while_adapters_build_on_it(fleet: Fleet) -> None:
    full = {name: tensor * 2 for name, tensor in model().items()}
    folder = fleet.weights.write(1, full)
    checksum = safetensors.checksum(folder)
    fleet.readers[0].read(1, GivenWeights(folder, checksum))
    base = fleet.base(checksum, 1, str(folder))
    for version in range(2, 6):
        given = fleet.given(version, base, seed=version)
        assert equal(fleet.readers[1].read(version, given), expected(full, version))
        fleet.adopted.prune(version, given.checksum)
    assert [each[:1] for each in fleet.adopted.versions()] == ["1", "4", "5"]
    pushed = fleet.weights.write(6, full)
    later = GivenWeights(pushed, safetensors.checksum(pushed))
    fleet.readers[0].read(6, later)
    fleet.adopted.prune(6, later.checksum)
    assert [each[:1] for each in fleet.adopted.versions()] == ["1", "5", "6"]
    fleet.readers[0].read(7, GivenWeights(fleet.weights.write(7, full), ""))
    fleet.adopted.prune(7, safetensors.checksum(fleet.weights.root / "v00000007"))
    assert [each[:1] for each in fleet.adopted.versions()] == ["6", "7"]


def test_an_instance_without_the_base_takes_it_from_the_trainer_or_says_what_it_lacks(
    fleet: Fleet, tmp_path: Path
) -> None:
    full = {name: tensor * 2 for name, tensor in model().items()}
    folder = fleet.weights.write(1, full)
    base = BaseWeights(1, safetensors.checksum(folder), str(folder))
    assert equal(fleet.readers[0].read(2, fleet.given(2, base)), expected(full, 1))
    # As it is known where it came by stream: without a path.
    streamed = fleet.base(base.checksum, 1)
    assert equal(fleet.readers[1].read(3, fleet.given(3, streamed, seed=2)), expected(full, 2))
    lost = BaseWeights(1, "index-sha256:of another run", str(tmp_path / "gone"))
    for wrong in (lost, BaseWeights(0, "index-sha256:of another model")):
        with pytest.raises(FailedPrecondition) as caught:
            fleet.readers[1].read(4, fleet.given(4, wrong))
        assert caught.value.reason == "BASE_NOT_HELD"
    alone = WeightReader(fleet.weights.model, {}, None, None)
    with pytest.raises(FailedPrecondition, match="adopted_weights is not set"):
        alone.read(4, fleet.given(4, base))


def test_a_folder_of_the_trainer_that_lost_its_weights_is_left_alone(fleet: Fleet) -> None:
    folder = fleet.weights.write(1, model())
    base = BaseWeights(1, safetensors.checksum(folder), str(folder))
    weights = {path: path.read_bytes() for path in folder.iterdir()}
    for path in weights:
        path.unlink()
    with pytest.raises(FailedPrecondition) as caught:
        fleet.readers[0].read(2, fleet.given(2, base))
    assert caught.value.reason == "BASE_NOT_HELD"
    for path, content in weights.items():
        path.write_bytes(content)
    assert equal(fleet.readers[0].read(2, fleet.given(2, base)), expected(model(), 1))


def test_an_adapter_that_is_corrupt_is_refused_and_a_merge_that_was_corrupted_is_made_anew(
    fleet: Fleet,
) -> None:
    given = fleet.given(1, fleet.base())
    assert given.folder is not None
    file = given.folder / "adapter_model.safetensors"
    good = file.read_bytes()
    file.write_bytes(good[:-1] + b"x")
    with pytest.raises(DataLoss, match="is corrupt"):
        fleet.readers[0].read(1, given)
    file.write_bytes(good)
    fleet.readers[0].read(1, given)
    place = fleet.adopted.held(1, given.checksum)
    assert place is not None
    merge = place / "model.safetensors"
    merge.write_bytes(merge.read_bytes()[:-1] + b"x")
    assert equal(fleet.readers[1].read(1, given), expected(model(), 1))
    (given.folder / expansion.MANIFEST).write_text("{}")
    with pytest.raises(DataLoss, match="is corrupt"):
        fleet.readers[1].read(2, given)


def test_what_becomes_infinite_is_refused_by_name(fleet: Fleet) -> None:
    huge = {name: tensor * 1e20 for name, tensor in adapter().items()}
    folder = fleet.weights.write_adapter(1, Adapter(huge, CONFIG), fleet.base())
    with pytest.raises(InvalidArgument, match="NaN or infinite"):
        fleet.readers[0].read(1, GivenWeights(folder, expansion.checksum(folder)))


@pytest.mark.timeout(60)
@pytest.mark.parametrize("kind", ["fifo", "deep", "large"])
def test_a_hostile_configuration_is_refused(tmp_path: Path, kind: str) -> None:
    config = tmp_path / "adapter_config.json"
    if kind == "fifo":
        # Nobody writes to it, and opening it would wait for that.
        os.mkfifo(config)
    else:
        config.write_text("[" * 100_000 if kind == "deep" else " " * (5 << 20) + "{}")
    with pytest.raises(DataLoss, match="is corrupt"):
        read_adapter(tmp_path, SHAPES)


def test_a_folder_that_is_no_adapter_says_so(tmp_path: Path) -> None:
    with pytest.raises(InvalidArgument, match=r"has no adapter_config\.json"):
        read_adapter(tmp_path, SHAPES)
    (tmp_path / "adapter_config.json").write_text("[]")
    with pytest.raises(DataLoss, match="is corrupt"):
        read_adapter(tmp_path, SHAPES)
    (tmp_path / "adapter_config.json").write_text(json.dumps(CONFIG))
    save_file(
        {name: tensor.double() for name, tensor in adapter().items()}, tmp_path / "adapter_model.safetensors"
    )
    with pytest.raises(InvalidArgument, match="dtype F64"):
        read_adapter(tmp_path, SHAPES)


@pytest.mark.timeout(60)
def test_matrices_of_a_rank_beyond_the_model_are_refused_before_they_are_read(
    fleet: Fleet, tmp_path: Path
) -> None:
    """They take no room on the disk, and hours to read."""
    folder, rank = tmp_path / "wide", 1 << 33
    folder.mkdir()
    entries, end = {}, 0
    for name, shape in (("A", [rank, 24]), ("B", [40, rank])):
        begin, end = end, end + 4 * math.prod(shape)
        entry = {"dtype": "F32", "shape": shape, "data_offsets": [begin, end]}
        entries[f"base_model.model.{Q}.lora_{name}.weight"] = entry
    header = json.dumps(entries).encode()
    with (folder / "adapter_model.safetensors").open("wb") as file:
        file.write(len(header).to_bytes(8, "little") + header)
        file.truncate(8 + len(header) + end)
    (folder / "adapter_config.json").write_text(
        json.dumps(CONFIG | {"r": rank, "target_modules": ["q_proj"]})
    )
    files = {
        name: {"bytes": 1, "sha256": ""} for name in ("adapter_config.json", "adapter_model.safetensors")
    }
    told = {"format": 1, "kind": "adapter", "base": asdict(fleet.base()), "files": files}
    (folder / expansion.MANIFEST).write_text(json.dumps(told))
    with pytest.raises(InvalidArgument, match="must be an integer from 1 to 40"):
        fleet.readers[0].read(1, GivenWeights(folder))


def test_an_adapter_has_no_files_but_those_that_it_names(fleet: Fleet) -> None:
    given = fleet.given(1, fleet.base())
    assert given.folder is not None
    save_file({f"base_model.model.{Q}.lora_C.weight": torch.ones(1)}, given.folder / "more.safetensors")
    with pytest.raises(InvalidArgument, match="lora_C"):
        fleet.readers[0].read(1, given)
    (given.folder / "more.safetensors").unlink()
    lone = {name: tensor for name, tensor in adapter().items() if MLP in name}
    rest = {name: tensor for name, tensor in adapter().items() if MLP not in name}
    save_file(rest, given.folder / "adapter_model.safetensors")
    save_file(lone, given.folder / "more.safetensors")
    with pytest.raises(DataLoss, match="is corrupt"):
        fleet.readers[0].read(1, given)
