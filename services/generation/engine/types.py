"""Plain data that passes between the engine and the rest of the instance."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from enum import Enum, StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

import msgspec

from paceline.columns import cut
from services.contracts.sampling import Sampling

if TYPE_CHECKING:
    from services.generation.engine.sampling.inputs import RecordedTokens
    from services.generation.engine.sampling.outputs import PromptScores
    from services.generation.kv_transfer.block_store import Geometry


class Finish(Enum):
    """Why the engine stopped a sample."""

    STOP = "stop"
    LENGTH = "length"
    # The model produced logits that no token can be sampled from (NaN, or every entry -inf).
    ERROR = "error"


class Ending(NamedTuple):
    """End of a sample, and the stop string that it ended by, if it did."""

    finish: Finish
    stop_string: str = ""


class Verifier(StrEnum):
    """Verification of a sample's drafts. COUPLED and REJECTION give samples of the policy.

    COUPLED: a draft token is accepted iff the sample's noise picks the same token: drafts never change a response.
    REJECTION: standard speculative sampling, whose tokens depend on the drafts.
    LENIENT: tokens of a cached rollout are reused, each with probability min(1, lenience * p_now / p_then), up to
    the first that is not; from there as COUPLED. Lossy, but drafts do not change the tokens.
    """

    COUPLED = "coupled"
    REJECTION = "rejection"
    LENIENT = "lenient"


KERNELS_KEY = "paceline_kernels"
"""Key in vLLM's additional_config for the name of the kernels' backend, if it is not auto."""
QUANTIZED, EAGLE3 = "quantized", "eagle3"
"""Names of the drafters that have a separate model."""
INVARIANCE_KEY = "paceline_batch_invariant"
"""Key in vLLM's additional_config that says whether a CPU worker makes its logits independent of the batch."""


@dataclass(frozen=True, slots=True)
class W4Options:
    """Quantized self-draft: `group` input columns share a scale; a draft has at most `most_tokens` tokens."""

    group: int = 128
    most_tokens: int = 8


@dataclass(frozen=True, slots=True)
class Eagle3Options:
    """EAGLE-3 drafter: the folder of its checkpoint (services/contracts/drafter_checkpoint.py) and its limits.

    A draft has at most `most_tokens` tokens. Before a step it computes at most `catch_up_tokens` tokens of samples
    that decoded without it.
    """

    checkpoint: str
    most_tokens: int = 6
    catch_up_tokens: int = 2048


@dataclass(frozen=True, slots=True)
class EngineOptions:
    """Options of an engine. Memory in bytes, lengths in tokens; None leaves the choice to vLLM.

    `load_format` and `compilation_config` are vLLM's options.
    `sleep_mode`: a sleeping engine moves its weights to host memory; on CPU nothing moves.
    `engine`: auto, v1 or v2, vLLM's model runner (environment.py).
    `schedule_ahead`: on v2, schedule a step while the device still computes the previous one.
    `draft_window`: capture CUDA graphs for this many draft tokens per sample; 0 keeps vLLM's own sizes.
    `enable_expert_parallel`: each rank has whole experts. `batch_invariant`: logits that do
    not depend on the batch, by vLLM's mode on CUDA (environment.py), by invariance/ on CPU.
    `kernels`: auto, triton or reference (kernels/backend.py), for this process and its workers.
    `trees`: verify draft trees if the engine can (model_support.py), otherwise their primary chains.
    `quantized`: draft with a quantized copy of the weights; `eagle3`: with a trained head.
    `coupled=False`: vLLM's own runner and sampler, for comparison; they ignore seeds, prefixes and drafts.
    `vllm_speculation`: vLLM's `speculative_config`, only with `coupled=False`.
    `step_log`: file for the shapes of its steps (step_log.py).
    """

    model: str
    dtype: str = "auto"
    max_num_seqs: int | None = None
    max_model_len: int | None = None
    max_num_batched_tokens: int | None = None
    kv_cache_memory_bytes: int | None = None
    gpu_memory_utilization: float | None = None
    block_size: int | None = None
    enable_prefix_caching: bool = True
    enable_chunked_prefill: bool = True
    enforce_eager: bool | None = None
    compilation_config: dict[str, Any] | None = None
    tensor_parallel_size: int = 1
    enable_expert_parallel: bool = False
    executor: str = "local"
    sleep_mode: bool = False
    coupled: bool = True
    engine: str = "auto"
    schedule_ahead: bool = False
    draft_window: int = 0
    batch_invariant: bool = False
    kernels: str = "auto"
    trees: bool = False
    quantized: W4Options | None = None
    eagle3: Eagle3Options | None = None
    vllm_speculation: dict[str, Any] | None = None
    step_log: Path | None = None
    load_format: str = "auto"


@dataclass(frozen=True, slots=True)
class EngineRequest:
    """One sample to generate. `prefix` holds response tokens that exist already; they count as output.

    `given` is a guess of the whole response and `prompt_id` names the prompt: both are for drafters only. With
    LENIENT, `cached` is the rollout to reuse and `cached_logprobs` has the log-probability of each of its tokens
    under its policy, of the kind that `sampling` requests; a sample with a prefix reuses nothing. With REJECTION,
    a draft token that is in `recorded` is accepted with probability min(1, lenience * p_now / p_then), which is
    lossy. With `near_ties`, if no likeliest tokens are requested, each token comes with its runner-up
    (`SampleStep`). With `mixed_kv` its KV, which arrives with it, is of several versions of the weights, so that no
    other sample may find it.
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
    recorded: RecordedTokens | None = None
    # The last prefix token came from the sample's environment, so it cannot end the response.
    environment_last: bool = False
    near_ties: bool = False
    mixed_kv: bool = False

    @property
    def follows(self) -> bool:
        """True if the sample begins by reusing its cached rollout."""
        return self.verifier is Verifier.LENIENT and bool(self.cached) and not self.prefix


# A struct, because creating a data class takes five times as long, for every sample in every step.
class SampleStep(msgspec.Struct):
    """Result of one engine step for one sample.

    `token_ids` and `logprobs` have the same length: the accepted draft tokens and the next token.
    `drafted` and `accepted` count the draft tokens that this step verified. The first `reused` tokens come from the
    cached rollout: their `logprobs` are the cached ones, their `verified_logprobs` the current policy's.
    """

    sample_id: str
    token_ids: list[int]
    logprobs: list[float]
    finish: Finish | None = None
    drafted: int = 0
    accepted: int = 0
    reused: int = 0
    verified_logprobs: Sequence[float] = ()
    # The stop string that ended the sample, if one did.
    stop_string: str = ""
    # For each token in order, as many of the likeliest tokens of its position as the sample requests. If it
    # requests near-ties: the runner-up, and the nats by which it lost, noise included.
    top_token_ids: list[int] = []
    top_logprobs: list[float] = []
    prompt_scores: PromptScores | None = None
    # In the first step of a sample: the earlier tokens whose KV was in the prefix cache.
    cached_context: int | None = None

    def cut(self, count: int) -> None:
        """Keep the first `count` tokens."""
        cut(self, count)
        self.verified_logprobs = self.verified_logprobs[:count]
        self.reused, self.accepted = min(self.reused, count), min(self.accepted, count)


class DraftRequest(NamedTuple):
    """Sample to draft for: its length, prompt included, and the number of draft tokens wanted.

    A different number of `preemptions` means that its KV is in other blocks.
    """

    sample_id: str
    length: int
    tokens: int
    preemptions: int = 0


@dataclass(frozen=True, slots=True)
class ModelProposal:
    """Draft tokens of a draft model, [k], and the log-probability with which each was drawn, [k]."""

    tokens: list[int]
    logprobs: list[float]


@dataclass(frozen=True, slots=True)
class DraftResult:
    """Proposals of a draft model by sample, and the tokens that it computed first to catch up with the samples."""

    proposals: dict[str, ModelProposal]
    caught_up: int = 0


@dataclass(frozen=True, slots=True)
class EngineLoad:
    """Samples running and waiting, and the share of KV blocks in use (0 to 1)."""

    running: int
    waiting: int
    kv_usage: float


# A struct for the same reason as `SampleStep`.
class EngineSampleState(msgspec.Struct):
    """A running sample as a drafter sees it. The lists belong to the engine: do not keep or change them."""

    sample_id: str
    prompt: list[int]
    response: list[int]
    # Most draft tokens that verification can use before the sample's length limit.
    room: int
    # Number of tokens of prompt and response.
    length: int
    # Accepted tokens that the next step computes again, because a recurrent state was taken back.
    replayed: int = 0


@dataclass(frozen=True, slots=True)
class TensorSpec:
    """Name, shape and dtype of a weight in the model's checkpoint, and the dtype in which the engine has it.

    Dtypes have safetensors' names. `served` is "" if the engine keeps the weight as it is stored.
    """

    name: str
    shape: tuple[int, ...]
    dtype: str
    served: str = ""


@dataclass(frozen=True, slots=True)
class Exported:
    """KV of a running sample: its first `tokens` tokens, prompt included, in `blocks`.

    A different number of `preemptions` later means that it is other KV.
    """

    sample_id: str
    tokens: int
    blocks: tuple[int, ...]
    preemptions: int


@dataclass(frozen=True, slots=True)
class Reserved:
    """Blocks for an arriving sample; the prefix cache already holds the first `shared_blocks`."""

    sample_id: str
    blocks: tuple[int, ...]
    shared_blocks: int


@dataclass(frozen=True, slots=True)
class KvSpace:
    """KV blocks that are free or can be freed at once, their total, and the tokens per block."""

    free_blocks: int
    total_blocks: int
    block_size: int


class MigrationEngine(Protocol):
    """Part of `engine.migration.EngineMigration` that migration uses, in the engine thread only."""

    on_withdrawn: Callable[[str], None]

    @property
    def space(self) -> KvSpace: ...
    @property
    def free_capacity(self) -> int: ...

    def open_ports(self, chunk_bytes: int, senders: int, agent: str) -> Geometry: ...
    def own_port(self) -> Any: ...
    def call_ports(self, method: str, *args: object) -> list[Any]: ...
    def blocks_of(self, sample_id: str) -> int: ...
    def export(self, sample_id: str) -> Exported: ...
    def pause(self, exported: Exported) -> Exported: ...
    def resume(self, sample_id: str) -> None: ...
    def reserve(self, request: EngineRequest, capacity: int) -> Reserved: ...
    def enter(self, sample_id: str, new_tokens: list[int]) -> None: ...
    def cancel(self, sample_id: str) -> None: ...
