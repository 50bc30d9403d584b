"""Write folders of safetensors files in one pass with numpy alone, and identify their content by a checksum.

A file has the length of its header (8 bytes, little-endian), the header in JSON (`name -> dtype, shape,
data_offsets`), padded with spaces, and then the bytes of its tensors. The header is known last but stands first,
so a place of fixed size is reserved for it.

The index `model.safetensors.index.json`, which Hugging Face's loaders read, is written last. Its
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

from paceline.files import open_regular, parse_object, read_regular, sync

Tensors = Mapping[str, Any] | Iterable[tuple[str, Any]]
"""Tensors (numpy arrays, or objects with torch's tensor methods) by name, or pairs of name and tensor."""

SHARD_BYTES = 2 * 10**9
"""Largest file, unless a single tensor is larger."""
INDEX = "model.safetensors.index.json"
"""Name of the index of a folder."""
MOST_INDEX_BYTES = 64 << 20
"""Largest index that is read, enough for 300,000 tensors."""
_READ_BYTES = 1 << 20
# A multiple of every page size, so that mapped tensors are aligned. Room for about a thousand tensors.
_HEADER_BYTES = 128 << 10
_HEADER_START = '{"__metadata__":{"format":"pt"}'
# Waking a thread takes about as long as hashing this many bytes.
_HASHED_AT_ONCE = 64 << 10
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
    """Tensor to write, as a safetensors header describes it."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    size: int
    """Size in bytes."""
    load: Callable[[], npt.NDArray[Any]]
    """Function that loads the values into memory; called for one tensor at a time."""


def check(tensors: Any) -> None:
    """Raise ValueError for tensors that cannot be written, if that is known before any tensor is loaded.

    Each tensor of a dict, list or tuple is checked; of any other object only its type is, because it may make each
    tensor when it is read.
    """
    _pairs(tensors)
    if isinstance(tensors, dict | list | tuple):
        for name, tensor in pairs_of(tensors):
            entry_of(name, tensor)


def pairs_of(tensors: Any, *, in_parts: bool = False) -> Iterator[tuple[str, Any]]:
    """Iterate over names and tensors of a mapping or of an iterable of pairs.

    DTensors, of which each rank holds a part, are refused unless `in_parts` is set.

    ValueError: `tensors` is neither, or has something else than pairs.
    """
    for pair in _pairs(tensors):
        if not isinstance(pair, tuple | list) or len(pair) != 2 or not isinstance(pair[0], str):
            raise ValueError(f"the weights have a {type(pair).__name__}; {_WANTED}")
        if hasattr(pair[1], "full_tensor") and not in_parts:
            raise ValueError(
                f"tensor {pair[0]!r} is a DTensor; give its full_tensor(), or push ShardedTensors"
            )
        # Hold no reference here while the caller uses the tensor, which may be large.
        given = [(pair[0], pair[1])]
        del pair
        yield given.pop()


def _pairs(tensors: Any) -> Iterable[Any]:
    """Return an iterable that should yield pairs. ValueError: the tensors are of a wrong type."""
    if callable(getattr(tensors, "state_dict", None)):
        raise ValueError(f"the weights are a {type(tensors).__name__}; give what its state_dict() returns")
    pairs = tensors.items() if isinstance(tensors, Mapping) else tensors
    if isinstance(pairs, str | bytes) or not isinstance(pairs, Iterable):
        raise ValueError(f"the weights are a {type(pairs).__name__}; {_WANTED}")
    return pairs


def entry_of(name: str, tensor: Any) -> Entry:
    """Describe a tensor. ValueError: it is not a tensor, has no values, or a dtype that the format lacks."""
    if not hasattr(tensor, "dtype") or not hasattr(tensor, "shape"):
        raise ValueError(
            f"tensor {name!r} is a {type(tensor).__name__}; give a numpy array or a torch tensor"
        )
    kind = str(tensor.dtype).removeprefix("torch.")
    if kind not in _DTYPES:
        known = ", ".join(_DTYPES)
        raise ValueError(f"tensor {name!r} has dtype {kind}, which safetensors files cannot hold ({known})")
    if hasattr(tensor, "detach"):
        _check_torch(name, tensor)
        size = tensor.numel() * tensor.element_size()
        return Entry(name, _DTYPES[kind], tuple(tensor.shape), size, lambda: _from_torch(name, tensor, kind))
    return Entry(name, _DTYPES[kind], tensor.shape, tensor.nbytes, lambda: _little_endian(tensor))


def _check_torch(name: str, tensor: Any) -> None:
    """Raise ValueError for a torch tensor without values, or with a layout other than strided."""
    if str(tensor.device) == "meta":
        raise ValueError(f"tensor {name!r} is on the meta device: it has no values; load the model first")
    if str(tensor.layout) != "torch.strided":
        raise ValueError(f"tensor {name!r} has the layout {tensor.layout}; give its to_dense()")


def _from_torch(name: str, tensor: Any, kind: str) -> npt.NDArray[Any]:
    """Return the values of a torch tensor, of bfloat16 as int16 with the same bits, because numpy lacks it."""
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


class OverlappedSha256:
    """SHA-256 that hashes large data in a thread, while the caller prepares the next data.

    For one caller at a time. The thread ends with the object.
    """

    def __init__(self) -> None:
        self._digest = hashlib.sha256()
        self._thread = ThreadPoolExecutor(1, "sha256")
        self._reading: Future[None] | None = None

    def update(self, data: memoryview | bytes) -> None:
        """Add bytes, which must not change until `settle` or the next `update` has returned."""
        self.settle()
        if len(data) < _HASHED_AT_ONCE:
            self._digest.update(data)
        else:
            self._reading = self._thread.submit(self._digest.update, data)

    def settle(self) -> None:
        """Wait until the bytes that were added are hashed."""
        if self._reading is not None:
            self._reading.result()
            self._reading = None

    def hexdigest(self) -> str:
        """Return the digest of all bytes that were added, in hexadecimal."""
        self.settle()
        return self._digest.hexdigest()


@dataclass(frozen=True, slots=True)
class FileWrite:
    """Bytes for a place of a file; the files of a version are numbered in the order in which they are written."""

    file: int
    offset: int
    content: memoryview | bytes
    """Valid until the next `FileWrite` is requested."""
    index: bool = False
    """True for the index, which is the last file and comes in one write."""


@dataclass(frozen=True, slots=True)
class WrittenFile:
    """Size, SHA-256 and tensor names of a file, for the index."""

    bytes: int
    sha256: str
    tensors: tuple[str, ...]


class ShardLayout:
    """Layout of a file whose tensors are written one after another."""

    def __init__(self, number: int) -> None:
        self.number = number
        self.names: list[str] = []
        self.bytes = _HEADER_BYTES
        self.digest = OverlappedSha256()
        self._header = [_HEADER_START]
        # Less the length in front and the bracket at the end.
        self._room = _HEADER_BYTES - 8 - len(_HEADER_START) - 1

    def add(self, entry: Entry, most_bytes: int) -> bool:
        """Append a tensor to the layout; return False if it does not fit into this file."""
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
        """Yield the bytes of the tensor that was added last."""
        if not entry.size:
            return
        content = entry.load().data.cast("B")
        begin = self.bytes - entry.size
        for start in range(0, entry.size, _READ_BYTES):
            chunk = content[start : start + _READ_BYTES]
            self.digest.update(chunk)
            yield FileWrite(self.number, begin + start, chunk)
        # After this the caller may change the tensor, or use its memory for the next one.
        self.digest.settle()

    @property
    def written(self) -> WrittenFile:
        """Entry of the index about the file, valid after `header`."""
        return WrittenFile(self.bytes, self.digest.hexdigest(), tuple(self.names))

    def header(self) -> FileWrite:
        """Return the header, which ends the file."""
        text = "".join([*self._header, "}"]).encode().ljust(_HEADER_BYTES - 8)
        header = len(text).to_bytes(8, "little") + text
        self.digest.update(header)
        return FileWrite(self.number, 0, header)


def lay_out(tensors: Tensors, shard_bytes: int = SHARD_BYTES) -> Iterator[FileWrite]:
    """Yield the writes of all files for these tensors, with one tensor in memory at a time.

    The tensors of a file come in the order of their places, then its header; after all files comes the index.

    Raises:
        ValueError: there is no tensor, or one has a dtype that the format lacks, a name that another one has, or a
            name that is too long for a header.
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
        # Free the tensor while an iterator makes the next one.
        del tensor, entry
    if not shards:
        raise ValueError("there are no tensors to write")
    yield shards[-1].header()
    yield FileWrite(len(shards), 0, index_of([shard.written for shard in shards]), index=True)


def plan(entries: Iterable[Entry], shard_bytes: int = SHARD_BYTES) -> list[list[Entry]]:
    """Return the tensors of each file, divided as `lay_out` does."""
    shards: list[ShardLayout] = []
    files: list[list[Entry]] = []
    for entry in entries:
        if _place(shards, entry, shard_bytes):
            files.append([])
        files[-1].append(entry)
    return files


def _place(shards: list[ShardLayout], entry: Entry, shard_bytes: int) -> bool:
    """Append a tensor to the last file, or to a new one; return True for a new one."""
    if shards and shards[-1].add(entry, shard_bytes):
        return False
    shards.append(ShardLayout(len(shards)))
    if not shards[-1].add(entry, shard_bytes):
        raise ValueError(f"tensor {entry.name[:80]!r}... has a name of {len(entry.name)} characters")
    return True


def write(folder: Path, tensors: Tensors, shard_bytes: int = SHARD_BYTES) -> None:
    """Write tensors and their index into a folder without either, with one tensor in memory at a time.

    The index appears last: a folder without it is incomplete.

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
            # Its content keeps the tensor in memory.
            del each
    finish_folder(folder, len(files), index)


def data_offsets(entry: Mapping[str, Any]) -> tuple[int, int]:
    """Return where a tensor begins and ends, in bytes after the header, from its entry there.

    KeyError, TypeError or ValueError: the entry has no such integers.
    """
    begin, end = entry["data_offsets"]
    # True and 8.0 equal integers, but no bytes can be read or mapped there.
    if type(begin) is not int or type(end) is not int:
        raise ValueError(f"data_offsets are {begin!r} and {end!r}, which must be integers")
    return begin, end


def unfinished_file(folder: Path, number: int) -> Path:
    """Return the path of a file of a version that is being written."""
    return folder / f"{number:05d}.unfinished"


def finish_folder(folder: Path, files: int, index: bytes) -> None:
    """Rename the files as Hugging Face does, now that their number is known, and write the index."""
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
    """Return the name of a file of a version with `files` files; `number` counts from 0."""
    return "model.safetensors" if files == 1 else f"model-{number + 1:05d}-of-{files:05d}.safetensors"


def checksum(folder: Path, proceed: Callable[[], object] = lambda: None) -> str:
    """Return the checksum of the weights of a folder.

    It is `index_checksum`, or, without such an index, `sha256:<hex>` of all safetensors files in the order of their
    names. `proceed` is called after each chunk; an exception that it raises ends the work.

    ValueError: there are no files.
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
    """Return `index-sha256:<hex>` of the index of a folder; "" without an index that has the files' checksums.

    ValueError: the index cannot be parsed.
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
