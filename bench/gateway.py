"""Overhead of the platform: one workload through gateway, gRPC and instance, and on the bare engine.

Both engines have the same core, the first one; client and gateway have the others. Both stay up for the whole run
and take turns, round by round, while the other is idle; the ratio is that of the medians. Speculation is off on
both. Writes runs/bench/gateway.json.

    python -m bench.gateway [--rounds 7] [--model DIR]
"""

from __future__ import annotations

import argparse
import multiprocessing
import os
import statistics
import time
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path

import paceline
from bench.report import Figures, cores, show, write
from services.contracts.seeds import sample_seed
from services.local.config import PlatformConfig
from services.local.pinning import cpu_environment
from services.local.platform import Platform
from services.platform.cores import cpu_list

_GOAL = 1.08
_RUN_SEED = 7
_KV_BYTES = 512 << 20


@dataclass(frozen=True, slots=True)
class Workload:
    """`prompts` token ids by prompt id; `samples` of each, at most `max_tokens` long, at temperature 1."""

    prompts: dict[str, list[int]]
    samples: int
    max_tokens: int

    @property
    def keys(self) -> list[tuple[str, int]]:
        """(prompt id, slot) of every sample."""
        return [(name, slot) for name in self.prompts for slot in range(self.samples)]


def main() -> None:
    """Measure, show and write."""
    arguments = _arguments()
    workload = _workload(arguments.prompts, arguments.samples, arguments.max_tokens)
    options = PlatformConfig(
        model=arguments.model,
        instances=1,
        folder=Path("runs/bench/gateway"),
        instance_options=("--dtype", "float32", "--speculation", "off", *_engine_options()),
        environment=cpu_environment(_engine_cores()),
        pin=False,
        reallocator=False,
    )
    with (
        Platform(options) as platform,
        _Bare(arguments.model) as bare,
        platform.client() as client,
        client.run("bench", seed=_RUN_SEED) as run,
    ):
        rounds = [
            (bare.round(workload, step), _platform_round(run, workload, step))
            for step in range(arguments.rounds + 1)
        ]
    # The first round of each warms up caches and connections.
    direct, through = (statistics.median(side) for side in zip(*rounds[1:], strict=True))
    figures: Figures = {
        "direct_seconds": direct,
        "platform_seconds": through,
        "overhead_ratio": through / direct,
        "goal": _GOAL,
        "samples": len(workload.keys),
        "rounds": arguments.rounds,
    }
    show("gateway: wall time of one step of rollouts", figures)
    write("gateway", figures)


def _platform_round(run: paceline.Run, workload: Workload, step: int) -> float:
    groups = [
        paceline.Group(name, tokens, samples=workload.samples) for name, tokens in workload.prompts.items()
    ]
    began = time.perf_counter()
    count = sum(1 for _ in run.rollout(step, groups, paceline.SamplingParams(max_tokens=workload.max_tokens)))
    took = time.perf_counter() - began
    assert count == len(workload.keys)
    return took


class _Bare:
    """The engine alone in a process of its own, driven in a plain loop."""

    def __init__(self, model: Path) -> None:
        context = multiprocessing.get_context("spawn")
        self._pipe, theirs = context.Pipe()
        os.environ.update(cpu_environment(_engine_cores()))
        self._process = context.Process(target=_serve, args=(theirs, model), daemon=True)

    def __enter__(self) -> _Bare:
        self._process.start()
        self._pipe.recv()
        return self

    def __exit__(self, *_: object) -> None:
        self._pipe.send(None)
        self._process.join(10)

    def round(self, workload: Workload, step: int) -> float:
        """Return the seconds for the workload."""
        self._pipe.send((workload, step))
        return float(self._pipe.recv())


def _serve(pipe: Connection, model: Path) -> None:
    from services.generation.engine.core import Engine
    from services.generation.engine.types import EngineOptions
    from services.generation.engine.warmup import warm_up

    engine = Engine(EngineOptions(model=str(model), dtype="float32", kv_cache_memory_bytes=_KV_BYTES))
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
        seed = sample_seed(_RUN_SEED, step, name, slot)
        prompt = tuple(workload.prompts[name])
        engine.add(EngineRequest(f"{step}-{name}-{slot}", prompt, (), sampling, seed))
    while engine.has_work:
        engine.step()
    return time.perf_counter() - began


def _workload(prompts: int, samples: int, max_tokens: int) -> Workload:
    from examples.tinymath.tasks import make_problems
    from examples.tinymath.tokenizer import prompt_ids

    problems = make_problems(seed=1, n=prompts)
    return Workload({problem.id: prompt_ids(problem.question) for problem in problems}, samples, max_tokens)


def _engine_cores() -> tuple[int, ...]:
    return cores()[:1]


def _engine_options() -> tuple[str, ...]:
    return ("--kv-cache-memory-bytes", str(_KV_BYTES), "--threads-bind", cpu_list(_engine_cores()))


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", type=Path, default=Path("examples/tinymath/model"))
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--prompts", type=int, default=16)
    parser.add_argument("--samples", type=int, default=8)
    parser.add_argument("--max-tokens", type=int, default=512)
    return parser.parse_args()


if __name__ == "__main__":
    main()
