"""The command lines of the platform's processes. Pure."""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

from paceline.channel import Tls
from services.local.child import ChildSpec
from services.local.config import PlatformConfig

CPU_KV_BYTES = 1 << 30
"""KV memory of an instance on CPU, where vLLM would take all that is free."""
DRAFT_BYTES = 256 << 20
"""Memory of a draft store: some 30 million tokens, plenty for a model that one machine trains."""
LEARNER_THREADS = 1
"""Of the process that trains, which yields to the instances on the cores that it shares with them."""
SNAPSHOT_SECONDS = 10
"""How often a draft store writes a snapshot."""


def instance_id(index: int) -> str:
    """instance-0, instance-1, ..."""
    return f"instance-{index}"


def draft_store_spec(config: PlatformConfig, state: Path, redis_url: str, index: int) -> ChildSpec:
    """One replica of the draft store: drafts-0, drafts-1, ..."""
    name = f"drafts-{index}"
    flags = [
        *_flags(state, name, redis_url),
        f"--replica-id={name}",
        "--port=0",
        f"--budget-bytes={DRAFT_BYTES}",
        f"--snapshot-dir={config.snapshots.absolute()}",
        f"--snapshot-interval-seconds={SNAPSHOT_SECONDS}",
        *config.draft_options,
    ]
    return _spec(config, state, name, "services.drafts", flags, {}, ())


def bubbles_spec(config: PlatformConfig, state: Path, redis_url: str) -> ChildSpec:
    """The bubble coordinator."""
    flags = [*_flags(state, "bubbles", redis_url), "--port=0", *config.bubble_options]
    return _spec(config, state, "bubbles", "services.bubbles", flags, {}, ())


def policy_spec(config: PlatformConfig, state: Path, redis_url: str) -> ChildSpec:
    """The policy service."""
    flags = [*_flags(state, "policy", redis_url), "--port=0", *config.policy_options]
    return _spec(config, state, "policy", "services.policy", flags, {}, ())


def reallocator_spec(config: PlatformConfig, state: Path, redis_url: str) -> ChildSpec:
    """The reallocator."""
    flags = [*_flags(state, "reallocator", redis_url), "--port=0", *config.reallocator_options]
    return _spec(config, state, "reallocator", "services.reallocator", flags, {}, ())


def learner_spec(config: PlatformConfig, state: Path, redis_url: str, drafter: Path) -> ChildSpec:
    """The online learner, which begins with a given head."""
    flags = [
        *_flags(state, "drafter", redis_url),
        "--port=0",
        f"--model={config.model.absolute()}",
        f"--folder={config.drafters.absolute()}",
        f"--checkpoint={drafter.absolute()}",
        f"--threads={LEARNER_THREADS}",
        *config.learner_options,
    ]
    return _spec(config, state, "drafter", "services.drafter", flags, {}, ())


def gateway_spec(config: PlatformConfig, state: Path, redis_url: str, port: int) -> ChildSpec:
    """The gateway on a given port; 0 lets it pick one."""
    tokens = [f"--tokens-file={config.tokens_file.absolute()}"] if config.tokens_file else []
    flags = [*_flags(state, "gateway", redis_url), f"--port={port}", *tokens, *config.gateway_options]
    return _spec(config, state, "gateway", "services.gateway", flags, {}, ())


def instance_spec(
    config: PlatformConfig,
    state: Path,
    redis_url: str,
    index: int,
    environment: Mapping[str, str],
    cores: tuple[int, ...],
    drafter: Path | None = None,
) -> ChildSpec:
    """One instance, with what pins it to its share of the machine, and the head that it begins to draft with."""
    name = instance_id(index)
    flags = [*_flags(state, name, redis_url), f"--model={config.model}", f"--instance-id={name}"]
    if "VLLM_CPU_OMP_THREADS_BIND" in environment:
        flags.append(f"--threads-bind={environment['VLLM_CPU_OMP_THREADS_BIND']}")
    if "CUDA_VISIBLE_DEVICES" not in environment:
        flags.append(f"--kv-cache-memory-bytes={CPU_KV_BYTES}")
    if drafter is not None:
        flags.append(f"--eagle3={drafter.absolute()}")
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
        environment={
            "PYTHONUNBUFFERED": "1",
            **environment,
            **token,
            **_tls(config.tls),
            **config.environment,
        },
        cores=cores,
    )


def _tls(tls: Tls | None) -> dict[str, str]:
    if tls is None:
        return {}
    files = {name: getattr(tls, name) for name in ("ca_file", "cert_file", "key_file")}
    paths = {name: str(path.absolute()) for name, path in files.items() if path is not None}
    settings = paths | {"client_auth": "true"}
    if tls.server_name is not None:
        settings["server_name"] = tls.server_name
    return {f"PACELINE_TLS__{name.upper()}": value for name, value in settings.items()}
