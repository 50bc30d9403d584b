"""Settings of the reallocator."""

from __future__ import annotations

import socket
from pathlib import Path
from typing import Literal

from pydantic import Field

from services.platform.config import ServiceConfig
from services.reallocator.learned import Learned
from services.reallocator.price import By, WayCost
from services.reallocator.records import Rules

_FREE = WayCost(stall_steps=0.0)


class ReallocatorConfig(ServiceConfig):
    """Everything that can be set; see services.platform.config for what all services share. Times in seconds."""

    port: int = 7430
    """Port of the gRPC server; 0 picks a free one."""
    instance_id: str = Field(default_factory=socket.gethostname)
    """Name of the reallocator in the registry. Of several one decides, the others stand by."""
    decision_steps: int = Field(default=64, ge=1)
    """Engine steps between two decisions. An instance that joins, or that is to become empty, does not wait."""
    poll_seconds: float = Field(default=0.2, gt=0, allow_inf_nan=False)
    """How often instances are asked how they are."""
    flatness: float = Field(default=0.25, gt=0, lt=1)
    """The threshold is where one per cent more samples bring less than so many per cent more tokens a second."""
    least_gain: float = Field(default=0.03, ge=0, allow_inf_nan=False)
    """Least predicted gain in tokens a second, as a share, of moves from above the threshold to below it; what the
    moves cost is taken off first."""
    level: bool = True
    """Level instances out at the tail of a step, where the threshold says nothing."""
    least_level_gain: float = Field(default=0.1, ge=0, allow_inf_nan=False)
    """Least share by which levelling must end the work of two instances sooner; what the moves cost is taken off
    first."""
    payback: float = Field(default=3.0, ge=0, allow_inf_nan=False)
    """A moved sample must be predicted to save so many times what its move costs it."""
    by: Literal["cheaper", "kv", "prefix"] = "cheaper"
    """How samples are moved: with their KV; by their prefix, which the receiver reads again; or whichever is
    found to cost less. What is moved off an instance that is to become empty goes with its KV."""
    count_costs: bool = True
    """Take what moves have been found to cost, and what they have failed to bring, off what they are to gain.
    Without it samples are moved for the least gain: to try moves out, not to be faster."""
    stale_seconds: float = Field(default=1.0, gt=0, allow_inf_nan=False)
    """Nothing is decided on what took longer to hear from the instances, and no move is begun so long after it."""
    rest: int = Field(default=2, ge=0)
    """Decisions for which an instance that gave samples takes none, and one that took some gives none."""
    spare_blocks: float = Field(default=0.1, ge=0, lt=1)
    """Share of a receiver's free KV blocks that is left free."""
    moves_at_once: int = Field(default=4, ge=1)
    """Moves that one instance makes at the same time."""
    move_timeout_seconds: float = Field(default=10.0, gt=0, allow_inf_nan=False)
    """Time for one move; then the sample stays where it was."""
    lease_seconds: float = Field(default=5.0, ge=0.5, allow_inf_nan=False)
    """A reallocator that is silent for so long is succeeded by one that stands by."""
    calibration: Path | None = None
    """Fit of `paceline calibrate`. Unset: step times start from a guess and are learned from what is measured."""
    dtype: Literal["float32", "bfloat16", "float16"] = "bfloat16"
    """Of the instances' weights and KV, for the step time."""

    def ways(self) -> tuple[By, ...]:
        """In which samples may be moved."""
        return tuple(By) if self.by == "cheaper" else (By(self.by),)

    def rules(self, learned: Learned) -> Rules:
        """The part that the plan goes by, with what has been learned."""
        return Rules(
            least_gain=self.least_gain,
            level=self.level,
            least_level_gain=self.least_level_gain,
            payback=self.payback,
            ways=learned.costs.ways if self.count_costs else dict.fromkeys(self.ways(), _FREE),
            trust=learned.trust.shares if self.count_costs else {},
            spare_blocks=self.spare_blocks,
            rest=self.rest,
        )
