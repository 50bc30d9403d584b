"""Limits within a type: lengths, counts, bounds, patterns, and the values that a schema lists. Pure."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator
from decimal import Decimal
from typing import Any

from services.contracts.schemas.patterns import pattern_fault

LARGEST_NUMBER = 1 << 53
"""Whole numbers beyond it are not exact in every JSON reader."""
DECIMALS = 6
"""Most decimals of the numbers that bounds allow."""
FORMATS = ("uuid",)

Fault = tuple[str, str]
"""Place in a schema, such as `#/properties/a`, and what is wrong there."""


def check_string(schema: dict[str, Any], place: str) -> Iterator[Fault]:
    """Yield what is wrong with the keywords of a string."""
    yield from check_counts(schema, "minLength", "maxLength", place)
    given = [key for key in ("pattern", "format") if key in schema]
    lengths = [key for key in ("minLength", "maxLength") if key in schema]
    if len(given) == 2 or (given and lengths):
        yield place, f"{given[0]} is not supported together with {(given[1:] + lengths)[0]}"
    if "pattern" in schema and (fault := pattern_fault(schema["pattern"])):
        yield place, f"pattern {fault}"
    if "format" in schema and schema["format"] not in FORMATS:
        yield place, f"format is {schema['format']!r}; must be {' or '.join(FORMATS)}, others by a pattern"


def check_number(schema: dict[str, Any], types: list[str], place: str) -> Iterator[Fault]:
    """Yield what is wrong with the bounds of a number; one of these types is of numbers."""
    decimals = 0 if "integer" in types else DECIMALS
    least: list[Decimal] = []
    most: list[Decimal] = []
    for key in ("minimum", "exclusiveMinimum", "maximum", "exclusiveMaximum"):
        if key not in schema:
            continue
        value, step = schema[key], Decimal(10) ** -decimals
        known = is_of(value, "number") and abs(value) <= LARGEST_NUMBER
        if not known or Decimal(repr(value)) % step:
            allowed = "whole number" if "integer" in types else f"number of at most {DECIMALS} decimals"
            yield place, f"{key} is {json.dumps(value)[:40]}; must be a {allowed} within 2**53"
            return
        within = step if key.startswith("exclusive") else 0
        if key in ("minimum", "exclusiveMinimum"):
            least.append(Decimal(repr(value)) + within)
        else:
            most.append(Decimal(repr(value)) - within)
    if least and most and max(least) > min(most):
        yield place, "allows no number: its minimum is above its maximum"


def check_counts(schema: dict[str, Any], least: str, most: str, place: str) -> Iterator[Fault]:
    """Yield what is wrong with the keywords, of these names, for how many there may be."""
    given = {key: schema[key] for key in (least, most) if key in schema}
    wrong = [key for key, value in given.items() if type(value) is not int or value < 0]
    for key in wrong:
        yield place, f"{key} is {json.dumps(given[key])[:40]}; must be a whole number, 0 or more"
    if not wrong and given.get(least, 0) > given.get(most, math.inf):
        yield place, f"{least} is above {most}"


def is_of(value: Any, name: Any) -> bool:
    """Return whether a value is of a type of JSON schemas."""
    if isinstance(value, bool) or value is None:
        return name == ("null" if value is None else "boolean")
    if isinstance(value, int | float):
        return name == "number" or (name == "integer" and (isinstance(value, int) or value.is_integer()))
    return name == ("string" if isinstance(value, str) else "array" if isinstance(value, list) else "object")


def is_plain(value: Any) -> bool:
    """Return whether all numbers in a value are read alike everywhere."""
    if isinstance(value, dict | list):
        return all(is_plain(each) for each in (value.values() if isinstance(value, dict) else value))
    if isinstance(value, float):
        return math.isfinite(value)
    return not isinstance(value, int) or abs(value) <= LARGEST_NUMBER
