"""Plain data that passes between the engine and the rest of the instance."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from enum import Enum, StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from services.contracts.sampling import Sampling

if TYPE_CHECKING:
    from services.generation.engine.sampling.inputs import RecordedTokens
    from services.generation.engine.sampling.outputs import PromptScores


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
    """Verification of a sample's drafts. The first two give samples of the policy.

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
QUANTIZED, EAGLE3 = "quantized", "eagle3"
"""Names of the drafters that have a model of their own."""
QUANTIZED_KEY, EAGLE3_KEY = "paceline_quantized", "paceline_eagle3"
"""Where vLLM's additional_config has the fields of `W4Options` and `Eagle3Options`, if it is to have them."""
TREES_KEY = "paceline_trees"
"""Where vLLM's additional_config has whether drafts may be trees."""


@dataclass(frozen=True, slots=True)
class W4Options:
    """Quantized self-draft: input columns that share a scale, and the most tokens of a draft."""

    group: int = 128
    most_tokens: int = 8


@dataclass(frozen=True, slots=True)
class Eagle3Options:
    """EAGLE-3 drafter: the folder of its checkpoint (services/contracts/drafter_checkpoint.py) and its limits.

    `most_tokens` of a draft; `catch_up_tokens` that it computes before one step, for samples that decoded without
    it.
    """

    checkpoint: str
    most_tokens: int = 6
    catch_up_tokens: int = 2048


@dataclass(frozen=True, slots=True)
class EngineOptions:
    """Options of an engine. Memory in bytes, lengths in tokens; None leaves the choice to vLLM.

    `load_format` is vLLM's, of the weights; so is `compilation_config`.
    With `sleep_mode` an engine that sleeps moves its weights to host memory; nothing moves on CPU.
    `engine`: auto, v1 or v2, vLLM's model runner (runner_choice.py); on v2 with
    `schedule_ahead` a step is scheduled while the device is at the one before.
    `draft_window`: most draft tokens of a sample in a step, for which there are CUDA graphs; 0: vLLM's own graphs.
    `enable_expert_parallel`: whole experts for each rank. `batch_invariant`: vLLM's mode (batch_invariance.py).
    `kernels`: auto, triton or reference (kernels/backend.py), for this process and its workers.
    `trees`: verify draft trees, where the engine can (model_support.py); else their primary chains.
    `quantized`: draft with a quantized copy of the weights; `eagle3`: with a trained head; None: without.
    `coupled=False` is vLLM's own runner and sampler, for comparison: seeds, prefixes and drafts mean nothing to it.
    `vllm_speculation`, only with that, is a `speculative_config` of vLLM's.
    `step_log`: file for the shapes of its steps (step_log.py); None: none is written.
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
    """One sample to generate. `prefix` holds response tokens that exist already: they count as output.

    `given` is a guess of the whole response and `prompt_id` names the prompt: for drafters, not for the engine.
    With LENIENT, `cached` is the rollout to take over and `cached_logprobs`, as long, what its policy said of each
    token, by the log-probabilities that `sampling` asks for; a sample with a prefix takes nothing over any more.
    With REJECTION, a draft token that is in `recorded` is accepted with probability
    min(1, lenience * p_now / p_then), which is lossy.
    With `near_ties`, and no likeliest tokens asked for, each token comes with its runner-up (`SampleStep`).
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
    # The last of the prefix came from the sample's environment: it ends nothing.
    environment_last: bool = False
    near_ties: bool = False

    @property
    def follows(self) -> bool:
        """True if the sample begins by reusing its cached rollout."""
        return self.verifier is Verifier.LENIENT and bool(self.cached) and not self.prefix


@dataclass(slots=True)
class SampleStep:
    """Result of one engine step for one sample.

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
    # The stop string that ended the sample, if one did.
    stop_string: str = ""
    # For each token in order, as many of the likeliest tokens of its position as its sample asks for. Where it asks
    # for near-ties: the token that came second, and the nats by which it lost, noise included.
    top_token_ids: list[int] = field(default_factory=list)
    top_logprobs: list[float] = field(default_factory=list)
    prompt_scores: PromptScores | None = None
    # In the first step of a sample: the tokens before it whose KV was there.
    cached_context: int | None = None

    def cut(self, count: int) -> None:
        """Keep the first `count` tokens."""
        each = len(self.top_token_ids) // max(1, len(self.token_ids))
        del self.top_token_ids[each * count :], self.top_logprobs[each * count :]
        del self.token_ids[count:], self.logprobs[count:]
        self.verified_logprobs = self.verified_logprobs[:count]
        self.reused, self.accepted = min(self.reused, count), min(self.accepted, count)


class Ask(NamedTuple):
    """Sample to draft for: its length, prompt included, and the number of draft tokens wanted.

    After another number of `preemptions` its KV is in other blocks.
    """

    sample_id: str
    length: int
    tokens: int
    preemptions: int = 0


@dataclass(frozen=True, slots=True)
class ModelProposal:
    """Draft tokens of a model drafter, [k], and of each the log-probability that the drafter drew it with, [k]."""

    tokens: list[int]
    logprobs: list[float]


@dataclass(frozen=True, slots=True)
class Drafted:
    """Proposals of a draft model by sample, and the tokens that it computed first, to catch up with the samples."""

    proposals: dict[str, ModelProposal]
    caught_up: int = 0


@dataclass(frozen=True, slots=True)
class EngineLoad:
    """Samples running and waiting, and the share of KV blocks in use (0 to 1)."""

    running: int
    waiting: int
    kv_usage: float


# Not frozen: that takes five times as long to make, for every sample in every step.
@dataclass(slots=True)
class EngineSampleState:
    """A running sample as a drafter sees it. The lists are the engine's own: read, never keep or change."""

    sample_id: str
    prompt: list[int]
    response: list[int]
    # Most draft tokens that verification could use: the rest would be past the sample's length limit.
    room: int
    # Tokens of prompt and response.
    length: int


@dataclass(frozen=True, slots=True)
class TensorSpec:
    """Name, shape and dtype of a weight in the model's checkpoint, and the dtype in which the engine has it.

    Dtypes as safetensors names them. `served` is "" where the engine has it as it is stored.
    """

    name: str
    shape: tuple[int, ...]
    dtype: str
    served: str = ""
