"""Run the engine without a platform, as the baseline of the platform."""

from __future__ import annotations

import multiprocessing
import os
import time
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path

from bench.report import cores
from services.contracts.seeds import sample_seed
from services.local.machine import cpu_environment

RUN_SEED = 7
KV_BYTES = 512 << 20


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


def engine_cores() -> tuple[int, ...]:
    """Return the core that both engines use."""
    return cores()[:1]


class BareEngine:
    """The engine alone, in a separate process that runs it in a plain loop."""

    def __init__(self, model: Path) -> None:
        context = multiprocessing.get_context("spawn")
        self._pipe, theirs = context.Pipe()
        os.environ.update(cpu_environment(engine_cores()))
        self._process = context.Process(target=_serve, args=(theirs, model), daemon=True)

    def __enter__(self) -> BareEngine:
        self._process.start()
        self._pipe.recv()
        return self

    def __exit__(self, *_: object) -> None:
        self._pipe.send(None)
        self._process.join(10)

    def round(self, workload: Workload, step: int) -> float:
        """Run the workload and return the seconds that it took."""
        self._pipe.send((workload, step))
        return float(self._pipe.recv())


def _serve(pipe: Connection, model: Path) -> None:
    from services.generation.engine.core import Engine
    from services.generation.engine.startup import warm_up
    from services.generation.engine.types import EngineOptions

    engine = Engine(EngineOptions(model=str(model), dtype="float32", kv_cache_memory_bytes=KV_BYTES))
    warm_up(engine)
    pipe.send("ready")
    while (message := pipe.recv()) is not None:
        workload, step = message
        pipe.send(_drive(engine, workload, step))


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
