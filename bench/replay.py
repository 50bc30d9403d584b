"""Replays a trajectory on a platform: every system sees the same weights, prompts and seeds.

The trainer has a machine of its own: while it learns, its time passes and the engines' cores are theirs. Here
the trainer's process is therefore stood in for by a wait of the recorded length; what it learned then goes through
the real weight path. Everything else (hints, submission, samples, weights) is done as a trainer does it.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Protocol

import paceline
from bench.comparison import Responses
from bench.scrape import Metrics, scrape, together
from bench.training import Samples, TrainedStep, push
from bench.trajectory import Trajectory
from examples.tinymath.train import collect
from paceline import Exactness, ExactnessLevel, Group
from services.local import Platform

_EXACT = Exactness(ExactnessLevel.EXACT)


@dataclass(frozen=True, slots=True)
class ReplaySetup:
    """Settings of a replay of a trajectory."""

    run_id: str
    """New for each replay on a platform: history is kept under it."""
    exactness: Exactness = _EXACT
    hint: bool = False
    """Name each step's prompts while the one before it is rolled out."""
    wait: bool = True
    """Let the trainer's update take its time; otherwise the new weights follow at once."""


@dataclass(frozen=True, slots=True)
class ReplayedStep:
    """One step as it went. Times in seconds."""

    step: int
    samples: Samples
    fleet: tuple[str, ...]
    rollout_seconds: float
    update_seconds: float
    push_seconds: float
    covered: tuple[int, ...]
    """Tokens that were pre-generated of each sample that had any, when the step was submitted."""
    metrics: Mapping[str, Metrics]
    """What every process counted from the submission until the new weights served."""

    @property
    def responses(self) -> Responses:
        """The token ids of each sample."""
        return {key: sample.token_ids.tolist() for key, sample in self.samples.items()}

    @property
    def fleet_metrics(self) -> Metrics:
        """The counts of all instances together."""
        return together(self.metrics[name] for name in self.fleet if name in self.metrics)


class Covering(Protocol):
    """Tells how much of a coming step is pre-generated: the tokens of each sample that has any."""

    def __call__(self, run_id: str, step: int) -> tuple[int, ...]: ...


def nothing_covered(run_id: str, step: int) -> tuple[int, ...]:
    """Return the coverage of a platform without a coordinator: none."""
    return ()


def replay(
    platform: Platform,
    trajectory: Trajectory,
    manner: ReplaySetup,
    covering: Covering = nothing_covered,
    watch: Callable[[ReplayedStep], None] = lambda _: None,
) -> list[ReplayedStep]:
    """Go through all steps, from the trajectory's first weights to its last."""
    found: list[ReplayedStep] = []
    with platform.client() as client, client.run(manner.run_id, seed=trajectory.options.seed) as run:
        fleet = tuple(instance.instance_id for instance in client.instances())
        push(run, trajectory.steps[0].weights)
        before = scrape(platform)
        for place in range(len(trajectory.steps)):
            covered = covering(manner.run_id, trajectory.steps[place].step)
            samples, rollout_seconds = _roll_out(run, trajectory, place, manner)
            update_seconds = _learn(trajectory.steps[place]) if manner.wait else 0.0
            push_seconds = push(run, trajectory.weights_after(place))
            after = scrape(platform)
            step = ReplayedStep(
                step=trajectory.steps[place].step,
                samples=samples,
                fleet=fleet,
                rollout_seconds=rollout_seconds,
                update_seconds=update_seconds,
                push_seconds=push_seconds,
                covered=covered,
                metrics={name: after[name].since(before.get(name, Metrics())) for name in after},
            )
            before = after
            found.append(step)
            watch(step)
    return found


def _roll_out(
    run: paceline.Run, trajectory: Trajectory, place: int, manner: ReplaySetup
) -> tuple[Samples, float]:
    """Return the samples of a step, and the seconds from its submission to the last of them."""
    sampling, recorded = trajectory.options.sampling, trajectory.steps[place]
    began = time.perf_counter()
    rollout = run.rollout(recorded.step, _asked(recorded), sampling, exactness=manner.exactness)
    if manner.hint and place + 1 < len(trajectory.steps):
        coming, version = trajectory.steps[place + 1], rollout.batch.policy_version + 1
        run.hint(coming.step, _asked(coming), sampling, policy_version=version, exactness=manner.exactness)
    samples = collect(rollout, lambda *_: None)
    return {sample.key: sample for sample in samples}, time.perf_counter() - began


def _asked(recorded: TrainedStep) -> list[Group]:
    return list(recorded.groups)


def _learn(recorded: TrainedStep) -> float:
    """Wait for the recorded time of the trainer's update and return the seconds that it took."""
    began = time.perf_counter()
    threading.Event().wait(recorded.update_seconds)
    return time.perf_counter() - began
