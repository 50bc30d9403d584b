"""Prometheus metrics of the rollouts that an instance gets from the draft store, and of the index over them."""

from __future__ import annotations

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram

_FETCH_BUCKETS = (0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1, 2)


class RolloutMetrics:
    """What fetching, caching and indexing rollouts did and cost."""

    def __init__(self, registry: CollectorRegistry) -> None:
        prefix = "paceline_drafts_"
        self.fetch_seconds = Histogram(
            f"{prefix}fetch_seconds",
            "Time to fetch the rollouts of some prompts.",
            buckets=_FETCH_BUCKETS,
            registry=registry,
        )
        self.fetch_failures = Counter(
            f"{prefix}fetch_failures_total",
            "Fetches that the draft store did not answer, for some of their prompts at least.",
            registry=registry,
        )
        self.fetched_rollouts = Counter(
            f"{prefix}fetched_rollouts_total", "Rollouts fetched.", registry=registry
        )
        self.fetched_tokens = Counter(f"{prefix}fetched_tokens_total", "Tokens of these.", registry=registry)
        self.waits_expired = Counter(
            f"{prefix}waits_expired_total",
            "Lenient samples that started without waiting any longer for their cached rollouts.",
            registry=registry,
        )
        self.cache_bytes = Gauge(f"{prefix}cache_bytes", "Rollouts held in memory.", registry=registry)
        labels = ["phase"]
        self.index_seconds = Counter(
            f"{prefix}index_seconds_total",
            "Time spent in the index of the suffix drafter: insert of rollouts that arrived; step of running"
            " samples, with what it offers them.",
            labels,
            registry=registry,
        )
        self.index_tokens = Counter(
            f"{prefix}index_tokens_total", "Tokens put into that index.", labels, registry=registry
        )

    def fetched(self, seconds: float, rollouts: int, tokens: int) -> None:
        """Count a fetch that was answered."""
        self.fetch_seconds.observe(seconds)
        self.fetched_rollouts.inc(rollouts)
        self.fetched_tokens.inc(tokens)

    def indexed(self, phase: str, seconds: float, tokens: int) -> None:
        """Count work of the index."""
        self.index_seconds.labels(phase).inc(seconds)
        self.index_tokens.labels(phase).inc(tokens)
