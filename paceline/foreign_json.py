"""Read JSON that others wrote: what cannot be read is a ValueError, however deep it is nested."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from paceline.regular_file import read_regular

MOST_CONFIG_BYTES = 16 << 20
"""Largest file of settings that is read, such as `config.json`."""


def parse_json(content: str | bytes) -> Any:
    """Return what JSON says. ValueError: it is none, or nested deeper than Python parses, which is about 1,000."""
    try:
        return json.loads(content)
    except RecursionError:
        raise ValueError("it is nested too deep") from None


def parse_object(content: str | bytes) -> dict[str, Any]:
    """Return a JSON object. ValueError: it is none."""
    found = parse_json(content)
    if not isinstance(found, dict):
        raise ValueError(f"it is no JSON object but a {type(found).__name__}")
    return found


def read_object(path: Path, most: int = MOST_CONFIG_BYTES) -> dict[str, Any]:
    """Return the JSON object in a file.

    ValueError: there is none in it; OSError: it cannot be read, is no regular file, or has more than `most` bytes.
    """
    return parse_object(read_regular(path, most))
