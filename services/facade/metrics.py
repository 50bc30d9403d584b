"""Prometheus metrics of the HTTP facade; its requests are counted by the metrics of RPCs."""

from __future__ import annotations

from services.platform.observability.metrics import MetricSet, counter, gauge

OUTCOMES = ("published", "failed")
"""Outcomes of a weight update."""
ENDINGS = ("header", "idle", "body", "reader", "ending", "crowded", "refused")
"""Reasons for which the server ends a connection."""


class FacadeMetrics(MetricSet, prefix="paceline_facade_"):
    """All metrics of the facade."""

    samples_in_flight = gauge("samples_in_flight", "Samples of unfinished requests.")
    paused = gauge("paused", "1 while paused: requests wait.")
    updates = counter(
        "weight_updates_total", "Weight updates by folder, by outcome.", "outcome", values=OUTCOMES
    )
    disconnects = counter("disconnects_total", "Requests whose client left before the answer.")
    forecasts = counter(
        "forecasts_total",
        "Forecast steps: announced to the gateway; failed, where this was impossible; missed, where less than "
        "half of their prompts came.",
        "outcome",
        values=("announced", "failed", "missed"),
    )
    tokens = counter("tokens_total", "Tokens of answers.", "dialect", values=("vllm", "sglang", "trl"))
    connections_ended = counter(
        "connections_ended_total",
        "Connections that the server ended: deadline of a header, an idle one, a body, a reader, or an ending; "
        "crowded (for a new one); refused (no place).",
        "reason",
        values=ENDINGS,
    )
