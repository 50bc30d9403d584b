"""The set-up script, with a stub of uv that notes what it is told: which lock it installs, when, and from where."""

from __future__ import annotations

import hashlib
import os
import shutil
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[3]
_STUB = """#!/usr/bin/env bash
env | grep -E '^UV_(FIND_LINKS|TORCH_BACKEND|DEFAULT_INDEX)=.' | sort | tr '\\n' ' ' >>"$(dirname "$0")/calls"
echo "$@" >>"$(dirname "$0")/calls"
"""
_INDEX = "https://index/simple"
_CHECKOUT = "--no-deps --no-build-isolation --config-settings editable_mode=compat -e ."


@pytest.fixture
def checkout(tmp_path: Path) -> Path:
    """A checkout in which everything but the packages is there."""
    locks = [f"requirements/{name}.lock" for name in ("bootstrap", "cpu", "cuda")]
    for name in ("scripts/setup", "scripts/packages", "pyproject.toml", *locks):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        shutil.copy(ROOT / name, tmp_path / name)
    for program in (".venv.uv/bin/uv", ".venv/bin/python"):
        path = tmp_path / program
        path.parent.mkdir(parents=True)
        path.write_text(_STUB)
        path.chmod(0o755)
    digest = hashlib.sha256((ROOT / locks[0]).read_bytes()).hexdigest()
    (tmp_path / ".venv.uv/.installed").write_text(f"{digest}\n")
    return tmp_path


def _set_up(checkout: Path, device: str = "", **more: str) -> tuple[int, str, list[str]]:
    """Run the script; return its status, what it said of errors, and the calls of uv."""
    calls = checkout / ".venv.uv/bin/calls"
    calls.unlink(missing_ok=True)
    kept = {
        name: value
        for name, value in os.environ.items()
        if not name.startswith(("UV_", "PIP_")) and name != "DEVICE"
    }
    given = {"DEVICE": device} if device else {}
    ended = subprocess.run(
        [checkout / "scripts/setup"],
        env={**kept, "PIP_INDEX_URL": _INDEX, **given, **more},
        capture_output=True,
        text=True,
        check=False,
    )
    return ended.returncode, ended.stderr, calls.read_text().splitlines() if calls.exists() else []


def test_it_installs_the_lock_of_the_cpu_once(checkout: Path) -> None:
    status, said, calls = _set_up(checkout)
    assert (status, said, len(calls)) == (0, "", 2)
    assert calls[0].startswith(f"UV_DEFAULT_INDEX={_INDEX} UV_TORCH_BACKEND=cpu pip install")
    assert calls[0].endswith("--no-deps --require-hashes -r requirements/cpu.lock")
    assert calls[1].endswith(_CHECKOUT)
    assert _set_up(checkout) == (0, "", [])


def test_packages_come_from_the_index_that_pip_is_told(checkout: Path) -> None:
    (checkout / "pip.conf").write_text("[global]\nindex-url = https://other/simple\n")
    _, _, calls = _set_up(checkout, PIP_INDEX_URL="", PIP_CONFIG_FILE=str(checkout / "pip.conf"))
    assert all("UV_DEFAULT_INDEX=https://other/simple " in each for each in calls)
    # What uv is told itself comes first.
    _, _, calls = _set_up(checkout, "cuda", UV_DEFAULT_INDEX="https://y/simple")
    assert all("UV_DEFAULT_INDEX=https://y/simple " in each for each in calls)


def test_uv_is_got_anew_when_its_lock_is_another(checkout: Path) -> None:
    with (checkout / "requirements/bootstrap.lock").open("a") as lock:
        lock.write("# changed\n")
    folder = checkout / "programs"
    folder.mkdir()
    # Makes what it is told to make: a Python that is a stub of pip.
    python = checkout / ".venv.uv/bin/python"
    python.write_text('#!/usr/bin/env bash\necho pip "$@" >>"$(dirname "$0")/calls"\n')
    (folder / "python3").write_text(
        '#!/usr/bin/env bash\nif [ "$2" = venv ]; then cd .venv.uv/bin && chmod +x python; fi\n'
    )
    (folder / "python3").chmod(0o755)
    status, _, calls = _set_up(checkout, PATH=f"{folder}:{os.environ['PATH']}")
    assert status == 0
    assert calls[0].startswith("pip -m pip install")
    assert calls[0].endswith("--no-deps --require-hashes -r requirements/bootstrap.lock")
    assert len(calls) == 3


def test_wheels_at_hand_are_for_the_cpu_only(checkout: Path) -> None:
    _, _, calls = _set_up(checkout, PIP_FIND_LINKS="/wheels")
    assert calls[0].startswith(f"UV_DEFAULT_INDEX={_INDEX} UV_FIND_LINKS=/wheels pip install")
    _, _, calls = _set_up(checkout, "cuda", PIP_FIND_LINKS="/wheels", UV_FIND_LINKS="/wheels")
    assert "-r requirements/cuda.lock" in calls[0]
    assert calls[0].startswith(f"UV_DEFAULT_INDEX={_INDEX} pip install")


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
