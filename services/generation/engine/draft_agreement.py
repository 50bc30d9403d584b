"""Tell a wrong state from rounding, by what an engine says of the same tokens with drafts and without. Pure.

A step with drafts has another shape than one without, and in the dtypes of GPUs its logits differ by rounding:
some hundredths of a nat, and where a mixture of experts has a near-tie some tenths at single positions. So the
sampled tokens may differ, too, and neither they nor the largest difference can be the measure. A wrong state, such
as one that a refused draft has changed, moves the whole distribution at every position behind it by half a nat and
more. Hence the measure is the median over the positions of a sample of the median over the likeliest tokens. In a
tiny model with experts and a gated delta rule in bfloat16, rounding gives 0.06 at most.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import chain
from math import inf
from statistics import median

TOLERANCES = {"float32": 0.01, "float16": 0.1, "bfloat16": 0.25}
"""By dtype of the model, in nats. float16 has eight times the precision of bfloat16, but its mixtures of experts
have near-ties as well."""
_COARSEST = max(TOLERANCES.values())
# Of fewer positions one alone could be the median.
_LEAST_POSITIONS = 3


@dataclass(frozen=True, slots=True)
class Decoded:
    """Response of a sample, and the likeliest tokens of each position with their log-probabilities."""

    tokens: list[int] = field(default_factory=list)
    likeliest: list[Mapping[int, float]] = field(default_factory=list)


def disagreement(plain: Sequence[Decoded], drafted: Sequence[Decoded], dtype: str) -> str:
    """Return how drafted responses of some samples differ from plain ones beyond rounding; "" if they do not.

    Args:
        plain: of each sample.
        drafted: of the same samples, with a draft refused in their first decoding step.
        dtype: of the model.
    """
    tolerance = TOLERANCES.get(dtype, _COARSEST)
    distances = [_distances(*both) for both in zip(plain, drafted, strict=True)]
    # A defect may be in one row of the batch, or end all responses at once.
    judged = [each for each in distances if len(each) >= _LEAST_POSITIONS]
    worst = max((median(each) for each in (*judged, list(chain(*distances))) if each), default=inf)
    if worst <= tolerance:
        return ""
    if worst == inf:
        return "other tokens are the likeliest behind a refused draft"
    off = f"log-probabilities are {worst:.2g} nats off behind a refused draft"
    return f"{off}; up to {tolerance:g} is rounding in {dtype}"


def _distances(plain: Decoded, drafted: Decoded) -> list[float]:
    """Return the distance of the distributions at each position behind the first whose context is the same."""
    found = []
    for place, (one, other) in enumerate(zip(plain.likeliest, drafted.likeliest, strict=False)):
        if place:
            found.append(_distance(one, other))
        if plain.tokens[place] != drafted.tokens[place]:
            break
    return found


def _distance(one: Mapping[int, float], other: Mapping[int, float]) -> float:
    shared = one.keys() & other.keys()
    if 2 * len(shared) < len(one):
        return inf
    return median(abs(one[token] - other[token]) for token in shared)
