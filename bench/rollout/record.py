"""Keep the recorded run on disk for many calls of the benchmark: made once, hashed, cut to a regime.

A folder has `made_of.json`, a file for each step under `steps`, the weights after each step under `weights`, and
the trainer's state after the last step in `learner.pt`. An interrupted recording resumes after its last complete
step. The same options make the same run on the same machine. The run's hash identifies it, and cells of another
hash do not count.
"""

from __future__ import annotations

import hashlib
import json
import shutil
import subprocess
import sys
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch

from bench.report import keep, say
from bench.rollout.registry import Regime, Subject
from bench.rollout.training import TrainedStep, Trajectory, push, serving, train
from examples.tinymath.curriculum import curriculum_of
from examples.tinymath.grpo import GrpoLearner
from examples.tinymath.options import Options
from examples.tinymath.train import new_learner
from paceline import Exactness, FinishReason, Group, Provenance, Sample, SampleKey, SampleStatus, WeightFolder
from services.contracts.drafter_checkpoint import folder_of
from services.local import PlatformConfig

_MADE_OF, _STEPS, _WEIGHTS, _LEARNER = "made_of.json", "steps", "weights", "learner.pt"
_KEPT_VERSIONS = 10_000
"""More versions than any run has, because a replay needs every version."""


class RunMissingError(RuntimeError):
    """No run of a subject is kept; the message says how to record one."""


@dataclass(frozen=True, slots=True)
class RecordedRun:
    """A trajectory and the hash of its contents, weights included."""

    trajectory: Trajectory
    hash: str

    def cut(self, regime: Regime) -> Trajectory:
        """Return the part of the run that a regime uses."""
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
    """Record the steps that the run under `folder` lacks, and return the run.

    A run of other options, or of another model, is replaced. `watch` is called with each step that is recorded now.
    """
    wanted = {"options": _options(options), "model": _sha256(config.model / "model.safetensors")}
    mark = folder / _MADE_OF
    if not mark.is_file() or json.loads(mark.read_text()) != wanted:
        shutil.rmtree(folder / _STEPS, ignore_errors=True)
        shutil.rmtree(folder / _WEIGHTS, ignore_errors=True)
        (folder / _LEARNER).unlink(missing_ok=True)
        keep(mark, wanted)
    if len(_step_files(folder)) < options.steps:
        _record_rest(config, options, folder.absolute(), watch)
    return _read(folder, config.model, options)


def kept_run(subject: Subject, folder: Path) -> RecordedRun:
    """Return the run of a subject under `folder`; the model may have changed since.

    RunMissingError if no complete run with the subject's options is kept.
    """
    mark, options = folder / _MADE_OF, subject.options
    made = mark.is_file() and json.loads(mark.read_text())["options"] == _options(options)
    if not made or len(_step_files(folder)) < options.steps:
        raise RunMissingError(f"no whole run of {subject.name} is kept: `make bench SUBJECT={subject.name}`")
    return _read(folder, subject.model, options)


def _read(folder: Path, model: Path, options: Options) -> RecordedRun:
    return RecordedRun(_trajectory(folder.absolute(), model, options), _hash(folder))


def _record_rest(
    config: PlatformConfig, options: Options, folder: Path, watch: Callable[[TrainedStep], None]
) -> None:
    learner, curriculum = new_learner(config.model, options), curriculum_of(config.model)
    weights = WeightFolder(folder / _WEIGHTS, config.model, keep=_KEPT_VERSIONS)
    first = _restore(learner, folder / _LEARNER)
    served = _weights_after(folder, first - 1) if first else config.model
    with serving(config, options.seed) as run:
        if first:
            push(run, served)
        steps = train(run, learner, options, weights, Exactness(), curriculum, first, served)
        for step in steps:
            after = weights.root / f"v{step.step + 1:08d}"
            keep(folder / _STEPS / f"{step.step:04d}.json", _step_data(step, after))
            _keep(learner, step.step + 1, folder / _LEARNER)
            watch(step)


def _keep(learner: GrpoLearner, steps: int, path: Path) -> None:
    """Write the state of the trainer after `steps` steps, replacing an earlier one."""
    part = path.with_suffix(".part")
    torch.save({"steps": steps, "learner": learner.state()}, part)
    part.replace(path)


def _restore(learner: GrpoLearner, path: Path) -> int:
    """Restore a trainer's kept state; return the number of steps after which it was kept."""
    if not path.is_file():
        return 0
    kept = torch.load(path, weights_only=True)
    learner.restore(kept["learner"])
    return int(kept["steps"])


def _step_files(folder: Path) -> list[Path]:
    return sorted((folder / _STEPS).glob("*.json"))


def _weights_after(folder: Path, step: int) -> Path:
    return folder / _WEIGHTS / str(json.loads(_step_files(folder)[step].read_text())["weights_after"][0])


def _hash(folder: Path) -> str:
    digest = hashlib.sha256((folder / _MADE_OF).read_bytes())
    for path in _step_files(folder):
        digest.update(path.read_bytes())
    return digest.hexdigest()


def _sha256(path: Path) -> str:
    with path.open("rb") as stream:
        return hashlib.file_digest(stream, "sha256").hexdigest()


def _options(options: Options) -> dict[str, Any]:
    # Convert through JSON, because the options that these are compared with were.
    return dict(json.loads(json.dumps(asdict(options))))


_FIGURES = (
    "step",
    "rollout_seconds",
    "update_seconds",
    "push_seconds",
    "reward",
    "moved_kl",
    "clip_fraction",
)


def _step_data(step: TrainedStep, after: Path) -> dict[str, Any]:
    """Return a step as plain data, with the name and the hash of the weights after it."""
    samples = sorted(step.samples.items(), key=lambda each: (each[0].prompt_id, each[0].slot))
    return {
        **{name: getattr(step, name) for name in _FIGURES},
        "groups": [
            [group.prompt_id, [int(each) for each in group.prompt_token_ids]] for group in step.groups
        ],
        "samples": [
            [
                key.prompt_id,
                key.slot,
                sample.seed,
                sample.token_ids.tolist(),
                [round(value, 4) for value in sample.logprobs.tolist()],
            ]
            for key, sample in samples
        ],
        "weights_after": [after.name, "".join(_sha256(path) for path in sorted(after.glob("*.safetensors")))],
    }


def _trajectory(folder: Path, model: Path, options: Options) -> Trajectory:
    steps, weights = [], model.absolute()
    for path in _step_files(folder):
        data = json.loads(path.read_text())
        steps.append(_step(data, options, weights))
        weights = folder / _WEIGHTS / data["weights_after"][0]
    return Trajectory(options, tuple(steps), weights)


def _step(data: Mapping[str, Any], options: Options, weights: Path) -> TrainedStep:
    return TrainedStep(
        **{name: data[name] for name in _FIGURES},
        groups=tuple(Group(name, prompt, options.samples) for name, prompt in data["groups"]),
        samples={SampleKey(name, slot): _sample(name, slot, *rest) for name, slot, *rest in data["samples"]},
        weights=weights,
    )


def _sample(prompt_id: str, slot: int, seed: int, tokens: list[int], logprobs: list[float]) -> Sample:
    return Sample(
        prompt_id=prompt_id,
        slot=slot,
        token_ids=np.array(tokens, np.int64),
        logprobs=np.array(logprobs, np.float32),
        finish_reason=FinishReason.UNSPECIFIED,
        status=SampleStatus.COMPLETED,
        version_spans=(),
        provenance=Provenance(),
        seed=seed,
    )


_SECONDS = 60


class FirstHeadError(RuntimeError):
    """No head could be trained; the message says why."""


def first_head(run: RecordedRun, model: Path, folder: Path) -> Path:
    """Return the folder of the head for this run under `folder`; train the head now if there is none.

    An untrained head would draft nothing in a run this short, and ReSpec begins with a trained one.
    """
    parent = (folder / run.hash[:16]).absolute()
    made = folder_of(parent, 1)
    if made.is_dir():
        return made
    parent.mkdir(parents=True, exist_ok=True)
    rollouts = parent / "rollouts.jsonl"
    step = run.trajectory.steps[0]
    prompts = {group.prompt_id: [int(each) for each in group.prompt_token_ids] for group in step.groups}
    lines = [
        json.dumps(
            {"prompt": prompts[key.prompt_id], "response": sample.token_ids.tolist(), "seed": sample.seed}
        )
        for key, sample in step.samples.items()
    ]
    rollouts.write_text("\n".join(lines) + "\n")
    say(f"rollout: training a first EAGLE-3 head, {_SECONDS} s")
    module = [sys.executable, "-m", "services.drafter.warmup"]
    options = [f"--policy={model}", f"--rollouts={rollouts}", f"--out={parent}", f"--seconds={_SECONDS}"]
    done = subprocess.run([*module, *options], capture_output=True, text=True, check=False)
    if done.returncode or not made.is_dir():
        raise FirstHeadError((done.stderr or done.stdout).strip().rpartition("\n")[2])
    return made
