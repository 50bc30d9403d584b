"""Take trainers' reports on batches: rewards of samples, and the distance of the update from the sampling policy.

Rewards are summed by run and step and written to the decision log once a second, so that a trainer that reports
sample by sample does not fill the log.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import NoReturn

from paceline.v1 import rollout_pb2 as pb
from paceline.v1 import sample_pb2
from services.contracts.errors import InvalidArgument
from services.contracts.gateway_keys import BatchKey
from services.gateway.api.intake import BatchRecovery
from services.gateway.api.validation import check_report
from services.gateway.feeds.learner import EndedSingles, LearnerFeed
from services.gateway.journal.fenced_records import Leniences
from services.gateway.journal.record import BatchRecord
from services.gateway.metrics import GatewayMetrics
from services.gateway.state.lenience import FLOOR
from services.gateway.state.messages import single_samples
from services.platform.redis.decision_log import DecisionRecord

REWARD_KIND = "reward"
"""Kind of a decision-log entry about rewards."""
_WRITE_SECONDS = 1.0


@dataclass(eq=False)
class TrainerReports:
    """Handler of reports, which may come any number of times.

    It passes rewards on to `feed`, if there is one, and sums them up in `rewards`.
    """

    recovery: BatchRecovery
    leniences: Leniences
    metrics: GatewayMetrics
    feed: LearnerFeed | None
    singles: EndedSingles
    rewards: RewardBook

    async def report(self, request: pb.ReportRewardsRequest) -> int:
        """Take a report; return the number of rewards that belong to finished samples of the batch.

        Other rewards are ignored. A report may name a step with samples of Generate calls instead of a batch.
        """
        if violations := check_report(request):
            raise InvalidArgument(violations)
        if request.HasField("step"):
            matched = self.singles.known(request.run_id, request.step, request.rewards)
            return self._take(request, (request.run_id, single_samples(request.step)), request.step, matched)
        key = (request.run_id, request.batch_id)
        record = await self.recovery.known(key)
        exactness = record.exactness
        lenient = exactness.level == sample_pb2.EXACTNESS_LEVEL_LENIENT
        if lenient and exactness.HasField("kl_target") and request.HasField("kl"):
            used = FLOOR if record.head.lenience is None else record.head.lenience
            await self.leniences.report(key, used, request.kl, exactness.kl_target)
        return self._take(request, key, record.step, known_rewards(record, request.rewards))

    def _take(
        self, request: pb.ReportRewardsRequest, key: BatchKey, step: int, matched: list[pb.Reward]
    ) -> int:
        """Pass on the rewards of known samples, and return their number."""
        self.rewards.add(request.run_id, step, [reward.reward for reward in matched])
        self._measure(request, [reward.reward for reward in matched])
        if self.feed is not None:
            self.feed.reward(key, matched)
        return len(matched)

    def _measure(self, request: pb.ReportRewardsRequest, rewards: list[float]) -> None:
        given = [name for name in ("kl", "clip_fraction") if request.HasField(name)]
        measured = {f"reported_{name}": getattr(request, name) for name in given}
        if rewards:
            measured["reward"] = sum(rewards) / len(rewards)
        self.metrics.show_run(request.run_id, time.time(), **measured)


def known_rewards(record: BatchRecord, rewards: Iterable[pb.Reward]) -> list[pb.Reward]:
    """Return the rewards whose sample has ended."""
    found = []
    for reward in rewards:
        index = record.index_of(reward.prompt_id, reward.slot)
        if index is not None and record.has_ended(index):
            found.append(reward)
    return found


@dataclass(slots=True)
class _Sums:
    count: int
    total: float
    low: float
    high: float


class RewardBook:
    """Sums of rewards that are not in the decision log yet. `post` writes an entry; `run` calls it."""

    def __init__(self, post: Callable[[DecisionRecord], None], seconds: float = _WRITE_SECONDS) -> None:
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
        """Write the sums every `seconds` seconds until cancelled."""
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
            self._post(DecisionRecord(REWARD_KIND, words, 0.0, details, run_id=run_id))
        self._sums.clear()
