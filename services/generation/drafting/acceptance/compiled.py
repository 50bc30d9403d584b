"""The compiled part of `table`. Importing this module imports numba."""

# mypy: disable-error-code="no-untyped-def"
# Compiled functions carry numba types, which annotations cannot say.

from math import exp
from pathlib import Path

from kernels.coupled_sampler import jit

# Weight of a bucket's moved prior, in tokens tried; as many also say half of what a bucket can say of others.
_PRIOR_TOKENS = 12.0
# How far off priors are expected to be: variances of the shift, in log-odds, and of the slope.
_SHIFT_VARIANCE = 2.0
_SLOPE_VARIANCE = 1.0
# The fit: most steps of it, the longest, and the length at which it is done. The last one more than halves the
# error's digits, so that what is left does not show.
_MOST_STEPS, _LONGEST_STEP, _DONE = 30, 1.0, 1e-3

_entry = jit.entry(jit.source_fingerprint(Path(__file__).parent, Path(jit.__file__).parent))


@_entry
def fit(odds, tried, kept, moved, probabilities):
    """Move the priors, by Newton's method from where they are, and count each bucket's own tokens.

    odds, tried, kept [buckets]; moved [2] holds shift and slope; probabilities [buckets] is filled.
    """
    shift, slope = moved[0], moved[1]
    for _ in range(_MOST_STEPS):
        up, steeper = -shift / _SHIFT_VARIANCE, (1.0 - slope) / _SLOPE_VARIANCE
        shifts, shared, slopes = 1.0 / _SHIFT_VARIANCE, 0.0, 1.0 / _SLOPE_VARIANCE
        for i in range(len(odds)):
            # As far as a bucket's tokens say something of the others.
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
        # A long step from where the curve is flat overshoots.
        cut = min(1.0, _LONGEST_STEP / length) if length > 0.0 else 1.0
        shift += cut * by_shift
        slope += cut * by_slope
        if length < _DONE:
            break
    moved[0], moved[1] = shift, slope
    for i in range(len(odds)):
        prior = _PRIOR_TOKENS / (1.0 + exp(-shift - slope * odds[i]))
        probabilities[i] = (prior + kept[i]) / (_PRIOR_TOKENS + tried[i])
