"""Settings of the policy service."""

from __future__ import annotations

import socket
from pathlib import Path

from pydantic import Field

from services.platform.config import ServiceConfig
from services.policy.scaling.config import ScalingConfig


class PolicyConfig(ServiceConfig):
    """Everything that can be set; see services.platform.config for what all services share."""

    port: int = 7430
    """Port of the gRPC server; 0 picks a free one."""
    instance_id: str = Field(default_factory=socket.gethostname)
    """Name in the registry. Of several that are registered one leads, and the others stand by."""
    calibrations: Path | None = None
    """Folder of fits by `paceline calibrate`, kept in Redis and given to the instances that they are of."""
    lease_seconds: float = Field(default=3.0, ge=0.5, allow_inf_nan=False)
    """A leader that is silent for so long is succeeded by a standby."""
    report_seconds: float = Field(default=0.5, gt=0, allow_inf_nan=False)
    """How often instances are asked what became of their drafts."""
    settle_seconds: float = Field(default=2.0, gt=0, allow_inf_nan=False)
    """A step of a run is over when its instances have done nothing for so long, or a later one has begun."""
    push_timeout_seconds: float = Field(default=1.0, gt=0, allow_inf_nan=False)
    """Longest time that an instance has to take knobs; then it is tried again."""
    answer_seconds: float = Field(default=0.8, ge=0, allow_inf_nan=False)
    """Longest time that a change of knobs waits for the instances before it is answered."""
    scaling: ScalingConfig = Field(default_factory=ScalingConfig)
    """How many instances there should be, and whether to see to it."""
