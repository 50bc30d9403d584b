"""The vocabulary of the SDK: what is asked for, and what comes back.

Plain frozen records. Arrays are numpy; `[n]` in a comment is a shape. Times are seconds since the Unix
epoch, durations are seconds.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any

import numpy as np
import numpy.typing as npt

TokenIds = npt.NDArray[np.int64]
Logprobs = npt.NDArray[np.float32]


class LogprobsMode(StrEnum):
    """Which log-probability a result carries for each token."""

    RAW = "raw"
    """Of the model's own distribution: temperature 1, before masks and penalties."""
    PROCESSED = "processed"
    """Of the distribution sampled from: after temperature, masks and penalties."""


class ExactnessLevel(StrEnum):
    """How a sample relates to the policy version stamped on it."""

    UNSPECIFIED = "unspecified"
    EXACT = "exact"
    """Fresh noise per step; token for token a sample of the policy."""
    COUPLED_HISTORY = "coupled_history"
    """Exact for each sample; samples of one prompt and slot in different steps share their noise."""
    LENIENT = "lenient"
    """Cached tokens are kept by min(1, l * p_now / p_then): lossy, see `Exactness.lenient`."""
    REJECTION = "rejection"
    """Standard speculative sampling: the policy's distribution, but tokens depend on the drafts."""


class FinishReason(StrEnum):
    """Why a sample ended, as the model sees it."""

    UNSPECIFIED = "unspecified"
    STOP = "stop"
    LENGTH = "length"
    ABORTED = "aborted"


class SampleStatus(StrEnum):
    """How a sample ended, as the trainer sees it."""

    UNSPECIFIED = "unspecified"
    COMPLETED = "completed"
    TRUNCATED = "truncated"
    """Ended by a length limit."""
    ABORTED = "aborted"
    """Cancelled or past its deadline; the tokens are a prefix."""
    FAILED = "failed"
    """Could not be generated; `error` says why."""


class InstanceState(StrEnum):
    """What an instance is doing. There is no way from DEAD to SERVING but through a weight update."""

    UNSPECIFIED = "unspecified"
    STALE = "stale"
    SERVING = "serving"
    PAUSED = "paused"
    DRAINING = "draining"
    DEAD = "dead"


class WeightTarget(StrEnum):
    """What a weight update replaces. There is no "all"."""

    POLICY = "policy"
    DRAFTER = "drafter"


@dataclass(frozen=True, slots=True)
class SamplingParams:
    """How tokens are chosen. None takes the service's default, named beside each field."""

    temperature: float | None = None
    """0 is greedy. Default 1."""
    top_p: float | None = None
    """In (0, 1]. Default 1 (off)."""
    top_k: int | None = None
    """0 is off. Default 0."""
    min_p: float | None = None
    """In [0, 1]. Default 0 (off)."""
    repetition_penalty: float | None = None
    """> 0. Default 1 (off)."""
    presence_penalty: float | None = None
    """In [-2, 2]. Default 0 (off)."""
    frequency_penalty: float | None = None
    """In [-2, 2]. Default 0 (off)."""
    max_tokens: int | None = None
    """Most response tokens, stop token included. Default: what the model length leaves."""
    min_tokens: int | None = None
    """No stop token before this many response tokens. Default 0."""
    stop_token_ids: tuple[int, ...] = ()
    """Any of these ends the sample and is its last token, beside the model's end-of-sequence token."""
    ignore_eos: bool = False
    """Do not stop at the model's end-of-sequence token."""
    logprobs_mode: LogprobsMode = LogprobsMode.RAW


@dataclass(frozen=True, slots=True)
class Exactness:
    """The exactness asked for, or the one that a sample has."""

    level: ExactnessLevel = ExactnessLevel.EXACT
    lenience: float | None = None
    """The l of LENIENT, >= 1; None otherwise. With `kl_target`, where the search for l begins (None: at 1);
    on a sample, the l that it was made with."""
    reuse_delay: int = 0
    """LENIENT: which cached rollout of the slot is reused: 0 the newest, 1 the one before it, and so on."""
    kl_target: float | None = None
    """LENIENT: l is moved between batches so that the KL given to `report_rewards` stays near this."""
    diversity_floor: float | None = None
    """LENIENT: least share of distinct n-grams in the cached rollouts of a group, in (0, 1]; below it part of
    the group is sampled afresh. None: everything may be reused."""

    @classmethod
    def lenient(
        cls,
        lenience: float | None = None,
        *,
        reuse_delay: int = 0,
        kl_target: float | None = None,
        diversity_floor: float | None = None,
    ) -> Exactness:
        """SPEC-RL's reuse of the rollout that the slot had in an earlier step: lossy.

        Token by token, the cached rollout is kept with probability min(1, lenience * p_now / p_then); from
        the first token that is not kept, the current policy goes on exactly. The result is not a sample of
        the current policy, whatever the lenience, and the less so the greater it is.

        Kept tokens carry the log-probability of the cached policy (p_then), all others that of the current
        one, for a trainer to correct with. `Provenance.reused_prefix` says how many were kept. Either
        `lenience`, such as `math.exp(0.5)`, or `kl_target` must be given. ValueError when a value is out
        of range.
        """
        if lenience is None and kl_target is None:
            raise ValueError("LENIENT needs a lenience or a kl_target")
        if lenience is not None and not 1 <= lenience < math.inf:
            raise ValueError(f"lenience must be finite and >= 1, got {lenience}")
        if reuse_delay < 0:
            raise ValueError(f"reuse_delay must be >= 0, got {reuse_delay}")
        if kl_target is not None and not 0 < kl_target < math.inf:
            raise ValueError(f"kl_target must be finite and > 0, got {kl_target}")
        if diversity_floor is not None and not 0 < diversity_floor <= 1:
            raise ValueError(f"diversity_floor must be in (0, 1], got {diversity_floor}")
        return cls(ExactnessLevel.LENIENT, lenience, reuse_delay, kl_target, diversity_floor)


@dataclass(frozen=True, slots=True)
class Group:
    """The samples of one prompt."""

    prompt_id: str
    """Unique in the batch, stable over epochs: history is kept under it."""
    prompt_token_ids: Sequence[int] | TokenIds
    """[prompt_len]; not empty."""
    samples: int
    """G, the samples wanted; >= 1."""
    sampling: SamplingParams | None = None
    """Replaces the batch's sampling parameters for this group."""
    expected_tokens: int = 0
    """Response length that the trainer expects; 0 when unknown. Used for placement only."""


@dataclass(frozen=True, slots=True)
class Batch:
    """The groups of one step, as submitted. The same batch submitted twice is generated once."""

    run_id: str
    batch_id: str
    step: int
    policy_version: int
    """The samples are generated by exactly this version."""
    groups: Sequence[Group]
    sampling: SamplingParams = field(default_factory=SamplingParams)
    exactness: Exactness = field(default_factory=Exactness)
    run_seed: int = 0
    """Root of every sample's seed, 64 bit unsigned."""
    deadline: float | None = None
    """Seconds from acceptance after which unfinished samples are delivered as ABORTED."""


@dataclass(frozen=True, slots=True)
class BatchHint:
    """The prompts of a step to come, so that idle instances can pre-generate drafts for them."""

    run_id: str
    step: int
    expected_version: int
    """The policy version that the step will probably use."""
    groups: Sequence[Group]
    sampling: SamplingParams = field(default_factory=SamplingParams)
    exactness: Exactness = field(default_factory=Exactness)
    run_seed: int = 0


@dataclass(frozen=True, slots=True)
class SampleRequest:
    """One sample, to be generated token by token."""

    run_id: str
    prompt_id: str
    prompt_token_ids: Sequence[int] | TokenIds
    """[prompt_len]; not empty."""
    slot: int = 0
    step: int = 0
    policy_version: int | None = None
    """None: the current version."""
    prefix_token_ids: Sequence[int] | TokenIds = ()
    """[prefix_len], tokens that the sample already has; noise goes on at the position after them."""
    sampling: SamplingParams = field(default_factory=SamplingParams)
    exactness: Exactness = field(default_factory=Exactness)
    run_seed: int = 0


@dataclass(frozen=True, slots=True)
class SampleKey:
    """Names one sample of a batch."""

    prompt_id: str
    slot: int


@dataclass(frozen=True, slots=True)
class Reward:
    """The reward that a trainer gave to one sample."""

    prompt_id: str
    slot: int
    reward: float


@dataclass(frozen=True, slots=True)
class Submitted:
    """The answer to a submitted batch."""

    batch_id: str
    samples: int
    already_submitted: bool
    """The batch was known already: its samples are (being) generated once."""


@dataclass(frozen=True, slots=True)
class VersionSpan:
    """Response tokens [begin, end) were sampled by this policy version."""

    begin: int
    end: int
    policy_version: int


@dataclass(frozen=True, slots=True)
class DraftSource:
    """What one drafter did for one sample."""

    drafter: str
    drafted: int
    """Tokens proposed for verification."""
    accepted: int
    """Of these, the ones that verification kept."""


@dataclass(frozen=True, slots=True)
class InstanceSpan:
    """Response tokens [begin_token, end_token) were generated by this instance in [begin, end]."""

    instance_id: str
    begin_token: int
    end_token: int
    begin: float
    """Seconds since the epoch, on the gateway's clock."""
    end: float


@dataclass(frozen=True, slots=True)
class Provenance:
    """Where a sample's tokens came from and what they cost."""

    draft_sources: tuple[DraftSource, ...] = ()
    drafted: int = 0
    accepted: int = 0
    decode_steps: int = 0
    """Engine steps that produced at least one token of the sample."""
    verify_steps: int = 0
    """Of these, the ones that verified a draft."""
    reused_prefix: int = 0
    """Tokens that agree with a cached rollout, or under LENIENT were taken over from it, before the first
    that does not."""
    migrations: int = 0
    """Live moves between instances."""
    resubmissions: int = 0
    """Times the sample was resumed from its journal after its instance was lost."""
    exactness: Exactness = field(default_factory=Exactness)
    lossless: bool = True
    """False for LENIENT: not a sample of the policy."""
    instance_spans: tuple[InstanceSpan, ...] = ()
    queue_seconds: float = 0.0
    generation_seconds: float = 0.0
    cached_tokens: int = 0
    """Length of that cached rollout; 0: there was none."""

    @property
    def block_efficiency(self) -> float:
        """Tokens kept for each verification: accepted + 1 per verify; 1 without speculation."""
        return 1.0 + self.accepted / self.verify_steps if self.verify_steps else 1.0


@dataclass(frozen=True, slots=True, eq=False)
class Sample:
    """One response."""

    prompt_id: str
    slot: int
    """Index of the sample in its group."""
    token_ids: TokenIds
    """[tokens], the response, stop token included."""
    logprobs: Logprobs
    """[tokens], natural logarithms under the policy version of the sample; under LENIENT, of its first
    `provenance.reused_prefix` tokens under the version that they were taken over from."""
    finish_reason: FinishReason
    status: SampleStatus
    version_spans: tuple[VersionSpan, ...]
    provenance: Provenance
    seed: int
    """Seed of the sample's noise, 64 bit unsigned."""
    error: str = ""
    """Set when the status is FAILED."""
    nonfinite_logprobs: tuple[int, ...] = ()
    """Positions whose log-probability was not finite."""

    @property
    def key(self) -> SampleKey:
        """The sample's name in its batch."""
        return SampleKey(self.prompt_id, self.slot)


@dataclass(frozen=True, slots=True)
class SampleEvent:
    """A finished sample of a batch, with the place in the stream to go on from."""

    cursor: int
    sample: Sample
    finished: int
    """Samples of the batch finished so far."""
    total: int
    """Samples of the batch wanted."""


@dataclass(frozen=True, slots=True, eq=False)
class TokenDelta:
    """Tokens sampled since the last delta."""

    token_ids: TokenIds
    """[new]."""
    logprobs: Logprobs
    """[new]."""


@dataclass(frozen=True, slots=True)
class InstanceUpdate:
    """What a weight update did on one instance."""

    instance_id: str
    applied: bool
    version: int
    """Version that the instance serves now."""
    checksum: str
    error: str
    """Set when the instance failed; it serves nothing until it has the published version."""
    stage_seconds: float
    apply_seconds: float
    dropped_blocks: int
    """KV blocks of the old version that were dropped."""
    acceptance_probe: float | None
    """Acceptance on a probe after the swap, for drafters."""


@dataclass(frozen=True, slots=True)
class UpdateStarted:
    """A claimed weight update."""

    update_id: str
    current_version: int
    """Served until the update is finished."""


@dataclass(frozen=True, slots=True)
class UpdateFinished:
    """A published weight update."""

    version: int
    instances: tuple[InstanceUpdate, ...]


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


@dataclass(frozen=True, slots=True)
class InstanceLoad:
    """What an instance reports with every heartbeat."""

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
    """Grows each time a process registers under the same id."""
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


@dataclass(frozen=True, slots=True)
class Policy:
    """The knobs that are set for a run, a model, a pool or the whole fleet."""

    revision: int
    """Changes are made from a revision, and refused (AbortedError) when another came between. 0: none was set."""
    knobs: Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class PolicyChange:
    """What became of a change of knobs."""

    revision: int
    applied: tuple[str, ...]
    """Instances that work by it."""
    pending: tuple[str, ...]
    """Instances that had not answered; they get it as soon as they can be reached."""


@dataclass(frozen=True, slots=True)
class Drafter:
    """The drafter that is trained online, as the learner tells of it."""

    version: int
    """Published; 0: none yet."""
    published: float
    """When, in unix seconds; 0: none yet."""
    path: str
    """Its folder, as the instances see it."""
    updates: int
    samples_used: int
    policy_version: int
    """Of the policy whose distribution it learned last."""
    acceptance_length: float
    """Tokens a verification on held-out samples, when it was last compared with a candidate; 0: never."""
    candidate_acceptance_length: float
    """Of that candidate."""
    rejected_candidates: int
    roll_backs: int


@dataclass(frozen=True, slots=True)
class Decision:
    """One decision of the platform, explained."""

    time: float
    kind: str
    reason: str
    predicted_gain: float
    """What it was expected to bring, as a share: 0.1 is ten percent."""
    details: Mapping[str, Any]
    run_id: str = ""
    """Empty: it is about the whole fleet."""
