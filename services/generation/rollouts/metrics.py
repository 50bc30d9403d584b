"""Prometheus metrics of an instance's cached rollouts, and of the index over them."""

from __future__ import annotations

from services.platform.observability.metric_set import MetricSet, counter, gauge, histogram

_FETCH_BUCKETS = (0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1, 2)


class RolloutMetrics(MetricSet, prefix="paceline_drafts_"):
    """Metrics of fetching, caching and indexing rollouts."""

    fetch_seconds = histogram("fetch_seconds", "Time to fetch the rollouts of some prompts.", _FETCH_BUCKETS)
    fetch_failures = counter(
        "fetch_failures_total",
        "Fetches that the draft store did not answer, for some of their prompts at least.",
    )
    fetched_rollouts = counter("fetched_rollouts_total", "Rollouts fetched.")
    fetched_tokens = counter("fetched_tokens_total", "Tokens of these.")
    waits_expired = counter(
        "waits_expired_total",
        "Lenient samples that started without waiting any longer for their cached rollouts.",
    )
    cache_bytes = gauge("cache_bytes", "Rollouts held in memory.")
    index_seconds = counter(
        "index_seconds_total",
        "Time spent in the index of the suffix drafter: insert of rollouts that arrived; step of running"
        " samples, with its proposals for them.",
        "phase",
    )
    index_tokens = counter("index_tokens_total", "Tokens put into that index.", "phase")

    def fetched(self, seconds: float, rollouts: int, tokens: int) -> None:
        """Count a fetch that was answered."""
        self.fetch_seconds.observe(seconds)
        self.fetched_rollouts.inc(rollouts)
        self.fetched_tokens.inc(tokens)

    def indexed(self, phase: str, seconds: float, tokens: int) -> None:
        """Count work of the index."""
        self.index_seconds.labels(phase).inc(seconds)
        self.index_tokens.labels(phase).inc(tokens)
