"""Stage weights: read and check every byte once, in bounded memory, before any of it reaches the engine.

A reload that fails half-way leaves vLLM unusable, so nothing gets there that has not passed here: names, shapes and
dtypes by the headers of all files, then the checksum of each file and the finiteness of each tensor, in one pass of
reads into one buffer. What passed is mapped from the same files when it is applied.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from io import FileIO
from itertools import cycle
from pathlib import Path
from typing import Any

import numpy as np
import torch

from paceline.errors import Violation
from paceline.expansion import checksum as folder_checksum
from paceline.overlapped_sha256 import OverlappedSha256
from paceline.safetensors import index_checksum
from services.contracts.errors import DataLoss, InvalidArgument
from services.generation.engine.types import TensorSpec
from services.generation.weights.shards import (
    FLOATS,
    MappedTensors,
    StoredTensor,
    WeightShard,
    open_shards,
    read_header,
    weight_files,
)

_HEAD, _EMBEDDING = "lm_head.weight", "model.embed_tokens.weight"
# More than this many faults of one kind help nobody.
_MOST_VIOLATIONS = 16
_CHUNK_BYTES = 1 << 20
# Bits of a float, and the least of those that are NaN or infinite, shifted left by the sign.
_NONFINITE_FROM: dict[str, tuple[type[np.unsignedinteger[Any]], int]] = {
    "F64": (np.uint64, 0xFFE0 << 48),
    "F32": (np.uint32, 0xFF00 << 16),
    "F16": (np.uint16, 0xF800),
    "BF16": (np.uint16, 0xFF00),
    "F8_E4M3": (np.uint8, 0xFE),
    "F8_E5M2": (np.uint8, 0xF8),
}


@dataclass(frozen=True, slots=True)
class StagedWeights:
    """A complete, checked set of weights on disk, and its checksum (see `paceline.safetensors.checksum`)."""

    version: int
    checksum: str
    tensors: MappedTensors


@dataclass(frozen=True, slots=True)
class ShardContent:
    """Contents of a file as they were read: their SHA-256, and values that are not finite by tensor."""

    sha256: str
    nonfinite: Mapping[str, int]


def read_manifest(folder: Path) -> dict[str, TensorSpec]:
    """Return names, shapes and dtypes of a model's tensors, from the headers of its safetensors alone.

    An output head that is tied to the embedding is left out, whether or not the checkpoint has a copy of it.

    Raises:
        InvalidArgument: no such folder, or no safetensors in it.
        DataLoss: a file ends inside its header.
    """
    found: dict[str, TensorSpec] = {}
    for file in weight_files(folder):
        for name, entry in read_header(file)[1].items():
            found[name] = TensorSpec(name, tuple(entry["shape"]), str(entry["dtype"]))
    config = folder / "config.json"
    if config.is_file() and json.loads(config.read_bytes()).get("tie_word_embeddings"):
        found.pop(_HEAD, None)
    return found


def stage(
    folder: Path,
    version: int,
    expected: Mapping[str, TensorSpec],
    checksum: str = "",
    read: Mapping[tuple[int, ...], ShardContent] | None = None,
) -> StagedWeights:
    """Read and check the weights of a policy version.

    Args:
        folder: where the safetensors files are.
        version: the policy version that they will be.
        expected: the manifest of the model that is served.
        checksum: what the sender computed, or "" when it did not.
        read: contents of files that were read already, by the files' stamps.

    Raises:
        InvalidArgument: folder missing, or names, shapes, dtypes or values that cannot be served.
        DataLoss: a file is missing, truncated or corrupt, or a checksum differs.
    """
    index = "" if checksum.startswith("sha256:") else _index_checksum(folder)
    if index and checksum not in ("", index):
        raise DataLoss(f"checksum of the index in {folder} is {index}, the sender computed {checksum}")
    shards = open_shards(folder, indexed=bool(index))
    placed = _placed(shards)
    _drop_tied_head(placed, expected)
    if violations := _compare(placed, expected):
        raise InvalidArgument(violations)
    whole = OverlappedSha256()
    violations = [violation for shard in shards for violation in _check_content(shard, whole, read or {})]
    computed = index or f"sha256:{whole.hexdigest()}"
    if checksum not in ("", computed):
        raise DataLoss(f"checksum of {folder} is {computed}, the sender computed {checksum}")
    if violations:
        raise InvalidArgument(violations[:_MOST_VIOLATIONS])
    return StagedWeights(version, computed, MappedTensors(placed))


def checksum_of(folder: Path) -> str:
    """Return the checksum of a folder, for a sender that gave none; "" for one that `stage` will refuse."""
    try:
        return folder_checksum(folder)
    except (OSError, ValueError):
        return ""


def _index_checksum(folder: Path) -> str:
    try:
        return index_checksum(folder)
    except ValueError as error:
        raise DataLoss(f"{folder} is corrupt: {error}") from error
    except OSError as error:
        raise InvalidArgument([Violation("disk.path", f"{folder} cannot be read: {error}")]) from error


def _placed(shards: Sequence[WeightShard]) -> dict[str, WeightShard]:
    """Return the file of each tensor."""
    placed: dict[str, WeightShard] = {}
    twice = []
    for shard in shards:
        twice += [
            _violation(name, f"is in more than one file, also in {placed[name].path.name}", shard)
            for name in sorted(placed.keys() & shard.tensors.keys())
        ]
        placed |= dict.fromkeys(shard.tensors, shard)
    if twice:
        raise InvalidArgument(twice[:_MOST_VIOLATIONS])
    return placed


def _drop_tied_head(placed: dict[str, WeightShard], expected: Mapping[str, TensorSpec]) -> None:
    """Drop the tied output head that a trainer's state dict names and the checkpoint leaves out."""
    if _HEAD in expected or _HEAD not in placed or _EMBEDDING not in placed:
        return
    tensors = MappedTensors(placed)
    head, embedding = tensors[_HEAD], tensors[_EMBEDDING]
    if head.dtype == embedding.dtype and torch.equal(head, embedding):
        del placed[_HEAD]


def _compare(placed: Mapping[str, WeightShard], expected: Mapping[str, TensorSpec]) -> list[Violation]:
    violations = [
        Violation(f"tensors[{name}]", "is missing; the model that is served has it")
        for name in sorted(expected.keys() - placed.keys())
    ]
    violations += [
        _violation(name, "is not a tensor of the model that is served", placed[name])
        for name in sorted(placed.keys() - expected.keys())
    ]
    for name in sorted(placed.keys() & expected.keys()):
        got, want = placed[name].tensors[name], expected[name]
        if got.shape != want.shape:
            text = f"has shape {list(got.shape)}, allowed is {list(want.shape)}"
            violations.append(_violation(name, text, placed[name]))
        elif want.dtype in FLOATS and got.dtype not in FLOATS:
            text = f"has dtype {got.dtype}, allowed are {', '.join(sorted(FLOATS))}"
            violations.append(_violation(name, text, placed[name]))
    return violations[:_MOST_VIOLATIONS]


def _check_content(
    shard: WeightShard, whole: OverlappedSha256, read: Mapping[tuple[int, ...], ShardContent]
) -> list[Violation]:
    """Return the tensors that are not finite; check the file's checksum, or else add it to `whole`.

    Raises:
        DataLoss: its checksum differs from the index's, or it changed since its header was read.
    """
    if shard.sha256:
        content = read.get(shard.stamp) or read_content(shard)
        if content.sha256 != shard.sha256:
            text = f"{shard.path} is corrupt: its SHA-256 is {content.sha256}"
            raise DataLoss(f"{text}, the index says {shard.sha256}")
    else:
        content = read_content(shard, whole)
    return [
        _violation(name, f"has {bad} values that are NaN or infinite", shard)
        for name, bad in content.nonfinite.items()
    ]


def read_content(shard: WeightShard, whole: OverlappedSha256 | None = None) -> ShardContent:
    """Read a file once. Its SHA-256 is of its tensors and then its header, as the index has it.

    Without an index the file is added to `whole` as it is. DataLoss: it changed since its header was read.
    """
    digest = OverlappedSha256() if whole is None else whole
    # One is filled and looked at while the other is hashed.
    buffers = cycle([memoryview(bytearray(max(_CHUNK_BYTES, shard.header_bytes))) for _ in range(2)])
    found: dict[str, int] = {}
    with os.fdopen(shard.open(), "rb", buffering=0) as file:
        header = bytes(_filled(file, next(buffers)[: shard.header_bytes]))
        if whole is not None:
            digest.update(header)
        for name, stored in shard.tensors.items():
            bad = 0
            for start in range(0, stored.size, _CHUNK_BYTES):
                chunk = _filled(file, next(buffers)[: min(_CHUNK_BYTES, stored.size - start)])
                digest.update(chunk)
                bad += _count_nonfinite(chunk, stored)
            if bad:
                found[name] = bad
    if whole is None:
        digest.update(header)
    return ShardContent(digest.hexdigest(), found)


def _filled(file: FileIO, view: memoryview) -> memoryview:
    """Read as many bytes as the view has."""
    read = 0
    while read < len(view):
        count = file.readinto(view[read:])
        if not count:
            raise DataLoss(f"{file.name} is truncated or corrupt: it ended while it was read")
        read += count
    return view


def _count_nonfinite(chunk: memoryview, stored: StoredTensor) -> int:
    """Count NaN and infinities by their exponents.

    torch would wake a pool of threads for each chunk, beside those of the engine.
    """
    if stored.dtype not in _NONFINITE_FROM:
        return 0
    kind, lowest = _NONFINITE_FROM[stored.dtype]
    without_sign = np.frombuffer(chunk, kind) << kind(1)
    return 0 if without_sign.max() < lowest else int(np.count_nonzero(without_sign >= lowest))


def _violation(name: str, text: str, shard: WeightShard) -> Violation:
    return Violation(f"tensors[{name}]", f"{text} ({shard.path.name})")
