"""`paceline calibrate` on a real engine: every cell is measured, and what is kept is what an instance takes."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from services.policy.models import architecture_of
from services.policy.stored import Calibration
from tests.support.models import tiny_model

pytestmark = pytest.mark.timeout(240)

BATCHES, DRAFTS, LENGTHS = (1, 2, 4), (0, 1, 2, 4, 8, 16), 3


def test_a_model_is_measured_and_its_fit_kept(tmp_path: Path) -> None:
    model, out = tiny_model(tmp_path / "model"), tmp_path / "out"
    core = str(max(os.sched_getaffinity(0)))
    # Whether so short a sweep on a busy machine fits well is not asked here.
    measure = ["--seconds", "2", "--max-num-seqs", "4", "--threads-bind", core]
    keep = ["--out", str(out), "--dtype", "float32", "--most-median", "100", "--most-p90", "100"]
    command = [sys.executable, "-m", "paceline.cli", "calibrate", "--model", str(model), *measure, *keep]
    done = subprocess.run(command, capture_output=True, text=True, timeout=200)
    assert done.returncode == 0, done.stderr
    (kept,) = out.glob("*.json")
    assert str(kept) in done.stdout
    calibration = Calibration.load(kept)
    cells = {(p.requests, p.rows // p.requests - 1) for p in calibration.points}
    assert cells == {(batch, draft) for batch in BATCHES for draft in DRAFTS}
    assert len(calibration.points) == len(calibration.predicted)
    # Of each cell one for each turn, as there is time.
    assert len(calibration.points) >= 2 * len(BATCHES) * len(DRAFTS) * LENGTHS
    assert calibration.step_time.architecture == architecture_of(model, "float32")
    assert calibration.subject.dtype == "float32"
    times = [p.seconds for p in calibration.points]
    assert 0 < min(times) < max(times) < 10
    # A line of the table for each point that the fit has not seen, with how far off its prediction is.
    assert done.stdout.count("%") >= sum(p.held_out for p in calibration.points) > 0
