"""Memory that sampling a step takes, and what of it comes off the KV cache."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from vllm.v1.worker import gpu_worker
from vllm.v1.worker.gpu_worker import Worker

from kernels.coupled_sampler import triton_threshold
from services.generation.engine import step_sizes as memory
from services.generation.engine import worker
from services.generation.engine.step_sizes import StepMemory, row_capacity, step_memory
from services.generation.engine.worker import CoupledGPUWorker


def test_the_figures_of_the_documentation() -> None:
    """70B in bfloat16 on 8 devices, vocabulary 150,000, 256 samples (docs/sizing.md)."""
    rows = row_capacity(16384, 150_000)
    assert rows == 1789
    found = step_memory(rows, 256, 150_000, ranks=8)
    megabytes = {name: round(value / 1e6) for name, value in found._asdict().items()}
    assert megabytes == {
        "logits": 537,
        "gathered": 604,
        "edited": 1073,
        "parts": 403,
        "scratch": 123,
        "counts": 230,
    }
    assert round(found.total / 1e6) == 2366


def test_the_sampler_has_the_sizes_that_are_counted() -> None:
    sizes = (triton_threshold.MOST_PIECES, triton_threshold.CAPACITY, triton_threshold.STATE)
    assert sizes == (memory.PIECES, memory.KEYS, memory.STATE)


@given(st.integers(1, 20_000), st.integers(1, 1024), st.integers(1, 300_000), st.sampled_from([1, 2, 8]))
def test_more_of_anything_takes_no_less(rows: int, samples: int, vocab_size: int, ranks: int) -> None:
    found = step_memory(rows, samples, vocab_size, ranks=ranks)
    for larger in (
        step_memory(2 * rows, samples, vocab_size, ranks=ranks),
        step_memory(rows, 2 * samples, vocab_size, ranks=ranks),
        step_memory(rows, samples, 2 * vocab_size, ranks=ranks),
        step_memory(rows, samples, vocab_size, ranks=ranks, logit_bytes=4),
    ):
        assert larger.total >= found.total
    assert step_memory(rows, samples, vocab_size, counted=False).counts == 0
    assert found.logits == 2 * max(rows, samples) * vocab_size
    assert row_capacity(rows, vocab_size) * 4 * vocab_size <= memory.LOGITS_BYTES


@given(st.integers(0, 1 << 34))
def test_what_vllm_leaves_free_is_used_first(measured: int) -> None:
    found = StepMemory(100, 50, 200, 30, 3, 7)
    assert found.total == 340
    assert found.beyond(measured) == max(0, 340 - measured)
    assert found.beyond(-5) == 340


@pytest.mark.parametrize("v2", [False, True])
@pytest.mark.parametrize("chosen", [None, 1 << 30])
def test_a_worker_takes_it_off_the_budget_of_kv(
    v2: bool, chosen: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    budget = 40 << 30
    monkeypatch.setattr(Worker, "determine_available_memory", lambda self: chosen or budget)
    worker: Any = CoupledGPUWorker.__new__(CoupledGPUWorker)
    worker.vllm_config = SimpleNamespace(
        model_config=SimpleNamespace(get_vocab_size=lambda: 150_000, dtype=torch.bfloat16),
        scheduler_config=SimpleNamespace(max_num_seqs=256, max_num_batched_tokens=16384),
        parallel_config=SimpleNamespace(tensor_parallel_size=8),
    )
    worker.cache_config = SimpleNamespace(kv_cache_memory_bytes=chosen)
    worker.use_v2_model_runner = v2
    worker.peak_activation_memory, worker.cudagraph_memory_estimate = 900 << 20, 400 << 20
    needed = step_memory(1789, 256, 150_000, ranks=8, counted=not v2).total
    expected = chosen or budget - (needed - (500 << 20))
    assert worker.determine_available_memory() == expected


@pytest.mark.parametrize("sleeps", [True, False])
def test_a_draft_model_is_among_the_weights_although_the_target_is_in_their_pool(
    monkeypatch: pytest.MonkeyPatch, sleeps: bool
) -> None:
    pools = list[str]()

    def use_memory_pool(tag: str) -> AbstractContextManager[None]:
        pools.append(tag)
        return nullcontext()

    allocator = SimpleNamespace(use_memory_pool=use_memory_pool, get_current_usage=lambda: 16 << 30)
    for module in (worker, gpu_worker):
        monkeypatch.setattr(module, "get_mem_allocator_instance", lambda: allocator)
    platform = SimpleNamespace(is_cuda_alike=lambda: True, is_xpu=lambda: False, is_cpu=lambda: False)
    monkeypatch.setattr(gpu_worker, "current_platform", platform)
    made: Any = object.__new__(CoupledGPUWorker)
    made.vllm_config = SimpleNamespace(model_config=SimpleNamespace(enable_cumem_allocator=sleeps))
    with made.among_weights():
        assert pools == (["weights"] if sleeps else [])
