"""Tests of the Triton kernels, in three modes.

compile    no kernel runs: what would be launched is compiled for a CUDA device; the mode of all processes but those
           that ../test_triton.py starts for the other two
interpret  Triton's interpreter, on CPU; it must be switched on before Triton is first imported, here
cuda       on a CUDA device
"""

import os

import pytest
import torch

from kernels.backend import installed

MODE = os.environ.get("KERNEL_TESTS", "compile" if installed() else "none")
if MODE == "interpret":
    os.environ["TRITON_INTERPRET"] = "1"
    from tests.support.triton_interpreter import make_quicker

    make_quicker()
collect_ignore_glob = {
    "interpret": ["test_compile.py"],
    "cuda": ["test_compile.py"],
    "compile": ["test_[!c]*.py"],
}.get(MODE, ["test_*.py"])


@pytest.fixture
def device() -> torch.device:
    return torch.device("cuda" if MODE == "cuda" else "cpu")
