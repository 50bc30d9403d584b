"""Write safetensors folders in one pass with numpy alone, and name what is in them by a checksum.

A shard is a safetensors file: 8 bytes little-endian length of the header, the header in JSON (`name -> dtype,
shape, data_offsets`), padded with spaces, then the tensors' bytes one after the other. The header is known last
and stands first, so a place of fixed size is left for it.

`model.safetensors.index.json`, which is written last, is the index that Hugging Face's loaders read. Its
`metadata.shards` has the size of each file, and the SHA-256 of its tensors' bytes followed by its header.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Callable, Iterable, Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

SHARD_BYTES = 2 * 10**9
"""Largest file, unless a single tensor is larger."""
INDEX = "model.safetensors.index.json"
"""Name of a folder's index."""

Tensors = Mapping[str, Any] | Iterable[tuple[str, Any]]
"""Tensors (numpy arrays, or objects with torch's tensor methods) by name, or pairs of name and tensor."""

_DTYPES = {
    "float64": "F64",
    "float32": "F32",
    "float16": "F16",
    "bfloat16": "BF16",
    "int64": "I64",
    "int32": "I32",
    "int16": "I16",
    "int8": "I8",
    "uint8": "U8",
    "bool": "BOOL",
}
_READ_BYTES = 1 << 20
# A multiple of every page size, so that mapped tensors are aligned. Room for about a thousand tensors.
_HEADER_BYTES = 128 << 10
_HEADER_START = '{"__metadata__":{"format":"pt"}'


@dataclass(frozen=True, slots=True)
class _Entry:
    name: str
    dtype: str
    shape: tuple[int, ...]
    size: int
    """Bytes."""
    load: Callable[[], npt.NDArray[Any]]
    """Loads the values into memory; called for one tensor at a time."""


class _Shard:
    """One file while it is written."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.names: list[str] = []
        self.bytes = _HEADER_BYTES
        self.digest = hashlib.sha256()
        self._header = [_HEADER_START]
        # The length in front, and the bracket at the end.
        self._room = _HEADER_BYTES - 8 - len(_HEADER_START) - 1
        self._file = path.open("xb")
        self._file.seek(_HEADER_BYTES)

    def add(self, entry: _Entry, most_bytes: int) -> bool:
        """Write a tensor; return False if it needs another shard."""
        begin = self.bytes - _HEADER_BYTES
        described = {
            "dtype": entry.dtype,
            "shape": list(entry.shape),
            "data_offsets": [begin, begin + entry.size],
        }
        text = f",{json.dumps(entry.name)}:{json.dumps(described, separators=(',', ':'))}"
        if len(text) > self._room or (self.names and self.bytes + entry.size > most_bytes):
            return False
        self._header.append(text)
        self._room -= len(text)
        self.names.append(entry.name)
        self.bytes += entry.size
        if entry.size:
            content = entry.load().data.cast("B")
            for start in range(0, entry.size, _READ_BYTES):
                chunk = content[start : start + _READ_BYTES]
                self.digest.update(chunk)
                self._file.write(chunk)
        return True

    def finish(self) -> None:
        """Write the header and sync the file."""
        text = "".join([*self._header, "}"]).encode().ljust(_HEADER_BYTES - 8)
        header = len(text).to_bytes(8, "little") + text
        self.digest.update(header)
        self._file.seek(0)
        self._file.write(header)
        self._file.flush()
        os.fsync(self._file.fileno())
        self.close()

    def close(self) -> None:
        """Close the file as it is."""
        self._file.close()


def write(folder: Path, tensors: Tensors, shard_bytes: int = SHARD_BYTES) -> None:
    """Write tensors and their index into a folder that has none, with one of them in memory at a time.

    The index appears last: a folder without it is not whole.

    Raises:
        ValueError: there is no tensor, or one has a dtype that the format lacks, or a name that came before or that
            no header has room for.
    """
    shards: list[_Shard] = []
    seen: set[str] = set()
    with ExitStack() as opened:
        for name, tensor in tensors.items() if isinstance(tensors, Mapping) else tensors:
            if name in seen:
                raise ValueError(f"tensor {name!r} came twice")
            seen.add(name)
            entry = _entry(name, tensor)
            if not shards or not shards[-1].add(entry, shard_bytes):
                if shards:
                    shards[-1].finish()
                shards.append(_Shard(folder / f"{len(shards):05d}.unfinished"))
                opened.callback(shards[-1].close)
                if not shards[-1].add(entry, shard_bytes):
                    raise ValueError(f"tensor {name[:80]!r}... has a name of {len(name)} characters")
            # Not in memory while an iterator makes the next one.
            del tensor, entry
        if not shards:
            raise ValueError("there are no tensors to write")
        shards[-1].finish()
    _name_shards(folder, shards)
    _write_index(folder, shards)


def checksum(folder: Path) -> str:
    """Return the checksum of a folder's weights: `index_checksum`, or without one `sha256:<hex>` of all files.

    The latter is of the safetensors files in name order. ValueError: there are none.
    """
    if found := index_checksum(folder):
        return found
    files = sorted(folder.glob("*.safetensors"))
    if not files:
        raise ValueError(f"no safetensors files in {folder}")
    digest = hashlib.sha256()
    for path in files:
        with path.open("rb") as file:
            while chunk := file.read(_READ_BYTES):
                digest.update(chunk)
    return f"sha256:{digest.hexdigest()}"


def index_checksum(folder: Path) -> str:
    """Return `index-sha256:<hex>` of a folder's index, "" if it has none with the checksums of its files.

    ValueError: the index is not one.
    """
    path = folder / INDEX
    if not path.is_file():
        return ""
    content = path.read_bytes()
    try:
        listed = "shards" in json.loads(content).get("metadata", {})
    except (ValueError, AttributeError, TypeError) as error:
        raise ValueError(f"{path} is no index: {error}") from error
    return f"index-sha256:{hashlib.sha256(content).hexdigest()}" if listed else ""


def sync(path: Path) -> None:
    """Make a file durable, or the names in a folder."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _name_shards(folder: Path, shards: list[_Shard]) -> None:
    """Rename the files as Hugging Face does, now that their number is known."""
    for number, shard in enumerate(shards, 1):
        parts = "" if len(shards) == 1 else f"-{number:05d}-of-{len(shards):05d}"
        shard.path = shard.path.rename(folder / f"model{parts}.safetensors")


def _write_index(folder: Path, shards: list[_Shard]) -> None:
    metadata = {
        "total_size": sum(shard.bytes - _HEADER_BYTES for shard in shards),
        "shards": {
            shard.path.name: {"bytes": shard.bytes, "sha256": shard.digest.hexdigest()} for shard in shards
        },
    }
    places = {name: shard.path.name for shard in shards for name in shard.names}
    unfinished = folder / f"{INDEX}.unfinished"
    with unfinished.open("x") as file:
        json.dump({"metadata": metadata, "weight_map": places}, file)
        file.flush()
        os.fsync(file.fileno())
    unfinished.rename(folder / INDEX)
    sync(folder)


def _entry(name: str, tensor: Any) -> _Entry:
    kind = str(tensor.dtype).removeprefix("torch.")
    if kind not in _DTYPES:
        known = ", ".join(_DTYPES)
        raise ValueError(f"tensor {name!r} has dtype {kind}, which safetensors files cannot hold ({known})")
    if hasattr(tensor, "detach"):
        size = tensor.numel() * tensor.element_size()
        return _Entry(name, _DTYPES[kind], tuple(tensor.shape), size, lambda: _from_torch(tensor, kind))
    return _Entry(name, _DTYPES[kind], tensor.shape, tensor.nbytes, lambda: _little_endian(tensor))


def _from_torch(tensor: Any, kind: str) -> npt.NDArray[Any]:
    """Return the values of a torch tensor; numpy has no bfloat16, so its bits travel as int16."""
    tensor = tensor.detach().cpu().contiguous()
    if kind == "bfloat16":
        import torch  # only a process that has a torch tensor gets here

        tensor = tensor.view(torch.int16)
    return _little_endian(tensor.numpy())


def _little_endian(array: npt.NDArray[Any]) -> npt.NDArray[Any]:
    contiguous: npt.NDArray[Any] = np.ascontiguousarray(array, array.dtype.newbyteorder("<"))
    return contiguous
