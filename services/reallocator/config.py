"""Settings of the reallocator."""

from __future__ import annotations

import socket
from typing import Literal

from pydantic import Field

from services.platform.config import LeaderConfig, Port
from services.reallocator.planning.learned_costs import LearnedCosts
from services.reallocator.planning.records import MoveBy, MoveCost, ReallocationRules

_FREE = MoveCost(stall_steps=0.0)


class ReallocatorConfig(LeaderConfig):
    """Settings of the reallocator, in addition to the shared ones of services.platform.config.

    Times are in seconds.
    """

    port: Port = 7430
    """Port of the gRPC server; 0 picks a free one."""
    instance_id: str = Field(default_factory=socket.gethostname)
    """Name in the registry. Of several registered processes one leads and the others stand by."""
    decision_steps: int = Field(default=64, ge=1)
    """Engine steps between two decisions. An instance that joins, or that is to become empty, does not wait."""
    poll_seconds: float = Field(default=0.2, gt=0, allow_inf_nan=False)
    """Interval at which instances are polled for their status."""
    flatness: float = Field(default=0.25, gt=0, lt=1)
    """The saturation point is where 1 % more samples bring less than this many % more tokens per second."""
    least_gain: float = Field(default=0.03, ge=0, allow_inf_nan=False)
    """Least predicted relative gain in tokens per second, net of the moves' cost, of moves from above the
    saturation point to below it."""
    balance: bool = True
    """Balance instances in the long tail of a step, where the saturation point says nothing."""
    least_balance_gain: float = Field(default=0.1, ge=0, allow_inf_nan=False)
    """Least relative gain in the time until two balanced instances finish, net of the moves' cost."""
    least_saved_seconds: float = Field(default=0.2, ge=0, allow_inf_nan=False)
    """Least time that moves must be predicted to save a pair. Loads are only as exact as polls are frequent."""
    payback: float = Field(default=3.0, ge=0, allow_inf_nan=False)
    """A moved sample must be predicted to save this many times its stall."""
    by: Literal["cheaper", "kv", "prefix"] = "cheaper"
    """Way to move samples: with their KV, by their prefix, which the receiver prefills, or the cheaper one by
    measured cost. Evacuated samples always move with their KV."""
    count_costs: bool = True
    """Subtract measured costs of moves, and the share of gains that they missed, from predicted gains, and ask for
    the least time saved. False: samples move for the least gain, which is for tests of moves, not for speed."""
    stale_seconds: float = Field(default=1.0, gt=0, allow_inf_nan=False)
    """Age of listings beyond which no decision is made and no move begins."""
    cooldown_decisions: int = Field(default=2, ge=0)
    """Decisions in which an instance that gave samples takes none, and an instance that took samples gives none."""
    spare_blocks: float = Field(default=0.1, ge=0, lt=1)
    """Share of a receiver's free KV blocks that stays free."""
    moves_at_once: int = Field(default=4, ge=1)
    """Moves that one instance makes at the same time."""
    move_timeout_seconds: float = Field(default=10.0, gt=0, allow_inf_nan=False)
    """Time for one move; then the sample stays where it was."""
    dtype: Literal["float32", "bfloat16", "float16"] = "bfloat16"
    """Type of the instances' weights and KV, for the prior of step times."""

    def ways(self) -> tuple[MoveBy, ...]:
        """Return the ways in which samples may be moved."""
        return tuple(MoveBy) if self.by == "cheaper" else (MoveBy(self.by),)

    def rules(self, learned: LearnedCosts) -> ReallocationRules:
        """Return the settings of the plan, with learned costs."""
        return ReallocationRules(
            least_gain=self.least_gain,
            balance=self.balance,
            least_balance_gain=self.least_balance_gain,
            least_saved_seconds=self.least_saved_seconds if self.count_costs else 0.0,
            payback=self.payback,
            ways=learned.costs.ways if self.count_costs else dict.fromkeys(self.ways(), _FREE),
            trust=learned.trust.shares if self.count_costs else {},
            spare_blocks=self.spare_blocks,
            cooldown_decisions=self.cooldown_decisions,
        )
