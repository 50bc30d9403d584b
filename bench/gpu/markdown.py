"""Format rows and figures of Markdown tables."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import Any


def figure(value: Any) -> str:
    """Return a float with three significant digits, a dash for None, and any other value as text."""
    if value is None:
        return "-"
    return f"{value:.3g}" if isinstance(value, float) else str(value)


def row(*cells: object) -> str:
    """Return a table row."""
    return "| " + " | ".join(map(str, cells)) + " |"


def table(heads: Iterable[str], rows: Iterable[Iterable[object]]) -> Iterator[str]:
    """Yield the lines of a table."""
    named = tuple(heads)
    yield row(*named)
    yield row(*["---"] * len(named))
    yield from (row(*cells) for cells in rows)


def listed(result: Mapping[str, Any] | None) -> Iterator[str]:
    """Yield a list item for each figure of a result."""
    yield from (f"- {name}: {figure(value)}" for name, value in (result or {}).items())
