"""The picture of the learner's benchmark: acceptance over steps (ReSpec, Figure 4), and rewards (Figure 10)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np

from bench.learner.following import FollowerRecord

_WINDOW = 5
"""Steps that a line is the mean of; the values themselves are points."""
_COLOURS = ("#6b7280", "#b45309", "#1d4ed8", "#15803d", "#7e22ce", "#be123c", "#0e7490")


def draw(
    runs: Mapping[str, FollowerRecord], rewards: Sequence[float], live_rewards: Sequence[float], path: Path
) -> bool:
    """One panel of acceptance lengths, one of rewards. False where there is no matplotlib."""
    try:
        import matplotlib

        matplotlib.use("svg")
        from matplotlib import pyplot
    except ModuleNotFoundError:
        return False
    sheet, (left, right) = pyplot.subplots(1, 2, figsize=(11, 4), layout="constrained")
    for colour, (name, run) in zip(_COLOURS, runs.items(), strict=False):
        values = run.acceptance_length
        left.plot(range(len(values)), values, ".", color=colour, markersize=2.5, alpha=0.5)
        left.plot(*smooth(values, _WINDOW), color=colour, linewidth=1.4, label=name)
    left.set(xlabel="step", ylabel="acceptance length", title="Drafts for samples not seen before")
    left.legend(fontsize=7, frameon=False)
    right.plot(
        range(len(rewards)), rewards, color=_COLOURS[0], linewidth=2.4, alpha=0.6, label="plain decoding"
    )
    if live_rewards:
        right.plot(
            range(len(live_rewards)), live_rewards, color=_COLOURS[2], linewidth=1.0, label="on drafts"
        )
    right.set(xlabel="step", ylabel="mean reward", title="The run, decoded plainly and on drafts")
    right.legend(fontsize=7, frameon=False)
    path.parent.mkdir(parents=True, exist_ok=True)
    sheet.savefig(path)
    pyplot.close(sheet)
    return True


def smooth(values: Sequence[float], window: int) -> tuple[np.ndarray, np.ndarray]:
    """Means over `window` neighbours, and the places in their middle; fewer values than that stay as they are."""
    if len(values) < window:
        return np.arange(len(values)), np.array(values)
    means = np.convolve(values, np.full(window, 1 / window), mode="valid")
    return np.arange(len(means)) + (window - 1) / 2, means
