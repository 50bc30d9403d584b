"""Processes that may be forked, and those that may not."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest

from services.local.child import ProcessSpec
from services.local.config import PlatformConfig
from services.local.launch import Specs, is_forked
from services.local.zygote import Zygote

SPECS = Specs(PlatformConfig(Path("/m")), Path("/state"), "redis://x")
GPU = {"CUDA_VISIBLE_DEVICES": "0"}


def instance(*flags: str, **environment: str) -> ProcessSpec:
    return Specs(PlatformConfig(Path("/m"), instance_options=flags), Path("/state"), "redis://x").instance(
        0, environment, ()
    )


@pytest.mark.parametrize(
    ("spec", "expected"),
    [
        (SPECS.gateway(0), True),
        (SPECS.draft_store(0), True),
        (SPECS.learner(Path("/head")), True),
        # It imports what others do not.
        (SPECS.facade(0, "gateway"), False),
        (instance(), True),
        (instance(**GPU), False),
        (instance("--engine=v2"), False),
        (instance("--engine", "v2"), False),
        (instance("--engine=v2", "--engine=v1"), True),
        (instance(PACELINE_ENGINE="v2"), False),
        (instance("--engine=v1", PACELINE_ENGINE="v2"), True),
        (ProcessSpec("other", (sys.executable, "-c", "pass"), Path("/log")), False),
    ],
)
def test_what_may_be_forked(spec: ProcessSpec, expected: bool) -> None:
    assert is_forked(spec) is expected


def test_nothing_is_forked_on_other_systems(monkeypatch: Any) -> None:
    monkeypatch.setattr(sys, "platform", "darwin")
    assert not is_forked(SPECS.gateway(0))


def test_a_zygote_that_cannot_be_started_says_so_at_once(tmp_path: Path) -> None:
    zygote = Zygote("json", log=tmp_path / "missing" / "imports.log")
    with pytest.raises(OSError, match="missing"):
        zygote.preload()
    with (tmp_path / "log").open("wb") as log, pytest.raises(RuntimeError, match="nothing can be forked"):
        zygote.fork([sys.executable, "-m", "json"], {}, (), log)
