"""Prometheus metrics of the 4-bit twin."""

from __future__ import annotations

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram

_REFRESH_BUCKETS = (0.01, 0.03, 0.1, 0.3, 1, 3, 10, 30)


class SelfDraftMetrics:
    """What the twin costs. Used by the engine thread only."""

    def __init__(self, registry: CollectorRegistry) -> None:
        prefix = "paceline_self_w4_"
        self.refresh_seconds = Histogram(
            f"{prefix}refresh_seconds",
            "Making the 4-bit weights anew after an update: time spent on it (work), time until then (wall).",
            ["time"],
            buckets=_REFRESH_BUCKETS,
            registry=registry,
        )
        self.gain = Gauge(
            f"{prefix}predicted_gain_ratio",
            "Predicted tokens a second over doing without the twin, of the latest step; 1: it was not run.",
            registry=registry,
        )
        self.memory_bytes = Gauge(f"{prefix}memory_bytes", "Memory of the 4-bit weights.", registry=registry)
        self.draft_tokens = Counter(f"{prefix}draft_tokens_total", "Tokens drafted.", registry=registry)
        self.draft_steps = Counter(f"{prefix}draft_steps_total", "Draft steps.", registry=registry)
        self.draft_seconds = Counter(
            f"{prefix}draft_seconds_total", "Time of draft steps.", registry=registry
        )

    def built(self, work: float, wall: float, nbytes: int) -> None:
        """The 4-bit weights are there; in `wall` seconds, of which `work` were spent on them. 0: from the start."""
        self.memory_bytes.set(nbytes)
        if wall:
            self.refresh_seconds.labels("work").observe(work)
            self.refresh_seconds.labels("wall").observe(wall)

    def decided(self, gain: float) -> None:
        """Running the twin promises this factor; 1: it is not run, or nothing is known of times."""
        self.gain.set(gain)

    def drafted(self, tokens: int, steps: int, seconds: float) -> None:
        """So many tokens in so many draft steps, one of each sample a step."""
        self.draft_tokens.inc(tokens)
        self.draft_steps.inc(steps)
        self.draft_seconds.inc(seconds)
