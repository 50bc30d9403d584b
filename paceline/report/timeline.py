"""Timeline of a step: the samples of each instance, its bubbles and what filled them, and moves as arrows. Pure."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace

from paceline.report.chart import (
    Draw,
    Key,
    PageChart,
    Table,
    drawn,
    element,
    line,
    path,
    short,
    text,
    ticks,
    title,
)
from paceline.report.facts import Filled, InstanceRow, MoveFact, RunFacts, RunStep
from paceline.report.plots import following

Interval = tuple[float, float]
Across = Callable[[float], float]
"""Function from a time to its horizontal place."""

MOST_TIMELINES = 4
"""Most steps with a timeline: the latest ones."""
MOST_ARROWS = 64
"""Most moves that are drawn in one timeline."""
# Shorter bubbles are not drawn; seconds.
_SHORTEST = 1e-3
_KEYS = (
    Key("blue", "samples of the step: the higher, the more (by the square root)"),
    Key("green dots", "pre-generation for a coming step: a bubble filled"),
    Key("red hatch", "bubble: nothing to do before the step ends"),
)
_LANE, _GAP, _AXIS, _LEFT = 26.0, 8.0, 34.0, 150.0
_MOST_LETTERS = 20


@dataclass(frozen=True, slots=True)
class Lane:
    """Row of one instance: samples by time bin `until` its last one ended, and its filled and idle intervals."""

    label: str
    counts: Sequence[int]
    until: float
    filled: Sequence[Interval]
    idle: Sequence[Interval]


def timelines(facts: RunFacts) -> list[PageChart]:
    """Return the timelines of the latest steps, the last step first."""
    places = range(len(facts.steps) - 1, max(-1, len(facts.steps) - 1 - MOST_TIMELINES), -1)
    return [_timeline(facts, place) for place in places]


def filled_share(facts: RunFacts) -> float | None:
    """Return the share of the bubbles in which the shown instances pre-generated; None without a bubble."""
    whole = filled = 0.0
    for step in facts.steps:
        for row in step.rows:
            begin, own = _bubble(step, row)[0], _of(facts.filled, row.instance_id)
            whole += step.ended - begin
            filled += sum(right - left for left, right in _clipped(own, begin, step.ended))
    return filled / whole if whole > _SHORTEST else None


def _timeline(facts: RunFacts, place: int) -> PageChart:
    step = facts.steps[place]
    end = min(following(facts, place), step.ended + max(step.seconds, 1e-3))
    lanes = [_lane(facts, step, row, end) for row in step.rows]
    if step.instances > len(step.rows):
        lanes.insert(0, Lane(f"all {step.instances:,}", step.all, step.seconds, (), ()))
    moves = [move for move in facts.moves if step.begun <= move.time <= end]
    names = {lane.label: number for number, lane in enumerate(lanes)}
    arrows = [move for move in moves if {move.donor, move.receiver} <= names.keys()][:MOST_ARROWS]
    return PageChart(
        f"timeline-{step.step}-{place}",
        f"Instances in {step.name}",
        _note(step, moves, arrows),
        _summary(facts, step, moves),
        drawn(
            draw_lanes(
                lanes,
                [replace(move, time=move.time - step.begun) for move in arrows],
                step.bin,
                step.seconds,
                end - step.begun,
            )
        ),
        [*_KEYS, *([Key("arrow", "samples moved from one instance to another")] if arrows else [])],
        _table(facts, step, moves),
        heading=True,
    )


def _note(step: RunStep, moves: Sequence[MoveFact], arrows: Sequence[MoveFact]) -> str:
    words = "Time from the step's begin; the line is the end of its last sample."
    if step.instances > len(step.rows):
        busy = len(step.rows) // 2
        words += (
            f" Of {step.instances:,} instances the {busy} that were busy for longest and the "
            f"{len(step.rows) - busy} that idled most have a row of their own; the first row is all of them."
        )
    if len(arrows) < len(moves):
        drawn = f"{len(arrows)} of {len(moves)} moves"
        words += f" {drawn} are drawn: moves between instances with a row, at most {MOST_ARROWS}."
    return words


def _summary(facts: RunFacts, step: RunStep, moves: Sequence[MoveFact]) -> str:
    share = step.bubble_seconds / (step.seconds * step.instances) if step.seconds and step.instances else 0.0
    moved = sum(move.samples for move in moves)
    return (
        f"Step {step.step} took {step.seconds:.2f} seconds on {step.instances:,} instances; {share:.0%} of their "
        f"time was bubbles; {moved} samples were moved."
    )


def _lane(facts: RunFacts, step: RunStep, row: InstanceRow, end: float) -> Lane:
    own = _of(facts.filled, row.instance_id)
    filled = _clipped(own, step.begun, end)
    begin, until = _bubble(step, row)
    idle = _gaps(filled, begin, until)
    last = step.begun if row.end is None else row.end
    return Lane(row.instance_id, row.counts, last - step.begun, _since(filled, step), _since(idle, step))


def _since(intervals: Iterable[Interval], step: RunStep) -> list[Interval]:
    return [(left - step.begun, right - step.begun) for left, right in intervals]


def _bubble(step: RunStep, row: InstanceRow) -> Interval:
    return (step.begun if row.end is None else min(row.end, step.ended)), step.ended


def _of(filled: Iterable[Filled], instance_id: str) -> list[Interval]:
    """Return the merged intervals of an instance."""
    found: list[Interval] = []
    for begin, end in sorted((each.begin, each.end) for each in filled if each.instance_id == instance_id):
        if found and begin <= found[-1][1]:
            found[-1] = (found[-1][0], max(end, found[-1][1]))
        else:
            found.append((begin, end))
    return found


def _clipped(intervals: Iterable[Interval], begin: float, end: float) -> list[Interval]:
    cut = ((max(left, begin), min(right, end)) for left, right in intervals)
    return [(left, right) for left, right in cut if right > left]


def _gaps(intervals: Iterable[Interval], begin: float, end: float) -> list[Interval]:
    """Return the gaps that ordered intervals leave between begin and end."""
    found, reached = [], begin
    for left, right in intervals:
        if left - reached > _SHORTEST and reached < end:
            found.append((reached, min(left, end)))
        reached = max(reached, right)
    if end - reached > _SHORTEST:
        found.append((reached, end))
    return found


def _table(facts: RunFacts, step: RunStep, moves: Sequence[MoveFact]) -> Table:
    rows = []
    for row in step.rows:
        begin, end = _bubble(step, row)
        filled = sum(right - left for left, right in _clipped(_of(facts.filled, row.instance_id), begin, end))
        given = sum(move.samples for move in moves if move.donor == row.instance_id)
        got = sum(move.samples for move in moves if move.receiver == row.instance_id)
        last = "none" if row.end is None else f"{row.end - step.begun:.3f}"
        cells = f"{row.samples:,}", f"{row.tokens:,}", last, f"{row.bubble:.3f}", f"{filled:.3f}"
        rows.append([row.instance_id, *cells, str(given), str(got)])
    figures = "samples", "tokens", "last sample's end s", "bubble s", "of it filled s"
    return Table(["instance", *figures, "moved away", "moved here"], rows)


def draw_lanes(
    lanes: Sequence[Lane], arrows: Sequence[MoveFact], width_of_bin: float, mark: float, whole: float
) -> Draw:
    """Return the drawing of `whole` seconds, with a vertical line at `mark`.

    Times of `lanes` and `arrows` are seconds from the begin of the step.
    """
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
            marks += _draw_lane(lane, top, across, width_of_bin)
        marks.append(line(across(mark), 0, across(mark), height, cls="end"))
        marks += [_draw_arrow(arrow, across(arrow.time), tops) for arrow in arrows]
        return "".join(marks), height + _AXIS

    return draw


def _draw_lane(lane: Lane, top: float, across: Across, width_of_bin: float) -> list[str]:
    marks = [line(across(0.0), top + _LANE, across(1e12), top + _LANE, cls="grid")]
    for cls, words, intervals in (
        ("green dots", "pre-generates", lane.filled),
        ("red hatch", "bubble", lane.idle),
    ):
        colour, _, pattern = cls.partition(" ")
        for begin, end in intervals:
            box = {"x": across(begin), "y": top + 5, "width": max(0.7, across(end) - across(begin))}
            label = title(f"{lane.label}: {words}, {begin:.3f} to {end:.3f} s")
            areas = [
                element("rect", cls=f"f-{colour}", height=_LANE - 5, **box),
                element("rect", fill=f"url(#p-{pattern})", height=_LANE - 5, **box),
            ]
            marks.append(element("g", label, *areas))
    if any(lane.counts):
        peak = max(lane.counts) ** 0.5
        points = [(across(0.0), top + _LANE)]
        for place, count in enumerate(lane.counts):
            y = top + _LANE - count**0.5 / peak * (_LANE - 2)
            begin, end = (min(lane.until, each * width_of_bin) for each in (place, place + 1))
            points += [(across(begin), y), (across(end), y)]
        points.append((points[-1][0], top + _LANE))
        label = title(f"{lane.label}: at most {max(lane.counts)} samples at a time")
        marks.append(element("g", label, path(points, cls="f-blue edge")))
    return marks


def _draw_arrow(arrow: MoveFact, x: float, tops: dict[str, float]) -> str:
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
