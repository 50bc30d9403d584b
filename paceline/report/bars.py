"""Stacked bars: seconds of parts, one bar for each step. Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from paceline.report.chart import MOST_STEPS, Draw, Key, PageChart, Table, drawn, latest
from paceline.report.facts import PARTS, RunFacts, RunStep
from paceline.report.svg import element, line, short, text, ticks, title

Bar = tuple[str, Mapping[str, float]]
"""Label, and seconds by part."""
PHASES = {"rollout": "blue", "trainer": "orange hatch", "weights": "green dots"}
PHASE_WORDS = {
    "rollout": "rollout: from the batch's acceptance to the end of its last sample",
    "trainer": "trainer: from there until its weights came, or the next batch",
    "weights": "weights: from the begin of their update until they serve",
}
PART_CLASSES = {
    "queue": "grey hatch",
    "prefill": "orange dots",
    "plain": "blue",
    "verified": "green rise",
    "moves": "red cross",
    "between": "purple bars",
}
PART_WORDS = {
    "queue": "queue: until its first engine step",
    "prefill": "prefill: the step that brought the first token",
    "plain": "plain: engine steps without a draft of it",
    "verified": "verified: engine steps that verified a draft of it",
    "moves": "moves: off any instance, after a move or the loss of one",
    "between": "between: between engine steps, and until its end was known",
}
_HEIGHT, _GAP, _AXIS = 20.0, 6.0, 34.0


def where_time_goes(facts: RunFacts) -> PageChart | None:
    """Return the chart of the phases of each step; None without a step."""
    if not facts.steps:
        return None
    shown = list(zip(facts.steps, phases(facts), strict=True))[-MOST_STEPS:]
    bars = [(f"step {step.step}", parts) for step, parts in shown]
    whole = {name: sum(parts.get(name, 0.0) for _, parts in bars) for name in PHASES}
    total = sum(whole.values()) or 1.0
    shares = ", ".join(f"{name} {seconds / total:.0%}" for name, seconds in whole.items())
    return _chart(
        "time",
        "Where the time goes",
        f"Wall seconds of each step.{latest(len(facts.steps))}",
        f"Of {total:.1f} seconds: {shares}.",
        bars,
        PHASES,
        PHASE_WORDS,
    )


def critical_path(facts: RunFacts) -> PageChart | None:
    """Return the chart of where the time of each step's last sample went; None if there is none."""
    steps = [step for step in facts.steps if step.last][-MOST_STEPS:]
    if not steps:
        return None
    bars = [(f"step {step.step}", step.last[0].parts) for step in steps]
    whole = {name: sum(parts[name] for _, parts in bars) for name in PARTS}
    total = sum(whole.values()) or 1.0
    longest = max(whole, key=whole.__getitem__)
    return _chart(
        "path",
        "Critical path",
        "Where the time of the sample that ended last in each step went, from acceptance to its end: "
        f"nothing else could have made the step shorter.{latest(len(facts.steps))}",
        f"Of {total:.1f} seconds of last samples {whole[longest] / total:.0%} is {longest}.",
        bars,
        PART_CLASSES,
        PART_WORDS,
    )


def phases(facts: RunFacts) -> list[dict[str, float]]:
    """Return the seconds of each phase of each step."""
    return [_phases(facts, step, following(facts, place)) for place, step in enumerate(facts.steps)]


def following(facts: RunFacts, place: int) -> float:
    """Return when a step is over: when the next one begins or new weights serve, or else with its last sample."""
    step = facts.steps[place]
    if place + 1 < len(facts.steps):
        return max(step.ended, facts.steps[place + 1].begun)
    return max([step.ended, *(each.published for each in facts.published if each.started >= step.ended)])


def _phases(facts: RunFacts, step: RunStep, end: float) -> dict[str, float]:
    after = max(0.0, end - step.ended)
    weights = sum(
        max(0.0, min(end, each.published) - max(step.ended, each.started)) for each in facts.published
    )
    weights = min(after, weights)
    return {"rollout": step.seconds, "trainer": after - weights, "weights": weights}


def _chart(
    name: str,
    heading: str,
    note: str,
    summary: str,
    bars: Sequence[Bar],
    classes: Mapping[str, str],
    words: Mapping[str, str],
) -> PageChart:
    rows = [
        [label, *(f"{parts.get(part, 0.0):.3f}" for part in classes), f"{sum(parts.values()):.3f}"]
        for label, parts in bars
    ]
    return PageChart(
        name,
        heading,
        note,
        summary,
        drawn(_draw(bars, classes)),
        [Key(cls, words[part]) for part, cls in classes.items()],
        Table(["step", *(f"{part} s" for part in classes), "all s"], rows),
    )


def _draw(bars: Sequence[Bar], classes: Mapping[str, str]) -> Draw:
    longest = max([1e-9, *(sum(parts.values()) for _, parts in bars)])

    def draw(width: float) -> tuple[str, float]:
        left, right = 64.0, 48.0
        inner, height = width - left - right, len(bars) * (_HEIGHT + _GAP)
        marks = [_grid(left, inner, height, longest, 5 if width < 500 else 8)]
        for place, (label, parts) in enumerate(bars):
            top, x = place * (_HEIGHT + _GAP) + _GAP / 2, left
            marks.append(text(left - 8, top + 14, label, text_anchor="end", cls="label"))
            for part, cls in classes.items():
                seconds = parts.get(part, 0.0)
                size = seconds / longest * inner
                if size > 0:
                    marks.append(block(x, top, size, _HEIGHT, cls, f"{label}, {part}: {seconds:.3f} s"))
                    x += size
            marks.append(text(x + 5, top + 14, f"{short(sum(parts.values()))} s", cls="value"))
        return "".join(marks), height + _AXIS

    return draw


def block(x: float, y: float, width: float, height: float, cls: str, words: str) -> str:
    """Return an area of a class such as "green rise": a colour, and the pattern over it if it has one."""
    colour, _, pattern = cls.partition(" ")
    area: dict[str, float | str] = {"x": x, "y": y, "width": max(0.5, width), "height": height}
    marks = [title(words), element("rect", cls=f"f-{colour} edge", **area)]
    if pattern:
        marks.append(element("rect", fill=f"url(#p-{pattern})", **area))
    return element("g", *marks)


def _grid(left: float, inner: float, height: float, longest: float, most: int) -> str:
    marks = []
    for value in ticks(0.0, longest, most):
        x = left + value / longest * inner
        marks.append(line(x, 0, x, height, cls="grid"))
        marks.append(text(x, height + 15, short(value), text_anchor="middle", cls="tick"))
    marks.append(text(left + inner / 2, height + 31, "seconds", text_anchor="middle", cls="tick"))
    return "".join(marks)
