"""Command lines of the platform's processes. Pure."""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from paceline.channel import Tls
from services.local.child import ChildSpec
from services.local.config import PlatformConfig

CPU_KV_BYTES = 1 << 30
"""KV memory of an instance on CPU, where vLLM would take all that is free."""
DRAFT_BYTES = 256 << 20
"""Memory of a draft store: some 30 million tokens, plenty for a model that one machine trains."""
LEARNER_THREADS = 1
"""Threads of the learner, which yields to the instances on the cores that it shares with them."""
SNAPSHOT_SECONDS = 10
"""Interval of a draft store's snapshots."""


@dataclass(frozen=True, slots=True)
class Specs:
    """Specs of one platform's processes; their ready files lie in `state`."""

    config: PlatformConfig
    state: Path
    redis_url: str

    def draft_store(self, index: int) -> ChildSpec:
        """Return the spec of a replica of the draft store: drafts-0, drafts-1, ..."""
        name = f"drafts-{index}"
        flags = (
            f"--replica-id={name}",
            "--port=0",
            f"--budget-bytes={DRAFT_BYTES}",
            f"--snapshot-dir={self.config.snapshots.absolute()}",
            f"--snapshot-interval-seconds={SNAPSHOT_SECONDS}",
        )
        return self._spec(name, "drafts", (*flags, *self.config.draft_options))

    def service(self, name: str, options: Sequence[str]) -> ChildSpec:
        """Return the spec of a service that needs no more than its options."""
        return self._spec(name, name, ("--port=0", *options))

    def learner(self, head: Path) -> ChildSpec:
        """Return the spec of the online learner, which begins with an EAGLE-3 head."""
        flags = (
            f"--model={self.config.model.absolute()}",
            f"--folder={self.config.drafters.absolute()}",
            f"--checkpoint={head.absolute()}",
            f"--threads={LEARNER_THREADS}",
        )
        return self.service("drafter", (*flags, *self.config.learner_options))

    def gateway(self, port: int, index: int = 0) -> ChildSpec:
        """Return the spec of a gateway on a port, 0 lets it pick one: gateway, gateway-1, ..."""
        tokens = self.config.tokens_file
        given = [f"--tokens-file={tokens.absolute()}"] if tokens else []
        name = f"gateway-{index}" if index else "gateway"
        return self._spec(name, "gateway", (f"--port={port}", *given, *self.config.gateway_options))

    def facade(self, port: int, gateways: str) -> ChildSpec:
        """Return the spec of the HTTP facade of gateways; it has the model's tokenizer if there is one."""
        config = self.config
        tokens, texts = config.tokens_file, (config.model / "tokenizer_config.json").is_file()
        flags = [f"--port={port}", f"--gateway={gateways}"]
        flags += [f"--model={config.model.absolute()}"] if texts else []
        flags += [f"--tokens-file={tokens.absolute()}"] if tokens else []
        name = config.served_model_name
        flags += [f"--served-model-name={name}"] if name is not None else []
        return self._spec("facade", "facade", (*flags, *config.facade_options))

    def instance(
        self, index: int, environment: Mapping[str, str], cores: tuple[int, ...], head: Path | None = None
    ) -> ChildSpec:
        """Return the spec of an instance: instance-0, instance-1, ...

        `environment` and `cores` give it its share of the machine; `head` is the EAGLE-3 head that it begins with.
        """
        name = f"instance-{index}"
        adopted = self.config.adopted if self.config.shared_weights else self.config.adopted / name
        flags = [
            f"--model={self.config.model}",
            f"--instance-id={name}",
            f"--adopted-weights={adopted.absolute()}",
        ]
        if "VLLM_CPU_OMP_THREADS_BIND" in environment:
            flags.append(f"--threads-bind={environment['VLLM_CPU_OMP_THREADS_BIND']}")
        if "CUDA_VISIBLE_DEVICES" not in environment:
            flags.append(f"--kv-cache-memory-bytes={CPU_KV_BYTES}")
        if head is not None:
            flags.append(f"--eagle3={head.absolute()}")
        flags += self.config.instance_options  # the last of equal flags counts
        return self._spec(name, "generation", flags, environment, cores)

    def _spec(
        self,
        name: str,
        package: str,
        flags: Sequence[str],
        environment: Mapping[str, str] | None = None,
        cores: tuple[int, ...] = (),
    ) -> ChildSpec:
        config, ready_file = self.config, self.state / f"{name}.ready.json"
        shared = (f"--redis-url={self.redis_url}", f"--ready-file={ready_file}")
        token = {"PACELINE_TOKEN": config.token} if config.token else {}  # not in the process list
        return ChildSpec(
            name=name,
            argv=(sys.executable, "-m", f"services.{package}", *shared, *flags),
            log=config.logs / f"{name}.log",
            ready_file=ready_file,
            environment={
                "PYTHONUNBUFFERED": "1",
                **(environment or {}),
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
    settings = {name: str(path.absolute()) for name, path in files.items() if path is not None}
    settings["client_auth"] = "true"
    if tls.server_name is not None:
        settings["server_name"] = tls.server_name
    return {f"PACELINE_TLS__{name.upper()}": value for name, value in settings.items()}
