"""A trajectory: what a real training run asked for, got, and how long its trainer took, to be replayed.

It is recorded on a plain platform, speculation off, so its samples are what plain decoding gives for these
weights, prompts and seeds.
"""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from bench.training import TrainedStep, train
from examples.tinymath.train import Options, new_learner
from paceline import Exactness, Run, WeightFolder
from services.local import Platform, PlatformConfig

_KEPT_VERSIONS = 10_000
"""More than any run has: a replay needs every version."""


@dataclass(frozen=True, slots=True)
class Trajectory:
    """The steps of a run, and the weights that the last one led to."""

    options: Options
    steps: tuple[TrainedStep, ...]
    last_weights: Path

    def weights_after(self, place: int) -> Path:
        """Return the folder of the weights that the step at `place` led to."""
        return self.steps[place + 1].weights if place + 1 < len(self.steps) else self.last_weights

    @property
    def tokens(self) -> int:
        """Response tokens of all steps."""
        return sum(len(sample.token_ids) for step in self.steps for sample in step.samples.values())


@contextmanager
def serving(config: PlatformConfig, seed: int) -> Iterator[Run]:
    """Yield a run of a platform that is up for it alone."""
    with (
        Platform(config) as platform,
        platform.client() as client,
        client.run("trajectory", seed=seed) as run,
    ):
        yield run


def record(
    config: PlatformConfig,
    options: Options,
    folder: Path,
    watch: Callable[[TrainedStep], None] = lambda _: None,
) -> Trajectory:
    """Train on a platform of its own, and keep every version of the weights under `folder`."""
    shutil.rmtree(folder, ignore_errors=True)
    weights = WeightFolder(folder, config.model, keep=_KEPT_VERSIONS)
    learner = new_learner(config.model, options)
    steps = []
    with serving(config, options.seed) as run:
        for step in train(run, learner, options, weights, Exactness()):
            steps.append(step)
            watch(step)
    return Trajectory(options, tuple(steps), sorted(folder.glob("v[0-9]*"))[-1].absolute())
