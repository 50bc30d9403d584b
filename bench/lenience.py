"""Lenient reuse in real training: how far samples are from the policy that learns from them, and what comes of it.

Every level trains from the same weights on the same problems, in one process with one platform. The trainer reports
the divergence of its samples, which the platform's controller of l works on where a KL target is set.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from statistics import fmean, median
from typing import Any

from bench.history import LENIENT, epoch_steps
from bench.reuse import reuse
from bench.systems import HISTORY, platform_of
from bench.training import Samples, TrainedStep, push, train
from examples.tinymath.train import MODEL, Options, new_learner
from paceline import Client, Exactness, WeightFolder
from services.generation.rollouts.diversity import distinct_share
from services.local import Platform

TARGET, GUARDED = "KL target", "diversity guard"
_GUARDED_LENIENCE = "lenient e^0.8"
"""The level that the guard is added to: the one that reuses most."""

Runs = dict[str, Sequence[TrainedStep]]
Say = Callable[[str, TrainedStep], None]


def run_all(
    options: Options, exact: Sequence[TrainedStep], target_epochs: int, instances: int, folder: Path, say: Say
) -> tuple[Runs, dict[str, float]]:
    """Trains with each level, then with a KL target and with the diversity guard, set by what was found before.

    `exact` is the run without reuse. Returns the runs and the two settings.
    """
    runs: Runs = {"exact": exact}
    config = platform_of(HISTORY, MODEL, instances, folder / "platform")
    with Platform(config) as platform, platform.client() as client:

        def run(name: str, exactness: Exactness, options: Options = options) -> None:
            weights = WeightFolder(folder / f"weights-{len(runs)}", MODEL)
            runs[name] = _train(client, exactness, options, weights, partial(say, name))

        for name, exactness in LENIENT.items():
            run(name, exactness)
        target, floor = kl_target(runs, options), diversity_floor(exact, options)
        longer = replace(options, steps=target_epochs * epoch_steps(options))
        run(TARGET, Exactness.lenient(kl_target=target), longer)
        run(GUARDED, replace(LENIENT[_GUARDED_LENIENCE], diversity_floor=floor))
    return runs, {"kl_target": target, "diversity_floor": floor}


def _train(
    client: Client,
    exactness: Exactness,
    options: Options,
    weights: WeightFolder,
    say: Callable[[TrainedStep], None],
) -> list[TrainedStep]:
    """One run from the model's first weights."""
    steps = []
    with client.run(f"training-{time.time_ns():x}", seed=options.seed) as run:
        push(run, MODEL.absolute())
        learner = new_learner(MODEL, options)
        for step in train(run, learner, options, weights, exactness):
            steps.append(step)
            say(step)
    return steps


def kl_target(runs: Mapping[str, Sequence[TrainedStep]], options: Options) -> float:
    """Between what the two lower levels came to, so that the controller has to find an l between theirs."""
    low, high = (fmean(step.kl for step in runs[name][epoch_steps(options) :]) for name in list(LENIENT)[:2])
    return math.sqrt(max(low, 1e-9) * max(high, 1e-9))


def diversity_floor(exact: Sequence[TrainedStep], options: Options) -> float:
    """Return the median diversity of groups without reuse: about half of them are below it."""
    return round(median(diversities(step.samples for step in exact[epoch_steps(options) :])), 3)


def diversities(steps: Iterable[Samples]) -> list[float]:
    """Return the share of distinct n-grams of each group."""
    found = []
    for samples in steps:
        groups: dict[str, list[list[int]]] = {}
        for key, sample in samples.items():
            groups.setdefault(key.prompt_id, []).append(sample.token_ids.tolist())
        found += [distinct_share(rollouts) for rollouts in groups.values()]
    return found


def figures(options: Options, runs: Mapping[str, Sequence[TrainedStep]]) -> dict[str, dict[str, Any]]:
    """Return the table: a row for each run, over the epochs in which there was something to reuse."""
    size = epoch_steps(options)
    return {name: _figures(steps[size:], steps, size) for name, steps in runs.items()}


def _figures(counted: Sequence[TrainedStep], steps: Sequence[TrainedStep], size: int) -> dict[str, Any]:
    return {
        **reuse([step.samples for step in counted]),
        "rollout_seconds": fmean(step.rollout_seconds for step in counted),
        "kl": fmean(step.kl for step in counted),
        "update_kl": fmean(step.update_kl for step in counted),
        "clip_fraction": fmean(step.clip_fraction for step in counted),
        "diversity": fmean(diversities(step.samples for step in counted)),
        "reward_by_epoch": [
            fmean(step.reward for step in steps[begin : begin + size]) for begin in range(0, len(steps), size)
        ],
        "kl_by_step": [step.kl for step in steps],
        "lenience_by_step": [_lenience(step.samples) for step in steps],
    }


def _lenience(samples: Samples) -> float | None:
    """Return the l that a step's samples were made with."""
    return next(iter(samples.values())).provenance.exactness.lenience
