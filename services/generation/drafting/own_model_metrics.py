"""Prometheus metrics of the drafters that have a model of their own."""

from __future__ import annotations

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram

from services.generation.engine.types import EAGLE3, SELF_W4

_REFRESH_BUCKETS = (0.01, 0.03, 0.1, 0.3, 1, 3, 10, 30)


class OwnModelMetrics:
    """What one such drafter costs. Used by the engine thread only."""

    def __init__(self, registry: CollectorRegistry, name: str, what: str) -> None:
        """`what`: the model, in words."""
        self._prefix, self._registry = f"paceline_{name}_", registry
        self.gain = self._gauge(
            "predicted_gain_ratio",
            f"Predicted tokens a second over doing without {what}, of the latest step; 1: it was not run.",
        )
        self.memory_bytes = self._gauge("memory_bytes", f"Memory of the weights of {what}.")
        self.draft_tokens = self._counter("draft_tokens_total", "Tokens drafted.")
        self.draft_steps = self._counter("draft_steps_total", "Draft steps.")
        self.draft_seconds = self._counter("draft_seconds_total", "Time of draft steps.")

    def built(self, work: float, wall: float, nbytes: int) -> None:
        """The model is ready; in `wall` seconds, of which `work` were spent on it. 0: from the start."""
        self.memory_bytes.set(nbytes)

    def decided(self, gain: float) -> None:
        """Running the model promises this factor; 1: it is not run, or nothing is known of times."""
        self.gain.set(gain)

    def drafted(self, tokens: int, steps: int, seconds: float, caught_up: int) -> None:
        """So many tokens in so many draft steps, one of each sample a step; after reading so many others."""
        self.draft_tokens.inc(tokens)
        self.draft_steps.inc(steps)
        self.draft_seconds.inc(seconds)

    def swapped(self, version: int) -> None:
        """Its weights are of this version."""

    def _gauge(self, name: str, text: str) -> Gauge:
        return Gauge(self._prefix + name, text, registry=self._registry)

    def _counter(self, name: str, text: str) -> Counter:
        return Counter(self._prefix + name, text, registry=self._registry)


class SelfW4Metrics(OwnModelMetrics):
    """Of the 4-bit twin, which is made anew with every policy version."""

    def __init__(self, registry: CollectorRegistry) -> None:
        super().__init__(registry, SELF_W4, "the 4-bit twin")
        self.refresh_seconds = Histogram(
            f"{self._prefix}refresh_seconds",
            "Making the 4-bit weights anew after an update: time spent on it (work), time until then (wall).",
            ["time"],
            buckets=_REFRESH_BUCKETS,
            registry=registry,
        )

    def built(self, work: float, wall: float, nbytes: int) -> None:
        """See above."""
        super().built(work, wall, nbytes)
        if wall:
            self.refresh_seconds.labels("work").observe(work)
            self.refresh_seconds.labels("wall").observe(wall)


class Eagle3Metrics(OwnModelMetrics):
    """Of the head that is trained online, which has a version of its own."""

    def __init__(self, registry: CollectorRegistry) -> None:
        super().__init__(registry, EAGLE3, "the eagle3 head")
        self.version = self._gauge(
            "drafter_version", "Version of the eagle3 head that drafts; 0: the one it was started with."
        )
        self.swaps = self._counter(
            "swaps_total", "Heads that took the place of another in the running engine."
        )
        self.refused = self._counter(
            "refused_total", "Heads that were refused: broken, or not for this model."
        )
        self.caught_up = self._counter(
            "caught_up_tokens_total",
            "Tokens that the head read before drafting, those that a step had added included.",
        )

    def drafted(self, tokens: int, steps: int, seconds: float, caught_up: int) -> None:
        """See above."""
        super().drafted(tokens, steps, seconds, caught_up)
        self.caught_up.inc(caught_up)

    def swapped(self, version: int) -> None:
        """See above."""
        self.version.set(version)
        self.swaps.inc()
