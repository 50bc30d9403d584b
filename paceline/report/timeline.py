"""Timeline of a step: samples of each instance, bubbles and what fills them, moves as arrows. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from paceline.report.bars import following
from paceline.report.chart import Key, PageChart, Table, drawn
from paceline.report.facts import Filled, InstanceRow, MoveFact, RunFacts, RunStep
from paceline.report.lanes import Arrow, Interval, Lane, draw_lanes

MOST_TIMELINES = 4
"""Most steps with a timeline: the latest."""
MOST_ARROWS = 64
"""Most moves that are drawn in one timeline."""
# Shorter bubbles are not drawn; seconds.
_SHORTEST = 1e-3
_KEYS = (
    Key("blue", "samples of the step: the higher, the more (by the square root)"),
    Key("green dots", "pre-generation for a coming step: a bubble filled"),
    Key("red hatch", "bubble: nothing to do before the step ends"),
)


def timelines(facts: RunFacts) -> list[PageChart]:
    """Return the timelines of the latest steps, the latest first."""
    places = range(len(facts.steps) - 1, max(-1, len(facts.steps) - 1 - MOST_TIMELINES), -1)
    return [_timeline(facts, place) for place in places]


def filled_share(facts: RunFacts) -> float | None:
    """Return the share of the shown instances' bubbles in which they pre-generated; None without a bubble."""
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
                lanes, [_arrow(move, step) for move in arrows], step.bin, step.seconds, end - step.begun
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
        words += f" {drawn} are drawn: those between instances with a row, at most {MOST_ARROWS}."
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


def _arrow(move: MoveFact, step: RunStep) -> Arrow:
    return Arrow(move.time - step.begun, move.donor, move.receiver, move.samples)


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
    """Return what intervals in order leave of the time from begin to end."""
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
        told = f"{row.samples:,}", f"{row.tokens:,}", last, f"{row.bubble:.3f}", f"{filled:.3f}"
        rows.append([row.instance_id, *told, str(given), str(got)])
    figures = "samples", "tokens", "last sample's end s", "bubble s", "of it filled s"
    return Table(["instance", *figures, "moved away", "moved here"], rows)
