"""What weights must be before they may reach the engine."""

from __future__ import annotations

import hashlib
import json
import math
import os
import pickle
import random
import socket
import struct
import subprocess
import sys
from collections.abc import Callable
from contextlib import nullcontext
from itertools import product
from pathlib import Path
from typing import Any

import hypothesis.strategies as st
import pytest
import torch
from hypothesis import given
from safetensors.torch import save_file

from paceline.weights import safetensors
from paceline.weights.safetensors import INDEX
from services.contracts.errors import DataLoss, FailedPrecondition, InvalidArgument
from services.generation.engine.types import TensorSpec
from services.generation.weights import files
from services.generation.weights.adoption import AdoptedWeights
from services.generation.weights.expansion import GivenWeights, WeightReader
from services.generation.weights.files import least_infinite
from services.generation.weights.staging import read_manifest, stage

HEAD, EMBEDDING = "lm_head.weight", "model.embed_tokens.weight"
Tensors = dict[str, torch.Tensor]


def tensors() -> Tensors:
    """A model of three tensors and two dtypes, with values that are easily lost: -0, smallest, largest."""
    torch.manual_seed(0)
    odd = torch.tensor([-0.0, 1e-45, torch.finfo(torch.float32).max, -1.0])
    return {EMBEDDING: torch.randn(6, 4), "a.weight": torch.randn(3, 5).to(torch.bfloat16), "b.weight": odd}


def written(folder: Path, **files: Tensors) -> Path:
    """Return a folder with a safetensors file for each argument."""
    folder.mkdir(parents=True, exist_ok=True)
    for name, content in files.items():
        save_file(content, folder / f"{name}.safetensors")
    return folder


@pytest.fixture
def served(tmp_path: Path) -> dict[str, TensorSpec]:
    """The manifest of the model that is served."""
    return read_manifest(written(tmp_path / "served", model=tensors()))


def complaints(folder: Path, expected: dict[str, TensorSpec]) -> dict[str, str]:
    """What staging the folder is refused with, by field."""
    with pytest.raises(InvalidArgument) as caught:
        stage(folder, 1, expected)
    return {violation.field: violation.description for violation in caught.value.violations}


def spoilt(tmp_path: Path, spoil: Callable[[Tensors], object]) -> Path:
    content = tensors()
    spoil(content)
    return written(tmp_path / "spoilt", model=content)


def test_the_manifest_has_names_shapes_and_dtypes(served: dict[str, TensorSpec]) -> None:
    assert served == {
        EMBEDDING: TensorSpec(EMBEDDING, (6, 4), "F32"),
        "a.weight": TensorSpec("a.weight", (3, 5), "BF16"),
        "b.weight": TensorSpec("b.weight", (4,), "F32"),
    }


def test_good_weights_come_through_bit_for_bit(tmp_path: Path, served: dict[str, TensorSpec]) -> None:
    folder = written(tmp_path / "new", model=tensors())
    staged = stage(folder, 7, served)
    assert staged.version == 7
    got = staged.tensors
    assert got.keys() == tensors().keys()
    for name, tensor in tensors().items():
        assert got[name].dtype == tensor.dtype
        assert torch.equal(got[name].view(torch.uint8), tensor.view(torch.uint8))
    digest = hashlib.sha256((folder / "model.safetensors").read_bytes()).hexdigest()
    assert staged.checksum == f"sha256:{digest}"
    assert stage(folder, 7, served, staged.checksum).checksum == staged.checksum


def test_weights_that_change_after_they_were_checked_are_not_applied(
    tmp_path: Path, served: dict[str, TensorSpec]
) -> None:
    folder = written(tmp_path / "new", model=tensors())
    file = folder / "model.safetensors"
    for spoil in (lambda: file.write_bytes(bytes(file.stat().st_size)), file.unlink):
        written(folder, model=tensors())
        staged = stage(folder, 1, served)
        staged.tensors.check_unchanged()
        spoil()
        with pytest.raises(DataLoss, match=r"model.safetensors (was changed|can no longer be read)"):
            staged.tensors.check_unchanged()
        with pytest.raises(DataLoss):
            dict(staged.tensors)


def test_staged_weights_reach_another_process_as_paths(tmp_path: Path, served: dict[str, TensorSpec]) -> None:
    staged = stage(written(tmp_path / "new", model=tensors()), 1, served)
    sent = pickle.dumps(staged.tensors.items())
    assert len(sent) < 2000
    assert {name: tensor.tolist() for name, tensor in pickle.loads(sent)} == {
        name: tensor.tolist() for name, tensor in tensors().items()
    }


def test_tensors_at_odd_places_come_through(tmp_path: Path) -> None:
    content = {
        "odd": torch.tensor([True]),
        "empty": torch.ones(0, 3),
        "w": torch.randn(5),
        "scalar": torch.ones(()),
    }
    folder = tmp_path / "odd"
    folder.mkdir()
    safetensors.write(folder, content)
    staged = stage(folder, 1, read_manifest(folder))
    assert staged.tensors.keys() == content.keys()
    assert all(torch.equal(staged.tensors[name], tensor) for name, tensor in content.items())


def test_several_files_are_one_set_with_one_checksum(tmp_path: Path, served: dict[str, TensorSpec]) -> None:
    content = tensors()
    first, second = {EMBEDDING: content.pop(EMBEDDING)}, content
    folder = written(tmp_path / "shards", z1=second, a2=first)
    staged = stage(folder, 1, served)
    assert staged.tensors.keys() == tensors().keys()
    in_order = [(folder / f"{name}.safetensors").read_bytes() for name in ("a2", "z1")]
    assert staged.checksum == f"sha256:{hashlib.sha256(b''.join(in_order)).hexdigest()}"


def test_a_tensor_in_two_files_is_refused(tmp_path: Path, served: dict[str, TensorSpec]) -> None:
    folder = written(tmp_path / "twice", one=tensors(), two={"a.weight": tensors()["a.weight"]})
    assert "more than one file" in complaints(folder, served)["tensors[a.weight]"]


def test_other_float_dtypes_are_taken(tmp_path: Path, served: dict[str, TensorSpec]) -> None:
    def widen(content: Tensors) -> None:
        content["a.weight"] = content["a.weight"].double()
        content[EMBEDDING] = content[EMBEDDING].half()

    assert stage(spoilt(tmp_path, widen), 1, served).tensors["a.weight"].dtype == torch.float64


@pytest.mark.parametrize(
    ("spoil", "field", "complaint"),
    [
        (lambda c: c.pop("a.weight"), "tensors[a.weight]", "is missing"),
        (lambda c: c.update(x=torch.ones(2)), "tensors[x]", "is not a tensor of the model"),
        (lambda c: c.update({"a.weight": torch.ones(5, 3)}), "tensors[a.weight]", "allowed is [3, 5]"),
        (lambda c: c.update({"a.weight": torch.ones(15)}), "tensors[a.weight]", "has shape [15]"),
        (lambda c: c.update({"b.weight": torch.ones(4).int()}), "tensors[b.weight]", "allowed are BF16, F16"),
        (lambda c: c.update({"b.weight": torch.ones(4).bool()}), "tensors[b.weight]", "has dtype"),
        (
            lambda c: c.update({"b.weight": torch.ones(4).to(torch.float8_e4m3fn)}),
            "tensors[b.weight]",
            "has dtype",
        ),
        (lambda c: c[EMBEDDING].__setitem__((2, 1), math.nan), f"tensors[{EMBEDDING}]", "has 1 values"),
        (lambda c: c["a.weight"].fill_(math.inf), "tensors[a.weight]", "has 15 values that are NaN"),
        (lambda c: c["b.weight"].fill_(-math.inf), "tensors[b.weight]", "has 4 values that are NaN"),
    ],
)
def test_weights_that_do_not_fit_are_refused_by_name(
    tmp_path: Path,
    served: dict[str, TensorSpec],
    spoil: Callable[[Tensors], object],
    field: str,
    complaint: str,
) -> None:
    found = complaints(spoilt(tmp_path, spoil), served)
    assert found.keys() == {field}
    assert complaint in found[field]


ONE_NUMBER = [
    torch.float64,
    torch.float32,
    torch.float16,
    torch.bfloat16,
    torch.float8_e4m3fn,
    torch.float8_e5m2,
]


@pytest.mark.parametrize("dtype", ONE_NUMBER, ids=str)
def test_every_value_that_is_not_finite_is_counted_and_no_other(tmp_path: Path, dtype: torch.dtype) -> None:
    """All 65,536 pairs of leading bytes, so every number of 16 bits and fewer, and every exponent of the others."""
    leading = torch.arange(1 << 16).to(torch.uint16).view(torch.uint8).reshape(-1, 2)
    width = max(dtype.itemsize, 2)
    # Little-endian: the leading bytes are the last.
    content = torch.zeros(1 << 16, width, dtype=torch.uint8)
    content[:, -2:] = leading
    values = content.reshape(-1).view(dtype)
    folder = written(tmp_path / "all", model={"w": values})
    found = complaints(folder, read_manifest(folder))
    wide = values.to(torch.float64)
    bad = int((~torch.isfinite(wide)).sum())
    assert found["tensors[w]"] == f"has {bad} values that are NaN or infinite (model.safetensors)"
    finite = written(tmp_path / "finite", model={"w": values[torch.isfinite(wide)].clone()})
    assert stage(finite, 1, read_manifest(finite)).version == 1


FLOATS = {"F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}
PAIRS = list(product(FLOATS, FLOATS))


def of_bits(bits: list[int], dtype: torch.dtype) -> torch.Tensor:
    """Return the floats with these bits."""
    content = b"".join(each.to_bytes(dtype.itemsize, "little") for each in bits)
    return torch.frombuffer(bytearray(content), dtype=dtype)


@pytest.mark.parametrize(("sent", "served"), PAIRS)
def test_values_of_every_exponent_are_judged_as_they_are_loaded(sent: str, served: str) -> None:
    dtype, width = FLOATS[sent], 8 * FLOATS[sent].itemsize
    least = least_infinite(sent, served)
    exponents = {"F64": 11, "F32": 8, "F16": 5, "BF16": 8}[sent]
    places = width - 1 - exponents
    # All exponents, with mantissas at which each narrower dtype rounds up or down, and their neighbours.
    mantissas = {0, 1, (1 << places) - 1, (1 << places) - 2}
    for kept in (7, 10, 23):
        if kept < places:
            half = 1 << (places - kept - 1)
            for edge in ((1 << places) - half, ((1 << places) - half) - (half >> 24)):
                mantissas |= {edge - 1, edge, edge + 1}
    mantissas = {each for each in mantissas if 0 <= each < 1 << places}
    bits = [
        sign << (width - 1) | exponent << places | mantissa
        for sign, exponent, mantissa in product((0, 1), range(1 << exponents), sorted(mantissas))
    ]
    loaded = of_bits(bits, dtype).to(FLOATS[served])
    refused = [(each << 1) % (1 << width) >= least for each in bits]
    assert refused == (~torch.isfinite(loaded)).tolist()


@given(st.sampled_from(PAIRS), st.integers(0, (1 << 64) - 1))
def test_any_value_is_judged_as_it_is_loaded(pair: tuple[str, str], drawn: int) -> None:
    sent, served = pair
    width = 8 * FLOATS[sent].itemsize
    bits = drawn >> (64 - width)
    finite = torch.isfinite(of_bits([bits], FLOATS[sent]).to(FLOATS[served])).item()
    assert ((bits << 1) % (1 << width) < least_infinite(sent, served)) is finite


@pytest.mark.parametrize(
    ("value", "sent", "served", "complaint"),
    [
        (3.4e38, torch.float32, "bfloat16", "has 2 values that are infinite in the model's bfloat16"),
        (1e300, torch.float64, "bfloat16", "has 2 values that are infinite in the model's bfloat16"),
        (1e300, torch.float64, "float32", "has 2 values that are infinite in the model's float32"),
        (65520.0, torch.float32, "float16", "has 2 values that are infinite in the model's float16"),
        (65520.0, torch.bfloat16, "float16", "has 2 values that are infinite in the model's float16"),
        (math.nan, torch.float32, "bfloat16", "has 2 values that are NaN or infinite"),
        (65519.0, torch.float32, "float16", ""),
        (3.38e38, torch.float32, "bfloat16", ""),
        (3.4e38, torch.float32, "float32", ""),
        (65504.0, torch.float16, "bfloat16", ""),
    ],
)
def test_values_that_are_infinite_where_they_are_served_are_refused_by_name(
    tmp_path: Path, value: float, sent: torch.dtype, served: str, complaint: str
) -> None:
    expected = read_manifest(written(tmp_path / "served", model={"norm.weight": torch.ones(8)}), served)
    values = torch.ones(8, dtype=sent)
    values[3] = values[5] = -value
    folder = written(tmp_path / "sent", model={"norm.weight": values})
    if not complaint:
        assert stage(folder, 1, expected).tensors.keys() == {"norm.weight"}
    else:
        assert complaints(folder, expected) == {"tensors[norm.weight]": f"{complaint} (model.safetensors)"}


def test_weights_of_a_dtype_with_scales_are_taken_as_that_alone(tmp_path: Path) -> None:
    """What is cast to it would lack its scales."""
    eight_bits = {"w": torch.ones(4).to(torch.float8_e4m3fn), "w_scale": torch.ones(1)}
    expected = read_manifest(written(tmp_path / "served", model=eight_bits), "bfloat16")
    assert stage(written(tmp_path / "same", model=eight_bits), 1, expected).version == 1
    for dtype in (torch.bfloat16, torch.float32, torch.float8_e5m2):
        cast = written(tmp_path / str(dtype), model=eight_bits | {"w": torch.ones(4).to(dtype)})
        assert "allowed is F8_E4M3" in complaints(cast, expected)["tensors[w]"]


NAMES = ["model.embed_tokens.weight", *(f"model.layers.{n}.mlp.up_proj.weight" for n in range(12))]


@pytest.mark.parametrize(
    ("rename", "hint"),
    [
        (lambda name: f"_orig_mod.{name}", "have '_orig_mod.' in them"),
        (lambda name: f"module.{name}", "have 'module.' in them"),
        (lambda name: f"base_model.model.{name}", "have 'base_model.model.' in them"),
        (
            lambda name: name.replace("mlp.", "mlp._fsdp_wrapped_module."),
            "have '_fsdp_wrapped_module.' in them",
        ),
        (lambda name: name.replace("proj.", "proj.base_layer."), "have 'base_layer.' in them"),
        (lambda name: name.removeprefix("model."), "lack 'model.'"),
        (lambda name: name.replace("mlp.", ""), "lack 'mlp.'"),
        (lambda name: name.replace("up_proj", "w1"), ""),
    ],
)
def test_wrong_names_are_shown_beside_those_that_are_missing(
    tmp_path: Path, rename: Callable[[str], str], hint: str
) -> None:
    expected = read_manifest(written(tmp_path / "served", model={name: torch.ones(1) for name in NAMES}))
    folder = written(tmp_path / "sent", model={rename(name): torch.ones(1) for name in NAMES})
    with pytest.raises(InvalidArgument) as caught:
        stage(folder, 1, expected)
    first = {violation.field: violation.description for violation in caught.value.violations[:3]}
    assert hint in first["tensors"] if hint else "tensors" not in first
    fields = [violation.field for violation in caught.value.violations]
    assert 10 < len(fields) <= 16
    missing, came = (
        {f"tensors[{name}]" for name in names} & set(fields)
        for names in (set(NAMES) - set(map(rename, NAMES)), set(map(rename, NAMES)) - set(NAMES))
    )
    assert min(len(missing), len(came)) > 5
    # What is cut off at the end of an error has both.
    message = caught.value.message[:1000]
    assert any(name in message for name in missing)
    assert any(name in message for name in came)


def test_all_faults_are_named_up_to_a_limit(tmp_path: Path, served: dict[str, TensorSpec]) -> None:
    extra = {f"x{i}": torch.ones(1) for i in range(100)}
    found = complaints(written(tmp_path / "much", model=extra), served)
    assert 3 < len(found) < 20
    assert found["tensors[a.weight]"].startswith("is missing")
    assert found["tensors[x0]"].startswith("is not a tensor of the model")


def test_a_folder_that_holds_no_weights_is_refused(tmp_path: Path, served: dict[str, TensorSpec]) -> None:
    (tmp_path / "empty").mkdir()
    (tmp_path / "empty" / "model.bin").write_bytes(b"x")
    file = written(tmp_path / "good", model=tensors()) / "model.safetensors"
    for place in (tmp_path / "nowhere", tmp_path / "empty", file):
        found = complaints(place, served)
        assert found.keys() == {"disk.path"}
        assert str(place) in found["disk.path"]
        with pytest.raises(InvalidArgument):
            read_manifest(place)


def test_a_file_that_cannot_be_read_is_refused(tmp_path: Path, served: dict[str, TensorSpec]) -> None:
    folder = tmp_path / "odd"
    (folder / "model.safetensors").mkdir(parents=True)
    assert "cannot be read" in complaints(folder, served)["disk.path"]
    (folder / "model.safetensors").rmdir()
    (folder / "model.safetensors").symlink_to(tmp_path / "gone")
    assert "cannot be read" in complaints(folder, served)["disk.path"]


def test_a_file_cut_anywhere_is_data_loss(tmp_path: Path, served: dict[str, TensorSpec]) -> None:
    folder = written(tmp_path / "cut", model=tensors())
    file = folder / "model.safetensors"
    content = file.read_bytes()
    for size in range(0, len(content)):
        file.write_bytes(content[:size])
        with pytest.raises(DataLoss, match="truncated or corrupt"):
            stage(folder, 1, served)


def test_a_cut_header_is_data_loss_for_the_manifest_too(tmp_path: Path) -> None:
    folder = written(tmp_path / "cut", model=tensors())
    file = folder / "model.safetensors"
    content = file.read_bytes()
    for size in (0, 5, 8, 60):
        file.write_bytes(content[:size])
        with pytest.raises(DataLoss):
            read_manifest(folder)
    file.write_bytes(struct.pack("<Q", 1 << 62) + content[8:])
    with pytest.raises(DataLoss):
        read_manifest(folder)


def test_random_damage_to_the_header_is_refused_with_a_typed_error_or_harmless(
    tmp_path: Path, served: dict[str, TensorSpec]
) -> None:
    folder = written(tmp_path / "damaged", model=tensors())
    file = folder / "model.safetensors"
    content = file.read_bytes()
    header = 8 + struct.unpack("<Q", content[:8])[0]
    chosen = random.Random(0)
    refused = 0
    for _ in range(500):
        damaged = bytearray(content)
        damaged[chosen.randrange(header)] = chosen.randrange(256)
        file.write_bytes(damaged)
        try:
            staged = stage(folder, 1, served)
        except (DataLoss, InvalidArgument):
            refused += 1
        else:
            assert {name: tuple(t.shape) for name, t in staged.tensors.items()} == {
                name: spec.shape for name, spec in served.items()
            }
    assert refused > 400


@pytest.mark.parametrize("offsets", [[0.0, 96], [0, 96.0], [False, 96]])
def test_offsets_that_equal_integers_and_are_none_are_data_loss(tmp_path: Path, offsets: list[Any]) -> None:
    folder = written(tmp_path / "served", model={EMBEDDING: torch.ones(6, 4)})
    expected = read_manifest(folder)
    header = json.dumps({EMBEDDING: {"dtype": "F32", "shape": [6, 4], "data_offsets": offsets}}).encode()
    content = struct.pack("<Q", len(header)) + header + bytes(96)
    (folder / "model.safetensors").write_bytes(content)
    with pytest.raises(DataLoss, match="must be integers"):
        stage(folder, 1, expected)


@pytest.mark.parametrize("dtype", ["F4", "F8_E8M0", "F99"])
def test_a_dtype_that_torch_does_not_know_is_refused(
    tmp_path: Path, served: dict[str, TensorSpec], dtype: str
) -> None:
    header = json.dumps({"a": {"dtype": dtype, "shape": [8], "data_offsets": [0, 4 if dtype == "F4" else 8]}})
    folder = tmp_path / "strange"
    folder.mkdir()
    content = struct.pack("<Q", len(header)) + header.encode() + bytes(4 if dtype == "F4" else 8)
    (folder / "model.safetensors").write_bytes(content)
    with pytest.raises((InvalidArgument, DataLoss), match=dtype):
        stage(folder, 1, served)


@pytest.mark.parametrize("checksum", ["sha256:" + "0" * 64, "md5:1", "x"])
def test_another_checksum_is_data_loss(tmp_path: Path, served: dict[str, TensorSpec], checksum: str) -> None:
    folder = written(tmp_path / "new", model=tensors())
    with pytest.raises(DataLoss, match=f"the sender computed {checksum}"):
        stage(folder, 1, served, checksum)


# -- folders of the SDK ----------------------------------------------------------------------------------------


@pytest.fixture
def indexed(tmp_path: Path) -> Path:
    """A folder of the SDK, with a file for each tensor."""
    folder = tmp_path / "indexed"
    folder.mkdir()
    safetensors.write(folder, tensors(), 1)
    return folder


def test_a_folder_of_the_sdk_is_checked_by_its_index(indexed: Path, served: dict[str, TensorSpec]) -> None:
    (indexed / "stray.safetensors").write_bytes(b"not in the index")
    checksum = safetensors.checksum(indexed)
    for sent in ("", checksum):
        staged = stage(indexed, 2, served, sent)
        assert staged.checksum == checksum
        for name, tensor in tensors().items():
            assert torch.equal(staged.tensors[name].view(torch.uint8), tensor.view(torch.uint8))
    with pytest.raises(DataLoss, match="the sender computed index-sha256:0"):
        stage(indexed, 2, served, "index-sha256:0")


def test_a_checksum_over_all_files_holds_for_a_folder_with_an_index_too(
    indexed: Path, served: dict[str, TensorSpec]
) -> None:
    content = b"".join(path.read_bytes() for path in sorted(indexed.glob("*.safetensors")))
    checksum = f"sha256:{hashlib.sha256(content).hexdigest()}"
    assert stage(indexed, 2, served, checksum).checksum == checksum


def test_any_flipped_bit_names_the_file(indexed: Path, served: dict[str, TensorSpec]) -> None:
    file = indexed / "model-00002-of-00003.safetensors"
    content = bytearray(file.read_bytes())
    for place in (len(content) - 1, 40, 9):
        content[place] ^= 1
        file.write_bytes(content)
        with pytest.raises((DataLoss, InvalidArgument), match="model-00002-of-00003"):
            stage(indexed, 2, served)
        content[place] ^= 1
    # Spaces behind the header mean nothing to a reader, and are checked all the same.
    content[1000] = ord("\t")
    file.write_bytes(content)
    with pytest.raises(DataLoss, match=r"model-00002-of-00003\.safetensors is corrupt: its SHA-256 is"):
        stage(indexed, 2, served)


def test_a_file_that_is_missing_or_cut_is_named(indexed: Path, served: dict[str, TensorSpec]) -> None:
    file = indexed / "model-00003-of-00003.safetensors"
    content = file.read_bytes()
    file.write_bytes(content[:-1])
    with pytest.raises(DataLoss, match=r"model-00003-of-00003\.safetensors is truncated or corrupt"):
        stage(indexed, 2, served)
    file.unlink()
    with pytest.raises(DataLoss, match=r"model-00003-of-00003\.safetensors is missing"):
        stage(indexed, 2, served)


def test_a_fault_names_the_tensor_and_its_file(tmp_path: Path, served: dict[str, TensorSpec]) -> None:
    content = tensors()
    content["b.weight"][1] = math.nan
    folder = tmp_path / "nan"
    folder.mkdir()
    safetensors.write(folder, content, 1)
    assert complaints(folder, served) == {
        "tensors[b.weight]": "has 1 values that are NaN or infinite (model-00003-of-00003.safetensors)"
    }


@pytest.mark.parametrize(
    ("index", "complaint"),
    [
        ("{", "is no index"),
        ("[]", "is no index"),
        ('{"metadata": {"shards": ["a"]}}', "is corrupt"),
        ('{"metadata": {"shards": {"a.safetensors": {}}}}', "is corrupt"),
        ('{"metadata": {"shards": {"../a.safetensors": {"sha256": ""}}}}', "is no file name"),
        ('{"metadata": {"shards": {}}}', "is missing; the model that is served has it"),
    ],
)
def test_a_damaged_index_is_refused(
    indexed: Path, served: dict[str, TensorSpec], index: str, complaint: str
) -> None:
    (indexed / safetensors.INDEX).write_text(index)
    with pytest.raises((DataLoss, InvalidArgument), match=complaint):
        stage(indexed, 2, served)


MEMORY = """
import sys
from pathlib import Path
import numpy as np
import torch
from paceline.weights import safetensors
from services.generation.weights.staging import read_manifest
from services.generation.weights.staging import stage

def private():
    lines = dict(line.split(":", 1) for line in open("/proc/self/smaps_rollup") if ":" in line)
    return sum(int(lines[name].split()[0]) for name in ("Private_Clean", "Private_Dirty"))

def folder_of(name, count):
    folder = Path(sys.argv[1]) / name
    folder.mkdir()
    # 8 MiB each.
    pairs = ((f"layer.{number}", np.full((1024, 2048), number, np.float32)) for number in range(count))
    safetensors.write(folder, pairs, 100 << 20)
    return folder

small, large = folder_of("small", 1), folder_of("large", 40)
stage(small, 1, read_manifest(small))
before = private()
staged = stage(large, 1, read_manifest(large))
after, total, most = private(), 0.0, 0
for name, tensor in staged.tensors.items():
    total += float(tensor.sum())
    most = max(most, private())
print(after - before, most - before, int(total))
"""


def test_a_model_is_staged_and_applied_with_one_tensor_in_memory(tmp_path: Path) -> None:
    """40 tensors of 8 MiB: 320 MiB, of which at most the tensor that is read may be the process's own."""
    ended = subprocess.run(
        [sys.executable, "-c", MEMORY, tmp_path], capture_output=True, text=True, check=True
    )
    staged, applied, total = map(int, ended.stdout.split())
    assert staged < 8 << 10, "kilobytes"
    assert applied < 32 << 10, "kilobytes"
    assert total == sum(range(40)) * 2048 * 1024


# -- the tied head --------------------------------------------------------------------------------------------


def tied_model(folder: Path, tied: bool, head: bool) -> dict[str, TensorSpec]:
    content = tensors() | ({HEAD: tensors()[EMBEDDING]} if head else {})
    written(folder, model=content)
    (folder / "config.json").write_text(json.dumps({"tie_word_embeddings": tied}))
    return read_manifest(folder)


@pytest.mark.parametrize("served_has_head", [False, True])
@pytest.mark.parametrize("sent_has_head", [False, True])
def test_a_tied_head_may_be_sent_or_left_out(
    tmp_path: Path, served_has_head: bool, sent_has_head: bool
) -> None:
    served = tied_model(tmp_path / "served", tied=True, head=served_has_head)
    sent = tensors() | ({HEAD: tensors()[EMBEDDING]} if sent_has_head else {})
    staged = stage(written(tmp_path / "sent", model=sent), 1, served)
    assert staged.tensors.keys() == tensors().keys()


def test_a_head_that_differs_from_the_embedding_is_not_tied(tmp_path: Path) -> None:
    served = tied_model(tmp_path / "served", tied=True, head=False)
    sent = tensors() | {HEAD: tensors()[EMBEDDING] + 1}
    found = complaints(written(tmp_path / "sent", model=sent), served)
    assert found[f"tensors[{HEAD}]"].startswith(f"differs from {EMBEDDING}, to which it is tied")


@pytest.mark.parametrize("sent_has_head", [False, True])
def test_a_head_that_the_checkpoint_has_of_its_own_is_served_whatever_the_configuration_says(
    tmp_path: Path, sent_has_head: bool
) -> None:
    content = tensors() | {HEAD: tensors()[EMBEDDING] + 1}
    folder = written(tmp_path / "served", model=content)
    (folder / "config.json").write_text(json.dumps({"tie_word_embeddings": True}))
    served = read_manifest(folder, "float32")
    assert HEAD in served
    if sent_has_head:
        staged = stage(written(tmp_path / "sent", model=content), 1, served)
        assert torch.equal(staged.tensors[HEAD], content[HEAD])
    else:
        found = complaints(written(tmp_path / "sent", model=tensors()), served)
        assert found[f"tensors[{HEAD}]"].startswith("is missing")


def test_a_head_is_tied_where_it_equals_the_embedding_as_it_is_loaded(tmp_path: Path) -> None:
    close = tensors() | {HEAD: tensors()[EMBEDDING] * (1 + 2**-20)}
    folder = written(tmp_path / "served", model=close)
    assert HEAD not in read_manifest(folder, "bfloat16", ties_head=True)
    assert HEAD in read_manifest(folder, "float32", ties_head=True)
    assert HEAD in read_manifest(folder, "bfloat16", ties_head=False)


def test_a_model_with_a_head_of_its_own_needs_it(tmp_path: Path) -> None:
    served = tied_model(tmp_path / "served", tied=False, head=True)
    found = complaints(written(tmp_path / "sent", model=tensors()), served)
    assert found[f"tensors[{HEAD}]"].startswith("is missing")


def fifo(place: Path) -> None:
    os.mkfifo(place)


def endless(place: Path) -> None:
    place.symlink_to("/dev/zero")


def socket_of(place: Path) -> None:
    with socket.socket(socket.AF_UNIX) as listening:
        listening.bind(os.path.relpath(place))


def nested(place: Path) -> None:
    place.write_text("[" * 10**6)


def header_of(place: Path, header: bytes) -> None:
    place.write_bytes(struct.pack("<Q", len(header)) + header)


def long_header(place: Path) -> None:
    header_of(place, b" " * (2 << 20))


def deep_header(place: Path) -> None:
    header_of(place, b"[" * 10**6)


def many_tensors(place: Path) -> None:
    empty = '{"dtype":"F32","shape":[0],"data_offsets":[0,0]}'
    header_of(place, ("{" + ",".join(f'"{n}":{empty}' for n in range(1001)) + "}").encode())


def many_dimensions(place: Path) -> None:
    shape = json.dumps([1] * 20_000)
    header_of(place, f'{{"w":{{"dtype":"F32","shape":{shape},"data_offsets":[0,4]}}}}'.encode() + bytes(4))


def sparse(place: Path) -> None:
    with place.open("wb") as file:
        file.truncate(1 << 40)


def sparse_tensors(**shapes: list[int]) -> Callable[[Path], None]:
    """A file that is as long as its header says, and takes no room on the disk."""

    def write(place: Path) -> None:
        entries, end = {}, 0
        for name, shape in shapes.items():
            begin, end = end, end + 4 * math.prod(shape)
            entries[name] = {"dtype": "F32", "shape": shape, "data_offsets": [begin, end]}
        header = json.dumps(entries).encode()
        header_of(place, header)
        with place.open("ab") as file:
            file.truncate(8 + len(header) + end)

    return write


SHARD, OTHER = "model.safetensors", "other.safetensors"
LARGE = [1 << 38]
TIED = {EMBEDDING: LARGE, HEAD: LARGE}


@pytest.mark.timeout(60)
@pytest.mark.parametrize("adopts", [False, True], ids=["in-place", "adopted"])
@pytest.mark.parametrize("checksum", ["", "sha256:0"], ids=["unknown", "given"])
@pytest.mark.parametrize(
    ("name", "spoil"),
    [
        (SHARD, sparse),
        (OTHER, sparse),
        (INDEX, sparse),
        (SHARD, sparse_tensors(**{"a.weight": LARGE})),
        (OTHER, sparse_tensors(more=LARGE)),
        (OTHER, sparse_tensors(**TIED)),
    ],
    ids=["weights", "beside-them", "index", "tensor", "surplus-tensor", "tied-head"],
)
def test_a_file_of_a_tebibyte_is_refused_before_it_is_read(
    tmp_path: Path, name: str, spoil: Callable[[Path], None], adopts: bool, checksum: str
) -> None:
    """It takes no room, and hours to read or copy."""
    model = {"a.weight": torch.ones(4), EMBEDDING: torch.ones(4, 2)}
    served = read_manifest(written(tmp_path / "model", model=model))
    folder = written(tmp_path / "sent", model={"a.weight": torch.ones(4)})
    spoil(folder / name)
    adopted = AdoptedWeights(tmp_path / "adopted") if adopts else None
    reader = WeightReader(tmp_path / "model", served, None, adopted)
    with pytest.raises((InvalidArgument, DataLoss, FailedPrecondition)):
        reader.read(1, GivenWeights(folder, checksum))
    assert not list(tmp_path.glob("adopted/v*"))
    assert not list(tmp_path.glob("adopted/.taking*"))


@pytest.mark.parametrize("linked", [False, True], ids=["copied", "linked"])
def test_what_the_index_does_not_name_is_left_alone(
    tmp_path: Path,
    indexed: Path,
    served: dict[str, TensorSpec],
    linked: bool,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    sparse(indexed / OTHER)
    if not linked:
        monkeypatch.setattr(os, "link", lambda *_: (_ for _ in ()).throw(OSError(18, "another disk")))
    adopted = AdoptedWeights(tmp_path / "adopted")
    staged = WeightReader(tmp_path, served, None, adopted).read(1, GivenWeights(indexed))
    place = adopted.held(1, staged.checksum)
    assert place is not None
    assert OTHER not in [path.name for path in place.iterdir()]


@pytest.mark.parametrize("adopts", [False, True], ids=["in-place", "adopted"])
@pytest.mark.parametrize(
    ("name", "spoil"),
    [
        *(
            (name, spoil)
            for name in (SHARD, INDEX)
            for spoil in (fifo, endless, socket_of, nested, Path.mkdir)
        ),
        *((SHARD, spoil) for spoil in (long_header, deep_header, many_tensors, many_dimensions)),
    ],
    ids=lambda each: each if isinstance(each, str) else each.__name__,
)
def test_a_hostile_folder_is_refused_or_harmless(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    served: dict[str, TensorSpec],
    name: str,
    spoil: Callable[[Path], None],
    adopts: bool,
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(files, "_MOST_HEADER_BYTES", 1 << 20)
    monkeypatch.setattr(files, "_MOST_TENSORS", 1000)
    folder = written(tmp_path / "sent", model=tensors())
    (folder / name).unlink(missing_ok=True)
    spoil(folder / name)
    adopted = AdoptedWeights(tmp_path / "adopted") if adopts else None
    reader = WeightReader(tmp_path / "served", served, None, adopted)
    # An index that is no file is none: the files are read without it.
    harmless = name == INDEX and spoil is not nested
    with nullcontext() if harmless else pytest.raises((InvalidArgument, DataLoss, FailedPrecondition)):
        staged = reader.read(1, GivenWeights(folder))
        assert staged.tensors.keys() == served.keys()
    assert not list(tmp_path.glob("adopted/.taking*"))
