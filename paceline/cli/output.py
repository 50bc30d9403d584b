"""Output of commands: tables that fit 80 columns where names do, and JSON."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, is_dataclass
from typing import Any

import typer
from rich.console import Console
from rich.measure import Measurement
from rich.table import Column, Table

_PADDING = 2
_FOLDED = 10
"""Width to which a column may shrink whose cells are folded."""


def plain_table() -> Table:
    """Return a table without lines. Long cells fold into several lines instead of being cut."""
    return Table(box=None, padding=(0, _PADDING, 0, 0), header_style="bold")


def add_columns(table: Table, *names: str, number: bool = False, whole: bool = False) -> None:
    """Add columns. Columns of a `number` are right-aligned; these and `whole` columns are never folded."""
    for name in names:
        if number or whole:
            table.add_column(name, justify="right" if number else "left", no_wrap=True)
        else:
            table.add_column(name, overflow="fold")


def least_width(console: Console, table: Table) -> int:
    """Return the width that a table of `plain_table` needs, with all of what is never folded."""
    options = console.options.update(width=10_000)

    def width(column: Column) -> int:
        cells = (column.header, *column.cells)
        widest = max(Measurement.get(console, options, cell).maximum for cell in cells)
        return (widest if column.no_wrap else min(widest, _FOLDED)) + _PADDING

    return sum(map(width, table.columns))


def print_whole(console: Console, table: Table) -> None:
    """Print a table, on lines longer than the terminal's where names are too long for these."""
    console.width = max(console.width, least_width(console, table))
    console.print(table)


def print_json(value: Any, indent: int | None = 2) -> None:
    """Print dataclasses, and containers of them, as JSON. Without an indent on one line."""
    typer.echo(json.dumps(value, indent=indent, default=_plain))


def _plain(value: Any) -> Any:
    if is_dataclass(value) and not isinstance(value, type):
        return asdict(value)
    if isinstance(value, Mapping):
        return dict(value)
    raise TypeError(f"{type(value).__name__} has no JSON form")
