"""Compiled part of the estimator: prior, regression and prediction. Importing this module imports numba.

A shape is samples, rows and context. The prior is its corners (rows, seconds), those of plain steps (samples,
seconds) and `terms`, see `prior`.
"""

# mypy: disable-error-code="no-untyped-def"
# Compiled functions have numba types, which annotations cannot express.

from math import exp, log2, sqrt
from pathlib import Path

import numpy as np

from kernels import jit

# Places in `terms`: seconds of a sample and of any verification in verifying steps, and of a token of context.
PER_SAMPLE, VERIFYING, PER_TOKEN = range(3)
# Columns of the table of cells: the shape, mean seconds, measurements in the mean, when the last one came, and the
# place of the shape on the axes of samples, of rows and of the context of a sample, by how far own shares reach.
SAMPLES, ROWS, CONTEXT, SECONDS, COUNT, AT, BY_SAMPLES, BY_ROWS, BY_CONTEXT = range(9)
# Standard deviations, as shares of the prior: of the whole, of reading and of attending to the context by the
# assumed time of a token, of a shape's own share, of a measurement.
_WHOLE, _READING, _ATTENDING, _OWN, _NOISE = 0.3, 4.0, 1.0, 0.06, 0.04
# How far the own share of a shape reaches, in octaves: rows, samples, context of a sample.
_ROWS_REACH, _SAMPLES_REACH, _CONTEXT_REACH = 0.7, 1.0, 2.0
# Measurements after which the weight of an older one has halved.
_HALF_LIFE = 256.0
_FEATURES = 4
# Distance beyond which a cell does not count.
_FAR = 12.0
# Ratio to its prior up to which the noise of a measurement grows with it: a prior that is wrong by orders of
# magnitude must not make all that contradicts it look like noise.
_FARTHEST = 2.0
# Predictions are at least this share of the prior.
_LEAST = 1.0 / 64.0

_entry = jit.entry(jit.source_fingerprint(Path(__file__).parent, Path(jit.__file__).parent))


@jit.kernel
def line_of(corners, x):
    """Return the value at x of a line through corners [2, k], k > 1, constant before them and straight beyond."""
    last = corners.shape[1] - 1
    if x <= corners[0, 0]:
        return corners[1, 0]
    low, high = 0, last
    while high - low > 1:
        middle = (low + high) // 2
        if corners[0, middle] <= x:
            low = middle
        else:
            high = middle
    share = (x - corners[0, low]) / (corners[0, high] - corners[0, low])
    return corners[1, low] + share * (corners[1, high] - corners[1, low])


@jit.kernel
def prior_of(corners, plains, terms, samples, rows):
    """Return the prior of a step."""
    plain = line_of(plains, samples)
    if rows <= samples:
        return plain
    return max(plain, line_of(corners, rows) + terms[PER_SAMPLE] * samples + terms[VERIFYING])


@jit.kernel
def features_of(terms, samples, rows, context, prior, features):
    """Fill the terms that deviations from the prior are sums of, in standard deviations."""
    features[0] = _WHOLE * prior
    features[1] = _READING * terms[PER_TOKEN] * context
    # Attention to a sample's context costs each of its rows the same, or each less than the one before.
    drafted = max(rows / samples - 1.0, 0.0)
    features[2] = _ATTENDING * terms[PER_TOKEN] * context * sqrt(drafted)
    features[3] = _ATTENDING * terms[PER_TOKEN] * context * drafted


@jit.kernel
def elsewhere(cells, i, by_samples, by_context):
    """Return half the squared distance of a cell on the axes of samples and context."""
    return 0.5 * ((cells[i, BY_SAMPLES] - by_samples) ** 2 + (cells[i, BY_CONTEXT] - by_context) ** 2)


@jit.kernel
def regress(corners, plains, terms, cells, now, used, shares, weights):
    """Fill the shares of the features and the weights of the cells [m] by regression on the `used` features."""
    m = len(cells)
    features, priors = np.empty((m, _FEATURES)), np.empty(m)
    for i in range(m):
        samples, rows = cells[i, SAMPLES], cells[i, ROWS]
        priors[i] = prior_of(corners, plains, terms, samples, rows)
        cells[i, BY_SAMPLES], cells[i, BY_ROWS] = log2(samples) / _SAMPLES_REACH, log2(rows) / _ROWS_REACH
        cells[i, BY_CONTEXT] = log2(1.0 + cells[i, CONTEXT] / samples) / _CONTEXT_REACH
        features_of(terms, samples, rows, cells[i, CONTEXT], priors[i], features[i])
        for k in range(_FEATURES):
            features[i, k] *= used[k]
        weights[i] = cells[i, SECONDS] - priors[i]
    # Cholesky decomposition of the covariance, row by row.
    root = np.empty((m, m))
    for i in range(m):
        for j in range(i + 1):
            far = elsewhere(cells, j, cells[i, BY_SAMPLES], cells[i, BY_CONTEXT])
            far += 0.5 * (cells[j, BY_ROWS] - cells[i, BY_ROWS]) ** 2
            covariance = _OWN * _OWN * priors[i] * priors[j] * exp(-far)
            for k in range(_FEATURES):
                covariance += features[i, k] * features[j, k]
            for k in range(j):
                covariance -= root[i, k] * root[j, k]
            if i == j:
                # The noise of the cell's mean, which grows with its age.
                age = (now - cells[i, AT]) / _HALF_LIFE
                noise = _NOISE * min(cells[i, SECONDS], _FARTHEST * priors[i])
                covariance += noise * noise * (1.0 / max(cells[i, COUNT], 1.0) + age * age)
                root[i, i] = sqrt(max(covariance, 1e-3 * noise * noise))
            else:
                root[i, j] = covariance / root[j, j]
    for i in range(m):
        for k in range(i):
            weights[i] -= root[i, k] * weights[k]
        weights[i] /= root[i, i]
    for i in range(m - 1, -1, -1):
        for k in range(i + 1, m):
            weights[i] -= root[k, i] * weights[k]
        weights[i] /= root[i, i]
    shares[:] = 0.0
    for i in range(m):
        for k in range(_FEATURES):
            shares[k] += features[i, k] * weights[i]
        weights[i] *= priors[i]


@_entry
def solve(corners, plains, terms, cells, now, shares, weights):
    """Fill the shares of the features and the weights of the cells [m] by Gaussian-process regression."""
    used = np.ones(_FEATURES)
    regress(corners, plains, terms, cells, now, used, shares, weights)
    # No context makes a step faster.
    for k in range(1, _FEATURES):
        if shares[k] < 0.0:
            used[k] = 0.0
    if used.min() == 0.0:
        regress(corners, plains, terms, cells, now, used, shares, weights)


@_entry
def predict(corners, plains, terms, cells, shares, weights, samples, rows, context, seconds):
    """Fill seconds [k] of steps with rows [k], which rise; the seconds never fall."""
    m = len(cells)
    by_samples, by_context = log2(samples) / _SAMPLES_REACH, log2(1.0 + context / samples) / _CONTEXT_REACH
    near, places, features = np.empty(m), np.empty(m), np.empty(_FEATURES)
    used = 0
    for i in range(m):
        far = elsewhere(cells, i, by_samples, by_context)
        if far < _FAR:
            near[used] = _OWN * _OWN * weights[i] * exp(-far)
            places[used] = cells[i, BY_ROWS]
            used += 1
    longest = 0.0
    for k in range(len(rows)):
        prior = prior_of(corners, plains, terms, samples, rows[k])
        features_of(terms, samples, rows[k], context, prior, features)
        own, place = 0.0, log2(rows[k]) / _ROWS_REACH
        for i in range(used):
            far = 0.5 * (places[i] - place) * (places[i] - place)
            if far < _FAR:
                own += near[i] * exp(-far)
        found = prior * (1.0 + own)
        for j in range(_FEATURES):
            found += shares[j] * features[j]
        longest = max(longest, found, prior * _LEAST)
        seconds[k] = longest
