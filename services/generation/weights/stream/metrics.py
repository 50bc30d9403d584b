"""Metrics of weights that an instance receives and serves."""

from __future__ import annotations

from services.platform.observability.metrics import MetricSet, counter

TRAINER, INSTANCE = "trainer", "instance"


class WeightStreamMetrics(MetricSet, prefix="paceline_generation_weight_stream_"):
    """Bytes of weights by the other side."""

    received = counter(
        "received_bytes_total", "Bytes of weights received, by sender.", "peer", values=(TRAINER, INSTANCE)
    )
    sent = counter("sent_bytes_total", "Bytes of weights sent, by receiver.", "peer", values=(INSTANCE,))
    retries = counter("retries_total", "Broken transfers that resumed at their position.")
