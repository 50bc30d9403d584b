"""Samples in Redis: those that have ended, and the chunks of those that have not."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from services.contracts.gateway_keys import BatchKeys
from services.gateway.journal.sample_chunks import WHOLE, Head, PartialSample

# Fields, and tokens of chunks, that are read in one round trip.
_FIELDS, _TOKENS = 1024, 1 << 19


async def read_heads(redis: Any, names: BatchKeys, indexes: Sequence[int]) -> dict[int, Head]:
    """Return the heads of the samples that have chunks."""
    found = {}
    for begin in range(0, len(indexes), _FIELDS):
        part = indexes[begin : begin + _FIELDS]
        for index, head in zip(part, await redis.hmget(names.chunks, part), strict=True):
            if head is not None:
                found[index] = Head.parse(head.decode())
    return found


async def read_chunks(redis: Any, names: BatchKeys, heads: Mapping[int, Head]) -> list[PartialSample]:
    """Return the chunks of these samples, as far as all of them are there."""
    found = []
    for part in _parts(heads):
        fields = [f"{index}:{number}" for index, head in part for number in range(head.chunks)]
        values = iter(await redis.hmget(names.chunks, fields))
        for index, head in part:
            chunks = [next(values) for _ in range(head.chunks)]
            if None not in chunks:
                found.append(PartialSample(index, head, b"".join(chunks)))
    return found


async def read_ended(redis: Any, names: BatchKeys, indexes: Sequence[int]) -> list[bytes | None]:
    """Return the serialised samples with these indexes, None for those of which anything is missing."""
    pipe = redis.pipeline(transaction=False)
    for name in (names.events, names.done, names.chunks):
        pipe.hmget(name, indexes)
    payloads, done, chunked = await pipe.execute()
    heads = {}
    for place, index in enumerate(indexes):
        _, head = cursor_and_head(done[place]) if done[place] else (0, WHOLE)
        if head.chunks and chunked[place] == str(head).encode():
            heads[index] = head
        elif head.chunks or not done[place]:
            payloads[place] = None
    chunks = {each.index: each.payload for each in await read_chunks(redis, names, heads)}
    for place, index in enumerate(indexes):
        if payloads[place] is not None and index in heads:
            payloads[place] = chunks[index] + payloads[place] if index in chunks else None
    return list(payloads)


def cursor_and_head(value: bytes) -> tuple[int, Head]:
    """Parse what is recorded of a sample that has ended."""
    cursor, head = value.decode().split(":", 1)
    return int(cursor), Head.parse(head)


def parse_ended(done: bytes, events: bytes) -> tuple[dict[int, int], dict[int, Head], list[int]]:
    """Parse what is recorded of all samples that have ended, and which indexes have an event.

    Returns the cursors, the heads, and the ended samples with an event.
    """
    values, cursors, heads = done.split(), {}, {}
    for index, value in zip(map(int, values[::2]), values[1::2], strict=True):
        cursors[index], heads[index] = cursor_and_head(value)
    return cursors, heads, [index for index in map(int, events.split()) if index in heads]


def _parts(heads: Mapping[int, Head]) -> Iterator[list[tuple[int, Head]]]:
    """Yield samples of so many tokens, or of one sample that has more."""
    part: list[tuple[int, Head]] = []
    tokens = 0
    for index, head in heads.items():
        if part and tokens + head.tokens > _TOKENS:
            yield part
            part, tokens = [], 0
        part.append((index, head))
        tokens += head.tokens
    if part:
        yield part
