"""The report's pictures: matplotlib figures as SVG text whose colours are the page's CSS variables.

So a picture is readable in light and dark, and follows the reader's setting without a script.
"""

from __future__ import annotations

import io
import re
from collections.abc import Sequence
from typing import Any

import matplotlib

matplotlib.use("svg")

import numpy as np
from matplotlib import pyplot
from matplotlib.ticker import MaxNLocator

from examples.tinymath.drafter import HeldOutComparison
from examples.tinymath.lanes import InstanceLane, lane
from examples.tinymath.records import StepRecord, percentiles
from examples.tinymath.spans import step_seconds

# Stand-ins that no picture uses otherwise; `_svg` puts the page's variables in their place.
_VARIABLES = {
    "#010101": "--ink",
    "#020202": "--muted",
    "#030303": "--line",
    "#040404": "--bubble",
    "#110000": "--c0",
    "#120000": "--c1",
    "#130000": "--c2",
    "#140000": "--c3",
}
INK, MUTED, LINE, BUBBLE, *SERIES = _VARIABLES
MOST_ROWS = 10
"""Steps shown as timelines; of more, an even choice with the first and the last."""
_LANE, _GAP = 0.34, 0.13
"""Inches of one instance's lane, and between two steps."""
_DARK, _PALE = 0.85, 0.35
"""Opacity of the step's own samples, and of those that are generated ahead."""

_STYLE = {
    "svg.fonttype": "none",
    "svg.hashsalt": "paceline",
    "font.family": "sans-serif",
    "font.size": 10,
    "text.color": INK,
    "axes.edgecolor": LINE,
    "axes.labelcolor": MUTED,
    "axes.labelsize": 10,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "xtick.color": MUTED,
    "ytick.color": MUTED,
    "xtick.major.size": 0,
    "ytick.major.size": 0,
    "grid.color": LINE,
    "grid.linewidth": 0.6,
    "axes.axisbelow": True,
    "legend.frameon": False,
    "hatch.linewidth": 0.6,
}


def reward_curve(records: Sequence[StepRecord]) -> str:
    """Mean reward of each step."""
    figure, axes = _figure(6.2, 3.0)
    steps, rewards = [record.step for record in records], [record.reward for record in records]
    axes.plot(steps, rewards, color=SERIES[0], linewidth=2, marker="o", markersize=5)
    axes.fill_between(steps, rewards, color=SERIES[0], alpha=0.12, linewidth=0)
    axes.set(xlabel="step", ylabel="mean reward", ylim=(0, max(0.05, *rewards) * 1.15))
    for place in {0, len(records) - 1}:
        axes.annotate(
            f"{rewards[place]:.2f}",
            (steps[place], rewards[place]),
            (0, 9),
            textcoords="offset points",
            ha="center",
        )
    axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    axes.grid(axis="y")
    return _svg(figure)


def length_histogram(records: Sequence[StepRecord]) -> str:
    """Lengths of all responses, with median and 95th percentile."""
    figure, axes = _figure(6.2, 3.0)
    lengths = [length for record in records for length in record.lengths]
    bins = np.linspace(0, max(lengths), 49).tolist()
    axes.hist(lengths, bins=bins, color=SERIES[0], alpha=0.85, edgecolor="none")
    median, high, longest = percentiles(lengths)
    top = axes.get_ylim()[1]
    for value, name in ((median, "median"), (high, "95 %")):
        axes.axvline(value, color=MUTED, linewidth=1, linestyle=(0, (4, 3)))
        axes.annotate(
            f"{name} {value}", (value, top), (4, -10), textcoords="offset points", color=INK, fontsize=9
        )
    axes.set(
        xlabel=f"response length in tokens (longest {longest})", ylabel="samples", xlim=(0, longest * 1.02)
    )
    axes.grid(axis="y")
    return _svg(figure)


def time_shares(records: Sequence[StepRecord]) -> str:
    """Seconds of each step by what they went into."""
    figure, axes = _figure(6.2, 3.0)
    steps = [record.step for record in records]
    below = np.zeros(len(records))
    parts = {
        "rollout": [record.timing.rollout for record in records],
        "update": [record.timing.update for record in records],
        "send weights": [record.timing.push for record in records],
    }
    for color, (name, seconds) in zip(SERIES, parts.items(), strict=False):
        axes.bar(steps, seconds, bottom=below, color=color, label=name, width=0.72, linewidth=0)
        below += np.array(seconds)
    axes.set(xlabel="step", ylabel="seconds", ylim=(0, below.max() * 1.22))
    axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    axes.legend(loc="upper right", ncols=3, fontsize=9, columnspacing=1.2, handlelength=1.0)
    axes.grid(axis="y")
    return _svg(figure)


def acceptance(found: Sequence[HeldOutComparison]) -> str:
    """Plot the acceptance length on held-out samples: of each candidate, and of the drafter in use."""
    figure, axes = _figure(6.2, 3.0)
    updates, candidates = [each.update for each in found], [each.candidate for each in found]
    axes.plot(updates, candidates, color=SERIES[0], linewidth=2, label="candidate")
    known = [(each.update, each.current) for each in found if each.current is not None]
    axes.plot(
        [update for update, _ in known],
        [length for _, length in known],
        color=MUTED,
        linewidth=1.5,
        linestyle=(0, (4, 3)),
        label="in use",
    )
    published = [(each.update, each.candidate) for each in found if each.published]
    axes.scatter(
        [update for update, _ in published],
        [length for _, length in published],
        color=SERIES[2],
        zorder=3,
        label="published",
    )
    axes.set(xlabel="update of the drafter", ylabel="tokens a verification")
    axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    axes.legend(loc="best", ncols=3, fontsize=9)
    axes.grid(axis="y")
    return _svg(figure)


def throughput(records: Sequence[StepRecord]) -> str:
    """Tokens per second of each step's rollout."""
    figure, axes = _figure(6.2, 3.0)
    steps = [record.step for record in records]
    axes.bar(
        steps, [record.tokens_per_second for record in records], color=SERIES[0], width=0.72, linewidth=0
    )
    axes.set(xlabel="step", ylabel="tokens per second of rollout")
    axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    axes.grid(axis="y")
    return _svg(figure)


def timelines(records: Sequence[StepRecord]) -> str:
    """For each step and instance, how many samples are active over time, its own and the next step's."""
    rows = [records[place] for place in _even_choice(len(records), MOST_ROWS)]
    names = sorted({name for record in rows for name in record.instances}) or [""]
    lanes = [[lane(record, name) for name in names] for record in rows]
    step_height = _LANE * len(names) + _GAP
    width, height = 12.4, step_height * len(rows) + 0.95
    figure = pyplot.figure(figsize=(width, height))
    figure.patch.set_alpha(0)
    longest = max(record.seconds for record in rows) or 1.0
    peak = max(each.peak for row in lanes for each in row)
    for row, record in enumerate(rows):
        for place, drawn in enumerate(lanes[row]):
            bottom = height - 0.42 - row * step_height - (place + 1) * _LANE
            axes = figure.add_axes((0.07, bottom / height, 0.925, (_LANE - 0.04) / height))
            _draw_lane(axes, drawn, record, SERIES[place % len(SERIES)])
            axes.set(xlim=(0, longest), ylim=(0, max(1.0, peak**0.5) * 1.08), yticks=[])
            axes.tick_params(labelbottom=(row, place) == (len(rows) - 1, len(names) - 1))
        figure.text(
            0.06, (bottom + step_height / 2 - _GAP) / height, f"step {record.step}", ha="right", va="center"
        )
    axes.set_xlabel("seconds from the start of the step")
    _timeline_legend(figure, names)
    return _svg(figure)


def _draw_lane(axes: Any, drawn: InstanceLane, record: StepRecord, color: str) -> None:
    """One instance in one step. Heights are square roots, or a lone last sample could not be seen."""
    for (times, counts), alpha in ((drawn.background, _PALE), (drawn.own, _DARK)):
        axes.fill_between(times, np.sqrt(counts), step="post", color=color, alpha=alpha, linewidth=0)
    for left, right in drawn.idle:
        axes.axvspan(left, right, facecolor="none", edgecolor=BUBBLE, hatch="////", linewidth=0)
    axes.axvline(step_seconds(record.spans), color=INK, linewidth=1.2)
    axes.axvline(record.seconds, color=MUTED, linewidth=0.8)
    axes.spines["left"].set_visible(False)


def _timeline_legend(figure: Any, names: Sequence[str]) -> None:
    rectangle = pyplot.Rectangle
    handles = [rectangle((0, 0), 1, 1, color=color, alpha=_DARK, linewidth=0) for color in SERIES]
    handles = handles[: len(names)]
    handles.append(rectangle((0, 0), 1, 1, color=SERIES[0], alpha=_PALE, linewidth=0))
    handles.append(rectangle((0, 0), 1, 1, facecolor="none", edgecolor=BUBBLE, hatch="////", linewidth=0))
    labels = [*names[: len(SERIES)], "ahead for the next step", "bubble"]
    figure.legend(handles, labels, loc="upper right", ncols=len(labels), fontsize=9.5)


def _even_choice(count: int, most: int) -> list[int]:
    """At most `most` places of `count`, the first and the last among them."""
    if count <= most:
        return list(range(count))
    return sorted({round(place) for place in np.linspace(0, count - 1, most)})


def _figure(width: float, height: float) -> tuple[Any, Any]:
    figure, axes = pyplot.subplots(figsize=(width, height), layout="tight")
    figure.patch.set_alpha(0)
    axes.patch.set_alpha(0)
    return figure, axes


def _svg(figure: Any) -> str:
    """Return the figure as an inline element: no XML head, no fixed size, the page's colours and font."""
    for axes in figure.axes:
        axes.patch.set_alpha(0)
    with io.StringIO() as file:
        figure.savefig(file, format="svg", metadata={"Date": None, "Creator": None})
        text = file.getvalue()
    pyplot.close(figure)
    text = text[text.index("<svg") :]
    text = re.sub(r'(<svg[^>]*?) (?:width|height)="[^"]*"', r"\1", text, count=1)
    text = re.sub(r'(<svg[^>]*?) (?:width|height)="[^"]*"', r"\1", text, count=1)
    text = re.sub(r"<metadata>.*?</metadata>", "", text, flags=re.DOTALL)
    text = re.sub(r"font: ([\d.]+px) [^;\"]*", r"font-size: \1", text)
    text = re.sub(r"font-family: [^;\"]*;?", "", text)
    return re.sub("|".join(_VARIABLES), lambda found: f"var({_VARIABLES[found[0]]})", text)


pyplot.rcParams.update(_STYLE)
