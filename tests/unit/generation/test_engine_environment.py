"""Variables that vLLM reads when an engine is built."""

from __future__ import annotations

import os

import pytest

from services.generation.engine.types import EngineOptions


def test_an_engine_sets_what_the_environment_of_a_forked_process_lacks(
    monkeypatch: pytest.MonkeyPatch, tmp_path: object
) -> None:
    """It was imported before the fork, where the variables were set for another process."""
    from services.generation.engine import core

    class Built(Exception):
        pass

    def build() -> None:
        raise Built

    monkeypatch.setattr(core, "refuse_early_numba", build)
    monkeypatch.delenv("VLLM_ENABLE_V1_MULTIPROCESSING", raising=False)
    monkeypatch.setenv("VLLM_LOGGING_LEVEL", "DEBUG")
    with pytest.raises(Built):
        core.Engine(EngineOptions(str(tmp_path)))
    assert os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] == "0"
    assert os.environ["VLLM_LOGGING_LEVEL"] == "DEBUG"
