"""Prometheus metrics of the HTTP facade, beside those of requests, which are counted as RPCs are."""

from __future__ import annotations

from services.platform.observability.metric_set import MetricSet, counter, gauge

OUTCOMES = ("published", "failed")
"""Outcomes of a weight update."""


class FacadeMetrics(MetricSet, prefix="paceline_facade_"):
    """All metrics of the facade."""

    samples_in_flight = gauge("samples_in_flight", "Samples of requests that are in work.")
    paused = gauge("paused", "1 while requests wait for the end of a pause.")
    updates = counter(
        "weight_updates_total", "Weight updates by folder, by outcome.", "outcome", values=OUTCOMES
    )
    disconnects = counter("disconnects_total", "Requests whose client left before the answer.")
    tokens = counter("tokens_total", "Tokens of answers.", "dialect", values=("vllm", "sglang", "trl"))
