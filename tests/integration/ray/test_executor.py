"""Placement of the workers of an instance by vLLM."""

from __future__ import annotations

import importlib
from pathlib import Path

import pytest

from services.generation.config import GenerationConfig
from tests.support.models import tiny_model


def test_workers_go_to_the_ray_cluster_where_there_are_gpus(tmp_path: Path) -> None:
    importlib.import_module("services.generation.engine.core")  # sets what vLLM reads when it is imported
    from vllm.platforms import current_platform

    from services.generation.engine.arguments import engine_args

    model = str(tiny_model(tmp_path))

    def backend(executor: str, devices: int) -> object:
        config = GenerationConfig(model=model, executor=executor, tensor_parallel_size=devices)
        return engine_args(config.engine_options()).distributed_executor_backend

    assert [backend("local", devices) for devices in (1, 2)] == ["uni", "mp"]
    if current_platform.is_cpu():
        with pytest.raises(ValueError, match="ray needs CUDA"):
            backend("ray", 2)
    else:
        assert backend("ray", 16) == "ray"
