"""Compiled texts of growing rollouts: chains of chunks, so that appending never moves anything."""

# mypy: disable-error-code="no-untyped-def"
# Compiled functions have numba types, which annotations cannot express.

from kernels.jit import kernel
from kernels.suffix_index.compiled.layout import CHUNK_TOKENS, CHUNKS, FREE_CHUNK, NOWHERE


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
