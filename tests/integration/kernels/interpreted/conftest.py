"""vLLM on CPU with its own Triton attention, and ours in it, in Triton's interpreter.

Started by ../test_attention.py, in a process of its own: the interpreter is chosen before Triton is first imported,
and vLLM leaves Triton alone where no driver says that it has a device.
"""

import os
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch

WANTED = os.environ.get("KERNEL_TESTS") == "interpret"
collect_ignore_glob = [] if WANTED else ["test_*.py"]
if WANTED:
    os.environ["TRITON_INTERPRET"] = "1"
    import triton.backends

    # The way in for vLLM's CPU build: a driver with this name is taken for one that has a device.
    triton.backends.backends["cpu"] = SimpleNamespace(driver=SimpleNamespace(is_active=lambda: True))
    # vLLM's kernel that writes KV asks it for the size of its tiles.
    torch.cuda.get_device_capability = lambda *_: (9, 0)

    from tests.support.triton_interpreter import make_quicker

    make_quicker()


@pytest.fixture
def launches(monkeypatch):
    """The steps that our attention computes."""
    from kernels.short_query_attention import triton_attend

    found = []
    real = triton_attend.attend_triton

    def attend(step, *args, **kwargs):
        # vLLM writes the next step's numbers into the same tensor.
        found.append(replace(step, cu_queries=step.cu_queries.clone()))
        return real(step, *args, **kwargs)

    # `prepare` launches too, but calls the function that it knows.
    monkeypatch.setattr(triton_attend, "prepare", lambda *_: None)
    monkeypatch.setattr(triton_attend, "attend_triton", attend)
    return found
