"""Manage one call of the learner's benchmark: its options, kept parts, and remaining time."""

from __future__ import annotations

import argparse
import hashlib
import json
import time
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path

from bench.learner.following import FOLLOWERS, Amounts, Follower, FollowerRecord, follow
from bench.learner.recording import LearnerSubject, prepare, recorded_steps
from bench.report import console, cores
from bench.rollout.training import TrainedStep
from examples.tinymath.options import MODEL, Options
from services.drafter.learning.data import LearningSettings

FOLDER = Path("runs/bench/learner")


class OutOfTimeError(RuntimeError):
    """The call's minutes are over; measured parts are kept."""


@dataclass(slots=True)
class LearnerSession:
    """A call of the benchmark for one model."""

    given: argparse.Namespace
    began: float = field(default_factory=time.monotonic)
    done: int = 0
    """Followers that this call has measured."""

    def subject(self, seed: int) -> LearnerSubject:
        """Return the subject of a seed, and make its missing parts first."""
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
        """Return a follower's record, measured now if none is kept. OutOfTimeError if there is no time left."""
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


RUN = ("model", "steps", "prompts", "samples", "pool", "max_tokens", "lr", "instances")
FIRST = ("model", "samples", "max_tokens", "warm_up_prompts")
HEAD = ("warm_up_seconds", "depth", "layers", "batch_tokens", "acceptance_share")
FOLLOWING = ("drafter_lr", "evaluated", "learned", "top_k")


def name_of(model: Path) -> str:
    """Return the name of a model in figures."""
    return "tinymath" if model.absolute() == MODEL.absolute() else model.name


def key_of(given: argparse.Namespace, names: tuple[str, ...]) -> str:
    """Return a short name for the values of some options."""
    return hashlib.sha256(json.dumps([str(getattr(given, name)) for name in names]).encode()).hexdigest()[:8]


def read(about: str) -> argparse.Namespace:
    """Parse the options."""
    parser = argparse.ArgumentParser(description=about, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path, default=MODEL, help="folder of a model of tinymath")
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--seeds", type=int, default=1, help="recorded runs, each of a seed of its own")
    parser.add_argument("--minutes", type=float, default=1e6, help="minutes after which no follower is begun")
    parser.add_argument("--instances", type=int, default=2)
    parser.add_argument("--prompts", type=int, default=8)
    parser.add_argument("--samples", type=int, default=8)
    parser.add_argument("--pool", type=int, default=48, help="problems in all; each epoch goes through them")
    parser.add_argument("--max-tokens", type=int, default=320)
    parser.add_argument("--lr", type=float, default=5e-4, help="learning rate of the recorded run")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--threads", type=int, default=len(cores()), help="threads of trainer and warm-up")
    parser.add_argument("--warm-up-prompts", type=int, default=64)
    parser.add_argument("--warm-up-seconds", type=float, default=90.0)
    names = [each.name for each in FOLLOWERS]
    parser.add_argument("--followers", nargs="+", choices=names, default=names[:-1])
    parser.add_argument(
        "--evaluated", type=int, default=24, help="samples of a step that drafts are measured on"
    )
    parser.add_argument("--learned", type=int, default=32, help="samples of an update")
    parser.add_argument("--depth", type=int, default=5)
    parser.add_argument("--layers", type=int, nargs="+", default=[2, 4, 5])
    parser.add_argument(
        "--drafter-lr",
        type=float,
        default=1.5e-3,
        help="learning rate of the followers; the warm-up uses the learner's",
    )
    parser.add_argument("--batch-tokens", type=int, default=256)
    parser.add_argument("--acceptance-share", type=float, default=LearningSettings().acceptance_share)
    parser.add_argument("--top-k", type=int, default=5)
    return parser.parse_args()
