"""The Triton kernels in Triton's interpreter, and on a device if there is one.

Each in a process of its own: the interpreter is chosen when Triton is first imported, and other tests need it not.
triton_backend/test_compile.py compiles them for CUDA without a device.
"""

from collections.abc import Sequence
from pathlib import Path

import pytest
import torch

from kernels.backend import installed
from tests.support.inner_pytest import run_tests

FOLDER = Path(__file__).parent / "triton_backend"
KERNELS = ("attend", "kd_loss", "kv_pack", "nan", "proposals", "sample", "selfcheck", "w4a16")
# What that gives is for each device and each NumPy to say.
NO_SUCH_INTEGER = ("-W", "error:invalid value encountered in cast:RuntimeWarning")

pytestmark = [
    pytest.mark.skipif(not installed(), reason="Triton is not installed (extra: kernels)"),
    pytest.mark.timeout(900),
]


def run(mode: str, *names: str, options: Sequence[str] = ()) -> None:
    paths = [FOLDER / f"test_{name}.py" for name in names]
    run_tests(paths, [*NO_SUCH_INTEGER, *options], KERNEL_TESTS=mode)


@pytest.mark.parametrize(
    "options", [(), pytest.param(("--soak", "-m", "soak"), marks=pytest.mark.soak)], ids=["short", "rest"]
)
def test_kernels_give_the_references_results_in_the_interpreter(options: Sequence[str]) -> None:
    """Each way through the code is in the short form; the rest are its combinations with each other."""
    run("interpret", *KERNELS, options=options)


@pytest.mark.gpu
@pytest.mark.parametrize("name", KERNELS)
def test_kernel_gives_the_references_results_on_a_device(name: str) -> None:
    if not torch.cuda.is_available():
        pytest.skip("no CUDA device")
    run("cuda", name, options=["--soak"])
