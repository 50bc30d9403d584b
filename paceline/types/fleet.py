"""The fleet: instances, weight updates, knobs, the drafter that is trained online, and decisions."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any


class InstanceState(StrEnum):
    """State of an instance. A DEAD instance can become SERVING only by a weight update."""

    UNSPECIFIED = "unspecified"
    """The service did not say."""
    STALE = "stale"
    """Registered, without the published weights."""
    SERVING = "serving"
    """Has the published weights and generates."""
    PAUSED = "paused"
    """Makes no engine steps until it is resumed."""
    DRAINING = "draining"
    """Gets no new samples, and hands over the ones that it has."""
    DEAD = "dead"
    """Its heartbeat or connection was lost."""


@dataclass(frozen=True, slots=True)
class InstanceLoad:
    """Load of an instance, which it reports with every heartbeat."""

    running: int = 0
    """Samples in the engine's batch."""
    waiting: int = 0
    """Samples that wait for room in the engine's batch."""
    kv_usage: float = 0.0
    """Share of KV blocks in use, 0 to 1."""
    step_seconds: float = 0.0
    """Recent mean engine step."""
    generated_tokens: int = 0
    """Tokens generated since the process started."""
    steps: int = 0
    """Engine steps since the process started."""


@dataclass(frozen=True, slots=True)
class Instance:
    """One generation instance."""

    instance_id: str
    """Name of the instance."""
    epoch: int
    """Increases each time a process registers under the same id."""
    address: str
    """host:port at which the gateway reaches it."""
    state: InstanceState
    """State of the instance."""
    policy_version: int
    """Version of the weights that it has."""
    load: InstanceLoad
    """Its load at the last heartbeat."""
    max_running: int
    """Most samples in the engine's batch."""
    max_model_len: int
    """Most tokens of prompt and response together."""
    vocab_size: int
    """Number of token ids of the model."""
    model: str
    """Name of the model."""
    device: str
    """Name of the accelerator or processor."""
    registered_at: float
    """Seconds since the epoch."""
    metrics_address: str
    """host:port of its metrics."""
    refused_features: Mapping[str, str] = field(default_factory=dict)
    """Features that the instance does not offer for its model, such as drafts, with reasons."""
    keeps_kv: bool = False
    """True if it can finish an update with `InFlight.KEEP_KV`."""


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
    """Values by the names of the knobs (docs/policy.md); the others keep their defaults."""
    effective: tuple[EffectiveKnobs, ...] = field(default=(), compare=False)
    """Knobs that the instances of the scope use, or use for the samples of the run; most instances first."""
    pending: tuple[str, ...] = field(default=(), compare=False)
    """Instances that have not confirmed the latest change, or have not reported their configuration."""


@dataclass(frozen=True, slots=True)
class KnobChange:
    """Outcome of a change of knobs."""

    revision: int
    """Revision that the change has made."""
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
    """Optimizer updates of the learner."""
    samples_used: int
    """Samples in these updates."""
    policy_version: int
    """Version of the policy whose distribution the drafter learned last."""
    acceptance_length: float
    """Acceptance length on held-out samples, when it was last compared with a candidate; 0: never."""
    candidate_acceptance_length: float
    """Acceptance length of that candidate."""
    rejected_candidates: int
    """Candidates that were not better than the published drafter."""
    rollbacks: int
    """Versions that were taken back."""


@dataclass(frozen=True, slots=True)
class Decision:
    """One decision of the platform, with its explanation."""

    time: float
    """Seconds since the epoch."""
    kind: str
    """Kind of decision, on which the names in `details` depend."""
    reason: str
    """Why it was made, for people."""
    predicted_gain: float
    """Predicted gain as a share: 0.1 is ten percent."""
    details: Mapping[str, Any]
    """Figures of this kind of decision, by name."""
    run_id: str = ""
    """Empty: it is about the whole fleet."""


class WeightTarget(StrEnum):
    """Target of a weight update. There is no "all"."""

    POLICY = "policy"
    """The model that is sampled."""
    DRAFTER = "drafter"
    """The drafter that is trained online."""


class InFlight(StrEnum):
    """Treatment of samples, of any run, that are unfinished when weights are applied."""

    REFUSE = "refuse"
    """The weights are not applied (reason SAMPLES_UNFINISHED), and stay staged."""
    ABORT = "abort"
    """They end as ABORTED, with the tokens that they have."""
    CONTINUE = "continue"
    """They keep their tokens and continue under the new version; `Sample.version_spans` has both."""
    KEEP_KV = "keep_kv"
    """As CONTINUE, but those that decode keep their KV: their tokens come sooner, and are samples of no single
    version (`VersionSpan.mixed_kv`). Refused if an instance keeps none (reason KV_NOT_KEPT); the weights stay
    staged."""


@dataclass(frozen=True, slots=True)
class InstanceUpdate:
    """Outcome of a weight update on one instance."""

    instance_id: str
    """Name of the instance."""
    applied: bool
    """True if the instance serves the new weights."""
    policy_version: int
    """Version that the instance serves now."""
    checksum: str
    """Checksum of the weights that the instance has."""
    error: str
    """Set when the instance failed; it serves nothing until it has the published version."""
    stage_seconds: float
    """Seconds that it took to read and check the weights, while it generated."""
    apply_seconds: float
    """Seconds between two engine steps in which the weights were applied."""
    dropped_blocks: int
    """KV blocks of the old version that were dropped."""
    kept_samples: int = 0
    """Samples that continue with KV of earlier versions, with `InFlight.KEEP_KV`."""


@dataclass(frozen=True, slots=True)
class UpdateStarted:
    """A claimed weight update."""

    update_id: str
    """Names the update in later calls."""
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
class UpdateFinished:
    """A published weight update, and the versions that are published now."""

    policy_version: int
    """Version of the policy that is published now."""
    drafter_version: int
    """Version of the drafter that is published now."""
    instances: tuple[InstanceUpdate, ...]
    """Outcome on each instance."""
    aborted_samples: int = 0
    """Unfinished samples that were aborted."""
    continued_samples: int = 0
    """Unfinished samples that continue under the new version."""


@dataclass(frozen=True, slots=True)
class Versions:
    """The published versions, and the update in progress."""

    policy_version: int
    """Published version of the policy; 0: the model that the fleet started with."""
    drafter_version: int
    """Published version of the drafter; 0: none."""
    policy_path: str
    """Folder of the policy's weights, as the instances see it; empty unless they came from a folder."""
    policy_checksum: str
    """Checksum of the policy's weights; empty: none were pushed."""
    update_id: str
    """The update in progress, or empty."""
    instances: tuple[InstanceUpdate, ...]
    """Outcome of the last update on each instance."""
