"""Compare drafters that train along with the policy with a frozen one (ReSpec, Figures 4, 10 and 15).

A real GRPO run is recorded on a plain platform, together with samples of its first policy. A head is warmed up on
these samples and then follows the run in several ways (bench/learner/following.py): frozen, synchronously, at
intervals of 1, 3 and 5 steps, by plain distillation, and with samples weighted by reward. One more follower trains
as much on samples of the first policy. A head after a short warm-up is far from its optimum, so that part of a
follower's gain over the frozen head comes from longer training alone. Measured acceptance and training seconds are
replayed through the table of step times of Qwen3-8B on an H100 (bench/learner/replay.py). With several seeds this
is repeated with a run of each seed, for means and spreads.

    python -m bench.learner [--model DIR] [--steps 60] [--seeds 1] [--minutes 8]

Parts are kept under runs/bench/learner, and a call resumes with the first missing part. Writes
runs/bench/learner.json. Acceptance length is tokens per verification, including the policy's own token, with
drafts of --depth tokens.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import time
import warnings
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

from bench.learner.following import ASYNC_1, FOLLOWERS, FROZEN, REWARD, Follower, FollowerRecord, follow
from bench.learner.recording import LearnerSubject, first_samples, recorded_steps, warmed_up
from bench.learner.replay import (
    against,
    efficiency,
    h100_update_seconds,
    product_rate,
    replayed,
    update_tokens,
)
from bench.learner.tables import figures, gain, over_seeds, tables, weighting_verdict
from bench.report import cores, format_value, keep, option_parser, say, show_rows, write
from bench.rollout.record import load_or_record
from bench.rollout.systems import plain_platform
from bench.rollout.training import TrainedStep
from examples.tinymath.options import MODEL, Options
from services.drafter.learning.data import LearningSettings

FOLDER = Path("runs/bench/learner")
_FOLLOWERS_LR = 1.5e-3
"""Learning rate of the followers; the warm-up has the learner's."""


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
            prompts=8,
            samples=given.samples,
            pool=48,
            max_tokens=given.max_tokens,
            threads=given.threads,
            lr=5e-4,
            seed=seed,
        )
        name, model, settings = name_of(given.model), given.model.absolute(), self.settings
        folder = (FOLDER / f"{name}-{key_of(given, RUN)}-{seed}").absolute()
        place = (FOLDER / f"{name}-first-{key_of(given, FIRST)}").absolute()
        head = place / f"head-{key_of(given, HEAD)}"
        platform = plain_platform(model, given.instances, folder / "platform")
        run = load_or_record(platform, options, folder / "run", self.say)
        first = first_samples(model, place, replace(options, seed=0), given.instances)
        warmed = warmed_up(model, head, first, settings, given.warm_up_seconds, options.threads)
        return LearnerSubject(model, folder, run.trajectory, first, head, folder / head.name, warmed)

    @property
    def settings(self) -> LearningSettings:
        """Settings of the warm-up; followers only have another learning rate."""
        return LearningSettings(depth=self.given.depth, layers=(2, 4, 5), batch_tokens=256, top_k=5)

    def follow(self, subject: LearnerSubject, follower: Follower, seed: int, left: int) -> FollowerRecord:
        """Return a follower's record, measured now if none is kept. OutOfTimeError if there is no time left."""
        path = subject.followed / "cells" / f"{follower.name}.json"
        if path.exists():
            return FollowerRecord(**json.loads(path.read_text()))
        gone = time.monotonic() - self.began
        if gone > 60 * self.given.minutes:
            raise OutOfTimeError
        each = f", about {gone / self.done * left:.0f} s left" if self.done else ""
        say(f"learner: {follower.name}, seed {seed}; {gone:.0f} s gone, {left} followers left{each}")
        settings = replace(self.settings, lr=_FOLLOWERS_LR)
        steps = recorded_steps(subject.trajectory)
        found = follow(follower, steps, subject.first, subject.drafter, subject.followed, settings, seed)
        self.done += 1
        keep(path, asdict(found))
        return found

    def say(self, step: TrainedStep) -> None:
        """Print a recorded step of a run."""
        gone = time.monotonic() - self.began
        left = gone / (step.step + 1) * (self.given.steps - step.step - 1)
        say(
            f"recorded: step {step.step + 1} of {self.given.steps}, reward {step.reward:.3f}, "
            f"rollout {step.rollout_seconds:.2f} s, update {step.update_seconds:.2f} s, "
            f"KL {step.moved_kl:.1e}; {gone:.0f} s gone, about {left:.0f} s left of this part"
        )


RUN = ("model", "steps", "samples", "max_tokens", "instances")
FIRST = ("model", "samples", "max_tokens")
HEAD = ("warm_up_seconds", "depth")


def name_of(model: Path) -> str:
    """Return the name of a model in figures."""
    return "tinymath" if model.absolute() == MODEL.absolute() else model.name


def key_of(given: argparse.Namespace, names: tuple[str, ...]) -> str:
    """Return a short name for the values of some options."""
    return hashlib.sha256(json.dumps([str(getattr(given, name)) for name in names]).encode()).hexdigest()[:8]


def arguments() -> argparse.Namespace:
    """Parse the options."""
    parser = option_parser(__doc__)
    parser.add_argument("--model", type=Path, default=MODEL, help="folder of a model of tinymath")
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--seeds", type=int, default=1, help="recorded runs, each of a seed of its own")
    parser.add_argument("--minutes", type=float, default=1e6, help="minutes after which no follower is begun")
    parser.add_argument("--instances", type=int, default=2)
    parser.add_argument("--samples", type=int, default=8)
    parser.add_argument("--max-tokens", type=int, default=320)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--threads", type=int, default=len(cores()), help="threads of trainer and warm-up")
    parser.add_argument("--warm-up-seconds", type=float, default=90.0)
    names = [each.name for each in FOLLOWERS]
    parser.add_argument("--followers", nargs="+", choices=names, default=names)
    parser.add_argument("--depth", type=int, default=5)
    return parser.parse_args()


_BATCHES = (16, 128)
"""Samples of a simulated instance: ReSpec's number, and a large one."""


def main() -> None:
    """Measure the followers, then show and write the figures."""
    warnings.simplefilter("ignore", SyntaxWarning)  # of packages that reasoning-gym imports
    session = LearnerSession(arguments())
    try:
        found = _measured(session)
    except OutOfTimeError:
        say("learner: out of time; call again to continue")
        return
    result = _result(name_of(session.given.model), found)
    shown = [(name, format_value(value)) for name, value in result.items() if not isinstance(value, dict)]
    for name, table in result["tables"].items():
        show_rows(f"learner: {name}", table["columns"], table["rows"])
    show_rows("learner", ("figure", "value"), shown)
    write("learner", result)


def _measured(session: LearnerSession) -> dict[str, Any]:
    """Return all figures of the model. OutOfTimeError if a later call must continue."""
    given = session.given
    followers = [each for each in FOLLOWERS if each.name in given.followers]
    subjects: list[LearnerSubject] = []
    runs: list[dict[str, FollowerRecord]] = []
    for place in range(given.seeds):
        seed, left = given.seed + place, len(followers) * (given.seeds - place)
        subject = session.subject(seed)
        subjects.append(subject)
        runs.append(
            {each.name: session.follow(subject, each, seed, left - i) for i, each in enumerate(followers)}
        )
    rate = product_rate()
    seeds = [_of_seed(session, subject, run, rate) for subject, run in zip(subjects, runs, strict=True)]
    found: dict[str, Any] = {
        "figures": over_seeds([each["figures"] for each in seeds]),
        "seeds": {str(given.seed + place): each for place, each in enumerate(seeds)},
        "about": {each.name: each.about for each in followers},
        "product_rate": rate,
        "reward_gains": [gain(run[REWARD.name], run[ASYNC_1.name]) for run in runs if REWARD.name in run],
        "options": {
            name: str(value) if isinstance(value, Path) else value for name, value in vars(given).items()
        },
    }
    return found


def _of_seed(
    session: LearnerSession, subject: LearnerSubject, runs: dict[str, FollowerRecord], rate: float
) -> dict[str, Any]:
    """Return the figures of one recorded run; `rate` is the machine's matrix-product rate."""
    steps = subject.trajectory.steps
    return {
        "figures": figures(runs, recorded_steps(subject.trajectory)),
        "followers": {name: asdict(run) for name, run in runs.items()},
        "warm_up": subject.warmed,
        "rewards": [step.reward for step in steps],
        "kl_per_step": [step.moved_kl for step in steps],
        "tokens_of_trajectory": subject.trajectory.tokens,
        **(_replays(session, subject, runs, rate) if FROZEN.name in runs else {}),
    }


def _replays(
    session: LearnerSession, subject: LearnerSubject, runs: dict[str, FollowerRecord], rate: float
) -> dict[str, Any]:
    """Return simulated rollouts by samples an instance, and the share of `rate` that the updates reach."""
    depth = session.given.depth
    policy, head = _parameters(subject.model), _parameters(subject.drafter)
    shares = {
        name: efficiency(run, policy, head, depth, rate)
        for name, run in runs.items()
        if any(run.update_seconds)
    }
    intervals = {each.name: each.interval for each in FOLLOWERS}
    replays = {}
    for samples in _BATCHES:
        say(f"learner: rollouts of 8 instances of {samples} samples are simulated")
        training = {
            name: h100_update_seconds(shares[name], depth, update_tokens(intervals[name], samples))
            if name in shares
            else 0.0
            for name in runs
        }
        replays[str(samples)] = {
            name: {**asdict(each), "seconds": each.seconds, "slow_seconds": each.slow_seconds}
            for name, each in replayed(runs, samples, depth, training).items()
        }
    return {"efficiency": shares, "replays": replays}


def _result(model: str, found: dict[str, Any]) -> dict[str, Any]:
    """Return the result to write."""
    replays = [each["replays"][str(_BATCHES[0])] for each in found["seeds"].values() if "replays" in each]
    followed = bool(replays) and ASYNC_1.name in replays[0]
    own, gains = found["figures"].get(ASYNC_1.name, {}), found["reward_gains"]
    return {
        "subject_seeds": len(found["seeds"]),
        **(against(replays, ASYNC_1.name) if followed else {}),
        "final_gain_vs_frozen": own.get("gain_vs_frozen"),
        "final_gain_spread": own.get("gain_spread"),
        **(weighting_verdict(gains) if gains else {}),
        "tables": tables({model: found}),
        "models": {model: found},
    }


def _parameters(folder: Path) -> float:
    """Return the number of parameters of a float32 checkpoint."""
    return sum(path.stat().st_size for path in folder.glob("*.safetensors")) / 4


if __name__ == "__main__":
    main()
