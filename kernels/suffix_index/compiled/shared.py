"""Compiled table of continuations of short contexts, shared by all prompts.

For a few context lengths, the hash of the last tokens leads to one token that followed them, and how firmly: a vote
for it adds one, a vote for another takes one away. It forgets by itself and is never searched or cleaned.
"""

# mypy: disable-error-code="no-untyped-def"
# Compiled functions have numba types, which annotations cannot express.

import numpy as np

from kernels.jit import kernel
from kernels.suffix_index.compiled.hashing import context, powers
from kernels.suffix_index.compiled.layout import ENTRIES

ORDERS = (1, 2, 4, 6, 9, 13)
"""Context lengths in tokens, ascending."""
FIRMEST = 15
"""Most votes that an entry remembers."""
LEAST_ENTRIES = 1 << 12
"""Entries of the smallest table; sizes are powers of two."""

# An entry: the upper 28 bits of its context's hash, firmness (5 bits, 0: empty), token (31 bits). It lies
# anywhere in a bucket of four, half a cache line. The lowest bits of the hash say in which bucket of the
# smallest table; the bits that a larger one needs are in the entry, so that a table can be enlarged without the
# contexts.
_TOKEN_BITS, _CHECK_SHIFT = np.uint64(31), np.uint64(36)
_TOKEN_MASK, _FIRMNESS_MASK = np.uint64(2**31 - 1), np.uint64(31)
_BUCKET, _BUCKET_BITS = 4, np.uint64(2)
_LOW_BITS, _LOW = np.uint64(10), np.uint64(LEAST_ENTRIES // _BUCKET - 1)
_ONE = np.uint64(1)
_VOTE = _ONE << _TOKEN_BITS
_SALT = np.uint64(0)

_POWERS = powers(ORDERS)


@kernel
def _context(hashes, hashed, i):
    """Return the hash of the last ORDERS[i] tokens, of at least so many."""
    return context(hashes, hashed, ORDERS[i], _POWERS[i], _SALT)


@kernel
def _bucket(low, check, rows):
    """Return the first row of the bucket for a hash with these lowest and uppermost bits."""
    mask = (np.uint64(rows) >> _BUCKET_BITS) - _ONE
    return np.int64(((low & _LOW) | (check << _LOW_BITS)) & mask) * _BUCKET


@kernel
def _firmness(entry):
    return np.int64((entry >> _TOKEN_BITS) & _FIRMNESS_MASK)


@kernel
def _find(entries, context):
    """Return the row of a context's entry; if there is none, -1 - the row where it may be put."""
    check = context >> _CHECK_SHIFT
    start = _bucket(context, check, len(entries))
    weakest, row = np.int64(FIRMEST + 1), start
    for at in range(start, start + _BUCKET):
        firmness = _firmness(entries[at])
        if firmness > 0 and entries[at] >> _CHECK_SHIFT == check:
            return at
        if firmness < weakest:
            weakest, row = firmness, at
    return -1 - row


@kernel
def learn(entries, scalars, hashes, hashed, token):
    """Vote for `token` after each context that ends the tokens hashed."""
    for i in range(len(ORDERS)):
        if hashed < ORDERS[i]:
            break
        context = _context(hashes, hashed, i)
        row = _find(entries, context)
        known = row >= 0
        if not known:
            row = -1 - row
        entry = entries[row]
        firmness = _firmness(entry)
        if known and entry & _TOKEN_MASK == np.uint64(token):
            if firmness < FIRMEST:
                entries[row] = entry + _VOTE
        elif firmness > 1:
            entries[row] = entry - _VOTE
        else:
            scalars[ENTRIES] += firmness == 0
            entries[row] = ((context >> _CHECK_SHIFT) << _CHECK_SHIFT) | _VOTE | np.uint64(token)


@kernel
def look_up(entries, hashes, hashed):
    """Return the longest known context: its place in ORDERS or -1, the token that follows, and its firmness.

    Where a context is known, shorter ones are known, too, unless they were overwritten: a binary search.
    """
    known, unknown = np.int64(-1), np.int64(len(ORDERS))
    token, firmness = np.int64(-1), np.int64(0)
    while unknown - known > 1:
        i = (known + unknown) // 2
        row = _find(entries, _context(hashes, hashed, i)) if hashed >= ORDERS[i] else np.int64(-1)
        if row >= 0:
            known, token, firmness = i, np.int64(entries[row] & _TOKEN_MASK), _firmness(entries[row])
        else:
            unknown = i
    return known, token, firmness


@kernel
def enlarge(entries, larger):
    """Move all entries to an empty table `larger`."""
    for row in range(len(entries)):
        entry = entries[row]
        if entry != 0:
            at = _bucket(np.uint64(row // _BUCKET), entry >> _CHECK_SHIFT, len(larger))
            while larger[at] != 0:
                at += 1
            larger[at] = entry
