"""The Triton kernels in Triton's interpreter, and on a device if there is one.

Each in a process of its own: the interpreter is chosen when Triton is first imported, and other tests need it not.
triton_backend/test_compile.py compiles them for CUDA without a device.
"""

import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest
import torch

from kernels.backend import installed

FOLDER = Path(__file__).parent / "triton_backend"
ROOT = FOLDER.parents[3]
KERNELS = ("attend", "kd_loss", "kv_pack", "proposals", "sample", "selfcheck", "w4a16")

pytestmark = [
    pytest.mark.skipif(not installed(), reason="Triton is not installed (extra: kernels)"),
    pytest.mark.timeout(900),
]


def run_tests(mode: str, *names: str, options: Sequence[str] = ()) -> None:
    paths = [str(FOLDER / f"test_{name}.py") for name in names]
    process = subprocess.run(
        [
            sys.executable,
            "-m",
            "pytest",
            "-p",
            "no:cacheprovider",
            "-W",
            "ignore::RuntimeWarning",
            *options,
            *paths,
        ],
        cwd=ROOT,
        env={**os.environ, "KERNEL_TESTS": mode},
        capture_output=True,
        text=True,
    )
    assert process.returncode == 0, process.stdout[-8000:] + process.stderr[-2000:]
    assert " passed" in process.stdout


@pytest.mark.parametrize(
    "options", [(), pytest.param(("--soak", "-m", "soak"), marks=pytest.mark.soak)], ids=["short", "rest"]
)
def test_kernels_give_the_references_results_in_the_interpreter(options: Sequence[str]) -> None:
    """Each way through the code is in the short form; the rest are its combinations with each other."""
    run_tests("interpret", *KERNELS, options=options)


@pytest.mark.gpu
@pytest.mark.parametrize("name", KERNELS)
def test_kernel_gives_the_references_results_on_a_device(name: str) -> None:
    if not torch.cuda.is_available():
        pytest.skip("no CUDA device")
    run_tests("cuda", name, options=["--soak"])
