"""The command lines of the platform's processes. Pure."""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

from services.local.child import ChildSpec
from services.local.config import PlatformConfig

CPU_KV_BYTES = 1 << 30
"""KV memory of an instance on CPU, where vLLM would take all that is free."""


def instance_id(index: int) -> str:
    """instance-0, instance-1, ..."""
    return f"instance-{index}"


def gateway_spec(config: PlatformConfig, state: Path, redis_url: str, port: int) -> ChildSpec:
    """The gateway on a given port; 0 lets it pick one."""
    flags = [*_flags(state, "gateway", redis_url), f"--port={port}", *config.gateway_options]
    return _spec(config, state, "gateway", "services.gateway", flags, {}, ())


def instance_spec(
    config: PlatformConfig,
    state: Path,
    redis_url: str,
    index: int,
    environment: Mapping[str, str],
    cores: tuple[int, ...],
) -> ChildSpec:
    """One instance, with what pins it to its share of the machine."""
    name = instance_id(index)
    flags = [*_flags(state, name, redis_url), f"--model={config.model}", f"--instance-id={name}"]
    if "VLLM_CPU_OMP_THREADS_BIND" in environment:
        flags.append(f"--threads-bind={environment['VLLM_CPU_OMP_THREADS_BIND']}")
    if "CUDA_VISIBLE_DEVICES" not in environment:
        flags.append(f"--kv-cache-memory-bytes={CPU_KV_BYTES}")
    flags += config.instance_options  # the last of equal flags counts
    return _spec(config, state, name, "services.generation", flags, environment, cores)


def _flags(state: Path, name: str, redis_url: str) -> list[str]:
    return [f"--redis-url={redis_url}", f"--ready-file={_ready_file(state, name)}"]


def _ready_file(state: Path, name: str) -> Path:
    return state / f"{name}.ready.json"


def _spec(
    config: PlatformConfig,
    state: Path,
    name: str,
    module: str,
    flags: Sequence[str],
    environment: Mapping[str, str],
    cores: tuple[int, ...],
) -> ChildSpec:
    token = {"PACELINE_TOKEN": config.token} if config.token else {}  # not in the process list
    return ChildSpec(
        name=name,
        argv=(sys.executable, "-m", module, *flags),
        log=config.logs / f"{name}.log",
        ready_file=_ready_file(state, name),
        environment={"PYTHONUNBUFFERED": "1", **environment, **token, **config.environment},
        cores=cores,
    )
