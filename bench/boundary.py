"""The toggle's boundary over measured steps, as in figures 4 and 12 of EfficientRollout.

A measured point is a batch at a context length that decoded plainly and verified drafts of some length: its
speedup follows from the two times and from how many tokens a draft brings, when each is accepted with a given
probability if all before it are (the paper draws the case of 1). The boundary is where the step-time model says
1 + tau.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from services.policy.step_time import StepTime
from services.policy.sweep import Point

ACCEPTANCES = (1.0, 0.8, 0.5)


@dataclass(frozen=True, slots=True)
class Speedup:
    """Tokens a second with drafts over those without: measured and predicted. `context` is the mean, in tokens."""

    batch: int
    context: float
    length: int
    acceptance: float
    measured: float
    predicted: float


def tokens(acceptance: float, length: int) -> float:
    """Tokens that a sample gets from a verification of such a draft."""
    return float(sum(acceptance**position for position in range(length + 1)))


def speedups(points: Sequence[Point], model: StepTime) -> list[Speedup]:
    """Of every verifying point of a sweep, against the plain one of its batch that is nearest in context."""
    plain = [point for point in points if point.rows == point.requests]
    found = []
    for point in points:
        same = [each for each in plain if each.requests == point.requests]
        if point.rows == point.requests or not same:
            continue
        near = min(same, key=lambda each: abs(np.log(max(each.context, 1) / max(point.context, 1))))
        length = point.rows // point.requests - 1
        at = point.requests, point.context
        verify = float(model.seconds(at[0], point.rows, at[1]))
        decode = float(model.seconds(at[0], at[0], at[1]))
        for acceptance in ACCEPTANCES:
            gain = tokens(acceptance, length)
            found.append(
                Speedup(
                    point.requests,
                    point.context / point.requests,
                    length,
                    acceptance,
                    gain * near.seconds / point.seconds,
                    gain * decode / verify,
                )
            )
    return found


def figures(found: Sequence[Speedup], margin: float) -> dict[str, float]:
    """How well the boundary divides the measured points.

    `boundary_agreement`: points on the side where they were measured. `boundary_harmful`: points where drafts made
    it slower and the toggle would be on; `boundary_worst` is the slowest of these, 1 without any.
    """
    on = np.array([each.predicted >= 1 + margin for each in found])
    measured = np.array([each.measured for each in found])
    harmful = measured[on & (measured < 1)]
    return {
        "boundary_agreement": float((on == (measured > 1)).mean()),
        "boundary_harmful": float(len(harmful) / len(found)),
        "boundary_worst": float(harmful.min(initial=1.0)),
    }


def draw(found: Sequence[Speedup], model: StepTime, margin: float, path: Path) -> bool:
    """A panel for each length and acceptance: predicted speedup in the background, the boundary, and the points.

    False where there is no matplotlib.
    """
    try:
        import matplotlib

        matplotlib.use("svg")
        from matplotlib import pyplot
    except ModuleNotFoundError:
        return False
    lengths = sorted({each.length for each in found})
    sheet, panels = pyplot.subplots(
        len(ACCEPTANCES),
        len(lengths),
        figsize=(2.4 * len(lengths) + 1, 2.4 * len(ACCEPTANCES)),
        sharex=True,
        sharey=True,
        squeeze=False,
        layout="constrained",
    )
    batches = np.geomspace(min(each.batch for each in found), max(each.batch for each in found), 40)
    contexts = np.geomspace(min(each.context for each in found), max(each.context for each in found), 40)
    image: Any = None
    for row, acceptance in enumerate(ACCEPTANCES):
        for column, length in enumerate(lengths):
            panel = panels[row, column]
            image = _background(panel, model, batches, contexts, acceptance, length, margin)
            here = [each for each in found if (each.length, each.acceptance) == (length, acceptance)]
            for good, colour, marker in ((True, "#15803d", "o"), (False, "#b91c1c", "x")):
                shown = [each for each in here if (each.measured > 1) == good]
                panel.scatter(
                    [each.batch for each in shown],
                    [each.context for each in shown],
                    color=colour,
                    marker=marker,
                    s=22,
                )
            panel.set(xscale="log", yscale="log")
            panel.set_title(f"{length} tokens, acceptance {acceptance:g}", fontsize=8)
    sheet.supxlabel("samples", fontsize=9)
    sheet.supylabel("mean context, tokens", fontsize=9)
    sheet.colorbar(image, ax=panels, label="predicted speedup", shrink=0.7)
    path.parent.mkdir(parents=True, exist_ok=True)
    sheet.savefig(path)
    pyplot.close(sheet)
    return True


def _background(
    panel: Any,
    model: StepTime,
    batches: np.ndarray,
    contexts: np.ndarray,
    acceptance: float,
    length: int,
    margin: float,
) -> Any:
    across, up = np.meshgrid(batches, contexts)
    plain = model.seconds(across, across, across * up)
    verify = model.seconds(across, across * (1 + length), across * up)
    gain = tokens(acceptance, length) * plain / verify
    # As pixels: a gradient is drawn in SVG as some hundred thousand triangles.
    how: dict[str, Any] = {"cmap": "RdYlGn", "shading": "gouraud", "alpha": 0.6, "rasterized": True}
    image = panel.pcolormesh(across, up, gain, vmin=0, vmax=2, **how)
    if gain.min() < 1 + margin < gain.max():
        panel.contour(across, up, gain, levels=[1 + margin], colors="#1d4ed8", linewidths=1.2)
    return image
