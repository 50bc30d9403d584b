"""Steps as a replay would give them."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import numpy as np

from bench.rollout.replay import ReplayedStep
from bench.rollout.training import TrainedStep
from bench.scrape import Metrics
from examples.tinymath.curriculum import TINYMATH, Curriculum
from paceline import FinishReason, Group, InstanceSpan, Provenance, Sample, SampleKey, SampleStatus


def sample(slot: int, tokens: Sequence[int], prompt_id: str = "p", **provenance: Any) -> Sample:
    """Return a finished sample; provenance fields by name."""
    return Sample(
        prompt_id=prompt_id,
        slot=slot,
        token_ids=np.array(tokens, np.int64),
        logprobs=np.zeros(len(tokens), np.float32),
        finish_reason=FinishReason.STOP,
        status=SampleStatus.COMPLETED,
        version_spans=(),
        provenance=Provenance(**provenance),
        seed=slot,
    )


def span(instance_id: str, begin: float, end: float) -> tuple[InstanceSpan, ...]:
    """Return a sample's only span."""
    return (InstanceSpan(instance_id, 0, 1, begin, end),)


def named(samples: Sequence[Sample]) -> dict[SampleKey, Sample]:
    """Samples by key."""
    return {each.key: each for each in samples}


def step(*samples: Sample, metrics: Mapping[str, Metrics] | None = None, **changes: Any) -> ReplayedStep:
    """Return a step of a fleet of two, a and b."""
    values: dict[str, Any] = {
        "step": 0,
        "samples": named(samples),
        "fleet": ("a", "b"),
        "rollout_seconds": 4.0,
        "update_seconds": 2.0,
        "push_seconds": 0.5,
        "covered": (),
        "metrics": metrics or {},
    }
    return ReplayedStep(**(values | changes))


def trained(step: int, groups: Sequence[Group], samples: Sequence[Sample], **changes: Any) -> TrainedStep:
    """Return a step as a trainer would have recorded it."""
    values: dict[str, Any] = {
        "weights": Path("w"),
        "rollout_seconds": 1.0,
        "update_seconds": 1.0,
        "push_seconds": 1.0,
        "reward": 0.0,
        "clip_fraction": 0.0,
        "moved_kl": 0.0,
    }
    return TrainedStep(step=step, groups=tuple(groups), samples=named(samples), **(values | changes))


def rewarded(reward: Callable[[str], float]) -> Curriculum:
    """Return tasks whose every response has the reward of its prompt's name."""
    return replace(TINYMATH, load=lambda name: cast(Any, SimpleNamespace(reward=lambda text: reward(name))))
