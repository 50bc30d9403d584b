"""Devices of an engine, and vLLM's batch-invariant mode: what there is, and why the rest is refused."""

from __future__ import annotations

import os
import sys
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from pydantic import ValidationError

from kernels.backend import Backend
from kernels.short_query_attention.race import AttentionName
from services.generation.config import GenerationConfig
from services.generation.engine import environment
from services.generation.engine.attention_backend import use_attention
from services.generation.engine.environment import INVARIANCE_VARIABLE, choose_invariance, invariance_refusal


@pytest.mark.parametrize(
    ("settings", "reason"),
    [
        ({"pipeline_parallel_size": 2}, "pipeline_parallel_size: an instance steps one batch at a time"),
        ({"data_parallel_size": 4}, "data_parallel_size: replicas within an engine step in lockstep"),
        ({"enable_expert_parallel": True}, "enable_expert_parallel: experts are divided among the ranks"),
    ],
)
def test_what_an_instance_does_not_do_is_refused_with_the_reason(
    settings: dict[str, Any], reason: str
) -> None:
    with pytest.raises(ValidationError, match=reason):
        GenerationConfig(model="m", **settings)


def test_experts_are_divided_among_the_ranks_of_tensor_parallelism() -> None:
    config = GenerationConfig(model="m", enable_expert_parallel=True, tensor_parallel_size=8)
    assert config.engine_options().enable_expert_parallel


def test_what_is_not_set_is_left_to_vllm() -> None:
    options = GenerationConfig(model="m").engine_options()
    assert (options.max_num_seqs, options.max_num_batched_tokens, options.gpu_memory_utilization) == (
        None,
    ) * 3


@pytest.mark.parametrize(("speculation", "window"), [("off", 0), ("planner", 5), ("fixed", 5)])
def test_graphs_are_captured_for_the_drafts_that_may_come(speculation: Any, window: int) -> None:
    config = GenerationConfig(model="m", speculation=speculation, draft_window=5)
    assert config.engine_options().draft_window == window


@pytest.mark.parametrize(
    ("capability", "reason"),
    [
        (None, "compute capability 8.0 or above, or a CPU"),
        ((7, 5), "this one has 7.5"),
        ((8, 0), ""),
        ((9, 0), ""),
    ],
)
def test_batch_invariance_needs_a_device_that_has_it(
    capability: tuple[int, int] | None, reason: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(os.environ, INVARIANCE_VARIABLE, "1")
    assert invariance_refusal(False, capability) == ""
    found = invariance_refusal(True, capability)
    assert reason in found if reason else not found
    monkeypatch.delitem(os.environ, INVARIANCE_VARIABLE)
    assert (
        invariance_refusal(True, (9, 0)) == "batch_invariant: call choose_invariance before vLLM is imported"
    )


def test_batch_invariance_is_chosen_before_vllm_is_imported(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delitem(os.environ, INVARIANCE_VARIABLE, raising=False)
    monkeypatch.setitem(sys.modules, "vllm", None)  # type: ignore[arg-type]
    monkeypatch.setattr(environment, "on_cpu", lambda: True)
    choose_invariance(True)
    monkeypatch.setattr(environment, "on_cpu", lambda: False)
    choose_invariance(False)
    assert INVARIANCE_VARIABLE not in os.environ
    with pytest.raises(RuntimeError, match="before vLLM is imported"):
        choose_invariance(True)
    monkeypatch.delitem(sys.modules, "vllm")
    monkeypatch.setitem(os.environ, INVARIANCE_VARIABLE, "0")
    choose_invariance(True)
    assert os.environ[INVARIANCE_VARIABLE] == "1"
    # Whoever set it himself has it.
    monkeypatch.setitem(sys.modules, "vllm", None)  # type: ignore[arg-type]
    choose_invariance(True)


def test_in_that_mode_attention_is_vllms(monkeypatch: pytest.MonkeyPatch) -> None:
    def measured(*args: Any, **options: Any) -> AttentionName:
        raise AssertionError("nothing is to be measured")

    monkeypatch.setattr("services.generation.engine.attention_backend.choose", lambda device: Backend.TRITON)
    monkeypatch.setitem(os.environ, INVARIANCE_VARIABLE, "1")
    config = SimpleNamespace(model_config=SimpleNamespace(use_mla=False))
    assert use_attention(config, torch.device("cuda"), measured) is AttentionName.VLLM
