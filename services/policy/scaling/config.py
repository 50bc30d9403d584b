"""Settings of scaling."""

from __future__ import annotations

import socket
from pathlib import Path
from typing import Annotated, Self

from pydantic import BaseModel, ConfigDict, Field, model_validator

from services.policy.scaling.recommendation import Pool, Rules
from services.policy.scaling.steadiness import Patience

Seconds = Annotated[float, Field(gt=0, allow_inf_nan=False)]


class PoolConfig(BaseModel):
    """Like instances that are scaled together: one StatefulSet."""

    model_config = ConfigDict(extra="forbid", use_attribute_docstrings=True)

    name: Annotated[str, Field(pattern=r"^[a-z0-9]([-a-z0-9]*[a-z0-9])?$")]
    """Name of the StatefulSet. Its instances are called <name>-0, <name>-1, and so on."""
    minimum: Annotated[int, Field(ge=0)] = 1
    """Fewest instances."""
    maximum: Annotated[int, Field(ge=1)] = 8
    """Most instances."""

    @model_validator(mode="after")
    def _in_order(self) -> Self:
        if self.minimum > self.maximum:
            raise ValueError("minimum must not be above maximum")
        return self


class ScalingConfig(BaseModel):
    """Without pools nothing is recommended. Times in seconds."""

    model_config = ConfigDict(extra="forbid", use_attribute_docstrings=True)

    pools: list[PoolConfig] = Field(default_factory=list)
    """The pools, the one that is to grow first and shrink last at the front."""
    gateway: str = "127.0.0.1:7400"
    """Address of the gateway, which is asked for the demand and told to drain."""
    apply: bool = False
    """Set the number of replicas. False: recommend it as a metric only."""
    interval_seconds: Seconds = 5.0
    """How often the demand is looked at."""
    queue_seconds: Seconds = 120.0
    """A queue is worth more instances when what is unfinished would take longer than this."""
    deadline_margin: Annotated[float, Field(gt=0, le=1)] = 0.8
    """Share of the time to a step's deadline within which its tokens should be done."""
    bubble_share: Annotated[float, Field(ge=0, lt=1)] = 0.3
    """Share of instance time that bubbles may take within steps before instances are given up."""
    idle_seconds: Seconds = 1800.0
    """Without any work for so long there need be no more than the fewest."""
    up_seconds: Annotated[float, Field(ge=0, allow_inf_nan=False)] = 15.0
    """More instances must have been needed for so long."""
    down_seconds: Annotated[float, Field(ge=0, allow_inf_nan=False)] = 300.0
    """Fewer instances must have been enough for so long."""
    cooldown_seconds: Annotated[float, Field(ge=0, allow_inf_nan=False)] = 60.0
    """Least time between two changes of a pool."""
    tolerance: Annotated[float, Field(ge=0, lt=1)] = 0.1
    """Changes by less than this share are not made."""
    drain_seconds: Seconds = 600.0
    """Longest time to move the samples off an instance that is to go; then it stays."""
    kubernetes_namespace: str | None = None
    """Namespace of the StatefulSets. Unset: the pod's own."""
    kubernetes_url: str | None = None
    """Address of the Kubernetes API. Unset: the cluster that this runs in, else the kubeconfig's."""
    kubernetes_ca_file: Path | None = None
    """With kubernetes_url: the authorities that its certificate must come from. Unset: the system's."""
    lease_name: str = "paceline-scaling"
    """The Lease that says which of several controllers scales."""
    lease_seconds: Annotated[float, Field(ge=1, allow_inf_nan=False)] = 15.0
    """A controller that is silent for so long is succeeded by another one."""
    identity: str = Field(default_factory=socket.gethostname)
    """Name of this controller in the Lease."""

    @model_validator(mode="after")
    def _distinct(self) -> Self:
        names = [pool.name for pool in self.pools]
        if len(set(names)) < len(names):
            raise ValueError("pools: two have the same name")
        return self

    def rules(self) -> Rules:
        """The part that recommendations depend on."""
        return Rules(
            pools=tuple(Pool(each.name, each.minimum, each.maximum) for each in self.pools),
            queue_seconds=self.queue_seconds,
            deadline_margin=self.deadline_margin,
            bubble_share=self.bubble_share,
        )

    def patience(self) -> Patience:
        """The part that says when a recommendation is followed."""
        return Patience(self.up_seconds, self.down_seconds, self.cooldown_seconds, self.tolerance)
