"""Drawing of lanes over time: a curve, areas and arrows between lanes. Pure. Times are seconds from its begin."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from paceline.report.chart import Draw
from paceline.report.svg import element, line, path, short, text, ticks, title

Interval = tuple[float, float]
Across = Callable[[float], float]
"""Returns the place of a time across."""
_LANE, _GAP, _AXIS, _LEFT = 26.0, 8.0, 34.0, 150.0
_MOST_LETTERS = 20


@dataclass(frozen=True, slots=True)
class Lane:
    """One row: how many samples there were in each bin of time `until` the last ended, and what filled the rest."""

    label: str
    counts: Sequence[int]
    until: float
    filled: Sequence[Interval]
    idle: Sequence[Interval]


@dataclass(frozen=True, slots=True)
class Arrow:
    """Samples that went from one lane to another, named by their labels."""

    time: float
    donor: str
    receiver: str
    samples: int


def draw_lanes(
    lanes: Sequence[Lane], arrows: Sequence[Arrow], width_of_bin: float, mark: float, whole: float
) -> Draw:
    """Return the drawing of `whole` seconds, with a vertical line at `mark`."""
    seconds = max(whole, 1e-6)

    def draw(width: float) -> tuple[str, float]:
        narrow = width < 500
        left, above = (6.0, 17.0) if narrow else (_LEFT, 0.0)
        inner, row = width - left - 12, _LANE + _GAP + above
        height = len(lanes) * row

        def across(time: float) -> float:
            return left + min(1.0, max(0.0, time / seconds)) * inner

        marks, tops = [_axis(across, height, seconds, 4 if narrow else 8)], {}
        for number, lane in enumerate(lanes):
            top = tops[lane.label] = number * row + above
            name = lane.label if len(lane.label) <= _MOST_LETTERS else f"…{lane.label[1 - _MOST_LETTERS :]}"
            x, y, anchor = (left, top - 4, "start") if narrow else (left - 8, top + 18, "end")
            marks.append(text(x, y, name, text_anchor=anchor, cls="label halo"))
            marks += _lane(lane, top, across, width_of_bin)
        marks.append(line(across(mark), 0, across(mark), height, cls="end"))
        marks += [_arrow(arrow, across(arrow.time), tops) for arrow in arrows]
        return "".join(marks), height + _AXIS

    return draw


def _lane(lane: Lane, top: float, across: Across, width_of_bin: float) -> list[str]:
    marks = [line(across(0.0), top + _LANE, across(1e12), top + _LANE, cls="grid")]
    for cls, words, intervals in (
        ("green dots", "pre-generates", lane.filled),
        ("red hatch", "bubble", lane.idle),
    ):
        colour, _, pattern = cls.partition(" ")
        for begin, end in intervals:
            box = {"x": across(begin), "y": top + 5, "width": max(0.7, across(end) - across(begin))}
            told = title(f"{lane.label}: {words}, {begin:.3f} to {end:.3f} s")
            areas = [
                element("rect", cls=f"f-{colour}", height=_LANE - 5, **box),
                element("rect", fill=f"url(#p-{pattern})", height=_LANE - 5, **box),
            ]
            marks.append(element("g", told, *areas))
    if any(lane.counts):
        peak = max(lane.counts) ** 0.5
        points = [(across(0.0), top + _LANE)]
        for place, count in enumerate(lane.counts):
            y = top + _LANE - count**0.5 / peak * (_LANE - 2)
            begin, end = (min(lane.until, each * width_of_bin) for each in (place, place + 1))
            points += [(across(begin), y), (across(end), y)]
        points.append((points[-1][0], top + _LANE))
        told = title(f"{lane.label}: at most {max(lane.counts)} samples at a time")
        marks.append(element("g", told, path(points, cls="f-blue edge")))
    return marks


def _arrow(arrow: Arrow, x: float, tops: dict[str, float]) -> str:
    donor, receiver = (tops[name] + _LANE / 2 for name in (arrow.donor, arrow.receiver))
    words = f"{arrow.samples} samples from {arrow.donor} to {arrow.receiver} at {arrow.time:.2f} s"
    shaft = path([(x, donor), (x, receiver)], cls="arrow", marker_end="url(#p-head)")
    count = text(x + 5, (donor + receiver) / 2 + 4, str(arrow.samples), cls="value halo")
    start = element("circle", cx=x, cy=donor, r=3, cls="arrow-start")
    return element("g", title(words), shaft, start, count)


def _axis(across: Across, height: float, seconds: float, most: int) -> str:
    marks = []
    for value in ticks(0.0, seconds, most):
        marks.append(line(across(value), 0, across(value), height, cls="grid"))
        marks.append(text(across(value), height + 15, short(value), text_anchor="middle", cls="tick"))
    middle = across(seconds / 2)
    marks.append(text(middle, height + 31, "seconds from the step's begin", text_anchor="middle", cls="tick"))
    return "".join(marks)
