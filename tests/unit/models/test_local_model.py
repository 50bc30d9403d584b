"""Models by name that a script of the repository makes."""

from __future__ import annotations

from pathlib import Path

import pytest

from services.models import local_model as naming
from services.models.local_model import local_model
from services.models.source import ModelError


def _checkout(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, script: str) -> Path:
    path = tmp_path / "scripts/real-model"
    path.parent.mkdir()
    path.write_text(f"#!/bin/sh\n{script}\n")
    path.chmod(0o755)
    monkeypatch.setattr(naming, "_CHECKOUT", tmp_path)
    monkeypatch.chdir(tmp_path.parent)
    return tmp_path / "runs/models/smollm2"


def test_a_model_by_its_name_is_made_wherever_the_command_runs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = _checkout(
        tmp_path, monkeypatch, "echo downloading; mkdir -p runs/models/smollm2; printf 'a\\rb\\n' >&2"
    )
    lines: list[str] = []
    assert local_model("smollm2", lines.append) == folder
    assert folder.is_dir()
    assert lines == ["downloading", "b"], "of a bar that is drawn over itself, what is left"


def test_a_script_that_fails_says_why(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    _checkout(tmp_path, monkeypatch, "echo there is no registry >&2; exit 1")
    with pytest.raises(ModelError, match="could not make smollm2: there is no registry"):
        local_model("smollm2", lambda line: None)


def test_an_installation_without_the_script_says_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(naming, "_CHECKOUT", tmp_path)
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ModelError, match="smollm2 is made by scripts/real-model in a checkout"):
        local_model("smollm2", lambda line: None)
