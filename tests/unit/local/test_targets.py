"""The file that Prometheus finds a local platform by."""

from __future__ import annotations

import json
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from services.local.child import Child, ProcessSpec
from services.local.platform import TargetsFile, targets
from services.platform.launching import write_ready_file


@pytest.fixture
def children(tmp_path: Path) -> list[Child]:
    """A process that has said that it is ready, and one that has not."""
    spawner = ThreadPoolExecutor(1)
    names = ("gateway", "instance-0")
    made = [
        Child(ProcessSpec(name, (), tmp_path / name, tmp_path / f"{name}.ready"), spawner) for name in names
    ]
    write_ready_file(tmp_path / "gateway.ready", "127.0.0.1:7400", 9100)
    return made


def test_processes_are_listed_once_they_are_ready(children: list[Child], tmp_path: Path) -> None:
    assert json.loads(targets(children, tls=False)) == [
        {"targets": ["127.0.0.1:9100"], "labels": {"instance": "gateway"}}
    ]
    write_ready_file(tmp_path / "instance-0.ready", "127.0.0.1:7401", 9101)
    listed = {
        each["labels"]["instance"]: each["targets"] for each in json.loads(targets(children, tls=False))
    }
    assert listed == {"gateway": ["127.0.0.1:9100"], "instance-0": ["127.0.0.1:9101"]}


def test_under_tls_prometheus_is_told_to_speak_it(children: list[Child]) -> None:
    (listed,) = json.loads(targets(children, tls=True))
    assert listed["labels"]["__scheme__"] == "https"


def test_the_file_is_written_when_something_has_changed(children: list[Child], tmp_path: Path) -> None:
    file = TargetsFile(tmp_path / "new")
    file.write(children, tls=False)
    first = file.path.stat().st_ino
    file.write(children, tls=False)
    assert file.path.stat().st_ino == first
    file.write(children, tls=True)
    assert json.loads(file.path.read_text()) == json.loads(targets(children, tls=True))
    assert [path.name for path in file.path.parent.iterdir()] == ["targets.json"]
