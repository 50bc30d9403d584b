"""Plots of the page: stacked bars of seconds, and rewards, acceptance and step times over two axes. Pure."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from itertools import groupby

from paceline.report.chart import (
    MOST_STEPS,
    SERIES,
    Draw,
    Key,
    PageChart,
    Table,
    drawn,
    element,
    latest,
    line,
    path,
    short,
    text,
    ticks,
    title,
)
from paceline.report.facts import RunFacts, RunStep
from paceline.times import STEP_PARTS

Bar = tuple[RunStep, Mapping[str, float]]
"""A step, and its seconds by part."""
PHASES = {"rollout": "blue", "trainer": "orange hatch", "weights": "green dots"}
PHASE_WORDS = {
    "rollout": "rollout: from the batch's acceptance to the end of its last sample",
    "trainer": "trainer: from there until its weights arrive, or the next batch",
    "weights": "weights: from the begin of their update until they are served",
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
    "prefill": "prefill: the engine step of its first token",
    "plain": "plain: engine steps without a draft for it",
    "verified": "verified: engine steps that verified a draft for it",
    "moves": "moves: on no instance, during a move or after losing one",
    "between": "between: between engine steps, and until its end was known",
}
_BAR_HEIGHT, _BAR_GAP, _BAR_AXIS = 20.0, 6.0, 34.0
_BAR_LEFT, _BAR_RIGHT = 64.0, 62.0
_LETTER = 6.5
# A bar is cut if it is longer than this multiple of the length that nine of ten bars do not exceed.
_LONGEST_BAR = 3.0

_HEIGHT, _LEFT, _RIGHT, _TOP, _BOTTOM = 260.0, 54.0, 14.0, 10.0, 40.0
_CORNERS: dict[str, list[tuple[float, float]]] = {
    "square": [(-1, -1), (1, -1), (1, 1), (-1, 1)],
    "triangle": [(0, -1.2), (1.2, 1), (-1.2, 1)],
    "diamond": [(0, -1.3), (1.3, 0), (0, 1.3), (-1.3, 0)],
    "bar": [(-1.4, -0.5), (1.4, -0.5), (1.4, 0.5), (-1.4, 0.5)],
    "pillar": [(-0.5, -1.4), (0.5, -1.4), (0.5, 1.4), (-0.5, 1.4)],
}
_SHAPES = ("circle", "square", "triangle", "diamond", "pillar", "bar")


def where_time_goes(facts: RunFacts) -> PageChart | None:
    """Return the chart of the phases of each step; None without a step."""
    if not facts.steps:
        return None
    shown = list(zip(facts.steps, phases(facts), strict=True))[-MOST_STEPS:]
    whole = {name: sum(parts.get(name, 0.0) for _, parts in shown) for name in PHASES}
    total = sum(whole.values()) or 1.0
    shares = ", ".join(f"{name} {seconds / total:.0%}" for name, seconds in whole.items())
    return _bar_chart(
        "time",
        "Where the time goes",
        f"Wall seconds of each step.{latest(len(facts.steps))}",
        f"Of {total:.1f} seconds: {shares}.",
        shown,
        PHASES,
        PHASE_WORDS,
    )


def critical_path(facts: RunFacts) -> PageChart | None:
    """Return the chart of the time of the last sample of each step, by part; None without such a sample."""
    steps = [step for step in facts.steps if step.last][-MOST_STEPS:]
    if not steps:
        return None
    bars = [(step, step.last[0].parts) for step in steps]
    whole = {name: sum(parts[name] for _, parts in bars) for name in STEP_PARTS}
    total = sum(whole.values()) or 1.0
    longest = max(whole, key=whole.__getitem__)
    return _bar_chart(
        "path",
        "Critical path",
        "Time of the sample that ended last in each step, from its acceptance to its end: nothing else could have "
        f"made the step shorter.{latest(len(facts.steps))}",
        f"Of the {total:.1f} seconds of these samples, {whole[longest] / total:.0%} is the part {longest}.",
        bars,
        PART_CLASSES,
        PART_WORDS,
    )


def phases(facts: RunFacts) -> list[dict[str, float]]:
    """Return the seconds of each phase of each step."""
    return [_phases(facts, step, following(facts, place)) for place, step in enumerate(facts.steps)]


def following(facts: RunFacts, place: int) -> float:
    """Return the end of a step: when the next one begins, or else when new weights serve or its last sample ends.

    The time between the last step before a restart of the trainer and the first step after it belongs to no step.
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


def _bar_chart(
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
        drawn(_draw_bars(bars, classes)),
        [Key(cls, words[part]) for part, cls in classes.items()],
        Table(["step", *(f"{part} s" for part in classes), "all s"], rows),
    )


def longest_drawn(lengths: Sequence[float]) -> float:
    """Return the length above which bars are cut, so that a few long ones do not hide the others."""
    ordered = sorted(lengths)
    longest, usual = ordered[-1], ordered[(len(ordered) - 1) * 9 // 10]
    return max(1e-9, min(longest, _LONGEST_BAR * usual) if usual > 0 else longest)


def _draw_bars(bars: Sequence[Bar], classes: Mapping[str, str]) -> Draw:
    limit = longest_drawn([sum(parts.values()) for _, parts in bars])

    def draw(width: float) -> tuple[str, float]:
        inner, height = width - _BAR_LEFT - _BAR_RIGHT, len(bars) * (_BAR_HEIGHT + _BAR_GAP)
        marks = [_bar_grid(_BAR_LEFT, inner, height, limit, 5 if width < 500 else 8)]
        attempt = bars[0][0].attempt
        for place, (step, parts) in enumerate(bars):
            top, x = place * (_BAR_HEIGHT + _BAR_GAP) + _BAR_GAP / 2, _BAR_LEFT
            if step.attempt != attempt:
                attempt = step.attempt
                words = title(f"The trainer was started again: attempt {attempt}")
                marks.append(
                    element("g", words, line(0, top - _BAR_GAP / 2, width, top - _BAR_GAP / 2, cls="end"))
                )
            marks.append(text(_BAR_LEFT - 8, top + 14, f"step {step.step}", text_anchor="end", cls="label"))
            seconds = sum(parts.values())
            scale = inner / max(limit, seconds)
            for part, cls in classes.items():
                size = parts.get(part, 0.0) * scale
                if size > 0:
                    label = f"{step.name}, {part}: {parts[part]:.3f} s"
                    marks.append(block(x, top, size, _BAR_HEIGHT, cls, label))
                    x += size
            if seconds > limit:
                marks += [_break(_BAR_LEFT + inner - 14 + each, top) for each in (0, 5)]
            words = f"{short(seconds)} s"
            # The label of a cut bar may be longer than the space to its right.
            after = min(x + 5, width - _LETTER * len(words))
            marks.append(text(after, top + 14, words, cls="value halo"))
        return "".join(marks), height + _BAR_AXIS

    return draw


def _break(x: float, top: float) -> str:
    """Return one of the two strokes through a bar that was cut."""
    return line(x, top + _BAR_HEIGHT + 2, x + 4, top - 2, cls="cut")


def block(x: float, y: float, width: float, height: float, cls: str, words: str) -> str:
    """Return a bar of a class such as "green rise": a colour, and optionally a pattern over it."""
    colour, _, pattern = cls.partition(" ")
    area: dict[str, float | str] = {"x": x, "y": y, "width": max(0.5, width), "height": height}
    marks = [title(words), element("rect", cls=f"f-{colour} edge", **area)]
    if pattern:
        marks.append(element("rect", fill=f"url(#p-{pattern})", **area))
    return element("g", *marks)


def _bar_grid(left: float, inner: float, height: float, longest: float, most: int) -> str:
    marks = []
    for value in ticks(0.0, longest, most):
        x = left + value / longest * inner
        marks.append(line(x, 0, x, height, cls="grid"))
        marks.append(text(x, height + 15, short(value), text_anchor="middle", cls="tick"))
    marks.append(text(left + inner / 2, height + 31, "seconds", text_anchor="middle", cls="tick"))
    return "".join(marks)


Places = Callable[[float, float, int], list[float]]
"""Function from `low`, `high` and `most` to the places of at most about `most` grid lines."""


class Axes:
    """Linear axes of a plot: the mapping from data to CSS pixels, and the grid with its labels."""

    def __init__(
        self, width: float, across: tuple[float, float], up: tuple[float, float], names: tuple[str, str]
    ) -> None:
        """Fit axes into `width`. `across` and `up` are ranges of the data; a range of one value is widened."""
        self.width = width
        self.across, self.up = _wide(across), _wide(up)
        self._names = names

    def x(self, value: float) -> float:
        """Return the horizontal place of a value."""
        low, high = self.across
        return _LEFT + (value - low) / (high - low) * (self.width - _LEFT - _RIGHT)

    def y(self, value: float) -> float:
        """Return the vertical place of a value."""
        low, high = self.up
        return _HEIGHT - _BOTTOM - (value - low) / (high - low) * (_HEIGHT - _BOTTOM - _TOP)

    def grid(
        self,
        whole: bool = False,
        label: Callable[[float], str] = short,
        places: Places = ticks,
        across: Callable[[float], str] = "{:.0f}".format,
    ) -> str:
        """Return grid lines and labels.

        With `whole` only whole numbers are marked on the horizontal axis, labelled by `across`. `label` makes all
        other labels.
        """
        marks, most = [], 4 if self.width < 500 else 9
        for value in places(*self.up, 5):
            marks.append(line(_LEFT, self.y(value), self.width - _RIGHT, self.y(value), cls="grid"))
            marks.append(text(_LEFT - 7, self.y(value) + 4, label(value), text_anchor="end", cls="tick"))
        for value in places(*self.across, most):
            if whole and value != int(value):
                continue
            marks.append(line(self.x(value), _TOP, self.x(value), _HEIGHT - _BOTTOM, cls="grid"))
            place = _HEIGHT - _BOTTOM + 16
            words = across(value) if whole else label(value)
            marks.append(text(self.x(value), place, words, text_anchor="middle", cls="tick"))
        middle = (_LEFT + self.width - _RIGHT) / 2
        marks.append(text(middle, _HEIGHT - 6, self._names[0], text_anchor="middle", cls="tick"))
        return "".join(marks)


def rewards(facts: RunFacts) -> PageChart | None:
    """Return the chart of rewards by step; None if none was reported."""
    rewarded = [(step, step.reward) for step in facts.steps if step.reward is not None]
    shown = rewarded[-MOST_STEPS:]
    if not shown:
        return None
    # All may be replaced: a trainer that has just been restarted has not reported rewards yet.
    valid = [(step, mean) for step, mean in shown if not step.replaced] or shown
    (first, before), (last, after) = valid[0], valid[-1]
    summary = f"Mean reward {before:.3f} in step {first.step}, {after:.3f} in step {last.step}."
    again = sum(step.replaced for step, _ in shown)
    if again:
        steps = "1 step, in grey, was" if again == 1 else f"{again} steps, in grey, were"
        summary += f" {steps} replaced by those of a trainer that was started again."
    return PageChart(
        "reward",
        "Reward",
        "Mean of the rewards that the trainer reported, over the samples of a step, in the order of the steps; the "
        f"shaded range is from the lowest to the highest reward.{latest(len(rewarded))}",
        summary,
        drawn(_draw_rewards(shown)),
        [],
        Table(
            ["step", "mean", "lowest", "highest", "samples"],
            [
                [
                    step.name + (" (replaced)" if step.replaced else ""),
                    f"{mean:.3f}",
                    f"{step.reward_low:.3g}",
                    f"{step.reward_high:.3g}",
                    f"{step.rewards:,}",
                ]
                for step, mean in shown
            ],
        ),
    )


def _draw_rewards(shown: Sequence[tuple[RunStep, float]]) -> Draw:
    low, high = min(step.reward_low for step, _ in shown), max(step.reward_high for step, _ in shown)

    def draw(width: float) -> tuple[str, float]:
        axes = Axes(width, (0, len(shown) - 1), (low, high), ("step", "reward"))
        places = [(axes.x(place), step, mean) for place, (step, mean) in enumerate(shown)]
        ranges, curves, points = [], [], []
        for number, group in groupby(places, key=lambda each: each[1].attempt):
            of_attempt = list(group)
            area = [(x, axes.y(step.reward_high)) for x, step, _ in of_attempt]
            area += [(x, axes.y(step.reward_low)) for x, step, _ in reversed(of_attempt)]
            ranges.append(path(area, cls="range"))
            curves.append(path([(x, axes.y(mean)) for x, _, mean in of_attempt], cls="curve s-blue"))
            if number != shown[0][0].attempt:
                x = of_attempt[0][0] - (axes.x(1) - axes.x(0)) / 2
                words = title(f"The trainer was started again: attempt {number}")
                curves.append(element("g", words, line(x, _TOP, x, _HEIGHT - _BOTTOM, cls="end")))
            for x, step, mean in of_attempt:
                colour = "grey" if step.replaced else "blue"
                points.append(
                    _mark("circle", x, axes.y(mean), colour, f"{step.name}: mean reward {mean:.3f}")
                )
        grid = axes.grid(whole=True, across=lambda place: str(shown[int(place)][0].step))
        return "".join([*ranges, grid, *curves, *points]), _HEIGHT

    return draw


def acceptance(facts: RunFacts) -> PageChart | None:
    """Return the chart of acceptance by drafter and position; None if nothing was drafted."""
    found = {name: counts.positions() for name, counts in sorted(facts.drafts.items())}
    found = {name: positions for name, positions in found.items() if positions}
    if not found:
        return None
    looks = {name: (SERIES[place % 6], _SHAPES[place % 6]) for place, name in enumerate(found)}
    sums = (
        f"{name}: {counts.accepted / max(1, counts.drafted):.0%} of {counts.drafted:,} draft tokens, "
        f"{1 + counts.accepted / max(1, counts.verifications):.2f} tokens a verification"
        for name, counts in sorted(facts.drafts.items())
        if name in found
    )
    rows = [
        [str(place + 1), *(_share(positions, place) for positions in found.values())]
        for place in range(max(map(len, found.values())))
    ]
    return PageChart(
        "acceptance",
        "Acceptance by drafter and position",
        "Share of the draft tokens at each position that verification kept, over all steps of the run. A token "
        "counts as kept only if all before it were. Positions above 16 are not counted.",
        f"{'; '.join(sums)}.",
        drawn(_draw_acceptance(found, looks)),
        [Key(f"{colour} {shape}", name) for name, (colour, shape) in looks.items()],
        Table(["position", *(f"{name} accepted / drafted" for name in found)], rows),
    )


def _draw_acceptance(
    found: Mapping[str, Sequence[tuple[int, int]]], looks: Mapping[str, tuple[str, str]]
) -> Draw:
    longest = max(map(len, found.values()))

    def draw(width: float) -> tuple[str, float]:
        axes = Axes(width, (1, max(2, longest)), (0.0, 1.0), ("position in the draft", "accepted"))
        marks = [axes.grid(whole=True, label=lambda value: f"{value:.0%}")]
        for name, positions in found.items():
            colour, shape = looks[name]
            points = [
                (axes.x(place), axes.y(accepted / drafted))
                for place, (drafted, accepted) in enumerate(positions, 1)
            ]
            marks.append(path(points, cls=f"curve s-{colour}"))
            for place, ((x, y), (drafted, accepted)) in enumerate(zip(points, positions, strict=True), 1):
                words = f"{name}, position {place}: {accepted / drafted:.1%} of {drafted:,}"
                marks.append(_mark(shape, x, y, colour, words))
        return "".join(marks), _HEIGHT

    return draw


def step_times(facts: RunFacts) -> PageChart | None:
    """Return the chart of predicted against measured step time; None if no step was predicted."""
    found = [
        (step.name, step.predicted_seconds, step.measured_seconds)
        for step in facts.steps
        if step.predicted_seconds > 0 and step.measured_seconds > 0
    ]
    if not found:
        return None
    predicted, measured = sum(each[1] for each in found), sum(each[2] for each in found)
    shown = found[-MOST_STEPS:]
    logs = [math.log10(value) for _, *pair in shown for value in pair]
    low, high = min(logs) - 0.05, max(logs) + 0.05

    def draw(width: float) -> tuple[str, float]:
        axes = Axes(width, (low, high), (low, high), ("predicted seconds", "measured"))
        ends = [(axes.x(low), axes.y(low)), (axes.x(high), axes.y(high))]
        marks = [
            axes.grid(label=lambda value: short(10**value), places=_decades),
            path(ends, cls="curve equal"),
        ]
        for step, one, other in shown:
            words = f"{step}: predicted {one:.3f} s, measured {other:.3f} s"
            marks.append(_mark("circle", axes.x(math.log10(one)), axes.y(math.log10(other)), "blue", words))
        return "".join(marks), _HEIGHT

    return PageChart(
        "times",
        "Predicted and measured step time",
        "Seconds that the engine steps of a training step took, over all instances (upwards), against what the "
        "planner had predicted for the same engine steps (to the right); one mark a training step, logarithmic "
        f"axes. On the dashed line they are equal, above it steps took longer.{latest(len(found))}",
        f"All together: predicted {predicted:.2f} s, measured {measured:.2f} s, {measured / predicted - 1:+.0%}.",
        drawn(draw),
        [],
        Table(
            ["step", "predicted s", "measured s", "difference"],
            [[step, f"{one:.3f}", f"{other:.3f}", f"{other / one - 1:+.0%}"] for step, one, other in shown],
        ),
    )


def marker(shape: str, x: float, y: float, size: float = 4.5) -> str:
    """Return the path of a mark around a point."""
    if shape == "circle":
        return f"M{x - size:.1f} {y:.1f}a{size} {size} 0 1 0 {2 * size} 0a{size} {size} 0 1 0 {-2 * size} 0Z"
    corners = " L".join(f"{x + across * size:.1f} {y + up * size:.1f}" for across, up in _CORNERS[shape])
    return f"M{corners}Z"


def _mark(shape: str, x: float, y: float, colour: str, words: str) -> str:
    return element("path", title(words), d=marker(shape, x, y), cls=f"f-{colour} mark")


def _decades(low: float, high: float, most: int) -> list[float]:
    """Return logarithms of round numbers from low to high."""
    decades = range(math.floor(low), math.ceil(high) + 1)
    fine = [place + math.log10(factor) for place in decades for factor in (1, 2, 5)]
    coarse = [float(place) for place in decades]
    inside = [[value for value in each if low <= value <= high] for each in (fine, coarse)]
    return inside[0] if len(inside[0]) <= most else inside[1]


def _share(positions: Sequence[tuple[int, int]], place: int) -> str:
    if place >= len(positions):
        return ""
    drafted, accepted = positions[place]
    return f"{accepted / drafted:.1%} ({accepted:,} / {drafted:,})"


def _wide(given: tuple[float, float]) -> tuple[float, float]:
    low, high = given
    return (low, high) if high > low else (low - 0.5, low + 0.5)
