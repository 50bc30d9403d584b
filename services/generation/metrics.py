"""Prometheus metrics of an instance."""

from __future__ import annotations

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram

from paceline.v1 import fleet_pb2

_STEP_BUCKETS = (0.001, 0.002, 0.004, 0.006, 0.008, 0.012, 0.016, 0.024, 0.032, 0.05, 0.1, 0.2, 0.5, 1, 5)


class EngineMetrics:
    """What the engine thread reports. Names follow Prometheus's conventions; units are seconds and ratios."""

    def __init__(self, registry: CollectorRegistry) -> None:
        prefix = "paceline_generation_"
        self.steps = Histogram(
            f"{prefix}step_seconds", "Engine step time.", buckets=_STEP_BUCKETS, registry=registry
        )
        self.tokens = Counter(f"{prefix}tokens_total", "Tokens generated.", registry=registry)
        self.running = Gauge(f"{prefix}running_samples", "Samples in the running batch.", registry=registry)
        self.waiting = Gauge(f"{prefix}waiting_samples", "Samples waiting for the engine.", registry=registry)
        self.kv_usage = Gauge(
            f"{prefix}kv_usage_ratio", "Share of KV blocks in use, 0 to 1.", registry=registry
        )
        self.policy_version = Gauge(
            f"{prefix}policy_version", "Policy version of the weights that are served.", registry=registry
        )
        self.weight_seconds = Histogram(
            f"{prefix}weight_seconds", "Time to stage or apply weights.", ["phase"], registry=registry
        )

    def step(self, seconds: float, tokens: int, samples: int) -> None:
        """Count one engine step."""
        self.steps.observe(seconds)
        self.tokens.inc(tokens)
        self.running.set(samples)

    def load(self, load: fleet_pb2.InstanceLoad) -> None:
        """Publish the load of this moment."""
        self.running.set(load.running)
        self.waiting.set(load.waiting)
        self.kv_usage.set(load.kv_usage)
