"""Whole groups of a batch that grows while it is read."""

from __future__ import annotations

from collections import deque
from collections.abc import AsyncGenerator

from paceline import Group
from paceline import types as t
from paceline.batches.rollout import AsyncOpenBatch
from paceline.convert import rollouts
from paceline.v1 import sample_pb2
from tests.support.token_columns import columns


class GrowingRollout(AsyncOpenBatch):
    """A batch to which a group is added only after all samples of the group were read."""

    def __init__(self, samples: list[t.Sample], late: Group) -> None:
        self._gathered, self._wanted, self._whole = {}, {}, deque()
        self._samples, self._late, self._given_all = samples, late, False

    async def __aiter__(self) -> AsyncGenerator[t.Sample, None]:
        for sample in self._samples:
            yield sample
        self._want([self._late])


async def test_a_group_that_is_known_late_is_given_at_the_end() -> None:
    messages = [sample_pb2.Sample(prompt_id="p0", slot=slot, tokens=columns([1], [0])) for slot in (1, 0)]
    samples = [rollouts.sample(message) for message in messages]
    groups = [group async for group in GrowingRollout(samples, Group("p0", [1, 2], 2)).by_group()]
    assert [[sample.slot for sample in group] for group in groups] == [[0, 1]]
