"""The recorded run is made once for its options and model, and resumes after its last complete step."""

from __future__ import annotations

import json
import random
import shutil
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("torch")

from bench.rollout import record as recording
from bench.rollout.record import RecordedRun, load_or_record
from bench.rollout.systems import plain_platform
from bench.rollout.training import TrainedStep
from examples.tinymath.options import MODEL, Options
from paceline import Group, Sample, SamplingParams
from tests.unit.bench.steps import sample

_OPTIONS = Options(steps=3, prompts=2, samples=2, pool=2, max_tokens=8, lr=1e-3)


class _Rollout(list[Sample]):
    batch = SimpleNamespace(batch_id="b")


@dataclass(slots=True)
class FakeRun:
    """A run whose samples depend on the step and the prompt alone, as exact ones do for given weights."""

    served: list[str] = field(default_factory=list)
    steps: list[int] = field(default_factory=list)

    def rollout(
        self, step: int, groups: Sequence[Group], sampling: SamplingParams, exactness: Any
    ) -> _Rollout:
        self.steps.append(step)
        made = _Rollout()
        for group in groups:
            for slot in range(group.samples):
                rng = random.Random(f"{step}/{group.prompt_id}/{slot}")
                tokens = [rng.randrange(3, 58) for _ in range(sampling.max_tokens)]
                made.append(replace(sample(slot, tokens, group.prompt_id), seed=step))
        return made

    def report_rewards(self, *_: object, **__: object) -> None:
        pass

    def push_weights(self, folder: Path) -> None:
        self.served.append(folder.name)


@dataclass(slots=True)
class _Recorder:
    """Records into a folder with a fake run for each call."""

    folder: Path
    model: Path
    runs: list[FakeRun] = field(default_factory=list)

    def __call__(
        self, options: Options = _OPTIONS, watch: Callable[[TrainedStep], None] = lambda _: None
    ) -> RecordedRun:
        config = plain_platform(self.model, 1, self.folder / "platform")
        return load_or_record(config, options, self.folder / "kept", watch)


@pytest.fixture
def recorder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> _Recorder:
    model = tmp_path / "model"
    shutil.copytree(MODEL, model)
    made = _Recorder(tmp_path, model)

    @contextmanager
    def serving(*_: object) -> Iterator[FakeRun]:
        made.runs.append(FakeRun())
        yield made.runs[-1]

    monkeypatch.setattr(recording, "serving", serving)
    # Random tokens are never right: every second sample is, so that there is something to learn.
    monkeypatch.setattr(
        "bench.rollout.training.reward", lambda problems, samples, text: [s.slot for s in samples]
    )
    return made


def _weights(run: RecordedRun) -> list[bytes]:
    return [
        (run.trajectory.weights_after(place) / "model.safetensors").read_bytes()
        for place in range(len(run.trajectory.steps))
    ]


def test_a_run_is_recorded_once_for_its_options_and_model(recorder: _Recorder) -> None:
    first, again = recorder(), recorder()
    assert len(recorder.runs) == 1
    assert again.hash == first.hash
    step = again.trajectory.steps[1]
    assert (step.step, step.weights) == (1, recorder.folder / "kept/weights/v00000001")
    assert again.trajectory.steps[0].weights == recorder.model
    assert again.trajectory.last_weights == recorder.folder / "kept/weights/v00000003"
    assert [len(tokens) for tokens in step.responses.values()] == [8] * 4
    assert step.moved_kl > 0
    assert len(set(_weights(again))) == 3
    other = recorder(replace(_OPTIONS, lr=2e-3))
    assert len(recorder.runs) == 2
    assert other.hash != again.hash
    made_of = json.loads((recorder.folder / "kept/made_of.json").read_text())
    assert made_of["options"]["lr"] == 2e-3


def test_a_recording_that_was_interrupted_goes_on_as_if_it_had_not_been(
    recorder: _Recorder, tmp_path: Path
) -> None:
    whole = recorder()
    expected = [step.responses for step in whole.trajectory.steps], _weights(whole)
    shutil.rmtree(tmp_path / "kept")

    def interrupt(step: TrainedStep) -> None:
        if step.step == 1:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        recorder(watch=interrupt)
    rest = recorder()
    run = recorder.runs[-1]
    assert run.steps == [2], "two whole steps are kept"
    assert run.served[0] == "v00000002", "the policy goes on with the weights that it had"
    assert ([step.responses for step in rest.trajectory.steps], _weights(rest)) == expected


def test_a_step_without_its_trainer_is_recorded_again(recorder: _Recorder, tmp_path: Path) -> None:
    whole = recorder()
    (tmp_path / "kept/learner.pt").unlink()
    (tmp_path / "kept/steps/0002.json").unlink()
    again = recorder()
    assert recorder.runs[-1].steps == [0, 1, 2]
    assert _weights(again) == _weights(whole)
