"""Run the engine without a platform, as the baseline of the platform."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from bench.one_instance import KV_BYTES, engine_cores
from bench.worker import PipedWorker
from services.contracts.seeds import sample_seed
from services.local.machine import cpu_environment

RUN_SEED = 7


@dataclass(frozen=True, slots=True)
class Workload:
    """`samples` responses to each of `prompts` (token ids by id), at most `max_tokens` long, at temperature 1."""

    prompts: dict[str, list[int]]
    samples: int
    max_tokens: int

    @property
    def keys(self) -> list[tuple[str, int]]:
        """Return the (prompt id, slot) of every sample."""
        return [(name, slot) for name in self.prompts for slot in range(self.samples)]


class BareEngine(PipedWorker):
    """The engine alone, in a separate process that runs it in a plain loop."""

    def __init__(self, model: Path) -> None:
        os.environ.update(cpu_environment(engine_cores()))
        super().__init__(_build, model)

    def round(self, workload: Workload, step: int) -> float:
        """Run the workload and return the seconds that it took."""
        return float(self.ask((workload, step)))


def _build(model: Path) -> Callable[[tuple[Workload, int]], float]:
    from services.generation.engine.core import Engine
    from services.generation.engine.startup import warm_up
    from services.generation.engine.types import EngineOptions

    engine = Engine(EngineOptions(model=str(model), dtype="float32", kv_cache_memory_bytes=KV_BYTES))
    warm_up(engine)
    return lambda order: _drive(engine, *order)


def _drive(engine: object, workload: Workload, step: int) -> float:
    from services.contracts.sampling import Sampling
    from services.generation.engine.core import Engine
    from services.generation.engine.types import EngineRequest

    assert isinstance(engine, Engine)
    sampling = Sampling(max_tokens=workload.max_tokens)
    began = time.perf_counter()
    for name, slot in workload.keys:
        seed = sample_seed(RUN_SEED, step, name, slot)
        prompt = tuple(workload.prompts[name])
        engine.add(EngineRequest(f"{step}-{name}-{slot}", prompt, (), sampling, seed))
    while engine.has_work:
        engine.step()
    return time.perf_counter() - began
