"""Workload of the fleet benchmark: every process derives lengths and tokens from a sample's seed. Pure.

Lengths are log-normal, the usual model of response lengths: half of the responses have at most 320 tokens, the mean
is about 430, and one in a hundred reaches the limit of 2,048, more than six times the median. Options change median
and limit. The list is generated once with a fixed seed. A sample's seed selects its entry, so that every fleet and
every commit gets the same responses.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np

from services.generation.loop.work_stream import CheckpointRules

VOCABULARY = 150_000
MAX_TOKENS = 2048
"""Usual limit of a response in tokens."""
PROMPT_TOKENS = 128
GROUP = 8
"""Samples of one prompt."""
MEDIAN = 320
"""Median response length in tokens."""
_SIGMA = 0.8
_SEED = 20
_ENTRIES = 4096
_POOL = 1 << 16


@dataclass(frozen=True, slots=True)
class SimulatedPolicy:
    """Stand-in for a model: a sample's response is a slice of a fixed list, chosen by the sample's seed.

    No response has more than `longest` tokens.
    """

    longest: int
    lengths: list[int]
    tokens: list[int]
    logprobs: list[float]

    @classmethod
    def create(cls, longest: int = MAX_TOKENS, median: float = MEDIAN) -> SimulatedPolicy:
        """Return the policy that all processes of a run share. `median` is of the lengths before they are cut."""
        numbers = np.random.default_rng(_SEED)
        lengths = np.clip(np.exp(numbers.normal(np.log(median), _SIGMA, _ENTRIES)), 8, longest)
        tokens = numbers.integers(1, VOCABULARY, _POOL + longest)
        logprobs = -numbers.exponential(0.5, _POOL + longest).astype(np.float32)
        return cls(longest, lengths.astype(int).tolist(), tokens.tolist(), logprobs.tolist())

    def length(self, seed: int) -> int:
        """Return the number of response tokens of a sample."""
        return self.lengths[seed % len(self.lengths)]

    def slice(self, seed: int, begin: int, end: int) -> tuple[list[int], list[float]]:
        """Return the tokens and log-probabilities at these positions of a response."""
        # Use other bits of the seed than the length does.
        start = (seed >> 20) % _POOL
        return self.tokens[start + begin : start + end], self.logprobs[start + begin : start + end]


@dataclass(frozen=True, slots=True)
class Reporting:
    """Pace at which a simulated instance decodes and reports: `speed` tokens a second for every running sample."""

    speed: float
    rules: CheckpointRules

    @classmethod
    def checkpoints(cls, speed: float, compression: float) -> Reporting:
        """Return the platform's default. Time runs `compression` times as fast."""
        rules = CheckpointRules()
        return cls(speed * compression, replace(rules, seconds=rules.seconds / compression))
