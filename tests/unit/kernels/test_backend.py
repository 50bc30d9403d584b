"""The switch of the kernels, and what an import pulls in."""

import subprocess
import sys
from pathlib import Path

import pytest
import torch

from kernels import backend
from kernels.backend import Backend, BackendUnavailable, choose

CPU, CUDA = torch.device("cpu"), torch.device("cuda")


@pytest.fixture(autouse=True)
def restored(monkeypatch):
    monkeypatch.setattr(backend, "_chosen", Backend.AUTO)


def test_auto_is_triton_on_cuda_only(monkeypatch):
    monkeypatch.setattr(backend, "installed", lambda: True)
    assert choose(CPU) is Backend.REFERENCE
    assert choose(CUDA) is Backend.TRITON


def test_auto_falls_back_where_triton_is_not_installed(monkeypatch):
    monkeypatch.setattr(backend, "installed", lambda: False)
    assert choose(CUDA) is Backend.REFERENCE
    with pytest.raises(BackendUnavailable, match="not installed"):
        choose(CUDA, "triton")


def test_one_switch_sets_all_and_a_call_overrides_it(monkeypatch):
    monkeypatch.setattr(backend, "installed", lambda: True)
    backend.use("reference")
    assert choose(CUDA) is Backend.REFERENCE
    assert choose(CUDA, Backend.AUTO) is Backend.TRITON
    assert backend.in_use() is Backend.REFERENCE


def test_an_unknown_backend_is_refused_with_what_is_allowed():
    with pytest.raises(ValueError, match="auto, triton, reference"):
        backend.use("cuda")


def test_triton_on_cpu_tensors_is_refused_outside_the_interpreter(monkeypatch):
    monkeypatch.setattr(backend, "installed", lambda: True)
    monkeypatch.setattr(backend, "interpreted", lambda: False)
    with pytest.raises(BackendUnavailable, match="allowed here: auto, reference"):
        choose(CPU, "triton")


def test_sdk_and_references_do_without_triton():
    code = (
        "import paceline, torch, sys\n"
        "from kernels.coupled_sampler import sample\n"
        "from kernels import kd_loss, kv_pack, w4a16, short_query_attention\n"
        "w4a16.matmul(torch.ones(2, 32), w4a16.quantise(torch.ones(4, 32), 32))\n"
        "assert 'triton' not in sys.modules\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True, cwd=Path(__file__).parents[3])
