"""Settings of the policy service and of autoscaling."""

from __future__ import annotations

import socket
from pathlib import Path
from typing import Annotated, Self

from pydantic import BaseModel, ConfigDict, Field, model_validator

from services.platform.config import LeaderConfig, Port

Seconds = Annotated[float, Field(gt=0, allow_inf_nan=False)]
SecondsOrZero = Annotated[float, Field(ge=0, allow_inf_nan=False)]


class PoolConfig(BaseModel):
    """StatefulSet of equal instances, which are scaled together."""

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
    """Pools, and when to scale them; without pools nothing is recommended. Times are in seconds."""

    model_config = ConfigDict(extra="forbid", use_attribute_docstrings=True)

    pools: list[PoolConfig] = Field(default_factory=list)
    """The pools; earlier ones grow first and shrink last."""
    gateway: str = "127.0.0.1:7400"
    """Address of the gateway, which knows the demand and drains instances."""
    apply: bool = False
    """Set the number of replicas. False: only recommend it, as a metric."""
    interval_seconds: Seconds = 5.0
    """Time between two observations of the demand."""
    queue_seconds: Seconds = 120.0
    """More instances are recommended while samples wait and all unfinished ones would take longer than this."""
    deadline_margin: Annotated[float, Field(gt=0, le=1)] = 0.8
    """Share of the time to a step's deadline within which its tokens should be generated."""
    bubble_share: Annotated[float, Field(ge=0, lt=1)] = 0.3
    """Share of instance time that bubbles may take within steps; beyond it, fewer instances are recommended."""
    idle_seconds: Seconds = 1800.0
    """Time without any work after which the minimum is recommended."""
    up_seconds: SecondsOrZero = 15.0
    """Time for which more instances must have been recommended before some are added."""
    down_seconds: SecondsOrZero = 300.0
    """Time for which fewer instances must have been recommended before some are removed."""
    cooldown_seconds: SecondsOrZero = 60.0
    """Least time between two changes of a pool."""
    tolerance: Annotated[float, Field(ge=0, lt=1)] = 0.1
    """Changes by less than this share of the replicas are not made."""
    drain_seconds: Seconds = 600.0
    """Longest time to evacuate an instance that is to be removed; after that it stays."""
    kubernetes_namespace: str | None = None
    """Namespace of the StatefulSets. Unset: the pod's own."""
    kubernetes_url: str | None = None
    """Address of the Kubernetes API. Unset: the cluster that this runs in, else the kubeconfig's."""
    kubernetes_ca_file: Path | None = None
    """With kubernetes_url: the authorities that its certificate must come from. Unset: the system's."""
    lease_name: str = "paceline-scaling"
    """Name of the Lease whose holder, of several controllers, scales."""
    lease_seconds: Annotated[float, Field(ge=1, allow_inf_nan=False)] = 15.0
    """Time without a renewal after which another controller takes the Lease."""
    identity: str = Field(default_factory=socket.gethostname)
    """Name of this controller in the Lease."""

    @model_validator(mode="after")
    def _distinct(self) -> Self:
        names = [pool.name for pool in self.pools]
        if len(set(names)) < len(names):
            raise ValueError("pools: two have the same name")
        return self


class PolicyConfig(LeaderConfig):
    """Settings of the policy service, in addition to the shared ones of services.platform.config."""

    port: Port = 7430
    """Port of the gRPC server; 0 picks a free one."""
    instance_id: str = Field(default_factory=socket.gethostname)
    """Name in the registry. Of several registered processes one leads and the others stand by."""
    lease_seconds: float = Field(default=3.0, ge=0.5, allow_inf_nan=False)
    """Time without a renewal of the lease after which a standby succeeds the leader."""
    report_seconds: float = Field(default=0.5, gt=0, allow_inf_nan=False)
    """Interval at which reports are fetched from instances."""
    settle_seconds: float = Field(default=2.0, gt=0, allow_inf_nan=False)
    """Time without engine steps after which a step of a run counts as over; a later step ends it as well."""
    push_timeout_seconds: float = Field(default=1.0, gt=0, allow_inf_nan=False)
    """Deadline of sending knobs to an instance; then it is tried again."""
    answer_seconds: float = Field(default=0.8, ge=0, allow_inf_nan=False)
    """Longest time that an answered change of knobs waits for the instances to use it."""
    scaling: ScalingConfig = Field(default_factory=ScalingConfig)
    """Autoscaling of the generation instances."""
