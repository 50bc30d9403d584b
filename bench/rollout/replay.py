"""Replay a trajectory on a platform: every system sees the same weights, prompts and seeds.

The trainer has a separate machine in reality: while it learns, the engines keep their cores. A wait of the recorded
length therefore replaces the trainer's computation here, and the recorded weights then take the real weight path.
Everything else (hints, submission, samples, weights) is done as a trainer does it.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from statistics import fmean
from typing import Self

import grpc

import paceline
from bench.comparison import Responses
from bench.rollout.training import Samples, TrainedStep, Trajectory, push
from bench.scrape import Metrics, scrape, together
from examples.tinymath.train import collect
from paceline import Exactness, Group
from paceline.internal.v1 import bubble_pb2 as pb
from paceline.internal.v1 import bubble_pb2_grpc as rpc
from paceline.transport.channel import call_metadata
from services.local import Platform, PlatformError

_RUN = "rollout"


@dataclass(frozen=True, slots=True)
class ReplayedStep:
    """Result of one step. Times are in seconds."""

    step: int
    samples: Samples
    fleet: tuple[str, ...]
    rollout_seconds: float
    update_seconds: float
    push_seconds: float
    covered: tuple[int, ...]
    """Pre-generated tokens of each sample that had any, when the step was submitted."""
    metrics: Mapping[str, Metrics]
    """Increase of every process's counters from the submission until the new weights served."""

    @property
    def responses(self) -> Responses:
        """The token ids of each sample."""
        return {key: sample.token_ids.tolist() for key, sample in self.samples.items()}

    @property
    def decode_steps(self) -> tuple[float, int]:
        """The mean and the maximum number of engine steps of a sample."""
        steps = [sample.provenance.decode_steps for sample in self.samples.values()]
        return fmean(steps), max(steps)

    @property
    def fleet_metrics(self) -> Metrics:
        """The counts of all instances together."""
        return together(self.metrics[name] for name in self.fleet if name in self.metrics)


def replay(
    platform: Platform,
    trajectory: Trajectory,
    exactness: Exactness,
    coverage: Coverage | None,
    watch: Callable[[ReplayedStep], None],
) -> None:
    """Replay all steps, from the trajectory's first weights to its last, once on a platform.

    Args:
        exactness: asked for with every batch.
        coverage: of a platform with a coordinator, to which each step's prompts are then announced while the
            previous step is rolled out.
        watch: called with each step.
    """
    with platform.client() as client, client.run(_RUN, seed=trajectory.options.seed) as run:
        fleet = tuple(instance.instance_id for instance in client.instances())
        push(run, trajectory.steps[0].weights)
        before = scrape(platform)
        for place, recorded in enumerate(trajectory.steps):
            covered = coverage.of(recorded.step) if coverage else ()
            samples, rollout_seconds = _roll_out(run, trajectory, place, exactness, hint=coverage is not None)
            update_seconds = _learn(recorded)
            push_seconds = push(run, trajectory.weights_after(place))
            after = scrape(platform)
            watch(
                ReplayedStep(
                    step=recorded.step,
                    samples=samples,
                    fleet=fleet,
                    rollout_seconds=rollout_seconds,
                    update_seconds=update_seconds,
                    push_seconds=push_seconds,
                    covered=covered,
                    metrics={name: after[name].since(before.get(name, Metrics())) for name in after},
                )
            )
            before = after


def _roll_out(
    run: paceline.Run, trajectory: Trajectory, place: int, exactness: Exactness, *, hint: bool
) -> tuple[Samples, float]:
    """Return the samples of a step, and the seconds from its submission to the last of them."""
    sampling, recorded = trajectory.options.sampling, trajectory.steps[place]
    began = time.perf_counter()
    rollout = run.rollout(recorded.step, _asked(recorded), sampling, exactness=exactness)
    if hint and place + 1 < len(trajectory.steps):
        coming, version = trajectory.steps[place + 1], rollout.batch.policy_version + 1
        run.hint(coming.step, _asked(coming), sampling, policy_version=version, exactness=exactness)
    samples = collect(rollout, lambda *_: None)
    return {sample.key: sample for sample in samples}, time.perf_counter() - began


def _asked(recorded: TrainedStep) -> list[Group]:
    return list(recorded.groups)


def _learn(recorded: TrainedStep) -> float:
    """Wait for the recorded time of the trainer's update and return the seconds that it took."""
    began = time.perf_counter()
    threading.Event().wait(recorded.update_seconds)
    return time.perf_counter() - began


_TIMEOUT = 10.0


class Coverage:
    """A connection to a running platform's coordinator, from `__enter__` to `__exit__`."""

    def __init__(self, platform: Platform) -> None:
        ready = platform.process("bubbles").ready
        if ready is None:
            raise PlatformError("the bubble coordinator is not ready")
        self._channel = grpc.insecure_channel(ready.address)
        self._metadata = call_metadata(platform.config.token)
        self._stub = rpc.BubbleServiceStub(self._channel)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._channel.close()

    def of(self, step: int) -> tuple[int, ...]:
        """Return the tokens of each sample of the step that has any."""
        request = pb.GetCoverageRequest(run_id=_RUN, step=step)
        answer = self._stub.GetCoverage(request, timeout=_TIMEOUT, metadata=self._metadata)
        return tuple(slot.tokens for slot in answer.slots if slot.tokens)
