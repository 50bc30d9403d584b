"""Weight updates: their phases, and what they did on each instance."""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import StrEnum


class WeightTarget(StrEnum):
    """Target of a weight update. There is no "all"."""

    POLICY = "policy"
    DRAFTER = "drafter"


class InFlight(StrEnum):
    """Treatment of samples, of any run, that are unfinished when weights are applied."""

    REFUSE = "refuse"
    """The weights are not applied (reason SAMPLES_UNFINISHED), and stay staged."""
    ABORT = "abort"
    """They end as ABORTED, with the tokens that they have."""
    CONTINUE = "continue"
    """They keep their tokens and go on under the new version; `Sample.version_spans` has both."""


@dataclass(frozen=True, slots=True)
class InstanceUpdate:
    """Outcome of a weight update on one instance."""

    instance_id: str
    applied: bool
    policy_version: int
    """Served by the instance now."""
    checksum: str
    error: str
    """Set when the instance failed; it serves nothing until it has the published version."""
    stage_seconds: float
    apply_seconds: float
    dropped_blocks: int
    """KV blocks of the old version that were dropped."""


@dataclass(frozen=True, slots=True)
class UpdateStarted:
    """A claimed weight update."""

    update_id: str
    policy_version: int
    """Served until the update is finished."""


@dataclass(frozen=True, slots=True)
class StreamStarted:
    """A claimed weight update, and the instance that its weights are pushed to."""

    update_id: str
    version: int
    """The version that the weights will be."""
    instance_id: str
    address: str
    ticket: str = field(repr=False)
    """Bearer token of the push."""


@dataclass(frozen=True, slots=True)
class CollectiveStarted:
    """A claimed weight update, and the instances that take part in its broadcast."""

    update_id: str
    version: int
    """The version that the weights will be."""
    instance_ids: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class UpdateFinished:
    """A published weight update, and the versions that are published now."""

    policy_version: int
    drafter_version: int
    instances: tuple[InstanceUpdate, ...]
    aborted_samples: int = 0
    continued_samples: int = 0
    """Samples that were unfinished, and ended or went on."""


@dataclass(frozen=True, slots=True)
class Versions:
    """The published versions, and the update in progress."""

    policy_version: int
    drafter_version: int
    policy_path: str
    policy_checksum: str
    update_id: str
    """The update in progress, or empty."""
    instances: tuple[InstanceUpdate, ...]
