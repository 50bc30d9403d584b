"""Configuration of a platform on Ray."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

from pydantic import Field, model_validator

from services.platform.config import Port, ServiceConfig

_SHARED = (
    *("redis_url", "namespace", "log_level", "log_format", "host"),
    *("shutdown_grace_seconds", "max_message_bytes", "tokens_file"),
)


class RayConfig(ServiceConfig):
    """Settings of the platform; TLS, tokens and store apply to all processes.

    Paths must be the same on all nodes.
    """

    model: str = ""
    """Folder of the model. Needed to start."""
    instances: int = Field(default=2, ge=0)
    """Generation instances."""
    draft_stores: int = Field(default=1, ge=0)
    """Replicas of the draft store."""
    bubbles: bool = True
    """Run the bubble coordinator, which plans pre-generation."""
    policy: bool = True
    """Run the policy service."""
    reallocator: bool = True
    """Run the reallocator, which moves running samples between instances."""
    learner: bool = False
    """Train an EAGLE-3 head on the samples of the runs. Needs `drafter` and `drafters`."""
    drafter: str = ""
    """First EAGLE-3 head of the instances. Unset: none."""
    drafters: str = ""
    """Folder that the learner writes to and the instances read."""
    learner_gpus: float = Field(default=0, ge=0)
    """GPUs of the learner; 0: it trains on CPU at low priority."""
    ray_address: str = "auto"
    """Address of the cluster, as `ray.init` takes it; auto: the cluster of this machine."""
    ray_namespace: str = "paceline"
    """Ray namespace of the actors. Two platforms on one cluster need different ones."""
    port: Port = 7400
    """Port of the gateway; other processes pick free ones."""
    gateway_resource: str | None = None
    """Custom resource of the node that the gateway runs on, so that a Service can select it. Unset: any node."""
    gpus: float = Field(default=1, ge=0)
    """GPUs of an instance; 0: it runs on CPU."""
    cpus: float = Field(default=1, ge=0)
    """CPUs of an instance. Other processes reserve none."""
    executor: Literal["local", "ray"] = "local"
    """local: an instance uses GPUs of its node. ray: vLLM places its workers on the cluster, for instances that
    span nodes."""
    instance_flags: list[str] = Field(default_factory=list)
    """Additional flags of every instance, such as --max-num-seqs=64."""
    learner_flags: list[str] = Field(default_factory=list)
    """Additional flags of the learner, such as --interval=2."""
    gateway_flags: list[str] = Field(default_factory=list)
    """Additional flags of the gateway."""
    start_seconds: float = Field(default=1800.0, gt=0, allow_inf_nan=False)
    """Time within which every process must be ready."""
    stop_seconds: float = Field(default=60.0, ge=0, allow_inf_nan=False)
    """Time that a process has to stop by itself before it is killed."""

    @model_validator(mode="after")
    def _consistent(self) -> RayConfig:
        if self.gpus > 1 and self.gpus != int(self.gpus):
            raise ValueError("gpus: must be whole above 1")
        missing = [name for name in ("drafter", "drafters") if not getattr(self, name)]
        if self.learner and missing:
            raise ValueError(f"learner: needs {' and '.join(missing)}")
        return self

    def environment(self) -> dict[str, str]:
        """Return the settings that all processes share, as environment variables."""
        shared: dict[str, object] = {name: getattr(self, name) for name in _SHARED}
        shared["insecure"] = str(self.insecure).lower()
        if self.rotating_token_file is not None:
            shared["token_file"] = self.rotating_token_file
        elif self.token is not None:
            shared["token"] = self.token.get_secret_value()
        if self.tls is not None:
            shared |= {f"tls__{name}": value for name, value in self.tls.model_dump().items()}
        absolute = {name: v.absolute() if isinstance(v, Path) else v for name, v in shared.items()}
        return {f"PACELINE_{name.upper()}": str(v) for name, v in absolute.items() if v is not None}


@dataclass(frozen=True, slots=True)
class ActorPlan:
    """One actor: a module, its flags, and resources as Ray counts them. `spread`: place it away from others."""

    name: str
    module: str
    flags: tuple[str, ...]
    cpus: float = 0.0
    gpus: float = 0.0
    resources: Mapping[str, float] = field(default_factory=dict)
    spread: bool = False


def actors(config: RayConfig) -> list[ActorPlan]:
    """Return all actors in the order in which they start; they stop in the reverse order."""
    plans = [
        ActorPlan(f"drafts-{n}", "services.drafts", ("--port=0", f"--replica-id=drafts-{n}"))
        for n in range(config.draft_stores)
    ]
    services = {"bubbles": config.bubbles, "policy": config.policy, "reallocator": config.reallocator}
    plans += [
        ActorPlan(name, f"services.{name}", ("--port=0", f"--instance-id={name}"))
        for name, configured in services.items()
        if configured
    ]
    if config.learner:
        plans.append(_learner(config))
    plans += [_instance(config, f"instance-{n}") for n in range(config.instances)]
    # A minimal amount of the resource: it selects a node.
    resources = {config.gateway_resource: 0.001} if config.gateway_resource else {}
    flags = (f"--port={config.port}", *config.gateway_flags)
    return [*plans, ActorPlan("gateway", "services.gateway", flags, resources=resources)]


def _learner(config: RayConfig) -> ActorPlan:
    flags = (
        *("--port=0", "--instance-id=drafter"),
        *(f"--model={config.model}", f"--folder={config.drafters}", f"--checkpoint={config.drafter}"),
        f"--device={'cuda' if config.learner_gpus else 'cpu'}",
        *config.learner_flags,
    )
    return ActorPlan("drafter", "services.drafter", flags, gpus=config.learner_gpus)


def _instance(config: RayConfig, name: str) -> ActorPlan:
    flags = [f"--model={config.model}", f"--instance-id={name}"]
    gpus = config.gpus
    if config.executor == "ray":
        # vLLM requests the GPUs from Ray itself; the actor must not hold them.
        flags.append("--executor=ray")
        gpus = 0.0
    if config.drafter:
        flags.append(f"--eagle3={config.drafter}")
    if config.gpus > 1:
        flags.append(f"--tensor-parallel-size={int(config.gpus)}")
    flags += config.instance_flags  # the last of equal flags counts
    return ActorPlan(name, "services.generation", tuple(flags), config.cpus, gpus, spread=True)
