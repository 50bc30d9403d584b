"""Charts of the page: SVG elements, colours, and the parts of a chart (drawings, legend, table). Pure."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from html import escape

WIDE, NARROW = 840.0, 340.0
"""Widths of drawings, in CSS pixels: on a desktop, and on a telephone."""
MOST_STEPS = 60
"""Most steps in a chart with one mark per step: the latest ones."""

Draw = Callable[[float], tuple[str, float]]
"""Function from a width to the markup of a drawing of that width, and its height."""


def element(name: str, *children: str, **attributes: float | str) -> str:
    """Return an SVG element; `children` are markup.

    Underscores of attribute names become hyphens, and `cls` becomes `class`. Numbers have at most two decimals.
    """
    written = "".join(f' {_name(key)}="{_value(value)}"' for key, value in attributes.items())
    inside = "".join(children)
    return f"<{name}{written}>{inside}</{name}>" if inside else f"<{name}{written}/>"


def text(x: float, y: float, words: str, **attributes: float | str) -> str:
    """Return a text with its baseline at y."""
    return element("text", escape(words), x=x, y=y, **attributes)


def title(words: str) -> str:
    """Return a title element: a browser shows its words while the pointer rests on the parent."""
    return f"<title>{escape(words)}</title>"


def line(x1: float, y1: float, x2: float, y2: float, **attributes: float | str) -> str:
    """Return a straight line."""
    return element("line", x1=x1, y1=y1, x2=x2, y2=y2, **attributes)


def path(points: Iterable[tuple[float, float]], **attributes: float | str) -> str:
    """Return a line through points."""
    steps = " ".join(f"{'L' if place else 'M'}{_value(x)} {_value(y)}" for place, (x, y) in enumerate(points))
    return element("path", d=steps, **attributes)


def ticks(low: float, high: float, most: int) -> list[float]:
    """Return at most `most` + 1 round numbers from low to high; only `low` if the range is empty."""
    if not high > low:
        return [low]
    raw = (high - low) / max(1, most)
    unit = 10.0 ** math.floor(math.log10(raw))
    step = next(unit * factor for factor in (1, 2, 5, 10) if unit * factor >= raw * (1 - 1e-9))
    first = math.ceil(low / step - 1e-9)
    return [place * step for place in range(first, math.floor(high / step + 1e-9) + 1)]


def short(value: float) -> str:
    """Return a number with about three significant digits."""
    if value and abs(value) < 0.001:
        return f"{value:.0e}"
    return f"{value:,.0f}" if abs(value) >= 100 else f"{value:.3g}"


def _name(key: str) -> str:
    return "class" if key == "cls" else key.replace("_", "-")


def _value(value: float | str) -> str:
    if isinstance(value, str):
        return escape(value)
    return f"{value:.2f}".rstrip("0").rstrip(".")


SERIES = ("blue", "orange", "green", "red", "purple", "grey")
"""Names of the colours for series."""
LIGHT = {
    "page": "#f5f6f8",
    "card": "#ffffff",
    "ink": "#16191f",
    "muted": "#545d6a",
    "line": "#d5dae1",
    "link": "#0b57a4",
    "blue": "#0b62a8",
    "orange": "#b87100",
    "green": "#009e73",
    "red": "#c8321e",
    "purple": "#9c4f8f",
    "grey": "#6d7683",
}
"""Colours by name, as #rrggbb, for readers who prefer a light theme."""
DARK = {
    "page": "#111418",
    "card": "#1a1f26",
    "ink": "#e9ecf1",
    "muted": "#a5afbd",
    "line": "#3a434f",
    "link": "#8ec5ff",
    "blue": "#4f95f2",
    "orange": "#f0ac2e",
    "green": "#3fd0a0",
    "red": "#ff7a5c",
    "purple": "#dc9ad0",
    "grey": "#99a4b3",
}
"""The same colours for readers who prefer a dark theme."""


def css(colours: dict[str, str]) -> str:
    """Return the declarations of CSS variables."""
    return " ".join(f"--{name}: {value};" for name, value in colours.items())


@dataclass(frozen=True, slots=True)
class Drawing:
    """Markup of a drawing, and its size in CSS pixels."""

    markup: str
    width: float
    height: float


@dataclass(frozen=True, slots=True)
class Table:
    """Table of text. The first column names its rows."""

    headers: Sequence[str]
    rows: Sequence[Sequence[str]]


@dataclass(frozen=True, slots=True)
class Key:
    """Entry of a legend: the meaning of a class of marks."""

    cls: str
    words: str


@dataclass(frozen=True, slots=True)
class PageChart:
    """A chart. `summary` says in words what it shows, `note` how to read it."""

    name: str
    title: str
    note: str
    summary: str
    drawings: tuple[tuple[str, Drawing], ...]
    keys: Sequence[Key]
    table: Table
    heading: bool = False
    """True to show `title` as a heading, in a section of several charts."""


def drawn(draw: Draw) -> tuple[tuple[str, Drawing], ...]:
    """Return the drawing at both widths, each with the CSS class that shows it where it fits."""
    return tuple(
        (cls, Drawing(markup, width, height))
        for cls, width in (("wide", WIDE), ("narrow", NARROW))
        for markup, height in [draw(width)]
    )


def latest(count: int, most: int = MOST_STEPS) -> str:
    """Return a note on the number of steps that are shown, if not all are."""
    return f" The latest {most} of {count:,} steps are shown." if count > most else ""
