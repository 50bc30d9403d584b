"""Repeat the last step of a run without speculation, to compare the time and to check that all tokens are equal."""

from __future__ import annotations

import copy
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from torch import nn

from examples.tinymath.options import Options
from examples.tinymath.train import collect
from paceline import Client, Group, KnobSetting, Sample


@dataclass(frozen=True, slots=True)
class SampledStep:
    """A sampled step, with the weights of the sampling policy."""

    step: int
    groups: Sequence[Group]
    samples: Sequence[Sample]
    seconds: float
    weights: dict[str, Any]

    @classmethod
    def of(
        cls, model: nn.Module, step: int, groups: Sequence[Group], samples: Sequence[Sample], seconds: float
    ) -> SampledStep:
        """Record a step, with a copy of the policy before its update."""
        return cls(step, groups, samples, seconds, copy.deepcopy(model.state_dict()))


@dataclass(frozen=True, slots=True)
class PlainComparison:
    """Comparison of a step with the same step decoded without speculation."""

    seconds: float
    plain_seconds: float
    tokens: int
    differing: int
    """Number of tokens from the first difference of each sample on."""

    def __str__(self) -> str:
        times = self.plain_seconds / self.seconds
        return (
            f"The last step again, decoded plainly: {self.plain_seconds:.2f} s, {times:.2f} times as long as "
            f"{self.seconds:.2f} s; {self.differing} of {self.tokens} tokens differ."
        )


def compare(client: Client, run_id: str, kept: SampledStep, options: Options) -> PlainComparison:
    """Sample a step again without speculation. Needs a policy service; leaves the weights of the step published."""
    client.set_knobs(run_id, KnobSetting(0, {"speculation": False}))
    with client.run(run_id, seed=options.seed) as run:
        run.push_weights(kept.weights)
        began = time.monotonic()
        samples = collect(run.rollout(kept.step, list(kept.groups), options.sampling), lambda *_: None)
        seconds = time.monotonic() - began
    return PlainComparison(
        kept.seconds, seconds, sum(len(each.token_ids) for each in samples), differing(kept.samples, samples)
    )


def differing(ours: Sequence[Sample], plain: Sequence[Sample]) -> int:
    """Return the number of tokens from the first difference of each sample on."""
    known = {each.key: each.token_ids for each in ours}
    return sum(_after_first(known[each.key], each.token_ids) for each in plain)


def _after_first(ours: np.ndarray[Any, Any], plain: np.ndarray[Any, Any]) -> int:
    both = min(len(ours), len(plain))
    agreed = int(np.cumprod(ours[:both] == plain[:both]).sum())
    return max(len(ours), len(plain)) - agreed
