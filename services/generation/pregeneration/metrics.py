"""Prometheus metrics of pre-generation on an instance."""

from __future__ import annotations

from services.generation.loop.metrics import DELAY_BUCKETS
from services.platform.observability.metric_set import MetricSet, counter, gauge, histogram


class PregenerationMetrics(MetricSet, prefix="paceline_generation_"):
    """Metrics of bubbles, beside those of background samples in the engine loop."""

    asleep = gauge("asleep", "1 while the device is left to the trainer.")
    samples = counter(
        "pregenerated_samples_total",
        "Samples of a coming step by how they ended: finished, partial (with tokens), empty.",
        "outcome",
    )
    forks = counter("pregenerated_forks_total", "Forks of pre-generated samples that were begun.")
    halts = histogram(
        "halt_delay_seconds",
        "Time from the end of the step (by the gateway's clock) until pre-generation had stopped.",
        DELAY_BUCKETS,
    )
    update_halt_seconds = histogram(
        "update_halt_seconds",
        "Time from the call for a weight update until pre-generation had stopped.",
        DELAY_BUCKETS,
    )
    polls = counter(
        "bubble_polls_total", "Polls of the coordinator: answered, interrupted, failed.", "outcome"
    )
    puts = counter(
        "draft_puts_total", "Rollouts sent to the draft store: stored, or else refused or lost.", "outcome"
    )
    put_tokens = counter("draft_put_tokens_total", "Tokens of these rollouts.")

    def ended(self, finished: bool, tokens: int) -> None:
        """Count a sample of a coming step that ended with so many tokens."""
        self.samples.labels("finished" if finished else "partial" if tokens else "empty").inc()

    def put(self, rollouts: int, stored: int, tokens: int) -> None:
        """Count rollouts that were sent to the store, which took `stored` of them."""
        self.puts.labels("stored").inc(stored)
        self.puts.labels("lost").inc(rollouts - stored)
        self.put_tokens.inc(tokens)
