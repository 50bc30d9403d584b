"""Run GRPO on a platform, time each part of a step, and record the run for replays."""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import islice
from pathlib import Path

import paceline
from bench.comparison import Responses
from bench.report import say
from examples.tinymath.curriculum import TINYMATH, Curriculum
from examples.tinymath.grpo import GrpoLearner
from examples.tinymath.options import Options
from examples.tinymath.train import collect, groups, lessons, plan, reward
from paceline import Exactness, Group, Reward, Run, Sample, SampleKey, WeightFolder
from services.local import Platform, PlatformConfig

Samples = Mapping[SampleKey, Sample]


@dataclass(frozen=True, slots=True)
class TrainedStep:
    """Result of one step. Times are in seconds, divergences in nats."""

    step: int
    groups: tuple[Group, ...]
    samples: Samples
    weights: Path
    """Folder of the weights that sampled."""
    rollout_seconds: float
    update_seconds: float
    """The trainer's own part: rewards, learning, writing the new weights."""
    push_seconds: float
    """Seconds of the push of the weights to every instance."""
    reward: float
    """Mean over the samples."""
    clip_fraction: float
    """Share of the tokens learned from whose ratio was clipped."""
    moved_kl: float
    """KL of the sampling policy from the learned one, over the step's tokens: the size of the update."""

    @property
    def responses(self) -> Responses:
        """The token ids of each sample."""
        return {key: sample.token_ids.tolist() for key, sample in self.samples.items()}


def train(
    run: paceline.Run,
    learner: GrpoLearner,
    options: Options,
    weights: WeightFolder,
    exactness: Exactness,
    curriculum: Curriculum = TINYMATH,
    first: int = 0,
    served: Path | None = None,
) -> Iterator[TrainedStep]:
    """Train, and keep every version in `weights`.

    Args:
        first: the first step to take, by a learner that has taken the earlier ones.
        served: folder of the weights that the platform serves; None: `weights.model`.
    """
    sampling, text = options.sampling, curriculum.text
    served = served or weights.model
    for step, problems in islice(enumerate(plan(options, curriculum)), first, None):
        asked = groups(problems, options, text)
        began = time.perf_counter()
        rollout = run.rollout(step, asked, sampling, exactness=exactness)
        samples = collect(rollout, lambda *_: None)
        rolled_out = time.perf_counter()
        rewards = reward(problems, samples, text)
        lesson = lessons(problems, samples, rewards, text)
        report = learner.step(lesson)
        folder = weights.write(step + 1, learner.model.state_dict())
        learned = time.perf_counter()
        moved = learner.drift(lesson)  # for the figures: a trainer would not
        named = [Reward(s.prompt_id, s.slot, value) for s, value in zip(samples, rewards, strict=True)]
        run.report_rewards(rollout.batch.batch_id, named, kl=0.0, clip_fraction=report.clipped_ratio)
        push_seconds = push(run, folder)
        yield TrainedStep(
            step=step,
            groups=tuple(asked),
            samples={sample.key: sample for sample in samples},
            weights=served,
            rollout_seconds=rolled_out - began,
            update_seconds=learned - rolled_out,
            push_seconds=push_seconds,
            reward=report.reward,
            clip_fraction=report.clipped_ratio,
            moved_kl=moved.kl,
        )
        served = folder


def push(run: paceline.Run, folder: Path) -> float:
    """Push a folder of weights to every instance; return the seconds that it took."""
    began = time.perf_counter()
    run.push_weights(folder)
    return time.perf_counter() - began


@dataclass(frozen=True, slots=True)
class Trajectory:
    """The steps of a run, and the weights after the last one."""

    options: Options
    steps: tuple[TrainedStep, ...]
    last_weights: Path

    def weights_after(self, place: int) -> Path:
        """Return the folder of the weights after the step at `place`."""
        return self.steps[place + 1].weights if place + 1 < len(self.steps) else self.last_weights

    @property
    def tokens(self) -> int:
        """Response tokens of all steps."""
        return sum(len(sample.token_ids) for step in self.steps for sample in step.samples.values())


@contextmanager
def serving(config: PlatformConfig, seed: int) -> Iterator[Run]:
    """Yield a run on a platform that is started for it alone."""
    with (
        Platform(config, report=say) as platform,
        platform.client() as client,
        client.run("trajectory", seed=seed) as run,
    ):
        yield run
