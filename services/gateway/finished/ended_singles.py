"""Samples of Generate calls that have ended, so that their rewards are known as theirs. Pure."""

from collections import OrderedDict
from collections.abc import Iterable

from paceline.v1 import rollout_pb2
from services.gateway.batches.rollout_batch import RolloutBatch


class EndedSingles:
    """Names of the last samples of Generate calls that were completed or truncated.

    In memory alone: a report on what a former gateway has generated is not matched, which costs the drafter rewards
    to learn from and nothing else.
    """

    def __init__(self, most: int = 1 << 17) -> None:
        """Remember the last `most` samples."""
        self._most = most
        self._names: OrderedDict[tuple[str, int, str, int], None] = OrderedDict()

    def add(self, batch: RolloutBatch, index: int) -> None:
        """Remember a sample that has ended."""
        name = (batch.key[0], batch.step, batch.group_of(index).prompt_id, batch.samples[index].slot)
        self._names[name] = None
        self._names.move_to_end(name)
        if len(self._names) > self._most:
            self._names.popitem(last=False)

    def known(
        self, run_id: str, step: int, rewards: Iterable[rollout_pb2.Reward]
    ) -> list[rollout_pb2.Reward]:
        """Return the rewards whose sample is remembered."""
        return [each for each in rewards if (run_id, step, each.prompt_id, each.slot) in self._names]
