"""The set-up script, with a stub of uv that notes its arguments: which lock it installs, and when."""

from __future__ import annotations

import os
import shutil
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[3]
_STUB = """#!/usr/bin/env bash
echo "$@" >>"$(dirname "$0")/calls"
"""


@pytest.fixture
def checkout(tmp_path: Path) -> Path:
    """A checkout in which everything but the packages is there."""
    for name in ("scripts/setup", "requirements/cpu.lock", "requirements/cuda.lock", "pyproject.toml"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        shutil.copy(ROOT / name, tmp_path / name)
    for program in (".venv.uv/bin/uv", ".venv/bin/python"):
        path = tmp_path / program
        path.parent.mkdir(parents=True)
        path.write_text(_STUB)
        path.chmod(0o755)
    return tmp_path


def _set_up(checkout: Path, device: str = "", **more: str) -> tuple[int, str, list[str]]:
    """Run the script; return its status, what it said of errors, and the calls of uv."""
    calls = checkout / ".venv.uv/bin/calls"
    calls.unlink(missing_ok=True)
    kept = {
        name: value for name, value in os.environ.items() if "FIND_LINKS" not in name and name != "DEVICE"
    }
    given = {"DEVICE": device} if device else {}
    ended = subprocess.run(
        [checkout / "scripts/setup"],
        env={**kept, **given, **more},
        capture_output=True,
        text=True,
        check=False,
    )
    return ended.returncode, ended.stderr, calls.read_text().splitlines() if calls.exists() else []


def test_it_installs_the_lock_of_the_cpu_once(checkout: Path) -> None:
    status, said, calls = _set_up(checkout)
    assert (status, said, len(calls)) == (0, "", 1)
    assert "--torch-backend cpu" in calls[0]
    assert "-r requirements/cpu.lock" in calls[0]
    assert _set_up(checkout) == (0, "", [])


def test_wheels_at_hand_are_for_the_cpu_only(checkout: Path) -> None:
    _, _, calls = _set_up(checkout, PIP_FIND_LINKS="/wheels")
    assert "--torch-backend" not in calls[0]
    _, _, calls = _set_up(checkout, "cuda", PIP_FIND_LINKS="/wheels")
    assert "-r requirements/cuda.lock" in calls[0]
    assert "--torch-backend" not in calls[0]


def test_a_device_that_was_chosen_stays_until_another_is(checkout: Path) -> None:
    assert "-r requirements/cuda.lock" in _set_up(checkout, "cuda")[2][0]
    assert _set_up(checkout) == (0, "", [])
    assert "-r requirements/cpu.lock" in _set_up(checkout, "cpu")[2][0]
    assert _set_up(checkout) == (0, "", [])


def test_another_lock_is_installed(checkout: Path) -> None:
    _set_up(checkout, "cuda")
    with (checkout / "requirements/cuda.lock").open("a") as lock:
        lock.write("# changed\n")
    assert "-r requirements/cuda.lock" in _set_up(checkout)[2][0]


def test_an_unknown_device_is_refused_and_nothing_installed(checkout: Path) -> None:
    status, said, calls = _set_up(checkout, "tpu")
    assert (status, calls) == (2, [])
    assert "DEVICE is tpu; cpu and cuda are there" in said
