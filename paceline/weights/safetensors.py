"""Write safetensors folders in one pass with numpy alone, and name their content by a checksum.

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
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass
from io import BufferedWriter
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from paceline.files import open_regular, parse_object, read_regular

_WANTED = "give tensors by name, or pairs of name and tensor"
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


@dataclass(frozen=True, slots=True)
class Entry:
    """Tensor as a safetensors header describes it."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    size: int
    """Bytes."""
    load: Callable[[], npt.NDArray[Any]]
    """Loads the values into memory; called for one tensor at a time."""


def check(tensors: Any) -> None:
    """Raise ValueError, which names the first tensor that cannot be sent, as far as it is known without reading.

    Of anything but a dict or a list only the type is looked at: it may make each tensor when it is read.
    """
    _pairs(tensors)
    if isinstance(tensors, dict | list | tuple):
        for name, tensor in pairs_of(tensors):
            entry_of(name, tensor)


def pairs_of(tensors: Any, *, in_parts: bool = False) -> Iterator[tuple[str, Any]]:
    """Iterate over names and tensors of a mapping or of an iterable of pairs; ValueError: it is neither.

    Only with `in_parts` may ranks hold parts of a tensor.
    """
    for pair in _pairs(tensors):
        if not isinstance(pair, tuple | list) or len(pair) != 2 or not isinstance(pair[0], str):
            raise ValueError(f"the weights have a {type(pair).__name__}; {_WANTED}")
        if hasattr(pair[1], "full_tensor") and not in_parts:
            raise ValueError(
                f"tensor {pair[0]!r} is a DTensor; give its full_tensor(), or push ShardedTensors"
            )
        # Nothing is held here while the caller has the tensor, which may be large.
        given = [(pair[0], pair[1])]
        del pair
        yield given.pop()


def _pairs(tensors: Any) -> Iterable[Any]:
    """Return what should give pairs. ValueError: it cannot."""
    if callable(getattr(tensors, "state_dict", None)):
        raise ValueError(f"the weights are a {type(tensors).__name__}; give what its state_dict() returns")
    pairs = tensors.items() if isinstance(tensors, Mapping) else tensors
    if isinstance(pairs, str | bytes) or not isinstance(pairs, Iterable):
        raise ValueError(f"the weights are a {type(pairs).__name__}; {_WANTED}")
    return pairs


def entry_of(name: str, tensor: Any) -> Entry:
    """Describe a tensor. ValueError names it: it is none, has no values, or a dtype that the format lacks."""
    if not hasattr(tensor, "dtype") or not hasattr(tensor, "shape"):
        raise ValueError(
            f"tensor {name!r} is a {type(tensor).__name__}; give a numpy array or a torch tensor"
        )
    kind = str(tensor.dtype).removeprefix("torch.")
    if kind not in _DTYPES:
        known = ", ".join(_DTYPES)
        raise ValueError(f"tensor {name!r} has dtype {kind}, which safetensors files cannot hold ({known})")
    if hasattr(tensor, "detach"):
        _check(name, tensor)
        size = tensor.numel() * tensor.element_size()
        return Entry(name, _DTYPES[kind], tuple(tensor.shape), size, lambda: _from_torch(name, tensor, kind))
    return Entry(name, _DTYPES[kind], tensor.shape, tensor.nbytes, lambda: _little_endian(tensor))


def _check(name: str, tensor: Any) -> None:
    """Raise ValueError for a torch tensor whose values are not all here, in order."""
    if str(tensor.device) == "meta":
        raise ValueError(f"tensor {name!r} is on the meta device: it has no values; load the model first")
    if str(tensor.layout) != "torch.strided":
        raise ValueError(f"tensor {name!r} has the layout {tensor.layout}; give its to_dense()")


def _from_torch(name: str, tensor: Any, kind: str) -> npt.NDArray[Any]:
    """Return the values of a torch tensor; numpy has no bfloat16, so its bits travel as int16."""
    try:
        tensor = tensor.detach().cpu().resolve_neg().contiguous()
        if kind == "bfloat16":
            import torch  # only a process that has a torch tensor gets here

            tensor = tensor.view(torch.int16)
        return _little_endian(tensor.numpy())
    except (NotImplementedError, RuntimeError, TypeError) as error:
        raise ValueError(f"the values of tensor {name!r} cannot be read: {error}") from error


def _little_endian(array: npt.NDArray[Any]) -> npt.NDArray[Any]:
    contiguous: npt.NDArray[Any] = np.ascontiguousarray(array, array.dtype.newbyteorder("<"))
    return contiguous


# Waking a thread takes about as long as hashing so many bytes.
_AT_ONCE = 64 << 10


class OverlappedSha256:
    """SHA-256 of bytes that are given one after the other, of which the last ones may still be read.

    One caller at a time. Its thread ends with it.
    """

    def __init__(self) -> None:
        self._digest = hashlib.sha256()
        self._thread = ThreadPoolExecutor(1, "sha256")
        self._reading: Future[None] | None = None

    def update(self, data: memoryview | bytes) -> None:
        """Add bytes, which must not change before `settle` or the next `update` has returned."""
        self.settle()
        if len(data) < _AT_ONCE:
            self._digest.update(data)
        else:
            self._reading = self._thread.submit(self._digest.update, data)

    def settle(self) -> None:
        """Wait until the bytes given so far are not read any more."""
        if self._reading is not None:
            self._reading.result()
            self._reading = None

    def hexdigest(self) -> str:
        """Return the digest of the bytes given so far, in hexadecimal."""
        self.settle()
        return self._digest.hexdigest()


SHARD_BYTES = 2 * 10**9
"""Largest file, unless a single tensor is larger."""
INDEX = "model.safetensors.index.json"
"""Name of a folder's index."""

Tensors = Mapping[str, Any] | Iterable[tuple[str, Any]]
"""Tensors (numpy arrays, or objects with torch's tensor methods) by name, or pairs of name and tensor."""

MOST_INDEX_BYTES = 64 << 20
"""Largest index that is read: that of 300,000 tensors."""
_READ_BYTES = 1 << 20
# A multiple of every page size, so that mapped tensors are aligned. Room for about a thousand tensors.
_HEADER_BYTES = 128 << 10
_HEADER_START = '{"__metadata__":{"format":"pt"}'


@dataclass(frozen=True, slots=True)
class FileWrite:
    """Bytes for a place of one of a version's files, which are numbered in the order in which they are written."""

    file: int
    offset: int
    content: memoryview | bytes
    """Valid until the next is asked for."""
    index: bool = False
    """True for the index, which is the last file and comes as a whole."""


@dataclass(frozen=True, slots=True)
class WrittenFile:
    """Entry of the index about one file: its size, its SHA-256, and the names of its tensors."""

    bytes: int
    sha256: str
    tensors: tuple[str, ...]


class ShardLayout:
    """Layout of one file, while its tensors are written one after the other."""

    def __init__(self, number: int) -> None:
        self.number = number
        self.names: list[str] = []
        self.bytes = _HEADER_BYTES
        self.digest = OverlappedSha256()
        self._header = [_HEADER_START]
        # The length in front, and the bracket at the end.
        self._room = _HEADER_BYTES - 8 - len(_HEADER_START) - 1

    def add(self, entry: Entry, most_bytes: int) -> bool:
        """Make room for a tensor; return False if it needs another shard."""
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
        return True

    def content(self, entry: Entry) -> Iterator[FileWrite]:
        """Return the bytes of the tensor that was added last."""
        if not entry.size:
            return
        content = entry.load().data.cast("B")
        begin = self.bytes - entry.size
        for start in range(0, entry.size, _READ_BYTES):
            chunk = content[start : start + _READ_BYTES]
            self.digest.update(chunk)
            yield FileWrite(self.number, begin + start, chunk)
        # Nobody reads the tensor any more: it may be changed, or its memory used for the next one.
        self.digest.settle()

    @property
    def written(self) -> WrittenFile:
        """Return the entry of the index about the file, once its header was made."""
        return WrittenFile(self.bytes, self.digest.hexdigest(), tuple(self.names))

    def header(self) -> FileWrite:
        """Return the header, which ends the file."""
        text = "".join([*self._header, "}"]).encode().ljust(_HEADER_BYTES - 8)
        header = len(text).to_bytes(8, "little") + text
        self.digest.update(header)
        return FileWrite(self.number, 0, header)


def lay_out(tensors: Tensors, shard_bytes: int = SHARD_BYTES) -> Iterator[FileWrite]:
    """Yield the bytes of the files that hold these tensors, with one tensor in memory at a time.

    Each file's tensors come in the order of their places, then its header, and after all files the index.

    Raises:
        ValueError: there is no tensor, or one has a dtype that the format lacks, or a name that came before or that
            no header has room for.
    """
    shards: list[ShardLayout] = []
    seen: set[str] = set()
    for name, tensor in pairs_of(tensors):
        if name in seen:
            raise ValueError(f"tensor {name!r} came twice")
        seen.add(name)
        entry = entry_of(name, tensor)
        if _place(shards, entry, shard_bytes) and len(shards) > 1:
            yield shards[-2].header()
        yield from shards[-1].content(entry)
        # Not in memory while an iterator makes the next one.
        del tensor, entry
    if not shards:
        raise ValueError("there are no tensors to write")
    yield shards[-1].header()
    yield FileWrite(len(shards), 0, index_of([shard.written for shard in shards]), index=True)


def plan(entries: Iterable[Entry], shard_bytes: int = SHARD_BYTES) -> list[list[Entry]]:
    """Return the tensors of each file that `lay_out` would make of them."""
    shards: list[ShardLayout] = []
    files: list[list[Entry]] = []
    for entry in entries:
        if _place(shards, entry, shard_bytes):
            files.append([])
        files[-1].append(entry)
    return files


def _place(shards: list[ShardLayout], entry: Entry, shard_bytes: int) -> bool:
    """Make room for a tensor in the last file, or in a new one: then True."""
    if shards and shards[-1].add(entry, shard_bytes):
        return False
    shards.append(ShardLayout(len(shards)))
    if not shards[-1].add(entry, shard_bytes):
        raise ValueError(f"tensor {entry.name[:80]!r}... has a name of {len(entry.name)} characters")
    return True


def write(folder: Path, tensors: Tensors, shard_bytes: int = SHARD_BYTES) -> None:
    """Write tensors and their index into a folder that has none, with one of them in memory at a time.

    The index appears last: a folder without it is not whole.

    Raises:
        ValueError: as `lay_out`.
    """
    index = b""
    with ExitStack() as opened:
        files: list[BufferedWriter] = []
        for each in lay_out(tensors, shard_bytes):
            if each.index:
                index = bytes(each.content)
                continue
            if each.file == len(files):
                files.append(opened.enter_context(unfinished_file(folder, each.file).open("xb")))
            file = files[each.file]
            if file.tell() != each.offset:
                file.seek(each.offset)
            file.write(each.content)
            if not each.offset:  # the header
                file.flush()
                os.fsync(file.fileno())
                file.close()
            # It keeps its tensor in memory.
            del each
    finish_folder(folder, len(files), index)


def unfinished_file(folder: Path, number: int) -> Path:
    """Return the path of a file of a version that is not whole."""
    return folder / f"{number:05d}.unfinished"


def finish_folder(folder: Path, files: int, index: bytes) -> None:
    """Name files as Hugging Face does, now that their number is known, and write the index."""
    for number in range(files):
        unfinished_file(folder, number).rename(folder / shard_name(number, files))
    unfinished = folder / f"{INDEX}.unfinished"
    with unfinished.open("xb") as file:
        file.write(index)
        file.flush()
        os.fsync(file.fileno())
    unfinished.rename(folder / INDEX)
    sync(folder)


def shard_name(number: int, files: int) -> str:
    """Return the name of a file of a version that has so many."""
    return "model.safetensors" if files == 1 else f"model-{number + 1:05d}-of-{files:05d}.safetensors"


def checksum(folder: Path, proceed: Callable[[], object] = lambda: None) -> str:
    """Return the checksum of a folder's weights: `index_checksum`, or without one `sha256:<hex>` of all files.

    The latter is of the safetensors files in name order. `proceed` is called after each chunk; what it raises ends
    the work. ValueError: there are no files.
    """
    if found := index_checksum(folder):
        return found
    files = sorted(folder.glob("*.safetensors"))
    if not files:
        raise ValueError(f"no safetensors files in {folder}")
    digest = hashlib.sha256()
    for path in files:
        with os.fdopen(open_regular(path), "rb") as file:
            while chunk := file.read(_READ_BYTES):
                digest.update(chunk)
                proceed()
    return f"sha256:{digest.hexdigest()}"


def index_checksum(folder: Path) -> str:
    """Return `index-sha256:<hex>` of a folder's index, "" if it has none with the checksums of its files.

    ValueError: the index is not one.
    """
    path = folder / INDEX
    if not path.is_file():
        return ""
    content = read_regular(path, MOST_INDEX_BYTES)
    try:
        listed = "shards" in parse_object(content).get("metadata", {})
    except (ValueError, TypeError) as error:
        raise ValueError(f"{path} is no index: {error}") from error
    return f"index-sha256:{hashlib.sha256(content).hexdigest()}" if listed else ""


def sync(path: Path) -> None:
    """Make a file durable, or the names in a folder."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def index_of(files: Sequence[WrittenFile]) -> bytes:
    """Return the index of the files of a version."""
    names = [shard_name(number, len(files)) for number in range(len(files))]
    metadata = {
        "total_size": sum(file.bytes - _HEADER_BYTES for file in files),
        "shards": {
            name: {"bytes": file.bytes, "sha256": file.sha256}
            for name, file in zip(names, files, strict=True)
        },
    }
    places = {tensor: name for name, file in zip(names, files, strict=True) for tensor in file.tensors}
    return json.dumps({"metadata": metadata, "weight_map": places}).encode()
