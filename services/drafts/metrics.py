"""What a replica of the draft store tells Prometheus."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram

from services.drafts.rollout import Kind
from services.drafts.store import Cause, DraftStore

_SECONDS = (0.01, 0.05, 0.1, 0.5, 1, 2.5, 5, 10, 30, 60)


class DraftMetrics:
    """All metrics of a store, in one registry."""

    def __init__(
        self, registry: CollectorRegistry, store: DraftStore, snapshot_at: Callable[[], float]
    ) -> None:
        """`snapshot_at` says when the last snapshot was taken, in unix seconds."""

        def counter(name: str, text: str, *labels: str) -> Counter:
            return Counter(f"paceline_drafts_{name}", text, labels, registry=registry)

        def gauge(name: str, text: str, value: Callable[[], float]) -> None:
            Gauge(f"paceline_drafts_{name}", text, registry=registry).set_function(value)

        gauge("prompts", "Prompts that have rollouts.", lambda: store.prompts)
        gauge("tokens", "Tokens stored.", lambda: store.tokens)
        gauge("bytes", "Bytes charged for what is stored.", lambda: store.bytes)
        gauge("budget_bytes", "Most bytes that may be stored.", lambda: store.budget_bytes)
        gauge("snapshot_timestamp_seconds", "Unix time of the last snapshot; 0: none.", snapshot_at)
        rollouts = Gauge("paceline_drafts_rollouts", "Rollouts stored, by kind.", ["kind"], registry=registry)
        for kind in Kind:
            rollouts.labels(kind.value).set_function(partial(store.rollouts.__getitem__, kind))
        self.puts = counter("puts_total", "Rollouts put, by outcome: stored or refused.", "outcome")
        self.fetches = counter("fetches_total", "Shards fetched.")
        self.prompts_fetched = counter("prompts_fetched_total", "Prompts asked for: hit or miss.", "outcome")
        self.tokens_fetched = counter("tokens_fetched_total", "Tokens sent to those who fetched.")
        self.snapshot_failures = counter("snapshot_failures_total", "Snapshots that could not be written.")
        self.snapshot_seconds = Histogram(
            "paceline_drafts_snapshot_seconds",
            "Writing a snapshot.",
            registry=registry,
            buckets=_SECONDS,
        )
        self._removals = counter("removals_total", "Rollouts removed, by cause.", "cause")
        self._store = store
        self._reported = dict.fromkeys(Cause, 0)
        self.count_removals()

    def count_removals(self) -> None:
        """Brings the counter of removals up to date; to be called after what may remove."""
        for cause, reported in self._reported.items():
            self._removals.labels(cause.value).inc(self._store.removed[cause] - reported)
            self._reported[cause] = self._store.removed[cause]
