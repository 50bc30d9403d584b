"""The fleet: instances, weight updates, knobs, the drafter that is trained online, and decisions."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any


class InstanceState(StrEnum):
    """State of an instance. A DEAD instance can become SERVING only by a weight update."""

    UNSPECIFIED = "unspecified"
    STALE = "stale"
    SERVING = "serving"
    PAUSED = "paused"
    DRAINING = "draining"
    DEAD = "dead"


@dataclass(frozen=True, slots=True)
class InstanceLoad:
    """Load of an instance, which it reports with every heartbeat."""

    running: int = 0
    waiting: int = 0
    kv_usage: float = 0.0
    """Share of KV blocks in use, 0 to 1."""
    step_seconds: float = 0.0
    """Recent mean engine step."""
    generated_tokens: int = 0
    steps: int = 0


@dataclass(frozen=True, slots=True)
class Instance:
    """One generation instance."""

    instance_id: str
    epoch: int
    """Increases each time a process registers under the same id."""
    address: str
    state: InstanceState
    policy_version: int
    load: InstanceLoad
    max_running: int
    max_model_len: int
    vocab_size: int
    model: str
    device: str
    registered_at: float
    metrics_address: str
    refused_features: Mapping[str, str] = field(default_factory=dict)
    """Features that the instance does not offer for its model, such as drafts, with reasons."""


@dataclass(frozen=True, slots=True)
class EffectiveKnobs:
    """All knobs with the values that some instances use."""

    knobs: Mapping[str, Any]
    """The instances' own configuration under the settings of fleet, model, pool and run."""
    instance_ids: tuple[str, ...]
    """Empty: the scope has no instance; these are the knobs of an instance without any configuration."""


@dataclass(frozen=True, slots=True)
class KnobSetting:
    """The knobs that are set for a run, a model, a pool or the whole fleet.

    Two settings are equal if their `revision` and `knobs` are. `set_knobs` reads only these.
    """

    revision: int
    """A change names its base revision, and is refused (AbortedError) after another change. 0: never set."""
    knobs: Mapping[str, Any]
    effective: tuple[EffectiveKnobs, ...] = field(default=(), compare=False)
    """Knobs that the instances of the scope use, or use for the samples of the run; most instances first."""
    pending: tuple[str, ...] = field(default=(), compare=False)
    """Instances that have not confirmed the latest change, or have not reported their configuration."""


@dataclass(frozen=True, slots=True)
class KnobChange:
    """Outcome of a change of knobs."""

    revision: int
    applied: tuple[str, ...]
    """Instances that apply it."""
    pending: tuple[str, ...]
    """Instances that have not answered; they get the change as soon as they can be reached."""


@dataclass(frozen=True, slots=True)
class Drafter:
    """State of the drafter that is trained online."""

    drafter_version: int
    """Published; 0: none yet."""
    published_at: float
    """0: none yet."""
    path: str
    """Its folder, as the instances see it."""
    updates: int
    samples_used: int
    policy_version: int
    """Version of the policy whose distribution the drafter learned last."""
    acceptance_length: float
    """Acceptance length on held-out samples, when it was last compared with a candidate; 0: never."""
    candidate_acceptance_length: float
    """Acceptance length of that candidate."""
    rejected_candidates: int
    rollbacks: int


@dataclass(frozen=True, slots=True)
class Decision:
    """One decision of the platform, with its explanation."""

    time: float
    kind: str
    reason: str
    predicted_gain: float
    """Predicted gain as a share: 0.1 is ten percent."""
    details: Mapping[str, Any]
    run_id: str = ""
    """Empty: it is about the whole fleet."""


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
    """They keep their tokens and continue under the new version; `Sample.version_spans` has both."""


@dataclass(frozen=True, slots=True)
class InstanceUpdate:
    """Outcome of a weight update on one instance."""

    instance_id: str
    applied: bool
    policy_version: int
    """Version that the instance serves now."""
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
    """Version that is served until the update is finished."""


@dataclass(frozen=True, slots=True)
class StreamStarted:
    """A claimed weight update, and the instance that its weights are pushed to."""

    update_id: str
    version: int
    """Version that the weights will have."""
    instance_id: str
    address: str
    ticket: str = field(repr=False)
    """Bearer token of the push."""


@dataclass(frozen=True, slots=True)
class CollectiveStarted:
    """A claimed weight update, and the instances that take part in its broadcast."""

    update_id: str
    version: int
    """Version that the weights will have."""
    instance_ids: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class UpdateFinished:
    """A published weight update, and the versions that are published now."""

    policy_version: int
    drafter_version: int
    instances: tuple[InstanceUpdate, ...]
    aborted_samples: int = 0
    continued_samples: int = 0
    """Samples that were unfinished, and were aborted or continued."""


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
