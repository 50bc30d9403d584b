"""Shares of cores and GPUs."""

import sys
from importlib import metadata

import pytest

from services.local import machine
from services.local.config import DeviceChoice


def test_an_instance_has_as_many_threads_as_cores() -> None:
    assert machine.cpu_environment((2, 3)) == {"OMP_NUM_THREADS": "2", "VLLM_CPU_OMP_THREADS_BIND": "2,3"}


@pytest.mark.parametrize(
    ("visible", "gpus", "index", "expected"),
    [(None, 2, 1, "1"), (None, 2, 2, "0"), ("4,7", 8, 1, "7"), ("GPU-ab", 8, 3, "GPU-ab")],
)
def test_gpus_are_those_visible_to_the_launcher(
    visible: str | None, gpus: int, index: int, expected: str
) -> None:
    assert machine.cuda_environment(visible, gpus, index) == {"CUDA_VISIBLE_DEVICES": expected}


@pytest.mark.parametrize(
    ("device", "gpus", "cpu_build", "chosen"),
    [
        ("cuda", 0, True, True),
        ("cpu", 8, False, False),
        ("auto", 8, False, True),
        ("auto", 8, True, False),
        ("auto", 0, False, False),
    ],
)
def test_gpus_are_used_if_vllm_is_built_for_them(
    device: str, gpus: int, cpu_build: bool, chosen: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    def installed(name: str) -> None:
        assert name == "vllm-cpu"
        if not cpu_build:
            raise metadata.PackageNotFoundError(name)

    monkeypatch.setattr(machine, "distribution", installed)
    assert machine.chooses_cuda(DeviceChoice(device), gpus) is chosen


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux can pin")
def test_no_cores_is_no_pinning() -> None:
    assert machine.pinned(["/bin/true"], ()) == ["/bin/true"]
    assert machine.pinned(["/bin/true"], (3,))[-2:] == ["3", "/bin/true"]
