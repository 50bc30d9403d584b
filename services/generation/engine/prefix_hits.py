"""Context of samples whose KV was there when they entered the engine.

vLLM counts this for requests that begin with their prompt only, and a sample that resumes is a preempted one to it.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any


class PrefixHits:
    """Tokens that each sample's first scheduling found in the prefix cache."""

    def __init__(self, scheduler: Any) -> None:
        """Watch what this scheduler of vLLM finds by its KV cache manager."""
        manager = scheduler.kv_cache_manager
        self._requests = scheduler.requests
        self._find = manager.get_computed_blocks
        self._hits: dict[str, int] = {}
        manager.get_computed_blocks = self._watched

    def _watched(self, request: Any) -> Any:
        found = self._find(request)
        # The last look before a sample runs is the one that counts. Samples that arrive with KV are not queued.
        if request.request_id in self._requests:
            self._hits[request.request_id] = found[1]
        return found

    def take(self, sample_id: str) -> int | None:
        """Return the tokens of a sample that has just run for the first time; None for any other."""
        return self._hits.pop(sample_id, None) if self._hits else None

    def forget(self, sample_ids: Iterable[str]) -> None:
        """Forget samples that may not have run."""
        for sample_id in sample_ids:
            self._hits.pop(sample_id, None)
