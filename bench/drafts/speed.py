"""Speed and memory of both indexes: insertion, steps of the running samples, resident bytes."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from functools import partial
from statistics import median
from typing import Any

import psutil

from bench.drafts.indexes import (
    ARCTIC_DEPTHS,
    ARCTIC_LIMITS,
    WINDOW,
    ArcticIndex,
    ComparedIndex,
    PacelineIndex,
    arctic_missing,
    fill,
)
from bench.drafts.texts import LENGTH, ROLLOUTS, RUNNING, RUNNING_PROMPTS, RunningGroup, made_up_groups
from kernels.suffix_index import warm_up

APPENDED = 3
"""Tokens that each step appends to a sample."""


def step_seconds(sides: Sequence[ComparedIndex], groups: Sequence[RunningGroup]) -> list[float]:
    """Return the median seconds of a step of all running samples, for each side; they take turns."""
    each = RUNNING // RUNNING_PROMPTS
    samples = [
        (prompt, ROLLOUTS + i, groups[prompt]) for prompt in range(RUNNING_PROMPTS) for i in range(each)
    ]
    for side in sides:
        side.start(samples)
    took: list[list[float]] = [[] for _ in sides]
    for place in range(0, LENGTH - APPENDED, APPENDED):
        new = [group.rollouts[rollout][place : place + APPENDED] for _, rollout, group in samples]
        for side, seconds in zip(sides, took, strict=True):
            start = time.perf_counter()
            side.step(new, WINDOW)
            seconds.append(time.perf_counter() - start)
    return [median(seconds) for seconds in took]


def resident_bytes(kind: str) -> float:
    """Return the bytes by which a process grows as one side caches the made-up texts, for each token of them."""
    command = [sys.executable, "-m", "bench.drafts.speed", kind]
    return float(json.loads(subprocess.run(command, check=True, capture_output=True, text=True).stdout))


def measure_resident(kind: str) -> float:
    """Return the resident bytes a token of one index: the child process of `resident_bytes` runs this."""
    groups = made_up_groups()
    if kind == "ours":
        warm_up()
        side: ComparedIndex = PacelineIndex(2 * cached_tokens(groups))
    else:
        side = ArcticIndex(int(kind), ARCTIC_LIMITS[0], prefixed=False)
    process = psutil.Process()
    before = process.memory_info().rss
    fill(side, groups, ROLLOUTS)
    return (process.memory_info().rss - before) / cached_tokens(groups)


def cached_tokens(groups: Sequence[RunningGroup]) -> int:
    """Return the number of tokens of the rollouts that are cached, prompts not counted."""
    return sum(len(rollout) for group in groups for rollout in group.rollouts[:ROLLOUTS])


def bare_tree_seconds(depth: int, groups: Sequence[RunningGroup]) -> float:
    """Return the seconds of insertion to arctic's tree without its cache, which keeps one for each request."""
    from arctic_inference.suffix_decoding._C import SuffixTree  # type: ignore[import-not-found]

    tree = SuffixTree(depth)
    texts = [rollout for group in groups for rollout in group.rollouts[:ROLLOUTS]]
    start = time.perf_counter()
    for name, text in enumerate(texts):
        tree.extend_ndarray(name, text)
    return time.perf_counter() - start


def measure_speed(rounds: int = 3) -> dict[str, Any]:
    """Compare insertion, steps and memory of both indexes over cached tokens, at each depth of arctic's."""
    groups = made_up_groups()
    tokens = cached_tokens(groups)
    makers: dict[str, Callable[[], ComparedIndex]] = {"ours": lambda: PacelineIndex(2 * tokens)}
    if arctic_missing() is None:
        for depth in ARCTIC_DEPTHS:
            makers[f"arctic_{depth}"] = partial(ArcticIndex, depth, ARCTIC_LIMITS[0], prefixed=False)
    warm_up()
    inserted = dict.fromkeys(makers, float("inf"))
    stepped = dict.fromkeys(makers, float("inf"))
    for _ in range(rounds):
        sides = {name: make() for name, make in makers.items()}
        for name, side in sides.items():
            inserted[name] = min(inserted[name], fill(side, groups, ROLLOUTS))
        for name, seconds in zip(sides, step_seconds(list(sides.values()), groups), strict=True):
            stepped[name] = min(stepped[name], seconds)
    figures: dict[str, Any] = {"cached_tokens": tokens}
    if arctic_missing() is None:
        bare = min(bare_tree_seconds(ARCTIC_DEPTHS[0], groups) for _ in range(rounds))
        figures["insert_tokens_per_second_arctic_bare_tree"] = tokens / bare
    for name in makers:
        figures[f"insert_tokens_per_second_{name}"] = tokens / inserted[name]
        figures[f"batch_step_microseconds_{name}"] = stepped[name] * 1e6
        figures[f"bytes_per_token_{name}"] = resident_bytes(name.removeprefix("arctic_"))
    return figures


if __name__ == "__main__":
    print(json.dumps(measure_resident(sys.argv[1])))
