"""Plots over two axes: reward by step, acceptance by position, predicted and measured step times. Pure."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from itertools import groupby

from paceline.report.chart import MOST_STEPS, Draw, Key, PageChart, Table, drawn, latest
from paceline.report.facts import RunFacts, RunStep
from paceline.report.palette import SERIES
from paceline.report.svg import element, line, path, short, text, ticks, title

_HEIGHT, _LEFT, _RIGHT, _TOP, _BOTTOM = 260.0, 54.0, 14.0, 10.0, 40.0
_CORNERS: dict[str, list[tuple[float, float]]] = {
    "square": [(-1, -1), (1, -1), (1, 1), (-1, 1)],
    "triangle": [(0, -1.2), (1.2, 1), (-1.2, 1)],
    "diamond": [(0, -1.3), (1.3, 0), (0, 1.3), (-1.3, 0)],
    "bar": [(-1.4, -0.5), (1.4, -0.5), (1.4, 0.5), (-1.4, 0.5)],
    "pillar": [(-0.5, -1.4), (0.5, -1.4), (0.5, 1.4), (-0.5, 1.4)],
}
_SHAPES = ("circle", "square", "triangle", "diamond", "pillar", "bar")


Places = Callable[[float, float, int], list[float]]
"""Returns places for at most so many grid lines from low to high."""


class Axes:
    """Linear axes of a plot of this width: from data to CSS pixels, and the grid with its labels."""

    def __init__(
        self, width: float, across: tuple[float, float], up: tuple[float, float], names: tuple[str, str]
    ) -> None:
        """`across` and `up` are ranges of the data; a range of one value is widened."""
        self.width = width
        self.across, self.up = _wide(across), _wide(up)
        self._names = names

    def x(self, value: float) -> float:
        """Return the place of a value across."""
        low, high = self.across
        return _LEFT + (value - low) / (high - low) * (self.width - _LEFT - _RIGHT)

    def y(self, value: float) -> float:
        """Return the place of a value upwards."""
        low, high = self.up
        return _HEIGHT - _BOTTOM - (value - low) / (high - low) * (_HEIGHT - _BOTTOM - _TOP)

    def grid(
        self,
        whole: bool = False,
        label: Callable[[float], str] = short,
        places: Places = ticks,
        across: Callable[[float], str] = "{:.0f}".format,
    ) -> str:
        """Return lines and labels.

        `whole`: only whole numbers across, for which `across` has words. `label` makes the words of other values.
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
    # Of a trainer that has just been started again no reward may be known yet.
    valid = [(step, mean) for step, mean in shown if not step.replaced] or shown
    (first, before), (last, after) = valid[0], valid[-1]
    summary = f"Mean reward {before:.3f} in step {first.step}, {after:.3f} in step {last.step}."
    again = sum(step.replaced for step, _ in shown)
    if again:
        summary += f" {again} steps, in grey, were replaced by those of a trainer that was started again."
    return PageChart(
        "reward",
        "Reward",
        "Mean of the rewards that the trainer reported, over the samples of a step, in the order of the steps; the "
        f"shaded range is from the lowest to the highest.{latest(len(rewarded))}",
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
