"""A chart of the page: its drawing at two widths, its words, and the table that says the same. Pure."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

WIDE, NARROW = 840.0, 340.0
"""Widths of drawings, in CSS pixels: on a desktop, and on a telephone."""
MOST_STEPS = 60
"""Most steps in a chart with one mark for each: the latest."""

Draw = Callable[[float], tuple[str, float]]
"""Returns markup of a drawing of this width, and its height."""


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
    """Entry of a legend: what this class of marks means."""

    cls: str
    words: str


@dataclass(frozen=True, slots=True)
class PageChart:
    """A chart. `summary` says in words what it shows; `note` how it is to be read."""

    name: str
    title: str
    note: str
    summary: str
    drawings: tuple[tuple[str, Drawing], ...]
    keys: Sequence[Key]
    table: Table
    heading: bool = False
    """Its section has several charts, so it has a heading of its own."""


def drawn(draw: Draw) -> tuple[tuple[str, Drawing], ...]:
    """Return the drawing at both widths, each with the class that shows it where it fits."""
    return tuple(
        (cls, Drawing(markup, width, height))
        for cls, width in (("wide", WIDE), ("narrow", NARROW))
        for markup, height in [draw(width)]
    )


def latest(count: int, most: int = MOST_STEPS) -> str:
    """Return words that say how much of it is shown, where it is not all."""
    return f" The latest {most} of {count:,} steps are shown." if count > most else ""
