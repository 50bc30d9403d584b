"""Tests of the Triton kernels, started by ../test_triton.py in processes of their own.

There are three modes:

interpret  Triton's interpreter, on CPU; it must be switched on before Triton is first imported, here
compile    no kernel runs: what would be launched is compiled for a CUDA device
cuda       on a CUDA device
"""

import os

import pytest
import torch

MODE = os.environ.get("KERNEL_TESTS", "")
if MODE == "interpret":
    os.environ["TRITON_INTERPRET"] = "1"
    from tests.support.triton_interpreter import replace_language_once

    replace_language_once()
collect_ignore_glob = {
    "interpret": ["test_compile.py"],
    "cuda": ["test_compile.py"],
    "compile": ["test_[!c]*.py"],
}.get(MODE, ["test_*.py"])


@pytest.fixture
def device() -> torch.device:
    return torch.device("cuda" if MODE == "cuda" else "cpu")
