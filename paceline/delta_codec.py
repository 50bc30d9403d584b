"""Code an array of bits by its difference from another one, without loss.

Values are unsigned integers with the bits of the numbers, whatever these are: NaN keep their payload. The
difference of two, modulo their range, is small where a number moved by a few units in the last place. With its sign
in the lowest bit it is split into bytes, and each byte's plane is deflated by itself.

An array with few changes is coded by the gaps between them and their differences. One with many is coded by all
differences, ordered by the numbers' exponents: an optimizer moves all numbers by about as much, which is many units
of small numbers and few of large ones, and codes fit to numbers of about one size are shorter.
"""

from __future__ import annotations

import zlib
from typing import Any

import numpy as np
import numpy.typing as npt

Bits = npt.NDArray[np.unsignedinteger[Any]]

# How a piece is coded; the first byte of its code.
_SAME, _RAW, _SPARSE, _DENSE = range(4)
# Share of changed values from which coding all of them is shorter, as measured on steps of GRPO.
_DENSE_FROM = 0.3
# Share of zeros from which runs of them are worth looking for; that is slower than Huffman's code alone.
_RUNS_FROM = 0.9
_LONG_GAP = 255
_MEMORY_LEVEL = 9
# First bit of the exponent above those of the fraction, by bytes of a number. Two bytes are a bfloat16.
_EXPONENT_AT = {2: 7, 4: 23, 8: 52}


def encode(base: Bits, new: Bits) -> bytes:
    """Return the code of `new`, from which `decode` makes it given `base` of the same length and dtype."""
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
    """Return the array that was coded.

    Raises:
        ValueError: no code, or one of another base.
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
        raise ValueError(f"this is no code of {len(base)} values: {error}") from error


def _folded(difference: Bits) -> Bits:
    """Return 0, 1, 2, 3 ... for differences of 0, -1, 1, -2 ..."""
    bits = difference.dtype.itemsize * 8
    signed = difference.view(f"i{difference.dtype.itemsize}")
    folded: Bits = ((signed << 1) ^ (signed >> (bits - 1))).view(difference.dtype)
    return folded


def _unfolded(folded: Bits) -> Bits:
    one = folded.dtype.type(1)
    unfolded: Bits = (folded >> one) ^ (~(folded & one) + one)
    return unfolded


def _order(base: Bits) -> npt.NDArray[np.intp]:
    """Return the places of values in the order of their exponents."""
    at = _EXPONENT_AT.get(base.dtype.itemsize)
    if at is None:
        return np.arange(len(base))
    # Without the sign, which is lost with the highest bits, but of doubles.
    exponents = (base >> base.dtype.type(at)).astype(np.uint8 if at < _EXPONENT_AT[8] else np.uint16)
    return np.argsort(exponents, kind="stable")


def _gaps(places: npt.NDArray[np.intp]) -> list[bytes]:
    """Return the code of ascending places: the gaps between them, of which one takes a byte for each 255."""
    gaps = np.diff(places, prepend=-1) - 1
    if gaps.max() < _LONG_GAP:
        coded = gaps.astype(np.uint8)
    else:
        ends = np.cumsum(gaps // _LONG_GAP + 1)
        coded = np.full(int(ends[-1]), _LONG_GAP, np.uint8)
        coded[ends - 1] = gaps % _LONG_GAP
    return [len(places).to_bytes(4, "little"), _sized(_deflate(coded))]


def _places(code: memoryview, length: int) -> tuple[npt.NDArray[np.int64], memoryview]:
    """Return places below `length`, and what follows their code."""
    count, (gaps, rest) = int.from_bytes(code[:4], "little"), _split(code[4:])
    coded = np.frombuffer(_inflate(gaps, min(count, length) + length // _LONG_GAP + 1), np.uint8)
    is_end = coded != _LONG_GAP
    places = np.cumsum(coded, dtype=np.int64)[is_end]
    places += np.arange(len(places))
    if len(places) != count or (count and places[-1] >= length):
        raise ValueError("its gaps do not fit")
    return places, rest


def _deflate_planes(values: Bits) -> list[bytes]:
    """Return the deflated bytes of values, the lowest ones first; planes of zeros are empty."""
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
    """Inflate a whole stream of at most so many bytes: a forged one cannot fill the memory."""
    inflater = zlib.decompressobj(-zlib.MAX_WBITS)
    content = inflater.decompress(code, most + 1)
    if len(content) > most or not inflater.eof or inflater.unused_data:
        raise ValueError("a plane does not have the size of its values")
    return content


def _sized(code: bytes) -> bytes:
    return len(code).to_bytes(4, "little") + code


def _split(code: memoryview) -> tuple[memoryview, memoryview]:
    """Return the next part of known size, and the rest."""
    end = 4 + int.from_bytes(code[:4], "little")
    if len(code) < end:
        raise ValueError("it ends in the middle")
    return code[4:end], code[end:]
