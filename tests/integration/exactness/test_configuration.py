"""vLLM's own configuration of an engine: its defaults for the device, and the CUDA graphs of verifying steps."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest
from vllm.config import CompilationMode, CUDAGraphMode, VllmConfig
from vllm.engine.arg_utils import EngineArgs
from vllm.platforms import current_platform
from vllm.usage.usage_lib import UsageContext
from vllm.v1.cudagraph_dispatcher import CudagraphDispatcher

from services.generation.engine.arguments import capture_drafts, engine_config
from services.generation.engine.types import EngineOptions
from services.generation.speculation.selection import draft_token_counts
from tests.support.models import tiny_model

WINDOW = 16
FLASHINFER = "VLLM_USE_FLASHINFER_SAMPLER"


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_model(tmp_path_factory.mktemp("model") / "qwen3")


def test_what_is_not_set_is_vllms_choice_for_rollouts(model: Path) -> None:
    tokens, samples = EngineArgs.get_batch_defaults(1)
    config = engine_config(EngineOptions(str(model)))
    assert config.scheduler_config.max_num_seqs == samples[UsageContext.LLM_CLASS]
    assert config.scheduler_config.max_num_batched_tokens == tokens[UsageContext.LLM_CLASS]
    own = EngineArgs(model=str(model)).gpu_memory_utilization
    assert config.cache_config.gpu_memory_utilization == own
    given = engine_config(
        EngineOptions(str(model), max_num_seqs=7, max_num_batched_tokens=33, gpu_memory_utilization=0.4)
    )
    chosen = (given.scheduler_config.max_num_seqs, given.scheduler_config.max_num_batched_tokens)
    assert (*chosen, given.cache_config.gpu_memory_utilization) == (7, 33, 0.4)


@pytest.mark.parametrize("coupled", [True, False])
def test_vllms_sampler_needs_no_flashinfer_where_it_is_not_called(
    model: Path, coupled: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(FLASHINFER, "1")
    engine_config(EngineOptions(str(model), coupled=coupled))
    assert os.environ[FLASHINFER] == ("0" if coupled else "1")


def test_weights_and_compilation_are_vllms_to_load_and_choose(model: Path) -> None:
    chosen = {"mode": 0, "cudagraph_mode": "NONE"}
    config = engine_config(EngineOptions(str(model), load_format="dummy", compilation_config=chosen))
    assert config.load_config.load_format == "dummy"
    assert config.compilation_config.mode is CompilationMode.NONE


@pytest.mark.parametrize(
    ("device", "gigabytes", "expected"),
    [
        ("NVIDIA H100 80GB HBM3", 79, (1024, 16384)),
        ("NVIDIA A100-SXM4-80GB", 79, (256, 8192)),
        ("NVIDIA L40S", 44, (256, 8192)),
    ],
)
def test_a_gpu_gets_what_vllm_would_choose(
    model: Path, device: str, gigabytes: int, expected: tuple[int, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    real = EngineArgs.get_batch_defaults

    def on_device(world_size: int) -> Any:
        with monkeypatch.context() as patched:
            patched.setattr(current_platform, "is_cpu", lambda: False)
            patched.setattr(current_platform, "get_device_name", lambda: device)
            patched.setattr(current_platform, "get_device_total_memory", lambda: gigabytes << 30)
            return real(world_size)

    monkeypatch.setattr(EngineArgs, "get_batch_defaults", staticmethod(on_device))
    scheduler = engine_config(EngineOptions(str(model))).scheduler_config
    assert (scheduler.max_num_seqs, scheduler.max_num_batched_tokens) == expected


def test_what_the_cpu_has_not_is_refused(model: Path) -> None:
    with pytest.raises(ValueError, match="needs all of them on each rank"):
        engine_config(EngineOptions(str(model), enable_expert_parallel=True, tensor_parallel_size=2))


def test_on_cpu_there_are_no_graphs(model: Path) -> None:
    config = engine_config(EngineOptions(str(model), draft_window=WINDOW))
    assert config.compilation_config.cudagraph_capture_sizes == []
    assert not config.compilation_config.max_cudagraph_capture_size


def captured(model: Path, samples: int, tokens: int) -> VllmConfig:
    """The configuration of an engine with CUDA graphs, with vLLM's own list of their sizes."""
    options = EngineOptions(str(model), max_num_seqs=samples, max_num_batched_tokens=tokens)
    config = engine_config(options)
    config.model_config.enforce_eager = False
    compilation = config.compilation_config
    compilation.mode = CompilationMode.VLLM_COMPILE
    compilation.cudagraph_mode = CUDAGraphMode.FULL_AND_PIECEWISE
    compilation.set_splitting_ops_for_v1(all2all_backend="")
    compilation.cudagraph_capture_sizes = compilation.max_cudagraph_capture_size = None
    config._set_cudagraph_sizes()
    return config


@pytest.mark.parametrize(("samples", "tokens"), [(5, 4096), (64, 4096), (256, 8192), (256, 1000)])
def test_vllm_replays_a_graph_for_every_step_that_the_planner_chooses(
    model: Path, samples: int, tokens: int
) -> None:
    config = captured(model, samples, tokens)
    own = tuple(config.compilation_config.cudagraph_capture_sizes or ())
    capture_drafts(config, WINDOW)
    sizes = tuple(config.compilation_config.cudagraph_capture_sizes or ())
    assert sizes[: len(own)] == own
    assert sizes[-1] == min(samples * (1 + WINDOW), tokens)
    dispatcher = CudagraphDispatcher(config)
    dispatcher.initialize_cudagraph_keys(CUDAGraphMode.FULL_AND_PIECEWISE)
    for running in range(1, samples + 1, max(1, samples // 12)):
        room = min(running * WINDOW, tokens - running)
        for count in draft_token_counts(running, room, sizes)[1:].tolist():
            mode, padded = dispatcher.dispatch(running + count)
            assert mode is CUDAGraphMode.PIECEWISE
            # Nothing is padded, unless there are no more drafts.
            assert padded.num_tokens == running + count or count == room
    # All samples without drafts have the graph of plain decoding.
    assert dispatcher.dispatch(samples, uniform_decode=True)[0] is CUDAGraphMode.FULL
