"""Choose among attention backends by what was measured. Pure.

vLLM's own stays unless another is clearly faster: a second of timing is noisy, and a kernel that wins on even
lengths may lose on those of a real batch. So a backend is chosen only if it was timed in every case, is at least
MARGIN faster over all of them, and slower than vLLM's in none by more than TOLERANCE. Times are compared by their
ratios, so that a short case counts as much as a long one.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from enum import StrEnum
from math import exp, fsum, inf, isfinite, log

MARGIN, TOLERANCE = 0.05, 0.05


class AttentionName(StrEnum):
    """Backends: what vLLM would take by itself, our kernel for short queries within that, and FlashInfer."""

    VLLM = "vllm"
    OURS = "ours"
    FLASHINFER = "flashinfer"


@dataclass(frozen=True, slots=True)
class Timing:
    """Median time of one backend in one case, in seconds; infinite, with the error, where it does not run."""

    backend: AttentionName
    case: str
    seconds: float
    error: str = ""


def fastest(timings: Iterable[Timing]) -> AttentionName:
    """Return the backend to take. Of several times of a backend in a case the last counts."""
    found: dict[AttentionName, dict[str, float]] = {}
    for timing in timings:
        found.setdefault(timing.backend, {})[timing.case] = timing.seconds
    baseline = found.pop(AttentionName.VLLM, {})
    if not baseline or not all(isfinite(seconds) and seconds > 0 for seconds in baseline.values()):
        return AttentionName.VLLM
    best, least = AttentionName.VLLM, 1 - MARGIN
    for name in sorted(found):
        ratios = [found[name].get(case, inf) / seconds for case, seconds in baseline.items()]
        # A NaN, or a time of nothing, is no measurement.
        if not all(0 < ratio <= 1 + TOLERANCE for ratio in ratios):
            continue
        mean = exp(fsum(map(log, ratios)) / len(ratios))
        if mean < least:
            best, least = name, mean
    return best
