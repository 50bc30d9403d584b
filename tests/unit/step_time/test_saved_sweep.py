"""Sweeps as files, and whose they are."""

from __future__ import annotations

from pathlib import Path

import pytest

from services.step_time.sweep import SavedSweep, SweepSubject, UnusableSweep
from tests.support.step_times import KnownStepTime

SUBJECT = SweepSubject(
    device="NVIDIA H100 80GB HBM3", tensor_parallel_size=8, model="Qwen3/8B", dtype="bfloat16"
)
SWEEP = SavedSweep(subject=SUBJECT, steps=tuple(KnownStepTime().sweep()))


def test_a_sweep_is_read_as_it_was_saved(tmp_path: Path) -> None:
    path = SWEEP.save(tmp_path / "new" / "folder")
    assert path.name == "Qwen3-8B_NVIDIA-H100-80GB-HBM3_tp8_bfloat16.json"
    assert SavedSweep.load(path, SUBJECT) == SWEEP
    assert SavedSweep.load(path.parent, SUBJECT) == SWEEP


@pytest.mark.parametrize(
    "change", [{"device": "NVIDIA L4"}, {"tensor_parallel_size": 1}, {"model": "other"}, {"dtype": "float16"}]
)
def test_the_sweep_of_another_subject_is_not_taken(tmp_path: Path, change: dict[str, object]) -> None:
    path, other = SWEEP.save(tmp_path), SUBJECT.model_copy(update=change)
    assert other.file_name != SUBJECT.file_name
    assert SavedSweep.load(path, other) is None
    assert SavedSweep.load(tmp_path, other) is None


def test_models_of_one_name_are_distinguished_by_their_config(tmp_path: Path) -> None:
    names = set()
    for layers in (35, 36):
        folder = tmp_path / str(layers) / "model"
        folder.mkdir(parents=True)
        (folder / "config.json").write_text(f'{{"num_hidden_layers": {layers}}}')
        names.add(SweepSubject.of(folder, "cpu", 1, "float32").file_name)
    assert len(names) == 2
    assert SweepSubject.of(tmp_path / "absent", "cpu", 1, "float32").model.startswith("absent-")


@pytest.mark.parametrize("text", ["", "{}", "[1", '{"subject": 1}'])
def test_a_file_that_is_no_sweep_is_refused(tmp_path: Path, text: str) -> None:
    path = tmp_path / "sweep.json"
    path.write_text(text)
    with pytest.raises(UnusableSweep, match=r"sweep\.json"):
        SavedSweep.load(path, SUBJECT)
    with pytest.raises(UnusableSweep, match="absent"):
        SavedSweep.load(tmp_path / "absent", SUBJECT)
