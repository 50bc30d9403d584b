"""What a trainer reports of a batch: rewards of its samples, and what the update on it measured."""

import time
from collections.abc import Iterable

from paceline.v1 import rollout_pb2, sample_pb2
from services.drafts.lenience import FLOOR
from services.gateway.admission import check_report
from services.gateway.feed import LearnerFeed
from services.gateway.journal import Journal, Recorded
from services.gateway.lenience import Leniences
from services.gateway.metrics import GatewayMetrics
from services.platform.errors import InvalidArgument, NotFound


class Rewards:
    """Takes reports in. The same report may come any number of times."""

    def __init__(
        self,
        journal: Journal,
        leniences: Leniences,
        metrics: GatewayMetrics,
        feed: LearnerFeed | None = None,
    ) -> None:
        """`feed` is told of them, if there is one."""
        self._feed = feed
        self._journal = journal
        self._leniences = leniences
        self._metrics = metrics

    async def report(self, request: rollout_pb2.ReportRewardsRequest) -> int:
        """Returns how many of the rewards belong to finished samples of the batch; others are ignored."""
        if violations := check_report(request):
            raise InvalidArgument(violations)
        key = (request.run_id, request.batch_id)
        recorded = await self._journal.recorded(key)
        if recorded is None:
            raise NotFound("batch", "/".join(key))
        exactness = recorded.request.exactness
        lenient = exactness.level == sample_pb2.EXACTNESS_LEVEL_LENIENT
        if lenient and exactness.HasField("kl_target") and request.HasField("kl"):
            used = FLOOR if recorded.lenience is None else recorded.lenience
            await self._leniences.report(key, used, request.kl, exactness.kl_target)
        matched = known(recorded, request.rewards)
        self._measure(request, [reward.reward for reward in matched])
        if self._feed is not None:
            self._feed.reward(key, matched)
        return len(matched)

    def _measure(self, request: rollout_pb2.ReportRewardsRequest, rewards: list[float]) -> None:
        measured = {}
        if rewards:
            measured["reward"] = sum(rewards) / len(rewards)
        if request.HasField("kl"):
            measured["reported_kl"] = request.kl
        if request.HasField("clip_fraction"):
            measured["reported_clip_fraction"] = request.clip_fraction
        self._metrics.runs.show(request.run_id, time.time(), **measured)


def known(recorded: Recorded, rewards: Iterable[rollout_pb2.Reward]) -> list[rollout_pb2.Reward]:
    """The rewards whose sample has ended."""
    # prompt id -> index of the group's first sample, and how many the group has
    groups: dict[str, tuple[int, int]] = {}
    first = 0
    for group in recorded.request.groups:
        groups[group.prompt_id] = (first, group.samples)
        first += group.samples
    found = []
    for reward in rewards:
        begin, samples = groups.get(reward.prompt_id, (0, 0))
        if reward.slot < samples and begin + reward.slot in recorded.done:
            found.append(reward)
    return found
