"""Decodes a batch of known texts on a device of known step times."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from bench.known_texts import DecodingCounts, KnownText, TextInstance
from services.contracts.rollout import StoredRollout
from services.simulator.device_tables import DeviceTable


@dataclass(frozen=True, slots=True)
class DecodedBatch:
    """A batch as it was decoded; `seconds` are by the device's table."""

    counts: DecodingCounts
    seconds: float

    @property
    def tokens_per_step(self) -> float:
        """Tokens of a decode step of a sample."""
        return self.counts.tokens / self.counts.steps


def decode(
    texts: Sequence[KnownText], rollouts: Sequence[StoredRollout], device: DeviceTable, vocabulary: int
) -> DecodedBatch:
    """Decode a batch, with drafts from references and from these earlier rollouts."""
    instance = TextInstance(device, vocabulary, _capacity(texts, rollouts))
    for place, text in enumerate(texts):
        instance.begin(str(place), text)
    instance.know(rollouts)
    seconds = 0.0
    while len(instance):
        seconds += instance.step().seconds
    return DecodedBatch(instance.counts, seconds)


def plain_seconds(texts: Sequence[KnownText], device: DeviceTable) -> float:
    """Return the time of decoding a batch one token at a time."""
    lengths = np.sort([len(text.response) for text in texts])
    seconds = 0.0
    for position in range(int(lengths[-1])):
        n = int((lengths > position).sum())
        seconds += device.seconds(n, n, n * (position + 1))
    return seconds


def _capacity(texts: Sequence[KnownText], rollouts: Sequence[StoredRollout]) -> int:
    return (
        4 * sum(len(each.response) for each in texts) + 4 * sum(len(each.tokens) for each in rollouts) + 4096
    )
