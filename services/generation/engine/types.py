"""Plain data that passes between the engine and the rest of the instance."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum, StrEnum
from typing import Any, NamedTuple

from services.platform.sampling import Sampling


class Finish(Enum):
    """Why the engine stopped a sample."""

    STOP = "stop"
    LENGTH = "length"
    # The model produced logits that no token can be sampled from (NaN, or every entry -inf).
    ERROR = "error"


class Verifier(StrEnum):
    """How the drafts of a sample are verified. The first two give samples of the policy.

    COUPLED: accepted iff equal to the token that the sample's noise picks, so drafts do not change the tokens.
    REJECTION: standard speculative sampling, whose tokens depend on the drafts.
    LENIENT: a cached rollout is taken over, token by token, with probability min(1, lenience * p_now / p_then);
    from the first token that is not, as COUPLED. Lossy, and drafts do not change the tokens.
    """

    COUPLED = "coupled"
    REJECTION = "rejection"
    LENIENT = "lenient"


KERNELS_KEY = "paceline_kernels"
"""Where vLLM's additional_config has the name of the kernels' backend, if it is not auto."""
SELF_W4, EAGLE3 = "self_w4", "eagle3"
"""Names of the drafters that have a model of their own."""
SELF_W4_KEY, EAGLE3_KEY = "paceline_self_w4", "paceline_eagle3"
"""Where vLLM's additional_config has the fields of `W4Options` and `Eagle3Options`, if the engine has them."""


@dataclass(frozen=True, slots=True)
class W4Options:
    """The 4-bit twin of the self_w4 drafter: input columns that share a scale, and the most tokens of a draft."""

    group: int = 128
    most_tokens: int = 8


@dataclass(frozen=True, slots=True)
class Eagle3Options:
    """The eagle3 drafter: the folder of its checkpoint (services/drafter/checkpoint.py), the most tokens of a
    draft, and the most tokens that it reads before one step to catch up with what was decoded without it."""

    checkpoint: str
    most_tokens: int = 6
    catch_up_tokens: int = 2048


@dataclass(frozen=True, slots=True)
class EngineOptions:
    """What an engine is built from. Memory in bytes, lengths in tokens; None leaves the choice to vLLM.

    With `sleep_mode` an engine that sleeps moves its weights to host memory; nothing moves on CPU.
    `kernels`: auto, triton or reference (kernels/backend.py), for this process and its workers.
    `self_w4`: keep a 4-bit twin of the weights that drafts; None: there is none. `eagle3`: likewise a trained head.
    `coupled=False` is vLLM's own runner and sampler, for comparison: seeds, prefixes and drafts mean nothing to it.
    `vllm_speculation`, only with that, is a `speculative_config` of vLLM's.
    """

    model: str
    dtype: str = "auto"
    max_num_seqs: int = 128
    max_model_len: int | None = None
    max_num_batched_tokens: int | None = None
    kv_cache_memory_bytes: int | None = None
    gpu_memory_utilization: float = 0.9
    block_size: int | None = None
    enable_prefix_caching: bool = True
    enable_chunked_prefill: bool = True
    enforce_eager: bool | None = None
    tensor_parallel_size: int = 1
    executor: str = "local"
    sleep_mode: bool = False
    coupled: bool = True
    kernels: str = "auto"
    self_w4: W4Options | None = None
    eagle3: Eagle3Options | None = None
    vllm_speculation: dict[str, Any] | None = None


@dataclass(frozen=True, slots=True)
class SampleRequest:
    """One sample to generate. `prefix` holds response tokens that exist already: they count as output.

    `given` is a guess of the whole response and `prompt_id` names the prompt: for drafters, not for the engine.
    With LENIENT, `cached` is the rollout to take over and `cached_logprobs`, as long, what its policy said of each
    token, by the log-probabilities that `sampling` asks for; a sample with a prefix takes nothing over any more.
    """

    sample_id: str
    prompt: tuple[int, ...]
    prefix: tuple[int, ...]
    sampling: Sampling
    seed: int
    given: tuple[int, ...] = ()
    prompt_id: str = ""
    verifier: Verifier = Verifier.COUPLED
    cached: tuple[int, ...] = ()
    cached_logprobs: tuple[float, ...] = ()
    lenience: float = 1.0

    @property
    def follows(self) -> bool:
        """Whether the sample begins by taking over its cached rollout."""
        return self.verifier is Verifier.LENIENT and bool(self.cached) and not self.prefix


@dataclass(slots=True)
class SampleStep:
    """What one engine step did for one sample.

    `token_ids` and `logprobs` have the same length: accepted draft tokens and the one after them.
    `drafted` and `accepted` count the draft tokens that this step verified. The first `reused` tokens were taken
    over from the cached rollout: their `logprobs` are the cached ones, `verified_logprobs` the current policy's.
    """

    sample_id: str
    token_ids: list[int]
    logprobs: list[float]
    finish: Finish | None = None
    drafted: int = 0
    accepted: int = 0
    reused: int = 0
    verified_logprobs: Sequence[float] = ()


class Ask(NamedTuple):
    """A sample to draft for: its tokens so far, prompt included, how many draft tokens are wanted, and how often it
    was preempted, after which its KV is in other blocks."""

    sample_id: str
    length: int
    tokens: int
    preemptions: int = 0


@dataclass(frozen=True, slots=True)
class Proposal:
    """Draft tokens of a model drafter, [k], and of each the log-probability that the drafter drew it with, [k]."""

    tokens: list[int]
    logprobs: list[float]


@dataclass(frozen=True, slots=True)
class Drafted:
    """What a model drafter drafted, by sample, and how many tokens it read first, to be where the samples are."""

    proposals: dict[str, Proposal]
    caught_up: int = 0


@dataclass(frozen=True, slots=True)
class EngineLoad:
    """Samples running and waiting, and the share of KV blocks in use (0 to 1)."""

    running: int
    waiting: int
    kv_usage: float


@dataclass(frozen=True, slots=True)
class SampleState:
    """A running sample as a drafter sees it. The lists are the engine's own: read, never keep or change."""

    sample_id: str
    prompt: list[int]
    response: list[int]
    # Most draft tokens that verification could use: the rest would be past the sample's length limit.
    room: int


@dataclass(frozen=True, slots=True)
class TensorSpec:
    """Name, shape and dtype of a weight in the model's checkpoint."""

    name: str
    shape: tuple[int, ...]
    dtype: str
