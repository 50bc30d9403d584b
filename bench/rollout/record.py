"""The recorded run on disk, for many calls of the benchmark: made once, hashed, cut to a regime.

It lies under runs/, weights and all. The same options make the same run on the same machine; whatever made it, its
hash names it, and cells of another one do not count.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from bench.rollout.registry import Regime
from bench.training import TrainedStep
from bench.trajectory import Trajectory, record
from examples.tinymath.train import Options
from paceline import FinishReason, Group, Provenance, Sample, SampleKey, SampleStatus
from services.local import PlatformConfig

_FILE, _WEIGHTS = "trajectory.json", "weights"


@dataclass(frozen=True, slots=True)
class RecordedRun:
    """A trajectory and the hash of all that is in it, weights included."""

    trajectory: Trajectory
    hash: str

    def cut(self, regime: Regime) -> Trajectory:
        """Return the part of the run that a regime is about."""
        options = self.trajectory.options
        longest = min(regime.max_tokens or options.max_tokens, options.max_tokens)
        samples = min(regime.samples, options.samples)
        steps = tuple(_cut(step, samples, longest) for step in self.trajectory.steps)
        return replace(
            self.trajectory, options=replace(options, samples=samples, max_tokens=longest), steps=steps
        )


def _cut(step: TrainedStep, samples: int, longest: int) -> TrainedStep:
    kept = {key: sample for key, sample in step.samples.items() if key.slot < samples}
    return replace(
        step,
        groups=tuple(replace(group, samples=samples) for group in step.groups),
        samples={
            key: replace(sample, token_ids=sample.token_ids[:longest], logprobs=sample.logprobs[:longest])
            for key, sample in kept.items()
        },
    )


def load_or_record(
    config: PlatformConfig, options: Options, folder: Path, watch: Callable[[TrainedStep], None]
) -> RecordedRun:
    """Return the run under `folder`, recorded now where there is none of these options and this model."""
    wanted = {"options": _options(options), "model": _sha256(config.model / "model.safetensors")}
    path = folder / _FILE
    if path.is_file():
        data = json.loads(path.read_text())
        if data["made_of"] == wanted:
            return RecordedRun(_trajectory(data, options, folder / _WEIGHTS), _hash(path))
    path.unlink(missing_ok=True)
    trajectory = record(config, options, folder / _WEIGHTS, watch)
    path.parent.mkdir(parents=True, exist_ok=True)
    part = path.with_suffix(".part")
    part.write_text(json.dumps({"made_of": wanted, **_data(trajectory)}))
    part.replace(path)
    return RecordedRun(_trajectory(json.loads(path.read_text()), options, folder / _WEIGHTS), _hash(path))


def _hash(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()


def _sha256(path: Path) -> str:
    with path.open("rb") as stream:
        return hashlib.file_digest(stream, "sha256").hexdigest()


def _options(options: Options) -> dict[str, Any]:
    # Through JSON, as what it is compared with was.
    return dict(json.loads(json.dumps(asdict(options))))


def _data(trajectory: Trajectory) -> dict[str, Any]:
    """Return the run as plain data; the weights of a step that samples, and those that the last one led to."""
    folders = [*(step.weights for step in trajectory.steps), trajectory.last_weights]
    return {
        "steps": [_step_data(step) for step in trajectory.steps],
        "weights": [[_name(place, each), _weights_hash(each)] for place, each in enumerate(folders)],
    }


def _name(place: int, folder: Path) -> str:
    """Return the folder's name under the run's weights; those of the first step are the model's."""
    return str(folder.absolute()) if place == 0 else folder.name


def _weights_hash(folder: Path) -> str:
    return "".join(_sha256(path) for path in sorted(folder.glob("*.safetensors")))


def _step_data(step: TrainedStep) -> dict[str, Any]:
    figures = ("step", "rollout_seconds", "update_seconds", "push_seconds", "reward", "moved_kl")
    return {
        **{name: getattr(step, name) for name in figures},
        "groups": [
            [group.prompt_id, [int(each) for each in group.prompt_token_ids]] for group in step.groups
        ],
        "samples": [
            [key.prompt_id, key.slot, sample.seed, sample.token_ids.tolist()]
            for key, sample in sorted(
                step.samples.items(), key=lambda each: (each[0].prompt_id, each[0].slot)
            )
        ],
    }


def _trajectory(data: Mapping[str, Any], options: Options, weights: Path) -> Trajectory:
    folders = [(weights / name).absolute() for name, _ in data["weights"]]
    steps = [_step(each, options, folder) for each, folder in zip(data["steps"], folders, strict=False)]
    return Trajectory(options, tuple(steps), folders[-1])


def _step(data: Mapping[str, Any], options: Options, weights: Path) -> TrainedStep:
    figures = ("step", "rollout_seconds", "update_seconds", "push_seconds", "reward", "moved_kl")
    return TrainedStep(
        **{name: data[name] for name in figures},
        groups=tuple(Group(name, prompt, options.samples) for name, prompt in data["groups"]),
        samples={SampleKey(name, slot): _sample(name, slot, *rest) for name, slot, *rest in data["samples"]},
        weights=weights,
        kl=0.0,
        update_kl=0.0,
        clip_fraction=0.0,
    )


def _sample(prompt_id: str, slot: int, seed: int, tokens: list[int]) -> Sample:
    return Sample(
        prompt_id=prompt_id,
        slot=slot,
        token_ids=np.array(tokens, np.int64),
        logprobs=np.zeros(len(tokens), np.float32),
        finish_reason=FinishReason.UNSPECIFIED,
        status=SampleStatus.COMPLETED,
        version_spans=(),
        provenance=Provenance(),
        seed=seed,
    )
