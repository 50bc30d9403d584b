"""Run a stock vLLM engine in a separate process, on one core, that generates a part of each step."""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from bench.rollout.registry import StockSystem
from bench.worker import PipedWorker

if TYPE_CHECKING:
    from bench.rollout.told_tokens import ToldTokens
    from services.generation.engine.core import Engine

_MAX_SEQS = 128


@dataclass(frozen=True, slots=True)
class StockSetup:
    """Model, core and system of an engine."""

    model: Path
    core: int
    kv_bytes: int
    system: StockSystem
    log: Path
    steps: Path
    """File for the shapes of its engine steps."""


@dataclass(frozen=True, slots=True)
class StockSample:
    """A sample to generate: a prompt, and the response that the sampler must draw."""

    name: str
    prompt: tuple[int, ...]
    response: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class StockStep:
    """Samples of an engine in one step, of at most `max_tokens` tokens."""

    samples: Sequence[StockSample]
    max_tokens: int
    temperature: float


@dataclass(slots=True)
class StockMeasurement:
    """Responses and times of a step, by sample; times are of the machine's monotonic clock."""

    responses: dict[str, list[int]] = field(default_factory=dict)
    decode_steps: dict[str, int] = field(default_factory=dict)
    ended: dict[str, float] = field(default_factory=dict)
    began: float = 0.0
    drafted: int = 0
    accepted: int = 0
    verified: int = 0


class StockEngine(PipedWorker):
    """The process. Send orders to all engines of a system before waiting for any.

    An order is a step, whose answer is its measurement, or a folder of weights to load.
    """

    def __init__(self, setup: StockSetup) -> None:
        # Set before the process begins, because it imports PyTorch, which reads them, before its first own line.
        with _environment(setup.core):
            super().__init__(_build, setup)


@contextmanager
def _environment(core: int) -> Iterator[None]:
    """Set the environment variables of an engine on this core for processes that start in this context."""
    before = dict(os.environ)
    os.environ |= {
        "OMP_NUM_THREADS": "1",
        "VLLM_CPU_OMP_THREADS_BIND": str(core),
        # vLLM's n-gram drafter is compiled for several threads. On a single core they would only wait for each
        # other.
        "NUMBA_NUM_THREADS": "1",
        "HF_HUB_OFFLINE": "1",
        # Packages of the system may have plug-ins that change vLLM beyond what is compared.
        "VLLM_PLUGINS": "",
    }
    try:
        yield
    finally:
        os.environ.clear()
        os.environ.update(before)


def _build(setup: StockSetup) -> Callable[[StockStep | Path], StockMeasurement | None]:
    os.sched_setaffinity(0, {setup.core})
    setup.log.parent.mkdir(parents=True, exist_ok=True)
    with setup.log.open("wb") as log:
        os.dup2(log.fileno(), 1)
        os.dup2(log.fileno(), 2)
    if setup.system.needs is not None:
        sys.path.insert(0, str(setup.system.needs.absolute()))
    engine, tokens = _start(setup)

    def carry_out(order: StockStep | Path) -> StockMeasurement | None:
        if isinstance(order, Path):
            load_weights(engine, order)
            return None
        return _generate(engine, tokens, setup, order)

    return carry_out


def _start(setup: StockSetup) -> tuple[Engine, ToldTokens]:
    from bench.rollout.told_tokens import ToldTokens
    from services.generation.engine.core import Engine
    from services.generation.engine.types import EngineOptions
    from services.platform.memory import keep_freed_memory

    # As Paceline's instances do.
    keep_freed_memory()
    tokens = ToldTokens()
    tokens.install()
    options = EngineOptions(
        str(setup.model),
        dtype="float32",
        max_num_seqs=_MAX_SEQS,
        kv_cache_memory_bytes=setup.kv_bytes,
        coupled=False,
        vllm_speculation=setup.system.speculation,
        step_log=setup.steps,
    )
    return Engine(options), tokens


def load_weights(engine: Engine, folder: Path) -> None:
    """Serve the weights in a folder."""
    from safetensors.torch import load_file

    engine.apply_weights(
        pair for path in sorted(folder.glob("*.safetensors")) for pair in load_file(path).items()
    )


def _generate(engine: Engine, tokens: ToldTokens, setup: StockSetup, order: StockStep) -> StockMeasurement:
    from services.contracts.sampling import Sampling
    from services.generation.engine.types import EngineRequest

    sampling = Sampling(max_tokens=order.max_tokens, temperature=order.temperature)
    responses: Mapping[str, Sequence[int]] = {sample.name: sample.response for sample in order.samples}
    speculation: dict[str, Any] = setup.system.speculation or {}
    tokens.begin(responses, speculation.get("num_speculative_tokens", 0))
    found = StockMeasurement(
        responses={name: [] for name in responses},
        decode_steps=dict.fromkeys(responses, 0),
        began=time.monotonic(),
    )
    for sample in order.samples:
        engine.add(EngineRequest(sample.name, sample.prompt, (), sampling, 0))
    while len(found.ended) < len(responses):
        for step in engine.step():
            found.responses[step.sample_id] += step.token_ids
            found.decode_steps[step.sample_id] += bool(step.token_ids)
            if step.finish is not None:
                found.ended[step.sample_id] = time.monotonic()
    counts = tokens.counts
    found.drafted, found.accepted, found.verified = counts.drafted, counts.accepted, counts.verified
    return found
