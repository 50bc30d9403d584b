"""Define the loads of the benchmark of moves: samples, and the instances that they begin on. Pure."""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass

from bench.migration.driver import LoadResult, Task
from examples.tinymath.tasks import make_problems
from examples.tinymath.tokenizer import prompt_ids
from paceline.v1 import sample_pb2
from services.contracts.seeds import sample_seed

PROMPT_TOKENS = 24
"""Prompt tokens of a sample of Figure 5's load."""
_SEED = 11
_FULL = "instance-0"


@dataclass(frozen=True, slots=True)
class TailOptions:
    """Prompts of tinymath, samples of each, and maximum tokens of a sample."""

    prompts: int
    samples: int
    tokens: int


def figure_5(instances: int, tokens: int) -> list[Task]:
    """Return 24 samples on one instance and 1 on each other, all of the same length."""
    sampling = sample_pb2.SamplingParams(max_tokens=tokens, ignore_eos=True)
    return [
        Task(
            f"figure/{n}",
            tuple(3 + (7 * n + place) % 500 for place in range(PROMPT_TOKENS)),
            sample_seed(_SEED, 0, "figure", n),
            sampling,
            _FULL if n < 24 else f"instance-{n - 23}",
        )
        for n in range(23 + instances)
    ]


def long_tail(plain: LoadResult | None, instances: int, options: TailOptions) -> list[Task]:
    """Return tinymath's prompts; those with longer measured responses begin on the first half of the instances."""
    problems = make_problems(seed=1, n=options.prompts)
    sampling = sample_pb2.SamplingParams(max_tokens=options.tokens)
    lengths: dict[str, int] = defaultdict(int)
    if plain is not None:
        for track in plain.tracks.values():
            lengths[track.task.key.partition("/")[0]] += len(track.tokens)
    ranked = sorted((problem.id for problem in problems), key=lambda name: (-lengths[name], name))
    half = max(1, instances // 2)
    # Deal the long ones to the first half in turn, and the short ones to the second half.
    places = {
        name: place % half + (half if place >= len(ranked) // 2 else 0) for place, name in enumerate(ranked)
    }
    return [
        Task(
            f"{problem.id}/{slot}",
            tuple(prompt_ids(problem.question)),
            sample_seed(_SEED, 1, problem.id, slot),
            sampling,
            f"instance-{places[problem.id]}",
        )
        for problem in problems
        for slot in range(options.samples)
    ]
