"""Shares of cores and GPUs."""

import sys

import pytest

from services.local import pinning


def test_an_instance_has_as_many_threads_as_cores() -> None:
    assert pinning.cpu_environment((2, 3)) == {"OMP_NUM_THREADS": "2", "VLLM_CPU_OMP_THREADS_BIND": "2,3"}


@pytest.mark.parametrize(
    ("visible", "gpus", "index", "expected"),
    [(None, 2, 1, "1"), (None, 2, 2, "0"), ("4,7", 8, 1, "7"), ("GPU-ab", 8, 3, "GPU-ab")],
)
def test_gpus_are_those_visible_to_the_launcher(
    visible: str | None, gpus: int, index: int, expected: str
) -> None:
    assert pinning.cuda_environment(visible, gpus, index) == {"CUDA_VISIBLE_DEVICES": expected}


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux can pin")
def test_no_cores_is_no_pinning() -> None:
    assert pinning.pinned(["/bin/true"], ()) == ["/bin/true"]
    assert pinning.pinned(["/bin/true"], (3,))[-2:] == ["3", "/bin/true"]
