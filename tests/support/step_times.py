"""Step times of made-up machines for tests, and modes that know them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from services.contracts.knobs import MOST_DRAFTED, Knobs
from services.generation.speculation.decision import Exploration
from services.generation.speculation.modes import PlannerMode
from services.step_time.estimator import StepTimeEstimator
from services.step_time.sweep import MeasuredStep, swept_batches


@dataclass(frozen=True, slots=True)
class KnownStepTime:
    """Step times without doubt, for tests of what is done by them; in an estimator's place.

    A step reads 1 ms of weights; beyond a number of rows it computes for `row` seconds each instead.
    """

    weights: float = 1e-3
    row: float = 1e-6
    base: float = 0.0
    per_request: float = 0.0
    per_row: float = 0.0
    per_attended_token: float = 0.0
    verify_per_request: float = 0.0
    known: bool = True

    def seconds(self, samples: ArrayLike, rows: ArrayLike, context: ArrayLike) -> NDArray[np.float64]:
        """Return the seconds of steps; the arguments broadcast."""
        n, r, c = (np.asarray(each, np.float64) for each in (samples, rows, context))
        drafted = r - n
        found = np.maximum(self.weights, self.row * r) + 1e-8 * c + self.base + self.per_request * n
        found = found + self.per_row * drafted + self.per_attended_token * c * np.sqrt(drafted / n)
        return np.asarray(found + (drafted > 0) * self.verify_per_request * n)

    def predict(self, samples: int, rows: ArrayLike, context: float) -> NDArray[np.float64]:
        """Return the seconds of steps with `rows` [k]."""
        return self.seconds(samples, np.asarray(rows), context)

    def observe(self, samples: int, rows: int, context: float, seconds: float) -> float:
        """Learn nothing; return the seconds."""
        return float(self.seconds(samples, rows, context))

    def sweep(self) -> list[MeasuredStep]:
        """Return what a sweep of such a machine measures."""
        return [
            MeasuredStep(samples=n, rows=rows, context=context, seconds=float(self.seconds(n, rows, context)))
            for batch in swept_batches(256, 1 << 14, 1 << 14)
            for rows in batch.rows
            for n, context in ((batch.samples, batch.samples * batch.prompt),)
        ]

    def estimator(self) -> StepTimeEstimator:
        """Return an estimator that begins with that sweep."""
        return StepTimeEstimator(self.sweep())


def settled(samples: Sequence[int] = tuple(1 << k for k in range(12))) -> Exploration:
    """Return an exploration for which plain and drafted steps of all sizes were done already."""
    found = Exploration()
    for each in samples:
        found.record_step(each, drafted=True)
        found.record_step(each, drafted=False)
    return found


def planner_mode(
    window: int, margin: float = 0.0, step_time: Any = None, kind: type[PlannerMode] = PlannerMode
) -> PlannerMode:
    """Return the planner of a machine, by default one on which a row costs a hundredth of a step."""
    known = KnownStepTime(per_row=1e-5) if step_time is None else step_time
    return kind(known, Knobs(draft_cap=min(window, MOST_DRAFTED), margin=margin), settled())
