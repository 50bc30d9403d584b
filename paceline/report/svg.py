"""Elements of SVG as text, and round numbers for axes. Pure."""

from __future__ import annotations

import math
from collections.abc import Iterable
from html import escape


def element(name: str, *children: str, **attributes: float | str) -> str:
    """Return an element. Underscores of attribute names become hyphens, numbers have at most two decimals.

    Children are markup. `cls` is the attribute class.
    """
    told = "".join(f' {_name(key)}="{_value(value)}"' for key, value in attributes.items())
    inside = "".join(children)
    return f"<{name}{told}>{inside}</{name}>" if inside else f"<{name}{told}/>"


def text(x: float, y: float, words: str, **attributes: float | str) -> str:
    """Return a text with its baseline at y."""
    return element("text", escape(words), x=x, y=y, **attributes)


def title(words: str) -> str:
    """Return what a browser shows where the pointer rests on the parent."""
    return f"<title>{escape(words)}</title>"


def line(x1: float, y1: float, x2: float, y2: float, **attributes: float | str) -> str:
    """Return a straight line."""
    return element("line", x1=x1, y1=y1, x2=x2, y2=y2, **attributes)


def path(points: Iterable[tuple[float, float]], **attributes: float | str) -> str:
    """Return a line through points."""
    steps = " ".join(f"{'L' if place else 'M'}{_value(x)} {_value(y)}" for place, (x, y) in enumerate(points))
    return element("path", d=steps, **attributes)


def ticks(low: float, high: float, most: int) -> list[float]:
    """Return at most `most` + 1 round numbers from low to high; just `low` where there is nothing between."""
    if not high > low:
        return [low]
    raw = (high - low) / max(1, most)
    unit = 10.0 ** math.floor(math.log10(raw))
    step = next(unit * factor for factor in (1, 2, 5, 10) if unit * factor >= raw * (1 - 1e-9))
    first = math.ceil(low / step - 1e-9)
    return [place * step for place in range(first, math.floor(high / step + 1e-9) + 1)]


def short(value: float) -> str:
    """Return a number of at most four digits or so."""
    if value and abs(value) < 0.001:
        return f"{value:.0e}"
    return f"{value:,.0f}" if abs(value) >= 100 else f"{value:.3g}"


def _name(key: str) -> str:
    return "class" if key == "cls" else key.replace("_", "-")


def _value(value: float | str) -> str:
    if isinstance(value, str):
        return escape(value)
    return f"{value:.2f}".rstrip("0").rstrip(".")
