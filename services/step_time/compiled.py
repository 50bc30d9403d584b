"""Compiled functions of the estimator: prior, regression and prediction. Importing this module imports numba.

A shape is samples, rows and context. The prior is a `StepTimePrior`.
"""

# mypy: disable-error-code="no-untyped-def"
# Compiled functions have numba types, which annotations cannot express.

from math import exp, log2, sqrt
from pathlib import Path

import numpy as np

from kernels import jit

# Columns of the table of cells: the shape, mean seconds, measurements in the mean, and when the last one came.
SAMPLES, ROWS, CONTEXT, SECONDS, COUNT, AT = range(6)
# Places in the values derived from a shape: its prior; the terms that deviations from the prior are sums of, in
# standard deviations; and its place on the axes of samples, rows and context of a sample, in units of the reaches.
PRIOR, FEATURES, AXES, _DERIVED = 0, 1, 5, 8
# Standard deviations: of the whole, as a share of the prior; of reading and of attending to the context, as
# multiples of the assumed time of a token; of a shape's own share and of a measurement, as shares of the prior.
_WHOLE, _READING, _ATTENDING, _OWN, _NOISE = 0.3, 4.0, 1.0, 0.06, 0.04
# Reach of the own share of a shape, in octaves: rows, samples, context of a sample.
_ROWS_REACH, _SAMPLES_REACH, _CONTEXT_REACH = 0.7, 1.0, 2.0
# Measurements after which the weight of an older one has halved.
_HALF_LIFE = 256.0
# Half the squared distance beyond which a cell does not count.
_FAR = 12.0
# Ratio to its prior up to which the noise of a measurement grows with it: if a prior is wrong by orders of
# magnitude, the measurements that contradict it must not look like noise.
_FARTHEST = 2.0
# Predictions are at least this share of the prior.
_LEAST = 1.0 / 64.0

_entry = jit.entry(jit.source_fingerprint(Path(__file__).parent, Path(jit.__file__).parent))


@jit.kernel
def line_of(corners, x):
    """Return the value at x of a line through corners [2, k], k > 1, constant before them and straight beyond."""
    places, values = corners
    k = min(max(np.searchsorted(places, x), 1), len(places) - 1)
    share = (max(x, places[0]) - places[k - 1]) / (places[k] - places[k - 1])
    return values[k - 1] + share * (values[k] - values[k - 1])


@jit.kernel
def derive(prior, samples, rows, context, derived):
    """Fill the values derived from a shape."""
    seconds, reading = line_of(prior.plains, samples), prior.per_token * context
    if rows > samples:
        seconds = max(seconds, line_of(prior.corners, rows) + prior.per_sample * samples + prior.verifying)
    derived[PRIOR] = seconds
    derived[FEATURES] = _WHOLE * seconds
    derived[FEATURES + 1] = _READING * reading
    # Attention to a sample's context costs the same for each of its rows, or less for each further row.
    drafted = max(rows / samples - 1.0, 0.0)
    derived[FEATURES + 2] = _ATTENDING * reading * sqrt(drafted)
    derived[FEATURES + 3] = _ATTENDING * reading * drafted
    derived[AXES] = log2(samples) / _SAMPLES_REACH
    derived[AXES + 1] = log2(rows) / _ROWS_REACH
    derived[AXES + 2] = log2(1.0 + context / samples) / _CONTEXT_REACH


@jit.kernel
def shared(a, b):
    """Return the covariance of the own shares of two shapes."""
    far = 0.0
    for k in range(AXES, _DERIVED):
        far += 0.5 * (a[k] - b[k]) * (a[k] - b[k])
    return _OWN * _OWN * a[PRIOR] * b[PRIOR] * exp(-far) if far < _FAR else 0.0


@jit.kernel
def regress(derived, cells, now, shares, weights):
    """Fill the shares of the features and the weights of the cells [m] by regression on their derived values."""
    m = len(cells)
    # Cholesky decomposition of the covariance, row by row.
    root = np.empty((m, m))
    for i in range(m):
        for j in range(i + 1):
            covariance = shared(derived[i], derived[j])
            for k in range(FEATURES, AXES):
                covariance += derived[i, k] * derived[j, k]
            for k in range(j):
                covariance -= root[i, k] * root[j, k]
            if i == j:
                # The noise of the cell's mean, which grows with its age.
                age = (now - cells[i, AT]) / _HALF_LIFE
                noise = _NOISE * min(cells[i, SECONDS], _FARTHEST * derived[i, PRIOR])
                covariance += noise * noise * (1.0 / max(cells[i, COUNT], 1.0) + age * age)
                root[i, i] = sqrt(max(covariance, 1e-3 * noise * noise))
            else:
                root[i, j] = covariance / root[j, j]
    for i in range(m):
        weights[i] = cells[i, SECONDS] - derived[i, PRIOR]
        for k in range(i):
            weights[i] -= root[i, k] * weights[k]
        weights[i] /= root[i, i]
    for i in range(m - 1, -1, -1):
        for k in range(i + 1, m):
            weights[i] -= root[k, i] * weights[k]
        weights[i] /= root[i, i]
    shares[:] = 0.0
    for i in range(m):
        for k in range(len(shares)):
            shares[k] += derived[i, FEATURES + k] * weights[i]


@jit.kernel
def solve(prior, cells, now, derived, shares, weights):
    """Fill the derived values [m, 8] and the weights [m] of the cells, and the shares of the features [4]."""
    for i in range(len(cells)):
        derive(prior, cells[i, SAMPLES], cells[i, ROWS], cells[i, CONTEXT], derived[i])
    regress(derived, cells, now, shares, weights)
    # More context never makes a step faster. Once one term is left out, another may become negative.
    while shares[1:].min() < 0.0:
        for k in range(1, len(shares)):
            if shares[k] < 0.0:
                derived[:, FEATURES + k] = 0.0
        regress(derived, cells, now, shares, weights)


@_entry
def predict(prior, cells, now, derived, shares, weights, samples, rows, context, seconds):
    """Fill seconds [k] of steps with rows [k], which rise; the seconds never fall. Solves first if now is not 0."""
    if now > 0.0:
        solve(prior, cells, now, derived, shares, weights)
    longest, shape = 0.0, np.empty(_DERIVED)
    for k in range(len(rows)):
        derive(prior, samples, rows[k], context, shape)
        found = shape[PRIOR]
        for i in range(len(cells)):
            found += weights[i] * shared(derived[i], shape)
        for j in range(len(shares)):
            found += shares[j] * shape[FEATURES + j]
        longest = max(longest, found, shape[PRIOR] * _LEAST)
        seconds[k] = longest
