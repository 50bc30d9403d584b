"""A run whose open batches are in memory: their samples end as soon as they are added."""

from __future__ import annotations

import queue
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np

from paceline import FinishReason, Group, Provenance, Sample, SampleStatus, VersionSpan

WAIT = 30.0


def sample(prompt_id: str, slot: int, **changed: Any) -> Sample:
    values: dict[str, Any] = {
        "token_ids": np.array([slot + 3, 2]),
        "logprobs": np.array([-0.5, -0.25], dtype=np.float32),
        "finish_reason": FinishReason.STOP,
        "status": SampleStatus.COMPLETED,
        "version_spans": (VersionSpan(0, 1, 4), VersionSpan(1, 2, 7)),
        "provenance": Provenance(),
        "seed": 0,
    }
    return Sample(prompt_id=prompt_id, slot=slot, **values | changed)


class BatchInMemory:
    """An open batch."""

    def __init__(self, run: RunInMemory, step: int) -> None:
        self.run, self.step = run, step
        self.groups: list[Group] = []
        self.acked = 0
        self.rewards: list[Any] = []
        self.ended: queue.Queue[Sample | None] = queue.Queue()
        self.given = 0

    def add(self, groups: Sequence[Group]) -> int:
        if self.run.refuses:
            raise self.run.refuses.pop()
        self.groups += groups
        for group in groups:
            for slot in reversed(range(group.samples)):
                self.ended.put(self.run.make(group.prompt_id, slot))
        return len(groups)

    def __iter__(self) -> Iterator[Sample]:
        while (each := self.ended.get(timeout=WAIT)) is not None:
            self.given += 1
            yield each

    def close(self) -> int:
        self.run.closed.append(self.step)
        self.ended.put(None)
        return 0

    def cancel(self) -> int:
        self.run.cancelled.append(self.step)
        self.ended.put(None)
        return 0

    def report_rewards(self, rewards: Sequence[Any]) -> int:
        self.rewards += rewards
        return len(rewards)

    def ack(self) -> int:
        self.acked = self.given
        return 0


class RunInMemory:
    """A run whose batches are in memory."""

    def __init__(self, make: Callable[[str, int], Sample] = sample) -> None:
        self.make = make
        self.batches: list[BatchInMemory] = []
        self.closed: list[int] = []
        self.cancelled: list[int] = []
        self.refuses: list[Exception] = []
        """Errors of the calls of `add` to come."""
        self.options: dict[str, Any] = {}

    @contextmanager
    def open_batch(self, step: int, sampling: object, **options: Any) -> Iterator[BatchInMemory]:
        self.options = options
        batch = BatchInMemory(self, step)
        self.batches.append(batch)
        yield batch
        batch.close()

    def steps(self) -> list[tuple[int, list[list[int]]]]:
        return [(each.step, [list(g.prompt_token_ids) for g in each.groups]) for each in self.batches]
