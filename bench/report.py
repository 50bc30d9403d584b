"""Print and store the figures of benchmarks. It needs `rich` to print, and nothing to format."""

from __future__ import annotations

import argparse
import json
import os
import platform
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any

from bench.measured_code import snapshot

if TYPE_CHECKING:
    from rich.console import Console

Figures = Mapping[str, Any]
_WIDTH = 160


def write(name: str, figures: Figures) -> Path:
    """Write runs/bench/NAME.json: the figures, the machine, the time, and the code that is measured."""
    path = Path("runs/bench") / f"{name}.json"
    path.parent.mkdir(parents=True, exist_ok=True)
    machine = {"cpus": len(cores()), "processor": _processor(), "python": platform.python_version()}
    stamp = datetime.now(UTC).isoformat(timespec="seconds")
    origin = {"machine": machine, "measured_at": stamp, "code": snapshot(name)}
    path.write_text(json.dumps({**figures, **origin}, indent=2) + "\n")
    console().print(f"written to {path}")
    return path


def keep(path: Path, data: Any, indent: int | None = None) -> None:
    """Replace a JSON file atomically: a reader sees the old or the new contents."""
    path.parent.mkdir(parents=True, exist_ok=True)
    part = path.with_suffix(".part")
    part.write_text(json.dumps(data, indent=indent, default=str) + "\n")
    part.replace(path)


def console() -> Console:
    """Return a console without markup. Output to a file or a pipe is as wide as the widest table."""
    from rich.console import Console

    found = Console(markup=False, emoji=False)
    if not found.is_terminal:
        found.width = _WIDTH
    return found


def say(line: str) -> None:
    """Print a line of progress."""
    console().print(line, highlight=False)


@dataclass(slots=True)
class BenchProgress:
    """Report after each part how long the others will take."""

    parts: int
    name: str
    began: float = field(default_factory=time.monotonic)
    done: int = 0

    def advance(self, part: str) -> None:
        """Print that a part is done."""
        self.done += 1
        gone = time.monotonic() - self.began
        left = gone / self.done * (self.parts - self.done)
        print(f"{self.name}: {part}; {gone:.0f} s gone, about {left:.0f} s left", flush=True)


def show(title: str, figures: Figures) -> None:
    """Print figures as a two-column table."""
    show_rows(title, ("figure", "value"), [(name, format_value(value)) for name, value in figures.items()])


def show_rows(title: str, columns: Sequence[str], rows: Sequence[Sequence[str]]) -> Figures:
    """Print a table, and return it as documents show it; the first column is text, the others are numbers."""
    from rich.table import Table

    table = Table(title=title)
    for i, column in enumerate(columns):
        table.add_column(column, justify="left" if i == 0 else "right")
    for row in rows:
        table.add_row(*row)
    console().print(table)
    return {"columns": columns, "rows": rows}


def show_table(title: str, columns: Sequence[tuple[str, str]], table: Mapping[str, Figures]) -> Figures:
    """Print and return a table with a row for each name in `table`; `columns` are pairs of header and key."""
    heads = ("", *(head for head, _ in columns))
    rows = [(name, *(format_value(figures[key]) for _, key in columns)) for name, figures in table.items()]
    return show_rows(title, heads, rows)


def format_value(value: Any) -> str:
    """Format floats with three significant digits, and None as a dash."""
    if value is None:
        return "-"
    return f"{value:.3g}" if isinstance(value, float) else str(value)


def format_band(optimistic: float | None, pessimistic: float | None) -> str:
    """Format a modelled value: the optimistic end, and the band in brackets if its ends differ."""
    shown, *ends = (format_value(each) for each in (optimistic, pessimistic))
    if optimistic is None or pessimistic is None or shown in ends:
        return shown
    low, high = map(format_value, sorted((optimistic, pessimistic)))
    return f"{shown} ({low} to {high})"


def markdown_row(*cells: object) -> str:
    """Return a row of a Markdown table."""
    return f"| {' | '.join(map(str, cells))} |"


def markdown_table(heads: Sequence[str], rows: Iterable[Iterable[object]]) -> list[str]:
    """Return the lines of a Markdown table; the first column is text, the others are numbers."""
    rules = ["---", *["---:"] * (len(heads) - 1)]
    return [markdown_row(*cells) for cells in (heads, rules, *rows)]


def listed(figures: Figures | None) -> Iterator[str]:
    """Yield a Markdown list item for each figure."""
    yield from (f"- {name}: {format_value(value)}" for name, value in (figures or {}).items())


def option_parser(about: str | None) -> argparse.ArgumentParser:
    """Return a parser of options whose help has a module's docstring as it stands."""
    program = getattr(sys.modules["__main__"].__spec__, "name", "bench").removesuffix(".__main__")
    return argparse.ArgumentParser(
        prog=program, description=about, formatter_class=argparse.RawDescriptionHelpFormatter
    )


def numbers(kind: Callable[[str], Any]) -> Callable[[str], list[Any]]:
    """Return the type of an option with several values, separated by commas."""
    return lambda text: [kind(each) for each in text.split(",") if each]


def cores() -> tuple[int, ...]:
    """Return the cores that this process may use."""
    return tuple(sorted(os.sched_getaffinity(0)))


def _processor() -> str:
    for line in Path("/proc/cpuinfo").read_text().splitlines():
        if line.startswith("model name"):
            return line.partition(":")[2].strip()
    return platform.processor()
