"""Sums of the rewards that trainers report, by run and step, on their way to the decision log.

They are written once a second, so that a trainer that reports sample by sample does not fill the log.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NoReturn

from services.platform.redis.decision_log import DecisionRecord

KIND = "reward"
"""Kind of the decision-log entry of rewards."""
_SECONDS = 1.0


@dataclass(slots=True)
class _Sums:
    count: int
    total: float
    low: float
    high: float


class RewardBook:
    """Sums that were not written yet. `post` writes an entry; `run` calls it."""

    def __init__(self, post: Callable[[DecisionRecord], None], seconds: float = _SECONDS) -> None:
        self._post = post
        self._seconds = seconds
        self._sums: dict[tuple[str, int], _Sums] = {}

    def add(self, run_id: str, step: int, rewards: Sequence[float]) -> None:
        """Add rewards of samples of a step."""
        if not rewards:
            return
        sums = self._sums.setdefault((run_id, step), _Sums(0, 0.0, rewards[0], rewards[0]))
        sums.count += len(rewards)
        sums.total += sum(rewards)
        sums.low, sums.high = min(sums.low, min(rewards)), max(sums.high, max(rewards))

    async def run(self) -> NoReturn:
        """Write what has come, until cancelled."""
        while True:
            await asyncio.sleep(self._seconds)
            self.write()

    def write(self) -> None:
        """Post an entry for each step with new rewards."""
        for (run_id, step), sums in self._sums.items():
            words = f"step {step}: mean reward {sums.total / sums.count:.3g} over {sums.count} samples"
            details = {
                "step": step,
                "count": sums.count,
                "sum": sums.total,
                "low": sums.low,
                "high": sums.high,
            }
            self._post(DecisionRecord(KIND, words, 0.0, details, run_id=run_id))
        self._sums.clear()
