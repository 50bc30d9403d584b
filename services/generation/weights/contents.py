"""Contents of weight files, read once: their SHA-256, and how large the values of each tensor are."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import cache
from io import FileIO
from itertools import cycle
from typing import Any

import numpy as np
import torch

from paceline.overlapped_sha256 import OverlappedSha256
from services.contracts.errors import DataLoss
from services.generation.weights.shards import DTYPES, StoredTensor, WeightShard

_CHUNK_BYTES = 1 << 20
# Bits of floats as integers: shifted left by the sign, they are in the order of the values, NaN last.
_BITS: dict[str, type[np.unsignedinteger[Any]]] = {
    "F64": np.uint64,
    "F32": np.uint32,
    "F16": np.uint16,
    "BF16": np.uint16,
    "F8_E4M3": np.uint8,
    "F8_E5M2": np.uint8,
}


Proceed = Callable[[], object]
"""Called again and again while weights are read or written; what it raises ends the work."""


def unhindered() -> None:
    """Let work go on to its end."""


@dataclass(frozen=True, slots=True)
class ShardContent:
    """Contents of a file as they were read: their SHA-256, and the largest value of each tensor of floats.

    `largest` is the bits of that value, shifted left by the sign.
    """

    sha256: str
    largest: Mapping[str, int]


def read_content(
    shard: WeightShard, whole: OverlappedSha256 | None = None, proceed: Proceed = unhindered
) -> ShardContent:
    """Read a file once. Its SHA-256 is of its tensors and then its header, as the index has it.

    Without an index the file is added to `whole` as it is. DataLoss: it changed since its header was read.
    """
    digest = OverlappedSha256() if whole is None else whole
    # One is filled and looked at while the other is hashed.
    buffers = cycle([memoryview(bytearray(max(_CHUNK_BYTES, shard.header_bytes))) for _ in range(2)])
    largest: dict[str, int] = {}
    with os.fdopen(shard.open(), "rb", buffering=0) as file:
        header = bytes(_filled(file, next(buffers)[: shard.header_bytes]))
        if whole is not None:
            digest.update(header)
        for name, stored in shard.tensors.items():
            found = 0
            for chunk in _chunks(file, stored, buffers):
                digest.update(chunk)
                found = max(found, _largest(chunk, stored.dtype))
                proceed()
            if stored.dtype in _BITS:
                largest[name] = found
    if whole is None:
        digest.update(header)
    return ShardContent(digest.hexdigest(), largest)


def fault_of(shard: WeightShard, name: str, largest: int, served: str) -> str:
    """Return what is wrong with the values of a tensor that is served as another dtype; "" if nothing is.

    A tensor in which something is wrong is read again. DataLoss: its file changed since its header was read.
    """
    dtype = shard.tensors[name].dtype
    nonfinite, overflow = least_infinite(dtype, dtype), least_infinite(dtype, served or dtype)
    if largest < overflow:
        return ""
    if largest >= nonfinite:
        return f"has {_count(shard, name, nonfinite)} values that are NaN or infinite"
    text = str(DTYPES[served]).removeprefix("torch.")
    return f"has {_count(shard, name, overflow)} values that are infinite in the model's {text}"


@cache
def least_infinite(dtype: str, served: str) -> int:
    """Return the least value of a dtype that is infinite or NaN as another: its bits, shifted left by the sign.

    Found by asking torch, which loads the weights: rounding up to infinity is its own.
    """
    kind = _BITS[dtype]
    low, high = 0, int(np.iinfo(kind).max)
    while low < high:
        # Bits without the sign's, which is 0 below.
        middle = (low + high) // 2
        value = torch.from_numpy(np.array([middle >> 1], kind).view(np.uint8).copy()).view(DTYPES[dtype])
        if torch.isfinite(value.to(DTYPES[served]).to(torch.float64)).item():
            low = middle + 1
        else:
            high = middle
    return low


def _count(shard: WeightShard, name: str, least: int) -> int:
    """Return how many values of a tensor are at least so large."""
    stored = shard.tensors[name]
    buffers = cycle([memoryview(bytearray(_CHUNK_BYTES))])
    with os.fdopen(shard.open(), "rb", buffering=0) as file:
        file.seek(stored.begin)
        return sum(
            int(np.count_nonzero(_without_sign(chunk, stored.dtype) >= least))
            for chunk in _chunks(file, stored, buffers)
        )


def _chunks(file: FileIO, stored: StoredTensor, buffers: Iterator[memoryview]) -> Iterator[memoryview]:
    for start in range(0, stored.size, _CHUNK_BYTES):
        yield _filled(file, next(buffers)[: min(_CHUNK_BYTES, stored.size - start)])


def _filled(file: FileIO, view: memoryview) -> memoryview:
    """Read as many bytes as the view has."""
    read = 0
    while read < len(view):
        count = file.readinto(view[read:])
        if not count:
            raise DataLoss(f"{file.name} is truncated or corrupt: it ended while it was read")
        read += count
    return view


def _largest(chunk: memoryview, dtype: str) -> int:
    """Return the largest value of a chunk, 0 if it has no floats.

    By numpy: torch would wake a pool of threads for each chunk, beside those of the engine.
    """
    return int(_without_sign(chunk, dtype).max()) if dtype in _BITS else 0


def _without_sign(chunk: memoryview, dtype: str) -> np.ndarray[Any, np.dtype[np.unsignedinteger[Any]]]:
    kind = _BITS[dtype]
    return np.frombuffer(chunk, kind) << kind(1)
