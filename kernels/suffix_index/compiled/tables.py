"""Compiled texts of growing rollouts, and hashed tables of the continuations of their contexts.

In both tables, for a few context lengths, the hash of the last tokens leads to a token that followed them. The
recent table has the latest continuation in a growing rollout's own text. Repetitions with variations, such as a
number from the line before, are found only here: in all texts together the same short context has many
continuations. All growing rollouts share a recent table of fixed size; a newer entry overwrites an older one in its
place.

The shared table serves all texts of all prompts. Its entry has one token and how firmly it followed: a vote for the
token adds one, a vote for another takes one away. It forgets by itself and is never searched or cleaned.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from kernels.jit import kernel
from kernels.suffix_index.compiled.layout import CHUNK_TOKENS, CHUNKS, ENTRIES, FREE_CHUNK, HISTORY, NOWHERE

# mypy: disable-error-code="no-untyped-def"
# Compiled functions have numba types, which annotations cannot express.


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
    """Hash one more token: `hashes` [HISTORY] uint64 holds the last prefix hashes, `hashed` counts all of them."""
    before = hashes[(hashed - 1) & _RING] if hashed > 0 else np.uint64(0)
    hashes[hashed & _RING] = before * _FACTOR + np.uint64(token) + _ONE


@kernel
def context(hashes, hashed, order, power, salt):
    """Return the hash of the last `order` of at least `order` tokens; different for every salt and order."""
    before = hashes[(hashed - 1 - order) & _RING] if hashed > order else np.uint64(0)
    mixed = ((hashes[(hashed - 1) & _RING] - before * power + np.uint64(order)) ^ salt) * _MIX
    mixed ^= mixed >> _MIX_SHIFT
    return mixed * _FACTOR


@kernel
def has_room(scalars, cursor):
    """Return True if one more token can be stored."""
    return cursor.tokens % CHUNK_TOKENS != 0 or scalars[FREE_CHUNK] != NOWHERE


@kernel
def store(chunks, scalars, cursor, token):
    """Store one more token; there must be room."""
    place = cursor.tokens % CHUNK_TOKENS
    if place == 0:
        chunk = scalars[FREE_CHUNK]
        scalars[FREE_CHUNK] = chunks[chunk].next
        scalars[CHUNKS] += 1
        chunks[chunk].next = NOWHERE
        if cursor.first == NOWHERE:
            cursor.first = chunk
        else:
            chunks[cursor.last].next = chunk
        cursor.last = chunk
    chunks[cursor.last].tokens[place] = token
    cursor.tokens += 1


@kernel
def gather(chunks, cursor, out):
    """Copy the text to `out` [tokens of the cursor] int32."""
    chunk = cursor.first
    for i in range(cursor.tokens):
        out[i] = chunks[chunk].tokens[i % CHUNK_TOKENS]
        if (i + 1) % CHUNK_TOKENS == 0:
            chunk = chunks[chunk].next


@kernel
def discard(chunks, scalars, cursor):
    """Free the chunks."""
    if cursor.first != NOWHERE:
        chunk = cursor.first
        scalars[CHUNKS] -= 1
        while chunks[chunk].next != NOWHERE:
            chunk = chunks[chunk].next
            scalars[CHUNKS] -= 1
        chunks[chunk].next = scalars[FREE_CHUNK]
        scalars[FREE_CHUNK] = cursor.first
    cursor.first = cursor.last = NOWHERE
    cursor.tokens = 0


RECENT_ORDERS = (1, 2, 4, 8)
"""Context lengths in tokens, ascending."""
LEAST_RECENT, MOST_RECENT = 1 << 12, 1 << 20
"""Sizes of a table, powers of two."""
VOTES = 3 ** len(RECENT_ORDERS)
"""Ways in which the contexts can be for and against a token."""

# An entry: the upper 33 bits of its context's hash, token (31 bits). 0: empty.
_RECENT_TOKEN_BITS, _RECENT_TOKEN_MASK = np.uint64(31), np.uint64(2**31 - 1)
# The row is taken from bits that are not in the entry, unless the table is too large for them.
_ROW_SHIFT = np.uint64(7)
_RECENT_POWERS = powers(RECENT_ORDERS)
_ROLLOUT_SALT = np.uint64(0x9E3779B97F4A7C15)
_PLACES = tuple(3**i for i in range(len(RECENT_ORDERS)))
_UNKNOWN, _FOR, _AGAINST = range(3)


@kernel
def salt_of(handle):
    """Return the salt that separates the contexts of one growing rollout from others."""
    return np.uint64(handle) * _ROLLOUT_SALT


@kernel
def learn_recent(entries, hashes, hashed, salt, token):
    """Record that `token` follows the hashed tokens."""
    mask = np.uint64(len(entries) - 1)
    for i in range(len(RECENT_ORDERS)):
        if hashed < RECENT_ORDERS[i]:
            break
        key = context(hashes, hashed, RECENT_ORDERS[i], _RECENT_POWERS[i], salt)
        entries[(key >> _ROW_SHIFT) & mask] = ((key >> _RECENT_TOKEN_BITS) << _RECENT_TOKEN_BITS) | np.uint64(
            token
        )


@kernel
def look_up_recent(entries, hashes, hashed, salt, found):
    """Fill `found` [RECENT_ORDERS] int64 with the token that followed each context last, -1 where it is new."""
    mask = np.uint64(len(entries) - 1)
    for i in range(len(RECENT_ORDERS)):
        found[i] = -1
        if hashed >= RECENT_ORDERS[i]:
            key = context(hashes, hashed, RECENT_ORDERS[i], _RECENT_POWERS[i], salt)
            entry = entries[(key >> _ROW_SHIFT) & mask]
            if entry != 0 and entry >> _RECENT_TOKEN_BITS == key >> _RECENT_TOKEN_BITS:
                found[i] = np.int64(entry & _RECENT_TOKEN_MASK)


@kernel
def votes(found, token):
    """Return the contexts for a token, against it, or new, encoded as a number below VOTES."""
    total = 0
    for i in range(len(found)):
        if found[i] >= 0:
            total += _PLACES[i] * (_FOR if found[i] == token else _AGAINST)
    return total


def most_known(vote: int) -> tuple[int, int]:
    """Return the indices in RECENT_ORDERS of the longest contexts for and against, -1 where there are none."""
    each = [vote // place % 3 for place in _PLACES]
    longest = [
        max((i for i, said in enumerate(each) if said == side), default=-1) for side in (_FOR, _AGAINST)
    ]
    return longest[0], longest[1]


SHARED_ORDERS = (1, 2, 4, 6, 9, 13)
"""Context lengths in tokens, ascending."""
FIRMEST = 15
"""Most votes that an entry remembers."""
LEAST_SHARED = 1 << 12
"""Entries of the smallest table; sizes are powers of two."""

# An entry: the upper 28 bits of its context's hash, firmness (5 bits, 0: empty), token (31 bits). It lies
# anywhere in a bucket of four, half a cache line. The lowest bits of the hash say in which bucket of the
# smallest table; the bits that a larger one needs are in the entry, so that a table can be enlarged without the
# contexts.
_TOKEN_BITS, _CHECK_SHIFT = np.uint64(31), np.uint64(36)
_TOKEN_MASK, _FIRMNESS_MASK = np.uint64(2**31 - 1), np.uint64(31)
_BUCKET, _BUCKET_BITS = 4, np.uint64(2)
_LOW_BITS, _LOWEST_BITS = np.uint64(10), np.uint64(LEAST_SHARED // _BUCKET - 1)
_VOTE = _ONE << _TOKEN_BITS
_SHARED_SALT = np.uint64(0)

_SHARED_POWERS = powers(SHARED_ORDERS)


@kernel
def _context(hashes, hashed, i):
    """Return the hash of the last SHARED_ORDERS[i] tokens; there must be at least as many."""
    return context(hashes, hashed, SHARED_ORDERS[i], _SHARED_POWERS[i], _SHARED_SALT)


@kernel
def _bucket(low, check, rows):
    """Return the first row of the bucket for a hash with these lowest and uppermost bits."""
    mask = (np.uint64(rows) >> _BUCKET_BITS) - _ONE
    return np.int64(((low & _LOWEST_BITS) | (check << _LOW_BITS)) & mask) * _BUCKET


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
def learn_shared(entries, scalars, hashes, hashed, token):
    """Vote for `token` after each context at the end of the hashed tokens."""
    for i in range(len(SHARED_ORDERS)):
        if hashed < SHARED_ORDERS[i]:
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
def look_up_shared(entries, hashes, hashed):
    """Return the longest known context: index in SHARED_ORDERS or -1, next token, and firmness.

    Where a context is known, shorter ones are known, too, unless they were overwritten: a binary search.
    """
    known, unknown = np.int64(-1), np.int64(len(SHARED_ORDERS))
    token, firmness = np.int64(-1), np.int64(0)
    while unknown - known > 1:
        i = (known + unknown) // 2
        row = _find(entries, _context(hashes, hashed, i)) if hashed >= SHARED_ORDERS[i] else np.int64(-1)
        if row >= 0:
            known, token, firmness = i, np.int64(entries[row] & _TOKEN_MASK), _firmness(entries[row])
        else:
            unknown = i
    return known, token, firmness


@kernel
def enlarge_shared(entries, larger):
    """Move all entries to an empty table `larger`."""
    for row in range(len(entries)):
        entry = entries[row]
        if entry != 0:
            at = _bucket(np.uint64(row // _BUCKET), entry >> _CHECK_SHIFT, len(larger))
            while larger[at] != 0:
                at += 1
            larger[at] = entry
