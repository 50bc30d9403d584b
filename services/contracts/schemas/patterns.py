"""Regular expressions in JSON schemas that a grammar follows to the letter. Pure."""

from __future__ import annotations

import re
from typing import Any

LONGEST_PATTERN = 1024
# A backslash and a quote would have to be escaped in JSON, and a grammar writes them as they are.
_PLAIN = r'[^\\\[\](){}*+?|.^$"\x00-\x1f\x7f]'
_ESCAPED = r"\\[\^$*+?.()\[\]{}|/\-]"
_CLASS = r"\\[dws]"
_MEMBER = rf'(?:[^\\\[\]"\x00-\x1f\x7f]|{_ESCAPED})'
_SET = rf"\[(?:\^{_MEMBER}+|(?!\^)(?:{_MEMBER}|{_CLASS})+)\]"
_TIMES = r"(?:[*+?]|\{\d{1,3}(?:,\d{0,3})?\})?"
_PART = re.compile(
    rf"(?:(?P<open>\((?:\?:)?)|(?P<close>\){_TIMES})|(?P<bar>\|)|(?:{_SET}|{_ESCAPED}|{_CLASS}|\.|{_PLAIN}){_TIMES})"
)


def pattern_fault(pattern: Any) -> str:
    """Return what is wrong with a pattern; "" if nothing is.

    It has to be anchored, since only whole strings are matched. It may have characters, sets, `.`, \\d, \\w, \\s,
    groups, alternatives in groups, and counts.
    """
    if not isinstance(pattern, str) or len(pattern) > LONGEST_PATTERN:
        return f"must be a string of at most {LONGEST_PATTERN} characters"
    if len(pattern) < 2 or pattern[0] != "^" or pattern[-1] != "$" or pattern[-2] == "\\":
        return "must begin with ^ and end with $"
    place, depth, last = 1, 0, len(pattern) - 1
    while place < last:
        part = _PART.match(pattern, place, last)
        if part is None:
            return f"has {pattern[place : place + 8]!r}, which is not supported"
        if part["bar"] and not depth:
            return "has alternatives outside of a group"
        depth += bool(part["open"]) - bool(part["close"])
        if depth < 0:
            return "closes a group that is not open"
        place = part.end()
    if depth:
        return "does not close a group"
    try:
        re.compile(pattern)
    except (re.error, OverflowError, RecursionError) as error:
        return f"is no regular expression: {error}"
    return ""
