"""Compiled hashes of the last few tokens of a text, for any number of context lengths at once."""

# mypy: disable-error-code="no-untyped-def"
# Compiled functions have numba types, which annotations cannot express.

from collections.abc import Sequence

import numpy as np

from kernels.jit import kernel
from kernels.suffix_index.compiled.layout import HISTORY

_BASE = 0x9E3779B97F4A7C15
_FACTOR = np.uint64(_BASE)
_MIX, _MIX_SHIFT = np.uint64(0xC2B2AE3D27D4EB4F), np.uint64(29)
_ONE = np.uint64(1)
_RING = HISTORY - 1
if HISTORY & _RING:
    raise ValueError("the ring's length must be a power of two")


def powers(orders: Sequence[int]) -> tuple[np.uint64, ...]:
    """Return the powers that `context` needs for each context length."""
    if max(orders) >= HISTORY:
        raise ValueError("the ring must be longer than the longest context")
    return tuple(np.uint64(pow(_BASE, order, 2**64)) for order in orders)


@kernel
def push(hashes, hashed, token):
    """Hash one more token: `hashes` [HISTORY] uint64 holds those of the last prefixes, `hashed` counts them."""
    before = hashes[(hashed - 1) & _RING] if hashed > 0 else np.uint64(0)
    hashes[hashed & _RING] = before * _FACTOR + np.uint64(token) + _ONE


@kernel
def context(hashes, hashed, order, power, salt):
    """Return the hash of the last `order` tokens, of at least so many; different for every salt and order."""
    before = hashes[(hashed - 1 - order) & _RING] if hashed > order else np.uint64(0)
    mixed = ((hashes[(hashed - 1) & _RING] - before * power + np.uint64(order)) ^ salt) * _MIX
    mixed ^= mixed >> _MIX_SHIFT
    return mixed * _FACTOR
