"""Set up a platform with one plain instance on the first core, on which overheads are measured."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

from bench.report import cores, option_parser
from examples.tinymath.tasks import make_problems
from examples.tinymath.tokenizer import prompt_ids
from services.local.config import PlatformConfig
from services.local.machine import cpu_environment
from services.platform.launching import cpu_list

KV_BYTES = 512 << 20


def engine_cores() -> tuple[int, ...]:
    """Return the core of the engine; everything else shares the others."""
    return cores()[:1]


def one_instance(model: Path, folder: Path, **more: Any) -> PlatformConfig:
    """Return a float32 platform without speculation; `more` are fields of the configuration."""
    engine = ("--kv-cache-memory-bytes", str(KV_BYTES), "--threads-bind", cpu_list(engine_cores()))
    return PlatformConfig(
        model=model,
        instances=1,
        folder=folder,
        instance_options=("--dtype", "float32", "--speculation", "off", *engine),
        environment=cpu_environment(engine_cores()),
        pin=False,
        reallocator=False,
        **more,
    )


def prompts(count: int) -> dict[str, list[int]]:
    """Return prompts of tinymath by id."""
    return {problem.id: prompt_ids(problem.question) for problem in make_problems(seed=1, n=count)}


def overhead_arguments(about: str | None, rounds: int) -> argparse.Namespace:
    """Parse the options: `rounds` by default, of a step of `prompts` x `samples`."""
    options = option_parser(about)
    options.add_argument("--model", type=Path, default=Path("examples/tinymath/model"))
    options.add_argument("--rounds", type=int, default=rounds)
    options.add_argument("--prompts", type=int, default=16)
    options.add_argument("--samples", type=int, default=8)
    options.add_argument("--max-tokens", type=int, default=512)
    return options.parse_args()
