"""The real learner on the tiny model, through its own process."""

from __future__ import annotations

import os
from collections.abc import AsyncIterator
from dataclasses import replace
from pathlib import Path

import pytest

from services.contracts import drafter_checkpoint
from services.drafter.config import DrafterConfig
from services.drafter.learning.data import TrainingSample
from services.drafter.training.process import TrainingDied, TrainingFailed, TrainingProcess

MODEL = Path("examples/tinymath/model").absolute()


@pytest.fixture
async def training(tmp_path: Path) -> AsyncIterator[TrainingProcess]:
    training = TrainingProcess(DrafterConfig(model=MODEL, folder=tmp_path, threads=1))
    await training.start()
    yield training
    await training.stop()


def rollouts(count: int) -> tuple[TrainingSample, ...]:
    return tuple(
        TrainingSample(
            "r", "b", f"p{n}", 0, 1, (5, 6, 7 + n % 3), tuple(8 + (n + k) % 9 for k in range(12)), None
        )
        for n in range(count)
    )


async def test_it_learns_is_saved_and_goes_on(training: TrainingProcess, tmp_path: Path) -> None:
    pid = training.pid
    assert pid is not None
    assert os.getpriority(os.PRIO_PROCESS, pid) == 10
    given = rollouts(8)
    first = await training.compare(given, None)
    for _ in range(3):
        done = await training.update(given, (1.0,) * len(given), lambda version: MODEL)
    assert done.samples == 8
    assert done.missed == 0
    assert done.policy_version == 1
    later = [replace(each, policy_version=2) for each in given]
    # Weights that are gone: those before are used, and it is said.
    gone = await training.update(later, (1.0,) * len(given), lambda version: tmp_path / "gone")
    assert (gone.missed, gone.policy_version) == (8, 1)
    saved = await training.call("save", tmp_path / "checkpoints", 1)
    drafter_checkpoint.verify(saved.path, saved.sha256)
    after = await training.compare(given, saved.path)
    assert after.current == pytest.approx(after.candidate)
    assert after.kd_loss < first.kd_loss
    await training.call("save_state", tmp_path / "learner")
    broken = tmp_path / "checkpoints/drafter-000002"
    broken.mkdir()
    with pytest.raises(TrainingFailed, match="CorruptCheckpoint"):
        await training.call("adopt", broken, "")
    # Another process takes up where this one was.
    await training.stop()
    with pytest.raises(TrainingDied):
        await training.call("save", tmp_path / "checkpoints", 3)
    await training.start()
    await training.call("load_state", tmp_path / "learner")
    again = await training.compare(given, saved.path)
    assert again.candidate == pytest.approx(after.candidate)
