"""Settings of the policy service."""

from __future__ import annotations

import socket

from pydantic import Field

from services.platform.config.settings import LeaderConfig
from services.policy.scaling.config import ScalingConfig


class PolicyConfig(LeaderConfig):
    """Settings of the policy service; services.platform.config.settings has those that all services share."""

    port: int = 7430
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
