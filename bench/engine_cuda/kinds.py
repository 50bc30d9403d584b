"""The engines that are compared, and their sizes."""

from __future__ import annotations

import os
from dataclasses import dataclass, field
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Any

from services.generation.engine.runner_choice import choose_runner
from services.generation.engine.types import EngineOptions
from services.step_time.machine import on_cpu

if TYPE_CHECKING:
    from services.generation.engine.core import Engine

FLOAT32 = "float32"


class EngineKind(StrEnum):
    """Engine of a step of the plan. STOCK is vLLM with its own defaults; NONE: a process with the device alone.

    TREES is V1 with draft trees, for which attention is our kernel's.
    """

    NONE = "no engine"
    STOCK = "stock vLLM"
    V1 = "V1"
    TREES = "V1 with trees"
    V2 = "V2"
    AHEAD = "V2 ahead"


@dataclass(frozen=True, slots=True)
class EngineSetup:
    """Engine, the model that it serves, its number type ("auto": the model's), and its limits."""

    kind: EngineKind
    model: Path
    dtype: str
    max_num_seqs: int
    max_model_len: int
    kv_bytes: int | None = None

    @property
    def on_v2(self) -> bool:
        """True if vLLM's V2 runner has to be chosen before vLLM is imported."""
        return self.kind in (EngineKind.V2, EngineKind.AHEAD)


@dataclass(frozen=True, slots=True)
class CudaSizes:
    """Settings: samples at once, contexts, drafts and the share of wrong ones, tokens of the exactness runs.

    `steps` are timed of each setting; `exact` samples have `tokens` tokens.
    """

    rows: tuple[int, ...] = (1, 8, 32, 128, 256)
    contexts: tuple[int, ...] = (512, 4096)
    drafts: tuple[int, ...] = (1, 2, 4, 8)
    wrong: tuple[float, ...] = (0.0, 0.2)
    drafted_rows: tuple[int, ...] = (8, 64)
    steps: int = 24
    exact: int = 16
    tokens: int = 96
    kv_bytes: int | None = None
    kinds: tuple[EngineKind, ...] = field(
        default=(EngineKind.STOCK, EngineKind.V1, EngineKind.V2, EngineKind.AHEAD, EngineKind.TREES)
    )

    @property
    def longest(self) -> int:
        """Most tokens of a sequence."""
        drafted = self.steps * (max(self.drafts) + 1)
        return max(max(self.contexts) + drafted + 64, self.tokens + 256)


def build(setup: EngineSetup) -> Any:
    """Return the engine of a setup, in this process. Nothing of vLLM may be imported before."""
    if setup.kind is EngineKind.STOCK:
        return StockVllm(setup)
    choose_runner("v2" if setup.on_v2 else "v1")
    return _ours(setup)


def _ours(setup: EngineSetup) -> Engine:
    from services.generation.engine.core import Engine

    return Engine(
        EngineOptions(
            model=str(setup.model),
            dtype=setup.dtype,
            max_num_seqs=setup.max_num_seqs,
            max_model_len=setup.max_model_len,
            kv_cache_memory_bytes=setup.kv_bytes,
            block_size=32 if setup.kv_bytes else None,
            engine="v2" if setup.on_v2 else "v1",
            schedule_ahead=setup.kind is EngineKind.AHEAD,
            trees=setup.kind is EngineKind.TREES,
        )
    )


@dataclass(frozen=True, slots=True)
class StockStepped:
    """Tokens that a step gave to a sample."""

    sample_id: str
    token_ids: list[int]


class StockVllm:
    """vLLM as its users have it, in this process: its own runner, scheduler and sampler, with log-probabilities."""

    def __init__(self, setup: EngineSetup) -> None:
        """Build the engine with vLLM's defaults, but for the sizes."""
        os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
        from vllm.engine.arg_utils import EngineArgs
        from vllm.v1.engine.llm_engine import LLMEngine

        sizes: dict[str, Any] = {} if setup.kv_bytes is None else {"kv_cache_memory_bytes": setup.kv_bytes}
        arguments = EngineArgs(
            model=str(setup.model),
            tokenizer=str(setup.model),
            skip_tokenizer_init=True,
            dtype=setup.dtype,  # type: ignore[arg-type]
            max_num_seqs=setup.max_num_seqs,
            max_model_len=setup.max_model_len,
            disable_log_stats=True,
            # Elsewhere it would compile for minutes.
            enforce_eager=on_cpu(),
            **sizes,
        )
        self._engine = LLMEngine.from_engine_args(arguments)
        self._core: Any = self._engine.engine_core.engine_core  # type: ignore[attr-defined]
        self.vocab_size = self._core.vllm_config.model_config.get_vocab_size()

    @property
    def kv_capacity(self) -> int:
        """Tokens whose KV fits."""
        cache = self._core.vllm_config.cache_config
        return int(cache.num_gpu_blocks) * int(cache.block_size)

    def add(self, sample_id: str, prompt: list[int], tokens: int) -> None:
        """Queue a sample of so many tokens."""
        from vllm import SamplingParams
        from vllm.sampling_params import RequestOutputKind

        params = SamplingParams(
            temperature=1.0,
            max_tokens=tokens,
            ignore_eos=True,
            logprobs=0,
            detokenize=False,
            output_kind=RequestOutputKind.DELTA,
        )
        self._engine.add_request(sample_id, {"prompt_token_ids": prompt}, params)

    def step(self) -> list[StockStepped]:
        """Run a step; returns its tokens, or those of the one before."""
        found: list[Any] = self._engine.step()
        return [StockStepped(each.request_id, list(each.outputs[0].token_ids)) for each in found]

    @property
    def has_work(self) -> bool:
        """True if a step would do anything."""
        return self._engine.has_unfinished_requests()

    def abort(self, sample_ids: list[str]) -> None:
        """End samples."""
        self._engine.abort_request(sample_ids)
