"""Finished samples in memory until they are acknowledged.

They are delivered from here, and written again if Redis loses them.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable

from services.contracts.gateway_keys import BatchKey


class ResultCache:
    """Serialised samples of all batches, at most `most_bytes`, above which the oldest are dropped. Pure."""

    def __init__(self, most_bytes: int) -> None:
        self._most_bytes = most_bytes
        self._results: OrderedDict[tuple[BatchKey, int], bytes] = OrderedDict()
        self.nbytes = 0
        """Bytes of all samples that are kept."""

    def put(self, key: BatchKey, index: int, payload: bytes) -> None:
        """Keep a sample, if it fits."""
        self.drop(key, (index,))
        self._results[key, index] = payload
        self.nbytes += len(payload)
        while self.nbytes > self._most_bytes:
            _, oldest = self._results.popitem(last=False)
            self.nbytes -= len(oldest)

    def get(self, key: BatchKey, index: int) -> bytes | None:
        """Return a sample, if it is kept."""
        return self._results.get((key, index))

    def drop(self, key: BatchKey, indexes: Iterable[int]) -> None:
        """Drop samples of a batch."""
        for index in indexes:
            self.nbytes -= len(self._results.pop((key, index), b""))
