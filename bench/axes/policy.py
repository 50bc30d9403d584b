"""Synthetic policy: a hash of the context defines the distribution of the next token. Pure and reproducible.

It has one parameter for each property that decides how well drafts hold:

- Entropy is spread as in language models: most tokens are nearly certain, and a share of the contexts are forks.
- KL of an update: each version adds a drift to the logits. The drift is drawn independently for each context and
  grows with the square root of the number of updates.
- Temperature: the logits, drift included, are divided by it, which changes both entropy and KL.
- Return to a common text after a divergence: at some positions (`anchored`) the distribution depends on the prompt
  and the position only. Two samples with the same noise draw the same token there.
- Repetition: after some tokens (`formulaic`) the next one depends on the last token only, at any position.

Noise is shared as in coupled sampling: the Gumbel noise of a token is a function of seed, position and token.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

Hashes = NDArray[np.uint64]
Floats = NDArray[np.float64]
Ints = NDArray[np.int64]
_CANDIDATES = 64
"""Maximum number of candidate tokens of a context."""
_FORKS = 0.4
"""Share of contexts that carry nearly all of the entropy."""
_CERTAIN = 0.02
"""Entropy in nats of a context that is not a fork."""
_REGION = 64
"""Positions over which a context that is not formulaic keeps its distribution."""
_WARM, _ANCHOR, _FORMULA, _FORK, _TOKEN, _STRIDE, _DRIFT, _NOISE, _RADIUS = map(np.uint64, range(1, 10))


@dataclass(frozen=True, slots=True)
class PolicySizes:
    """Parameters of a policy. `entropy`, and `kl` of an update, are in nats a token, at temperature 1."""

    vocabulary: int
    """A power of two."""
    entropy: float
    kl: float
    anchored: float = 0.0
    formulaic: float = 0.3
    temperature: float = 1.0


@dataclass(frozen=True, slots=True)
class Conditions:
    """Distributions of the next tokens of n samples: candidates [n, m] and their log-probabilities [n, m]."""

    tokens: Ints
    logprobs: Floats


@dataclass(slots=True)
class SyntheticPolicy:
    """Draw texts. A version is a number of updates; two versions differ by the drift between them."""

    sizes: PolicySizes
    _certain: Floats = field(init=False)
    _fork: Floats = field(init=False)
    _drift: float = field(init=False)

    def __post_init__(self) -> None:
        m = min(_CANDIDATES, self.sizes.vocabulary)
        if self.sizes.vocabulary & (self.sizes.vocabulary - 1):
            raise ValueError(f"vocabulary: is {self.sizes.vocabulary}; must be a power of two")
        entropy = max(_CERTAIN, (self.sizes.entropy - (1 - _FORKS) * _CERTAIN) / _FORKS)
        if not entropy < 0.95 * np.log(m):
            raise ValueError(f"entropy: is {self.sizes.entropy}; too much for {m} candidates")
        self._certain, self._fork = (_zipf(m, wanted) for wanted in (_CERTAIN, entropy))
        # The KL of a normal drift of deviation s is s^2 / 2 times the share that two draws do not have in common.
        shares = ((1 - _FORKS, self._certain), (_FORKS, self._fork))
        apart = sum(share * (1 - float((np.exp(logs) ** 2).sum())) for share, logs in shares)
        self._drift = float(np.sqrt(2 * self.sizes.kl / apart))

    def conditions(self, prompts: Hashes, ages: Ints, position: int, last: Ints) -> Conditions:
        """Return the distributions of the next tokens.

        Args:
            prompts: hashes of the prompts, [n].
            ages: number of updates by which each sample's policy is older than the current one, [n].
            position: position of the next token in the response.
            last: previous tokens, [n].
        """
        sizes, here = self.sizes, np.uint64(position)
        token = last.astype(np.uint64)
        anchored = _uniform(_mixed(prompts, _ANCHOR, here)) < sizes.anchored
        formulaic = _uniform(_mixed(prompts, _FORMULA, token)) < sizes.formulaic
        region = np.where(formulaic, np.uint64(0), np.uint64(1 + position // _REGION))
        context = np.where(anchored, _mixed(prompts, _ANCHOR, _WARM, here), _mixed(prompts, region, token))
        places = np.arange(len(self._fork), dtype=np.uint64)
        # An odd stride visits every token once.
        start, stride = _mixed(context, _TOKEN)[:, None], _mixed(context, _STRIDE)[:, None] | np.uint64(1)
        tokens = ((start + stride * places) & np.uint64(sizes.vocabulary - 1)).astype(np.int64)
        fork = _uniform(_mixed(context, _FORK)) < _FORKS
        logits = np.where(fork[:, None], self._fork, self._certain)
        drift = _normal(_mixed(context, _DRIFT, ages.astype(np.uint64))[:, None] + places)
        logits = (logits + self._drift * np.sqrt(ages)[:, None] * drift) / sizes.temperature
        return Conditions(tokens, logits - np.log(np.exp(logits).sum(1, keepdims=True)))

    def draw(self, prompts: Hashes, seeds: Hashes, ages: Ints, length: int) -> NDArray[np.int32]:
        """Return the responses of n samples, [n, length], drawn with the noise of their seeds; see `conditions`."""
        found = np.zeros((len(prompts), length), np.int32)
        last, rows = np.zeros(len(prompts), np.int64), np.arange(len(prompts))
        for position in range(length):
            made = self.conditions(prompts, ages, position, last)
            here = _mixed(seeds, _NOISE, np.uint64(position))[:, None]
            noise = _gumbel(_mixed(here, made.tokens.astype(np.uint64)))
            last = made.tokens[rows, (made.logprobs + noise).argmax(1)]
            found[:, position] = last
        return found


def hashes(*parts: int, count: int) -> Hashes:
    """Return `count` hashes that depend on the given numbers."""
    return _mixed(*map(np.uint64, parts), np.arange(count, dtype=np.uint64))


def _zipf(m: int, entropy: float) -> Floats:
    """Return log-probabilities [m] that follow a power law of the rank and have the given entropy."""
    low, high = 0.0, 40.0
    ranks = np.log(np.arange(1, m + 1))
    for _ in range(60):
        power = (low + high) / 2
        logs = -power * ranks
        logs -= np.log(np.exp(logs).sum())
        low, high = (power, high) if -(np.exp(logs) * logs).sum() > entropy else (low, power)
    return logs


def _mixed(*parts: Hashes | np.uint64) -> Hashes:
    """Return hashes of numbers, by splitmix64 over each in turn; shapes are broadcast."""
    found: Hashes = np.asarray(np.uint64(0x9E3779B97F4A7C15))
    with np.errstate(over="ignore"):
        for part in parts:
            found = (found ^ part) + np.uint64(0x9E3779B97F4A7C15)
            found = (found ^ (found >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
            found = (found ^ (found >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
            found = found ^ (found >> np.uint64(31))
    return found


def _uniform(found: Hashes) -> Floats:
    return ((found >> np.uint64(11)).astype(np.float64) + 0.5) * 2.0**-53


def _gumbel(found: Hashes) -> Floats:
    return np.asarray(-np.log(-np.log(_uniform(found))))


def _normal(found: Hashes) -> Floats:
    """Return standard normal numbers, each from two uniform ones (Box-Muller)."""
    radius = np.sqrt(-2 * np.log(_uniform(_mixed(found, _RADIUS))))
    return np.asarray(radius * np.cos(2 * np.pi * _uniform(_mixed(found, _WARM))))
