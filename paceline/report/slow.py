"""Sentences on slow steps: which one was slowest and why, and what changed when step times did. Pure."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from statistics import fmean, median

from paceline.report.chart import short
from paceline.report.facts import RunFacts, RunStep
from paceline.report.plots import phases
from paceline.times import STEP_PARTS
from paceline.types import Decision

WINDOW = 5
"""Steps before and after a change that are compared, at most."""
FEWEST = 3
"""Steps on either side that make a change: fewer are an outlier."""
LEAST_CHANGE = 1.3
"""Ratio of the step times after and before a change, or its inverse."""
MOST_CHANGES = 3
"""Most changes on the page: the largest."""
MOST_DECISIONS = 3
"""Most decisions that are named with a change: the latest."""
EXPLAINING = ("knobs", "draft_cap", "scaling", "drafter_published", "drafter_rolled_back")
"""Kinds of decisions that may change step times for longer than a step."""
# Samples, response lengths and acceptance are named if they changed by this ratio.
_NOTABLE = 1.2
_WORDS = {
    "earlier": "time before the batch of its last sample",
    "queue": "waiting for an instance",
    "prefill": "prefill",
    "plain": "engine steps without a draft",
    "verified": "engine steps that verified drafts",
    "moves": "moves between instances",
    "between": "time between engine steps",
    "trainer": "the trainer",
    "weights": "the update of weights",
}


def on_slow_steps(facts: RunFacts) -> list[str]:
    """Return a sentence on the slowest step, and one on each lasting change of the step time, in order."""
    # Seconds of each step by part: its last sample's time, and trainer and weights until the next step.
    parts = [_parts(step, parts) for step, parts in zip(facts.steps, phases(facts), strict=True)]
    if not parts:
        return []
    times = [sum(each.values()) for each in parts]
    return [
        _slowest(facts, parts, times),
        *(_change(facts, parts, times, place) for place in _changes(times)),
    ]


def _parts(step: RunStep, phase: Mapping[str, float]) -> dict[str, float]:
    path = dict(step.last[0].parts) if step.last else dict.fromkeys(STEP_PARTS, 0.0)
    earlier = max(0.0, phase["rollout"] - sum(path.values()))
    return {"earlier": earlier, **path, "trainer": phase["trainer"], "weights": phase["weights"]}


def _slowest(facts: RunFacts, parts: Sequence[Mapping[str, float]], times: Sequence[float]) -> str:
    place = max(range(len(times)), key=times.__getitem__)
    step, mine, others = facts.steps[place], parts[place], [*parts[:place], *parts[place + 1 :]]
    words = f"The slowest is {step.name}: {short(times[place])} s"
    if not others:
        part = max(mine, key=mine.__getitem__)
        return f"{words}, of which {_WORDS[part]} took {short(mine[part])} s."
    rest = median([*times[:place], *times[place + 1 :]])
    words += f"; the median of the others is {short(rest)} s."
    if not _changed(rest, times[place]):
        return f"No step was much slower than the others. {words}"
    usual = {part: median(each[part] for each in others) for part in mine}
    part = max(mine, key=lambda each: mine[each] - usual[each])
    words += f" The difference is mostly {_WORDS[part]}: {_instead(usual[part], mine[part])}."
    length = median(_length(each) for each in facts.steps)
    if _changed(length, _length(step)) and part in ("plain", "verified"):
        words += f" Its samples had {short(_length(step))} tokens on average; usual are {short(length)}."
    return words


def _changes(times: Sequence[float]) -> list[int]:
    """Return the places of the largest lasting changes, in order."""
    logs = [math.log(max(time, 1e-9)) for time in times]
    places = [place for place in range(FEWEST, len(times) - FEWEST + 1) if _is_change(times, place)]

    def size(place: int) -> float:
        # Means of logarithms differ most where the change was; medians do not say where.
        before, after = _around(logs, place)
        return abs(fmean(after) - fmean(before))

    chosen: list[int] = []
    for place in sorted(places, key=size, reverse=True):
        if len(chosen) < MOST_CHANGES and all(abs(place - other) > WINDOW for other in chosen):
            chosen.append(place)
    return sorted(chosen)


def _around(values: Sequence[float], place: int) -> tuple[Sequence[float], Sequence[float]]:
    return values[max(0, place - WINDOW) : place], values[place : place + WINDOW]


def _is_change(times: Sequence[float], place: int) -> bool:
    before, after = (median(each) for each in _around(times, place))
    return _changed(before, after, LEAST_CHANGE)


def _change(facts: RunFacts, parts: Sequence[Mapping[str, float]], times: Sequence[float], place: int) -> str:
    before, after = (median(each) for each in _around(times, place))
    left, right = parts[max(0, place - WINDOW) : place], parts[place : place + WINDOW]
    sides = {part: (median(p[part] for p in left), median(p[part] for p in right)) for part in parts[place]}
    sign = 1 if after > before else -1
    part = max(sides, key=lambda each: sign * (sides[each][1] - sides[each][0]))
    step = facts.steps[place]
    words = (
        f"From {step.name} on, steps took {_instead(before, after)}. The difference is mostly {_WORDS[part]}: "
        f"{_instead(*sides[part])}."
    )
    found = list(_causes(facts, place))
    return (
        f"{words} At that time: {'; '.join(found)}."
        if found
        else f"{words} Nothing else in the log changed then."
    )


def _causes(facts: RunFacts, place: int) -> Iterator[str]:
    """Yield what else changed between the steps before a place and those from it on."""
    old, new = facts.steps[place - 1], facts.steps[place]
    before, after = facts.steps[max(0, place - WINDOW) : place], facts.steps[place : place + WINDOW]
    if new.attempt != old.attempt:
        yield "the trainer was started again"
    if old.instances != new.instances:
        yield f"instances {old.instances:,} → {new.instances:,}"
    whole = all(len(step.rows) == step.instances for step in (old, new))
    gone, come = (_names(old) - _names(new), _names(new) - _names(old)) if whole else (set(), set())
    if gone or come:
        yield ", ".join(
            [*(f"without {name}" for name in sorted(gone)), *(f"with {name}" for name in sorted(come))]
        )
    moved = [one.version != other.version for one, other in zip(facts.steps, facts.steps[1:], strict=False)]
    if old.version != new.version and 2 * sum(moved) < len(moved):
        # A version that changes with nearly every step explains nothing.
        yield f"policy version {old.version} → {new.version}"
    drafters = (
        {name for step in before for name in step.drafts},
        {name for step in after for name in step.drafts},
    )
    if drafters[0] != drafters[1]:
        yield f"drafters {', '.join(sorted(drafters[0])) or 'none'} → {', '.join(sorted(drafters[1])) or 'none'}"
    if (old.pregenerated is None) != (new.pregenerated is None):
        yield "steps were no longer announced" if new.pregenerated is None else "steps were announced"
    figures = {
        "samples": [[float(step.samples) for step in side] for side in (before, after)],
        "tokens a sample": [[_length(step) for step in side] for side in (before, after)],
        "tokens a verification": [[*filter(None, map(_efficiency, side))] for side in (before, after)],
    }
    for name, sides in figures.items():
        if all(sides) and _changed(*map(median, sides)):
            yield f"{name} {short(median(sides[0]))} → {short(median(sides[1]))}"
    yield from _decided(facts.decisions, old.begun, new.ended)


def _decided(decisions: Sequence[Decision], begin: float, end: float) -> Iterator[str]:
    found = [each for each in decisions if each.kind in EXPLAINING and begin < each.time <= end]
    for each in found[-MOST_DECISIONS:]:
        yield f"{each.kind.replace('_', ' ')}: {each.reason}"


def _instead(before: float, after: float) -> str:
    return f"{short(after)} s instead of {short(before)} s"


def _names(step: RunStep) -> set[str]:
    return {row.instance_id for row in step.rows}


def _length(step: RunStep) -> float:
    """Return the mean tokens of a step's samples."""
    return step.tokens / step.samples if step.samples else 0.0


def _efficiency(step: RunStep) -> float | None:
    """Return the tokens per verified draft; None without one."""
    verified = sum(count for count, _ in step.drafts.values())
    return 1 + sum(accepted for _, accepted in step.drafts.values()) / verified if verified else None


def _changed(before: float, after: float, ratio: float = _NOTABLE) -> bool:
    low, high = sorted((before, after))
    return high > ratio * low and high > 0
