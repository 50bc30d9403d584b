"""Write what changed between two folders of weights, and make one of them from the other and that.

A delta has a file for each safetensors file of the version that it leads to, and that version's index; what comes
of it is that version byte for byte. A file begins with `_MAGIC` and the deflated header of its safetensors file.
Then come the tensors in their order, in pieces of 2 MB, each with its length in front (see `delta_codec`).

Threads share the work by pieces: one of them and its code are all that each has in memory.
"""

from __future__ import annotations

import hashlib
import os
import shutil
import sys
import zlib
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any, TypeVar

import numpy as np

from paceline import delta_codec, expansion, safetensors
from paceline.expansion import BaseWeights, Expansion, ExpansionKind
from paceline.foreign_json import parse_object, read_object
from paceline.regular_file import open_regular

PIECE_BYTES = 1 << 21
_MAGIC = b"PLDELTA1"
_MOST_HEADER_BYTES = 100 << 20
_MOST_THREADS = 8
_WIDTHS = {
    "F64": 8,
    "I64": 8,
    "U64": 8,
    "F32": 4,
    "I32": 4,
    "U32": 4,
    "F16": 2,
    "BF16": 2,
    "I16": 2,
    "U16": 2,
}
_Item = TypeVar("_Item")
_Made = TypeVar("_Made")


@dataclass(frozen=True, slots=True)
class _Tensor:
    """Place of a tensor in its file, in bytes."""

    file: int
    """Descriptor; -1: it is not read."""
    dtype: str
    shape: tuple[int, ...]
    begin: int
    size: int

    @property
    def width(self) -> int:
        """Bytes of a number."""
        return _WIDTHS.get(self.dtype, 1)


@dataclass(frozen=True, slots=True)
class _Piece:
    """A part of a tensor, of the new version and of the base if it has such a tensor."""

    new: _Tensor
    base: _Tensor | None
    begin: int
    size: int
    code: bytes = b""

    def read(self, tensor: _Tensor) -> delta_codec.Bits:
        """Read the piece's part of a tensor. ValueError: the file is too short."""
        content = os.pread(tensor.file, self.size, tensor.begin + self.begin)
        if len(content) != self.size:
            raise ValueError("a file of the weights ended while it was read")
        return np.frombuffer(content, f"<u{self.new.width}")

    def encode(self) -> bytes:
        """Return the piece's code."""
        if self.base is None:
            return delta_codec.encode_raw(self.read(self.new))
        return delta_codec.encode(self.read(self.base), self.read(self.new))

    def decode(self) -> delta_codec.Bits:
        """Return the piece of the new version."""
        if self.base is not None:
            return delta_codec.decode(self.code, self.read(self.base))
        return delta_codec.decode(self.code, np.zeros(self.size // self.new.width, f"<u{self.new.width}"))


def encode(base: Path, base_version: int, folder: Path, target: Path, threads: int = 0) -> Expansion:
    """Write the changes from the weights in `base` to those in `folder` into `target`, a new folder.

    Args:
        base: folder of the SDK, or any with safetensors files whose index has their checksums.
        base_version: its policy version.
        folder: another one.
        target: made here; removed again by an error.
        threads: that encode at once; 0: as many as there are processors, up to 8.

    Raises:
        ValueError: one of the folders is no such folder, or is corrupt.
        OSError: the disk is full, for example.
    """
    checksum = safetensors.index_checksum(base)
    if not checksum or not safetensors.index_checksum(folder):
        raise ValueError(f"{folder if checksum else base} has no index with checksums")
    target.mkdir(parents=True)
    try:
        names = []
        with ExitStack() as stack, _pool(threads) as pool:
            known = _tensors(base, stack)
            for file in _files(folder):
                names.append(f"{Path(file).stem}.delta")
                _encode_file(folder / file, known, target / names[-1], pool)
        shutil.copyfile(folder / safetensors.INDEX, target / safetensors.INDEX)
        names.append(safetensors.INDEX)
        return expansion.write(target, ExpansionKind.DELTA, BaseWeights(base_version, checksum), names)
    except BaseException:
        shutil.rmtree(target, ignore_errors=True)
        raise


def expand(
    base: Path,
    delta: Path,
    target: Path,
    threads: int = 0,
    *,
    most_bytes: int | None = None,
    proceed: Callable[[], object] = lambda: None,
) -> None:
    """Make the weights that a delta leads to in `target`, an empty folder. They are not checked by their index.

    Args:
        base: folder of the version that the delta is of.
        delta: folder that `encode` wrote.
        target: where the weights are written.
        threads: that decode at once; 0: as many as there are processors, up to 8.
        most_bytes: largest size of the weights; None: any. What takes few bytes may lead to any number.
        proceed: called after each piece; what it raises ends the work.

    Raises:
        ValueError: the delta is corrupt, leads to more, or the base is not the one that it is of.
        OSError: a file is missing, or the disk is full, for example.
    """
    told = expansion.read(delta)
    if told is None or told.kind is not ExpansionKind.DELTA:
        raise ValueError(f"{delta} is no delta")
    with ExitStack() as stack, _pool(threads) as pool:
        known = _tensors(base, stack)
        room = sys.maxsize if most_bytes is None else most_bytes
        for file in _files(delta):
            name = f"{Path(file).stem}.delta"
            if name not in told.files:
                raise ValueError(f"{delta} has no {name}")
            digest = hashlib.sha256()
            with _open(delta / name) as source, (target / file).open("xb") as sink:
                room -= _decode_file(_Checked(source, digest), known, sink, pool, room, proceed)
                sink.flush()
                os.fsync(sink.fileno())
            if digest.hexdigest() != told.files[name].sha256:
                raise ValueError(f"{delta / name} is corrupt: its SHA-256 is {digest.hexdigest()}")
    shutil.copyfile(delta / safetensors.INDEX, target / safetensors.INDEX)


@dataclass(slots=True)
class _Checked:
    """A file that is hashed while it is read."""

    file: IO[bytes]
    digest: Any

    def take(self, size: int) -> bytes:
        """Read so many bytes. ValueError: there are fewer."""
        content = self.file.read(size)
        if len(content) != size:
            raise ValueError(f"{self.file.name} is truncated")
        self.digest.update(content)
        return content

    def sized(self, most: int) -> bytes:
        """Read a part that has its length in front."""
        size = int.from_bytes(self.take(4), "little")
        if size > most:
            raise ValueError(f"{self.file.name} is corrupt: a part of {size} bytes")
        return self.take(size)

    def end(self) -> None:
        """Raise ValueError if there is more."""
        if self.file.read(1):
            raise ValueError(f"{self.file.name} is corrupt: it goes on after its last tensor")


def _encode_file(path: Path, known: dict[str, _Tensor], target: Path, pool: ThreadPoolExecutor) -> None:
    with _open(path) as source, target.open("xb") as sink:
        header = _read_header(source)
        packed = zlib.compress(header, 6)
        sink.write(_MAGIC + len(packed).to_bytes(4, "little") + packed)
        tensors = _parse(header, source.fileno())
        for code in _in_order(pool, _Piece.encode, _pieces(tensors, known)):
            sink.write(len(code).to_bytes(4, "little"))
            sink.write(code)
        sink.flush()


def _decode_file(
    source: _Checked,
    known: dict[str, _Tensor],
    sink: IO[bytes],
    pool: ThreadPoolExecutor,
    room: int,
    proceed: Callable[[], object],
) -> int:
    """Write a file of the new version, and return its size, for which there is `room`."""
    if source.take(len(_MAGIC)) != _MAGIC:
        raise ValueError(f"{source.file.name} is no delta")
    try:
        inflater = zlib.decompressobj()
        header = inflater.decompress(source.sized(_MOST_HEADER_BYTES), _MOST_HEADER_BYTES)
    except zlib.error as error:
        raise ValueError(f"{source.file.name} is corrupt: {error}") from error
    tensors = _parse(header, -1)
    size = len(header) + sum(tensor.size for tensor in tensors.values())
    if size > room:
        raise ValueError(f"{source.file.name} leads to {size} bytes, and {room} are left of what is allowed")
    sink.write(header)
    coded = (
        _Piece(piece.new, piece.base, piece.begin, piece.size, source.sized(PIECE_BYTES + 1))
        for piece in _pieces(tensors, known)
    )
    for bits in _in_order(pool, _Piece.decode, coded):
        sink.write(bits.data)
        proceed()
    source.end()
    return size


def _pieces(tensors: dict[str, _Tensor], known: dict[str, _Tensor]) -> Iterator[_Piece]:
    for name, new in sorted(tensors.items(), key=lambda item: item[1].begin):
        base = known.get(name)
        if base is not None and (base.dtype, base.shape) != (new.dtype, new.shape):
            base = None
        for begin in range(0, new.size, PIECE_BYTES):
            yield _Piece(new, base, begin, min(PIECE_BYTES, new.size - begin))


def _in_order(
    pool: ThreadPoolExecutor, make: Callable[[_Item], _Made], items: Iterable[_Item]
) -> Iterator[_Made]:
    """Yield what the threads make of items, in order; `_MOST_THREADS` of them are in memory."""
    waiting: deque[Future[_Made]] = deque()
    for item in items:
        waiting.append(pool.submit(make, item))
        if len(waiting) > _MOST_THREADS:
            yield waiting.popleft().result()
    while waiting:
        yield waiting.popleft().result()


def _pool(threads: int) -> ThreadPoolExecutor:
    return ThreadPoolExecutor(min(threads or os.cpu_count() or 1, _MOST_THREADS), "delta")


def _open(path: Path) -> IO[bytes]:
    return os.fdopen(open_regular(path), "rb")


def _files(folder: Path) -> list[str]:
    """Return the names of the safetensors files that a folder's index names."""
    try:
        told = read_object(folder / safetensors.INDEX, safetensors.MOST_INDEX_BYTES)
        found = sorted(map(str, told["metadata"]["shards"]))
    except (ValueError, KeyError, TypeError) as error:
        raise ValueError(f"{folder / safetensors.INDEX} is corrupt: {error!r}") from error
    if wrong := [name for name in found if Path(name).name != name or Path(name).suffix != ".safetensors"]:
        raise ValueError(f"{folder / safetensors.INDEX} names {wrong[0]!r}, which is no safetensors file")
    return found


def _tensors(folder: Path, stack: ExitStack) -> dict[str, _Tensor]:
    """Open the files of a folder and return their tensors."""
    found: dict[str, _Tensor] = {}
    for name in _files(folder):
        file = stack.enter_context(_open(folder / name))
        found |= _parse(_read_header(file), file.fileno())
    return found


def _read_header(file: IO[bytes]) -> bytes:
    """Read a safetensors header with its length in front."""
    prefix = file.read(8)
    size = int.from_bytes(prefix, "little")
    header = file.read(size) if size <= _MOST_HEADER_BYTES else b""
    if len(prefix) != 8 or len(header) != size:
        raise ValueError(f"{file.name} is truncated or corrupt")
    return prefix + header


def _parse(header: bytes, file: int) -> dict[str, _Tensor]:
    try:
        told = parse_object(header[8:])
        told.pop("__metadata__", None)
        return {
            name: _tensor(file, str(each["dtype"]), tuple(each["shape"]), len(header), each["data_offsets"])
            for name, each in told.items()
        }
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise ValueError(f"a safetensors header is corrupt: {error!r}") from error


def _tensor(file: int, dtype: str, shape: tuple[int, ...], start: int, offsets: list[int]) -> _Tensor:
    begin, end = offsets
    tensor = _Tensor(file, dtype, shape, start + begin, end - begin)
    if not 0 <= begin <= end or tensor.size % tensor.width:
        raise ValueError(f"a tensor of {dtype} from {begin} to {end}")
    return tensor
