"""What a platform on Ray consists of."""

from __future__ import annotations

from pathlib import Path
from typing import Literal

from pydantic import Field, model_validator

from services.platform.config import ServiceConfig


class RayConfig(ServiceConfig):
    """TLS, token, store and the like are those of every process; files must lie at the same path on every node."""

    model: str = ""
    """Folder of the model, as every node sees it. Needed to start."""
    instances: int = Field(default=2, ge=0)
    """Generation instances."""
    draft_stores: int = Field(default=1, ge=0)
    """Replicas of the draft store."""
    bubbles: bool = True
    """Run the coordinator of pre-generation."""
    policy: bool = True
    """Run the policy service."""
    reallocator: bool = True
    """Run the reallocator, which moves running samples between instances."""
    learner: bool = False
    """Train the drafter on the samples of the runs. Needs `drafter` and `drafters`."""
    drafter: str = ""
    """EAGLE-3 head that the instances begin to draft with, as every node sees it. Unset: none."""
    drafters: str = ""
    """Folder that the learner writes to and the instances read, under one path on every node."""
    learner_gpus: float = Field(default=0, ge=0)
    """GPUs of the learner; 0: it trains on CPU, and yields to what else runs there."""
    ray_address: str = "auto"
    """The cluster, as `ray.init` takes it; auto: the one that this machine belongs to."""
    ray_namespace: str = "paceline"
    """Ray's namespace of the actors. Two platforms on one cluster need different ones."""
    port: int = Field(default=7400, ge=0, le=65535)
    """Port of the gateway; the others pick free ones."""
    gateway_resource: str | None = None
    """Custom resource of the node that the gateway is to run on, so that a Service can find it. Unset: anywhere."""
    gpus: float = Field(default=1, ge=0)
    """GPUs of an instance; 0: it runs on CPU."""
    cpus: float = Field(default=1, ge=0)
    """CPUs of an instance. The other processes take none, as Ray counts."""
    executor: Literal["local", "ray"] = "local"
    """local: the GPUs of an instance are those of its node. ray: vLLM places its workers on the cluster, for
    instances that span nodes."""
    instance_flags: list[str] = Field(default_factory=list)
    """More flags of every instance, such as --max-num-seqs=64."""
    learner_flags: list[str] = Field(default_factory=list)
    """More flags of the learner, such as --interval=2."""
    gateway_flags: list[str] = Field(default_factory=list)
    """More flags of the gateway."""
    start_seconds: float = Field(default=1800.0, gt=0, allow_inf_nan=False)
    """Time within which every process must be ready."""
    stop_seconds: float = Field(default=60.0, ge=0, allow_inf_nan=False)
    """Time that a process has to hand over its work before it is killed."""

    @model_validator(mode="after")
    def _one_instance_a_gpu(self) -> RayConfig:
        if self.gpus > 1 and self.gpus != int(self.gpus):
            raise ValueError("gpus: must be whole above 1")
        return self

    @model_validator(mode="after")
    def _what_the_learner_needs(self) -> RayConfig:
        missing = [name for name in ("drafter", "drafters") if not getattr(self, name)]
        if self.learner and missing:
            raise ValueError(f"learner: needs {' and '.join(missing)}")
        return self

    def environment(self) -> dict[str, str]:
        """Settings that every process shares, as environment variables."""
        shared: dict[str, object] = {
            "REDIS_URL": self.redis_url,
            "NAMESPACE": self.namespace,
            "LOG_LEVEL": self.log_level,
            "LOG_FORMAT": self.log_format,
            "INSECURE": str(self.insecure).lower(),
            "HOST": self.host,
            "SHUTDOWN_GRACE_SECONDS": self.shutdown_grace_seconds,
            "MAX_MESSAGE_BYTES": self.max_message_bytes,
            "TOKENS_FILE": self.tokens_file,
        }
        if self.rotating_token_file is not None:
            shared["TOKEN_FILE"] = self.rotating_token_file
        elif self.token is not None:
            shared["TOKEN"] = self.token.get_secret_value()
        if self.tls is not None:
            shared |= {f"TLS__{name.upper()}": value for name, value in self.tls.model_dump().items()}
        absolute = {name: v.absolute() if isinstance(v, Path) else v for name, v in shared.items()}
        return {f"PACELINE_{name}": str(value) for name, value in absolute.items() if value is not None}
