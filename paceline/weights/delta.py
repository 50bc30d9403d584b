"""Write the difference between two folders of weights as a delta, and apply a delta to a folder.

A delta has one file for each safetensors file of the new version, and the index of that version. Applying it
restores the version byte for byte. A file begins with `_MAGIC` and the deflated header of its safetensors file.
The tensors follow in their order, in pieces of 2 MB, each after its length. Threads share the work by pieces.

Pieces are coded without loss (see `encode`).
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
import numpy.typing as npt

from paceline.files import open_regular, parse_object, read_object
from paceline.weights import expansion, safetensors
from paceline.weights.expansion import BaseWeights, Expansion, ExpansionKind

Bits = npt.NDArray[np.unsignedinteger[Any]]
_Item = TypeVar("_Item")
_Made = TypeVar("_Made")

PIECE_BYTES = 1 << 21
_MAGIC = b"PLDELTA1"
_MOST_HEADER_BYTES = 100 << 20
_MOST_THREADS = 8
# Bytes of a number, by dtype; other dtypes are coded as bytes.
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
# Kinds of codes of a piece; the first byte of a code.
_SAME, _RAW, _SPARSE, _DENSE = range(4)
# Share of changed values from which coding all values is shorter, measured on steps of GRPO.
_DENSE_FROM = 0.3
# Share of zeros from which deflate searches for runs, which is slower than Huffman coding alone.
_RUNS_FROM = 0.9
_LONG_GAP = 255
_MEMORY_LEVEL = 9
# Lowest bit of the exponent, by bytes of a number. Numbers of two bytes are treated as bfloat16.
_EXPONENT_AT = {2: 7, 4: 23, 8: 52}


def write(base: Path, base_version: int, folder: Path, target: Path, threads: int = 0) -> Expansion:
    """Write the changes from the weights in `base` to those in `folder` into `target`, a new folder.

    Args:
        base: folder that the SDK wrote, or any with safetensors files and an index with their checksums.
        base_version: policy version of `base`.
        folder: folder of the new version.
        target: folder that is created, and removed if there is an error.
        threads: number of threads that encode; 0: one per processor, up to 8.

    Raises:
        ValueError: a folder has no index with checksums, or is corrupt.
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
    """Write the weights to which a delta leads into `target`. The result is not checked against the index.

    Args:
        base: folder of the base version.
        delta: folder that `write` wrote.
        target: an empty folder.
        threads: number of threads that decode; 0: one per processor, up to 8.
        most_bytes: largest size of the weights; None: any. A small delta may lead to weights of any size.
        proceed: called after each piece; an exception that it raises ends the work.

    Raises:
        ValueError: the delta is corrupt, leads to more than `most_bytes`, or belongs to another base.
        OSError: a file is missing, or the disk is full, for example.
    """
    manifest = expansion.read(delta)
    if manifest is None or manifest.kind is not ExpansionKind.DELTA:
        raise ValueError(f"{delta} is no delta")
    with ExitStack() as stack, _pool(threads) as pool:
        known = _tensors(base, stack)
        room = sys.maxsize if most_bytes is None else most_bytes
        for file in _files(delta):
            name = f"{Path(file).stem}.delta"
            if name not in manifest.files:
                raise ValueError(f"{delta} has no {name}")
            digest = hashlib.sha256()
            with _open(delta / name) as source, (target / file).open("xb") as sink:
                room -= _decode_file(_Checked(source, digest), known, sink, pool, room, proceed)
                sink.flush()
                os.fsync(sink.fileno())
            if digest.hexdigest() != manifest.files[name].sha256:
                raise ValueError(f"{delta / name} is corrupt: its SHA-256 is {digest.hexdigest()}")
    shutil.copyfile(delta / safetensors.INDEX, target / safetensors.INDEX)


@dataclass(frozen=True, slots=True)
class _Tensor:
    """Tensor in a file; places and sizes are in bytes."""

    file: int
    """Descriptor of the file; -1 if the tensor is not read."""
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
    """Part of a tensor: of the new version, and of the base if that has the same tensor."""

    new: _Tensor
    base: _Tensor | None
    begin: int
    size: int
    code: bytes = b""

    def read(self, tensor: _Tensor) -> Bits:
        """Read the piece's part of a tensor. ValueError: the file is too short."""
        content = os.pread(tensor.file, self.size, tensor.begin + self.begin)
        if len(content) != self.size:
            raise ValueError("a file of the weights ended while it was read")
        return np.frombuffer(content, f"<u{self.new.width}")

    def encode(self) -> bytes:
        """Return the piece's code."""
        if self.base is None:
            return encode_raw(self.read(self.new))
        return encode(self.read(self.base), self.read(self.new))

    def decode(self) -> Bits:
        """Return the piece of the new version."""
        if self.base is not None:
            return decode(self.code, self.read(self.base))
        return decode(self.code, np.zeros(self.size // self.new.width, f"<u{self.new.width}"))


@dataclass(slots=True)
class _Checked:
    """A file that is hashed while it is read."""

    file: IO[bytes]
    digest: Any

    def take(self, size: int) -> bytes:
        """Read `size` bytes. ValueError: the file has fewer left."""
        content = self.file.read(size)
        if len(content) != size:
            raise ValueError(f"{self.file.name} is truncated")
        self.digest.update(content)
        return content

    def sized(self, most: int) -> bytes:
        """Read a part of at most `most` bytes, which follows its length."""
        size = int.from_bytes(self.take(4), "little")
        if size > most:
            raise ValueError(f"{self.file.name} is corrupt: a part of {size} bytes")
        return self.take(size)

    def end(self) -> None:
        """Raise ValueError if the file has more bytes."""
        if self.file.read(1):
            raise ValueError(f"{self.file.name} is corrupt: bytes follow its last tensor")


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
    """Write a file of the new version, of at most `room` bytes, and return its size."""
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
    """Yield the results of `make` in the order of the items; about `_MOST_THREADS` of them are in memory."""
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
        index = read_object(folder / safetensors.INDEX, safetensors.MOST_INDEX_BYTES)
        found = sorted(map(str, index["metadata"]["shards"]))
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
    """Return a safetensors header, including its length in front."""
    prefix = file.read(8)
    size = int.from_bytes(prefix, "little")
    header = file.read(size) if size <= _MOST_HEADER_BYTES else b""
    if len(prefix) != 8 or len(header) != size:
        raise ValueError(f"{file.name} is truncated or corrupt")
    return prefix + header


def _parse(header: bytes, file: int) -> dict[str, _Tensor]:
    try:
        entries = parse_object(header[8:])
        entries.pop("__metadata__", None)
        return {
            name: _tensor(
                file, str(each["dtype"]), tuple(each["shape"]), len(header), safetensors.data_offsets(each)
            )
            for name, each in entries.items()
        }
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise ValueError(f"a safetensors header is corrupt: {error!r}") from error


def _tensor(file: int, dtype: str, shape: tuple[int, ...], start: int, offsets: tuple[int, int]) -> _Tensor:
    begin, end = offsets
    tensor = _Tensor(file, dtype, shape, start + begin, end - begin)
    if not 0 <= begin <= end or tensor.size % tensor.width:
        raise ValueError(f"a tensor of {dtype} from {begin} to {end}")
    return tensor


def encode(base: Bits, new: Bits) -> bytes:
    """Return the code of `new`, which `decode` turns back given `base` of the same length and dtype.

    Values are unsigned integers with the bits of the numbers, so NaN keep their payload. The difference of two
    values, modulo their range, is small where a number moved by a few units in the last place. The differences,
    with their signs in the lowest bits, are split into planes of bytes, which are deflated separately.

    A piece with few changes is coded by the gaps between them and their differences. A piece with many is coded
    by all differences, ordered by the exponents of the base: an optimizer moves all numbers by about the same
    amount, which is many units of small numbers and few units of large ones, and deflate is more compact on
    values of similar size.
    """
    places = np.flatnonzero(new != base)
    if not len(places):
        return bytes([_SAME])
    if len(places) >= _DENSE_FROM * len(new):
        code = bytes([_DENSE]) + b"".join(_deflate_planes(_folded(new - base)[_order(base)]))
    else:
        values = _folded(new[places] - base[places]) - new.dtype.type(1)
        code = bytes([_SPARSE]) + b"".join([*_gaps(places), *_deflate_planes(values)])
    return code if len(code) <= new.nbytes else encode_raw(new)


def encode_raw(new: Bits) -> bytes:
    """Return a code of `new` that needs no base."""
    return bytes([_RAW]) + new.tobytes()


def decode(code: bytes, base: Bits) -> Bits:
    """Return the array that was coded against `base`.

    Raises:
        ValueError: the code is corrupt, or does not fit the base.
    """
    if code[:1] == bytes([_SAME]) and len(code) == 1:
        return base
    kind, rest = code[0] if code else -1, memoryview(code)[1:]
    if kind == _RAW and len(rest) == base.nbytes:
        return np.frombuffer(rest, base.dtype)
    try:
        if kind == _DENSE:
            difference = np.empty_like(base)
            difference[_order(base)] = _inflate_planes(rest, base.dtype, len(base))
            return base + _unfolded(difference)
        if kind == _SPARSE:
            places, values = _places(rest, len(base))
            changed = base.copy()
            folded = _inflate_planes(values, base.dtype, len(places)) + base.dtype.type(1)
            changed[places] += _unfolded(folded)
            return changed
        raise ValueError(f"kind {kind} with {len(rest)} bytes")
    except (ValueError, IndexError, zlib.error) as error:
        raise ValueError(f"not a code of {len(base)} values: {error}") from error


def _folded(difference: Bits) -> Bits:
    """Return 0, 1, 2, 3 ... for differences of 0, -1, 1, -2 ...: the sign in the lowest bit."""
    bits = difference.dtype.itemsize * 8
    signed = difference.view(f"i{difference.dtype.itemsize}")
    folded: Bits = ((signed << 1) ^ (signed >> (bits - 1))).view(difference.dtype)
    return folded


def _unfolded(folded: Bits) -> Bits:
    one = folded.dtype.type(1)
    unfolded: Bits = (folded >> one) ^ (~(folded & one) + one)
    return unfolded


def _order(base: Bits) -> npt.NDArray[np.intp]:
    """Return the positions of values in the order of their exponents."""
    at = _EXPONENT_AT.get(base.dtype.itemsize)
    if at is None:
        return np.arange(len(base))
    # The conversion to 8 bits drops the sign; for doubles it stays a part of the key.
    exponents = (base >> base.dtype.type(at)).astype(np.uint8 if at < _EXPONENT_AT[8] else np.uint16)
    return np.argsort(exponents, kind="stable")


def _gaps(places: npt.NDArray[np.intp]) -> list[bytes]:
    """Return the code of ascending positions: the gaps between them, with one more byte for each 255 of a gap."""
    gaps = np.diff(places, prepend=-1) - 1
    if gaps.max() < _LONG_GAP:
        coded = gaps.astype(np.uint8)
    else:
        ends = np.cumsum(gaps // _LONG_GAP + 1)
        coded = np.full(int(ends[-1]), _LONG_GAP, np.uint8)
        coded[ends - 1] = gaps % _LONG_GAP
    return [len(places).to_bytes(4, "little"), _sized(_deflate(coded))]


def _places(code: memoryview, length: int) -> tuple[npt.NDArray[np.int64], memoryview]:
    """Return the coded positions, which are below `length`, and the rest of the code."""
    count, (gaps, rest) = int.from_bytes(code[:4], "little"), _split(code[4:])
    coded = np.frombuffer(_inflate(gaps, min(count, length) + length // _LONG_GAP + 1), np.uint8)
    is_end = coded != _LONG_GAP
    places = np.cumsum(coded, dtype=np.int64)[is_end]
    places += np.arange(len(places))
    if len(places) != count or (count and places[-1] >= length):
        raise ValueError("its gaps do not fit")
    return places, rest


def _deflate_planes(values: Bits) -> list[bytes]:
    """Return the deflated planes of bytes, the lowest bytes first; planes of zeros are empty."""
    planes = values.astype(values.dtype.newbyteorder("<"), copy=False).view(np.uint8)
    planes = planes.reshape(-1, values.dtype.itemsize)
    return [_sized(_deflate(np.ascontiguousarray(plane)) if plane.any() else b"") for plane in planes.T]


def _inflate_planes(code: memoryview, dtype: np.dtype[Any], count: int) -> Bits:
    planes = np.zeros((count, dtype.itemsize), np.uint8)
    for place in range(dtype.itemsize):
        plane, code = _split(code)
        if plane:
            planes[:, place] = np.frombuffer(_inflate(plane, count), np.uint8, count)
    if code:
        raise ValueError(f"{len(code)} bytes too many")
    return planes.view(dtype.newbyteorder("<")).reshape(-1).astype(dtype, copy=False)


def _deflate(values: npt.NDArray[np.uint8]) -> bytes:
    runs = np.count_nonzero(values) <= (1 - _RUNS_FROM) * len(values)
    strategy = zlib.Z_DEFAULT_STRATEGY if runs else zlib.Z_HUFFMAN_ONLY
    deflater = zlib.compressobj(1, zlib.DEFLATED, -zlib.MAX_WBITS, _MEMORY_LEVEL, strategy)
    return deflater.compress(values.data) + deflater.flush()


def _inflate(code: memoryview, most: int) -> bytes:
    """Inflate a whole stream to at most `most` bytes, so that a forged one cannot fill the memory."""
    inflater = zlib.decompressobj(-zlib.MAX_WBITS)
    content = inflater.decompress(code, most + 1)
    if len(content) > most or not inflater.eof or inflater.unused_data:
        raise ValueError("a plane does not have the size of its values")
    return content


def _sized(code: bytes) -> bytes:
    return len(code).to_bytes(4, "little") + code


def _split(code: memoryview) -> tuple[memoryview, memoryview]:
    """Return the next part, which begins with its size, and the rest."""
    end = 4 + int.from_bytes(code[:4], "little")
    if len(code) < end:
        raise ValueError("it ends in the middle")
    return code[4:end], code[end:]
