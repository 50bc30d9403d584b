"""Recorded runs for counting: every sample of a GRPO run, and what earlier policies said with the same noise.

A run is recorded once for each subject and learning rate, on a platform without speculation; a call goes on where
the last one ended. Prompts come back after two updates, so that samples have a history.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path

from bench.mismatch.earlier import EarlierPolicy, Tokens
from bench.rollout.record import RecordedRun, load_or_record
from bench.rollout.registry import SUBJECTS
from bench.rollout.session import subject_model
from bench.systems import plain_platform
from bench.trajectory import Trajectory
from examples.tinymath.train import Options
from paceline import SampleKey

FOLDER = Path("runs/bench/mismatch")
OPTIONS = {
    "tinymath": Options(steps=5, prompts=8, samples=8, pool=16, max_tokens=800),
    "tinymath-16m": Options(steps=4, prompts=8, samples=4, pool=16, max_tokens=800),
}
"""By subject. All samples of a step are an instance's."""
LEARNING_RATES = (5e-5, 1.5e-4, 5e-4)
BACK = (1, 2)
"""Updates between a step and the policies that are asked for its samples: the next one is generated ahead by the
first, and with coupled history a prompt's samples come back with the second."""

Said = Mapping[int, Mapping[SampleKey, Tokens]]
"""By number of updates back: the responses of that policy to the samples' prompts, with their noise."""
Watch = Callable[[str], None]


@dataclass(frozen=True, slots=True)
class CountedRun:
    """A recorded run, and for each of its steps what earlier policies said."""

    subject: str
    model: Path
    run: RecordedRun
    said: tuple[Said, ...]

    @property
    def trajectory(self) -> Trajectory:
        """The steps of the run."""
        return self.run.trajectory

    @property
    def lr(self) -> float:
        """Learning rate of the trainer."""
        return self.trajectory.options.lr

    @property
    def moved_kl(self) -> float:
        """Mean KL by which an update moved the policy, in nats a token."""
        steps = self.trajectory.steps
        return sum(step.moved_kl for step in steps) / len(steps)


def load_or_count(subject: str, lr: float, watch: Watch) -> CountedRun:
    """Return a recorded run of a subject, with what is missing of it recorded now."""
    folder = FOLDER / f"{subject}-{lr:g}"
    model = subject_model(SUBJECTS[subject])
    options = replace(OPTIONS[subject], lr=lr)
    run = load_or_record(
        plain_platform(model, 1, folder / "recording"),
        options,
        folder,
        lambda step: watch(f"{subject}, lr {lr:g}: recorded step {step.step + 1} of {options.steps}"),
    )
    said = tuple(_said(run, place, folder, watch) for place in range(options.steps))
    return CountedRun(subject, model, run, said)


def _said(run: RecordedRun, place: int, folder: Path, watch: Watch) -> Said:
    found: dict[int, Mapping[SampleKey, Tokens]] = {}
    for back in BACK:
        if place < back:
            continue
        path = folder / "said" / f"{place}-{back}-{run.hash[:16]}.json"
        if not path.is_file():
            watch(f"step {place + 1}: the policy of {back} updates before")
            policy = EarlierPolicy(run.trajectory.steps[place - back].weights)
            said = policy.responses(run.trajectory.steps[place], run.trajectory.options)
            path.parent.mkdir(parents=True, exist_ok=True)
            part = path.with_suffix(".part")
            part.write_text(json.dumps([[key.prompt_id, key.slot, tokens] for key, tokens in said.items()]))
            part.replace(path)
        rows = json.loads(path.read_text())
        found[back] = {SampleKey(name, slot): tokens for name, slot, tokens in rows}
    return found
