"""Prepare the body of a request and write its answer: the two jobs of the workers. Pure.

`prepared` parses and checks the JSON of a body, and replaces its prompts by token ids. `written` makes JSON of
packed samples.
"""

from __future__ import annotations

import asyncio
import json
import pickle
import re
from array import array
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import Any

import msgspec
from pydantic import ValidationError

from paceline.errors import Violation
from paceline.files import parse_json
from services.contracts.errors import InvalidArgument
from services.facade.dialects.body import Body, Limits, Part
from services.facade.samples import SampleOutput
from services.facade.text import Tokenizer

_ESCAPE = re.compile(rb"\\u[dD][89a-fA-F]")
"""An escape of one half of a character in JSON."""
_HALF = re.compile("[\ud800-\udfff]")
_MOST_PROBLEMS = 32
"""Most problems of a body that are reported; a body may have a million."""
_ITEMS_AT_ONCE = 16384
"""Numbers that are packed before other tasks get their turn on the event loop."""

Write = Callable[[Tokenizer | None, Sequence[SampleOutput], Part], Any]
"""Function that returns an answer, made of parts. It must be picklable, to be sent to a worker."""


def check_unicode(body: bytes) -> None:
    """Refuse a body with text that is not Unicode, which can be neither tokenized nor sent.

    InvalidArgument names the field. This costs a search in the bytes; only a body with escapes of halves is parsed.
    """
    try:
        body.decode()
    except UnicodeDecodeError as error:
        raise InvalidArgument([Violation("", f"the body is not UTF-8 at byte {error.start}")]) from error
    if _ESCAPE.search(body) is None:
        return
    try:
        given = parse_json(body)
    except ValueError:
        return  # The parser of JSON refuses it.
    for field, text in _texts(given):
        if (half := _HALF.search(text)) is not None:
            found = f"has half a character (U+{ord(half[0]):04X} at {half.start()}), which is no Unicode"
            raise InvalidArgument([Violation(_HALF.sub("\ufffd", field), found)])


def _texts(body: Any) -> Iterator[tuple[str, str]]:
    """Yield all texts of a body, including names of fields, each with the path of its field."""
    waiting = [("", body)]
    while waiting:
        field, given = waiting.pop()
        if isinstance(given, str):
            yield field, given
        elif isinstance(given, dict):
            named = [(f"{field}.{name}" if field else name, name, value) for name, value in given.items()]
            yield from ((path, name) for path, name, _ in named)
            waiting += [(path, value) for path, _, value in reversed(named)]
        elif isinstance(given, list):
            waiting += [(f"{field}[{index}]", value) for index, value in reversed([*enumerate(given)])]


@dataclass(frozen=True, slots=True)
class RefusedBody:
    """Reasons to refuse a body."""

    violations: list[Violation]
    names: Mapping[str, str]
    """Names of fields in the body, where they differ from the SDK's."""
    kind: type[InvalidArgument] = InvalidArgument
    """The error."""


@dataclass(frozen=True, slots=True)
class Invalid:
    """Problems of a body that pydantic or the parser of JSON found, without its values."""

    problems: list[dict[str, Any]]


def prepared(tokenizer: Tokenizer | None, raw: bytes, kind: type[Body], limits: Limits | None) -> Any:
    """Return the prepared body, or else a RefusedBody or Invalid."""
    names: Mapping[str, str] = {}
    try:
        check_unicode(raw)
        body = kind.model_validate(_parsed(raw))
        names = body.names_in_body()
        body.prepare(tokenizer, limits)
        # The remaining parameters without a field have no effect.
        body.__pydantic_extra__ = {}
    except json.JSONDecodeError as error:
        location, context = ("body", error.pos), {"error": error.msg}
        return Invalid(
            [{"type": "json_invalid", "loc": location, "msg": "JSON decode error", "ctx": context}]
        )
    except ValidationError as error:
        found = error.errors(include_url=False, include_context=False, include_input=False)
        return Invalid([{**each, "loc": ("body", *each["loc"])} for each in islice(found, _MOST_PROBLEMS)])
    except InvalidArgument as error:
        return RefusedBody(error.violations[:_MOST_PROBLEMS], names, type(error))
    return body


def _parsed(raw: bytes) -> Any:
    try:
        return parse_json(raw)
    except json.JSONDecodeError:
        raise
    except ValueError as error:  # nested too deep, or a whole number of thousands of digits
        raise InvalidArgument([Violation("", f"the body cannot be read: {error}")]) from None


def write_whole(
    writer: Callable[..., Any],
    arguments: tuple[Any, ...],
    tokenizer: Tokenizer | None,
    outputs: Sequence[SampleOutput],
    part: Part,
) -> Any:
    """Return the whole answer of a dialect's writer, a class that takes `arguments` and the tokenizer."""
    return writer(*arguments, tokenizer).whole(outputs, part)


def size_of(outputs: Sequence[SampleOutput]) -> int:
    """Return about how many numbers an answer has, for whichever fields of a token it has."""
    found = 0
    for output in outputs:
        request = output.request
        found += 8 + len(output.token_ids) * (1 + 2 * (request.sampling.top_logprobs or 0))
        found += len(request.prompt_token_ids)
        if output.prompt_logprobs is not None:
            found += output.prompt_logprobs.top_token_ids.size * 2
    return found


async def packed(outputs: Sequence[SampleOutput]) -> list[bytes]:
    """Return the samples as bytes, in pieces; other tasks run in between."""
    pieces: list[bytes] = []
    waiting: list[SampleOutput] = []
    items = 0
    for output in outputs:
        waiting.append(output)
        items += size_of([output])
        if items >= _ITEMS_AT_ONCE:
            pieces.append(pickle.dumps(waiting, pickle.HIGHEST_PROTOCOL))
            waiting, items = [], 0
            await asyncio.sleep(0)
    return [*pieces, pickle.dumps(waiting, pickle.HIGHEST_PROTOCOL)]


def written(tokenizer: Tokenizer | None, pieces: Sequence[bytes], write: Write) -> bytes:
    """Return the answer of packed samples as JSON."""
    outputs = [output for piece in pieces for output in pickle.loads(piece)]
    return encoded(write(tokenizer, outputs, part))


def encoded(answer: Any) -> bytes:
    """Return JSON; arrays become lists one after another, so that memory holds one list at a time."""
    return msgspec.json.encode(answer, enc_hook=_list_of)


def part(answer: Any) -> msgspec.Raw:
    """Return a part of an answer as JSON, since its Python objects take many times the memory."""
    return msgspec.Raw(encoded(answer))


def _list_of(value: Any) -> Any:
    if isinstance(value, array):
        return value.tolist()
    raise TypeError(f"{type(value).__name__} is not written")
