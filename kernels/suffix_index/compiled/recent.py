"""Compiled table of the latest continuations in a growing rollout's own text.

For a few context lengths, the hash of a rollout's last tokens leads to the token that followed them when they
occurred in it last. Repetitions with variations, such as a number from the line before, are found only here: in all
texts together the same short context has many continuations.

All growing rollouts share a table of fixed size; a newer entry overwrites an older one in its place.
"""

# mypy: disable-error-code="no-untyped-def"
# Compiled functions have numba types, which annotations cannot express.

import numpy as np

from kernels.jit import kernel
from kernels.suffix_index.compiled.hashing import context, powers

ORDERS = (1, 2, 4, 8)
"""Context lengths in tokens, ascending."""
LEAST_ENTRIES, MOST_ENTRIES = 1 << 12, 1 << 20
"""Sizes of a table, powers of two."""
VOTES = 3 ** len(ORDERS)
"""Ways in which the contexts can be for and against a token."""

# An entry: the upper 33 bits of its context's hash, token (31 bits). 0: empty.
_TOKEN_BITS, _TOKEN_MASK = np.uint64(31), np.uint64(2**31 - 1)
# The row is taken from bits that are not in the entry, as far as the table is not larger than these are many.
_ROW_SHIFT = np.uint64(7)
_POWERS = powers(ORDERS)
_SALT = np.uint64(0x9E3779B97F4A7C15)
_PLACES = tuple(3**i for i in range(len(ORDERS)))
_UNKNOWN, _FOR, _AGAINST = range(3)


@kernel
def salt_of(handle):
    """Return the salt that separates the contexts of a growing rollout from those of others."""
    return np.uint64(handle) * _SALT


@kernel
def learn(entries, hashes, hashed, salt, token):
    """Record that `token` follows the tokens hashed."""
    mask = np.uint64(len(entries) - 1)
    for i in range(len(ORDERS)):
        if hashed < ORDERS[i]:
            break
        key = context(hashes, hashed, ORDERS[i], _POWERS[i], salt)
        entries[(key >> _ROW_SHIFT) & mask] = ((key >> _TOKEN_BITS) << _TOKEN_BITS) | np.uint64(token)


@kernel
def look_up(entries, hashes, hashed, salt, found):
    """Fill `found` [ORDERS] int64 with the token that followed each context last, -1 where it is new."""
    mask = np.uint64(len(entries) - 1)
    for i in range(len(ORDERS)):
        found[i] = -1
        if hashed >= ORDERS[i]:
            key = context(hashes, hashed, ORDERS[i], _POWERS[i], salt)
            entry = entries[(key >> _ROW_SHIFT) & mask]
            if entry != 0 and entry >> _TOKEN_BITS == key >> _TOKEN_BITS:
                found[i] = np.int64(entry & _TOKEN_MASK)


@kernel
def votes(found, token):
    """Return which contexts are for a token, against it, or new, as a number below VOTES."""
    total = 0
    for i in range(len(found)):
        if found[i] >= 0:
            total += _PLACES[i] * (_FOR if found[i] == token else _AGAINST)
    return total


def most_known(vote: int) -> tuple[int, int]:
    """Return the places in ORDERS of the longest contexts for and against, -1 where there are none."""
    each = [vote // place % 3 for place in _PLACES]
    longest = [
        max((i for i, said in enumerate(each) if said == side), default=-1) for side in (_FOR, _AGAINST)
    ]
    return longest[0], longest[1]
