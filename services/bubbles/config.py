"""Settings of the bubble coordinator."""

from __future__ import annotations

import socket
from typing import Literal

from pydantic import Field

from services.platform.config import ServiceConfig


class BubblesConfig(ServiceConfig):
    """Settings of the coordinator, beside those that all services share."""

    port: int = 7420
    """Port of the gRPC server; 0 picks a free one."""
    instance_id: str = Field(default_factory=socket.gethostname)
    """Name of the coordinator in the registry. Of several that are registered the youngest is used."""
    poll_steps: int = Field(default=50, ge=1)
    """Engine steps between two polls of an instance that pre-generates: the longest that it goes on after it
    should have stopped."""
    during_update: Literal["pregenerate", "halt", "sleep"] = "pregenerate"
    """What instances do while no step is rolled out: pregenerate goes on; halt stops from the end of a step to
    the beginning of the next; sleep frees the device as well while the trainer, which shares it, learns."""
    coupled: bool = True
    """Pre-generate with the seeds of the coming step. False: with seeds of their own, derived as in
    services.bubbles.pool; for comparison."""
    intra_instance: bool = False
    """Pre-generate beside samples of the step as well. It slows these down."""
    intra_threshold: int = Field(default=8, ge=0)
    """With intra_instance: most samples of the step that such an instance may have."""
    per_prompt: int | None = Field(default=None, ge=1)
    """Samples pre-generated for each prompt. Unset: as many as its group has; those beyond are not coupled."""
    lease_seconds: float = Field(default=30.0, gt=0, allow_inf_nan=False)
    """An instance that does not poll for so long loses its tasks to others: more than poll_steps engine steps
    take. One whose heartbeat ends loses them at once."""
    max_ahead: int = Field(default=2, ge=1)
    """Hinted steps after the current one that may be worked on."""

    @property
    def most_beside(self) -> int | None:
        """Most samples of a step beside which an instance pre-generates; None: only beside none at all."""
        return self.intra_threshold if self.intra_instance else None
