"""Variables that an engine is built with."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from services.generation.engine.environment import set_variables

CACHE = "TORCHINDUCTOR_CACHE_DIR"


def variable(patch: pytest.MonkeyPatch) -> str | None:
    environment = dict(os.environ)
    patch.setattr(os, "environ", environment)
    set_variables()
    return environment.get(CACHE)


def test_compiled_code_comes_from_a_folder_of_this_user(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """By default torch has one for temporary files, which any user of the machine can have made before."""
    with monkeypatch.context() as patch:
        patch.setenv("XDG_CACHE_HOME", str(tmp_path))
        patch.delenv(CACHE, raising=False)
        assert variable(patch) == str(tmp_path / "paceline/inductor")
        os.environ[CACHE] = "/cache/inductor"
        assert variable(patch) == "/cache/inductor"


def test_without_a_folder_to_write_to_torch_chooses(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """An import that makes the folder would fail otherwise, and with it the instance."""
    (tmp_path / "file").touch()
    with monkeypatch.context() as patch:
        patch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))
        patch.delenv(CACHE, raising=False)
        assert variable(patch) is None
