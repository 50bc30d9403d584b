"""A call of the learner's benchmark: makes what is missing and keeps it, and says how long the rest will take."""

from __future__ import annotations

import argparse
import json
import time
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path

from bench.learner.following import Amounts, Follower, FollowerRecord, follow
from bench.learner.options import FIRST, FOLLOWING, HEAD, RUN, key_of, name_of
from bench.learner.recording import LearnerSubject, prepare, recorded_steps
from bench.report import console
from bench.training import TrainedStep
from examples.tinymath.train import Options
from services.drafter.learning.data import LearningSettings

FOLDER = Path("runs/bench/learner")


class OutOfTimeError(RuntimeError):
    """The call's minutes are over; what was measured is kept."""


@dataclass(slots=True)
class LearnerSession:
    """A call of the benchmark for one model."""

    given: argparse.Namespace
    began: float = field(default_factory=time.monotonic)
    done: int = 0
    """Followers that this call has measured."""

    def subject(self, seed: int) -> LearnerSubject:
        """Return the subject of a seed; parts that are missing are made now."""
        given = self.given
        options = Options(
            steps=given.steps,
            prompts=given.prompts,
            samples=given.samples,
            pool=given.pool,
            max_tokens=given.max_tokens,
            threads=given.threads,
            lr=given.lr,
            seed=seed,
        )
        name, head = name_of(given.model), f"head-{key_of(given, HEAD)}"
        first = (FOLDER / f"{name}-first-{key_of(given, FIRST)}").absolute()
        return prepare(
            given.model.absolute(),
            (FOLDER / f"{name}-{key_of(given, RUN)}-{seed}").absolute(),
            first,
            first / head,
            options,
            given.instances,
            given.warm_up_prompts,
            given.warm_up_seconds,
            self.settings,
            self.say,
        )

    @property
    def settings(self) -> LearningSettings:
        """Settings of the warm-up."""
        given = self.given
        return LearningSettings(
            depth=given.depth,
            layers=tuple(given.layers),
            batch_tokens=given.batch_tokens,
            acceptance_share=given.acceptance_share,
            top_k=given.top_k,
        )

    @property
    def following(self) -> LearningSettings:
        """Settings of following."""
        return replace(self.settings, lr=self.given.drafter_lr)

    def follow(self, subject: LearnerSubject, follower: Follower, seed: int, left: int) -> FollowerRecord:
        """Return a follower's record, measured now where none is kept. OutOfTimeError: it is too late for that."""
        path = subject.followed / "cells" / f"{follower.name}-{key_of(self.given, FOLLOWING)}.json"
        if path.exists():
            return FollowerRecord(**json.loads(path.read_text()))
        gone = time.monotonic() - self.began
        if gone > 60 * self.given.minutes:
            raise OutOfTimeError
        each = f", about {gone / self.done * left:.0f} s left" if self.done else ""
        console().print(
            f"learner: {follower.name}, seed {seed}; {gone:.0f} s gone, {left} followers left{each}",
            highlight=False,
        )
        amounts = Amounts(self.given.evaluated, self.given.learned)
        steps = recorded_steps(subject.trajectory)
        found = follow(
            follower, steps, subject.first, subject.drafter, subject.followed, self.following, amounts, seed
        )
        self.done += 1
        path.parent.mkdir(parents=True, exist_ok=True)
        part = path.with_suffix(".part")
        part.write_text(json.dumps(asdict(found)))
        part.replace(path)
        return found

    def say(self, label: str, step: TrainedStep) -> None:
        """Print a step of a run."""
        gone = time.monotonic() - self.began
        left = gone / (step.step + 1) * (self.given.steps - step.step - 1)
        console().print(
            f"{label}: step {step.step + 1} of {self.given.steps}, reward {step.reward:.3f}, "
            f"rollout {step.rollout_seconds:.2f} s, update {step.update_seconds:.2f} s, "
            f"KL {step.moved_kl:.1e}; {gone:.0f} s gone, about {left:.0f} s left of this part",
            highlight=False,
        )
