"""vLLM as its users have it, driven step by step in this process."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, slots=True)
class StockStepped:
    """Tokens that a step gave to a sample."""

    sample_id: str
    token_ids: list[int]


class StockVllm:
    """vLLM as its users have it, in this process: its own runner, scheduler and sampler, with log-probabilities."""

    def __init__(self, **arguments: Any) -> None:
        """Build the engine with vLLM's defaults, but for some of its own arguments."""
        from vllm.engine.arg_utils import EngineArgs
        from vllm.v1.engine.llm_engine import LLMEngine

        self._engine = LLMEngine.from_engine_args(
            EngineArgs(**arguments, skip_tokenizer_init=True, disable_log_stats=True)
        )
        self._core: Any = self._engine.engine_core.engine_core  # type: ignore[attr-defined]
        self.vocab_size = self._core.vllm_config.model_config.get_vocab_size()

    @property
    def kv_capacity(self) -> int:
        """Tokens whose KV fits."""
        cache = self._core.vllm_config.cache_config
        return int(cache.num_gpu_blocks) * int(cache.block_size)

    def add(self, sample_id: str, prompt: list[int], tokens: int) -> None:
        """Queue a sample that is to have `tokens` tokens."""
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
        """Run a step; return its tokens, or those of the one before."""
        found: list[Any] = self._engine.step()
        return [StockStepped(each.request_id, list(each.outputs[0].token_ids)) for each in found]

    @property
    def has_work(self) -> bool:
        """True if a step would do anything."""
        return self._engine.has_unfinished_requests()

    def abort(self, sample_ids: list[str]) -> None:
        """End samples."""
        self._engine.abort_request(sample_ids)
