"""Stacked bars: seconds of parts, one bar for each step. Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from paceline.report.chart import MOST_STEPS, Draw, Key, PageChart, Table, drawn, latest
from paceline.report.facts import PARTS, RunFacts, RunStep
from paceline.report.svg import element, line, short, text, ticks, title

Bar = tuple[RunStep, Mapping[str, float]]
"""Step, and seconds by part."""
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
_LEFT, _RIGHT = 64.0, 62.0
_LETTER = 6.5
# A bar is cut where it is so many times as long as nine of ten others.
_MOST = 3.0


def where_time_goes(facts: RunFacts) -> PageChart | None:
    """Return the chart of the phases of each step; None without a step."""
    if not facts.steps:
        return None
    shown = list(zip(facts.steps, phases(facts), strict=True))[-MOST_STEPS:]
    whole = {name: sum(parts.get(name, 0.0) for _, parts in shown) for name in PHASES}
    total = sum(whole.values()) or 1.0
    shares = ", ".join(f"{name} {seconds / total:.0%}" for name, seconds in whole.items())
    return _chart(
        "time",
        "Where the time goes",
        f"Wall seconds of each step.{latest(len(facts.steps))}",
        f"Of {total:.1f} seconds: {shares}.",
        shown,
        PHASES,
        PHASE_WORDS,
    )


def critical_path(facts: RunFacts) -> PageChart | None:
    """Return the chart of where the time of each step's last sample went; None if there is none."""
    steps = [step for step in facts.steps if step.last][-MOST_STEPS:]
    if not steps:
        return None
    bars = [(step, step.last[0].parts) for step in steps]
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
    """Return when a step is over: when the next one begins, or else new weights serve, or with its last sample.

    Between the last step of a trainer and the first one of the trainer that was started again nobody trains.
    """
    step = facts.steps[place]
    until = float("inf")
    if place + 1 < len(facts.steps):
        coming = facts.steps[place + 1]
        until = max(step.ended, coming.begun)
        if coming.attempt == step.attempt:
            return until
    ends = (each.published for each in facts.published if each.started >= step.ended)
    return max([step.ended, *(end for end in ends if end <= until)])


def _phases(facts: RunFacts, step: RunStep, end: float) -> dict[str, float]:
    after = max(0.0, end - step.ended)
    weights = sum(
        max(0.0, min(end, each.published) - max(step.ended, each.started)) for each in facts.published
    )
    weights = min(after, weights)
    return {"rollout": max(0.0, step.seconds), "trainer": after - weights, "weights": weights}


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
        [step.name, *(f"{parts.get(part, 0.0):.3f}" for part in classes), f"{sum(parts.values()):.3f}"]
        for step, parts in bars
    ]
    limit = longest_drawn([sum(parts.values()) for _, parts in bars])
    cut = sum(sum(parts.values()) > limit for _, parts in bars)
    if cut:
        note += f" Bars of more than {short(limit)} seconds are cut ({cut} of them): their parts are in proportion."
    return PageChart(
        name,
        heading,
        note,
        summary,
        drawn(_draw(bars, classes)),
        [Key(cls, words[part]) for part, cls in classes.items()],
        Table(["step", *(f"{part} s" for part in classes), "all s"], rows),
    )


def longest_drawn(lengths: Sequence[float]) -> float:
    """Return the length above which bars are cut, so that a few long ones leave the others to be seen."""
    ordered = sorted(lengths)
    longest, usual = ordered[-1], ordered[(len(ordered) - 1) * 9 // 10]
    return max(1e-9, min(longest, _MOST * usual) if usual > 0 else longest)


def _draw(bars: Sequence[Bar], classes: Mapping[str, str]) -> Draw:
    limit = longest_drawn([sum(parts.values()) for _, parts in bars])

    def draw(width: float) -> tuple[str, float]:
        inner, height = width - _LEFT - _RIGHT, len(bars) * (_HEIGHT + _GAP)
        marks = [_grid(_LEFT, inner, height, limit, 5 if width < 500 else 8)]
        attempt = bars[0][0].attempt
        for place, (step, parts) in enumerate(bars):
            top, x = place * (_HEIGHT + _GAP) + _GAP / 2, _LEFT
            if step.attempt != attempt:
                attempt = step.attempt
                words = title(f"The trainer was started again: attempt {attempt}")
                marks.append(element("g", words, line(0, top - _GAP / 2, width, top - _GAP / 2, cls="end")))
            marks.append(text(_LEFT - 8, top + 14, f"step {step.step}", text_anchor="end", cls="label"))
            seconds = sum(parts.values())
            scale = inner / max(limit, seconds)
            for part, cls in classes.items():
                size = parts.get(part, 0.0) * scale
                if size > 0:
                    told = f"{step.name}, {part}: {parts[part]:.3f} s"
                    marks.append(block(x, top, size, _HEIGHT, cls, told))
                    x += size
            if seconds > limit:
                marks += [_break(_LEFT + inner - 14 + each, top) for each in (0, 5)]
            words = f"{short(seconds)} s"
            # The label of a cut bar may be longer than the room beside it.
            after = min(x + 5, width - _LETTER * len(words))
            marks.append(text(after, top + 14, words, cls="value halo"))
        return "".join(marks), height + _AXIS

    return draw


def _break(x: float, top: float) -> str:
    """Return one of the two strokes through a bar that was cut."""
    return line(x, top + _HEIGHT + 2, x + 4, top - 2, cls="cut")


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
