"""What the policy before an update writes to the noise of the step after it: the drafts of pre-generation.

A step's prompts and seeds are rolled out once more, by the weights of the step before. How much of these texts is
there when the step begins depends on idle time; what they say does not. They are kept beside the recorded run, a
file for each step.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from pathlib import Path

import numpy as np

from bench.known_texts import Tokens
from bench.rollout.record import RecordedRun
from bench.training import TrainedStep, push
from bench.trajectory import serving
from examples.tinymath.train import collect
from paceline import Exactness, Sample, SampleKey
from services.local import PlatformConfig

OldTexts = Mapping[SampleKey, Tokens]
_FOLDER = "before"


class NoiseError(RuntimeError):
    """A sample had another seed than the recorded one, so that its text is no draft of it."""


def load_or_write(
    run: RecordedRun, folder: Path, config: PlatformConfig, watch: Callable[[int], None]
) -> list[OldTexts]:
    """Return the texts of each step, none for the first, after those that are missing are written.

    `watch` gets each step that is written now. NoiseError: the platform gave a sample another seed.
    """
    steps = run.trajectory.steps
    missing = [place for place in range(1, len(steps)) if not _file(folder, run, place).is_file()]
    if missing:
        with serving(config, run.trajectory.options.seed) as served:
            for place in missing:
                push(served, steps[place - 1].weights)
                rollout = served.rollout(
                    steps[place].step,
                    list(steps[place].groups),
                    run.trajectory.options.sampling,
                    exactness=Exactness(),
                )
                _write(_file(folder, run, place), steps[place], collect(rollout, lambda *_: None))
                watch(steps[place].step)
    return [{}, *(_read(_file(folder, run, place)) for place in range(1, len(steps)))]


def _file(folder: Path, run: RecordedRun, place: int) -> Path:
    return folder / _FOLDER / f"{run.hash[:16]}-{place:04d}.json"


def _write(path: Path, step: TrainedStep, samples: list[Sample]) -> None:
    for each in samples:
        if each.seed != step.samples[each.key].seed:
            raise NoiseError(f"sample {each.prompt_id}/{each.slot} of step {step.step} has another seed")
    path.parent.mkdir(parents=True, exist_ok=True)
    part = path.with_suffix(".part")
    part.write_text(json.dumps([[each.prompt_id, each.slot, each.token_ids.tolist()] for each in samples]))
    part.replace(path)


def _read(path: Path) -> OldTexts:
    return {
        SampleKey(prompt_id, slot): np.array(tokens, np.int32)
        for prompt_id, slot, tokens in json.loads(path.read_text())
    }
