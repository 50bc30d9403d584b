"""Output of commands: tables that fit 80 columns, and JSON."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, is_dataclass
from typing import Any

import typer
from rich.table import Table


def plain_table() -> Table:
    """Return a table without lines. Long cells fold into several lines instead of being cut."""
    return Table(box=None, padding=(0, 2, 0, 0), header_style="bold")


def add_columns(table: Table, *names: str, number: bool = False) -> None:
    """Add columns; those of numbers are right-aligned and never folded."""
    for name in names:
        if number:
            table.add_column(name, justify="right", no_wrap=True)
        else:
            table.add_column(name, overflow="fold")


def print_json(value: Any, indent: int | None = 2) -> None:
    """Print dataclasses, and containers of them, as JSON. Without an indent on one line."""
    typer.echo(json.dumps(value, indent=indent, default=_plain))


def _plain(value: Any) -> Any:
    if is_dataclass(value) and not isinstance(value, type):
        return asdict(value)
    if isinstance(value, Mapping):
        return dict(value)
    raise TypeError(f"{type(value).__name__} has no JSON form")
