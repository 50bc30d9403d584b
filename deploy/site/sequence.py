"""Draw sequence diagrams of Mermaid as SVG when the site is built, so that it needs no script and no internet.

A subset of the language: `participant`, messages (`->>`, `-->>`) and `Note over`. Others who render these
pages draw the same blocks by Mermaid itself. A formatter of pymdownx.superfences.
"""

from __future__ import annotations

import re
import textwrap
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from html import escape
from typing import Any

COLUMN, MARGIN, LINE = 176, 88, 16
"""Pixels between two participants, from the edge to the first one, and from a line of text to the next one."""
_CHARACTER = 6.4
"""Mean width of a character in pixels, of the size that the style sheet gives."""
_PARTICIPANT = re.compile(r"participant (\w+) as (.+)")
_MESSAGE = re.compile(r"(\w+)(-?->>)(\w+): (.+)")
_NOTE = re.compile(r"Note over (\w+)(?:,(\w+))?: (.+)")


class DiagramError(ValueError):
    """A line of a diagram is not in the subset."""


@dataclass(frozen=True)
class Event:
    """A message, or a note over one or several participants."""

    text: str
    first: int
    last: int
    kind: str
    """`->>`, `-->>` or `note`."""


@dataclass
class Diagram:
    """Participants from left to right, and events from top to bottom."""

    names: list[str] = field(default_factory=list)
    events: list[Event] = field(default_factory=list)


def fence(source: str, *_: Any, **__: Any) -> str:
    """Return the HTML of a fenced block."""
    return f'<div class="sequence">{draw(read(source))}</div>'


def read(source: str) -> Diagram:
    """Read a diagram.

    Raises:
        DiagramError: a line is not understood, or names a participant that was not declared.
    """
    first, *lines = [line.strip() for line in source.strip().splitlines()]
    if first != "sequenceDiagram":
        raise DiagramError(f"{first!r} is not drawn here; a diagram begins with `sequenceDiagram`")
    diagram, at = Diagram(), dict[str, int]()
    for line in lines:
        if found := _PARTICIPANT.fullmatch(line):
            at[found[1]] = len(diagram.names)
            diagram.names.append(found[2])
        elif line:
            diagram.events.append(_event(line, at))
    return diagram


def _event(line: str, at: dict[str, int]) -> Event:
    if found := _MESSAGE.fullmatch(line):
        first, kind, last, text = found.groups()
    elif found := _NOTE.fullmatch(line):
        first, last, text = found[1], found[2] or found[1], found[3]
        kind = "note"
    else:
        raise DiagramError(f"{line!r} is no participant, message or note")
    if unknown := {first, last} - at.keys():
        raise DiagramError(f"{line!r} names {sorted(unknown)}; participants are {sorted(at)}")
    return Event(text, at[first], at[last], kind)


def draw(diagram: Diagram) -> str:
    """Return the SVG of a diagram. Colours come from the style sheet of the site."""
    heads = [textwrap.wrap(name, 20) for name in diagram.names]
    top = 14 + LINE * max(map(len, heads))
    parts, y = list[str](), top + 12
    for event in diagram.events:
        drawn, y = _note(event, y) if event.kind == "note" else _message(event, y)
        parts += drawn
    width, height = 2 * MARGIN + COLUMN * (len(heads) - 1), y + 8
    lanes = [f'<path class="lane" d="M{_x(at)} {top}V{height}"/>' for at in range(len(heads))]
    named = [part for at, lines in enumerate(heads) for part in _head(at, lines, top)]
    said = escape("; ".join(event.text for event in diagram.events))
    return (
        f'<svg viewBox="0 0 {width} {height}" style="max-width: {width}px" role="img" aria-label="{said}">'
        + "".join([*lanes, *named, *parts])
        + "</svg>"
    )


def _x(at: int) -> int:
    return MARGIN + COLUMN * at


def _head(at: int, lines: Sequence[str], bottom: int) -> Iterator[str]:
    left = _x(at) - COLUMN // 2 + 10
    yield f'<rect x="{left}" y="2" width="{COLUMN - 20}" height="{bottom - 2}" rx="4"/>'
    yield from _lines(lines, _x(at), 18 + (bottom - 12 - LINE * len(lines)) // 2, "head")


def _message(event: Event, y: int) -> tuple[list[str], int]:
    """Return a message whose text stands above its arrow, and the place below it."""
    start, end = _x(event.first), _x(event.last)
    room = abs(end - start) - 16
    lines = textwrap.wrap(event.text, int(room / _CHARACTER))
    line_at = y + LINE * len(lines)
    towards = 1 if end > start else -1
    dashed = " dashed" if event.kind == "-->>" else ""
    tip = f"M{end} {line_at}l{-8 * towards} -4v8z"
    return [
        *_lines(lines, (start + end) // 2, y + LINE - 5, "label"),
        f'<path class="arrow{dashed}" d="M{start} {line_at}H{end - 4 * towards}"/><path class="tip" d="{tip}"/>',
    ], line_at + 12


def _note(event: Event, y: int) -> tuple[list[str], int]:
    """Return a note over its participants, and the place below it."""
    left = _x(min(event.first, event.last)) - COLUMN // 2 + 10
    width = COLUMN * (abs(event.last - event.first) + 1) - 20
    lines = textwrap.wrap(event.text, int((width - 12) / _CHARACTER))
    height = LINE * len(lines) + 8
    box = f'<rect class="note" x="{left}" y="{y}" width="{width}" height="{height}" rx="2"/>'
    return [box, *_lines(lines, left + width // 2, y + LINE, "label")], y + height + 12


def _lines(lines: Sequence[str], x: int, y: int, kind: str) -> Iterator[str]:
    for number, line in enumerate(lines):
        yield f'<text class="{kind}" x="{x}" y="{y + LINE * number}">{escape(line)}</text>'
