"""Safetensors files on disk: their headers, their tensors mapped one at a time, and their contents read once.

`open_weight_files` finds the files of a folder and checks their headers. `read_content` reads a file once, for its
SHA-256 and for the largest absolute value of each tensor.
"""

from __future__ import annotations

import mmap
import os
import struct
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import cache
from io import FileIO
from itertools import cycle, pairwise
from math import prod
from pathlib import Path
from typing import Any

import numpy as np
import torch

from paceline.errors import Violation
from paceline.files import open_regular, parse_object, read_object
from paceline.weights.safetensors import INDEX, MOST_INDEX_BYTES, OverlappedSha256, data_offsets
from services.contracts.errors import DataLoss, InvalidArgument

FLOATS = {"F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}
DTYPES = FLOATS | {
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E5M2": torch.float8_e5m2,
    "I64": torch.int64,
    "I32": torch.int32,
    "I16": torch.int16,
    "I8": torch.int8,
    "U8": torch.uint8,
    "BOOL": torch.bool,
}
# Limits of any header, and of the tensors of any folder: DeepSeek V3 has 92,000.
_MOST_HEADER_BYTES = 32 << 20
_MOST_TENSORS = 1 << 18
# Limits by the number of the model's tensors, with room for others, which are refused by name, and for long names.
_SPARE_TENSORS, _SPARE_HEADER_BYTES = 1024, 1 << 20
_TENSORS_FOR_EACH, _HEADER_BYTES_FOR_EACH = 4, 512
_MOST_DIMENSIONS = 64
_CHUNK_BYTES = 1 << 20
# Integer types for the bits of floats: shifted left by the sign, they are in the order of the values, NaN last.
_BITS: dict[str, type[np.unsignedinteger[Any]]] = {
    "F64": np.uint64,
    "F32": np.uint32,
    "F16": np.uint16,
    "BF16": np.uint16,
    "F8_E4M3": np.uint8,
    "F8_E5M2": np.uint8,
}
Proceed = Callable[[], object]
"""Called repeatedly while weights are read or written; an exception that it raises ends the work."""


@dataclass(frozen=True, slots=True)
class StoredTensor:
    """Place of a tensor in its file, in bytes."""

    dtype: str
    shape: tuple[int, ...]
    begin: int
    size: int

    @property
    def torch_dtype(self) -> torch.dtype:
        """The dtype as torch has it."""
        return DTYPES[self.dtype]


@dataclass(frozen=True, slots=True)
class WeightFile:
    """Safetensors file as it was when its header was read; `sha256` is from the index, "" without one."""

    path: Path
    header_bytes: int
    tensors: Mapping[str, StoredTensor]
    sha256: str
    stamp: tuple[int, ...]

    @property
    def bytes(self) -> int:
        """Size of the file."""
        return self.stamp[-1]

    def open(self) -> int:
        """Return a file descriptor; DataLoss if the file was changed or removed since."""
        try:
            descriptor = open_regular(self.path)
        except OSError as error:
            raise DataLoss(f"{self.path} can no longer be read: {error.strerror}") from error
        if _stamp(descriptor) != self.stamp:
            os.close(descriptor)
            raise DataLoss(f"{self.path} was changed after it was checked")
        return descriptor


class MappedTensors(Mapping[str, torch.Tensor]):
    """Tensors of checked files, each mapped from its file on access.

    They use no memory but the page cache, which all processes share. They are pickled as paths: every rank of a
    tensor parallel group maps the files itself, and reads only the pages that it loads.
    """

    def __init__(self, files: Mapping[str, WeightFile]) -> None:
        """Map tensors, each from its file."""
        self._files = dict(files)

    def check_unchanged(self) -> None:
        """Raise DataLoss if a file was changed or removed since it was checked."""
        for file in {file.path: file for file in self._files.values()}.values():
            os.close(file.open())

    def shape(self, name: str) -> tuple[int, ...]:
        """Return the shape of a tensor."""
        return self._files[name].tensors[name].shape

    def __len__(self) -> int:
        return len(self._files)

    def __iter__(self) -> Iterator[str]:
        return iter(self._files)

    def __getitem__(self, name: str) -> torch.Tensor:
        """Map a tensor; DataLoss if its file was changed or removed."""
        file = self._files[name]
        stored = file.tensors[name]
        if not stored.size:
            return torch.empty(stored.shape, dtype=stored.torch_dtype)
        descriptor = file.open()
        try:
            lead = stored.begin % mmap.ALLOCATIONGRANULARITY
            # ACCESS_COPY because torch wants memory that may be written.
            mapped = mmap.mmap(
                descriptor, lead + stored.size, access=mmap.ACCESS_COPY, offset=stored.begin - lead
            )
        finally:
            os.close(descriptor)
        flat = torch.frombuffer(mapped, dtype=torch.uint8, offset=lead)
        if lead % stored.torch_dtype.itemsize:
            # Files of other writers may have tensors at odd addresses, which torch cannot view.
            flat = flat.clone()
        return flat.view(stored.torch_dtype).reshape(stored.shape)


def open_weight_files(folder: Path, *, indexed: bool, served: int) -> list[WeightFile]:
    """Read the headers of a folder's weights, in the order of the file names.

    Args:
        folder: of the files.
        indexed: take the files and checksums of the index, rather than all safetensors files.
        served: number of tensors of the served model, which bounds the headers that are read.

    Raises:
        InvalidArgument: no such folder, no weights in it, or a tensor that torch cannot hold.
        DataLoss: a file is missing, truncated or corrupt.
    """
    most = min(_MOST_TENSORS, _SPARE_TENSORS + _TENSORS_FOR_EACH * served)
    if not indexed:
        return _opened(((file, "") for file in weight_files(folder)), most)
    try:
        listed = read_object(folder / INDEX, MOST_INDEX_BYTES)["metadata"]["shards"]
        checksums = {str(name): str(entry["sha256"]) for name, entry in sorted(listed.items())}
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise DataLoss(f"{folder / INDEX} is corrupt: {error!r}") from error
    for name in checksums:
        if Path(name).name != name:
            raise InvalidArgument(
                [Violation("disk.path", f"the index names {name!r}, which is no file name")]
            )
        if not (folder / name).is_file():
            raise DataLoss(f"{folder / name} is missing; the index names it")
    return _opened(((folder / name, checksum) for name, checksum in checksums.items()), most)


def _opened(paths: Iterable[tuple[Path, str]], most: int) -> list[WeightFile]:
    files, tensors = list[WeightFile](), 0
    for path, checksum in paths:
        files.append(open_weight_file(path, checksum, most))
        tensors += len(files[-1].tensors)
        if tensors > most:
            text = f"{path.parent} holds {tensors} tensors and more, allowed are {most}"
            raise InvalidArgument([_unusable(text)])
    return files


def weight_files(folder: Path) -> list[Path]:
    """Return the safetensors files of a folder in name order, the order of the checksum."""
    if not folder.is_dir():
        raise InvalidArgument([_unusable(f"{folder} is not a folder that this instance can read")])
    files = sorted(folder.glob("*.safetensors"))
    if not files:
        raise InvalidArgument([_unusable(f"{folder} holds no *.safetensors file")])
    return files


def read_header(file: Path, most: int | None = None) -> tuple[int, dict[str, dict[str, Any]]]:
    """Return the size of a file's header in bytes, and its entries by tensor, at most `most`."""
    most = _MOST_TENSORS if most is None else most
    most_bytes = min(_MOST_HEADER_BYTES, _SPARE_HEADER_BYTES + _HEADER_BYTES_FOR_EACH * most)
    try:
        with os.fdopen(open_regular(file), "rb") as stream:
            prefix = stream.read(8)
            size = struct.unpack("<Q", prefix)[0] if len(prefix) == 8 else 0
            content = stream.read(size) if 0 < size <= most_bytes else b""
            held = os.fstat(stream.fileno()).st_size - 8
    except OSError as error:
        raise InvalidArgument([_unusable(f"{file} cannot be read: {error.strerror}")]) from error
    if most_bytes < size <= held:
        text = f"{file} has a header of {size} bytes, allowed are {most_bytes} for {most} tensors"
        raise InvalidArgument([_unusable(text)])
    try:
        if not content or len(content) != size:
            raise ValueError("it ends in its header")
        header: dict[str, dict[str, Any]] = parse_object(content)
        header.pop("__metadata__", None)
    except ValueError as error:
        raise DataLoss(f"{file} is truncated or corrupt: {error}") from error
    if len(header) > most:
        text = f"{file} holds {len(header)} tensors, allowed are {most}"
        raise InvalidArgument([_unusable(text)])
    return 8 + size, header


def open_weight_file(file: Path, sha256: str, most: int | None = None) -> WeightFile:
    """Read the header of a file of at most `most` tensors; errors as `open_weight_files`, `sha256` of the index."""
    start, header = read_header(file, most)
    try:
        entries = {name: (entry["dtype"], tuple(entry["shape"])) for name, entry in header.items()}
        spans = {name: data_offsets(entry) for name, entry in header.items()}
        unknown = sorted({str(dtype) for dtype, _ in entries.values()} - DTYPES.keys())
        if unknown:
            text = f"{file} has a tensor of dtype {unknown[0]}, allowed are {', '.join(sorted(FLOATS))}"
            raise InvalidArgument([_unusable(text)])
        tensors = {
            name: StoredTensor(dtype, shape, start + spans[name][0], _size(dtype, shape))
            for name, (dtype, shape) in sorted(entries.items(), key=lambda item: spans[item[0]])
        }
        stamp = _stamp_of(file)
        _check_spans([spans[name] for name in tensors], list(tensors.values()), stamp[-1] - start)
    except (KeyError, TypeError, ValueError, AttributeError, IndexError) as error:
        raise DataLoss(f"{file} is truncated or corrupt: {error}") from error
    return WeightFile(file, start, tensors, sha256, stamp)


def _size(dtype: str, shape: tuple[int, ...]) -> int:
    if len(shape) > _MOST_DIMENSIONS or not all(type(length) is int and length >= 0 for length in shape):
        raise ValueError(f"shape {shape[:_MOST_DIMENSIONS]}")
    return prod(shape) * DTYPES[dtype].itemsize


def _check_spans(spans: list[tuple[int, int]], tensors: list[StoredTensor], size: int) -> None:
    """Raise ValueError unless the tensors are contiguous and fill the `size` bytes after the header."""
    ends = [0, *(end for _, end in spans)]
    holes = [begin for (begin, _), end in zip(spans, ends, strict=False) if begin != end]
    wrong = [span for span, tensor in zip(spans, tensors, strict=True) if span[1] - span[0] != tensor.size]
    if holes or wrong or ends[-1] != size or any(after < before for before, after in pairwise(ends)):
        raise ValueError(f"its tensors do not fill the {size} bytes behind the header")


def _stamp_of(file: Path) -> tuple[int, ...]:
    try:
        descriptor = open_regular(file)
    except OSError as error:
        # Removed or renamed since its header was read.
        raise InvalidArgument([_unusable(f"{file} cannot be read: {error.strerror}")]) from error
    try:
        return _stamp(descriptor)
    finally:
        os.close(descriptor)


def _stamp(descriptor: int) -> tuple[int, ...]:
    found = os.fstat(descriptor)
    return found.st_dev, found.st_ino, found.st_mtime_ns, found.st_size


def _unusable(text: str) -> Violation:
    return Violation("disk.path", text)


def never_stop() -> None:
    """Do nothing: the default of `Proceed`, with which work continues to its end."""


@dataclass(frozen=True, slots=True)
class FileContent:
    """SHA-256 of a file's contents, and the largest absolute value of each tensor of floats.

    `largest` has the bits of these values, shifted left by the sign.
    """

    sha256: str
    largest: Mapping[str, int]


def read_content(
    file: WeightFile, whole: OverlappedSha256 | None = None, proceed: Proceed = never_stop
) -> FileContent:
    """Read a file once. Its SHA-256 covers its tensors and then its header, as in the index.

    Without an index the file is added to `whole` in its own order. DataLoss if it changed since its header was
    read.
    """
    digest = OverlappedSha256() if whole is None else whole
    # One buffer is filled and searched while the other is hashed.
    buffers = cycle([memoryview(bytearray(max(_CHUNK_BYTES, file.header_bytes))) for _ in range(2)])
    largest: dict[str, int] = {}
    with os.fdopen(file.open(), "rb", buffering=0) as stream:
        header = bytes(_filled(stream, next(buffers)[: file.header_bytes]))
        if whole is not None:
            digest.update(header)
        for name, stored in file.tensors.items():
            found = 0
            for chunk in _chunks(stream, stored, buffers):
                digest.update(chunk)
                found = max(found, _largest(chunk, stored.dtype))
                proceed()
            if stored.dtype in _BITS:
                largest[name] = found
    if whole is None:
        digest.update(header)
    return FileContent(digest.hexdigest(), largest)


def fault_of(file: WeightFile, name: str, largest: int, served: str) -> str:
    """Return the fault of a tensor's values when it is served as another dtype; "" if it has none.

    A tensor with a fault is read again. DataLoss if its file changed since its header was read.
    """
    dtype = file.tensors[name].dtype
    nonfinite, overflow = least_infinite(dtype, dtype), least_infinite(dtype, served or dtype)
    if largest < overflow:
        return ""
    if largest >= nonfinite:
        return f"has {_count(file, name, nonfinite)} values that are NaN or infinite"
    text = str(DTYPES[served]).removeprefix("torch.")
    return f"has {_count(file, name, overflow)} values that are infinite in the model's {text}"


@cache
def least_infinite(dtype: str, served: str) -> int:
    """Return the least value of a dtype that is infinite or NaN as another: its bits, shifted left by the sign.

    Found by torch, which loads the weights, because torch decides what is rounded up to infinity.
    """
    kind = _BITS[dtype]
    low, high = 0, int(np.iinfo(kind).max)
    while low < high:
        # The sign bit is 0 below.
        middle = (low + high) // 2
        value = torch.from_numpy(np.array([middle >> 1], kind).view(np.uint8).copy()).view(DTYPES[dtype])
        if torch.isfinite(value.to(DTYPES[served]).to(torch.float64)).item():
            low = middle + 1
        else:
            high = middle
    return low


def _count(file: WeightFile, name: str, least: int) -> int:
    """Return how many absolute values of a tensor are at least `least`."""
    stored = file.tensors[name]
    buffers = cycle([memoryview(bytearray(_CHUNK_BYTES))])
    with os.fdopen(file.open(), "rb", buffering=0) as stream:
        stream.seek(stored.begin)
        return sum(
            int(np.count_nonzero(_without_sign(chunk, stored.dtype) >= least))
            for chunk in _chunks(stream, stored, buffers)
        )


def _chunks(stream: FileIO, stored: StoredTensor, buffers: Iterator[memoryview]) -> Iterator[memoryview]:
    for start in range(0, stored.size, _CHUNK_BYTES):
        yield _filled(stream, next(buffers)[: min(_CHUNK_BYTES, stored.size - start)])


def _filled(stream: FileIO, view: memoryview) -> memoryview:
    """Fill the view from the file, and return it."""
    read = 0
    while read < len(view):
        count = stream.readinto(view[read:])
        if not count:
            raise DataLoss(f"{stream.name} is truncated or corrupt: it ended while it was read")
        read += count
    return view


def _largest(chunk: memoryview, dtype: str) -> int:
    """Return the largest value of a chunk, 0 if it has no floats.

    By numpy, because torch would wake a pool of threads for each chunk, in addition to the engine's.
    """
    return int(_without_sign(chunk, dtype).max()) if dtype in _BITS else 0


def _without_sign(chunk: memoryview, dtype: str) -> np.ndarray[Any, np.dtype[np.unsignedinteger[Any]]]:
    kind = _BITS[dtype]
    return np.frombuffer(chunk, kind) << kind(1)
