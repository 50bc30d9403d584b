"""The end of a service's log, for people. Pure."""

from __future__ import annotations

import json
from collections.abc import Sequence


def readable_tail(lines: Sequence[str], most: int) -> list[str]:
    """The last `most` lines; structured ones as plain text, an exception's traceback on lines of its own."""
    return [part for line in lines[-most:] for part in _readable(line)][-most:]


def _readable(line: str) -> list[str]:
    try:
        entry = json.loads(line)
    except ValueError:
        return [line]
    if not isinstance(entry, dict) or "event" not in entry:
        return [line]
    hidden = ("event", "level", "timestamp", "service", "logger", "exception")
    rest = " ".join(f"{key}={value}" for key, value in entry.items() if key not in hidden)
    head = f"{entry.get('timestamp', '')} {entry.get('level', '')} {entry['event']} {rest}".strip()
    return [head, *str(entry.get("exception", "")).splitlines()]
