"""Times of steps of the same samples by their draft tokens.

A step waits while it is decided what it verifies, and that takes one of these. The Python of a dozen lines that a
machine has not run for some milliseconds takes longer than all of it compiled. numba is imported when it is first
used, which must be after vLLM was.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from types import ModuleType

import numpy as np
from numpy.typing import NDArray

from services.policy.residual import DRAFTS
from services.policy.step_time import Architecture, StepTime

Floats = NDArray[np.float64]
_DRAFTS = np.array(DRAFTS)


@cache
def _compiled() -> ModuleType:
    from services.policy.curve import compiled

    return compiled


@dataclass(frozen=True, slots=True, eq=False)
class Curve:
    """The time of a step by its draft tokens, in seconds."""

    numbers: Floats
    """All of it, for compiled code."""
    plain: float
    """Of a step without any, as the model has it."""

    def seconds(self, drafted: int) -> float:
        """Of a step with so many draft tokens."""
        return float(_compiled().seconds(self.numbers, float(drafted)))

    def raw_seconds(self, drafted: int) -> float:
        """As the model has it, without correction."""
        return float(_compiled().raw_seconds(self.numbers, float(drafted)))

    def corrected(self, factor: float, offset: float, limit: float) -> Curve:
        """`factor` times it and `offset` seconds, but within 1/limit and limit times."""
        compiled = _compiled()
        numbers = self.numbers.copy()
        numbers[compiled.FACTOR], numbers[compiled.OFFSET], numbers[compiled.LIMIT] = factor, offset, limit
        return Curve(numbers, self.plain)


class Curves:
    """The curves of a step-time model: `StepTime.seconds`, sooner."""

    def __init__(self, model: StepTime) -> None:
        of, residual = model.architecture, model.residual
        self._terms = np.array(
            [
                model.weight_seconds,
                of.dense_flops / model.throughput,
                model.kv_seconds(1.0),
                of.attention_flops / model.throughput,
                model.base,
                model.per_request,
                model.per_row,
                model.per_attended_token,
                model.verify_per_request,
                np.inf,
            ]
        )
        self._requests = np.log2(residual.requests if residual else (1.0,))
        self._lengths = np.log2(residual.lengths if residual else (1.0,))
        self._shares = np.array(residual.shares) if residual else np.empty((0, 0, 0))

    def of(self, requests: int, context: int) -> Curve:
        """Of steps of so many samples, at least one, which have so many tokens together."""
        compiled = _compiled()
        numbers, axes = np.empty(compiled.PIECES + 3 * len(DRAFTS)), (self._requests, self._lengths, _DRAFTS)
        plain = compiled.trace(self._terms, *axes, self._shares, float(requests), float(context), numbers)
        return Curve(numbers, float(plain))


def warm_up() -> Curve:
    """Compile, or load what was compiled, so that the first step does not pay for it. Some curve."""
    anything = Architecture(weight_bytes=1, kv_bytes=1, dense_flops=1, attention_flops=1)
    curve = Curves(StepTime.prior(anything)).of(1, 1)
    curve.seconds(1)
    curve.raw_seconds(1)
    return curve
