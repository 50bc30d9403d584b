"""`paceline calibrate` on a real engine: steps are measured, and what is saved is what an instance takes."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest

from services.step_time.machine import machine_name
from services.step_time.sweep import SavedSweep, SweepSubject
from tests.support.models import tiny_model
from tests.support.zygote import forked

pytestmark = pytest.mark.timeout(240)


def test_a_model_is_measured_and_its_sweep_saved(tmp_path: Path) -> None:
    model, out = tiny_model(tmp_path / "model"), tmp_path / "out"
    core = str(max(os.sched_getaffinity(0)))
    # Time for all batches on a busy machine.
    measure = ["--seconds", "60", "--max-num-seqs", "4", "--threads-bind", core]
    command = [sys.executable, "-m", "paceline", "calibrate", "--model", str(model), *measure]
    command += ["--out", str(out), "--dtype", "float32"]
    with (tmp_path / "log").open("wb") as log:
        status = forked(command, os.environ | {"OMP_NUM_THREADS": "1"}, log).wait(200)
    said = (tmp_path / "log").read_text()
    assert status == 0, said
    (kept,) = out.glob("*.json")
    assert str(kept) in said.replace("\n", "")
    saved = SavedSweep.load(kept, SweepSubject.of(model, machine_name(), 1, "float32"))
    assert saved is not None
    assert {step.samples for step in saved.steps} == {1, 2, 4}
    rows = {step.rows for step in saved.steps if step.samples == 4}
    assert rows == {4, 8, 16, 32, 64}
    times = [step.seconds for step in saved.steps]
    assert 0 < min(times) < max(times) < 10
    assert SavedSweep.load(out, SweepSubject.of(model, machine_name(), 2, "float32")) is None
