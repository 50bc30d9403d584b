"""Check of the text in a body: what is no Unicode can be neither tokenized nor sent. Pure."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

from paceline.errors import Violation
from paceline.foreign_json import parse_json
from services.contracts.errors import InvalidArgument

_ESCAPE = re.compile(rb"\\u[dD][89a-fA-F]")
"""An escape of one half of a character in JSON."""
_HALF = re.compile("[\ud800-\udfff]")


def check_unicode(body: bytes) -> None:
    """Refuse a body with text that is no Unicode. InvalidArgument names the field.

    Costs a search in the bytes; only a body with escapes of halves is looked through.
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
        return  # It is refused as what it is.
    for field, text in _texts(given):
        if (half := _HALF.search(text)) is not None:
            found = f"has half a character (U+{ord(half[0]):04X} at {half.start()}), which is no Unicode"
            raise InvalidArgument([Violation(_HALF.sub("\ufffd", field), found)])


def _texts(body: Any) -> Iterator[tuple[str, str]]:
    """Yield all texts of a body, names of fields included, each with the path of its field."""
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
