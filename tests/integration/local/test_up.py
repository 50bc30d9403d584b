"""`paceline up` and `paceline doctor` where this machine, or the model, does not do."""

from __future__ import annotations

import socket
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from typer.testing import CliRunner

from services.local.doctor import app as doctor
from services.local.machine import read_machine
from services.local.up import app as up
from services.models.local_model import local_model
from services.models.source import ModelError
from tests.support.models import tiny_model


@pytest.fixture
def taken() -> Iterator[int]:
    """A port at which somebody listens."""
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        listener.listen()
        yield listener.getsockname()[1]


def test_the_doctor_says_what_is_missing_and_fails_only_then(taken: int, tmp_path: Path) -> None:
    options = ["--folder", str(tmp_path / "not/there"), "--device", "cpu"]
    well = CliRunner().invoke(doctor, [*options, "--port", "0"])
    assert well.exit_code == 0, well.output
    assert "missing" not in well.output
    # One screen.
    assert len(well.output.splitlines()) <= 24
    ill = CliRunner().invoke(doctor, [*options, "--port", str(taken)])
    assert ill.exit_code == 1
    assert f"{taken} is taken" in ill.output


@pytest.mark.soak
def test_the_doctor_asks_vllm_about_a_model(tmp_path: Path) -> None:
    options = ["--folder", str(tmp_path / "runs"), "--device", "cpu", "--port", "0", "--dtype", "float32"]
    served = tiny_model(tmp_path / "gemma", "gemma3_text")
    well = CliRunner().invoke(doctor, [*options, "--model", str(served)])
    assert well.exit_code == 0, well.output
    assert "SlidingWindowSpec" in well.output
    assert "KV behind a window is dropped" in well.output
    ill = CliRunner().invoke(doctor, [*options, "--model", str(tiny_model(tmp_path / "odd", head_dim=40))])
    assert ill.exit_code == 1
    assert "head_dim=40" in ill.output


def test_the_doctor_names_a_folder_without_a_model(tmp_path: Path) -> None:
    ended = CliRunner().invoke(doctor, ["--device", "cpu", "--port", "0", "--model", str(tmp_path)])
    assert ended.exit_code == 1
    assert "config.json" in ended.output


def test_nothing_is_started_on_a_machine_that_lacks_something(taken: int, tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    options = ["--model", str(tmp_path / "empty"), "--folder", str(tmp_path / "runs")]
    ended = CliRunner().invoke(up, [*options, "--port", str(taken)])
    assert ended.exit_code == 1
    assert f"{taken} is taken" in ended.output
    assert "Starting" not in ended.output
    assert not (tmp_path / "runs").exists()
    # It does not list what there is.
    assert "Linux" not in ended.output
    free = CliRunner().invoke(up, [*options, "--port", "0"])
    assert free.exit_code == 1
    assert "empty has no config.json" in "".join(free.output.split("\n"))


def test_a_start_takes_an_address_and_keeps_what_it_has_downloaded(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    (tmp_path / "model").mkdir()
    (tmp_path / "model/weights.safetensors").write_bytes(b"weights")
    address = f"file://{tmp_path}/model"
    ended = CliRunner().invoke(up, ["--model", address, "--folder", str(tmp_path / "runs"), "--port", "0"])
    # It came, and is none.
    assert "config.json" in ended.output
    lines: list[str] = []
    kept = local_model(address, lines.append)
    assert lines == []
    assert kept.is_relative_to(tmp_path / "cache")
    assert (kept / "weights.safetensors").read_bytes() == b"weights"
    assert local_model(str(kept), lines.append) == kept


def test_a_name_that_is_no_model_is_told_without_a_traceback() -> None:
    ended = CliRunner().invoke(up, ["--model", "no-such-folder", "--port=0"])
    assert ended.exit_code == 1
    assert "'no-such-folder' is neither a folder" in ended.output
    with pytest.raises(ModelError):
        local_model("a/b/c", print)


def test_this_machine_is_read_as_it_is(taken: int, tmp_path: Path) -> None:
    machine = read_machine(tmp_path, [taken, 0], ["redis", "no_such_package"])
    assert machine.taken_ports == {taken}
    assert machine.missing_packages == ("no_such_package",)
    assert machine.python == sys.version_info[:2]
    assert machine.memory > 0
    assert machine.disk > 0
    assert machine.cores >= 1
    assert (machine.gpus > 0) <= (machine.driver != "")
