"""Run samples through an engine of this process, ours or stock vLLM, step by step."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import count, pairwise
from random import Random
from statistics import median
from typing import Any

import torch

from services.contracts.sampling import Sampling
from services.generation.engine.types import EngineRequest

_WARM_UP = 2
_serials = count(1)
Truth = Mapping[int, Sequence[int]]
"""Tokens of each sample, by its number."""


@dataclass(frozen=True, slots=True)
class StockStepped:
    """Tokens that a sample got in a step."""

    sample_id: str
    token_ids: list[int]


class StockVllm:
    """Stock vLLM in this process: its own runner, scheduler and sampler, with log-probabilities."""

    def __init__(self, **arguments: Any) -> None:
        """Build the engine with vLLM's defaults, overridden by the given engine arguments."""
        from vllm.engine.arg_utils import EngineArgs
        from vllm.v1.engine.llm_engine import LLMEngine

        self._engine = LLMEngine.from_engine_args(
            EngineArgs(**arguments, skip_tokenizer_init=True, disable_log_stats=True)
        )
        self._core: Any = self._engine.engine_core.engine_core  # type: ignore[attr-defined]
        model = self._core.vllm_config.model_config
        self.vocab_size, self.max_model_len = model.get_vocab_size(), model.max_model_len

    @property
    def kv_capacity(self) -> int:
        """Number of tokens whose KV fits."""
        cache = self._core.vllm_config.cache_config
        return int(cache.num_gpu_blocks) * int(cache.block_size)

    def add(self, sample_id: str, prompt: list[int], tokens: int) -> None:
        """Queue a sample that generates `tokens` tokens."""
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
        """Run a step; return its tokens, or with asynchronous scheduling the tokens of the previous step."""
        found: list[Any] = self._engine.step()
        return [StockStepped(each.request_id, list(each.outputs[0].token_ids)) for each in found]

    @property
    def has_work(self) -> bool:
        """Return True if a step would do anything."""
        return self._engine.has_unfinished_requests()

    def abort(self, sample_ids: list[str]) -> None:
        """End samples."""
        self._engine.abort_request(sample_ids)


@dataclass(frozen=True, slots=True)
class DraftGiving:
    """Drafts for each sample: `length` tokens from `truth`, a share `wrong` of which is wrong."""

    length: int = 0
    wrong: float = 0.0
    truth: Truth = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class DrivenBatch:
    """Samples with random prompts of `context` tokens that decode `tokens` tokens each."""

    rows: int
    context: int
    tokens: int


@dataclass(slots=True)
class Driven:
    """Steps in which all samples decoded: seconds of each, their tokens, and the host's time for drafts."""

    seconds: list[float] = field(default_factory=list)
    tokens: int = 0
    drafting: list[float] = field(default_factory=list)
    responses: dict[int, list[int]] = field(default_factory=dict)


class BatchDriver:
    """One batch in an engine. Every run has new ids, because vLLM must never get the same id twice."""

    def __init__(self, engine: Any, batch: DrivenBatch, drafts: DraftGiving) -> None:
        self._engine, self._batch, self._drafts = engine, batch, drafts
        self._stock = isinstance(engine, StockVllm)
        self._names = [f"{next(_serials)}-{i}" for i in range(batch.rows)]
        self._places = {name: i for i, name in enumerate(self._names)}
        self._truths = {name: drafts.truth[i] for name, i in self._places.items()} if drafts.length else {}
        self._found = Driven(responses={i: [] for i in range(batch.rows)})
        self._random = Random(1)
        self._before: Callable[[], object] = self._put if drafts.length else _nothing
        self._vocab = engine.vocab_size if self._stock else engine.limits.vocab_size

    def enter(self) -> None:
        """Queue the samples, and step until all of them decode and the first steps are over."""
        random = Random(self._batch.context)
        for i, name in enumerate(self._names):
            prompt = [random.randrange(3, self._vocab) for _ in range(self._batch.context)]
            if self._stock:
                self._engine.add(name, prompt, self._batch.tokens)
                continue
            sampling = Sampling(max_tokens=self._batch.tokens, ignore_eos=True)
            self._engine.add(EngineRequest(name, tuple(prompt), (), sampling, 1000 + i))
        while not all(self._found.responses.values()):
            if not self._engine.has_work:
                raise RuntimeError(f"samples of {self._batch} ended before all had begun")
            self._step()
        for _ in range(_WARM_UP):
            self._step()

    def run(self, steps: int) -> Driven:
        """Run timed steps while every sample gets tokens in each of them."""
        return self.run_with(self._put if self._drafts.length else _nothing, steps)

    def run_with(self, put: Callable[[], object], steps: int) -> Driven:
        """Run timed steps as `run` does, and call `put` before each step to hand over its drafts."""
        self._before = put
        for _ in range(steps):
            began = time.perf_counter()
            before = sum(map(len, self._found.responses.values()))
            drafting, stepped = self._step()
            if stepped < self._batch.rows:
                break
            self._found.seconds.append(time.perf_counter() - began)
            self._found.drafting.append(drafting)
            self._found.tokens += sum(map(len, self._found.responses.values())) - before
        return self._found

    def leave(self) -> None:
        """End the samples, and run a step that lets the worker remove them."""
        self._engine.abort(self._names)
        while self._engine.has_work:
            self._engine.step()

    def _step(self) -> tuple[float, int]:
        """Run a step; return the seconds of its drafts, and the number of samples that got tokens."""
        began = time.perf_counter()
        self._before()
        drafting = time.perf_counter() - began
        stepped = self._engine.step()
        for step in stepped:
            self._found.responses[self._places[step.sample_id]] += step.token_ids
        return drafting, len(stepped)

    def _put(self) -> None:
        drafts = self._drafts
        self._engine.put_drafts(
            drafts_of(self._engine, self._truths, drafts.length, drafts.wrong, self._random)
        )


def drafts_of(
    engine: Any, truths: Mapping[str, Sequence[int]], length: int, wrong: float, random: Random
) -> dict[str, list[int]]:
    """Return drafts of `length` tokens of each sample's truth, a share `wrong` of which is wrong.

    They also cover the tokens that are in flight.
    """
    requests, found, vocab = engine._scheduler.requests, {}, engine.limits.vocab_size
    for state in engine.decoding():
        here, ahead = len(state.response), requests[state.sample_id].num_output_placeholders
        # `room` counts the tokens after the last known one.
        known = truths[state.sample_id][here : here + min(ahead + length, state.room)]
        tokens = [(each + (random.random() < wrong)) % vocab for each in known]
        if tokens:
            found[state.sample_id] = tokens
    return found


def _nothing() -> None:
    """Hand over no drafts."""


class HostMark:
    """A point in time on the host, with the interface of a CUDA event."""

    def __init__(self) -> None:
        self._at = 0.0

    def record(self) -> None:
        """Record the time."""
        self._at = time.perf_counter()

    def elapsed_time(self, later: HostMark) -> float:
        """Return the milliseconds until a later mark."""
        return 1000 * (later._at - self._at)


class StepWatch:
    """Measure one worker's runner. Call `begin`, run steps, then call `figures`."""

    def __init__(self, worker: Any) -> None:
        """Install the marks in the runner of a worker of this process."""
        self._runner = worker.model_runner
        self._cuda = self._runner.device.type == "cuda"
        self._begun: list[Any] = []
        self._ended: list[Any] = []
        self._graphs: Counter[str] = Counter()
        self._on = False
        execute, sample = self._runner.execute_model, self._runner.sample_tokens

        def executed(*args: Any, **kwargs: Any) -> Any:
            self._mark(self._begun)
            return execute(*args, **kwargs)

        def sampled(*args: Any, **kwargs: Any) -> Any:
            made = sample(*args, **kwargs)
            self._mark(self._ended)
            return made

        self._runner.execute_model, self._runner.sample_tokens = executed, sampled
        self._watch_graphs()

    def begin(self) -> None:
        """Discard all marks so far; only later steps count."""
        self._begun.clear()
        self._ended.clear()
        self._graphs.clear()
        self._on = True

    def figures(self) -> dict[str, Any]:
        """Stop; return the medians of busy and idle milliseconds a step, and the steps by kind of graph."""
        self._on = False
        if self._cuda:
            torch.cuda.synchronize()
        pairs = list(zip(self._begun, self._ended, strict=False))
        busy = [begin.elapsed_time(end) for begin, end in pairs]
        idle = [end.elapsed_time(begin) for (_, end), (begin, _) in pairwise(pairs)]
        return {
            "busy_ms": median(busy) if busy else None,
            "idle_ms": median(idle) if idle else None,
            "graphs": dict(self._graphs),
        }

    def _mark(self, marks: list[Any]) -> None:
        if self._on:
            marks.append(torch.cuda.Event(enable_timing=True) if self._cuda else HostMark())
            marks[-1].record()

    def _watch_graphs(self) -> None:
        """Count the graphs that vLLM chooses: V1 returns the mode, V2 a description of the batch."""
        for name in ("cudagraph_dispatcher", "cudagraph_manager"):
            owner = getattr(self._runner, name, None)
            if owner is not None:
                owner.dispatch = self._counted(owner.dispatch)

    def _counted(self, dispatch: Any) -> Any:
        def counted(*args: Any, **kwargs: Any) -> Any:
            chosen = dispatch(*args, **kwargs)
            if self._on:
                mode = chosen[0] if isinstance(chosen, tuple) else chosen.cg_mode
                self._graphs[mode.name] += 1
            return chosen

        return counted


def watched(core: Any) -> StepWatch:
    """Return the watch of an engine core with one worker in this process."""
    watches: list[StepWatch] = core.collective_rpc(StepWatch)
    return watches[0]
