"""What the service and its process that trains say to each other. Plain data."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from services.drafter.config import DrafterConfig
from services.drafter.rollout import Rollout

FACTORY = "services.drafter.learning.learner:Learner"
"""What learns, as "module:class"."""


@dataclass(frozen=True, slots=True)
class Begin:
    """The first message: who learns, and how."""

    config: DrafterConfig
    factory: str = FACTORY


@dataclass(frozen=True, slots=True)
class Part:
    """Rollouts of one policy version with their weights. `path`: its folder; None: the policy that is loaded."""

    version: int
    path: Path | None
    rollouts: tuple[Rollout, ...]
    weights: tuple[float, ...]


@dataclass(frozen=True, slots=True)
class Updated:
    """What came of an update. `kd_loss` is per token, NaN if nothing could be learned; `missed` are rollouts whose
    policy could not be loaded, and that were learned from with the one before."""

    kd_loss: float
    samples: int
    tokens: int
    skipped: int
    seconds: float
    policy_version: int
    missed: int


@dataclass(frozen=True, slots=True)
class Compared:
    """Acceptance lengths on the same rollouts; `current` is None if the drafter in use cannot be read."""

    candidate: float
    current: float | None
    kd_loss: float
    samples: int


class Failed(Exception):
    """The learner raised; the message says what. Nothing of it was kept."""
