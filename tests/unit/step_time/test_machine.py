"""GPUs that a process may use: what the driver counts, and what CUDA_VISIBLE_DEVICES leaves of it."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from services.step_time import machine

NVML = """
int nvmlInit_v2(void) { return %d; }
int nvmlShutdown(void) { return 0; }
int nvmlDeviceGetCount_v2(unsigned int *count) { *count = 4; return 0; }
"""


@pytest.mark.parametrize(
    ("visible", "expected"),
    [
        (None, 4),
        ("", 0),
        ("-1", 0),
        ("0", 1),
        ("2,3", 2),
        ("0,-1,1", 1),
        ("GPU-8932f937", 1),
        ("0,1,2,3,4", 4),
    ],
)
def test_names_up_to_the_first_that_is_none_count(
    visible: str | None, expected: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(machine, "driver_gpus", lambda: 4)
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    if visible is not None:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    assert machine.gpu_count() == expected
    assert machine.on_cpu() == (expected == 0)


@pytest.mark.parametrize(("status", "expected"), [(0, 4), (9, 0)], ids=["driver", "no driver"])
def test_the_driver_is_asked(status: int, expected: int, tmp_path: Path) -> None:
    """A stub of NVML, in a process that looks for libraries there first."""
    (tmp_path / "nvml.c").write_text(NVML % status)
    library = tmp_path / "libnvidia-ml.so.1"
    try:
        subprocess.run(["cc", "-shared", "-fPIC", "-o", library, tmp_path / "nvml.c"], check=True)
    except FileNotFoundError:
        pytest.skip("there is no C compiler")
    code = "from services.step_time.machine import gpu_count; print(gpu_count())"
    asked = subprocess.run(
        [sys.executable, "-c", code],
        env={"LD_LIBRARY_PATH": str(tmp_path), "PYTHONPATH": str(Path(__file__).parents[3])},
        capture_output=True,
        text=True,
        check=True,
    )
    assert int(asked.stdout) == expected


def test_without_a_driver_there_is_no_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    machine.driver_gpus.cache_clear()

    def missing(name: str) -> None:
        raise OSError(name)

    monkeypatch.setattr(machine.ctypes, "CDLL", missing)
    try:
        assert machine.on_cpu()
    finally:
        machine.driver_gpus.cache_clear()
