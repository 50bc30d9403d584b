"""SPEC-RL's lenience in real training: time, distance from the policy that learns, and reward, over seeds.

Each cell (level, seed) trains from the same weights, on a pool whose problems come back after some steps, and then
answers problems that it has not trained on. Levels are plain decoding, cached rollouts taken over with some l and
then plain decoding (SPEC-RL as published), and COUPLED_HISTORY with its drafts, which is lossless. The trainer
reports the divergence of its samples, on which the controller of l works where a KL target is set; that, and the
diversity guard, are set by what the cells of the same seed came to before. Only epochs after the first count.

Cells are kept under runs/bench/lenience with the hash of the code that they depend on: a later call measures what
is missing. Writes runs/bench/lenience.json. Other programs on the cores change seconds and nothing else.

    python -m bench.lenience [--seeds 0 1 2] [--epochs 2] [--pool 64] [--levels NAME ...] [--minutes 25]
"""

from __future__ import annotations

import argparse
import json
import math
import time
import warnings
from collections.abc import Iterable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import replace
from itertools import product
from pathlib import Path
from statistics import fmean, median
from typing import Any

from bench.history import epoch_steps
from bench.lenience_table import LEVEL_COLUMNS, Cells, by_level, shown
from bench.report import console, show_rows, write
from bench.reuse import TAKEN_OVER, VERIFIED_ROWS, reuse
from bench.rollout.cells import cell_key, code_hash
from bench.scrape import Metrics, scrape, together
from bench.systems import HISTORY, SPEC_RL, System, platform_of
from bench.training import Samples, TrainedStep, push, sampling_of, train
from examples.tinymath.grpo import GrpoLearner
from examples.tinymath.tasks import PRACTICE, make_problems
from examples.tinymath.train import MODEL, Options, collect, groups, new_learner, reward
from paceline import Exactness, ExactnessLevel, Run, WeightFolder
from services.generation.rollouts.diversity import distinct_share
from services.local import Platform

FOLDER = Path("runs/bench/lenience")
PLAIN = "plain"
TARGET, GUARDED = "KL target", "l = e^0.8, guarded"
_LOW, _HIGH, _MOST = "l = e^0.2", "l = e^0.5", "l = e^0.8"
LEVELS: Mapping[str, tuple[System, Exactness]] = {
    PLAIN: (SPEC_RL, Exactness()),
    "l = 1": (SPEC_RL, Exactness.lenient(1.0)),
    _LOW: (SPEC_RL, Exactness.lenient(math.exp(0.2))),
    _HIGH: (SPEC_RL, Exactness.lenient(math.exp(0.5))),
    _MOST: (SPEC_RL, Exactness.lenient(math.exp(0.8))),
    "coupled_history": (HISTORY, Exactness(ExactnessLevel.COUPLED_HISTORY)),
    # Their settings follow from other cells.
    TARGET: (SPEC_RL, Exactness.lenient(1.0)),
    GUARDED: (SPEC_RL, Exactness.lenient(math.exp(0.8))),
}
_NEEDS = {TARGET: (_LOW, _HIGH), GUARDED: (PLAIN,)}
_HELD_OUT_SEED, _HELD_OUT = 1 << 20, 64
"""Of problems that no run trains on, and their number."""
_HELD_OUT_SAMPLES = 4
_CODE = [
    *(Path(name) for name in ("services", "paceline", "kernels", "examples/tinymath")),
    *(Path(f"bench/{name}.py") for name in ("lenience", "reuse", "scrape", "systems", "training")),
]


def main() -> None:
    """Measure what is missing, show and write."""
    warnings.simplefilter("ignore", SyntaxWarning)  # of packages that reasoning-gym imports
    given = arguments()
    began, left, cells = time.monotonic(), 0, dict[tuple[str, int], dict[str, Any]]()
    code = code_hash(_CODE)
    with ExitStack() as stack:
        platforms: dict[str, Platform] = {}
        for seed, level in product(given.seeds, given.levels):
            options = options_of(given, seed)
            system, exactness = LEVELS[level]
            kept = FOLDER / "cells" / f"{level}-{seed}.json".replace(" ", "_")
            key = cell_key(code, options, exactness, given.instances)
            found = _kept(kept, key)
            if found is None and time.monotonic() - began > 60 * given.minutes:
                left += 1
                continue
            if found is None:
                if system.name not in platforms:
                    # Two platforms would share the cores.
                    stack.close()
                    platforms.clear()
                    config = platform_of(system, MODEL, given.instances, FOLDER / "platform")
                    platforms[system.name] = stack.enter_context(Platform(config))
                exactness = settled(level, exactness, seed, cells)
                found = {"key": key, **measure(platforms[system.name], level, options, exactness)}
                kept.parent.mkdir(parents=True, exist_ok=True)
                kept.write_text(json.dumps(found, indent=1) + "\n")
            cells[level, seed] = found
    _show_and_write(cells, vars(given))
    if left:
        console().print(f"lenience: {left} cells are left; the same command goes on", highlight=False)


def _kept(path: Path, key: str) -> dict[str, Any] | None:
    try:
        found: dict[str, Any] = json.loads(path.read_text())
    except (OSError, ValueError):
        return None
    return found if found.get("key") == key else None


def settled(level: str, exactness: Exactness, seed: int, cells: Cells) -> Exactness:
    """Return the exactness of a level, with what follows from cells of the same seed. SystemExit without these."""
    needed = _NEEDS.get(level, ())
    if missing := [name for name in needed if (name, seed) not in cells]:
        raise SystemExit(f"lenience: {level} needs the levels {', '.join(missing)} before it")
    if level == TARGET:
        # Between what the two lower levels came to, so that the controller has to find an l between theirs.
        low, high = (max(cells[name, seed]["kl"], 1e-9) for name in needed)
        return replace(exactness, kl_target=math.sqrt(low * high))
    if level == GUARDED:
        # About half of the groups are below the median.
        return replace(exactness, diversity_floor=round(cells[PLAIN, seed]["diversity_median"], 3))
    return exactness


def options_of(given: argparse.Namespace, seed: int) -> Options:
    """Return the options of a run."""
    return Options(
        steps=given.epochs * given.pool // given.prompts,
        prompts=given.prompts,
        samples=given.samples,
        pool=given.pool,
        max_tokens=given.max_tokens,
        seed=seed,
    )


def measure(platform: Platform, level: str, options: Options, exactness: Exactness) -> dict[str, Any]:
    """Train a run on a platform and return its figures."""
    name = f"lenience-{time.time_ns():x}"
    weights, learner = WeightFolder(FOLDER / "weights" / name, MODEL, keep=4), new_learner(MODEL, options)
    steps, size, counted = list[TrainedStep](), epoch_steps(options), Metrics()
    with platform.client() as client, client.run(name, seed=options.seed) as run:
        push(run, MODEL.absolute())
        for step in train(run, learner, options, weights, exactness):
            steps.append(step)
            console().print(
                f"lenience: {level}, seed {options.seed}, step {step.step + 1} of {options.steps},"
                f" rollout {step.rollout_seconds:.2f} s, reward {step.reward:.3f}, KL {step.kl:.2g}",
                highlight=False,
            )
            if len(steps) == size:
                counted = together(scrape(platform).values())
        counted = together(scrape(platform).values()).since(counted)
        accuracy = held_out(run, learner, options)
    return {**figures(steps, size, counted), "accuracy": accuracy}


def held_out(run: Run, learner: GrpoLearner, options: Options) -> float:
    """Return the mean reward of the last policy on problems that it has not trained on."""
    problems = make_problems(_HELD_OUT_SEED, _HELD_OUT, PRACTICE)
    asked = groups(problems, replace(options, samples=_HELD_OUT_SAMPLES))
    samples = collect(run.rollout(options.steps, asked, sampling_of(options)), lambda *_: None)
    return fmean(reward(problems, samples))


def figures(steps: Sequence[TrainedStep], size: int, counted: Metrics) -> dict[str, Any]:
    """Return the figures of a cell, over the epochs of `size` steps in which there was something to reuse.

    `counted` is what the processes counted in these.
    """
    later = steps[size:]
    diversity = diversities(step.samples for step in later)
    reused = reuse([step.samples for step in later])
    wasted = counted[VERIFIED_ROWS] - counted[TAKEN_OVER]
    return {
        **reused,
        "saved_share": 1 - reused["steps_per_token"],
        "wasted_rows_per_token": wasted / reused["tokens"],
        "rollout_seconds": fmean(step.rollout_seconds for step in later),
        "kl": fmean(step.kl for step in later),
        "update_kl": fmean(step.update_kl for step in later),
        "clip_fraction": fmean(step.clip_fraction for step in later),
        "diversity": fmean(diversity),
        "diversity_median": median(diversity),
        "reward": fmean(step.reward for step in later),
        "reward_by_epoch": [
            fmean(step.reward for step in steps[begin : begin + size]) for begin in range(0, len(steps), size)
        ],
        "lenience_by_step": [_lenience(step.samples) for step in steps],
    }


def _lenience(samples: Samples) -> float | None:
    """Return the l that a step's samples were made with."""
    return next(iter(samples.values())).provenance.exactness.lenience


def diversities(steps: Iterable[Samples]) -> list[float]:
    """Return the share of distinct n-grams of each group of some steps' samples."""
    found = []
    for samples in steps:
        by_prompt: dict[str, list[list[int]]] = {}
        for key, sample in samples.items():
            by_prompt.setdefault(key.prompt_id, []).append(sample.token_ids.tolist())
        found += [distinct_share(rollouts) for rollouts in by_prompt.values()]
    return found


def _show_and_write(cells: Cells, options: Mapping[str, Any]) -> None:
    levels = by_level(cells, PLAIN)
    heads = ("", *(head for head, _ in LEVEL_COLUMNS))
    rows = [(name, *(shown(found[key]) for _, key in LEVEL_COLUMNS)) for name, found in levels.items()]
    show_rows("lenience: training, epochs after the first, means over seeds", heads, rows)
    write(
        "lenience",
        {
            "levels": levels,
            "cells": [{"level": level, "seed": seed, **found} for (level, seed), found in cells.items()],
            "options": dict(options),
        },
    )


def arguments(given: Sequence[str] | None = None) -> argparse.Namespace:
    """Read the options."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    usual = [name for name in LEVELS if name not in _NEEDS]
    parser.add_argument("--levels", nargs="+", choices=list(LEVELS), default=usual, metavar="NAME")
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--instances", type=int, default=2)
    parser.add_argument("--epochs", type=int, default=2)
    parser.add_argument("--pool", type=int, default=64, help="problems; a multiple of --prompts")
    parser.add_argument("--prompts", type=int, default=16)
    parser.add_argument("--samples", type=int, default=8)
    parser.add_argument("--max-tokens", type=int, default=800)
    parser.add_argument("--minutes", type=float, default=25.0, help="after which no cell is begun")
    read = parser.parse_args(given)
    if read.pool % read.prompts:
        parser.error("--pool must be a multiple of --prompts: epochs begin with a step")
    if read.epochs < 2:
        parser.error("--epochs must be at least 2: only those after the first count")
    return read


if __name__ == "__main__":
    main()
