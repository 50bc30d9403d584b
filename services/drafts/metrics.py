"""Prometheus metrics of a replica of the draft store."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

from prometheus_client import CollectorRegistry

from services.contracts.rollout import RolloutKind
from services.drafts.store import Cause, DraftStore
from services.platform.observability.metric_set import MetricSet, counter, gauge, histogram

_SECONDS = (0.01, 0.05, 0.1, 0.5, 1, 2.5, 5, 10, 30, 60)


class DraftStoreMetrics(MetricSet, prefix="paceline_drafts_"):
    """All metrics of a replica."""

    prompts = gauge("prompts", "Prompts that have rollouts.")
    tokens = gauge("tokens", "Tokens stored.")
    bytes = gauge("bytes", "Bytes charged for what is stored.")
    budget_bytes = gauge("budget_bytes", "Most bytes that may be stored.")
    snapshot_at = gauge("snapshot_timestamp_seconds", "Unix time of the last snapshot; 0: none.")
    rollouts = gauge("rollouts", "Rollouts stored, by kind.", "kind")
    puts = counter("puts_total", "Rollouts put, by outcome: stored or refused.", "outcome")
    fetches = counter("fetches_total", "Shards fetched.")
    prompts_fetched = counter("prompts_fetched_total", "Prompts queried, by outcome: hit or miss.", "outcome")
    tokens_fetched = counter("tokens_fetched_total", "Tokens sent in answer to fetches.")
    snapshot_failures = counter("snapshot_failures_total", "Snapshots that could not be written.")
    snapshot_seconds = histogram("snapshot_seconds", "Time to write a snapshot.", _SECONDS)
    removals = counter("removals_total", "Rollouts removed, by cause.", "cause", values=Cause)

    def __init__(
        self, registry: CollectorRegistry, store: DraftStore, snapshot_at: Callable[[], float]
    ) -> None:
        """`snapshot_at` returns the unix time of the last snapshot."""
        super().__init__(registry)
        self._store = store
        self._reported = dict.fromkeys(Cause, 0)
        self.snapshot_at.set_function(snapshot_at)
        for name in ("prompts", "tokens", "bytes", "budget_bytes"):
            getattr(self, name).set_function(partial(getattr, store, name))
        for kind in RolloutKind:
            self.rollouts.labels(kind.value).set_function(partial(store.rollouts.__getitem__, kind))

    def count_removals(self) -> None:
        """Bring the counter of removals up to date, after a call that may remove rollouts."""
        for cause, reported in self._reported.items():
            self.removals.labels(cause.value).inc(self._store.removed[cause] - reported)
            self._reported[cause] = self._store.removed[cause]
