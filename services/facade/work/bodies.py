"""Read, check and prepare the body of a request: JSON in, a body without its prompts out. Pure."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from itertools import islice
from typing import Any

from pydantic import ValidationError

from paceline.errors import Violation
from paceline.foreign_json import parse_json
from services.contracts.errors import InvalidArgument
from services.facade.dialects.asked import Limits
from services.facade.dialects.parameters import Body
from services.facade.dialects.unicode import check_unicode
from services.facade.text import Tokenizer

_MOST_PROBLEMS = 32
"""Problems of a body that are told; there may be one for each of a million numbers."""


@dataclass(frozen=True, slots=True)
class RefusedBody:
    """Why a body is refused."""

    violations: list[Violation]
    names: Mapping[str, str]
    """Names of fields in the body, where they differ from the SDK's."""
    kind: type[InvalidArgument] = InvalidArgument
    """The error."""


@dataclass(frozen=True, slots=True)
class Invalid:
    """What pydantic or the reader of JSON finds wrong in a body, without its values."""

    problems: list[dict[str, Any]]


def prepared(tokenizer: Tokenizer | None, raw: bytes, kind: type[Body], limits: Limits | None) -> Any:
    """Return the prepared body, or why there is none: RefusedBody or Invalid."""
    names: Mapping[str, str] = {}
    try:
        check_unicode(raw)
        body = kind.model_validate(_parsed(raw))
        names = body.names_in_body()
        body.prepare(tokenizer, limits)
        # What is left of parameters without a field asks for nothing.
        body.__pydantic_extra__ = {}
    except json.JSONDecodeError as error:
        location, told = ("body", error.pos), {"error": error.msg}
        return Invalid([{"type": "json_invalid", "loc": location, "msg": "JSON decode error", "ctx": told}])
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
