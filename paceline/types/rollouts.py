"""Requests for rollouts: how tokens are chosen, and the batches of groups that a trainer submits."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any, TypedDict

from paceline.columns import TokenIds


class LogprobsMode(StrEnum):
    """Kind of log-probability that a result carries for each token."""

    RAW = "raw"
    """Under the model's own distribution: temperature 1, before masks and penalties."""
    PROCESSED = "processed"
    """Under the distribution sampled from: after temperature, masks and penalties."""


class ExactnessLevel(StrEnum):
    """Relation of a sample to the policy version stamped on it."""

    UNSPECIFIED = "unspecified"
    """The service did not say; it is never requested."""
    EXACT = "exact"
    """Fresh noise per step; token for token a sample of the policy."""
    COUPLED_HISTORY = "coupled_history"
    """Exact for each sample; samples of the same prompt and slot in different steps share their noise."""
    LENIENT = "lenient"
    """Cached tokens are kept with probability min(1, l * p_now / p_then): lossy, see `Exactness.lenient`."""
    REJECTION = "rejection"
    """Standard speculative sampling: the policy's distribution, but tokens depend on the drafts."""


class Stale(StrEnum):
    """Treatment of samples whose first token is of a version more than `max_staleness` behind the published one.

    Samples that have ended are delivered unchanged; `version_spans` has their versions.
    """

    REFUSE = "refuse"
    """They end as ABORTED. Adding to a batch whose own version is that old is a FailedPreconditionError."""
    REGENERATE = "regenerate"
    """They are generated again under the published version."""


@dataclass(frozen=True, slots=True)
class SamplingParams:
    """Sampling parameters. None means the service's default, which is documented at each field."""

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
    """Any of these ends the sample and is its last token, in addition to the model's end-of-sequence token."""
    stop: tuple[str, ...] = ()
    """Any of these strings ends the sample where its text, special tokens included, first contains one; the token
    that completes it is the last. At most 16, of 1 to 256 bytes."""
    allowed_token_ids: tuple[int, ...] = ()
    """Only these tokens are sampled; at most 4,096. Empty: all tokens."""
    json_schema: str | Mapping[str, Any] = ""
    """JSON schema, as text or as a mapping: the response is JSON that matches it, unless `max_tokens` cuts it.
    Empty: no constraint."""
    top_logprobs: int = 0
    """Number of the likeliest tokens of each position to return with log-probabilities; at most 20."""
    prompt_logprobs: int | None = None
    """Not None: return log-probabilities of the prompt's tokens, under the model's own distribution, and this
    number of the likeliest tokens of each position; at most 20."""
    ignore_eos: bool = False
    """Do not stop at the model's end-of-sequence token."""
    logprobs_mode: LogprobsMode = LogprobsMode.RAW
    """Kind of a sample's log-probabilities, apart from `prompt_logprobs`."""


@dataclass(frozen=True, slots=True)
class Exactness:
    """The exactness requested, or the exactness of a sample."""

    level: ExactnessLevel = ExactnessLevel.EXACT
    """Relation to the policy version."""
    lenience: float | None = None
    """The l of LENIENT, >= 1; None otherwise. With `kl_target`, the start of the search for l (None: 1); on a
    sample, the l that it was generated with."""
    reuse_delay: int = 0
    """LENIENT: which cached rollout of the slot is reused: 0 for the newest, 1 for its predecessor, and so on."""
    kl_target: float | None = None
    """LENIENT: l is adjusted between batches to keep the KL given to `report_rewards` near this value."""
    diversity_floor: float | None = None
    """LENIENT: least share of distinct n-grams in the cached rollouts of a group, in (0, 1]; below it part of the
    group is sampled without reuse. None: all rollouts may be reused."""

    @classmethod
    def lenient(
        cls,
        lenience: float | None = None,
        *,
        reuse_delay: int = 0,
        kl_target: float | None = None,
        diversity_floor: float | None = None,
    ) -> Exactness:
        """Return SPEC-RL's reuse of the slot's rollout of an earlier step, which is lossy.

        Token by token, the cached rollout is kept with probability min(1, lenience * p_now / p_then); from the
        first token that is not kept, the current policy continues exactly. For any lenience the result is not a
        sample of the current policy, and the greater the lenience, the larger the difference.

        Kept tokens have the log-probability of the cached policy (p_then) and all others the log-probability of the
        current one, so that a trainer can correct for it. `Provenance.reused_prefix` is the number of kept tokens.
        Either `lenience`, such as `math.exp(0.5)`, or `kl_target` must be given. ValueError: a value is out of
        range.
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
    """Unique in the batch and stable over epochs: the prompt's history is kept under it."""
    prompt_token_ids: Sequence[int] | TokenIds
    """[prompt_len]; not empty."""
    samples: int
    """Number of samples (G); >= 1."""
    sampling: SamplingParams | None = None
    """Replaces the batch's sampling parameters for this group."""
    expected_tokens: int = 0
    """Response length that the trainer expects; 0: unknown. Used for placement only."""


@dataclass(frozen=True, slots=True)
class ToolUse:
    """Rules for tool calls: after one of these tokens or strings, a sample waits for its environment."""

    call_token_ids: tuple[int, ...] = ()
    """Must not overlap `stop_token_ids`. The model's end-of-sequence token is allowed."""
    call_strings: tuple[str, ...] = ()
    """Must not overlap the `stop` strings; the limits of `stop` apply to both together."""
    max_calls: int = 0
    """Most calls of a sample; one more ends it as TRUNCATED. 0: the gateway's limit."""
    max_wait: float | None = None
    """Seconds that a sample waits for its environment before it ends as ABORTED. None: the gateway's default."""


class BatchOptions(TypedDict, total=False):
    """Options of a batch, which are keyword arguments of `rollout`, `rollouts`, `open_batch` and `sessions`."""

    exactness: Exactness | None
    """The exactness requested for all samples. Default: EXACT."""
    deadline: float | None
    """Seconds from acceptance after which unfinished samples are delivered as ABORTED. Default: the gateway's."""
    priority: int
    """Batches of higher priority are placed first. Default 0."""
    weight: int
    """Share of the instances relative to other runs of the same priority; >= 1. Default 1."""
    max_staleness: int | None
    """Not None: the batch continues across versions that are pushed meanwhile, and `stale` decides about unfinished
    samples whose first token is more than this number of versions behind. Default: None, all samples are of the
    batch's version."""
    stale: Stale
    """Treatment of samples that fall behind by more than `max_staleness`. Default: REFUSE."""


@dataclass(frozen=True, slots=True)
class Batch:
    """The groups of one step, as submitted. A batch that is submitted twice is generated once."""

    run_id: str
    """The training job."""
    batch_id: str
    """Unique in the run. The same id with other content is an AlreadyExistsError."""
    step: int
    """Step of the training job; part of every sample's seed."""
    policy_version: int
    """The samples are generated by exactly this version."""
    groups: Sequence[Group]
    """The prompts, each with its number of samples."""
    sampling: SamplingParams = field(default_factory=SamplingParams)
    """Sampling parameters of all groups that have none of their own."""
    exactness: Exactness = field(default_factory=Exactness)
    """The exactness requested for all samples."""
    run_seed: int = 0
    """Root of the seeds of all samples, 64 bit unsigned."""
    deadline: float | None = None
    """Seconds from acceptance after which unfinished samples are delivered as ABORTED."""
    priority: int = 0
    """Batches of higher priority are placed first."""
    weight: int = 1
    """Share of the instances relative to other runs of the same priority; >= 1."""
    max_staleness: int | None = None
    """None: the samples are of `policy_version`, as above. Otherwise each begins under the version published then,
    and `stale` decides about samples that fall further behind."""
    stale: Stale = Stale.REFUSE
    """Treatment of samples that fall behind by more than `max_staleness`."""
    tools: ToolUse | None = None
    """Rules for tool calls; None: the samples call no tools."""


@dataclass(frozen=True, slots=True)
class BatchHint:
    """The prompts of a step to come, so that idle instances can pre-generate drafts for them."""

    run_id: str
    """The training job."""
    step: int
    """The step to come."""
    policy_version: int
    """The version that the step is expected to use."""
    groups: Sequence[Group]
    """Its prompts, each with its number of samples."""
    sampling: SamplingParams = field(default_factory=SamplingParams)
    """Sampling parameters, as the batch will have them."""
    exactness: Exactness = field(default_factory=Exactness)
    """The exactness, as the batch will request it."""
    run_seed: int = 0
    """Root of the seeds of all samples, 64 bit unsigned, as the batch will have it."""


@dataclass(frozen=True, slots=True)
class SampleRequest:
    """One sample, to be generated token by token."""

    run_id: str
    """The training job. Empty: the sample belongs to none, and is not kept."""
    prompt_id: str
    """Name of the prompt, under which its history is kept. Empty: it has none."""
    prompt_token_ids: Sequence[int] | TokenIds
    """[prompt_len]; not empty."""
    slot: int = 0
    """Index of the sample in its group; part of its seed."""
    step: int = 0
    """Step of the training job; part of the sample's seed."""
    policy_version: int | None = None
    """None: the current version."""
    prefix_token_ids: Sequence[int] | TokenIds = ()
    """[prefix_len], tokens that the sample already has; its noise continues at the next position."""
    prefix_logprobs: Sequence[float] = ()
    """[prefix_len] or empty; if given, the sample is kept as a draft for later ones although it has a prefix."""
    sampling: SamplingParams = field(default_factory=SamplingParams)
    """Sampling parameters."""
    exactness: Exactness = field(default_factory=Exactness)
    """The exactness requested."""
    run_seed: int = 0
    """Root of the run's seeds, 64 bit unsigned."""


@dataclass(frozen=True, slots=True)
class SampleKey:
    """Names one sample of a batch."""

    prompt_id: str
    """Name of its prompt in the batch."""
    slot: int
    """Index of the sample in its group, from 0."""


@dataclass(frozen=True, slots=True)
class Continuation:
    """Answer to a tool call of a sample: tokens of its environment, or the end of the sample."""

    prompt_id: str
    """Name of the sample's prompt."""
    slot: int
    """Index of the sample in its group."""
    position: int
    """Response tokens up to and including the call."""
    token_ids: Sequence[int] | TokenIds = ()
    """[new]; not empty unless `end`."""
    end: bool = False
    """True: the sample ends here as COMPLETED."""


@dataclass(frozen=True, slots=True)
class Reward:
    """The reward that a trainer gave to one sample."""

    prompt_id: str
    """Name of the sample's prompt."""
    slot: int
    """Index of the sample in its group."""
    reward: float
    """A finite number, in the trainer's own unit."""


@dataclass(frozen=True, slots=True)
class Submitted:
    """The answer to a submitted batch."""

    batch_id: str
    """Id of the batch."""
    samples: int
    """Number of samples of the batch."""
    already_submitted: bool
    """True if the batch was submitted before: its samples are generated once."""


@dataclass(frozen=True, slots=True)
class BatchStatus:
    """Progress of a batch: how many of its samples have ended."""

    run_id: str
    """The training job."""
    batch_id: str
    """Id of the batch."""
    step: int
    """Step of the training job."""
    policy_version: int
    """Version that the batch was submitted for."""
    accepted_at: float
    """Unix seconds."""
    total: int
    """Samples of the batch, so far if it is open."""
    finished: int
    """Samples that have ended, read or not."""
    acknowledged: int
    """Samples that the trainer has acknowledged."""
    cursor: int
    """Cursor of the last event so far."""
    open: bool = False
    """Groups may still be added."""


@dataclass(frozen=True, slots=True)
class RunEnded:
    """The answer to the end of a run."""

    batches: int
    """Batches whose samples the gateway no longer keeps."""
    cancelled: int
    """Samples that were still running or waiting."""
