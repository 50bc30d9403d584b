"""Compiled part of `table`: penalised logistic regression of the buckets' priors. Importing it imports numba."""

# mypy: disable-error-code="no-untyped-def"
# Compiled functions have numba types, which annotations cannot express.

from math import exp
from pathlib import Path

from kernels import jit

# Weight of a bucket's fitted prior, in verified tokens; a bucket with this number of tokens has half of its
# greatest weight in the fit of the others.
_PRIOR_TOKENS = 12.0
# Prior variances of the shift (in log-odds) and of the slope.
_SHIFT_VARIANCE = 2.0
_SLOPE_VARIANCE = 1.0
# Newton's method: most steps, the longest step, and the step length at which it has converged. The last step
# more than doubles the number of correct digits.
_MOST_STEPS, _LONGEST_STEP, _DONE = 30, 1.0, 1e-3

_entry = jit.entry(jit.source_fingerprint(Path(__file__).parent, Path(jit.__file__).parent))


@_entry
def fit(odds, tried, kept, fitted, probabilities):
    """Fit shift and slope by Newton's method, starting from `fitted`, and fill the buckets' probabilities.

    odds (prior log-odds), tried, kept and probabilities are [buckets]; fitted [2] holds shift and slope.
    """
    shift, slope = fitted[0], fitted[1]
    for _ in range(_MOST_STEPS):
        up, steeper = -shift / _SHIFT_VARIANCE, (1.0 - slope) / _SLOPE_VARIANCE
        shifts, shared, slopes = 1.0 / _SHIFT_VARIANCE, 0.0, 1.0 / _SLOPE_VARIANCE
        for i in range(len(odds)):
            # Weight with which a bucket's tokens inform the others.
            weight = (_PRIOR_TOKENS + 1.0) / (_PRIOR_TOKENS + tried[i])
            chance = 1.0 / (1.0 + exp(-shift - slope * odds[i]))
            missing = weight * (kept[i] - tried[i] * chance)
            spread = weight * tried[i] * chance * (1.0 - chance)
            up += missing
            steeper += missing * odds[i]
            shifts += spread
            shared += spread * odds[i]
            slopes += spread * odds[i] * odds[i]
        scale = shifts * slopes - shared * shared
        by_shift = (slopes * up - shared * steeper) / scale
        by_slope = (shifts * steeper - shared * up) / scale
        length = max(abs(by_shift), abs(by_slope))
        # Shortened, because a full step from a flat region overshoots.
        cut = min(1.0, _LONGEST_STEP / length) if length > 0.0 else 1.0
        shift += cut * by_shift
        slope += cut * by_slope
        if length < _DONE:
            break
    fitted[0], fitted[1] = shift, slope
    for i in range(len(odds)):
        prior = _PRIOR_TOKENS / (1.0 + exp(-shift - slope * odds[i]))
        probabilities[i] = (prior + kept[i]) / (_PRIOR_TOKENS + tried[i])
