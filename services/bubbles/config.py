"""Settings of the bubble coordinator."""

from __future__ import annotations

import socket
from typing import Literal

from pydantic import Field

from services.platform.config import Port, ServiceConfig


class BubblesConfig(ServiceConfig):
    """Settings of the coordinator; services.platform.config has the settings that all services share."""

    port: Port = 7420
    """Port of the gRPC server; 0 picks a free one."""
    instance_id: str = Field(default_factory=socket.gethostname)
    """Name of the coordinator in the registry. Of several that are registered the youngest is used."""
    poll_steps: int = Field(default=50, ge=1)
    """Engine steps between two polls of an instance that pre-generates. It continues for at most this long
    after it should have stopped."""
    during_update: Literal["pregenerate", "halt", "sleep"] = "pregenerate"
    """Work while no step is rolled out: pregenerate continues; halt stops from the end of a step to the beginning
    of the next; sleep also frees the device while the trainer, which shares it, learns."""
    coupled: bool = True
    """Pre-generate with the seeds of the coming step. False: with separate seeds, derived as in
    services.bubbles.pool; for comparison."""
    intra_instance: bool = False
    """Also pre-generate on instances that have samples of the step, which slows these down."""
    intra_threshold: int = Field(default=8, ge=0)
    """With intra_instance: most samples of the step that such an instance may have."""
    per_prompt: int | None = Field(default=None, ge=1)
    """Samples pre-generated for each prompt. Unset: as many as its group has; those beyond are not coupled."""
    lease_seconds: float = Field(default=30.0, gt=0, allow_inf_nan=False)
    """Seconds without a poll after which an instance loses its tasks to others; must exceed the time of poll_steps
    engine steps. An instance whose heartbeat ends loses them at once."""
    max_ahead: int = Field(default=2, ge=1)
    """Hinted steps after the current one that may be worked on."""

    @property
    def max_step_samples(self) -> int | None:
        """Most samples of a step that an instance may have while it pre-generates; None: it may have none."""
        return self.intra_threshold if self.intra_instance else None
