"""Write the answer of a request: packed samples in, JSON out. Pure."""

from __future__ import annotations

import asyncio
import pickle
from array import array
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import msgspec

from services.facade.dialects.parameters import Part
from services.facade.samples import SampleOutput
from services.facade.text import Tokenizer

Write = Callable[[Tokenizer | None, Sequence[SampleOutput], Part], Any]
"""Returns an answer, made of parts; a module's function, or a partial of one, so that a worker can have it."""

_ITEMS_AT_ONCE = 16384
"""Numbers that are packed before others get their turn on the event loop."""


def size_of(outputs: Sequence[SampleOutput]) -> int:
    """Return about how many numbers an answer has, whatever it tells of each token."""
    found = 0
    for output in outputs:
        request = output.request
        found += 8 + len(output.token_ids) * (1 + 2 * (request.sampling.top_logprobs or 0))
        found += len(request.prompt_token_ids)
        if output.prompt_logprobs is not None:
            found += output.prompt_logprobs.top_token_ids.size * 2
    return found


async def packed(outputs: Sequence[SampleOutput]) -> list[bytes]:
    """Return the samples as bytes, in pieces, while others are served."""
    pieces: list[bytes] = []
    waiting: list[SampleOutput] = []
    items = 0
    for output in outputs:
        waiting.append(_arrays(output))
        items += size_of([output])
        if items >= _ITEMS_AT_ONCE:
            pieces.append(pickle.dumps(waiting, pickle.HIGHEST_PROTOCOL))
            waiting, items = [], 0
            await asyncio.sleep(0)
    return [*pieces, pickle.dumps(waiting, pickle.HIGHEST_PROTOCOL)]


def _arrays(output: SampleOutput) -> SampleOutput:
    tokens: Any = array("q", output.token_ids)
    logprobs: Any = array("d", output.logprobs)
    likeliest: Any = [array("q", each) for each in output.top_token_ids]
    values: Any = [array("d", each) for each in output.top_logprobs]
    return replace(output, token_ids=tokens, logprobs=logprobs, top_token_ids=likeliest, top_logprobs=values)


def written(tokenizer: Tokenizer | None, pieces: Sequence[bytes], write: Write) -> bytes:
    """Return the answer of packed samples as JSON."""
    outputs = [output for piece in pieces for output in pickle.loads(piece)]
    return encoded(write(tokenizer, outputs, part))


def encoded(answer: Any) -> bytes:
    """Return JSON; arrays become lists one after another, so that only one of them is there."""
    return msgspec.json.encode(answer, enc_hook=_list_of)


def part(answer: Any) -> msgspec.Raw:
    """Return a part of an answer as JSON: what it was made of takes many times the memory."""
    return msgspec.Raw(encoded(answer))


def _list_of(value: Any) -> Any:
    if isinstance(value, array):
        return value.tolist()
    raise TypeError(f"{type(value).__name__} is not written")
