"""Reports of trainers on batches: rewards of samples, and how far the update went from the policy that sampled."""

import time
from collections.abc import Iterable
from dataclasses import dataclass

from paceline.v1 import rollout_pb2 as pb
from paceline.v1 import sample_pb2
from services.contracts.errors import InvalidArgument
from services.contracts.gateway_keys import BatchKey
from services.gateway.batches.adaptive_lenience import FLOOR
from services.gateway.batches.admission import check_report
from services.gateway.batches.messages import single_samples
from services.gateway.finished.ended_singles import EndedSingles
from services.gateway.finished.learner_feed import LearnerFeed
from services.gateway.finished.reward_book import RewardBook
from services.gateway.journal.batch_record import BatchRecord
from services.gateway.journal.fenced_records import Leniences
from services.gateway.metrics import GatewayMetrics
from services.gateway.rollouts.recovery import BatchRecovery


@dataclass(eq=False)
class TrainerReports:
    """Taker of reports, which may come any number of times.

    They are passed on to `feed`, if there is one, and summed up in `rewards`.
    """

    recovery: BatchRecovery
    leniences: Leniences
    metrics: GatewayMetrics
    feed: LearnerFeed | None
    singles: EndedSingles
    rewards: RewardBook

    async def report(self, request: pb.ReportRewardsRequest) -> int:
        """Return how many of the rewards belong to finished samples of the batch; others are ignored.

        Likewise of a step with samples of Generate calls.
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
        """Pass the rewards of known samples on, and return how many they are."""
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
